"""The reward model: a scalar head that learns which answer people prefer, or the score they gave (ALGORITHMS §2)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from accord.algorithms.reward_losses import (
    compared_positions,
    log_exp_reward_loss,
    mse_reward_loss,
    pairwise_reward_loss,
    ranked_pairs,
    ranking_reward_loss,
    token_pairwise_reward_loss,
)
from accord.data.dataset import Example, Examples
from accord.data.loader import BatchOrder
from accord.data.needs import need_of
from accord.data.packing import Pack
from accord.engine.trained import TrainedModel
from accord.errors import ConfigError
from accord.models.load import load_scalar
from accord.models.normalization import Normalization, normalization_of
from accord.track.run import RunFolder
from accord.trainers.common import (
    check_context,
    export_trained,
    labels_of,
    limited,
    load_data,
    save_trained,
    spread,
    step_metrics,
)
from accord.trainers.loop import open_together, run_loop
from accord.trainers.reward_evaluation import Judged, evaluate_pairs, evaluate_scores, joined, write_evaluation

if TYPE_CHECKING:
    from accord.config import Config

log = logging.getLogger(__name__)

NORMALIZATION_SAMPLE = 256  # training examples on which scores are measured where nothing is held out


class RewardTrainer:
    """`with RewardTrainer(config, train_dataset, valid_dataset) as trainer: trainer.train()`.

    Starts from `reward_model.path` where that names a model, else from `model.path`. What it saves also says how its scores lie.
    """

    stage = "reward"

    def __init__(self, config: Config, train_dataset: Any = None, valid_dataset: Any = None) -> None:
        self.config = config = config.for_stage(self.stage)
        self.compares = config.reward.loss_type != "mse"
        self.headline: tuple[str, ...] = (
            "reward/loss",
            "reward/accuracy" if self.compares else "reward/std",
            "train/lr",
            "train/tokens_per_s",
        )
        self.best_metric: str | None = "reward/accuracy" if self.compares else "reward/loss"
        start = config.reward_model.path or config.model.path
        if start is None:
            raise ConfigError(
                "model.path: a reward model starts from a trained model. Set model.path (or reward_model.path) to a folder, a hub id or a run."
            )
        self.encoder, self.examples, _ = load_data(config, need_of(config, self.stage), train_dataset, valid_dataset, path=start)
        if config.reward.loss_type == "log_exp":
            check_no_margins(self.examples)
        self.order = BatchOrder(len(self.examples.train), config.train.batch_size, config.run.seed, config.data.shuffle)
        self.total_steps = self.order.total_steps(config.train.epochs, config.train.max_steps)
        loaded = load_scalar(start, config.model, seed=config.run.seed, trainable=True)
        loaded.tokenizer = self.encoder.tokenizer
        check_context(loaded.module, config.data.max_length)
        self.model = TrainedModel(loaded, config.train, total_steps=self.total_steps)
        self.samples: list[dict[str, Any]] = []
        self.folder: Path | None = None  # where evaluations are written, once it trains
        self._measured: tuple[int, Normalization] | None = None  # with the optimizer step it belongs to

    def train(self, run: RunFolder | None = None) -> dict[str, Any]:
        """Run to the end (or go on from the last checkpoint); returns the summary."""
        run = run or open_together(self.config, self.stage, Path(self.config.run.dir))
        self.folder = run.folder
        return run_loop(self, run)

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step: the mean loss over all pairs (prompts, scored answers) of the batch."""
        examples = [self.examples.train[i] for i in self.order.batch(step)]
        packs = self.model.pack([example.tree for example in examples])
        parts = self.model.learn(packs, lambda pack: self.judge(pack, examples))
        info = self.model.step()
        return {
            "reward/loss": sum(loss for loss, _ in parts),
            **self._statistics(joined([judged for _, judged in parts])),
            **step_metrics(info, self.model, packs, self.config.train.max_tokens),
        }

    def judge(self, pack: Pack, examples: Sequence[Example]) -> tuple[Tensor, Judged]:
        """What `pack` adds to the mean loss over `examples`, and its answers' scores. `pack.tree_index` counts in `examples`."""
        settings, device = self.config.reward, self.model.device
        own = [examples[i] for i in pack.tree_index]
        labels = labels_of(own, range(len(own))) if settings.loss_type != "ranking" else None  # margins or scores
        labels = None if labels is None else labels.to(device)
        weights = torch.full((len(own),), 1 / len(examples), device=device)
        answers = torch.arange(pack.num_sequences, device=device)
        better, worse = answers[0::2], answers[1::2]
        center = settings.center_coefficient
        if settings.loss_type == "token_pairwise":
            by_position = self.model.position_scores(pack)
            scores = torch.stack([of_answer[-1] for of_answer in by_position])
            loss = token_pairwise_reward_loss(*_compared(pack, by_position), weights, labels, center)
        else:
            scores = self.model.scores(pack)
        if settings.loss_type == "pairwise":
            loss = pairwise_reward_loss(scores[better], scores[worse], weights, labels, center)
        elif settings.loss_type == "log_exp":
            loss = log_exp_reward_loss(scores[better], scores[worse], weights, center)
        elif settings.loss_type == "ranking":
            ranks = torch.tensor([rank for example in own for rank in example.labels or ()], dtype=torch.float64, device=device)
            prompts = torch.tensor([i for i, example in enumerate(own) for _ in example.labels or ()], device=device)
            loss = ranking_reward_loss(scores, ranks, prompts, weights, center)
            better, worse, _ = ranked_pairs(ranks, prompts)
        elif settings.loss_type == "mse":
            assert labels is not None
            loss = mse_reward_loss(scores, labels, weights)
            better = worse = answers[:0]
        numbers = torch.tensor(pack.index, device=device)
        return loss, Judged(scores.detach(), pack.target_counts.to(device), numbers, better, worse)

    def _statistics(self, judged: Judged) -> dict[str, float]:
        deviation = float(judged.scores.double().std(correction=0))
        if not self.compares:
            return {**spread("reward/score", judged.scores), "reward/std": deviation}
        return {
            "reward/accuracy": float((judged.chosen > judged.rejected).double().mean()),
            **spread("reward/margin", judged.chosen - judged.rejected),
            **spread("reward/chosen", judged.chosen),
            **spread("reward/rejected", judged.rejected),
            "reward/std": deviation,
        }

    def evaluate(self, step: int) -> dict[str, float]:
        """The same numbers on the held-out part and its calibration; the whole evaluation goes to RUN/reward_evaluation.json."""
        examples = list(limited(self.examples.valid, self.config.eval.max_examples))
        if not examples:
            return {}
        loss, judged = self._judge_all(examples)
        self._measured = (self.model.schedule_step, normalization_of(judged.scores, "held-out"))
        if self.compares:
            result = evaluate_pairs(judged, examples)
            calibration = {"reward/ece": result["ece"]}
        else:
            targets = labels_of(examples, judged.examples.tolist())
            assert targets is not None
            result = evaluate_scores(judged, targets, examples)
            calibration = {"reward/calibration_error": result["calibration_error"]}
        if (folder := self.folder) is not None:
            self.model.ranks.ask_main(lambda: write_evaluation(folder, step, result))
        return {"reward/loss": loss, **self._statistics(judged), **calibration}

    def _judge_all(self, examples: Sequence[Example]) -> tuple[float, Judged]:
        """The mean loss and all scores, without gradient."""
        packs = self.model.pack([example.tree for example in examples])
        with self.model.evaluating():
            found = self.model.each(packs, lambda pack: self.judge(pack, examples))
        return sum(float(loss) for loss, _ in found), joined([judged for _, judged in found])

    def normalization(self) -> Normalization:
        """How the scores of the weights as they are now lie: over the held-out answers of an evaluation or, where nothing is held out, over
        the answers of NORMALIZATION_SAMPLE training examples, spread evenly over the data. Measured once an optimizer step, and for the EMA."""
        if self._measured is not None and self._measured[0] == self.model.schedule_step and not self.model.holds_ema:
            return self._measured[1]
        examples = list(limited(self.examples.valid, self.config.eval.max_examples))
        data: Literal["held-out", "training"] = "held-out" if examples else "training"
        if not examples:
            count = len(self.examples.train)
            some = min(count, NORMALIZATION_SAMPLE)
            examples = [self.examples.train[i * count // some] for i in range(some)]
        found = normalization_of(self._judge_all(examples)[1].scores, data)
        if not self.model.holds_ema:
            self._measured = (self.model.schedule_step, found)
        return found

    def epoch(self, step: int) -> float:
        return self.order.epoch(step)

    def state(self) -> tuple[dict, dict]:
        return self.model.state_tensors(), self.model.state()

    def load_state(self, tensors: dict, state: dict) -> None:
        self.model.load_state(tensors, state)
        self._measured = None

    def save(self, folder: Path) -> None:
        stops = self.encoder.stop_token_ids
        save_trained(self.model, folder, self.config, self.stage, stops, normalization=self.normalization)

    def export(self, run: Path) -> None:
        if not len(self.examples.valid):
            log.warning(
                "Nothing is held out: the mean and the deviation of the scores, kept with the model, are those of training answers. "
                "Set data.holdout or data.valid to have them measured on others."
            )
        stops = self.encoder.stop_token_ids
        export_trained(self.model, run, self.config, self.stage, stops, normalization=self.normalization)

    def __enter__(self) -> RewardTrainer:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def check_no_margins(examples: Examples) -> None:
    """Raise ConfigError for pairs with a margin: log_exp would not read it."""
    for part in (examples.train, examples.valid):
        marked = [i for i in range(len(part)) if part.store.labels(int(part.indices[i]))]
        if marked:
            raise ConfigError(
                f"reward.loss_type: log_exp has no margin, but {len(marked):,} pairs have one (the first is {part[marked[0]].origin}). "
                "Use reward.loss_type=pairwise, which subtracts it, or remove the column margin."
            )


def _compared(pack: Pack, by_position: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The scores that token_pairwise compares: (chosen [M], rejected [M], number of the pair [M])."""
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    pairs = []
    for number, tree in enumerate(pack.trees):
        texts = [torch.from_numpy(tree.sequence(leaf)) for leaf in tree.leaves]
        positions = compared_positions(*texts)
        for side, at in enumerate(positions):
            scores = by_position[2 * number + side]
            sides[side].append(scores[at.to(scores.device)])
        pairs.append(torch.full_like(positions[0], number))
    chosen, rejected = (torch.cat(side) for side in sides)
    return chosen, rejected, torch.cat(pairs).to(chosen.device)
