"""One picture of several runs of a stage, for the docs: a training metric of each over the steps, as a running mean.

    python scripts/compare_runs.py runs/sigmoid runs/ipo --metrics dpo/reward_accuracy dpo/reward_margin --out docs/algorithms/dpo.svg
    python scripts/compare_runs.py runs/seeds/* --by-seed --split eval --width 1 --metrics ppo/judge ppo/kl --out docs/algorithms/ppo.svg

A run is named by its folder. With `--by-seed` runs named NAME-seedN are one line, their mean, and a band of one standard deviation (n - 1)
on either side; a table of the last step is printed. `--scale` divides a metric by that of its last step's largest absolute value, for losses whose rewards have
different units. Exits with a message where a run has no such metric.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import mean, stdev

from matplotlib import rc_context
from matplotlib.figure import Figure

COLORS = ("#2f6fde", "#d9480f", "#2b8a3e", "#862e9c", "#0b7285", "#a61e4d")


Series = tuple[list[int], list[float], list[float]]  # steps, values, and their spread on either side


def series(run: Path, metric: str, split: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the lines of `split` in RUN/metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    points = [(line["step"], line[metric]) for line in lines if line["split"] == split and line.get(metric) is not None]
    if not points:
        sys.exit(f"{run}: no {metric} among its lines of {split}")
    return [step for step, _ in points], [value for _, value in points]


def grouped(runs: list[Path], by_seed: bool) -> dict[str, list[Path]]:
    """The runs of each line, by its name. Exits where --by-seed meets another name than NAME-seedN."""
    if not by_seed:
        return {run.name: [run] for run in runs}
    lines: dict[str, list[Path]] = {}
    for run in runs:
        if not (match := re.fullmatch(r"(.+)-seed\d+", run.name)):
            sys.exit(f"{run}: with --by-seed a run is named NAME-seedN")
        lines.setdefault(match[1], []).append(run)
    return lines


def mean_of(runs: list[Path], metric: str, split: str, width: int) -> Series:
    """Mean and standard deviation over the runs at each step that all of them have, each smoothed first."""
    found = [series(run, metric, split) for run in runs]
    smooth = [dict(zip(steps, running_mean(values, width), strict=True)) for steps, values in found]
    steps = sorted(set.intersection(*(set(points) for points in smooth)))
    columns = [[points[step] for points in smooth] for step in steps]
    return steps, [mean(column) for column in columns], [stdev(column) if len(column) > 1 else 0.0 for column in columns]


def running_mean(values: list[float], width: int) -> list[float]:
    """Each value's mean with those before it, at most `width` of them."""
    return [sum(part := values[max(0, i + 1 - width) : i + 1]) / len(part) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--metrics", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, default=10, help="steps of the running mean (10)")
    parser.add_argument("--scale", nargs="*", default=[], help="metrics to divide by their largest absolute mean")
    parser.add_argument("--by-seed", action="store_true", help="runs named NAME-seedN are one line with a band")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="whose lines (train)")
    arguments = parser.parse_args()
    lines = grouped(arguments.runs, arguments.by_seed)

    figure = Figure(figsize=(4.2 * len(arguments.metrics), 2.8), layout="constrained")
    panels = figure.subplots(1, len(arguments.metrics), squeeze=False)[0]
    for panel, metric in zip(panels, arguments.metrics, strict=True):
        for color, (name, runs) in zip(COLORS, lines.items(), strict=False):
            steps, values, spread = mean_of(runs, metric, arguments.split, arguments.width)
            unit = (max(map(abs, values)) or 1.0) if metric in arguments.scale else 1.0
            panel.plot(steps, [value / unit for value in values], color=color, linewidth=1.4, label=name)
            if arguments.by_seed:
                below, above = ([(v + sign * s) / unit for v, s in zip(values, spread, strict=True)] for sign in (-1, 1))
                panel.fill_between(steps, below, above, color=color, alpha=0.15, linewidth=0)
                print(f"{name:16} {metric:24} step {steps[-1]:4}  {values[-1]:.4f} ± {spread[-1]:.4f}  ({len(runs)} runs)")
        panel.set_title(metric + (" / its largest" if metric in arguments.scale else ""), fontsize=9)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8)
    with rc_context({"svg.fonttype": "none"}):  # text stays text: smaller, and it can be searched
        figure.savefig(arguments.out, format="svg", metadata={"Date": None})
    text = arguments.out.read_text(encoding="utf-8")
    arguments.out.write_text(re.sub(r"[ \t]+\n", "\n", text), encoding="utf-8")  # matplotlib leaves spaces at line ends


if __name__ == "__main__":
    main()
