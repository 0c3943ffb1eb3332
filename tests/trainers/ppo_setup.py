"""What the PPO tests share: a small configuration, prompts, and answers that are not sampled but given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from accord.config import Config
from accord.config.root import merge
from accord.engine.generate import Rollout
from accord.trainers.ppo import PPOTrainer

SCORES = "tests.trainers.ppo_scores"
PROMPTS = [
    {"prompt": text}
    for text in ("How many legs?", "What is 12 plus 30?", "你好", "Help me", "Why?", "Thank you", "三加四", "Dogs")
]


def function(name: str, **options: Any) -> dict[str, Any]:
    return {"type": "function", "path": f"{SCORES}:{name}", **options}


def settings(model: Path, run: Path, changes: dict[str, Any] | None = None) -> Config:
    """PPO on a tiny model with a function as its reward; `changes` are merged in."""
    base = {
        "run": {"dir": str(run), "seed": 3},
        "model": {"path": str(model)},
        "data": {"max_length": 64, "holdout": 0.0, "cache": False},
        "train": {"batch_size": 4, "max_tokens": 256, "max_steps": 3, "lr": 1e-3, "lr_schedule": "constant", "warmup_ratio": 0.0},
        "critic": {"lr": 1e-3},
        "generate": {"max_new_tokens": 8},
        "ppo": {"rewards": [function("letters")], "clip_reward": None, "kl": {"coef": 0.1}},
        "track": {"tensorboard": False},
    }
    return Config(**merge(base, changes or {}))


def trainer(model: Path, run: Path, changes: dict[str, Any] | None = None, rows: Sequence[dict] = PROMPTS) -> PPOTrainer:
    return PPOTrainer(settings(model, run, changes), train_dataset=list(rows), valid_dataset=[dict(row) for row in rows[:3]])


def weights(model: Any) -> dict[str, torch.Tensor]:
    """A copy of what a TrainedModel trains."""
    return {name: parameter.detach().clone() for name, parameter in model.parameters.items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


class GivenAnswers:
    """A generator whose answers are written down: (tokens, finish_reason) in turn."""

    def __init__(self, answers: Sequence[tuple[Sequence[int], str]]) -> None:
        self.answers = answers
        self.dtype, self.context_length = None, None

    def prepare(self):
        pass

    refresh = release = prepare

    def generate(self, prompts, params, *, seeds=None, on_token=None):
        chosen = [self.answers[i % len(self.answers)] for i in range(len(prompts))]
        return [Rollout(list(tokens), [0.0] * len(tokens), reason) for tokens, reason in chosen]
