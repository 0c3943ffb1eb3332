"""What the report shows of a PPO run beside its curves: alarms, reward against KL, and the score beside the held-out judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.track.alarms import METRIC, NOTES
from accord.track.files import number_of, read_lines, step_of
from accord.track.metrics import Series

if TYPE_CHECKING:
    from accord.track.report import StageRun

ALARMS_SHOWN = 12


def ppo_view(run: StageRun) -> dict[str, Any] | None:
    """The section as the template shows it; None for other stages."""
    from accord.track.charts import judge_chart, kl_reward_chart

    if run.stage != "ppo":
        return None
    alarms = read_alarms(run.folder)
    steps = [row["step"] for row in alarms if row["alarm"] not in NOTES]

    def split(name: str, split: str) -> Series:
        return run.curves.get(name, {}).get(split, Series())

    return {
        "alarms": [_alarm_view(row) for row in alarms[:ALARMS_SHOWN]],
        "more_alarms": max(0, len(alarms) - ALARMS_SHOWN),
        "frontier": kl_reward_chart(
            split("ppo/kl", "train"), split("ppo/score", "train"), split("ppo/kl", "eval"), split("ppo/score", "eval"), steps
        ),
        "judge": judge_chart(split("ppo/score", "eval"), split("ppo/judge", "eval"), split("ppo/judge_error", "eval"), steps),
    }


def alarm_marks(folder: Path) -> dict[str, list[int]]:
    """Metric → the steps at which an alarm about it began to sound."""
    marks: dict[str, list[int]] = {}
    for row in read_alarms(folder):
        marks.setdefault(METRIC.get(row["alarm"], ""), []).append(row["step"])
    return marks


def read_alarms(folder: Path) -> list[dict[str, Any]]:
    """The lines of RUN/alarms.jsonl; [] where no alarm has sounded."""
    rows = read_lines(folder / "alarms.jsonl")
    return [row for row in rows if step_of(row) is not None and isinstance(row.get("alarm"), str)]


def marks_of(metrics: Sequence[str], marks: dict[str, list[int]]) -> list[int]:
    """The steps to mark on a chart of these metrics."""
    return sorted({step for name in metrics for step in marks.get(name, [])})


def _alarm_view(row: dict[str, Any]) -> dict[str, Any]:
    factor = number_of(row, "lr_factor")
    lowered = "learning rates lowered" + ("" if factor is None else f" to {factor:g} of the schedule's")
    did = {"stop": "the run was stopped", "lower_lr": lowered}
    return {
        "step": row["step"],
        "note": row["alarm"] in NOTES,
        "text": str(row.get("text", row["alarm"])),
        "did": did.get(str(row.get("action")), ""),
    }
