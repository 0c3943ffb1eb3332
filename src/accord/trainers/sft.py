"""Supervised fine-tuning: imitate the assistant's turns (ALGORITHMS §1)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accord.algorithms.losses import sft_loss
from accord.data.loader import BatchOrder
from accord.data.packing import Pack
from accord.engine.trained import TrainedModel, count_targets
from accord.models.load import load_causal
from accord.track.run import RunFolder
from accord.trainers.common import (
    batch_packs,
    check_context,
    export_trained,
    limited,
    load_data,
    perplexity,
    save_trained,
    step_metrics,
)
from accord.trainers.loop import run_loop

if TYPE_CHECKING:
    from accord.config import Config


class SFTTrainer:
    """`with SFTTrainer(config, train_dataset, valid_dataset) as trainer: trainer.train()`.

    The datasets default to `data.train` and `data.valid`; a list of records, a `datasets.Dataset` or a path may stand in.
    """

    stage = "sft"
    headline: tuple[str, ...] = ("sft/loss", "sft/perplexity", "train/lr", "train/tokens_per_s")
    best_metric: str | None = "sft/loss"

    def __init__(self, config: Config, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        self.config = config = config.for_stage(self.stage)
        self.encoder, self.examples, loaded = load_data(
            config, "demonstration", train_dataset, valid_dataset, train_on=config.sft.train_on
        )
        self.order = BatchOrder(len(self.examples.train), config.train.batch_size, config.run.seed, config.data.shuffle)
        self.total_steps = self.order.total_steps(config.train.epochs, config.train.max_steps)
        loaded = loaded or load_causal(config.model, seed=config.run.seed, trainable=True)
        loaded.tokenizer = self.encoder.tokenizer
        check_context(loaded.module, config.data.max_length)
        self.model = TrainedModel(loaded, config.train, total_steps=self.total_steps)
        self.samples: list[dict[str, Any]] = []

    def train(self, run: RunFolder | None = None) -> dict[str, Any]:
        """Run to the end (or go on from the last checkpoint); returns the summary."""
        return run_loop(self, run)

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step: the mean negative log-likelihood over all trained tokens of the batch."""
        settings = self.config.sft
        packs = batch_packs(self.model, self.examples.train, self.order.batch(step))
        total = count_targets(packs)

        def read(pack: Pack) -> tuple[Tensor, float]:
            """What the pack adds to the loss, and to the mean log-likelihood."""
            out = self.model.token_logprobs(pack, mean=settings.label_smoothing > 0, embedding_noise=settings.neftune_alpha)
            weights = torch.full_like(out.logprobs, 1 / total)
            loss = sft_loss(out.logprobs, weights, out.mean_logprobs, settings.label_smoothing)
            return loss, float(out.logprobs.detach().double().sum()) / total

        parts = self.model.learn([pack for pack in packs if pack.num_targets], read)
        info = self.model.step()
        return {
            "sft/loss": sum(loss for loss, _ in parts),
            "sft/perplexity": perplexity(-sum(likelihood for _, likelihood in parts)),
            **step_metrics(info, self.model, packs, self.config.train.max_tokens),
        }

    def evaluate(self, step: int) -> dict[str, float]:
        """The held-out loss per token, and its exponential."""
        examples = limited(self.examples.valid, self.config.eval.max_examples)
        packs = [pack for pack in self.model.pack([example.tree for example in examples]) if pack.num_targets]
        total = count_targets(packs)
        if not total:
            return {}
        with self.model.evaluating():
            sums = self.model.each(packs, lambda pack: float(self.model.token_logprobs(pack).logprobs.double().sum()))
        loss = -sum(sums) / total
        return {"sft/loss": loss, "sft/perplexity": perplexity(loss)}

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

    def __enter__(self) -> SFTTrainer:
        return self

    def __exit__(self, *exception: object) -> None:
        pass
