"""One picture of several runs of a stage, for the docs: a training metric of each over the steps, as a running mean.

    python scripts/compare_runs.py runs/sigmoid runs/ipo --metrics dpo/reward_accuracy dpo/reward_margin --out docs/algorithms/dpo.svg

A run is named by its folder. `--scale` divides a metric by that of its last step's largest absolute value, for losses whose rewards have
different units. Exits with a message where a run has no such metric.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

COLORS = ("#2f6fde", "#d9480f", "#2b8a3e", "#862e9c", "#0b7285", "#a61e4d")


def series(run: Path, metric: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the training lines of RUN/metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    points = [(line["step"], line[metric]) for line in lines if line["split"] == "train" and line.get(metric) is not None]
    if not points:
        sys.exit(f"{run}: no {metric} among its training steps")
    return [step for step, _ in points], [value for _, value in points]


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
    arguments = parser.parse_args()

    figure = Figure(figsize=(4.2 * len(arguments.metrics), 2.8), layout="constrained")
    panels = figure.subplots(1, len(arguments.metrics), squeeze=False)[0]
    for panel, metric in zip(panels, arguments.metrics, strict=True):
        for color, run in zip(COLORS, arguments.runs, strict=False):
            steps, values = series(run, metric)
            mean = running_mean(values, arguments.width)
            if metric in arguments.scale:
                mean = [value / (max(map(abs, mean)) or 1.0) for value in mean]
            panel.plot(steps, mean, color=color, linewidth=1.4, label=run.name)
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
