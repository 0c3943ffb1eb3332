"""How fast and how large Accord trains, beside TRL: DPO, reward model and SFT, the same token ids, optimizer and batches.

    python benchmarks/preference.py --data FILE [--model FOLDER] [--methods dpo-float32 dpo-bf16 reward sft] [--max-length 512]
                                    [--examples 40] [--batch 8] [--repeat 2] [--skip-rival] [--json OUT]

Runs in the environment that rivals/trl_trainer.py describes. The systems take turns (A B A B …), each turn in a process of its own, which
works alone: its peak resident memory is what the system needs, loading included, and its time that of its steps, loading left out. Both
use as many threads as OMP_NUM_THREADS says. float32 and bf16 are both systems' own (`train.precision`, `bf16=True`), masters float32. The
reference model of DPO is computed in every step by both. TRL runs without gradient checkpointing, which would cost it a second forward.
A system's speed is the median of its turns: pairs a second, or tokens without padding for SFT. The share of the matrix rate is what
Accord's model has to compute (products with weights and of attention) over what this machine's best matrix product reaches in that type.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from generation import smollm2
from machine_floor import cpu_name, measure_limits
from rich.console import Console
from rich.table import Table
from training import Method, Precision, Settings, records_of

from accord.commands.run import _quiet

_TURN = Path(__file__).with_name("training_turn.py")
_WIDTH = 140
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Rival:
    """A way to run TRL, and what Accord aims at: its speed over TRL's, its memory over TRL's."""

    name: str
    speed: float
    memory: float | None = None
    padding_free: bool = False
    packing: bool = False


@dataclass(frozen=True)
class Case:
    name: str
    method: Method
    precision: Precision
    lr: float
    rivals: tuple[Rival, ...]


CASES = (
    Case("dpo-float32", "dpo", "float32", 1e-6, (Rival("trl", 5.0, 0.4),)),
    Case("dpo-bf16", "dpo", "bf16", 1e-6, (Rival("trl", 5.0, 0.4),)),
    Case("reward", "reward", "float32", 5e-6, (Rival("trl", 3.0, 0.5),)),
    Case(
        "sft",
        "sft",
        "float32",
        1e-5,
        (
            Rival("trl padded", 2.0),
            Rival("trl padding-free", 1.2, padding_free=True),
            Rival("trl packed", 1.8, packing=True),
        ),
    ),
)


@dataclass
class Result:
    """Turns of each system at one case."""

    case: Case
    examples: int
    turns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def speed(self, system: str) -> float:
        """Pairs a second; for SFT tokens without padding a second."""
        turns = self.turns[system]
        return median((t["tokens"] if self.case.method == "sft" else self.examples) / sum(t["seconds"]) for t in turns)

    def memory(self, system: str) -> float:
        return median(turn["peak_gb"] for turn in self.turns[system])

    def rate(self) -> float:
        """Floating-point operations a second of Accord's model."""
        return median(turn["flops"] / sum(turn["seconds"]) for turn in self.turns["accord"])

    def record(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "turns": self.turns,
            "speed": {name: self.speed(name) for name in self.turns},
            "peak_gb": {name: self.memory(name) for name in self.turns},
            "flops_per_second": self.rate(),
        }


def main() -> None:
    options = parse_options()
    _quiet()
    report = Report(options)
    for case in options.methods:
        if case.precision not in report.limits:
            report.limits[case.precision] = measure_limits(_DTYPES[case.precision]).flops
        report.add(measure(case, options, report))
    report.print()


def measure(case: Case, options: argparse.Namespace, report: Report) -> Result:
    settings = Settings(
        method=case.method,
        model=str(options.model),
        data=str(options.data),
        batch=options.batch,
        max_length=options.max_length,
        lr=case.lr,
        precision=case.precision,
    )
    records, rows = records_of(settings, options.examples)
    result = Result(case, options.examples)
    rivals = () if options.skip_rival else case.rivals
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        file.write_text(json.dumps(rows), encoding="utf-8")
        task = {"rows": str(file), "records": records, "steps": math.ceil(options.examples / options.batch)}
        for _ in range(options.repeat):
            for name, extra in [("accord", {}), *((rival.name, _how(rival, settings, rows)) for rival in rivals)]:
                system = "accord" if name == "accord" else "trl"
                turn = run_turn(
                    {"settings": asdict(settings), "padding_free": False, "packing": False, **task, **extra, "system": system}
                )
                result.turns.setdefault(name, []).append(turn)
                report.progress(
                    f"{case.name}, {name}: {sum(turn['seconds']):.1f} s, {turn['peak_gb']:.2f} GB, loss {turn['loss']:.4f}"
                )
    return result


def _how(rival: Rival, settings: Settings, rows: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    batch = settings.batch
    if rival.packing:  # about as many tokens a step as the others have
        batch = max(1, round(batch * sum(len(row["input_ids"]) for row in rows) / len(rows) / settings.max_length))
    return {"settings": {**asdict(settings), "batch": batch}, "padding_free": rival.padding_free, "packing": rival.packing}


def run_turn(task: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(_TURN), json.dumps(task)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {task['system']} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


# -- what is shown -----------------------------------------------------------------------------------------------------


class Report:
    """Collects results; writes the file after each of them, so that a run that was stopped is not lost."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        console = Console()
        self.console = console if console.width >= _WIDTH else Console(width=_WIDTH)  # in a pipe it would be 80
        self.limits: dict[str, float] = {}
        self.results: list[Result] = []
        self.load_before = os.getloadavg()[0]

    def progress(self, text: str) -> None:
        self.console.print(f"[dim]{text}[/dim]", highlight=False)

    def add(self, result: Result) -> None:
        self.results.append(result)
        if self.options.json:
            text = json.dumps({**self.settings(), "results": [result.record() for result in self.results]}, indent=1)
            self.options.json.write_text(text + "\n", encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {
            "cpu": cpu_name(),
            "threads": torch.get_num_threads(),
            "load_before": self.load_before,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "trl": None if self.options.skip_rival else version("trl"),
            "matrix_rate": self.limits,
            **{name: str(getattr(self.options, name)) for name in ("model", "data", "max_length", "examples", "batch", "repeat")},
        }

    def print(self) -> None:
        self.console.print(self._table())
        say = self.settings()
        self.console.print(
            f"{say['cpu']}, {say['threads']} threads, load {self.load_before:.1f} before the start; torch {say['torch']}, "
            f"transformers {say['transformers']}, TRL {say['trl'] or 'not measured'}\n"
            f"{say['examples']} examples a turn, batch {say['batch']}, max length {say['max_length']}, medians of {say['repeat']} turns\n"
            + "\n".join(f"{dtype}: {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in self.limits.items()),
            highlight=False,
        )

    def _table(self) -> Table:
        table = Table(
            title="Training: pairs (SFT: tokens) a second and peak resident GB; ratios Accord / TRL, with what is aimed at"
        )
        for name in ("case", "rival", "Accord", "TRL", "× TRL", "GB", "TRL GB", "share of TRL's GB", "share of matrix rate"):
            table.add_column(name, justify="left" if name in ("case", "rival") else "right", no_wrap=True)
        for result in self.results:
            case = result.case
            digits = 0 if case.method == "sft" else 3
            share = f"{result.rate() / self.limits[case.precision]:.0%}"
            ours, memory = result.speed("accord"), result.memory("accord")
            rivals = [rival for rival in case.rivals if rival.name in result.turns]
            if not rivals:
                table.add_row(case.name, "–", f"{ours:,.{digits}f}", "–", "–", f"{memory:.2f}", "–", "–", share)
            for rival in rivals:
                theirs, their_memory = result.speed(rival.name), result.memory(rival.name)
                table.add_row(
                    case.name, rival.name, f"{ours:,.{digits}f}", f"{theirs:,.{digits}f}", _aimed(ours / theirs, rival.speed, True),
                    f"{memory:.2f}", f"{their_memory:.2f}", _aimed(memory / their_memory, rival.memory, False), share,
                )  # fmt: skip
        return table


def _aimed(value: float, target: float | None, more: bool) -> str:
    if target is None:
        return f"{value:.2f}"
    reached = value >= target if more else value <= target
    return f"[{'green' if reached else 'red'}]{value:.2f}[/] of {target:.1f}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct as a float32 folder (default: .accord-cache/smollm2)")
    parser.add_argument("--data", type=Path, required=True, help="preference pairs in any format that Accord reads")
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="METHOD", help=", ".join(names))
    parser.add_argument("--max-length", type=int, default=512, help="longer examples are left out")
    parser.add_argument("--examples", type=int, default=40, help="a turn; the first usable ones of the file")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=2, help="turns of each system")
    parser.add_argument("--skip-rival", action="store_true", help="measure Accord only")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args()
    options.model = smollm2(options.model)
    options.methods = [case for case in CASES if case.name in options.methods]
    return options


if __name__ == "__main__":
    main()
