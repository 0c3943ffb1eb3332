"""Learning from the best of the answers to each prompt: online DPO and rejection sampling, `ppo.objective: dpo` and `sft`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from accord.algorithms.losses import sft_loss
from accord.algorithms.preference_losses import scheduled_beta
from accord.data.packing import Pack
from accord.data.trees import branching
from accord.trainers.ppo_experience import Averages, Experience, Rollouts
from accord.trainers.preference_loss import Answers, pair_loss

if TYPE_CHECKING:
    from accord.config import Config
    from accord.engine.hybrid import HybridEngine
    from accord.rewards.base import ScoreBoard

Pair = tuple[int, int]  # the numbers of the best and the worst answer to a prompt


def best_and_worst(scores: Sequence[float], groups: Sequence[int]) -> list[Pair]:
    """For each prompt the answers with the highest and the lowest score, the first of equals; equal where all are equal."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    return [(max(own, key=lambda i: scores[i]), min(own, key=lambda i: scores[i])) for own in members.values()]


def ranking_scores(board: ScoreBoard, rollouts: Rollouts, missing_eos_penalty: float) -> list[float]:
    """What answers are ranked by: their raw scores, per-token rewards added up, minus the penalty for no end."""
    return [s - missing_eos_penalty * sample.truncated for s, sample in zip(board.sums, rollouts.samples, strict=True)]


class BestUpdater:
    """`ppo_epochs` passes over the prompts of an experience in `mini_batches` optimizer steps each.

    dpo: the best answer is preferred to the worst with the loss of the section `dpo` (online DPO, Guo et al. 2024, arXiv:2402.04792,
    with the reward sources as the annotator); prompts whose answers score alike give no pair.
    sft: the best answer is imitated, its mean negative log-likelihood per token (RAFT, Dong et al. 2023, arXiv:2304.06767).
    """

    def __init__(self, config: Config, engine: HybridEngine, total_steps: int) -> None:
        self.total_steps = total_steps
        self.config, self.settings, self.engine, self.policy = config, config.ppo, engine, engine.model

    def update(self, experience: Experience) -> dict[str, float]:
        """Means over everything that was computed, each pair (or token) alike."""
        began, averages = time.perf_counter(), Averages()
        scores = ranking_scores(experience.board, experience.rollouts, self.settings.missing_eos_penalty)
        pairs = best_and_worst(scores, experience.rollouts.groups)
        if self.settings.objective == "dpo":
            pairs = [(best, worst) for best, worst in pairs if scores[best] > scores[worst]]
        counts = {"ppo/updates": 0.0, "train/tokens": 0.0, "ppo/pairs": float(len(pairs))}
        for epoch in range(self.settings.ppo_epochs):
            for own in self._minibatches(pairs, experience.number, epoch):
                packs, stats = (self._prefer if self.settings.objective == "dpo" else self._imitate)(experience, own)
                info = self.engine.step()
                averages.add(stats, len(own))
                averages.add({"train/grad_norm": info.grad_norm}, len(own))
                counts["ppo/updates"] += not info.skipped
                counts["train/tokens"] += sum(len(pack) for pack in packs)
        self.engine.times.add("train", time.perf_counter() - began)
        averages.add({"ppo/best_score": float(np.mean([scores[best] for best, _ in pairs]))} if pairs else {}, 1)
        lr = self.policy.lr(self.policy.schedule_step) if self.policy.schedule_step else 0.0
        return averages.means() | counts | {"train/lr": lr, "train/skipped": float(self.policy.skipped)}

    def _minibatches(self, pairs: Sequence[Pair], number: int, epoch: int) -> list[list[Pair]]:
        """In an order that depends on (seed, experience, epoch); sizes differ by at most one, none is empty."""
        order = np.random.default_rng([self.config.run.seed, number, epoch]).permutation(len(pairs))
        return [[pairs[i] for i in part] for part in np.array_split(order, self.settings.mini_batches) if len(part)]

    def _prefer(self, experience: Experience, pairs: Sequence[Pair]) -> tuple[list[Pack], dict[str, float]]:
        samples, dpo = experience.rollouts.samples, self.config.dpo
        beta = scheduled_beta(experience.number, self.total_steps, dpo.beta, dpo.beta_end, dpo.beta_schedule)
        trees = [branching(samples[best].prompt_ids, [samples[i].response_ids for i in (best, worst)]) for best, worst in pairs]
        packs = self.policy.pack(trees)
        reference = experience.rollouts.sum_by_response(experience.ref_logprobs)

        def compare(pack: Pack) -> tuple[Tensor, dict[str, float]]:
            out = self.policy.token_logprobs(pack, temperature=self.config.generate.temperature)
            numbers = [number for i in pack.tree_index for number in pairs[i]]
            logps = pack.sum_by_sequence(out.logprobs)
            answers = Answers(logps, reference[numbers].to(logps.device), pack.target_counts.to(logps.device))
            loss, stats = pair_loss(dpo, answers, beta, len(pairs))
            share = {"ppo/policy_loss": stats.losses, "ppo/pair_margin": stats.margins, "ppo/pair_accuracy": stats.accuracies}
            return loss, {name: float(values.sum()) / len(pairs) for name, values in share.items()}

        sums = Averages()
        for _, reported in self.policy.learn(packs, compare):
            sums.add(reported, 1)
        return packs, sums.sums

    def _imitate(self, experience: Experience, pairs: Sequence[Pair]) -> tuple[list[Pack], dict[str, float]]:
        samples = experience.rollouts.samples
        trees = [branching(samples[best].prompt_ids, [samples[best].response_ids]) for best, _ in pairs]
        packs = self.policy.pack(trees)
        tokens = sum(pack.num_targets for pack in packs)

        def imitate(pack: Pack) -> tuple[Tensor, None]:
            logprobs = self.policy.token_logprobs(pack, temperature=self.config.generate.temperature).logprobs
            return sft_loss(logprobs, torch.full_like(logprobs, 1 / tokens)), None

        return packs, {"ppo/policy_loss": sum(loss for loss, _ in self.policy.learn(packs, imitate))}
