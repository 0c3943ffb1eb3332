"""How fast Accord generates, beside `transformers.generate` and vLLM, and beside what this machine could do at best.

    python benchmarks/generation.py [--model FOLDER] [--cases ragged uniform32 …] [--dtypes float32 bfloat16] [--repeat 3]
                                    [--vllm-python PATH] [--json OUT]

The engines take turns (A B C A B C …) at the same seeded requests, one works while the others are idle, and the median of its turns
counts. Every answer has a length that was asked for; no end token shortens it. How vLLM is installed: rivals/vllm_client.py.
Run it on a machine that does nothing else: a second load slows the engines several-fold, and not alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from base_models import smollm2, tiny_llama
from machine_floor import Limits, ModelSize, cpu_name, floor_seconds, measure_limits
from rich.console import Console
from rich.table import Table
from rivals import Engine, Turn
from rivals.hf import Transformers
from rivals.vllm_client import Vllm
from workloads import CASES, Case, Dtype, ModelName, Request, shortened

from accord.commands.run import _quiet
from accord.engine.generate import DecoderGenerator, SamplingParams

_SETTLE = 0.5  # seconds after which the threads of the engine before have gone to sleep
_WARM_UP_TOKENS = 4
_RIVALS = ("transformers", "vllm")
_WIDTH = 120


class Accord:
    """The engine that is measured. Its module is float32 as in training; the generator computes in `dtype`."""

    name = "accord"

    def __init__(self, module: Any, tokenizer: Any, dtype: Dtype, slots: int, longest_first: bool) -> None:
        started = time.perf_counter()
        self.generator = DecoderGenerator(module, tokenizer, dtype=dtype, max_slots=slots)
        self.generator.longest_first = longest_first
        self.run([Request([1], 1, 0)])
        self.start_seconds = time.perf_counter() - started

    def run(self, requests: Sequence[Request]) -> Turn:
        params = [SamplingParams(max_new_tokens=request.answer, min_new_tokens=request.answer) for request in requests]
        started = time.perf_counter()
        rollouts = self.generator.generate(
            [request.prompt for request in requests], params, seeds=[request.seed for request in requests]
        )
        return Turn(time.perf_counter() - started, [len(rollout.token_ids) for rollout in rollouts])

    def close(self) -> None:
        del self.generator


@dataclass(frozen=True)
class Result:
    """One case in one type, measured."""

    case: str
    dtype: str
    tokens: int  # asked for and counted
    seconds: dict[str, list[float]]  # engine → its turns
    floor: float  # seconds
    targets: dict[str, float]  # rival → tokens/s of Accord over the rival's

    def speed(self, engine: str) -> float | None:
        return self.tokens / median(self.seconds[engine]) if engine in self.seconds else None

    def ratio(self, rival: str) -> float | None:
        ours, theirs = self.speed("accord"), self.speed(rival)
        return ours / theirs if ours and theirs else None

    def share_of_floor(self, engine: str) -> float:
        return self.floor / median(self.seconds[engine])

    def record(self) -> dict[str, Any]:
        engines = list(self.seconds)
        return {
            **asdict(self),
            "tokens_per_second": {name: self.speed(name) for name in engines},
            "ratio": {name: self.ratio(name) for name in engines if name != "accord"},
            "share_of_floor": {name: self.share_of_floor(name) for name in engines},
        }


# -- what is measured --------------------------------------------------------------------------------------------------


def main() -> None:
    options = parse_options()
    _quiet()
    report = Report(options)
    for dtype in options.dtypes:
        report.limits[dtype] = measure_limits(getattr(torch, dtype))
        for cases in grouped(options.cases):
            with ExitStack() as stack:
                for result in measure_group(cases, dtype, options, report, stack):
                    report.add(result)
            gc.collect()
    report.print()


def grouped(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Cases that the same engines can answer, one group after the other."""

    def key(case: Case) -> tuple[str, int, bool]:
        return case.model, case.slots, case.shared_prompt

    for _, group in groupby(sorted(cases, key=key), key=key):
        yield list(group)


def measure_group(
    cases: Sequence[Case], dtype: Dtype, options: argparse.Namespace, report: Report, stack: ExitStack
) -> Iterator[Result]:
    first = cases[0]
    module, tokenizer = load(first.model, options.model, torch.float32)
    size = ModelSize.of(module, getattr(torch, dtype))
    ours = Accord(module, tokenizer, dtype, first.slots, not options.arrival_order)
    report.started(first.model, dtype, ours.start_seconds)
    if ours.generator.reason:
        report.progress(f"Accord generates {first.model} by its own forward: {ours.generator.reason}")
    engines: list[Engine] = [ours, Transformers(load(first.model, options.model, getattr(torch, dtype))[0], first.slots)]
    if options.vllm_python and first.model != "tiny":
        engines.append(open_vllm(options, dtype, first.shared_prompt, report))
    for engine in engines:
        stack.callback(engine.close)
    for case in cases:
        requests = case.requests(module.config.vocab_size)
        yield Result(
            case.name,
            dtype,
            sum(request.answer for request in requests),
            take_turns(engines, requests, case.slots, options.repeat),
            floor_seconds(requests, case.slots, size, report.limits[dtype]),
            {rival: target for (of, rival), target in case.targets.items() if of == dtype},
        )


def open_vllm(options: argparse.Namespace, dtype: Dtype, prefix_caching: bool, report: Report) -> Vllm:
    folder = smollm2(options.model)
    environment = dict(pair.split("=", 1) for pair in options.vllm_env)
    vllm = Vllm(
        options.vllm_python,
        folder,
        dtype,
        slots=options.vllm_slots,
        threads=torch.get_num_threads(),
        prefix_caching=prefix_caching,
        environment=environment,
    )
    report.vllm = f"{vllm.version}, {options.vllm_slots} slots" + "".join(f", {pair}" for pair in options.vllm_env)
    report.progress(f"vLLM {dtype}: loaded in {vllm.load_seconds:.0f} s")
    return vllm


def take_turns(engines: Sequence[Engine], requests: Sequence[Request], slots: int, repeat: int) -> dict[str, list[float]]:
    for engine in engines:
        engine.run(shortened(requests[:slots], _WARM_UP_TOKENS))
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for _ in range(repeat):
        for engine in engines:
            gc.collect()
            time.sleep(_SETTLE)
            turn = engine.run(requests)
            if turn.tokens != [request.answer for request in requests]:
                raise RuntimeError(f"{engine.name} gave other lengths than were asked for")
            seconds[engine.name].append(turn.seconds)
    return seconds


# -- models ------------------------------------------------------------------------------------------------------------


def load(name: ModelName, folder: Path | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """A module of its own for every engine, and its tokenizer (the tiny model has none: no text is ever looked at)."""
    if name == "tiny":
        return tiny_llama().to(dtype), None
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = smollm2(folder)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval(), AutoTokenizer.from_pretrained(path)


# -- what is shown -----------------------------------------------------------------------------------------------------


class Report:
    """Collects results; writes the file after each of them, so that a run that was stopped is not lost."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        console = Console()
        self.console = console if console.width >= _WIDTH else Console(width=_WIDTH)  # in a pipe it would be 80
        self.limits: dict[str, Limits] = {}
        self.start_seconds: dict[str, float] = {}
        self.vllm: str | None = None
        self.results: list[Result] = []
        self.load_before = os.getloadavg()[0]

    def started(self, model: str, dtype: str, seconds: float) -> None:
        self.start_seconds.setdefault(f"{model} {dtype}", seconds)  # the first one: later ones find warm libraries

    def progress(self, text: str) -> None:
        self.console.print(f"[dim]{text}[/dim]", highlight=False)

    def add(self, result: Result) -> None:
        self.results.append(result)
        speeds = ", ".join(f"{name} {result.speed(name):,.0f}" for name in result.seconds)
        self.progress(f"{result.case} {result.dtype}: {speeds} tokens/s")
        if self.options.json:
            text = json.dumps({**self.settings(), "results": [result.record() for result in self.results]}, indent=1)
            self.options.json.write_text(text + "\n", encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        return {
            "cpu": cpu_name(),
            "threads": torch.get_num_threads(),
            "load_before": self.load_before,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "vllm": self.vllm,
            "repeat": self.options.repeat,
            "order": "arrival" if self.options.arrival_order else "longest first",
            "limits": {dtype: asdict(limits) for dtype, limits in self.limits.items()},
            "accord_start_seconds": self.start_seconds,
        }

    def print(self) -> None:
        self.console.print(self._table())
        say = self.settings()
        lines = [
            f"{say['cpu']}, {say['threads']} threads, load {self.load_before:.1f} before the start; medians of {say['repeat']} turns; Accord starts requests in the order: {say['order']}",
            f"torch {say['torch']}, transformers {say['transformers']}, vLLM {self.vllm or 'not measured'}",
            *(f"{dtype}: {x.flops / 1e9:,.0f} GFLOP/s, {x.bytes / 1e9:,.0f} GB/s read" for dtype, x in self.limits.items()),
            *(f"Accord's start-up beyond loading, {name}: {seconds:.2f} s" for name, seconds in self.start_seconds.items()),
        ]
        self.console.print("\n".join(lines), highlight=False)

    def _table(self) -> Table:
        table = Table(title="New tokens a second; ratios are Accord's speed over the rival's, with the ratio aimed at")
        for name in ("case", "dtype", "accord", *_RIVALS, *(f"× {rival}" for rival in _RIVALS), "floor", "share of floor"):
            table.add_column(name, justify="left" if name in ("case", "dtype") else "right", no_wrap=True)
        for result in self.results:
            speeds = [_number(result.speed(name)) for name in ("accord", *_RIVALS)]
            ratios = [_ratio(result.ratio(rival), result.targets.get(rival)) for rival in _RIVALS]
            floor = [_number(result.tokens / result.floor), f"{result.share_of_floor('accord'):.0%}"]
            table.add_row(result.case, result.dtype, *speeds, *ratios, *floor)
        return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _ratio(value: float | None, target: float | None) -> str:
    if value is None:
        return "–"
    if target is None:
        return f"{value:.2f}"
    return f"[{'green' if value >= target else 'red'}]{value:.2f}[/] of {target:.1f}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names, dtypes = [case.name for case in CASES], list(get_args(Dtype))
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct as a float32 folder (default: .accord-cache/smollm2)")
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, metavar="DTYPE", help=", ".join(dtypes))
    parser.add_argument("--repeat", type=int, default=3, help="turns of each engine at each case")
    parser.add_argument("--vllm-python", type=Path, help="the Python of vLLM's virtual environment; without it vLLM is left out")
    parser.add_argument("--vllm-slots", type=int, default=64, help="vLLM's max_num_seqs")
    parser.add_argument("--vllm-env", nargs="+", default=[], metavar="NAME=VALUE", help="more settings for vLLM's process")
    parser.add_argument("--arrival-order", action="store_true", help="Accord starts requests as they come, not the longest first")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args()
    options.cases = [case for case in CASES if case.name in options.cases]
    return options


if __name__ == "__main__":
    main()
