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
GROUP = ["ppo.samples_per_prompt=4", "train.batch_size=32"]  # as many answers a step as the others: 128
METHODS: dict[str, list[str]] = {
    "ppo": [],
    "grpo": ["ppo.advantage=grpo", "ppo.kl.place=loss", "ppo.kl.estimator=k3", *GROUP],
    "rloo": ["ppo.advantage=rloo", *GROUP],
    "reinforce_pp": ["ppo.advantage=reinforce_pp"],
    "online_dpo": ["ppo.objective=dpo", "ppo.mini_batches=1", "dpo.beta=0.3", *GROUP],
    "ppo_4x4": ["ppo.ppo_epochs=4", "ppo.mini_batches=4"],  # sixteen optimizer steps on each experience
    "ppo_no_kl": ["ppo.kl.coef=0"],  # nothing holds the policy: what becomes of it?
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--out", type=Path, default=Path("runs/estimators"))
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    accord(
        options.out / "base.log",
        "run",
        "quickstart",
        f"run.dir={options.out}/base",
        "pipeline.stages=[sft, reward]",
        "pipeline.judge=null",
    )
    runs = [(method, seed) for seed in options.seeds for method in options.methods]
    with ThreadPoolExecutor(options.processes) as pool:
        for line in pool.map(lambda run: train(options.out, *run, options.steps), runs):
            print(line, flush=True)


def train(out: Path, method: str, seed: int, steps: int) -> str:
    """One run, in OUT/METHOD-seedSEED."""
    name = f"{method}-seed{seed}"
    accord(
        out / f"{name}.log", "ppo", "quickstart", f"run.dir={out}/{name}", f"run.seed={seed}", f"model.path={out}/base/sft",
        f"reward_model.path={out}/base/reward", f"stages.ppo.train.max_steps={steps}", "data.valid=demo:heldout", "eval.max_examples=128",
        "stages.ppo.eval.every_steps=5", "ppo.judge=accord.demo.judge:score", *METHODS[method],
    )  # fmt: skip
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
