"""Accord's side of the PPO benchmark, GRPO included.

settings of ppo.turn_settings  →  {"steps": [{"seconds", "parts", "tokens"}, …], "reads": [log π, score, value], "versions"}
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from worker import answer, step_of

PROFILE_ROWS = 45


def work(settings: dict[str, Any]) -> dict[str, Any]:
    from accord.config import Config
    from accord.track.environment import git_commits
    from accord.trainers.ppo import PPOTrainer

    logging.disable(logging.WARNING)
    folder = Path(settings["folder"])
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    # The trainer reads conversations; here it is given prompts that are cut to a number of tokens, the same ones in every step.
    trainer = PPOTrainer(Config(**configuration(settings)), [{"prompt": f"Prompt {i}"} for i in range(settings["prompts"])])
    trainer.examples = replace(trainer.examples, train=as_examples(prompts))
    reads = read(trainer, prompts["tokens"][0])
    steps = []
    for number in range(1, settings["steps"] + 1):
        with profiled(settings["profile"] if number == settings["steps"] else None):
            metrics = trainer.step(number)
        parts = {part: metrics[f"time/{part}"] for part in ("generate", "score", "logprob", "train")}
        parts["generate"] += metrics["time/gather"]  # renewing the sampler's copies is part of sampling
        answers = settings["prompts"] * settings["samples"]
        steps.append(step_of(metrics["time/step"], parts, round(metrics["ppo/response_length"] * answers)))
    commit = git_commits().get("accord", "")[:12]
    versions = f"Accord {version('accord')} {commit}, torch {version('torch')}, transformers {version('transformers')}"
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
        "run": {"seed": settings["seed"]},
        "model": {"path": str(folder / "policy"), "dtype": "bfloat16" if bf16 else "float32"},
        **models,
        "data": {"holdout": 0.0, "cache": False, "max_length": max(64, settings["longest_prompt"])},
        "train": {
            "batch_size": settings["prompts"],
            "max_steps": settings["steps"],
            "lr": settings["lr"],
            "lr_schedule": "linear",
            "warmup_ratio": 0.0,
            "betas": [0.9, 0.999],
            "precision": settings["precision"],
            "max_tokens": settings["max_tokens"],
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


def profiled(path: str | None) -> AbstractContextManager[None]:
    """Inside, every operator is recorded (which slows it); the table is written to `path`. None: nothing is."""
    return nullcontext() if path is None else recording(Path(path))


@contextmanager
def recording(path: Path) -> Iterator[None]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield
    averages = profiler.key_averages(group_by_input_shape=True)
    table = averages.table(sort_by="self_cpu_time_total", row_limit=PROFILE_ROWS, max_name_column_width=60)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    answer(work)
