"""The losses of the DPO family (docs/algorithms/dpo.md).

Every function returns a sum over its items, each counted by its weight. The caller chooses the weights so that they sum to 1 over the
whole optimizer step; then any split into packs or micro-batches gives the same gradient.
"""

from __future__ import annotations

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
