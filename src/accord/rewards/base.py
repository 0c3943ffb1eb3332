"""What every source of scores is, and how several are combined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from accord.data.records import Prompt
from accord.errors import AccordError


@dataclass(frozen=True)
class Sample:
    """A response to be scored: as the tokens that were sampled, and as the text they decode to."""

    prompt: Prompt
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]  # with the end token, where the model itself ended
    response: str  # without special tokens
    truncated: bool = False  # cut by the length limit: there is no end token

    @property
    def name(self) -> str:
        """How an error names this sample: where its prompt came from, and how it begins."""
        last = self.prompt.messages[-1].content if self.prompt.messages else ""
        shown = last if len(last) <= 60 else last[:57] + "…"
        return f"{self.prompt.origin}: {shown!r}" if self.prompt.origin else repr(shown)


class Source(Protocol):
    """One source of scores."""

    name: str
    weight: float

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """One finite number a sample, in order. Raises AccordError naming the sample where it cannot."""
        ...


@dataclass(frozen=True)
class ScoreBoard:
    """Scores of a batch: s = Σ weight · source, and each source's own."""

    total: list[float]
    by_source: dict[str, list[float]] = field(default_factory=dict)
    failures: int = 0  # scores that are a source's fallback


def combine(sources: Sequence[Source], samples: Sequence[Sample]) -> ScoreBoard:
    """Ask every source about every sample and add their scores up by weight.

    Raises AccordError when a source gives the wrong count or a number that is not finite: a score is never made up.
    """
    by_source: dict[str, list[float]] = {}
    total = [0.0] * len(samples)
    failures = 0
    for source in sources:
        before = getattr(source, "failures", 0)
        scores = source.score(samples)
        failures += getattr(source, "failures", 0) - before
        if len(scores) != len(samples):
            raise AccordError(f"reward {source.name} gave {len(scores)} scores for {len(samples)} samples.")
        for i, score in enumerate(scores):
            if not math.isfinite(score):
                raise AccordError(
                    f"reward {source.name} gave {score} for the sample {samples[i].name}; expected a finite number."
                )
            total[i] += source.weight * score
        by_source[source.name] = list(scores)
    return ScoreBoard(total, by_source, failures)


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, with -2, -3 … behind those that were there before."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return result
