"""Do the ways to improve a policy learn, and do they stay stable? Each with several seeds in the demo's world, judged as they go.

    python benchmarks/estimators.py [--methods ppo grpo …] [--seeds 1 2 3 4 5] [--out runs/estimators] [--processes 2] [--steps 45]

All start from the same SFT model and the same reward model (those of the quickstart, trained once in OUT/base). What differs between
seeds is the order of the prompts, the samples and, where there is one, nothing else: spread is that of the method. Every 5 steps the exact judge
scores one answer to each of 128 held-out requests (`ppo/judge`); nothing is trained on it and no step is chosen by it.
A run that is finished is not done again. The picture: scripts/compare_runs.py --by-seed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

STEPS = 45
COMMON = [
    "data.train=demo:prompts", "data.valid=demo:heldout", "data.max_length=192", "eval.max_examples=128", "eval.every_epochs=null", "eval.every_steps=5",
    "train.lr=2e-4", "generate.max_new_tokens=64", "ppo.missing_eos_penalty=1.0", "ppo.judge=accord.demo.judge:score", "track.tensorboard=false",
]  # fmt: skip
SINGLE = ["train.batch_size=64"]
GROUP = ["train.batch_size=16", "ppo.samples_per_prompt=4"]  # as many answers a step
CRITIC = ["critic.lr=1e-3"]
METHODS: dict[str, list[str]] = {
    "ppo": [*SINGLE, *CRITIC, "ppo.mini_batches=2", "ppo.kl.coef=0.1"],
    "grpo": [*GROUP, "ppo.advantage=grpo", "ppo.mini_batches=2", "ppo.kl.coef=0.1", "ppo.kl.place=loss", "ppo.kl.estimator=k3"],
    "rloo": [*GROUP, "ppo.advantage=rloo", "ppo.mini_batches=2", "ppo.kl.coef=0.1"],
    "reinforce_pp": [*SINGLE, "ppo.advantage=reinforce_pp", "ppo.mini_batches=2", "ppo.kl.coef=0.1"],
    "online_dpo": [*GROUP, "ppo.objective=dpo", "dpo.beta=0.3"],
    "ppo_4x4": [
        *SINGLE,
        *CRITIC,
        "ppo.ppo_epochs=4",
        "ppo.mini_batches=4",
        "ppo.kl.coef=0.1",
    ],  # sixteen optimizer steps on each experience
    "ppo_no_kl": [*SINGLE, *CRITIC, "ppo.mini_batches=2", "ppo.kl.coef=0"],  # nothing holds the policy: what becomes of it?
    "ppo_4x4_no_kl": [
        *SINGLE,
        *CRITIC,
        "train.lr=3e-4",
        "ppo.ppo_epochs=4",
        "ppo.mini_batches=4",
        "ppo.kl.coef=0",
    ],  # … and nothing slows it down
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--out", type=Path, default=Path("runs/estimators"))
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    base = [f"run.dir={options.out}/base", "pipeline.stages=[sft, reward]", "pipeline.judge=null", "pipeline.judge_prompts=null"]
    accord(options.out / "base.log", "run", "quickstart", *base)
    runs = [(method, seed) for seed in options.seeds for method in options.methods]
    with ThreadPoolExecutor(options.processes) as pool:
        for line in pool.map(lambda run: train(options.out, *run, options.steps), runs):
            print(line, flush=True)


def train(out: Path, method: str, seed: int, steps: int) -> str:
    """One run, in OUT/METHOD-seedSEED."""
    name = f"{method}-seed{seed}"
    models = [f"model.path={out}/base/sft", f"reward_model.path={out}/base/reward"]
    settings = [f"run.dir={out}/{name}", f"run.seed={seed}", f"train.max_steps={steps}", *COMMON, *METHODS[method]]
    accord(out / f"{name}.log", "ppo", *models, *settings)
    return f"{name}: finished"


def accord(log: Path, *arguments: str) -> None:
    """The command with these arguments, one thread, its output in `log`. Exits with the log's place when it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [sys.executable, "-m", "accord", *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    if done.returncode:
        sys.exit(f"accord {' '.join(arguments)} ended with {done.returncode}: see {log}")


if __name__ == "__main__":
    main()
