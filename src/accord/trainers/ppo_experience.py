"""What a policy did with a batch of prompts, and how it is read again through packs. No model lives here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from accord.data.packing import Pack, pack_trees
from accord.rewards.base import Sample, ScoreBoard
from accord.rewards.grouping import prompt_trees

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Rollouts:
    """R sampled responses. Their tokens, laid end to end, are the N tokens of every [N] tensor of an experience."""

    samples: list[Sample]
    sampler_logprobs: Tensor  # [N] what the generator gave, tempered and untruncated

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each response, the end token included."""
        return [len(sample.response_ids) for sample in self.samples]

    @cached_property
    def offsets(self) -> np.ndarray:
        """[R + 1] where each response begins in N; the last is N."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @cached_property
    def last(self) -> Tensor:
        """[R] where in N the last real action of each response is: its end token, or its last token before the cut."""
        import torch

        return torch.from_numpy(self.offsets[1:] - 1)

    def packs(self, numbers: Sequence[int], max_tokens: int) -> Iterator[tuple[Pack, Tensor]]:
        """The responses `numbers` in packs, each with the rows of N that its targets are, in their order."""
        import torch

        prompts = [self.samples[i].prompt_ids for i in numbers]
        trees, members = prompt_trees(prompts, [self.samples[i].response_ids for i in numbers], max_tokens)
        for pack in pack_trees(trees, max_tokens):
            inside = [numbers[member] for tree in pack.tree_index for member in members[tree]]
            rows = np.concatenate([np.arange(self.offsets[i], self.offsets[i + 1]) for i in inside])
            yield pack, torch.from_numpy(rows)

    def read(self, max_tokens: int, compute: Callable[[Pack], Tensor]) -> Tensor:
        """[N] what `compute` gives for the targets of each pack, put in the order of the responses."""
        import torch

        result = torch.zeros(int(self.offsets[-1]))
        for pack, rows in self.packs(range(len(self)), max_tokens):
            result[rows] = compute(pack).float().cpu()
        return result

    def sum_by_response(self, values: Tensor) -> Tensor:
        """[N] → [R], accumulated in float64."""
        import torch

        owner = torch.from_numpy(np.repeat(np.arange(len(self)), self.lengths))
        return torch.zeros(len(self), dtype=torch.float64).index_add(0, owner, values.double())

    def metrics(self) -> dict[str, float]:
        """What can be said of the responses alone."""
        n = max(1, len(self))
        return {
            "ppo/response_length": sum(self.lengths) / n,
            "ppo/eos_rate": sum(not sample.truncated for sample in self.samples) / n,
            "ppo/repetition": sum(repeated_ngrams(sample.response_ids) for sample in self.samples) / n,
        }


@dataclass
class Experience:
    """Rollouts with everything that PPO learns from (ALGORITHMS §4). All tensors are float32 on the CPU."""

    number: int  # of the experience, from 1: it seeds the order of its mini-batches
    rollouts: Rollouts
    board: ScoreBoard  # raw scores [R], in all and by source
    old_logprobs: Tensor  # [N] log π_old(y_t), the trainer's own
    ref_logprobs: Tensor  # [N] log π_ref(y_t)
    values: Tensor  # [N] V_old of the state before y_t
    rewards: Tensor  # [N] R_t
    advantages: Tensor  # [N] A_t, whitened if that is on
    returns: Tensor  # [N] R̂_t, before whitening
    kl: float  # mean over responses of Σ_t k1
    importance: Tensor | None = None  # [N] min(π_old / π_sampler, is_clip), with ppo.old_logprobs=sampler
    metrics: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        """Responses."""
        return len(self.rollouts)

    def minibatches(self, count: int, epoch: int, seed: int) -> list[list[int]]:
        """The responses in `count` parts whose sizes differ by at most one, in an order that depends on (seed, experience, epoch).

        Samples of one prompt stay neighbours: in one pack they share its computation.
        """
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for i, sample in enumerate(self.rollouts.samples):
            by_prompt.setdefault(tuple(sample.prompt_ids), []).append(i)
        groups = list(by_prompt.values())
        order = np.random.default_rng([seed, self.number, epoch]).permutation(len(groups))
        responses = [i for group in order for i in groups[group]]
        return [part.tolist() for part in np.array_split(np.asarray(responses, dtype=np.int64), count) if len(part)]


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams that are not the first of their kind: 0 for a text without repetition, near 1 for a loop."""
    total = len(tokens) - n + 1
    if total <= 0:
        return 0.0
    return 1 - len(Counter(tuple(tokens[i : i + n]) for i in range(total))) / total


def score_metrics(board: ScoreBoard) -> dict[str, float]:
    """Raw scores: their weighted sum, its spread, and each source."""
    metrics = {"ppo/score": float(np.mean(board.total)), "ppo/score_std": float(np.std(board.total))}
    return metrics | {f"ppo/score/{name}": float(np.mean(scores)) for name, scores in board.by_source.items()}


class Averages:
    """Means of what mini-batches report, each counted by its tokens, so that a logged number speaks of the whole step."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def add(self, values: dict[str, float], count: float) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * count
            self.counts[name] = self.counts.get(name, 0.0) + count

    def means(self) -> dict[str, float]:
        return {name: total / self.counts[name] for name, total in self.sums.items()}


def spread(values: Tensor) -> tuple[float, float]:
    """(mean, maximum) of |values|; zeros for none."""
    if not len(values):
        return 0.0, 0.0
    return float(values.abs().mean()), float(values.abs().max())
