"""The losses of SFT and PPO (docs/algorithms); those of the reward model and of the DPO family stand beside this file.

Every function returns a sum over its items, each counted by its weight. The caller chooses the weights so that they sum to 1 over the
whole optimizer step; then any split into packs or micro-batches gives the same gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from accord.algorithms.shapes import same_shape

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
    same_shape(logprobs=logprobs, weights=weights, mean_logprobs=mean_logprobs)
    if not label_smoothing:
        return -(weights * logprobs).sum()
    if mean_logprobs is None:
        raise ValueError("label_smoothing needs mean_logprobs")
    return -(weights * ((1 - label_smoothing) * logprobs + label_smoothing * mean_logprobs)).sum()


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
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
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
    same_shape(values=values, old_values=old_values, returns=returns, weights=weights)
    errors = (values - returns).square()
    if clip is None:
        return 0.5 * (weights * errors).sum(), weights.new_zeros(())
    limited = old_values + (values - old_values).clamp(-clip, clip)
    clipped_errors = (limited - returns).square()
    loss = 0.5 * (weights * torch.maximum(errors, clipped_errors)).sum()
    return loss, (weights * (clipped_errors > errors)).sum().detach()
