"""What a reward model's scores of held-out answers say: right, sure of itself, fooled by length (docs/algorithms/reward.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accord.algorithms.calibration import calibration_error, confidence_bins, score_bins
from accord.data.dataset import Example
from accord.track.files import plain, write_atomically

FILE = "reward_evaluation.json"
_PLACE = re.compile(r"(:\d+|\[\d+\])$")
_SHORTEST_BUCKET = 16  # answers below it are one bucket; each further one is twice as wide


@dataclass(frozen=True)
class Judged:
    """Answers with their scores, and which of them are to be compared."""

    scores: Tensor  # [S] without gradient
    lengths: Tensor  # [S] tokens of the answer
    examples: Tensor  # [S] number of the example it belongs to
    better: Tensor  # [M] numbers of answers: the better one of each pair
    worse: Tensor  # [M] the worse one

    @property
    def chosen(self) -> Tensor:
        """[M] scores in float64."""
        return self.scores[self.better].double()

    @property
    def rejected(self) -> Tensor:
        return self.scores[self.worse].double()


def joined(parts: Sequence[Judged]) -> Judged:
    """The answers of several packs as one."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part.scores))
    return Judged(
        torch.cat([part.scores for part in parts]),
        torch.cat([part.lengths for part in parts]),
        torch.cat([part.examples for part in parts]),
        torch.cat([part.better + start for part, start in zip(parts, starts, strict=False)]),
        torch.cat([part.worse + start for part, start in zip(parts, starts, strict=False)]),
    )


def evaluate_pairs(judged: Judged, examples: Sequence[Example]) -> dict[str, Any]:
    """Accuracy over all pairs, by length, by which answer is longer and by source, and calibration: what reward_evaluation.json holds.

    The length of a pair is that of its longer answer, in tokens. A pair is right if the better answer scores strictly higher.
    """
    differences = (judged.chosen - judged.rejected).cpu()
    right = (differences > 0).double()
    chosen, rejected = judged.lengths[judged.better].cpu(), judged.lengths[judged.worse].cpu()
    bins = confidence_bins(differences)

    def accuracy(where: Tensor) -> dict[str, float]:
        return {"accuracy": float(right[where].mean())}

    unequal = chosen != rejected
    # The longer answer has the higher score: where it is the better one the difference is positive, where it is the worse one negative.
    longer_wins = ((differences > 0) & (chosen > rejected)) | ((differences < 0) & (chosen < rejected))
    sides = [
        "chosen" if c > r else "rejected" if c < r else "neither" for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)
    ]
    return {
        "kind": "pairs",
        "count": len(differences),
        "accuracy": float(right.mean()),
        "ties": int((differences == 0).sum()),
        "ece": calibration_error(bins),
        "calibration": [asdict(b) for b in bins],
        "by_length": _by_length(torch.maximum(chosen, rejected), accuracy),
        "by_longer": _groups("longer", sides, accuracy),
        "prefers_longer": float(longer_wins[unequal].double().mean()) if bool(unequal.any()) else None,
        "by_source": _groups("source", _sources(judged.examples[judged.better].tolist(), examples), accuracy),
    }


def evaluate_scores(judged: Judged, targets: Tensor, examples: Sequence[Example]) -> dict[str, Any]:
    """The error against the scores in the data [S], over all answers, by length and by source, and calibration."""
    scores = judged.scores.double().cpu()
    errors = scores - targets.double()
    bins = score_bins(scores, targets)

    def error(where: Tensor) -> dict[str, float]:
        return {"mse": float(errors[where].square().mean()), "bias": float(errors[where].mean())}

    return {
        "kind": "scores",
        "count": len(scores),
        **error(torch.arange(len(scores))),
        "calibration_error": calibration_error(bins),
        "calibration": [asdict(b) for b in bins],
        "by_length": _by_length(judged.lengths.cpu(), error),
        "by_source": _groups("source", _sources(judged.examples.tolist(), examples), error),
    }


def write_evaluation(folder: Path, step: int, result: dict[str, Any]) -> None:
    """RUN/reward_evaluation.json: that of the newest evaluation, whole or not at all."""
    text = json.dumps(plain({"step": step, **result}), ensure_ascii=False, indent=1, allow_nan=False)
    write_atomically(folder / FILE, text.encode("utf-8", "backslashreplace") + b"\n")


Measure = Callable[[Tensor], dict[str, float]]


def _by_length(lengths: Tensor, measure: Measure) -> list[dict[str, Any]]:
    """Buckets of 1–15, 16–31, 32–63, … tokens that hold something."""
    bounds = [(1, _SHORTEST_BUCKET - 1)]
    while bounds[-1][1] < int(lengths.max()):
        low = bounds[-1][1] + 1
        bounds.append((low, 2 * low - 1))
    found = []
    for low, high in bounds:
        where = ((lengths >= low) & (lengths <= high)).nonzero()[:, 0]
        if len(where):
            found.append({"low": low, "high": high, "count": len(where), **measure(where)})
    return found


def _groups(key: str, names: Sequence[str], measure: Measure) -> list[dict[str, Any]]:
    """The items of each name, largest group first."""
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    return [
        {key: name, "count": len(where), **measure(torch.tensor(where))}
        for name, where in sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _sources(numbers: Iterable[int], examples: Sequence[Example]) -> list[str]:
    """The file or data set of each example: its origin without the line (file:12, rows[12])."""
    return [_PLACE.sub("", examples[number].origin) for number in numbers]
