"""Print the judged scores of several quickstart runs side by side: quickstart_table.py RUN…"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(runs: list[str]) -> None:
    rows = {run: json.loads((Path(run) / "summary.json").read_text(encoding="utf-8"))["judge"] for run in runs}
    names = list(next(iter(rows.values())))
    width = max(len(run) for run in [*runs, "mean"])
    print(" " * width, *(f"{name:>10}" for name in names))
    for run, scores in rows.items():
        print(f"{run:<{width}}", *(f"{scores[name]:10.3f}" for name in names))
    print(f"{'mean':<{width}}", *(f"{sum(scores[name] for scores in rows.values()) / len(rows):10.3f}" for name in names))


if __name__ == "__main__":
    main(sys.argv[1:])
