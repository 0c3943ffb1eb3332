"""Estimates of KL(π ‖ π_ref) from sampled tokens, where the penalty is placed, and what controls its coefficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "abs", "full"]


def kl_estimate(
    logprobs: Tensor,  # [N] log π(y_t), y_t sampled from π
    ref_logprobs: Tensor,  # [N] log π_ref(y_t)
    estimator: Estimator = "k1",
) -> Tensor:  # [N]
    """Per-token estimate of KL(π ‖ π_ref) (Schulman's note "Approximating KL divergence", 2020), with d = log π - log π_ref:

        k1 = d          unbiased, may be negative
        k2 = ½ d²       biased, low variance; its gradient is unbiased
        k3 = e^{-d} - 1 + d    unbiased, never negative
        abs = |d|

    `full`, the exact sum over the vocabulary, takes more than the sampled tokens' probabilities: `models.distribution.full_kl`.
    Raises ValueError if the shapes differ or the estimator is another.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(f"shapes differ: logprobs {tuple(logprobs.shape)}, ref_logprobs {tuple(ref_logprobs.shape)}")
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    if estimator == "abs":
        return difference.abs()
    raise ValueError(f"unknown KL estimator {estimator!r} of sampled tokens: expected k1, k2, k3 or abs")


def token_rewards(
    kl: Tensor,  # [N] k_t of each response token, responses laid end to end
    scores: Tensor,  # [R] s, one per response
    last: Tensor,  # [R] where in N each response's last action is
    coef: float,  # β; 0 when the penalty is placed in the loss
    token_scores: Tensor | None = None,  # [N] what single tokens earn beside the response's score
) -> Tensor:  # [N]
    """R_t = -β k_t (+ the token's own score), and R_T += s on the last real action of each response: the end token, or the last token
    before a cut.

    Raises ValueError if token_scores has another shape than kl.
    """
    rewards = -coef * kl
    if token_scores is not None:
        if token_scores.shape != kl.shape:
            raise ValueError(f"shapes differ: kl {tuple(kl.shape)}, token_scores {tuple(token_scores.shape)}")
        rewards = rewards + token_scores.to(rewards.dtype)
    return rewards.index_add(0, last, scores.to(rewards.dtype))


@dataclass
class FixedKL:
    """β stays what it is."""

    coef: float

    def update(self, kl: float, episodes: int) -> None:
        """Nothing to do."""

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


@dataclass
class AdaptiveKL:
    """Proportional control of β (Ziegler et al. 2019, arXiv:1909.08593, §2.2).

        β ← β · (1 + clip(KL / target - 1, ±0.2) · episodes / horizon)

    KL is the mean over responses of Σ_t k1, in nats. It is measured before the update it steers.
    """

    coef: float
    target: float = 6.0
    horizon: float = 10000

    def update(self, kl: float, episodes: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        # more episodes than the horizon in one step may not turn β negative
        self.coef *= max(1 + error * episodes / self.horizon, 0.0)

    def state(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]
