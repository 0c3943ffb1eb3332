"""Accord's side of the PPO benchmark, GRPO included.

settings of rivals.ppo_settings  →  {"steps": [{"seconds", "parts", "tokens"}, …], "reads": [log π, score, value], "versions"}
"""

from __future__ import annotations

import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from worker import answer, step_of

PROFILE_ROWS = 45


def work(settings: dict[str, Any]) -> dict[str, Any]:
    from accord.config import Config
    from accord.trainers.ppo import PPOTrainer

    logging.disable(logging.WARNING)
    folder = Path(settings["folder"])
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    # The trainer wants a data set of its own; the steps below are given their prompts.
    rows = [{"prompt": f"Prompt {i}"} for i in range(len(prompts["tokens"]))]
    trainer = PPOTrainer(Config(**configuration(settings)), rows)
    examples = as_examples(prompts)
    reads = read(trainer, prompts["tokens"][0])
    steps = []
    for number in range(settings["steps"]):
        last = number == settings["steps"] - 1
        with profiled(settings.get("profile") if last else None):
            experience = trainer.make_experience(examples)
            trainer.update(experience)
            times = trainer.engine.times.close(len(experience))
        parts = {part: times[f"time/{part}"] for part in ("generate", "score", "logprob", "train")}
        parts["generate"] += times["time/gather"]  # renewing the sampler's copies is part of sampling
        steps.append(step_of(times["time/step"], parts, sum(experience.rollouts.lengths)))
    versions = f"Accord {version('accord')}, torch {version('torch')}, transformers {version('transformers')}"
    return {"steps": steps, "reads": reads, "versions": versions}


def configuration(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of the rivals' workers, in Accord's names; bf16: weights and Adam in float32, everything else in bfloat16."""
    folder, bf16 = Path(settings["folder"]), settings["precision"] == "bf16"
    if settings["method"] == "grpo":
        sys.path.insert(0, str(Path(__file__).parent))
        ppo: dict[str, Any] = {
            "advantage": "grpo",
            "kl": {"coef": 0.0},
            "rewards": [{"type": "function", "path": "length_reward:score"}],
        }
        models: dict[str, Any] = {}
    else:
        ppo = {"kl": {"coef": 0.05, "estimator": "k1"}, "value_coef": 0.1, "missing_eos_penalty": 1.0}
        models = {
            "reward_model": {"path": str(folder / "reward")},
            "critic": {"path": str(folder / "critic"), "lr": settings["lr"]},
        }
    new = settings["new_tokens"]
    return {
        "model": {"path": str(folder / "policy"), "dtype": "bfloat16" if bf16 else "float32"},
        **models,
        "data": {"holdout": 0.0, "cache": False},
        "train": {
            "batch_size": settings["prompts"],
            "max_steps": settings["steps"],
            "lr": settings["lr"],
            "lr_schedule": "linear",
            "warmup_ratio": 0.0,
            "betas": [0.9, 0.999],
            "precision": settings["precision"],
        },
        "ppo": {
            **ppo,
            "samples_per_prompt": settings["samples"],
            "ppo_epochs": settings["epochs"],
            "clip_reward": None,
            "ratio_threshold": None,
        },
        "generate": {"max_new_tokens": new, "min_new_tokens": new if settings["full_length"] else 0, "temperature": 1.0},
        "track": {"tensorboard": False},
    }


def as_examples(prompts: dict[str, Any]) -> list[Any]:
    from accord.data.dataset import Example
    from accord.data.records import Message, Prompt
    from accord.data.trees import single

    return [
        Example(single(ids, [False] * len(ids)), record=Prompt((Message("user", text),)))
        for ids, text in zip(prompts["tokens"], prompts["texts"], strict=True)
    ]


def read(trainer: Any, prompt: list[int]) -> list[float]:
    """What the models say of one prompt: mean log-probability of its tokens, score, value. It shows that both read the same files."""
    from accord.data.packing import make_pack
    from accord.data.trees import single

    pack = make_pack([single(prompt, [False] + [True] * (len(prompt) - 1))], [0])
    with trainer.policy.evaluating():
        reads = [float(trainer.policy.token_logprobs(pack).logprobs.mean())]
    if getattr(trainer, "critic", None) is not None:
        with trainer.critic.evaluating():
            reads += [float(trainer.sources[0].model.scores(pack)), float(trainer.critic.scores(pack))]
    return reads


def profiled(path: str | None) -> Any:
    """Inside, every operator is recorded (which slows it); the table is written to `path`."""
    from contextlib import contextmanager, nullcontext

    if path is None:
        return nullcontext()
    from torch.profiler import ProfilerActivity, profile

    @contextmanager
    def recording() -> Any:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            yield
        averages = profiler.key_averages(group_by_input_shape=True)
        Path(path).write_text(averages.table(sort_by="self_cpu_time_total", row_limit=PROFILE_ROWS, max_name_column_width=60))

    return recording()


if __name__ == "__main__":
    answer(work)
