"""The losses of the reward model (docs/algorithms/reward.md).

Every function returns a sum over its items, each counted by its weight. The caller chooses the weights so that they sum to 1 over the
whole optimizer step; then any split into packs or micro-batches gives the same gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from accord.algorithms.shapes import same_shape


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
    same_shape(chosen=chosen, rejected=rejected, weights=weights, margin=margin)
    difference = chosen - rejected
    if margin is not None:
        difference = difference - margin
    losses = F.softplus(-difference)  # = -log σ(difference), without overflow at either end
    if center_coefficient:
        losses = losses + center_coefficient * (chosen + rejected).square()
    return (weights * losses).sum()


def log_exp_reward_loss(
    chosen: Tensor,  # [P] s_w
    rejected: Tensor,  # [P] s_l
    weights: Tensor,  # [P] what each pair counts for; sums to 1 over the whole optimizer step
    center_coefficient: float = 0.0,
) -> Tensor:
    """The same function as `pairwise_reward_loss` without margin, as ColossalChat writes it:

        L = Σ_i w_i · ( log(1 + exp(s_l - s_w)) + c · (s_w + s_l)² )

    Raises ValueError if the shapes differ.
    """
    same_shape(chosen=chosen, rejected=rejected, weights=weights)
    difference = rejected - chosen
    losses = torch.logaddexp(torch.zeros_like(difference), difference)  # the larger of the two comes before the exponential
    if center_coefficient:
        losses = losses + center_coefficient * (chosen + rejected).square()
    return (weights * losses).sum()


def ranked_pairs(
    ranks: Tensor,  # [S] place of each answer among those to its prompt, lower is better
    prompts: Tensor,  # [S] which of the prompts it answers
) -> tuple[Tensor, Tensor, Tensor]:
    """Every ordered pair of answers to one prompt that have different ranks: (better [M], worse [M], prompt [M]).

    `better` and `worse` are numbers of answers. Ties give no pair. Raises ValueError if the shapes differ.
    """
    same_shape(ranks=ranks, prompts=prompts)
    ahead = (prompts[:, None] == prompts[None, :]) & (ranks[:, None] < ranks[None, :])
    better, worse = ahead.nonzero(as_tuple=True)
    return better, worse, prompts[better]


def ranking_reward_loss(
    scores: Tensor,  # [S] the scores of all answers
    ranks: Tensor,  # [S] place of each answer among those to its prompt, lower is better
    prompts: Tensor,  # [S] which of the P prompts it answers
    weights: Tensor,  # [P] what each prompt counts for; those with a pair sum to 1 over the whole optimizer step
    center_coefficient: float = 0.0,
) -> Tensor:
    """All comparisons among K answers to one prompt (Ouyang et al. 2022, arXiv:2203.02155, eq. 1).

        L = Σ_x w_x · mean over its pairs (w, l) with rank_w < rank_l of ( -log σ(s_w - s_l) + c · (s_w + s_l)² )

    Without ties a prompt has K(K-1)/2 pairs. A prompt whose answers all share one rank adds nothing. With K = 2 it is
    `pairwise_reward_loss` without margin. Raises ValueError if the shapes differ.
    """
    same_shape(scores=scores, ranks=ranks)
    better, worse, prompt = ranked_pairs(ranks, prompts)
    shares = (weights / torch.bincount(prompt, minlength=len(weights)).clamp_min(1))[prompt]
    return pairwise_reward_loss(scores[better], scores[worse], shares, None, center_coefficient)


def compared_positions(
    chosen: Tensor,  # [L_w] token ids of prompt and better answer
    rejected: Tensor,  # [L_l] token ids of prompt and worse answer
) -> tuple[Tensor, Tensor]:
    """The positions that `token_pairwise_reward_loss` compares: (in `chosen` [T], in `rejected` [T]).

    They run from the first token where the two texts differ to the end of the longer one. Where the shorter one has ended, its last
    position is repeated. Raises ValueError if the texts are the same.
    """
    common = min(len(chosen), len(rejected))
    differs = (chosen[:common] != rejected[:common]).nonzero()
    start = int(differs[0]) if len(differs) else common
    positions = torch.arange(start, max(len(chosen), len(rejected)), device=chosen.device)
    if not len(positions):
        raise ValueError("the two texts are the same: no position tells them apart")
    return positions.clamp_max(len(chosen) - 1), positions.clamp_max(len(rejected) - 1)


def token_pairwise_reward_loss(
    chosen: Tensor,  # [M] s_w at the compared positions of all pairs
    rejected: Tensor,  # [M] s_l at the same ones
    pairs: Tensor,  # [M] which of the P pairs each position belongs to
    weights: Tensor,  # [P] what each pair counts for; sums to 1 over the whole optimizer step
    margin: Tensor | None = None,  # [P] how much better, where it is known; None: 0
    center_coefficient: float = 0.0,
) -> Tensor:
    """The pairwise loss at every position instead of the last one alone, after DeepSpeed-Chat (arXiv:2308.01320).

        L = Σ_i w_i · mean_t ( -log σ(s_{w,t} - s_{l,t} - margin) + c · (s_{w,t} + s_{l,t})² )

    t runs over what `compared_positions` gives. DeepSpeed-Chat scores the padding behind the shorter answer; here its last score is
    held. Raises ValueError if the shapes differ or a pair has no position.
    """
    same_shape(chosen=chosen, rejected=rejected, pairs=pairs)
    same_shape(weights=weights, margin=margin)
    counts = torch.bincount(pairs, minlength=len(weights))
    if len(counts) != len(weights) or bool((counts == 0).any()):
        raise ValueError(f"every one of the {len(weights)} pairs needs a position, and there are no others")
    shares = (weights / counts)[pairs]
    return pairwise_reward_loss(chosen, rejected, shares, None if margin is None else margin[pairs], center_coefficient)


def mse_reward_loss(
    scores: Tensor,  # [P] s, the model's score
    targets: Tensor,  # [P] the score in the data (0 is a score)
    weights: Tensor,  # [P] what each answer counts for; sums to 1 over the whole optimizer step
) -> Tensor:
    """Regression on given scores: L = Σ_i w_i · (s_i - target_i)². Raises ValueError if the shapes differ."""
    same_shape(scores=scores, targets=targets, weights=weights)
    return (weights * (scores - targets).square()).sum()
