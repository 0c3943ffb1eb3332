"""What the pairs or answers of one pack add to a preference step, and what is reported of them (docs/algorithms/dpo.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accord.algorithms.preference_losses import DPOStats, KTOStats, dpo_loss, kto_loss, orpo_loss, rpo_term, simpo_loss
from accord.data.trees import Tree, branching
from accord.trainers.common import spread

if TYPE_CHECKING:
    from accord.config.sections import DPO


@dataclass(frozen=True)
class Answers:
    """What was read of the S sequences of a pack. Pairs stand as chosen, rejected, chosen, …"""

    logps: Tensor  # [S] log π(y | x), summed over the response in float64
    reference: Tensor | None  # [S] log π_ref(y | x); None where the loss needs none
    lengths: Tensor  # [S] response tokens
    desirable: Tensor | None = None  # [S] bool, for kto
    paired: bool = True  # they are pairs

    def difference(self) -> float:
        """The largest |log π - log π_ref| of an answer; 0 without a reference."""
        return 0.0 if self.reference is None else float((self.logps - self.reference).abs().max())

    def detached(self) -> Answers:
        return replace(self, logps=self.logps.detach())


def pair_loss(settings: DPO, answers: Answers, beta: float, total: int) -> tuple[Tensor, DPOStats]:
    """What the pairs of a pack add to the mean loss over `total` pairs: the losses of the mix by weight, then the SFT term."""
    chosen, rejected = answers.logps[0::2], answers.logps[1::2]
    lengths = answers.lengths.double()
    chosen_lengths, rejected_lengths = lengths[0::2], lengths[1::2]
    weights = torch.full((len(chosen),), 1 / total, dtype=torch.float64, device=chosen.device)
    if settings.loss_type == "simpo":
        loss, stats = simpo_loss(chosen, rejected, chosen_lengths, rejected_lengths, weights, beta, settings.simpo_gamma)
    elif settings.loss_type == "orpo":
        loss, stats = orpo_loss(chosen, rejected, chosen_lengths, rejected_lengths, weights, settings.orpo_lambda)
    else:
        assert answers.reference is not None
        mixed = []
        for loss_type, share in settings.mix.items():
            smoothing = settings.label_smoothing if loss_type in ("sigmoid", "robust") else 0.0
            part, stats = dpo_loss(
                chosen, rejected, answers.reference[0::2], answers.reference[1::2], weights,
                beta, loss_type, smoothing, chosen_lengths, rejected_lengths,
            )  # fmt: skip
            mixed.append((share * part, share * stats.losses))
        loss = torch.stack([part for part, _ in mixed]).sum()
        stats = stats._replace(losses=torch.stack([losses for _, losses in mixed]).sum(0))  # the rewards are the same for all
    if settings.rpo_alpha is not None:
        term, per_pair = rpo_term(chosen, chosen_lengths, weights, settings.rpo_alpha)
        loss, stats = loss + term, stats._replace(losses=stats.losses + per_pair)
    return loss, stats


def answer_loss(settings: DPO, answers: Answers, beta: float, total: int, reference_point: Tensor) -> tuple[Tensor, KTOStats]:
    """What the answers of a pack add to the mean KTO loss over `total` answers."""
    assert answers.reference is not None and answers.desirable is not None
    weights = torch.full((len(answers.logps),), 1 / total, dtype=torch.float64, device=answers.logps.device)
    return kto_loss(
        answers.logps, answers.reference, answers.desirable, reference_point, weights,
        beta, settings.desirable_weight, settings.undesirable_weight,
    )  # fmt: skip


def mismatched(trees: Sequence[Tree], max_length: int, max_tokens: int) -> list[Tree]:
    """Every prompt with the answers of the next example, the last one with those of the first: what KTO's z0 is measured on.

    An answer that would make a sequence longer than `max_length` is cut. One example alone has no other: nothing comes back.
    """
    if len(trees) < 2:
        return []
    split = [_prompt_and_answers(tree) for tree in trees]
    mixed = []
    for i, (prompt, _) in enumerate(split):
        room = max_length - len(prompt)
        answers = [answer[:room] for answer in split[(i + 1) % len(split)][1]]
        together = len(prompt) + sum(map(len, answers)) <= max_tokens
        mixed += [branching(prompt, group) for group in ([answers] if together else [[answer] for answer in answers])]
    return mixed


def _prompt_and_answers(tree: Tree) -> tuple[list[int], list[list[int]]]:
    """The tokens up to the first trained one, and of each sequence those from there on."""
    prompt: list[int] = []
    answers = []
    for leaf in tree.leaves:
        tokens = tree.sequence(leaf)
        start = int(tree.sequence_trained(leaf).argmax())
        prompt = tokens[:start].tolist()
        answers.append(tokens[start:].tolist())
    return prompt, answers


# ------------------------------------------------------------------------------------------------------------------- metrics


def pair_metrics(read: Sequence[tuple[DPOStats, Answers]]) -> dict[str, float]:
    """Over all pairs of a step or of the held-out part: mean, and …/min and …/max beside it."""
    stats = [stats for stats, _ in read]
    return {
        **spread("dpo/loss", torch.cat([s.losses for s in stats])),
        **spread("dpo/chosen_reward", torch.cat([s.chosen_rewards for s in stats])),
        **spread("dpo/rejected_reward", torch.cat([s.rejected_rewards for s in stats])),
        **spread("dpo/reward_margin", torch.cat([s.margins for s in stats])),
        **spread("dpo/reward_accuracy", torch.cat([s.accuracies for s in stats])),
        **_shapes(
            torch.cat([answers.logps[0::2] for _, answers in read]),
            torch.cat([answers.logps[1::2] for _, answers in read]),
            torch.cat([answers.lengths[0::2] for _, answers in read]),
            torch.cat([answers.lengths[1::2] for _, answers in read]),
        ),
    }


def answer_metrics(
    read: Sequence[tuple[KTOStats, Answers]], beta: float, reference_point: float, paired: bool
) -> dict[str, float]:
    """The same names for KTO: the desirable answers stand for the chosen ones, the undesirable for the rejected.

    Where the data are pairs (`paired`), margin and accuracy are those of pairs. Else the margin is the difference of the two means and
    the accuracy the share of answers on their side of z = β z0. What has no answer of its kind is left out.
    """
    rewards = torch.cat([stats.rewards for stats, _ in read])
    desirable = torch.cat([answers.desirable for _, answers in read if answers.desirable is not None])
    logps = torch.cat([answers.logps for _, answers in read])
    lengths = torch.cat([answers.lengths for _, answers in read])
    good, bad = rewards[desirable], rewards[~desirable]
    metrics = {**spread("dpo/loss", torch.cat([stats.losses for stats, _ in read])), "dpo/kto_z0": reference_point}
    for name, values in (("dpo/chosen_reward", good), ("dpo/rejected_reward", bad)):
        metrics |= spread(name, values) if len(values) else {}
    metrics |= _shapes(logps[desirable], logps[~desirable], lengths[desirable], lengths[~desirable])
    if paired:
        margins = rewards[0::2] - rewards[1::2]
        return metrics | spread("dpo/reward_margin", margins) | spread("dpo/reward_accuracy", (margins > 0).double())
    right = torch.where(desirable, rewards > beta * reference_point, rewards < beta * reference_point)
    if len(good) and len(bad):
        metrics["dpo/reward_margin"] = float(good.mean() - bad.mean())
    return metrics | {"dpo/reward_accuracy": float(right.double().mean())}


def _shapes(chosen_logps: Tensor, rejected_logps: Tensor, chosen_lengths: Tensor, rejected_lengths: Tensor) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, values in (
        ("dpo/chosen_logp", chosen_logps),
        ("dpo/rejected_logp", rejected_logps),
        ("dpo/chosen_length", chosen_lengths),
        ("dpo/rejected_length", rejected_lengths),
    ):
        metrics |= spread(name, values) if len(values) else {}
    return metrics
