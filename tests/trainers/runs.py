"""Tiny runs of the three offline stages for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from accord.config import Config
from accord.trainers.preference import DPOTrainer
from accord.trainers.reward import RewardTrainer
from accord.trainers.sft import SFTTrainer

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "four",
    "legs",
    "你好",
    "世界",
    "天气",
    "很好",
    "谢谢",
    "please",
    "thank",
    "you",
]


def sentence(seed: int, length: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * (seed + 3)) % len(WORDS)] for i in range(length))


def demonstrations(n: int = 12) -> list[dict[str, Any]]:
    return [{"prompt": sentence(i, 3 + i % 4), "completion": sentence(i + 50, 2 + i % 5)} for i in range(n)]


def pairs(n: int = 12) -> list[dict[str, Any]]:
    return [
        {"prompt": sentence(i, 3 + i % 4), "chosen": sentence(i + 50, 2 + i % 5), "rejected": sentence(i + 90, 1 + i % 6)}
        for i in range(n)
    ]


def labelled(n: int = 12) -> list[dict[str, Any]]:
    return [{"prompt": sentence(i, 3 + i % 4), "completion": sentence(i + 50, 2 + i % 5), "label": i % 3 > 0} for i in range(n)]


def rankings(n: int = 12) -> list[dict[str, Any]]:
    """Two to four answers each, the first of which share their opening words; now and then two of one rank."""
    return [
        {
            "prompt": sentence(i, 3 + i % 4),
            "responses": [f"well {sentence(i + 30 * k, 1 + (i + 2 * k) % 5)} {k}" for k in range(2 + i % 3)],
            "ranks": [[1, 0], [2, 0, 2], [3, 1, 2, 1]][i % 3],
        }
        for i in range(n)
    ]


def scored(n: int = 12) -> list[dict[str, Any]]:
    return [{"user_input": sentence(i, 3), "completion": sentence(i + 50, 4), "score": float(i % 6)} for i in range(n)]


STAGES = {
    "sft": (SFTTrainer, demonstrations, {}),
    "reward": (RewardTrainer, pairs, {}),
    "reward-mse": (RewardTrainer, scored, {"reward": {"loss_type": "mse"}}),
    "reward-ranking": (RewardTrainer, rankings, {"reward": {"loss_type": "ranking", "center_coefficient": 0.02}}),
    "reward-token_pairwise": (RewardTrainer, pairs, {"reward": {"loss_type": "token_pairwise", "center_coefficient": 0.02}}),
    "reward-log_exp": (RewardTrainer, pairs, {"reward": {"loss_type": "log_exp"}}),
    "dpo": (DPOTrainer, pairs, {"dpo": {"beta": 0.5}}),
    "dpo-ipo": (DPOTrainer, pairs, {"dpo": {"beta": 0.5, "loss_type": "ipo"}}),
    "dpo-hinge": (DPOTrainer, pairs, {"dpo": {"beta": 0.5, "loss_type": "hinge"}}),
    "dpo-robust": (DPOTrainer, pairs, {"dpo": {"beta": 0.5, "loss_type": "robust", "label_smoothing": 0.1}}),
    "dpo-simpo": (DPOTrainer, pairs, {"dpo": {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.5}}),
    "dpo-orpo": (DPOTrainer, pairs, {"dpo": {"loss_type": "orpo", "orpo_lambda": 0.3}}),
    "dpo-mix": (
        DPOTrainer,
        pairs,
        {"dpo": {"beta": 0.5, "loss_weights": {"sigmoid": 0.75, "hinge": 0.5}, "label_smoothing": 0.1}},
    ),
    "dpo-kto": (DPOTrainer, labelled, {"dpo": {"beta": 0.5, "loss_type": "kto", "undesirable_weight": 1.5}}),
    "dpo-rpo": (DPOTrainer, pairs, {"dpo": {"beta": 0.5, "rpo_alpha": 1.5}}),
}


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return {**base, **{k: merged(base.get(k, {}), v) if isinstance(v, dict) else v for k, v in over.items()}}


def config(model: Path, run: Path, changes: dict[str, Any] | None = None) -> Config:
    base = {
        "run": {"dir": str(run)},
        "model": {"path": str(model)},
        "data": {"holdout": 0.2, "max_length": 200, "cache": False},
        "train": {"batch_size": 4, "max_tokens": 512, "lr": 1e-3, "max_steps": 5, "epochs": 10},
        "track": {"tensorboard": False, "console_every": 1000},
        "checkpoint": {"every_seconds": None},
        "eval": {"every_epochs": None},
    }
    return Config(**merged(base, changes or {}))


def trainer(
    kind: str, model: Path, run: Path, changes: dict[str, Any] | None = None, train: Any = None, valid: Any = None
) -> Any:
    cls, data, own = STAGES[kind]
    return cls(config(model, run, merged(own, changes or {})), train if train is not None else data(), valid)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
