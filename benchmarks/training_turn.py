"""One turn of `preference.py` in a process of its own: one system trains on one file of token ids, and says how long its steps took.

    argv[1]: {"system": "accord" | "trl", "settings": {…}, "rows": FILE, "records": n, "steps": n, "padding_free", "packing"}
    last line of the output: {"seconds": [a step, …], "tokens": n, "peak_gb", "loss", "flops", "padded", "version"}

`tokens` are those of the sequences, without padding, a prompt that two answers share counted twice; `flops` what Accord's model needs.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from training import Settings, accord_flops, accord_steps, accord_trainer, peak_gb


def main() -> None:
    task = json.loads(sys.argv[1])
    task["settings"]["betas"] = tuple(task["settings"]["betas"])
    settings = Settings(**task["settings"])
    answer = with_accord(settings, task) if task["system"] == "accord" else with_trl(settings, task)
    print("\n" + json.dumps({**answer, "peak_gb": peak_gb()}))


def with_accord(settings: Settings, task: dict[str, Any]) -> dict[str, Any]:
    with accord_trainer(settings, task["records"]) as trainer:
        steps = list(accord_steps(trainer, task["steps"]))
        sequences = [len(e.tree.sequence(leaf)) for e in trainer.examples.train for leaf in e.tree.leaves]
        flops = accord_flops(trainer, task["steps"])
    return {
        "seconds": [seconds for _, seconds in steps],
        "tokens": sum(sequences),
        "padded": sum(e.tree.num_tokens for e in trainer.examples.train),
        "loss": steps[-1][0],
        "flops": flops,
        "version": version("accord"),
    }


def with_trl(settings: Settings, task: dict[str, Any]) -> dict[str, Any]:
    from rivals.trl_trainer import trl_trainer

    rows = json.loads(Path(task["rows"]).read_text(encoding="utf-8"))
    trainer = trl_trainer(settings, rows, [settings.lr], padding_free=task["padding_free"], packing=task["packing"])
    trainer.train()
    record = trainer.record
    return {
        "seconds": record.seconds,
        "tokens": sum(record.tokens),
        "padded": sum(record.padded),
        "loss": record.losses[-1],
        "flops": None,
        "version": version("trl"),
    }


if __name__ == "__main__":
    main()
