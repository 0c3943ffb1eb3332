"""The reward model: a scalar head that learns which answer people prefer, or the score they gave (ALGORITHMS §2)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accord.algorithms.reward_losses import mse_reward_loss, pairwise_reward_loss
from accord.data.loader import BatchOrder
from accord.data.packing import Pack, pack_trees
from accord.engine.trained import TrainedModel
from accord.errors import ConfigError
from accord.models.load import load_scalar
from accord.track.run import RunFolder
from accord.trainers.common import (
    batch_packs,
    check_context,
    export_trained,
    labels_of,
    limited,
    load_data,
    save_trained,
    spread,
    step_metrics,
)
from accord.trainers.loop import run_loop

if TYPE_CHECKING:
    from accord.config import Config


class RewardTrainer:
    """`with RewardTrainer(config, train_dataset, valid_dataset) as trainer: trainer.train()`.

    Starts from `reward_model.path` where that names a model, else from `model.path`.
    """

    stage = "reward"

    def __init__(self, config: Config, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        self.config = config = config.for_stage(self.stage)
        self.pairwise = config.reward.loss_type == "pairwise"
        self.headline: tuple[str, ...] = (
            "reward/loss",
            "reward/accuracy" if self.pairwise else "reward/std",
            "train/lr",
            "train/tokens_per_s",
        )
        self.best_metric: str | None = "reward/accuracy" if self.pairwise else "reward/loss"
        start = config.reward_model.path or config.model.path
        if start is None:
            raise ConfigError(
                "model.path: a reward model starts from a trained model. Set model.path (or reward_model.path) to a folder, a hub id or a run."
            )
        self.encoder, self.examples, _ = load_data(
            config, "preference" if self.pairwise else "scored", train_dataset, valid_dataset, path=start
        )
        self.order = BatchOrder(len(self.examples.train), config.train.batch_size, config.run.seed, config.data.shuffle)
        self.total_steps = self.order.total_steps(config.train.epochs, config.train.max_steps)
        loaded = load_scalar(start, config.model, seed=config.run.seed, trainable=True)
        loaded.tokenizer = self.encoder.tokenizer
        check_context(loaded.module, config.data.max_length)
        self.model = TrainedModel(loaded, config.train, total_steps=self.total_steps)
        self.samples: list[dict[str, Any]] = []

    def train(self, run: RunFolder | None = None) -> dict[str, Any]:
        """Run to the end (or go on from the last checkpoint); returns the summary."""
        return run_loop(self, run)

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step: the mean loss over all pairs (or scored answers) of the batch."""
        indices = self.order.batch(step)
        packs = batch_packs(self.examples.train, indices, self.config.train.max_tokens)
        labels = labels_of(self.examples.train, indices)
        loss, scores = 0.0, []
        for pack in packs:
            pack_scores = self.model.scores(pack)
            pack_loss = self._loss(pack, pack_scores, labels, len(indices))
            self.model.backward(pack_loss)
            loss += float(pack_loss.detach())
            scores.append(pack_scores.detach())
        info = self.model.step()
        return {
            "reward/loss": loss,
            **self._statistics(torch.cat(scores)),
            **step_metrics(info, self.model, packs, self.config.train.max_tokens),
        }

    def _loss(self, pack: Pack, scores: Tensor, labels: Tensor | None, total: int) -> Tensor:
        """This pack's share of the step's loss; `labels` are margins or scores in the order that `pack.tree_index` counts in."""
        own = labels[list(pack.tree_index)].to(scores.device) if labels is not None else None
        weights = torch.full((len(pack.trees),), 1 / total, device=scores.device)
        if not self.pairwise:
            assert own is not None
            return mse_reward_loss(scores, own, weights)
        return pairwise_reward_loss(scores[0::2], scores[1::2], weights, own, self.config.reward.center_coefficient)

    def _statistics(self, scores: Tensor) -> dict[str, float]:
        if not self.pairwise:
            return {**spread("reward/score", scores), "reward/std": float(scores.double().std(correction=0))}
        chosen, rejected = scores[0::2].double(), scores[1::2].double()
        return {
            "reward/accuracy": float((chosen > rejected).double().mean()),
            **spread("reward/margin", chosen - rejected),
            **spread("reward/chosen", chosen),
            **spread("reward/rejected", rejected),
            "reward/std": float(scores.double().std(correction=0)),
        }

    def evaluate(self, step: int) -> dict[str, float]:
        """The same numbers on the held-out part."""
        examples = limited(self.examples.valid, self.config.eval.max_examples)
        if not examples:
            return {}
        packs = pack_trees([example.tree for example in examples], self.config.train.max_tokens)
        labels = labels_of(examples, range(len(examples)))
        loss, scores = 0.0, []
        with self.model.evaluating():
            for pack in packs:
                scores.append(self.model.scores(pack))
                loss += float(self._loss(pack, scores[-1], labels, len(examples)))
        return {"reward/loss": loss, **self._statistics(torch.cat(scores))}

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

    def __enter__(self) -> RewardTrainer:
        return self

    def __exit__(self, *exception: object) -> None:
        pass
