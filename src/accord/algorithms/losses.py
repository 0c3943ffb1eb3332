"""The losses of every stage (docs/algorithms): SFT, reward model, DPO and PPO.

Every function is a pure function of tensors and returns a sum over its items, each counted by its weight. The caller chooses the
weights so that they sum to 1 over the whole optimizer step; then any split into packs or micro-batches gives the same gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def _same_shape(**tensors: Tensor | None) -> None:
    """Broadcasting hides mistakes (a [N] weight against a [N, 1] value): items must match one to one."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))


# ----------------------------------------------------------------------------------------------------------------- SFT


def sft_loss(
    logprobs: Tensor,  # [N] log π(y_t | x, y_<t) of the trained tokens
    weights: Tensor,  # [N] what each token counts for; sums to 1 over the whole optimizer step
    mean_logprobs: Tensor | None = None,  # [N] mean over the vocabulary of log π(v | x, y_<t), for label smoothing
    label_smoothing: float = 0.0,
) -> Tensor:
    """Negative log-likelihood of the demonstrated tokens.

        L = - Σ_t w_t · ((1 - ε) log π(y_t) + ε · mean_v log π(v))

    ε is `label_smoothing` (Szegedy et al. 2016, arXiv:1512.00567: a share ε of the target is spread over the vocabulary).
    Raises ValueError if the shapes differ, or if ε is set without `mean_logprobs`.
    """
    _same_shape(logprobs=logprobs, weights=weights, mean_logprobs=mean_logprobs)
    if not label_smoothing:
        return -(weights * logprobs).sum()
    if mean_logprobs is None:
        raise ValueError("label_smoothing needs mean_logprobs")
    return -(weights * ((1 - label_smoothing) * logprobs + label_smoothing * mean_logprobs)).sum()


# -------------------------------------------------------------------------------------------------------- reward model


def pairwise_reward_loss(
    chosen: Tensor,  # [P] s_w, score of the better answer
    rejected: Tensor,  # [P] s_l, score of the worse one
    weights: Tensor,  # [P] what each pair counts for; sums to 1 over the whole optimizer step
    margin: Tensor | None = None,  # [P] how much better, where it is known; None: 0
    center_coefficient: float = 0.0,
) -> Tensor:
    """Bradley–Terry loss on the difference of two scores (Ouyang et al. 2022, arXiv:2203.02155, eq. 1; margin: Llama 2).

        L = Σ_i w_i · ( -log σ(s_w - s_l - margin) + c · (s_w + s_l)² )

    The second term keeps the scores centred at 0 (Eisenstein et al. 2023, arXiv:2312.09244), c = `center_coefficient`.
    Raises ValueError if the shapes differ.
    """
    _same_shape(chosen=chosen, rejected=rejected, weights=weights, margin=margin)
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    losses = F.softplus(-difference)  # = -log σ(difference), without overflow at either end
    if center_coefficient:
        losses = losses + center_coefficient * (chosen + rejected).square()
    return (weights * losses).sum()


def mse_reward_loss(
    scores: Tensor,  # [P] s, the model's score
    targets: Tensor,  # [P] the score in the data (0 is a score)
    weights: Tensor,  # [P] what each answer counts for; sums to 1 over the whole optimizer step
) -> Tensor:
    """Regression on given scores: L = Σ_i w_i · (s_i - target_i)². Raises ValueError if the shapes differ."""
    _same_shape(scores=scores, targets=targets, weights=weights)
    return (weights * (scores - targets).square()).sum()


# ----------------------------------------------------------------------------------------------------------------- DPO


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
    _same_shape(
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
    _same_shape(
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
    _same_shape(
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
    _same_shape(chosen_logps=chosen_logps, chosen_lengths=chosen_lengths, weights=weights)
    losses = -alpha * chosen_logps / chosen_lengths
    return (weights * losses).sum(), losses.detach()


# ----------------------------------------------------------------------------------------------------------------- PPO


class PolicyStats(NamedTuple):
    """What the surrogate objective reports, without gradient, each summed with the tokens' weights."""

    approx_kl: Tensor  # [] k3 of π_old to π
    clip_fraction: Tensor  # [] share of tokens whose clipped term is the loss
    ratio_mean: Tensor  # [] mean ρ_t


def ppo_policy_loss(
    logprobs: Tensor,  # [N] log π(y_t | x, y_<t) of the sampled tokens, current weights
    old_logprobs: Tensor,  # [N] the same under the weights that sampled them
    advantages: Tensor,  # [N] A_t, already whitened if whitening is on
    weights: Tensor,  # [N] what each token counts for; sums to 1 over the whole optimizer step
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> tuple[Tensor, PolicyStats]:
    """Clipped surrogate objective, Schulman et al. 2017 (arXiv:1707.06347), eq. 7, as a loss to minimise.

        ρ_t = exp(log π(y_t) - log π_old(y_t))
        L   = Σ_t w_t · max(-A_t ρ_t, -A_t clip(ρ_t, 1 - clip_low, 1 + clip_high))

    `clip_high` None means `clip_low`. Returns the loss and, without gradient, `approx_kl` (k3), `clip_fraction` and
    `ratio_mean`, each weighted by w. Raises ValueError if the shapes differ.
    """
    _same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high))
    loss = (weights * torch.maximum(plain, clipped)).sum()
    with torch.no_grad():
        stats = PolicyStats(
            approx_kl=(weights * (torch.expm1(log_ratio) - log_ratio)).sum(),  # k3 with d = log π_old - log π
            clip_fraction=(weights * (clipped > plain)).sum(),
            ratio_mean=(weights * ratio).sum(),
        )
    return loss, stats


def ppo_value_loss(
    values: Tensor,  # [N] V(s_t), current critic
    old_values: Tensor,  # [N] the same when the experience was made
    returns: Tensor,  # [N] R̂_t = A_t + V_old(s_t), before whitening
    weights: Tensor,  # [N] what each token counts for; sums to 1 over the whole optimizer step
    clip: float | None = 0.2,
) -> tuple[Tensor, Tensor]:
    """Squared error of the critic, with its move limited to ±`clip` (the value clipping of OpenAI's PPO code); None: no limit.

        L_V = ½ Σ_t w_t · max((V_t - R̂_t)², (clip(V_t, V_old,t ± ε_v) - R̂_t)²)

    Returns the loss and, without gradient, the weighted share of tokens whose clipped error is the loss.
    Raises ValueError if the shapes differ.
    """
    _same_shape(values=values, old_values=old_values, returns=returns, weights=weights)
    errors = (values - returns).square()
    if clip is None:
        return 0.5 * (weights * errors).sum(), weights.new_zeros(())
    limited = old_values + (values - old_values).clamp(-clip, clip)
    clipped_errors = (limited - returns).square()
    loss = 0.5 * (weights * torch.maximum(errors, clipped_errors)).sum()
    return loss, (weights * (clipped_errors > errors)).sum().detach()
