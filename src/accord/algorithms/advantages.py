"""Generalised advantage estimation, whitening and running moments.

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
