"""One text, two tokenizers: how much of it a token of the first begins after, and where the second has read as much."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

INCOMPLETE = "\ufffd"  # what the bytes of an unfinished character (or of none) decode to


def characters_before(ids: Sequence[int], decode: Callable[[Sequence[int]], str], text: str) -> np.ndarray:
    """[T] a_t: how many characters of `text` the tokens before the t-th have completed.

        a_t = |decode(ids_<t) without the replacement characters it ends with|, at most as far as decode(ids) agrees with `text`

    A token that begins inside a character (byte-level tokens) begins after the characters before that one. Bytes that are no text
    become U+FFFD, and count once something that is text comes after them: until then they could be the beginning of a character.
    So a_t depends on the tokens before t alone, and text[:a_t] is what they have said. `text` may end earlier than what is
    decoded (a stop string): tokens beyond it begin at its end.
    """
    starts = np.zeros(len(ids), dtype=np.int64)
    start = middle = told = 0  # a window of tokens: [start, middle) is the context in which [middle, t] is decoded
    context, pieces = "", []
    for t in range(len(ids)):
        window = decode(ids[start:t]) if t > middle else context
        starts[t] = told + max(0, len(window.rstrip(INCOMPLETE)) - len(context))
        if len(window) > len(context) and not window.endswith(INCOMPLETE):
            pieces.append(window[len(context) :])
            told += len(pieces[-1])
            start, middle = middle, t
            context = decode(ids[start:middle])
    pieces.append(decode(ids[start:])[len(context) :])
    return np.minimum(starts, _agreement("".join(pieces), text))


def _agreement(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if a.startswith(b):
        return len(b)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def first_beyond(read: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """[T] the first token of the other tokenizer that ends after a_t characters; the tokens before it hold no character beyond.

    `read` [M]: characters of the text that have been read once its i-th token has been; its last entry is beyond all of them.
    """
    return np.searchsorted(np.maximum.accumulate(read), starts, side="right")
