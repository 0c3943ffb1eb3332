"""What the training benchmarks ask for: the same token ids, settings and learning rates for Accord and for TRL."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from accord.config import Config

Method = Literal["sft", "reward", "dpo"]
Precision = Literal["float32", "bf16"]
IGNORED = -100  # the label of a token that is no target

_NEEDS = {"sft": "demonstration", "reward": "preference", "dpo": "preference"}
_TRAINERS = {"sft": "SFTTrainer", "reward": "RewardTrainer", "dpo": "DPOTrainer"}


@dataclass(frozen=True)
class Settings:
    """One training run, whoever does it. Optimizer: AdamW with these numbers, gradients clipped at norm 1, no dropout."""

    method: Method
    model: str  # folder
    data: str
    batch: int
    max_length: int  # longer examples are left out
    lr: float
    precision: Precision = "float32"
    steps: int | None = None  # None: one pass over the rows
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_ratio: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    seed: int = 1

    def config(self, records: int, run: str = "runs/benchmark") -> Config:
        """Accord's configuration of it; `records` rows of the file are read, none is held out, none is shuffled."""
        return Config(
            run={"dir": run, "seed": self.seed},
            model={"path": self.model},
            data={
                "train": [{"path": self.data, "max_rows": records}],
                "holdout": 0.0,
                "max_length": self.max_length,
                "cache": False,
                "shuffle": False,
            },
            train={
                "batch_size": self.batch,
                "max_steps": self.steps,
                "lr": self.lr,
                "lr_schedule": self.schedule,
                "warmup_ratio": self.warmup_ratio,
                "weight_decay": self.weight_decay,
                "betas": self.betas,
                "eps": self.eps,
                "max_grad_norm": self.max_grad_norm,
                "precision": self.precision,
            },
            dpo={"loss_type": self.loss_type, "beta": self.beta, "label_smoothing": self.label_smoothing},
        )

    def rates(self, steps: int) -> list[float]:
        """The learning rate of each step, by Accord's own schedule."""
        from accord.engine.trained import scheduled_lr

        minimum = self.config(1).train.min_lr_ratio
        return [scheduled_lr(i, steps, self.lr, self.schedule, self.warmup_ratio, minimum) for i in range(1, steps + 1)]


def records_of(settings: Settings, count: int) -> tuple[int, list[dict[str, list[int]]]]:
    """The first `count` usable examples as token ids, and how many records of the file hold them.

    A pair is {prompt, chosen, rejected}, a conversation {input_ids, labels}. TRL's own tokenisation of these chats differs (its
    template marks no assistant turns, and it ends an answer otherwise), so both systems train on Accord's ids.
    """
    from accord.trainers.common import load_data

    read = count
    while True:
        config = settings.config(read).for_stage(settings.method)
        _, examples, _ = load_data(config, _NEEDS[settings.method])  # type: ignore[arg-type]
        missing = count - len(examples.train)
        if not missing:
            break
        if examples.report.train[0].read < read:
            raise SystemExit(f"error: {settings.data} holds {len(examples.train)} usable examples, {count} are asked for")
        read += missing  # a record gives one example or none
    make = _conversation if settings.method == "sft" else _pair
    return read, [make(examples.train[i].tree) for i in range(count)]


def _pair(tree: Any) -> dict[str, list[int]]:
    shared = len(tree.segments[0]) if len(tree.segments) == 3 else 0
    sides = []
    for leaf in tree.leaves:
        trained = tree.sequence_trained(leaf)[shared:]
        if not trained.all():
            raise SystemExit("error: an answer holds tokens that are no targets; TRL has no place to say so")
        sides.append(tree.sequence(leaf)[shared:].tolist())
    return {"prompt": tree.sequence(tree.leaves[0])[:shared].tolist(), "chosen": sides[0], "rejected": sides[1]}


def _conversation(tree: Any) -> dict[str, list[int]]:
    ids, trained = tree.sequence(tree.leaves[0]), tree.sequence_trained(tree.leaves[0])
    return {
        "input_ids": ids.tolist(),
        "labels": [int(token) if use else IGNORED for token, use in zip(ids, trained, strict=True)],
    }


# -- Accord ------------------------------------------------------------------------------------------------------------


def accord_trainer(settings: Settings, records: int) -> Any:
    """Accord's own trainer, loaded and ready for step 1."""
    import accord

    return getattr(accord, _TRAINERS[settings.method])(settings.config(records))


def accord_steps(trainer: Any, steps: int) -> Iterator[tuple[float, float]]:
    """(loss, seconds) of each step."""
    for step in range(1, steps + 1):
        started = time.perf_counter()
        metrics = trainer.step(step)
        yield metrics[f"{trainer.stage}/loss"], time.perf_counter() - started


def accord_flops(trainer: Any, steps: int) -> float:
    """Floating-point operations that the model needs for these steps: products with weights and of attention, nothing computed twice.

    A token passes the layers' matrices (2 · parameters, twice that again backward), a target the head; the reference goes forward only.
    """
    from accord.trainers.common import batch_packs

    module = trainer.model.inner
    config = module.config.get_text_config()
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings()
    head_size = head.weight.numel() if head is not None else 0
    outside = {id(embedding), id(head.weight) if head is not None else 0}
    layers = sum(p.numel() for p in module.parameters() if p.ndim > 1 and id(p) not in outside)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs_cost = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim  # query · key and weight · value
    forward = 0.0
    for step in range(1, steps + 1):
        for pack in batch_packs(trainer.examples.train, trainer.order.batch(step), trainer.config.train.max_tokens):
            targets = pack.num_targets if head_size else 0
            forward += 2 * layers * len(pack) + 2 * head_size * targets + pairs_cost * visible_pairs(pack.segments)
    return forward * (4 if trainer.stage == "dpo" else 3)


def visible_pairs(segments: Sequence[tuple[int, int, int]]) -> int:
    """How many (query, key) pairs attention looks at."""
    before: list[int] = []  # tokens of the ancestors
    pairs = 0
    for start, end, parent in segments:
        length = end - start
        before.append(before[parent] + segments[parent][1] - segments[parent][0] if parent >= 0 else 0)
        pairs += length * before[-1] + length * (length + 1) // 2
    return pairs


# -- what both children say of their process -----------------------------------------------------------------------------


def peak_gb() -> float:
    """The most memory this process has held (GB). Linux keeps it by address space; elsewhere what getrusage says."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
