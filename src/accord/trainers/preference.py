"""Direct preference optimisation: learn from pairs, or from answers marked good and bad, without a reward model (ALGORITHMS §3)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accord.algorithms.preference_losses import DPOStats, KTOStats, kto_reference_point, scheduled_beta
from accord.data.dataset import Example
from accord.data.loader import BatchOrder
from accord.data.needs import need_of
from accord.data.packing import Pack
from accord.engine.trained import TrainedModel
from accord.errors import ConfigError
from accord.models.load import load_causal
from accord.track.run import RunFolder
from accord.trainers.common import (
    batch_packs,
    check_context,
    export_trained,
    limited,
    load_data,
    parts,
    save_trained,
    step_metrics,
)
from accord.trainers.loop import run_loop
from accord.trainers.preference_loss import Answers, answer_loss, answer_metrics, mismatched, pair_loss, pair_metrics
from accord.trainers.reference import Reference, Split

if TYPE_CHECKING:
    from accord.config import Config

log = logging.getLogger(__name__)


class DPOTrainer:
    """`with DPOTrainer(config, train_dataset, valid_dataset) as trainer: trainer.train()`.

    The reference is a frozen model beside the policy (`reference.path`, by default the model that training starts from); with LoRA
    and no path of its own it is the policy's base, or the adapter as it was at the start: no second copy. `reference.precompute` asks
    it once before training and gives it back. simpo and orpo need no reference: none is loaded. kto learns from single answers
    marked desirable or not, or from both sides of pairs.
    """

    stage = "dpo"
    headline: tuple[str, ...] = ("dpo/loss", "dpo/reward_accuracy", "dpo/reward_margin", "train/tokens_per_s")
    best_metric: str | None = "dpo/reward_accuracy"

    def __init__(self, config: Config, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        self.config = config = config.for_stage(self.stage)
        self.settings = settings = config.dpo
        if settings.loss_type == "simpo" and min(settings.beta, settings.beta_end or settings.beta) < 0.5:
            log.warning(
                "dpo.beta=%s hardly tells answers apart with simpo, whose rewards are means per token. Near 2 is usual.",
                min(settings.beta, settings.beta_end or settings.beta),
            )
        self.encoder, self.examples, loaded = load_data(config, need_of(config, self.stage), train_dataset, valid_dataset)
        self.held_out = limited(self.examples.valid, config.eval.max_examples)
        self.order = BatchOrder(len(self.examples.train), config.train.batch_size, config.run.seed, config.data.shuffle)
        self.total_steps = self.order.total_steps(config.train.epochs, config.train.max_steps)
        loaded = loaded or load_causal(config.model, seed=config.run.seed, trainable=True)
        loaded.tokenizer = self.encoder.tokenizer
        check_context(loaded.module, config.data.max_length)
        self.model = TrainedModel(loaded, config.train, total_steps=self.total_steps)
        self.reference = Reference(config, self.model, self.examples.train, self.held_out) if settings.needs_reference else None
        self.samples: list[dict[str, Any]] = []

    def train(self, run: RunFolder | None = None) -> dict[str, Any]:
        """Run to the end (or go on from the last checkpoint); returns the summary."""
        return run_loop(self, run)

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step: the mean loss over all pairs (kto: all answers) of the batch."""
        numbers = self.order.batch(step)
        packs = batch_packs(self.model, self.examples.train, numbers)
        beta = self.beta(step)
        z0 = self.reference_point(self.examples.train, numbers)
        total = self._total(packs)

        def compare(pack: Pack) -> tuple[Tensor, tuple[Any, Answers]]:
            answers = self.read(pack, numbers, "train")
            loss, stats = self._loss(answers, beta, z0, total)
            return loss, (stats, answers.detached())

        read = [found for _, found in self.model.learn(packs, compare)]
        info = self.model.step()
        metrics = {**self._metrics(read, beta, z0), **step_metrics(info, self.model, packs, self.config.train.max_tokens)}
        if step == 1 and self.reference is not None and self.reference.rounds:
            metrics["dpo/reference_difference"] = max(answers.difference() for _, answers in read)
        return metrics

    def beta(self, step: int) -> float:
        """β of this step: `dpo.beta`, on its way to `dpo.beta_end` where that is set."""
        s = self.settings
        return scheduled_beta(step, self.total_steps, s.beta, s.beta_end, s.beta_schedule)

    def read(self, pack: Pack, numbers: Sequence[int], split: Split) -> Answers:
        """Policy and reference on one pack, whose trees are the examples `numbers` of `split`."""
        reference = self.reference.logps(pack, numbers, split) if self.reference is not None else None
        logps = pack.sum_by_sequence(self.model.token_logprobs(pack).logprobs)
        examples = self.examples.train if split == "train" else self.held_out
        answers = Answers(logps, reference, pack.target_counts.to(logps.device))
        if self.settings.loss_type != "kto":
            return answers
        labels = [label for i in pack.tree_index for label in examples[numbers[i]].labels or ()]
        paired = all(len(tree.leaves) == 2 for tree in pack.trees)
        return replace(answers, desirable=torch.tensor(labels, device=logps.device) > 0, paired=paired)

    @torch.no_grad()
    def reference_point(self, examples: Sequence[Example], numbers: Sequence[int]) -> Tensor:
        """KTO's z0 over the whole step: a first pass over its prompts with each other's answers. 0 for the other losses."""
        zero = torch.zeros((), dtype=torch.float64, device=self.model.device)
        if self.settings.loss_type != "kto":
            return zero
        frozen = self.reference
        assert frozen is not None
        trees = mismatched([examples[i].tree for i in numbers], self.config.data.max_length, self.config.train.max_tokens)

        def both(pack: Pack) -> tuple[Tensor, Tensor]:
            reference = frozen.read(pack)
            with self.model.evaluating():
                return pack.sum_by_sequence(self.model.token_logprobs(pack).logprobs), reference

        read = [(zero[None][:0], zero[None][:0]), *self.model.each(self.model.pack(trees), both)]
        policy, reference = (torch.cat(side) for side in zip(*read, strict=True))
        return kto_reference_point(policy, reference)

    def _total(self, packs: Sequence[Pack]) -> int:
        """What the loss is a mean over: pairs, or answers."""
        return sum(pack.num_sequences if self.settings.loss_type == "kto" else len(pack.trees) for pack in packs)

    def _loss(self, answers: Answers, beta: float, z0: Tensor, total: int) -> tuple[Tensor, DPOStats | KTOStats]:
        if self.settings.loss_type == "kto":
            return answer_loss(self.settings, answers, beta, total, z0)
        return pair_loss(self.settings, answers, beta, total)

    def _metrics(self, read: Sequence[tuple[Any, Answers]], beta: float, z0: Tensor) -> dict[str, float]:
        scheduled = {"dpo/beta": beta} if self.settings.beta_end is not None else {}
        if self.settings.loss_type != "kto":
            return pair_metrics(read) | scheduled
        paired = all(answers.paired for _, answers in read)
        return answer_metrics(read, beta, float(z0), paired) | scheduled

    def evaluate(self, step: int) -> dict[str, float]:
        """The same numbers on the held-out examples."""
        if not len(self.held_out):
            return {}
        beta = self.beta(step)
        groups = [(numbers, batch_packs(self.model, self.held_out, numbers)) for numbers in parts(len(self.held_out))]
        z0 = self.reference_point(self.held_out, range(len(self.held_out)))
        total = sum(self._total(packs) for _, packs in groups)
        if self.reference is not None:
            self.reference.prepare("valid")

        def compare(item: tuple[Pack, Sequence[int]]) -> tuple[Any, Answers]:
            answers = self.read(*item, "valid")
            return self._loss(answers, beta, z0, total)[1], answers

        with self.model.evaluating():
            read = self.model.each([(pack, numbers) for numbers, packs in groups for pack in packs], compare)
        return self._metrics(read, beta, z0)

    def epoch(self, step: int) -> float:
        return self.order.epoch(step)

    def state(self) -> tuple[dict, dict]:
        asked = {"reference": self.reference.weights} if self.reference is not None and self.reference.weights is not None else {}
        return self.model.state_tensors(), self.model.state() | asked

    def load_state(self, tensors: dict, state: dict) -> None:
        """Raises ConfigError where the reference that was asked before training is another model by now."""
        if self.reference is not None and state.get("reference", self.reference.weights) != self.reference.weights:
            path = self.config.reference.path or self.config.model.path
            raise ConfigError(
                f"{path}, the reference, has other weights than when this run began. Put the old ones back to go on, or start afresh "
                "with run.overwrite=true."
            )
        self.model.load_state(tensors, state)

    def save(self, folder: Path) -> None:
        save_trained(self.model, folder, self.config, self.stage, self.encoder.stop_token_ids)

    def export(self, run: Path) -> None:
        export_trained(self.model, run, self.config, self.stage, self.encoder.stop_token_ids)

    def __enter__(self) -> DPOTrainer:
        return self

    def __exit__(self, *exception: object) -> None:
        pass
