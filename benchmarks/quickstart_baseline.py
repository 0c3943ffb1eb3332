"""Is it the preferences, or only more training? SFT on the preferred answers alone, for the same time.

    python benchmarks/quickstart_baseline.py RUN…

For each finished quickstart run: goes on from its SFT model with plain SFT on the chosen side of demo:preferences, for as long as
the slower of its two roads took (dpo, or reward + ppo), judges the result on the same held-out requests with the same seeds, and
prints it beside the run's own three scores. The baseline gets the better of its last model and of the one with the best held-out loss.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from accord.commands.run import _quiet
from accord.config import load_config
from accord.judging import judge_models
from accord.pipeline import train_stage


def main(runs: list[str]) -> None:
    if not runs:
        sys.exit(__doc__)
    _quiet()
    rows = []
    for run in map(Path, runs):
        scores = json.loads((run / "summary.json").read_text(encoding="utf-8"))["judge"]
        rows.append((run.name, {**scores, "sft on preferred": baseline(run)}))
    print_table(rows)


def baseline(run: Path) -> float:
    """Judged score of the baseline of one run; it is trained in RUN/baseline."""
    config = load_config(run / "config.yaml")
    walls = {stage: summary(run / stage) for stage in ("sft", "reward", "dpo", "ppo")}
    seconds = max(walls["dpo"]["wall_s"], walls["reward"]["wall_s"] + walls["ppo"]["wall_s"])
    steps = max(1, round(seconds * walls["sft"]["steps"] / walls["sft"]["wall_s"]))
    changes: dict[str, Any] = {
        "run": {"dir": str(run / "baseline")},
        "model": {"path": str(run / "sft" / "model")},
        "data": {"train": "demo:preferences"},
        "stages": {"sft": {"train": {"max_steps": steps}, "eval": {"every_epochs": 1}}},
    }
    took = train_stage("sft", config.updated(changes))["wall_s"]
    print(f"{run.name}: {steps} steps in {took:.0f} s, planned {seconds:.0f} s")
    folders = {"last": run / "baseline" / "model", "best": run / "baseline" / "best"}
    return max(judged.score for judged in judge_models(config, {name: path for name, path in folders.items() if path.exists()}))


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def print_table(rows: list[tuple[str, dict[str, float]]]) -> None:
    names = list(rows[0][1])
    width = max(len(name) for name, _ in [*rows, ("mean", {})])
    print(" " * width, *(f"{name:>18}" for name in names))
    mean = {name: sum(scores[name] for _, scores in rows) / len(rows) for name in names}
    for run, scores in [*rows, *([("mean", mean)] if len(rows) > 1 else [])]:
        print(f"{run:<{width}}", *(f"{scores[name]:18.3f}" for name in names))


if __name__ == "__main__":
    main(sys.argv[1:])
