"""How fast Accord's PPO is, beside TRL's last PPOTrainer (0.24), and its GRPO beside TRL's GRPOTrainer (1.16); and in how much memory.

    python benchmarks/ppo.py --data HH_PAIRS [--trl-ppo-python PATH] [--trl-python PATH] [--model FOLDER]
                             [--cases fixed ragged …] [--dtypes float32 bf16] [--repeat 2] [--steps 2] [--json OUT]

Actor, critic, reward model and reference are SmolLM2-135M for both, from the same files (the scalar heads are random), with the same
prompts and settings. The systems take turns (A B A B …), each turn in a process of its own that loads, takes one step to warm up, and
then the steps that are timed. How the rivals are installed: rivals/trl_ppo_worker.py and rivals/trl_grpo_worker.py.

`bf16` is Accord's mixed precision (float32 master weights), measured against TRL in float32 and in its own bf16. Where answers end by
themselves, each system samples its own: the table says how many tokens those were, and compares by step and by token.
Run it on a machine that does nothing else: a second load slows the systems several-fold, and not alike.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from ppo_cases import BASELINE, CASES, PARTS, Case, Precision, Result, System, Turn, systems
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rivals.child import ask

_WIDTH = 130
_LR = 1e-6
_MICRO_BATCH = 8  # sequences that TRL's PPO trains on at once
_SAME = 1e-3  # what systems that read the same files may differ by, in a mean log-probability or a score


def main() -> None:
    options = parse_options()
    report = Report(options)
    for case in options.cases:
        with tempfile.TemporaryDirectory(prefix="accord-benchmark-") as folder:
            measure(case, Path(folder), options, report)
    report.print()


def measure(case: Case, folder: Path, options: argparse.Namespace, report: Report) -> None:
    settings = {"folder": str(folder), "data": str(options.data), "model": str(options.model) if options.model else None}
    prepared = ask(options.python, "ppo_prepare", {**settings, "case": asdict(case)}, threads=options.threads)
    report.cpu = prepared["cpu"]
    report.progress(f"{case.name}: {case.prompts} prompts, {prepared['prompt_tokens']:,} tokens")
    result = Result(case)
    report.results.append(result)
    rival = options.trl_ppo_python if case.method == "ppo" else options.trl_python
    taking_turns = systems(options.dtypes, rivals=rival is not None)
    expected: list[float] | None = None
    for turn in range(options.repeat):
        for system in list(taking_turns):
            python, worker = options.python, "accord_ppo_worker"
            if system.name == "trl":
                python, worker = rival, f"trl_{case.method}_worker"
            try:
                told = turn_settings(case, system, folder, prepared, options) | {"seed": 1 + turn}  # other samples in every turn
                answer = ask(python, worker, told, threads=options.threads)
            except RuntimeError as error:
                if system == BASELINE or system.name == "accord":
                    raise
                taking_turns.remove(system)  # TRL's bf16 is reported if it runs
                report.progress(f"{case.name}: {system} does not run: {error}")
                continue
            if system.precision == "float32":
                expected = expected or answer["reads"]
                check_same(expected, answer["reads"], system)
            report.versions.setdefault(worker, answer["versions"])
            result.add(system, Turn.read(answer))
            report.turn(result, system)


def turn_settings(
    case: Case, system: System, folder: Path, prepared: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """What a worker is told: the same for both systems but for the precision."""
    fields = ("prompts", "samples", "new_tokens", "full_length", "epochs", "method")
    return {
        **{name: getattr(case, name) for name in fields},
        "longest_prompt": case.prompt_tokens[1],
        "folder": str(folder),
        "precision": system.precision,
        "steps": 1 + options.steps,
        "lr": _LR,
        "micro_batch": min(_MICRO_BATCH, case.answers),
        "max_tokens": options.max_tokens,
        "pad": prepared["pad"],
        "eos": prepared["eos"],
        "profile": str(options.profile / f"{case.name}-{system.precision}.txt") if options.profile else None,
    }


def check_same(expected: list[float], found: list[float], system: System) -> None:
    """Raises RuntimeError when a system does not read the models that the first one read."""
    if len(expected) != len(found) or not all(math.isclose(a, b, abs_tol=_SAME) for a, b in zip(expected, found, strict=True)):
        raise RuntimeError(
            f"{system} reads other models: {found} instead of {expected} (log-probability, score, value of a prompt)"
        )


# -- what is shown -----------------------------------------------------------------------------------------------------


class Report:
    """Collects results; writes the file after every turn, so that a run that was stopped is not lost."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        console = Console()
        self.console = console if console.width >= _WIDTH else Console(width=_WIDTH)  # in a pipe it would be 80
        self.results: list[Result] = []
        self.versions: dict[str, str] = {}
        self.cpu = ""
        self.load_before = os.getloadavg()[0]

    def progress(self, text: str) -> None:
        self.console.print(f"[dim]{escape(text)}[/dim]", highlight=False)

    def turn(self, result: Result, system: System) -> None:
        turn = result.turns[system][-1]
        seconds = ", ".join(f"{step.seconds:.2f} s ({step.tokens:,} tokens)" for step in turn.steps)
        self.progress(f"{result.case.name} {system}: {seconds}, {turn.peak_gib:.2f} GiB, load {os.getloadavg()[0]:.1f}")
        if self.options.json:
            text = json.dumps(
                {**self.settings(), "results": [result.record() for result in self.results if result.turns]}, indent=1
            )
            self.options.json.write_text(text + "\n", encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        return {
            "cpu": self.cpu,
            "threads": self.options.threads,
            "load_before": self.load_before,
            "versions": self.versions,
            "repeat": self.options.repeat,
            "steps": self.options.steps,
            "lr": _LR,
            "accord_max_tokens": self.options.max_tokens,
            "trl_micro_batch": _MICRO_BATCH,
            "model": str(self.options.model or "SmolLM2-135M-Instruct"),
            "cases": {case.name: asdict(case) for case in self.options.cases},
        }

    def print(self) -> None:
        measured = [result for result in self.results if result.turns]
        self.console.print(self._steps(measured))
        if any(result.comparisons() for result in measured):
            self.console.print(self._comparisons(measured))
        say = self.settings()
        lines = [
            f"{say['cpu']}, {say['threads']} threads, load {self.load_before:.1f} before the start; medians over {say['repeat']} turns "
            f"of {say['steps']} steps; learning rate {_LR:g}",
            f"at once: Accord computes {self.options.max_tokens:,} tokens; TRL's PPO trains on {_MICRO_BATCH} sequences and reads all, its GRPO all",
            *(describe(result.case) for result in measured),
            *self.versions.values(),
        ]
        self.console.print("\n".join(lines), highlight=False)

    def _steps(self, results: list[Result]) -> Table:
        table = Table(title="Seconds of a step, and where they go")
        for name in ("case", "system"):
            table.add_column(name, no_wrap=True)
        for name in ("step", *PARTS, "answer tokens", "tokens/s", "peak GiB"):
            table.add_column(name, justify="right", no_wrap=True)
        for result in results:
            for system in result.turns:
                parts = result.parts(system)
                table.add_row(
                    result.case.name,
                    str(system),
                    f"{result.seconds(system):.2f}",
                    *(f"{parts[part]:.2f}" for part in PARTS),
                    f"{result.tokens(system):,.0f}",
                    f"{result.tokens_per_second(system):.1f}",
                    f"{result.peak_gib(system):.2f}",
                )
        return table

    def _comparisons(self, results: list[Result]) -> Table:
        table = Table(title="TRL's time over Accord's, and Accord's peak memory over TRL's, with what is aimed at")
        for name in ("case", "Accord in", "TRL in"):
            table.add_column(name, no_wrap=True)
        for name in ("× by step", "× by answer token", "memory"):
            table.add_column(name, justify="right", no_wrap=True)
        for result in results:
            for pair in result.comparisons():
                table.add_row(
                    result.case.name,
                    pair.ours.precision,
                    pair.theirs.precision,
                    against(pair.by_step, pair.speed_target, pair.by_step >= (pair.speed_target or 0)),
                    f"{pair.by_token:.2f}",
                    against(pair.memory, pair.memory_target, pair.memory <= (pair.memory_target or 0)),
                )
        return table


def describe(case: Case) -> str:
    shortest, longest = case.prompt_tokens
    return (
        f"{case.name}: {case.prompts} prompts of {longest if shortest == longest else f'{shortest} to {longest}'} tokens × {case.samples}, "
        f"{case.new_tokens} new tokens{'' if case.full_length else ' at most'}, {case.method.upper()}, passes: {case.epochs}"
    )


def against(value: float, target: float | None, reached: bool) -> str:
    if target is None:
        return f"{value:.2f}"
    return f"[{'green' if reached else 'red'}]{value:.2f}[/] of {target:.1f}"


def parse_options() -> argparse.Namespace:
    import sys

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names, precisions = [case.name for case in CASES], list(get_args(Precision))
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--data", type=Path, required=True, help="where prompts come from: HH preference pairs, or any format of data.train"
    )
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct as a float32 folder (default: .accord-cache/smollm2)")
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    parser.add_argument(
        "--dtypes", nargs="+", choices=precisions, default=precisions, metavar="DTYPE", help=", ".join(precisions)
    )
    parser.add_argument("--repeat", type=int, default=2, help="turns of each system at each case")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn that are timed, after one that is not")
    parser.add_argument("--threads", type=int, default=threads, help=f"threads of each system (default: {threads})")
    parser.add_argument("--max-tokens", type=int, default=4096, help="Accord's train.max_tokens: what it computes at once")
    parser.add_argument(
        "--trl-ppo-python", type=Path, help="the Python of TRL 0.24's virtual environment; without it Accord runs alone"
    )
    parser.add_argument("--trl-python", type=Path, help="the Python of TRL 1.16's, for GRPO; without it Accord runs alone")
    parser.add_argument("--profile", type=Path, help="record the operators of Accord's last step; tables go to this folder")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args()
    for name in ("repeat", "steps", "threads", "max_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: at least 1")
    options.python = Path(sys.executable)
    options.cases = [case for case in CASES if case.name in options.cases]
    return options


if __name__ == "__main__":
    main()
