"""What every source of scores is, and how several are combined."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from accord.data.records import Prompt
from accord.engine.ranks import join
from accord.errors import AccordError

log = logging.getLogger(__name__)

LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which rewards are counted


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

    @property
    def question(self) -> str:
        """The text of the last user turn."""
        for message in reversed(self.prompt.messages):
            if message.role == "user":
                return message.content
        return self.prompt.messages[-1].content if self.prompt.messages else ""


class Source(Protocol):
    """One source of scores. One that can fail on a sample also has `failures`, the number of its scores that were its fallback.

    In a group the main process asks, for all. A source that is a model beside the trained one sets `divides`: each process asks it about
    all samples, and it divides them over the processes itself.
    """

    name: str
    weight: float

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """One finite number a sample, in order. Raises AccordError naming the source and the sample where it cannot."""
        ...


@runtime_checkable
class TokenSource(Protocol):
    """A source that may reward single tokens: it does where `per_token` is true."""

    per_token: bool

    def token_scores(self, samples: Sequence[Sample]) -> list[list[float]]:
        """For each sample one finite number for each of its response tokens."""
        ...


@dataclass(frozen=True)
class ScoreBoard:
    """Scores of a batch of R responses, and where they go: `total` to the last token of a response, `per_token` to each."""

    total: list[float]  # [R] s = Σ weight · source over the sources that score a response as a whole: added to R_T
    by_source: dict[str, list[float]] = field(default_factory=dict)  # [R] each source's own, unweighted; per-token ones summed
    failures: int = 0  # scores that are a source's fallback
    per_token: list[list[float]] | None = None  # [R][T] Σ weight · source over the per-token sources: added to R_t; None: no such

    @property
    def sums(self) -> list[float]:
        """[R] everything a response was given: total plus the sum of its per-token rewards."""
        if self.per_token is None:
            return self.total
        return [score + math.fsum(tokens) for score, tokens in zip(self.total, self.per_token, strict=True)]


def _ask(source: Source, samples: Sequence[Sample]) -> tuple[list[Any], int]:
    """(what it gives: a score, or one for each token, of every sample; how many of them are its fallback)."""

    def ask() -> tuple[list[Any], int]:
        before = getattr(source, "failures", 0)
        by_token = isinstance(source, TokenSource) and source.per_token
        found: list[Any] = source.token_scores(samples) if by_token else source.score(samples)  # type: ignore[attr-defined]
        return found, getattr(source, "failures", 0) - before

    found, failures = ask() if getattr(source, "divides", False) else join().ask_main(ask)
    return found, failures


def combine(sources: Sequence[Source], samples: Sequence[Sample]) -> ScoreBoard:
    """Ask every source about every sample and add their scores up by weight.

    Raises AccordError when a source gives the wrong count, or a number that is not finite or too large to be learned from: a score is
    never made up.
    """
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise AccordError(f"two sources of scores are called alike ({', '.join(names)}); each needs its own name.")
    by_source: dict[str, list[float]] = {}
    total = [0.0] * len(samples)
    per_token: list[list[float]] | None = None
    failures = 0
    for source in sources:
        found, failed = _ask(source, samples)
        failures += failed
        if isinstance(source, TokenSource) and source.per_token:
            lists = found
            _check_count(source, len(lists), samples)
            per_token = per_token or [[0.0] * len(sample.response_ids) for sample in samples]
            for sample, summed, scores in zip(samples, per_token, lists, strict=True):
                if len(scores) != len(summed):
                    raise AccordError(
                        f"reward {source.name} gave {len(scores)} numbers for the {len(summed)} tokens of the sample {sample.name}."
                    )
                for t, score in enumerate(scores):
                    summed[t] += _weighted(source, score, sample)
            by_source[source.name] = [math.fsum(scores) for scores in lists]
        else:
            own = found
            _check_count(source, len(own), samples)
            for i, (sample, score) in enumerate(zip(samples, own, strict=True)):
                total[i] += _weighted(source, score, sample)
            by_source[source.name] = [float(score) for score in own]
    return ScoreBoard(total, by_source, failures, per_token)


def _check_count(source: Source, count: int, samples: Sequence[Sample]) -> None:
    if count != len(samples):
        raise AccordError(f"reward {source.name} gave {count} scores for {len(samples)} samples.")


def _weighted(source: Source, score: float, sample: Sample) -> float:
    if not math.isfinite(score):
        raise AccordError(f"reward {source.name} gave {score} for the sample {sample.name}; expected a finite number.")
    weighted = source.weight * score
    if not abs(weighted) <= LARGEST:
        raise AccordError(
            f"reward {source.name} gave {score:g} for the sample {sample.name}, which with its weight {source.weight:g} is beyond "
            f"±{LARGEST:.2g}: float32 has no such number. Limit it at its source, or lower the weight."
        )
    return weighted


class Fallback:
    """What a source does about a sample that it cannot score: the run stops, or the configured number counts.

    With a number the failures are counted and the first one is told; it is never used in silence.
    """

    def __init__(self, value: float | None) -> None:
        self.value = value
        self.count = 0

    def use(self, error: AccordError, samples: int = 1) -> float:
        """The fallback for so many samples. Raises `error` where there is none."""
        if self.value is None:
            raise error
        if self.count == 0:
            log.warning("%s It counts as the fallback, %s; further failures are only counted.", error, self.value)
        self.count += samples
        return self.value


class MayFail:
    """A source that can fail on a sample. It sets `_fallback` and scores through it; the trainer reads these two."""

    _fallback: Fallback

    @property
    def fallback(self) -> float | None:
        """What counts instead; None: the run stops."""
        return self._fallback.value

    @property
    def failures(self) -> int:
        """Samples that were scored with the fallback so far."""
        return self._fallback.count


def as_number(value: Any) -> float:
    """A finite float. Raises ValueError that says what `value` is, to follow "gave"."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # NumPy's and torch's numbers
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise ValueError(f"a {type(value).__name__} ({short(value)}); expected a number")
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction beyond the largest float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{number}; expected a finite number")
    return number


def short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def unique_names(names: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """The names, with -2, -3 … behind those that were there before, or are `taken`."""
    used = set(taken)
    result = []
    for name in names:
        number, unique = 1, name
        while unique in used:
            number += 1
            unique = f"{name}-{number}"
        used.add(unique)
        result.append(unique)
    return result
