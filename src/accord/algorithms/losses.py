"""The losses of SFT and PPO (docs/algorithms); those of the reward model and of the DPO family stand beside this file.

Every function returns a sum over its items, each counted by its weight. The caller chooses the weights so that they sum to 1 over the
whole optimizer step; then any split into packs or micro-batches gives the same gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

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
    """What the surrogate objective reports, without gradient, each summed with the tokens' shares."""

    approx_kl: Tensor  # [] k3 of π_old to π
    clip_fraction: Tensor  # [] share of tokens whose clipped term is the loss
    ratio_mean: Tensor  # [] mean ρ_t


def ppo_policy_loss(
    logprobs: Tensor,  # [N] log π(y_t | x, y_<t) of the sampled tokens, current weights
    old_logprobs: Tensor,  # [N] the same under the weights that sampled them
    advantages: Tensor,  # [N] A_t, already whitened if whitening is on
    weights: Tensor,  # [N] what each token counts for (token_weights); sums to 1 over the whole optimizer step
    clip_low: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    sequence: Tensor | None = None,  # [N] which response each token belongs to: ρ of the response instead of the token's
    shares: Tensor | None = None,  # [N] what each token counts for in the statistics; None: weights
) -> tuple[Tensor, PolicyStats]:
    """Clipped surrogate objective, Schulman et al. 2017 (arXiv:1707.06347), eq. 7, as a loss to minimise.

        ρ_t = exp(log π(y_t) - log π_old(y_t))
        L   = Σ_t w_t · max(-A_t ρ_t, -A_t clip(ρ_t, 1 - clip_low, 1 + clip_high))

    `clip_high` None means `clip_low`. With `dual_clip` c, a token with A_t < 0 loses at most -c A_t (Ye et al. 2020, arXiv:1912.09729).
    With `sequence`, every token of a response has its length-normalised ratio, exp(mean_t log ρ_t), and its gradient passes through that
    mean (GSPO, Zheng et al. 2025, arXiv:2507.18071); a response must be whole. Returns the loss and, without gradient, `approx_kl` (k3
    per token), `clip_fraction` (either clip) and `ratio_mean`. Raises ValueError if the shapes differ.
    """
    same_shape(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights, sequence=sequence, shares=shares
    )
    log_ratio = logprobs - old_logprobs
    ratio = (log_ratio if sequence is None else mean_by_sequence(log_ratio, sequence)).exp()
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high))
    losses = torch.maximum(plain, limited)
    clipped = limited > plain
    if dual_clip is not None:
        most = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        clipped = clipped | (losses > most)
        losses = torch.minimum(losses, most)
    loss = (weights * losses).sum()
    with torch.no_grad():
        counted = weights if shares is None else shares
        stats = PolicyStats(
            approx_kl=(counted * (torch.expm1(log_ratio) - log_ratio)).sum(),  # k3 with d = log π_old - log π
            clip_fraction=(counted * clipped).sum(),
            ratio_mean=(counted * ratio).sum(),
        )
    return loss, stats


def mean_by_sequence(values: Tensor, sequence: Tensor) -> Tensor:
    """Each token gets the mean over the tokens of its own sequence: [N] → [N]. Sums in float64."""
    _, group, counts = torch.unique(sequence, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=torch.float64, device=values.device).index_add(0, group, values.double())
    return (sums / counts)[group].to(values.dtype)


Aggregation = Literal["token", "sequence", "constant"]


def token_weights(
    lengths: Tensor,  # [N] how many tokens the response of each token has
    tokens: int,  # response tokens of the whole optimizer step
    responses: int,  # responses of the whole optimizer step
    aggregation: Aggregation = "token",
    max_new_tokens: int = 1,
) -> Tensor:  # [N] float32
    """What each token's term counts for in the loss of an optimizer step.

        token:     1 / tokens                          the mean over all response tokens
        sequence:  1 / (responses · length)            the mean of the responses' means
        constant:  1 / (responses · max_new_tokens)    no length at all (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)

    The first two sum to 1 over the step; `constant` does not, unless every response is as long as allowed.
    """
    if aggregation == "token":
        return torch.full(lengths.shape, 1 / tokens, device=lengths.device)
    if aggregation == "sequence":
        return 1 / (responses * lengths.double()).float()
    if aggregation == "constant":
        return torch.full(lengths.shape, 1 / (responses * max_new_tokens), device=lengths.device)
    raise ValueError(f"unknown aggregation {aggregation!r}: expected token, sequence or constant")


def ppo_value_loss(
    values: Tensor,  # [N] V(s_t), current critic
    old_values: Tensor,  # [N] the same when the experience was made
    returns: Tensor,  # [N] R̂_t = A_t + V_old(s_t), before whitening
    weights: Tensor,  # [N] what each token counts for; sums to 1 over the whole optimizer step
    clip: float | None = 0.2,
    shares: Tensor | None = None,  # [N] what each token counts for in the statistics; None: weights
) -> tuple[Tensor, Tensor]:
    """Squared error of the critic, with its move limited to ±`clip` (the value clipping of OpenAI's PPO code); None: no limit.

        L_V = ½ Σ_t w_t · max((V_t - R̂_t)², (clip(V_t, V_old,t ± ε_v) - R̂_t)²)

    Returns the loss and, without gradient, the share of tokens whose clipped error is the loss.
    Raises ValueError if the shapes differ.
    """
    same_shape(values=values, old_values=old_values, returns=returns, weights=weights, shares=shares)
    errors = (values - returns).square()
    if clip is None:
        return 0.5 * (weights * errors).sum(), weights.new_zeros(())
    limited = old_values + (values - old_values).clamp(-clip, clip)
    clipped_errors = (limited - returns).square()
    loss = 0.5 * (weights * torch.maximum(errors, clipped_errors)).sum()
    counted = weights if shares is None else shares
    return loss, (counted * (clipped_errors > errors)).sum().detach()
