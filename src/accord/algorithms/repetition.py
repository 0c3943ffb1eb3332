"""How much a sequence repeats itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def repeated_ngrams(tokens: Sequence[Hashable], n: int = 4) -> float:
    """Share of the n-grams that are not the first of their kind: 0 for a text without repetition, near 1 for a loop."""
    total = len(tokens) - n + 1
    if total <= 0:
        return 0.0
    return 1 - len(Counter(tuple(tokens[i : i + n]) for i in range(total))) / total
