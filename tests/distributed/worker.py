"""One process of a test's group: does the jobs of FOLDER/jobs.json and leaves what they gave in FOLDER/<rank>.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from accord.engine.ranks import join
from accord.models.sharded import whole


def do(job: dict[str, Any]) -> Any:
    """job["do"] names a function below; the rest are its arguments."""
    arguments = dict(job)
    return globals()[arguments.pop("do")](**arguments)


def offline(
    kind: str, model: str, run: str, changes: dict[str, Any], steps: int, train: int = 7, valid: int = 3
) -> dict[str, Any]:
    """Steps of SFT, reward or DPO on `train` rows, and the evaluations before and after."""
    from tests.trainers.runs import STAGES, trainer

    rows = STAGES[kind][1](train + valid)
    with trainer(kind, Path(model), Path(run), changes, rows[:train], rows[train:]) as t:
        before = t.evaluate(0)
        curve = [t.step(step) for step in range(1, steps + 1)]
        return {"before": before, "steps": curve, "after": t.evaluate(steps), "weights": summary(t.model)}


def ppo(model: str, run: str, changes: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """Iterations of PPO on answers that it samples, with the evaluations before and after."""
    from tests.trainers.ppo_setup import PROMPTS, trainer

    with trainer(Path(model), Path(run), changes, PROMPTS[:7]) as t:
        before = t.evaluate(0)
        curve = [t.step(step) for step in range(1, steps + 1)]
        sums = summary(t.policy) | ({} if t.critic is None else {f"critic {n}": p for n, p in summary(t.critic).items()})
        return {"before": before, "steps": curve, "after": t.evaluate(steps), "weights": sums}


def summary(model: Any) -> dict[str, list[float]]:
    """Of every trained parameter, and its average: the sum, and a weighted sum that no permutation leaves alone."""
    found = {}
    for name, tensor in [*model.parameters.items(), *((f"ema {n}", p) for n, p in (model.ema or {}).items())]:
        numbers = whole(tensor.detach()).double().flatten()
        found[name] = [float(numbers.sum()), float((numbers * torch.linspace(-1, 1, len(numbers), dtype=torch.float64)).sum())]
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = [do(job) for job in json.loads((folder / "jobs.json").read_text())]
    (folder / f"{join().rank}.json").write_text(json.dumps(found))
