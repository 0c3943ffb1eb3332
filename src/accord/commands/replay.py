"""`accord replay RUN --step N`: what a step of PPO comes to when it is computed again, and its strangest answers."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.commands.inference import quiet
from accord.errors import ConfigError
from accord.track.files import plain

if TYPE_CHECKING:
    from accord.trainers.ppo_replay import Replay


def replay(run: str, step: int, tolerance: float, worst: int, as_json: bool) -> int:
    """Print the comparison, as tables or as JSON; 0 where all metrics are equal within `tolerance`, 1 where one is not."""
    if not math.isfinite(tolerance):
        raise ConfigError(f"--tolerance {tolerance}: expected a finite number from 0 on, such as 1e-5.")
    quiet()
    from accord.trainers.ppo_replay import replay_step

    result = replay_step(Path(run), step, tolerance, say=lambda text: print(text, file=sys.stderr))
    samples = worst_samples(result.samples, worst)
    if as_json:
        print(json.dumps(plain(as_object(result, samples, tolerance)), ensure_ascii=False, indent=2, allow_nan=False))
    else:
        _print(result, samples, tolerance)
    return 1 if result.differing else 0


def worst_samples(samples: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """The `most` responses with the largest |advantage| and those with the largest KL; `why` says which."""
    chosen: dict[int, list[str]] = {}
    for why, key in (("advantage", lambda i: abs(samples[i]["advantage"])), ("kl", lambda i: samples[i]["kl"])):
        for i in sorted(range(len(samples)), key=key, reverse=True)[:most]:
            chosen.setdefault(i, []).append(why)
    return [{"why": why, **samples[i]} for i, why in chosen.items()]


def as_object(result: Replay, samples: list[dict[str, Any]], tolerance: float) -> dict[str, Any]:
    metrics = [asdict(metric) for metric in result.metrics]
    return {
        "step": result.step,
        "from": result.start,
        "tolerance": tolerance,
        "equal": not result.differing,
        "metrics": {metric.pop("name"): metric for metric in metrics},
        "samples": samples,
        "notes": result.notes,
    }


def _print(result: Replay, samples: list[dict[str, Any]], tolerance: float) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title=f"Step {result.step}, as it was logged and computed again")
    table.add_column("metric")
    for column in ("logged", "again", "difference"):
        table.add_column(column, justify="right")
    for metric in result.metrics:
        both = metric.logged is not None and metric.replayed is not None
        difference = f"{metric.replayed - metric.logged:+.3g}" if both and metric.replayed != metric.logged else ""  # type: ignore[operator]
        style = "" if metric.equal else "bold red"
        table.add_row(
            metric.name,
            _number(metric.logged),
            _number(metric.replayed),
            difference or ("" if metric.equal else "≠"),
            style=style,
        )
    console.print(table)

    answers = Table(title="Its answers with the largest advantage and KL")
    for column in ("advantage", "KL", "score", "tokens"):
        answers.add_column(column, justify="right")
    answers.add_column("prompt and answer", ratio=1)
    for sample in samples:
        marks = {why: " ◀" for why in sample["why"]}
        text = Text(f"{sample['origin']}  {_short(sample['prompt'])}\n", style="dim")
        text.append(_short(sample["response"]) + (" …" if sample["truncated"] else ""), style="not dim")
        numbers = (f"{sample['advantage']:+.3f}{marks.get('advantage', '')}", f"{sample['kl']:.3f}{marks.get('kl', '')}")
        answers.add_row(*numbers, f"{sample['score']:.3f}", str(sample["tokens"]), text)
    console.print(answers)

    for note in result.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    count, differing = len(result.metrics), result.differing
    if not differing:
        console.print(f"equal: all {count} metrics, within {tolerance:g} of their size (or 1e-7)", highlight=False)
        return
    names = ", ".join(metric.name for metric in differing)
    console.print(
        f"differing: {len(differing)} of {count} metrics by more than {tolerance:g} of their size: {names}", highlight=False
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.8g}"


def _short(text: str, most: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
