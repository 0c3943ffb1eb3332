"""Conversations into tokens: rendered once, tokenised once, with the loss mask taken from where the turns are in that text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from accord.data.chat_templates import adds_bos, set_template
from accord.data.records import Message
from accord.data.rendering import Rendered, Renderer
from accord.data.trees import Segment, Tree, single
from accord.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# What tokenizers take for white space: Unicode's property, which is not all that str.strip removes.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
TrainOn = Literal["assistant", "last", "all"]


class ConversationEncoder:
    """Turns conversations into token trees for one tokenizer and one chat template.

    Text is text: special tokens are special where the template writes them; the same strings inside a message are ordinary text.
    BOS is present once if the template or the tokenizer writes one. A final answer ends with what the template writes there
    (`<|im_end|>` …) and nothing after it; EOS is appended only if the template writes no such token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None):
        """`template`: see `set_template`. Raises ConfigError for a tokenizer or template that can't be used."""
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"the tokenizer {type(tokenizer).__name__} has no fast version (character offsets are needed). Convert it to tokenizer.json."
            )
        self.tokenizer = tokenizer
        self.template_name = set_template(tokenizer, template)
        self.renderer = Renderer(tokenizer, self.template_name)
        self._backend = _plain_backend(tokenizer)
        self._adds_bos = adds_bos(tokenizer)
        self._bos_id: int | None = tokenizer.bos_token_id
        self._eos_id: int | None = tokenizer.eos_token_id
        self._special = self._special_pattern()
        end = self.renderer.end_token
        if end is None and self._eos_id is None:
            raise ConfigError(
                f"{self.template_name} writes no token after an answer and the tokenizer has no EOS: nothing could end one."
            )
        self.end_token_id: int = self._token_id(end) if end is not None else int(self._eos_id or 0)
        self.stop_token_ids: list[int] = [self.end_token_id]
        if self._eos_id is not None and self._eos_id != self.end_token_id:
            self.stop_token_ids.append(self._eos_id)

    # --- what the trainers ask for ---

    def encode(self, messages: Sequence[Message], train_on: TrainOn = "assistant") -> Tree:
        """One segment. Trained: every assistant turn with what ends it, the last one only, or all tokens but the first.

        Raises DataError if the conversation doesn't end with an assistant turn or the template refuses it.
        """
        rendered, ids, starts, ends = self._whole(messages)
        if train_on == "all":
            trained = np.ones(len(ids), dtype=bool)
        else:
            trained = np.zeros(len(ids), dtype=bool)
            turns = [turn for turn in rendered.turns if turn.role == "assistant"]
            for turn in turns[-1:] if train_on == "last" else turns:
                trained |= (ends > turn.start) & (starts < turn.end)
            if self.renderer.end_token is None:  # the appended EOS
                trained[-1] = True
        trained[0] = False  # nothing comes before it to predict it from
        return Tree((Segment(ids, trained),))

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The prompt's tokens up to where the answer begins (with the template's generation prompt)."""
        rendered = self.renderer.render(messages, generation_prompt=True)
        ids, _, _ = self._tokenise(rendered, len(rendered.text))
        return [int(token) for token in ids]

    def encode_responses(self, prompt: Sequence[Message], responses: Sequence[str]) -> Tree:
        """prompt → {responses}: each conversation tokenised whole, then the shared beginning cut off.

        The shared segment is the common token prefix, at most up to the prompt's end; a token that ends after the prompt's last
        character belongs to the response. Every token of a response is trained.
        """
        encoded: list[tuple[np.ndarray, int]] = []
        for response in responses:
            rendered, ids, _, ends = self._whole((*prompt, Message("assistant", response)))
            after = ends > rendered.turns[-1].start
            after[-1] = True  # an appended EOS
            encoded.append((ids, int(np.argmax(after))))
        shared = min(border for _, border in encoded)
        first = encoded[0][0]
        for ids, _ in encoded[1:]:
            differs = np.flatnonzero(ids[:shared] != first[:shared])
            if len(differs):
                shared = int(differs[0])
        segments: list[Segment] = []
        if shared:
            segments.append(Segment(first[:shared], np.zeros(shared, dtype=bool)))
        for ids, border in encoded:
            trained = np.arange(shared, len(ids)) >= max(border, 1)
            segments.append(Segment(ids[shared:], trained, 0 if shared else -1))
        return Tree(tuple(segments))

    def encode_whole(self, messages: Sequence[Message], *, ended: bool = True) -> list[int]:
        """All that the template writes for a conversation, what follows its last turn included, as models trained elsewhere read it.

        `ended` False: the last turn was cut off, and nothing is written after its content.
        """
        rendered = self.renderer.render(messages)
        ids, _, _ = self._tokenise(rendered, len(rendered.text) if ended else rendered.turns[-1].content_end)
        return [int(token) for token in ids]

    def encode_answer(self, prompt: Sequence[Message], response: str) -> tuple[list[int], list[int], np.ndarray]:
        """(prompt tokens, response tokens, [M] how many characters of `response` have been read once each of the M tokens has been).

        The response's tokens are those of `encode_responses`, with what ends the turn; that has "read" |response| + 1 characters, so
        that every state inside the response, and the one at its end, comes before some token. What a template trims from the
        beginning counts as read with the first character that is left.
        """
        rendered, ids, _, ends = self._whole((*prompt, Message("assistant", response)))
        turn = rendered.turns[-1]
        after = ends > turn.start
        after[-1] = True  # an appended EOS
        border = max(int(np.argmax(after)), 1)
        content = rendered.text[turn.content_start : turn.content_end]
        trimmed = max(response.rfind(content), 0)
        read = np.where(ends > turn.content_start, trimmed + ends - turn.content_start, 0)
        read[ends > turn.content_end] = len(response) + 1
        read[-1] = len(response) + 1
        return ids[:border].tolist(), ids[border:].tolist(), read[border:]

    def encode_text(self, text: str) -> Tree:
        """A document for continued pre-training: BOS if the tokenizer writes one, the text, EOS; all trained but the first token."""
        ids = self._encode_plain(text)[0]
        if self._adds_bos and self._bos_id is not None:
            ids = [self._bos_id, *ids]
        if self._eos_id is not None:
            ids = [*ids, self._eos_id]
        trained = np.ones(len(ids), dtype=bool)
        trained[:1] = False
        return single(ids, [bool(t) for t in trained])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        text = self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def fingerprint(self) -> str:
        """Changes when the same messages could give other tokens (for the cache)."""
        probe = self.renderer.render([Message("user", "a"), Message("assistant", "b")]).text  # some templates write the date
        state = [self._backend.to_str(), str(self.tokenizer.chat_template), self._adds_bos, self._bos_id, self._eos_id, probe]
        return hashlib.blake2b(json.dumps(state).encode(), digest_size=16).hexdigest()

    # --- how ---

    def _whole(self, messages: Sequence[Message]) -> tuple[Rendered, np.ndarray, np.ndarray, np.ndarray]:
        """Rendered text and its tokens, up to the end of the last assistant turn: ids, character starts, character ends, each [L]."""
        if not messages or messages[-1].role != "assistant":
            raise DataError("the conversation must end with an assistant turn")
        rendered = self.renderer.render(messages)
        last = rendered.turns[-1]
        if self.renderer.end_token is not None:
            if last.end == last.content_end:
                raise DataError(f"{self.template_name} does not end this answer with {self.renderer.end_token} as it does others")
            return rendered, *self._tokenise(rendered, last.end)
        end = last.content_end + len(rendered.text[last.content_end :].rstrip())
        ids, starts, ends = self._tokenise(rendered, end)
        assert self._eos_id is not None
        return rendered, np.append(ids, np.int32(self._eos_id)), np.append(starts, end), np.append(ends, end)

    def _tokenise(self, rendered: Rendered, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids, starts, ends of rendered.text[:end], BOS in front if the tokenizer wants one and the template has written none."""
        text = rendered.text[:end]
        written = [match.span() for match in self._special.finditer(text)] if self._special else []
        if not _overlap(written, rendered.contents):
            encoding = self._backend.encode(text, add_special_tokens=False)
            ids, offsets = list(encoding.ids), list(encoding.offsets)
            if self._swallowing:  # the white space that such a token takes in is not where it ends: an answer may begin with it
                for i, token in enumerate(ids):
                    if string := self._swallowing.get(token):
                        start = text.index(string, *offsets[i])
                        offsets[i] = (start, start + len(string))
        else:
            ids, offsets = self._tokenise_pieces(text, rendered)
        if self._adds_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids, offsets = [self._bos_id, *ids], [(0, 0), *offsets]
        spans = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        return np.asarray(ids, dtype=np.int32), spans[:, 0], spans[:, 1]

    def _tokenise_pieces(self, text: str, rendered: Rendered) -> tuple[list[int], list[tuple[int, int]]]:
        """A message holds a special token's string: cut at the template's own special tokens and encode what lies between as text."""
        assert self._special is not None
        own: list[tuple[int, int]] = []
        bounds = [0, *(position for span in rendered.contents for position in span), len(text)]
        for start, end in zip(bounds[0::2], bounds[1::2], strict=True):  # the template's literals
            own.extend(match.span() for match in self._special.finditer(text, start, min(end, len(text))))
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        position = 0
        for start, end in [*own, (len(text), len(text))]:
            between = text[position:start].rstrip(_WHITE_SPACE) if text[start:end] in self._strips_left else text[position:start]
            if between:
                piece_ids, piece_offsets = self._encode_plain(between, inside=position > 0)
                ids += piece_ids
                offsets += [(a + position, b + position) for a, b in piece_offsets]
            position = end
            if end > start:
                token = text[start:end]
                ids.append(self._token_id(token))
                offsets.append((start, end))
                if token in self._strips_right:
                    position += len(text[position:]) - len(text[position:].lstrip(_WHITE_SPACE))
        return ids, offsets

    def _encode_plain(self, text: str, inside: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """`text` with every special string as ordinary text. `inside`: it follows a special token, so a tokenizer that puts a space
        before a text must not put one here."""
        self._backend.encode_special_tokens = True
        try:
            ids: list[int] = []
            offsets: list[tuple[int, int]] = []
            position = 0
            for cut in [*self._cuts(text), len(text)]:
                part = text[position:cut]
                anchor = "\n" if position or inside else ""
                if not self._prefixes_space or (self._prefixes_inside and not position):
                    anchor = ""
                encoding = self._backend.encode(anchor + part, add_special_tokens=False)
                for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
                    if end > len(anchor) or not anchor:
                        ids.append(token)
                        offsets.append((max(start - len(anchor), 0) + position, end - len(anchor) + position))
                position = cut
            return ids, offsets
        finally:
            self._backend.encode_special_tokens = False

    def _cuts(self, text: str) -> list[int]:
        """Places inside strings of tokens that the backend would match even as text (added tokens not marked special)."""
        if not self._unmarked:
            return []
        return [match.start() + 1 for match in self._unmarked.finditer(text) if match.end() - match.start() > 1]

    def _special_pattern(self) -> re.Pattern[str] | None:
        added = self._backend.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        unmarked = (self.renderer.structural_tokens() | set(self.tokenizer.all_special_tokens)) - special
        self._strips_right = {token.content for token in added if token.rstrip}
        self._strips_left = {token.content for token in added if token.lstrip}
        self._swallowing = {self._token_id(string): string for string in self._strips_right | self._strips_left}
        self._unmarked = _alternatives(unmarked)
        probe = self._backend.encode("a", add_special_tokens=False).tokens
        self._prefixes_space = probe[:1] != ["a"] and probe[0].startswith("▁")
        first = next(iter(sorted(special)), None)
        inside = self._backend.encode(f"{first}a", add_special_tokens=False).tokens if first else []
        self._prefixes_inside = len(inside) > 1 and inside[1].startswith("▁")
        return _alternatives(special | unmarked)

    def _token_id(self, token: str) -> int:
        number = self._backend.token_to_id(token)
        if number is None:
            raise DataError(f"the tokenizer has no token {token}")
        return int(number)


def _alternatives(tokens: set[str]) -> re.Pattern[str] | None:
    """Matches any of the strings, the longest first as tokenizers do."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=lambda t: (-len(t), t))))) if tokens else None


def _overlap(spans: Sequence[tuple[int, int]], contents: Sequence[tuple[int, int]]) -> bool:
    """Whether any of `spans` touches any of `contents` (both in order, neither overlapping itself)."""
    i = 0
    for start, end in spans:
        while i < len(contents) and contents[i][1] <= start:
            i += 1
        if i < len(contents) and contents[i][0] < end:
            return True
    return False


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the Rust tokenizer without truncation, padding and post-processing (which would trim the offsets of white space)."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state.update(post_processor=None, truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(state))
