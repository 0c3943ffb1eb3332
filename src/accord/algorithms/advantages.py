"""Advantages: generalised advantage estimation with a critic, group baselines and returns without one; whitening, running moments.

Responses of different lengths are laid end to end in one [N] tensor; `lengths` says where each ends. There is no padding to mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gae(
    rewards: Tensor,  # [N] R_t
    values: Tensor,  # [N] V_t, the value of the state before y_t
    lengths: Sequence[int],  # [R] tokens of each response; they sum to N
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16), and the returns the critic learns.

        δ_t = R_t + γ V_{t+1} - V_t,   V_{T+1} = 0: the response ends the episode, also where a length limit cut it
        A_t = δ_t + γλ A_{t+1}
        R̂_t = A_t + V_t

    Returns (advantages [N], returns [N]) in the dtype of `rewards`; the recursion itself runs in float64.
    Raises ValueError if the lengths do not sum to N.
    """
    if rewards.shape != values.shape or sum(lengths) != len(rewards):
        raise ValueError(f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and lengths (sum {sum(lengths)}) differ")
    if not len(rewards):
        return rewards.clone(), rewards.clone()
    # One column per response, aligned at the end: the recursion runs once over time for all of them.
    table = _Ragged(lengths, rewards.device)
    reward, value = table.pad(rewards.double()), table.pad(values.double())  # [R, T_max]
    advantages = torch.zeros_like(reward)
    following_value = reward.new_zeros(reward.shape[0])
    following_advantage = reward.new_zeros(reward.shape[0])
    for t in reversed(range(reward.shape[1])):
        delta = reward[:, t] + gamma * following_value - value[:, t]
        following_advantage = delta + gamma * lam * following_advantage
        following_value = value[:, t]
        advantages[:, t] = following_advantage
    flat = table.unpad(advantages)
    return flat.to(rewards.dtype), (flat + values.double()).to(rewards.dtype)


def grpo(
    scores: Tensor,  # [R] G = Σ_t R_t of each response
    groups: Sequence[int],  # [R] which prompt each response answers
    divide_by_std: bool = True,
) -> Tensor:  # [R]
    """Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300, §4.1.2).

        A_i = (G_i - mean_group G) / (std_group G + 1e-6)

    std is that of a sample (divided by n - 1). `divide_by_std` False leaves the division out (Dr. GRPO, arXiv:2503.20783): it weighs
    a group the more the less its scores differ. A group of equal scores gives exactly 0. In float64, returned in the dtype of `scores`.
    Raises ValueError if the lengths differ or a group has one response only.
    """
    group, counts, deviations = _within_groups(scores, groups)
    centred = deviations - (_group_sum(deviations, group, counts) / counts)[group]
    if divide_by_std:
        std = (_group_sum(centred.square(), group, counts) / (counts - 1)).sqrt()
        centred = centred / (std[group] + 1e-6)
    return centred.to(scores.dtype)


def rloo(
    scores: Tensor,  # [R] G = Σ_t R_t of each response
    groups: Sequence[int],  # [R] which prompt each response answers
) -> Tensor:  # [R]
    """Leave-one-out baseline (RLOO, Ahmadian et al. 2024, arXiv:2402.14740): the mean of the other responses to the same prompt.

        A_i = G_i - mean_{j≠i} G_j

    A group of equal scores gives exactly 0. In float64, returned in the dtype of `scores`.
    Raises ValueError if the lengths differ or a group has one response only.
    """
    group, counts, deviations = _within_groups(scores, groups)
    others = _group_sum(deviations, group, counts)[group] - deviations
    return (deviations - others / (counts[group] - 1)).to(scores.dtype)


def _within_groups(scores: Tensor, groups: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """([R] group from 0, [groups] size, [R] score minus that of the group's first response, so that equal scores are exactly 0)."""
    if scores.shape != (len(groups),):
        raise ValueError(f"scores {tuple(scores.shape)} and {len(groups)} groups differ")
    _, group, counts = torch.unique(
        torch.as_tensor(groups, dtype=torch.long, device=scores.device), return_inverse=True, return_counts=True
    )
    if len(counts) and int(counts.min()) < 2:
        raise ValueError("a group of one response has nothing to be compared with")
    first = torch.full((len(counts),), len(scores), device=scores.device)
    first = first.scatter_reduce(0, group, torch.arange(len(scores), device=scores.device), "amin")
    exact = scores.double()
    return group, counts, exact - exact[first][group]


def _group_sum(values: Tensor, group: Tensor, counts: Tensor) -> Tensor:
    return torch.zeros(len(counts), dtype=torch.float64, device=values.device).index_add(0, group, values)


def returns_to_go(rewards: Tensor, lengths: Sequence[int], gamma: float = 1.0) -> Tensor:
    """G_t = Σ_{k≥t} γ^{k-t} R_k within each response: [N] → [N]; whitened over the step, REINFORCE++'s advantage (arXiv:2501.03262).

    The recursion runs in float64. Raises ValueError if the lengths do not sum to N.
    """
    return gae(rewards, torch.zeros_like(rewards), lengths, gamma, 1.0)[0]  # without a critic and with λ = 1, A_t is G_t


def sum_by_response(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """[N] → [R]: the sum over each response's tokens, in float64."""
    sizes = torch.as_tensor(lengths, dtype=torch.long, device=values.device)
    owner = torch.arange(len(sizes), device=values.device).repeat_interleave(sizes)
    return torch.zeros(len(sizes), dtype=torch.float64, device=values.device).index_add(0, owner, values.double())


class _Ragged:
    """Lays rows of different lengths into a rectangle aligned at the right, zeros before them, and back."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        sizes = torch.as_tensor(lengths, dtype=torch.long, device=device)
        width = int(sizes.max())
        self.mask = torch.arange(width, device=device)[None, :] >= (width - sizes)[:, None]  # [R, T_max]

    def pad(self, flat: Tensor) -> Tensor:
        return flat.new_zeros(self.mask.shape).masked_scatter(self.mask, flat)

    def unpad(self, table: Tensor) -> Tensor:
        return table[self.mask]


def whiten(values: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - mean) / (std + 1e-8) over all tokens of the experience: [N] → [N]. `shift_mean` False keeps the mean (rewards).

    The variance is the biased one (divided by N), so that one token alone is safe: it becomes 0. Computed in float64.
    """
    if not len(values):
        return values
    exact = values.double()
    mean = exact.mean()
    whitened = (exact - mean) / (exact.var(correction=0).sqrt() + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return whitened.to(values.dtype)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(R̂ - V) / Var(R̂): 1 is a perfect critic, 0 one that is no better than a constant. NaN where R̂ does not vary."""
    returns, values = returns.double(), values.double()
    spread = returns.var(correction=0)
    if not len(returns) or spread == 0:
        return float("nan")
    return float(1 - (returns - values).var(correction=0) / spread)


class RunningMoments:
    """Mean and standard deviation of all scores seen so far, batch by batch (Chan et al. 1979), in float64 and exact to resume."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.sum_of_squares = 0.0  # Σ (x - mean)²

    def update(self, values: Sequence[float]) -> None:
        n = len(values)
        if not n:
            return
        batch_mean = sum(values) / n
        batch_squares = sum((x - batch_mean) ** 2 for x in values)
        delta, total = batch_mean - self.mean, self.count + n
        self.sum_of_squares += batch_squares + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.count = total

    @property
    def std(self) -> float:
        """Standard deviation; 1 while it is not known (fewer than two values, or all of them equal)."""
        if self.count < 2 or self.sum_of_squares <= 0:
            return 1.0
        return (self.sum_of_squares / (self.count - 1)) ** 0.5

    def normalize(self, values: Sequence[float]) -> list[float]:
        return [(x - self.mean) / self.std for x in values]

    def state(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "sum_of_squares": self.sum_of_squares}

    def load_state(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.sum_of_squares = int(state["count"]), state["mean"], state["sum_of_squares"]
