"""Tokens as text: up to a stop string, and piece by piece while they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "�"  # what the bytes of an unfinished character decode to
_LONGEST_CHARACTER = 4  # UTF-8 bytes


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    ends = [at for at in (text.find(string) for string in stop) if at >= 0]
    return text[: min(ends)] if ends else text


class TextStream:
    """Text of an answer as its tokens come: the pieces together are `before_stop(decode(all tokens), stop)`.

    What may still change is held back: an unfinished character, and the beginning of what may become a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self.decode, self.stop = decode, tuple(stop)
        self.token_ids: list[int] = []
        self.told = ""

    def add(self, token: int) -> str:
        """The text that this token makes certain ("" if none)."""
        self.token_ids.append(token)
        return self._tell(self._certain(self.decode(self.token_ids)))

    def finish(self) -> str:
        """What was still held back."""
        return self._tell(before_stop(self.decode(self.token_ids), self.stop))

    def _tell(self, text: str) -> str:
        if not text.startswith(self.told):  # a tokenizer that rewrites what came before: wait until it agrees again
            return ""
        piece = text[len(self.told) :]
        self.told = text
        return piece

    def _certain(self, text: str) -> str:
        for _ in range(_LONGEST_CHARACTER - 1):
            text = text.removesuffix(_INCOMPLETE)
        stopped = before_stop(text, self.stop)
        if len(stopped) < len(text):
            return stopped
        held = max((_overlap(text, string) for string in self.stop), default=0)
        return text[: len(text) - held]


def _overlap(text: str, string: str) -> int:
    """How many of the last characters of `text` are a beginning of `string`."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
