"""Peak memory of a few PPO steps with LoRA: a base for each model, one for all, or one for all in 4 bits.

    python benchmarks/ppo_memory.py MODEL [--steps 2] [--dtype float32] [--release]

Trains a small reward model with LoRA over MODEL first (two steps on made-up pairs), then runs PPO in a process of its own for each
setting of model.lora.share_base and model.quantization, and prints the peak resident memory, the CUDA peak where there is one, and the bytes
of all weights. The row in 4 bits needs bitsandbytes.

--release: the sampler gives its copies of the weights back before training (engine.release_inference_cache).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BASES = {"separate": (False, None), "shared": (True, None), "4-bit": (True, "nf4")}  # model.lora.share_base, model.quantization
ANSWERS = ["It has four legs.", "No idea.", "Thank you very much!", "The answer is 42."]


def settings(
    model: str, run: Path, steps: int, dtype: str, base: tuple[str | bool, str | None] = ("auto", None), release: bool = False
) -> dict[str, Any]:
    return {
        "run": {"dir": str(run), "overwrite": True},
        "model": {"path": model, "dtype": dtype, "quantization": base[1], "lora": {"rank": 8, "share_base": base[0]}},
        "data": {"max_length": 64, "holdout": 0.0, "cache": False},
        "train": {"batch_size": 2, "max_tokens": 256, "max_steps": steps, "epochs": 100},
        "generate": {"max_new_tokens": 16},
        "engine": {"release_inference_cache": release},
        "eval": {"at_start": False, "every_epochs": None},
        "track": {"tensorboard": False},
    }


def train_reward(model: str, run: Path, dtype: str) -> None:
    from accord import Config, RewardTrainer

    rows = [{"prompt": f"Question {i}?", "chosen": ANSWERS[i % 4], "rejected": ANSWERS[(i + 1) % 4]} for i in range(8)]
    with RewardTrainer(Config(**settings(model, run, 2, dtype)), rows, rows[:2]) as trainer:
        trainer.train()


def train_ppo(model: str, reward: Path, run: Path, steps: int, dtype: str, base: str, release: bool) -> dict[str, Any]:
    import torch

    from accord import Config, PPOTrainer

    path = reward / ("adapter" if BASES[base][0] else "model")
    config = Config(**settings(model, run, steps, dtype, BASES[base], release), reward_model={"path": str(path)})
    rows = [{"prompt": f"Question {i}?"} for i in range(8)]
    with PPOTrainer(config, rows, rows[:2]) as trainer:
        for step in range(1, steps + 1):
            trainer.step(step)
        modules = [trainer.policy.module, trainer.critic.module]
        modules += [source.model.module for source in trainer.sources]
        tensors = {t.data_ptr(): t.numel() * t.element_size() for m in modules for t in (*m.parameters(), *m.buffers())}
    cuda = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"weights": sum(tensors.values()), "cuda": cuda, "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--release", action="store_true")
    parser.add_argument("--only", choices=list(BASES), help=argparse.SUPPRESS)
    parser.add_argument("--reward", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.only:
            run = Path(folder) / "ppo"
            found = train_ppo(options.model, options.reward, run, options.steps, options.dtype, options.only, options.release)
            print(json.dumps(found))
            return
        reward = options.reward or Path(folder) / "reward"
        if options.reward is None:
            train_reward(options.model, reward, options.dtype)
        print(f"{'':10} {'weights':>12} {'peak resident':>14} {'peak CUDA':>10}   (GiB)")
        for only in BASES:
            command = [sys.executable, __file__, options.model, "--steps", str(options.steps), "--dtype", options.dtype]
            command += ["--release"] if options.release else []
            done = subprocess.run(
                [*command, "--only", only, "--reward", str(reward)], capture_output=True, text=True, env=os.environ, check=False
            )
            if done.returncode:
                sys.exit(done.stderr)
            found = json.loads(done.stdout.splitlines()[-1])
            sizes = [found[name] / 2**30 for name in ("weights", "resident", "cuda")]
            print(f"{only:10} {sizes[0]:12.2f} {sizes[1]:14.2f} {sizes[2]:10.2f}")


if __name__ == "__main__":
    main()
