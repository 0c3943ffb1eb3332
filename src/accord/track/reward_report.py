"""The report's part on a reward model's newest evaluation: RUN/reward_evaluation.json as a chart and tables."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accord.errors import AccordError
from accord.track.console import number


def reward_view(folder: Path) -> dict[str, Any] | None:
    """What the template shows, or None where no evaluation was written. Raises AccordError if the file is damaged."""
    path = folder / "reward_evaluation.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return _pairs(found) if found["kind"] == "pairs" else _scores(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise AccordError(f"{path}: it is damaged ({reason}). Remove it to have the report without it.") from error


def _pairs(found: Mapping[str, Any]) -> dict[str, Any]:
    from accord.track.charts import calibration_chart

    wins = found["prefers_longer"]
    return {
        "step": found["step"],
        "summary": f"{found['count']:,} pairs: {number(found['accuracy'])} right, expected calibration error {number(found['ece'])}"
        + ("" if wins is None else f"; of two answers of different length the longer one scores higher in {number(wins)}"),
        "title": "How sure, and how often right",
        "note": "Each dot is a bin of pairs by σ(|difference of scores|); on the line the model is as often right as it is sure. "
        "Larger dots hold more pairs.",
        "svg": calibration_chart(found["calibration"], "predicted probability", "share that is right", span=(0.5, 1.0)),
        "columns": ["accuracy"],
        "tables": [
            _table("tokens of the longer answer", found["by_length"], _bucket, ["accuracy"]),
            _table("the longer answer is", found["by_longer"], lambda row: str(row["longer"]), ["accuracy"]),
            _table("source", found["by_source"], lambda row: str(row["source"]), ["accuracy"]),
        ],
    }


def _scores(found: Mapping[str, Any]) -> dict[str, Any]:
    from accord.track.charts import calibration_chart

    return {
        "step": found["step"],
        "summary": f"{found['count']:,} answers: mean squared error {number(found['mse'])}, bias {number(found['bias'])}, "
        f"calibration error {number(found['calibration_error'])}",
        "title": "Predicted and given scores",
        "note": "Each dot is a tenth of the answers, by their predicted score; on the line the prediction is right on average.",
        "svg": calibration_chart(found["calibration"], "mean predicted score", "mean given score"),
        "columns": ["mse", "bias"],
        "tables": [
            _table("tokens of the answer", found["by_length"], _bucket, ["mse", "bias"]),
            _table("source", found["by_source"], lambda row: str(row["source"]), ["mse", "bias"]),
        ],
    }


def _bucket(row: Mapping[str, Any]) -> str:
    return f"{row['low']}–{row['high']}"


def _table(title: str, rows: Sequence[Mapping[str, Any]], name: Any, columns: Sequence[str]) -> dict[str, Any]:
    return {
        "title": title,
        "rows": [
            {"name": name(row), "count": f"{row['count']:,}", "cells": [number(row[column]) for column in columns]}
            for row in rows
        ],
    }
