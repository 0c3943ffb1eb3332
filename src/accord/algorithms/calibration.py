"""Whether a reward model means what it says (docs/algorithms/reward.md): predicted against observed, bin by bin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bin:
    """The items whose prediction lies in [low, high) (the last bin also holds `high`)."""

    low: float
    high: float
    count: int
    predicted: float  # mean prediction of the bin's items
    observed: float  # mean of what was the case


def confidence_bins(
    differences: Tensor,  # [M] s_w - s_l, score of the better answer minus score of the worse one
    bins: int = 10,
) -> list[Bin]:
    """How often a reward model is right when it says that it is sure with probability p = σ(|s_w - s_l|).

    p is what the Bradley–Terry model gives the answer that it prefers, so it lies in [½, 1], which is divided into `bins` equal parts;
    `observed` is the share of pairs in which that answer is the better one. Equal scores count half: a coin decides. This is
    σ(s_first - s_second) against "the first one is better" for pairs shown in random order, folded at ½, where both halves say the same.
    Empty bins are left out.
    """
    differences = differences.double()
    confidence = torch.sigmoid(differences.abs())
    right = (differences > 0).double() + 0.5 * (differences == 0).double()
    number = ((confidence - 0.5) * 2 * bins).long().clamp(0, bins - 1)
    found = []
    for b in number.unique().tolist():
        inside = number == b
        low, high = (0.5 + 0.5 * edge / bins for edge in (b, b + 1))
        found.append(Bin(low, high, int(inside.sum()), float(confidence[inside].mean()), float(right[inside].mean())))
    return found


def score_bins(
    predicted: Tensor,  # [P] the model's scores
    targets: Tensor,  # [P] the scores in the data
    bins: int = 10,
) -> list[Bin]:
    """Mean predicted and mean given score of answers with about the same prediction: `bins` groups of equal size, lowest first.

    With fewer answers than bins each is a group of its own.
    """
    order = predicted.argsort(stable=True)
    return [
        Bin(
            float(predicted[part].min()),
            float(predicted[part].max()),
            len(part),
            float(predicted[part].double().mean()),
            float(targets[part].double().mean()),
        )
        for part in order.tensor_split(min(bins, len(order)))
    ]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error: Σ_b n_b / n · |predicted_b - observed_b| (Guo et al. 2017, arXiv:1706.04599).

    With few items a bin it is above 0 for a perfect model too.
    """
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.predicted - b.observed) for b in bins) / total
