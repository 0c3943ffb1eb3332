"""What a policy did with a batch of prompts, and how it is read again through packs. No model lives here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accord.algorithms.advantages import gae, grpo, returns_to_go, rloo, sum_by_response, whiten
from accord.algorithms.losses import mean_by_sequence
from accord.algorithms.repetition import repeated_ngrams
from accord.data.packing import Pack, pack_trees
from accord.models.distribution import Distribution
from accord.models.logprobs import TokenLogprobs
from accord.rewards.base import Sample, ScoreBoard
from accord.rewards.grouping import prompt_trees

if TYPE_CHECKING:
    from accord.config import PPO
    from accord.engine.trained import TrainedModel


@dataclass
class Rollouts:
    """R sampled responses. Their tokens, laid end to end, are the N tokens of every [N] tensor of an experience."""

    samples: list[Sample]
    groups: list[int]  # [R] which prompt each response answers
    sampler_logprobs: Tensor | None  # [N] what the generator gave, tempered and untruncated; None: another sampled them

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
        return torch.from_numpy(self.offsets[1:] - 1)

    @cached_property
    def owner(self) -> Tensor:
        """[N] the response of each token."""
        return torch.from_numpy(np.repeat(np.arange(len(self)), self.lengths))

    @cached_property
    def lengths_by_token(self) -> Tensor:
        """[N] how many tokens the response of each token has."""
        return torch.from_numpy(np.repeat(self.lengths, self.lengths))

    def minibatch(self, numbers: Sequence[int], max_tokens: int, multiple: int = 1) -> MiniBatch:
        """The responses of one optimizer step."""
        packs = list(self.packs(numbers, max_tokens, multiple))
        return MiniBatch(packs, sum(len(rows) for _, rows in packs), len(numbers))

    def packs(self, numbers: Sequence[int], max_tokens: int, multiple: int = 1) -> Iterator[tuple[Pack, Tensor]]:
        """The responses `numbers` in packs, each with the rows of N that its targets are, in their order. `multiple`: as in `pack_trees`."""
        prompts = [self.samples[i].prompt_ids for i in numbers]
        trees, members = prompt_trees(prompts, [self.samples[i].response_ids for i in numbers], max_tokens)
        for pack in pack_trees(trees, max_tokens, multiple):
            inside = [numbers[member] for tree in pack.tree_index for member in members[tree]]
            rows = np.concatenate([np.arange(self.offsets[i], self.offsets[i + 1]) for i in inside])
            yield pack, torch.from_numpy(rows)

    def read(
        self, packs: Sequence[tuple[Pack, Tensor]], compute: Callable[[Pack], Tensor], model: TrainedModel | None = None
    ) -> Tensor:
        """[N] what `compute` gives for the targets of each pack, put in the order of the responses; several rows [k, N] likewise.

        `packs` hold all responses. `model` is what it reads with: in a group, each process reads its share of the packs.
        """
        result = torch.zeros(0)

        def part_of(item: tuple[Pack, Tensor]) -> Tensor:
            return compute(item[0]).float().cpu()

        parts = map(part_of, packs) if model is None else model.each(packs, part_of)
        for (_, rows), part in zip(packs, parts, strict=True):
            if not len(result):
                result = torch.zeros(*part.shape[:-1], int(self.offsets[-1]))
            result[..., rows] = part
        return result

    def sum_by_response(self, values: Tensor) -> Tensor:
        """[N] → [R], accumulated in float64."""
        return sum_by_response(values, self.lengths)

    def shown(self, most: int, scores: Sequence[float], kl: Sequence[float]) -> list[dict[str, Any]]:
        """The first few answers for samples.jsonl."""
        return [
            {
                "prompt": [message.as_dict() for message in sample.prompt.messages],
                "response": sample.response,
                "score": scores[i],
                "kl": kl[i],
                "finish_reason": "length" if sample.truncated else "stop",
                "origin": sample.prompt.origin,
            }
            | ({} if sample.prompt.reference is None else {"reference": sample.prompt.reference})
            for i, sample in enumerate(self.samples[:most])
        ]

    def metrics(self) -> dict[str, float]:
        """What can be said of the responses alone."""
        n = max(1, len(self))
        return {
            "ppo/response_length": sum(self.lengths) / n,
            "ppo/eos_rate": sum(not sample.truncated for sample in self.samples) / n,
            "ppo/repetition": sum(repeated_ngrams(sample.response_ids) for sample in self.samples) / n,
        }


class Forward(NamedTuple):
    """A pack as actor and critic read it, with the graphs of their gradients."""

    policy: Distribution
    tokens: TokenLogprobs
    values: Tensor | None


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step of PPO learns from."""

    packs: list[tuple[Pack, Tensor]]  # each with the rows of N that its targets are
    tokens: int  # response tokens
    responses: int
    first: Forward | None = None  # of the first pack, where it has been read with gradient already

    def forward(self, pack: Pack) -> Forward | None:
        """That of `pack`, where it has been made."""
        return self.first if pack is self.packs[0][0] else None


@dataclass
class Experience:
    """Rollouts with everything that PPO learns from (ALGORITHMS §4). All tensors are float32 on the CPU."""

    number: int  # of the experience, from 1: it seeds the order of its mini-batches
    rollouts: Rollouts
    board: ScoreBoard  # raw scores [R], in all and by source
    old_logprobs: Tensor  # [N] log π_old(y_t), the trainer's own
    ref_logprobs: Tensor  # [N] log π_ref(y_t)
    values: Tensor | None  # [N] V_old of the state before y_t; None without a critic
    rewards: Tensor  # [N] R_t
    advantages: Tensor  # [N] A_t, whitened if that is on
    returns: Tensor | None  # [N] R̂_t, before whitening; None without a critic
    kl: float  # mean over responses of Σ_t k1
    importance: Tensor | None = (
        None  # [N] min(π_old / π_sampler, is_clip) of the token or its response, with ppo.old_logprobs=sampler
    )
    metrics: dict[str, float] = field(default_factory=dict)
    whole: MiniBatch | None = None  # all responses, where a pack of them has been read with gradient for the one update

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


def estimate_advantages(
    settings: PPO, rewards: Tensor, values: Tensor | None, rollouts: Rollouts
) -> tuple[Tensor, Tensor | None]:
    """(A_t [N], R̂_t [N]) as `ppo.advantage` says; without a critic there are no returns to learn.

    Where the best answer is learnt from (`ppo.objective`), the rewards are left as they are.
    """
    if settings.objective != "clip":
        return rewards, None
    if settings.whiten_rewards:
        rewards = whiten(rewards, shift_mean=False)
    returns = None
    if settings.advantage == "gae":
        assert values is not None
        advantages, returns = gae(rewards, values, rollouts.lengths, settings.gamma, settings.lam)
    elif settings.advantage == "reinforce_pp":
        advantages = returns_to_go(rewards, rollouts.lengths, settings.gamma)
    else:
        scores = rollouts.sum_by_response(rewards)
        if settings.advantage == "grpo":
            of_response = grpo(scores, rollouts.groups, settings.group_std)
        else:
            of_response = rloo(scores, rollouts.groups)
        advantages = of_response.to(rewards.dtype)[rollouts.owner]
    return whiten(advantages) if settings.whitens_advantages else advantages, returns


def importance_weights(settings: PPO, old: Tensor, rollouts: Rollouts) -> Tensor | None:
    """[N] truncated importance weights min(π_old / π_sampler, is_clip), with `ppo.old_logprobs: sampler`.

    With `ppo.ratio: sequence` the ratio is that of the response, exp of its mean log-ratio, as in the objective itself.
    """
    if settings.old_logprobs == "recompute":
        return None
    assert rollouts.sampler_logprobs is not None
    log_ratio = old - rollouts.sampler_logprobs
    if settings.ratio == "sequence":
        log_ratio = mean_by_sequence(log_ratio, rollouts.owner)
    return log_ratio.exp().clamp(max=settings.is_clip)


def score_metrics(board: ScoreBoard) -> dict[str, float]:
    """Raw scores: their weighted sum (per-token rewards added up), its spread, and each source."""
    metrics = {"ppo/score": float(np.mean(board.sums)), "ppo/score_std": float(np.std(board.sums))}
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
