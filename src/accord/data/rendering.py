"""A conversation as the chat template writes it, with the exact place of every turn in that text.

A template is a program: it may trim contents, add a default system prompt, merge the system text into a user turn or drop old
reasoning. What is its own text and what came from a message is learned from a *skeleton*: the same roles rendered with unique
markers in place of the contents. The real rendering is then walked along the skeleton's literals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accord.data.records import Message
from accord.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = "QzX{:05d}XzQ"
_MARKER_PATTERN = re.compile(r"QzX(\d{5})XzQ")


@dataclass(frozen=True, slots=True)
class Turn:
    """Where one message stands in the rendered text (character positions)."""

    role: str
    start: int  # where what the model itself writes begins: the end of the generation prompt
    content_start: int
    content_end: int
    end: int  # after the token that ends the turn; content_end where the template writes none


@dataclass(frozen=True, slots=True)
class Rendered:
    """`text` and its turns in the order of the messages. `contents`: the message contents' ranges in the order of the text."""

    text: str
    turns: tuple[Turn, ...]
    contents: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Skeleton:
    """What a template writes for a pattern of roles: literals[0] content literals[1] content … literals[n]."""

    literals: tuple[str, ...]
    order: tuple[int, ...]  # which message each content belongs to (a system text may be moved)
    opens: tuple[str, ...]  # per message: the literal that generation would start from (assistant turns; else "")


class Renderer:
    """Renders conversations with a tokenizer's chat template and finds the turns in them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str):
        """`name` is what error messages call the template. Raises DataError if it can't render a question and its answer."""
        self.tokenizer = tokenizer
        self.name = name
        self._skeletons: dict[tuple[tuple[str, ...], bool], Skeleton] = {}
        added = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self.end_token: str | None = self._find_end_token()

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> Rendered:
        """Raises DataError if the template refuses the messages or doesn't write their contents where they can be found."""
        text = self._apply([message.as_dict() for message in messages], generation_prompt)
        skeleton = self._skeleton(tuple(message.role for message in messages), generation_prompt)
        contents = [messages[i].content for i in skeleton.order]
        spans = self._walk(text, contents, skeleton) or self._search(text, contents, skeleton)
        turns: dict[int, Turn] = {}
        for k, i in enumerate(skeleton.order):
            before = spans[k - 1][1] if k else 0
            after = spans[k + 1][0] if k + 1 < len(spans) else len(text)
            start, end = spans[k]
            turns[i] = Turn(
                messages[i].role, self._start(text, before, start, skeleton.opens[i]), start, end, self._end(text, end, after)
            )
        return Rendered(text, tuple(turns[i] for i in range(len(messages))), tuple(spans))

    def structural_tokens(self) -> set[str]:
        """Added tokens that the template writes around turns; inside a content they are plain text."""
        found = set(self._tokens(self._skeleton(("user", "assistant", "user"), True).literals[0]))
        for literal in self._skeleton(("user", "assistant", "user"), True).literals[2:]:
            found.update(self._tokens(literal))
        return found | ({self.end_token} if self.end_token else set())

    # --- what the template writes ---

    def _apply(self, messages: list[dict[str, Any]], generation_prompt: bool) -> str:
        import jinja2

        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"{self.name} refuses a conversation of the roles {roles}: {error}") from error
        assert isinstance(text, str)
        return text

    def _skeleton(self, roles: tuple[str, ...], generation_prompt: bool) -> Skeleton:
        key = (roles, generation_prompt)
        if key not in self._skeletons:
            marked = [{"role": role, "content": _MARKER.format(i)} for i, role in enumerate(roles)]
            text = self._apply(marked, generation_prompt)
            pieces = _MARKER_PATTERN.split(text)
            order = tuple(int(number) for number in pieces[1::2])
            if sorted(order) != list(range(len(roles))):
                raise DataError(
                    f"{self.name} does not write every message exactly once for the roles {', '.join(roles)}, so the answers can't be told "
                    "from the rest. Give a template that does with model.chat_template."
                )
            opens = tuple(
                self._skeleton(roles[:i], True).literals[-1] if role == "assistant" and i else "" for i, role in enumerate(roles)
            )
            self._skeletons[key] = Skeleton(tuple(pieces[0::2]), order, opens)
        return self._skeletons[key]

    def _find_end_token(self) -> str | None:
        """The first added token after an answer that ends the conversation."""
        return next(self._tokens(self._skeleton(("user", "assistant"), False).literals[-1]), None)

    def _tokens(self, literal: str) -> Iterator[str]:
        if self._added is not None:
            for match in self._added.finditer(literal):
                yield match.group()

    # --- where the messages are in it ---

    def _walk(self, text: str, contents: Sequence[str], skeleton: Skeleton) -> list[tuple[int, int]] | None:
        """Contents' ranges if `text` is the skeleton's literals with the contents (perhaps trimmed) between them, else None."""
        if not text.startswith(skeleton.literals[0]):
            return None
        position = len(skeleton.literals[0])
        spans: list[tuple[int, int]] = []
        for content, literal in zip(contents, skeleton.literals[1:], strict=True):
            for variant in _variants(content):
                end = position + len(variant)
                if text.startswith(variant, position) and text.startswith(literal, end):
                    break
            else:
                return None
            spans.append((position, end))
            position = end + len(literal)
        return spans if position == len(text) else None

    def _search(self, text: str, contents: Sequence[str], skeleton: Skeleton) -> list[tuple[int, int]]:
        """Contents' ranges where the template's own text depends on the contents: found one after the other, and what lies between
        must hold the same special tokens as in the skeleton."""
        position = 0
        spans: list[tuple[int, int]] = []
        for content, literal in zip(contents, skeleton.literals, strict=False):
            expected = list(self._tokens(literal))
            span = next(
                (
                    (start, start + len(variant))
                    for variant in _variants(content)
                    if variant
                    for start in _occurrences(text, variant, position)
                    if list(self._tokens(text[position:start])) == expected
                ),
                None,
            )
            if span is None:
                raise self._lost(content)
            spans.append(span)
            position = span[1]
        if list(self._tokens(text[position:])) != list(self._tokens(skeleton.literals[-1])):
            raise self._lost(contents[-1])
        return spans

    def _lost(self, content: str) -> DataError:
        shown = content if len(content) <= 60 else content[:57] + "…"
        return DataError(
            f"{self.name} changes the message {shown!r} beyond trimming, so its place in the rendered text can't be known. "
            "Clean the message or give another template with model.chat_template."
        )

    @staticmethod
    def _start(text: str, before: int, content_start: int, opens: str) -> int:
        """What lies between the previous content and this one begins with the generation prompt: what follows it the model writes."""
        if opens and before + len(opens) <= content_start and text.startswith(opens, before):
            return before + len(opens)
        return content_start

    def _end(self, text: str, content_end: int, after: int) -> int:
        if self.end_token is not None and self._added is not None:
            match = self._added.search(text, content_end, after)
            if match and match.group() == self.end_token:
                return match.end()
        return content_end


def _variants(content: str) -> Iterator[str]:
    """What templates make of a content, the untouched one first."""
    yield content
    yield content.strip()
    yield content.lstrip()
    yield content.rstrip()
    yield content.strip("\n")
    yield content.lstrip("\n")
    yield content.rstrip("\n")
    if "</think>" in content:  # reasoning models drop the reasoning of earlier turns
        answer = content.rpartition("</think>")[2]
        yield answer
        yield answer.lstrip("\n")
        yield answer.strip()


def _occurrences(text: str, needle: str, start: int) -> Iterator[int]:
    position = text.find(needle, start)
    while position >= 0:
        yield position
        position = text.find(needle, position + 1)
