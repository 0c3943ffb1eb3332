"""The losses of the DPO family (docs/algorithms/dpo.md), and how β moves over a run.

Every function returns a sum over its items, each counted by its weight. The caller chooses the weights so that they sum to 1 over the
whole optimizer step; then any split into packs or micro-batches gives the same gradient.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accord.algorithms.shapes import same_shape


class DPOStats(NamedTuple):
    """What a DPO step reports of each pair, without gradient."""

    losses: Tensor  # [P]
    chosen_rewards: Tensor  # [P] β h_w (without a reference: simpo β p̄_w, orpo log odds_w)
    rejected_rewards: Tensor  # [P] the same of the rejected answer

    @property
    def margins(self) -> Tensor:
        """[P] the chosen answer's implicit reward minus the rejected one's."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracies(self) -> Tensor:
        """[P] 1 where the chosen answer's implicit reward is strictly greater."""
        return (self.chosen_rewards > self.rejected_rewards).to(self.losses.dtype)


def dpo_loss(
    chosen_logps: Tensor,  # [P] log π(y_w | x), summed over response tokens (in float64)
    rejected_logps: Tensor,  # [P] log π(y_l | x)
    ref_chosen_logps: Tensor,  # [P] log π_ref(y_w | x)
    ref_rejected_logps: Tensor,  # [P] log π_ref(y_l | x)
    weights: Tensor,  # [P] what each pair counts for; sums to 1 over the whole optimizer step
    beta: float,
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_lengths: Tensor | None = None,  # [P] |y_w|, for ipo
    rejected_lengths: Tensor | None = None,  # [P] |y_l|, for ipo
) -> tuple[Tensor, DPOStats]:
    """Direct preference optimisation on pairs, against a reference.

        h = log π(y|x) - log π_ref(y|x),   Δ = h_w - h_l
        sigmoid:  -(1-ε) log σ(βΔ) - ε log σ(-βΔ)                Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; ε > 0 is cDPO
        ipo:      (h_w/|y_w| - h_l/|y_l| - 1/(2β))²              Azar et al. 2023 (arXiv:2310.12036), per-token means
        hinge:    max(0, 1 - βΔ)                                 Zhao et al. 2023 (SLiC-HF, arXiv:2305.10425), §2; on log-ratios:
                                                                 Liu et al. 2023 (RSO, arXiv:2309.06657), hinge-norm
        robust:   (-(1-ε) log σ(βΔ) + ε log σ(-βΔ)) / (1-2ε)     Chowdhury et al. 2024 (arXiv:2403.00409), §3

    Where a share ε of the labels is swapped, the mean of robust is the sigmoid loss of the right labels.
    ε is `label_smoothing`. Returns Σ_i w_i · loss_i and, per pair and without gradient, the loss and the implicit rewards β h.
    Raises ValueError if the shapes differ, β is not positive, ε is given with ipo or hinge or is no less than ½ with robust, or ipo
    lacks the lengths.
    """
    same_shape(
        chosen_logps=chosen_logps, rejected_logps=rejected_logps, ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps, weights=weights, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths,
    )  # fmt: skip
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    if label_smoothing and loss_type in ("ipo", "hinge"):
        raise ValueError(f"label_smoothing is not defined for {loss_type}")
    chosen_ratio = chosen_logps - ref_chosen_logps
    rejected_ratio = rejected_logps - ref_rejected_logps
    logits = beta * (chosen_ratio - rejected_ratio)
    if loss_type == "sigmoid":
        losses = (1 - label_smoothing) * F.softplus(-logits)
        if label_smoothing:
            losses = losses + label_smoothing * F.softplus(logits)
    elif loss_type == "ipo":
        if chosen_lengths is None or rejected_lengths is None:
            raise ValueError("ipo needs the lengths of both answers")
        difference = chosen_ratio / chosen_lengths - rejected_ratio / rejected_lengths
        losses = (difference - 1 / (2 * beta)).square()
    elif loss_type == "hinge":
        losses = F.relu(1 - logits)
    elif loss_type == "robust":
        if not label_smoothing < 0.5:
            raise ValueError(f"robust needs label_smoothing below 0.5, got {label_smoothing}")
        losses = (1 - label_smoothing) * F.softplus(-logits) - label_smoothing * F.softplus(logits)
        losses = losses / (1 - 2 * label_smoothing)
    else:
        raise ValueError(f"unknown loss_type {loss_type!r}: expected sigmoid, ipo, hinge or robust")
    stats = DPOStats(losses.detach(), beta * chosen_ratio.detach(), beta * rejected_ratio.detach())
    return (weights * losses).sum(), stats


def simpo_loss(
    chosen_logps: Tensor,  # [P] log π(y_w | x), summed over response tokens (in float64)
    rejected_logps: Tensor,  # [P] log π(y_l | x)
    chosen_lengths: Tensor,  # [P] |y_w|
    rejected_lengths: Tensor,  # [P] |y_l|
    weights: Tensor,  # [P] what each pair counts for; sums to 1 over the whole optimizer step
    beta: float = 2.0,
    gamma: float = 1.0,
) -> tuple[Tensor, DPOStats]:
    """Simple preference optimisation, without a reference: Meng et al. 2024 (arXiv:2405.14734), §2, eq. 6.

        p̄ = log π(y|x) / |y|
        L = Σ_i w_i · -log σ(β p̄_w - β p̄_l - γ)

    Returns the loss and, per pair and without gradient, the loss and the implicit rewards β p̄ (the paper's r_SimPO).
    Raises ValueError if the shapes differ or β is not positive.
    """
    same_shape(
        chosen_logps=chosen_logps, rejected_logps=rejected_logps,
        chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths, weights=weights,
    )  # fmt: skip
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    chosen_reward = beta * chosen_logps / chosen_lengths
    rejected_reward = beta * rejected_logps / rejected_lengths
    losses = F.softplus(gamma - (chosen_reward - rejected_reward))
    return (weights * losses).sum(), DPOStats(losses.detach(), chosen_reward.detach(), rejected_reward.detach())


CERTAIN = -torch.finfo(torch.float32).eps  # a log-probability that float32 can't tell from 0


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)) = p̄ - log(1 - e^p̄) of p̄ = `mean_logprobs` ≤ 0, finite where p rounds to 1.

    Above `CERTAIN` value and slope are those at `CERTAIN`: a rejected answer that the model is sure of is still pushed down.
    """
    held = mean_logprobs + (mean_logprobs.clamp(max=CERTAIN) - mean_logprobs).detach()
    return held - torch.log(-torch.expm1(held))


def orpo_loss(
    chosen_logps: Tensor,  # [P] log π(y_w | x), summed over response tokens (in float64)
    rejected_logps: Tensor,  # [P] log π(y_l | x)
    chosen_lengths: Tensor,  # [P] |y_w|
    rejected_lengths: Tensor,  # [P] |y_l|
    weights: Tensor,  # [P] what each pair counts for; sums to 1 over the whole optimizer step
    lambda_: float = 0.1,
) -> tuple[Tensor, DPOStats]:
    """Odds-ratio preference optimisation, without a reference: Hong et al. 2024 (arXiv:2403.07691), §4, eq. 6 and 7.

        p̄ = log π(y|x) / |y|,   log odds = p̄ - log(1 - e^p̄)
        L = Σ_i w_i · ( -p̄_w - λ log σ(log odds_w - log odds_l) )

    Returns the loss and, per pair and without gradient, the loss and, as what takes the place of implicit rewards, the log odds.
    Raises ValueError if the shapes differ.
    """
    same_shape(
        chosen_logps=chosen_logps, rejected_logps=rejected_logps,
        chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths, weights=weights,
    )  # fmt: skip
    chosen_mean = chosen_logps / chosen_lengths
    chosen_odds, rejected_odds = log_odds(chosen_mean), log_odds(rejected_logps / rejected_lengths)
    losses = -chosen_mean + lambda_ * F.softplus(rejected_odds - chosen_odds)
    return (weights * losses).sum(), DPOStats(losses.detach(), chosen_odds.detach(), rejected_odds.detach())


def rpo_term(
    chosen_logps: Tensor,  # [P] log π(y_w | x), summed over response tokens (in float64)
    chosen_lengths: Tensor,  # [P] |y_w|
    weights: Tensor,  # [P] what each pair counts for; sums to 1 over the whole optimizer step
    alpha: float,
) -> tuple[Tensor, Tensor]:
    """The SFT term on the chosen answer that is added to any of the above: Pang et al. 2024 (arXiv:2404.19733), §2.

        L = Σ_i w_i · -α log π(y_w|x) / |y_w|

    Returns the term and, per pair and without gradient, what it adds to the pair's loss. Raises ValueError if the shapes differ.
    """
    same_shape(chosen_logps=chosen_logps, chosen_lengths=chosen_lengths, weights=weights)
    losses = -alpha * chosen_logps / chosen_lengths
    return (weights * losses).sum(), losses.detach()


class KTOStats(NamedTuple):
    """What a KTO step reports of each answer, without gradient."""

    losses: Tensor  # [S]
    rewards: Tensor  # [S] β h


def kto_reference_point(
    logps: Tensor,  # [n] log π(y_j | x_i) of mismatched answers: x_i with the answer y_j of another example
    ref_logps: Tensor,  # [n] log π_ref(y_j | x_i)
) -> Tensor:
    """z0, an estimate of KL(π ‖ π_ref) from which gains and losses are felt: Ethayarajh et al. 2024 (arXiv:2402.01306), §4.1.

        z0 = max(0, mean_i (log π(y_j | x_i) - log π_ref(y_j | x_i)))

    A scalar without gradient; 0 for no answers. The mean is over the whole optimizer step. Raises ValueError if the shapes differ.
    """
    same_shape(logps=logps, ref_logps=ref_logps)
    if not len(logps):
        return logps.new_zeros(())
    return (logps - ref_logps).detach().mean().clamp(min=0)


def kto_loss(
    logps: Tensor,  # [S] log π(y | x), summed over response tokens (in float64)
    ref_logps: Tensor,  # [S] log π_ref(y | x)
    desirable: Tensor,  # [S] bool: the answer is one to learn from, not one to unlearn
    reference_point: Tensor,  # [] z0
    weights: Tensor,  # [S] what each answer counts for; sums to 1 over the whole optimizer step
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, KTOStats]:
    """Kahneman–Tversky optimisation on single answers: Ethayarajh et al. 2024 (arXiv:2402.01306), §4.1.

        h = log π(y|x) - log π_ref(y|x),   z = β z0
        desirable:    λ_D (1 - σ(β h - z))
        undesirable:  λ_U (1 - σ(z - β h))

    λ_D, λ_U are `desirable_weight`, `undesirable_weight`; the paper advises λ_D n_D / (λ_U n_U) between 1 and 3/2.
    Returns Σ_i w_i · loss_i and, per answer and without gradient, the loss and the implicit reward β h.
    Raises ValueError if the shapes differ or β is not positive.
    """
    same_shape(logps=logps, ref_logps=ref_logps, desirable=desirable, weights=weights)
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    rewards = beta * (logps - ref_logps)
    gain = rewards - beta * reference_point
    losses = torch.where(desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))
    return (weights * losses).sum(), KTOStats(losses.detach(), rewards.detach())


def scheduled_beta(step: int, total_steps: int, start: float, end: float | None, shape: Literal["linear", "cosine"]) -> float:
    """β of `step` (1-based): `start` at step 1, `end` at the last one, between them a line or half a cosine. `end` None: `start`."""
    if end is None or total_steps < 2:
        return start
    progress = min(max(step - 1, 0) / (total_steps - 1), 1.0)
    moved = progress if shape == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return start + (end - start) * moved
