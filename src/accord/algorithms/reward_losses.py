"""The losses of the reward model (docs/algorithms/reward.md).

Every function returns a sum over its items, each counted by its weight. The caller chooses the weights so that they sum to 1 over the
whole optimizer step; then any split into packs or micro-batches gives the same gradient.
"""

from __future__ import annotations

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


def mse_reward_loss(
    scores: Tensor,  # [P] s, the model's score
    targets: Tensor,  # [P] the score in the data (0 is a score)
    weights: Tensor,  # [P] what each answer counts for; sums to 1 over the whole optimizer step
) -> Tensor:
    """Regression on given scores: L = Σ_i w_i · (s_i - target_i)². Raises ValueError if the shapes differ."""
    same_shape(scores=scores, targets=targets, weights=weights)
    return (weights * (scores - targets).square()).sum()
