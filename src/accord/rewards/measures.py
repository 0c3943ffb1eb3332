"""Rewards that are computed from the response alone: its length, its repetition, its form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import regex

from accord.algorithms.repetition import repeated_ngrams
from accord.errors import AccordError
from accord.rewards.base import Fallback, MayFail, Sample, short


class LengthReward:
    """With n response tokens (the end token included), m = `min_tokens` and M = `max_tokens`:

        score = - max(0, m - n) / m - max(0, n - M) / M

    0 from m to M; -1 for twice M. m = M is one wanted length. A limit that is None asks for nothing.
    """

    def __init__(
        self, min_tokens: int | None = None, max_tokens: int | None = None, *, weight: float = 1.0, name: str = "length"
    ) -> None:
        self.min_tokens, self.max_tokens, self.weight, self.name = min_tokens, max_tokens, weight, name

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [self._one(len(sample.response_ids)) for sample in samples]

    def _one(self, n: int) -> float:
        short_by = 0.0 if self.min_tokens is None else max(0, self.min_tokens - n) / self.min_tokens
        long_by = 0.0 if self.max_tokens is None else max(0, n - self.max_tokens) / self.max_tokens
        return 0.0 - short_by - long_by


class RepetitionReward:
    """score = - (share of the response's n-grams of tokens that occurred before in it): 0 without repetition, near -1 for a loop."""

    def __init__(self, ngram: int = 4, *, weight: float = 1.0, name: str = "repetition") -> None:
        self.ngram, self.weight, self.name = ngram, weight, name

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [0.0 - repeated_ngrams(sample.response_ids, self.ngram) for sample in samples]


class FormatReward(MayFail):
    """1 where the response's text has the wanted form, else 0.

    The form is a regular expression that matches the whole text (`match` full) or some part of it (search), or, without a `pattern`,
    one valid JSON value. A match that takes longer than `timeout` seconds (nested repetitions can) raises AccordError naming the
    sample, or counts as the `fallback`.
    """

    def __init__(
        self,
        pattern: str | None = None,
        *,
        match: Literal["full", "search"] = "full",
        timeout: float = 5.0,
        fallback: float | None = None,
        weight: float = 1.0,
        name: str = "format",
        key: str = "ppo.rewards",
    ) -> None:
        self.pattern = None if pattern is None else regex.compile(pattern)
        self.match, self.timeout = match, timeout
        self.weight, self.name, self.key = weight, name, key
        self._fallback = Fallback(fallback)

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> float:
        if self.pattern is None:
            return float(is_json(sample.response))
        find = self.pattern.fullmatch if self.match == "full" else self.pattern.search
        try:
            return float(find(sample.response, timeout=self.timeout) is not None)
        except TimeoutError:
            message = (
                f"{self.key}: matching the pattern {short(self.pattern.pattern)} took longer than its timeout of {self.timeout:g} "
                f"seconds on the sample {sample.name} with the response {short(sample.response)}."
            )
            return self._fallback.use(AccordError(message))


def is_json(text: str) -> bool:
    """Whether the whole text is one JSON value as the standard has it (NaN and Infinity are none)."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True
