"""Direct preference optimisation: learn from pairs without a reward model (ALGORITHMS §3)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accord.algorithms.preference_losses import DPOStats, dpo_loss, orpo_loss, rpo_term, simpo_loss
from accord.data.loader import BatchOrder
from accord.data.packing import Pack, pack_trees
from accord.engine.trained import TrainedModel
from accord.models.forward import FrozenModel
from accord.models.load import load_causal
from accord.track.run import RunFolder
from accord.trainers.common import (
    batch_packs,
    check_context,
    export_trained,
    limited,
    load_data,
    save_trained,
    spread,
    step_metrics,
)
from accord.trainers.loop import run_loop

if TYPE_CHECKING:
    from accord.config import Config

log = logging.getLogger(__name__)


class DPOTrainer:
    """`with DPOTrainer(config, train_dataset, valid_dataset) as trainer: trainer.train()`.

    The reference is a frozen model beside the policy (`reference.path`, by default the model that training starts from); with LoRA
    and no path of its own it is the policy's base, or the adapter as it was at the start: no second copy. simpo and orpo need no
    reference: none is loaded.
    """

    stage = "dpo"
    headline: tuple[str, ...] = ("dpo/loss", "dpo/reward_accuracy", "dpo/reward_margin", "train/tokens_per_s")
    best_metric: str | None = "dpo/reward_accuracy"

    def __init__(self, config: Config, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        self.config = config = config.for_stage(self.stage)
        if config.dpo.loss_type == "simpo" and config.dpo.beta < 0.5:
            log.warning(
                "dpo.beta=%s hardly tells answers apart with simpo, whose rewards are means per token. Near 2 is usual.",
                config.dpo.beta,
            )
        self.encoder, self.examples, loaded = load_data(config, "preference", train_dataset, valid_dataset)
        self.order = BatchOrder(len(self.examples.train), config.train.batch_size, config.run.seed, config.data.shuffle)
        self.total_steps = self.order.total_steps(config.train.epochs, config.train.max_steps)
        loaded = loaded or load_causal(config.model, seed=config.run.seed, trainable=True)
        loaded.tokenizer = self.encoder.tokenizer
        check_context(loaded.module, config.data.max_length)
        self.model = TrainedModel(loaded, config.train, total_steps=self.total_steps)
        self.reference = reference_for(config, self.model) if config.dpo.needs_reference else None
        # The reference never changes: its held-out numbers are computed once.
        self._eval_reference: list[Tensor | None] | None = None
        self.samples: list[dict[str, Any]] = []

    def train(self, run: RunFolder | None = None) -> dict[str, Any]:
        """Run to the end (or go on from the last checkpoint); returns the summary."""
        return run_loop(self, run)

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step: the mean loss over all pairs of the batch."""
        indices = self.order.batch(step)
        packs = batch_packs(self.examples.train, indices, self.config.train.max_tokens)
        collected = []
        for pack in packs:
            reference = self.reference_logps(pack)
            logps = pack.sum_by_sequence(self.model.token_logprobs(pack).logprobs)
            loss, stats = self._loss(pack, logps, reference, len(indices))
            self.model.backward(loss)
            collected.append((stats, logps.detach()))
        info = self.model.step()
        return {**self._statistics(collected), **step_metrics(info, self.model, packs, self.config.train.max_tokens)}

    @torch.no_grad()
    def reference_logps(self, pack: Pack) -> Tensor | None:
        """[S] log π_ref of each sequence's response, summed in float64; None for a loss that needs no reference."""
        if not self.config.dpo.needs_reference:
            return None
        if self.reference is not None:
            return pack.sum_by_sequence(self.reference.token_logprobs(pack).logprobs)
        with self.model.as_reference():
            return pack.sum_by_sequence(self.model.token_logprobs(pack).logprobs)

    def _loss(self, pack: Pack, logps: Tensor, reference: Tensor | None, total: int) -> tuple[Tensor, DPOStats]:
        """What the pairs of `pack` add to the mean loss over `total` pairs, and what each of them reports."""
        settings = self.config.dpo
        chosen, rejected = logps[0::2], logps[1::2]
        lengths = pack.target_counts.to(logps.device).double()
        chosen_lengths, rejected_lengths = lengths[0::2], lengths[1::2]
        weights = torch.full((len(pack.trees),), 1 / total, dtype=torch.float64, device=logps.device)
        if settings.loss_type == "simpo":
            loss, stats = simpo_loss(
                chosen, rejected, chosen_lengths, rejected_lengths, weights, settings.beta, settings.simpo_gamma
            )
        elif settings.loss_type == "orpo":
            loss, stats = orpo_loss(chosen, rejected, chosen_lengths, rejected_lengths, weights, settings.orpo_lambda)
        else:
            assert reference is not None
            loss, stats = dpo_loss(
                chosen, rejected, reference[0::2], reference[1::2], weights,
                settings.beta, settings.loss_type, settings.label_smoothing, chosen_lengths, rejected_lengths,
            )  # fmt: skip
        if settings.rpo_alpha is not None:
            term, per_pair = rpo_term(chosen, chosen_lengths, weights, settings.rpo_alpha)
            loss, stats = loss + term, stats._replace(losses=stats.losses + per_pair)
        return loss, stats

    def _statistics(self, collected: Sequence[tuple[DPOStats, Tensor]]) -> dict[str, float]:
        stats = [stats for stats, _ in collected]
        logps = torch.cat([logps for _, logps in collected])
        return {
            **spread("dpo/loss", torch.cat([s.losses for s in stats])),
            **spread("dpo/chosen_reward", torch.cat([s.chosen_rewards for s in stats])),
            **spread("dpo/rejected_reward", torch.cat([s.rejected_rewards for s in stats])),
            **spread("dpo/reward_margin", torch.cat([s.margins for s in stats])),
            **spread("dpo/reward_accuracy", torch.cat([s.accuracies for s in stats])),
            **spread("dpo/chosen_logp", logps[0::2]),
            **spread("dpo/rejected_logp", logps[1::2]),
        }

    def evaluate(self, step: int) -> dict[str, float]:
        """The same numbers on the held-out pairs."""
        examples = limited(self.examples.valid, self.config.eval.max_examples)
        if not examples:
            return {}
        packs = pack_trees([example.tree for example in examples], self.config.train.max_tokens)
        if self._eval_reference is None:
            self._eval_reference = [self.reference_logps(pack) for pack in packs]
        collected = []
        with self.model.evaluating():
            for pack, reference in zip(packs, self._eval_reference, strict=True):
                logps = pack.sum_by_sequence(self.model.token_logprobs(pack).logprobs)
                collected.append((self._loss(pack, logps, reference, len(examples))[1], logps))
        return self._statistics(collected)

    def epoch(self, step: int) -> float:
        return self.order.epoch(step)

    def state(self) -> tuple[dict, dict]:
        return self.model.state_tensors(), self.model.state()

    def load_state(self, tensors: dict, state: dict) -> None:
        self.model.load_state(tensors, state)

    def save(self, folder: Path) -> None:
        save_trained(self.model, folder, self.config, self.stage, self.encoder.stop_token_ids)

    def export(self, run: Path) -> None:
        export_trained(self.model, run, self.config, self.stage, self.encoder.stop_token_ids)

    def __enter__(self) -> DPOTrainer:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def reference_for(config: Config, model: TrainedModel) -> FrozenModel | None:
    """The frozen reference beside `model`, or None when LoRA's own start serves (`model.as_reference()`)."""
    from accord.models.lora import has_adapter

    path = config.reference.path
    if has_adapter(model.module) and path in (None, config.model.path):
        return None
    if path is None and config.model.path is None:  # from scratch: the reference is the same fresh model
        loaded_module = _copy_of(model)
        return FrozenModel(loaded_module, precision=config.train.precision)
    bare = config.model.model_copy(update={"lora": None})
    loaded = load_causal(
        bare,
        seed=config.run.seed,
        trainable=False,
        path=path or config.model.path,
        dtype=config.reference.dtype or config.model.dtype,
    )
    return FrozenModel(loaded.module, precision=config.train.precision)


def _copy_of(model: TrainedModel) -> Any:
    import copy

    return copy.deepcopy(model.module)
