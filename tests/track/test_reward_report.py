"""What the report shows of a reward model's evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.track.test_track_report import make_run, page

from accord.errors import AccordError
from accord.track.report import write_report
from accord.track.reward_report import reward_view

PAIRS: dict[str, Any] = {
    "step": 7,
    "kind": "pairs",
    "count": 1200,
    "accuracy": 0.625,
    "ties": 1,
    "ece": 0.0417,
    "calibration": [
        {"low": 0.5, "high": 0.55, "count": 900, "predicted": 0.52, "observed": 0.6},
        {"low": 0.9, "high": 0.95, "count": 300, "predicted": 0.93, "observed": 0.7},
    ],
    "by_length": [{"low": 16, "high": 31, "count": 1200, "accuracy": 0.625}],
    "by_longer": [{"longer": "chosen", "count": 800, "accuracy": 0.81}, {"longer": "rejected", "count": 400, "accuracy": 0.25}],
    "prefers_longer": 0.777,
    "by_source": [{"source": "<b>data</b>/hh.jsonl", "count": 1200, "accuracy": 0.625}],
}
SCORES: dict[str, Any] = {
    "step": 7,
    "kind": "scores",
    "count": 20,
    "mse": 1.25,
    "bias": -0.5,
    "calibration_error": 0.51,
    "calibration": [
        {"low": 0.0, "high": 1.0, "count": 10, "predicted": 0.5, "observed": 1.0},
        {"low": 1.0, "high": 4.0, "count": 10, "predicted": 2.5, "observed": 3.1},
    ],
    "by_length": [{"low": 1, "high": 15, "count": 20, "mse": 1.25, "bias": -0.5}],
    "by_source": [{"source": "scores.csv", "count": 20, "mse": 1.25, "bias": -0.5}],
}


def run_with(folder: Path, result: Any, stage: str = "reward") -> Path:
    make_run(folder, stage, [{"split": "train", "step": s, f"{stage}/loss": 1 / s} for s in (1, 2, 3)], summary={})
    if result is not None:
        (folder / "reward_evaluation.json").write_text(result if isinstance(result, str) else json.dumps(result))
    return folder


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (
            PAIRS,
            ["Held-out answers at step 7", "1,200 pairs: 0.625 right, expected calibration error 0.0417", "higher in 0.777"]
            + ["16–31", "tokens of the longer answer", "the longer answer is", "0.81", "0.25", "<b>data</b>/hh.jsonl"],
        ),
        (
            SCORES,
            ["20 answers: mean squared error 1.25, bias -0.5, calibration error 0.51", "1–15", "scores.csv", "mean given score"],
        ),
    ],
)
def test_the_newest_evaluation_is_drawn_and_tabled(result, expected, tmp_path):
    folder = run_with(tmp_path / "run", result)
    text = " ".join(page(folder).text)
    for words in expected:
        assert words in text, words
    assert "<b>data" not in (folder / "report.html").read_text()  # text of a run is never markup


def test_a_run_without_an_evaluation_and_another_stage_have_a_report_without_it(tmp_path):
    for name, result, stage in (("none", None, "reward"), ("sft", PAIRS, "sft")):
        assert "Held-out answers" not in write_report(run_with(tmp_path / name, result, stage)).read_text()


def test_no_pair_of_different_length_and_a_single_bin(tmp_path):
    few = {**PAIRS, "prefers_longer": None, "by_longer": PAIRS["by_longer"][:1], "calibration": PAIRS["calibration"][:1]}
    text = " ".join(page(run_with(tmp_path / "run", few)).text)
    assert "1,200 pairs" in text and "longer one scores higher" not in text


@pytest.mark.parametrize("result", ["{", "[]", '{"kind": "pairs"}', '{"kind": "scores", "step": 1}'])
def test_a_damaged_evaluation_is_named_with_what_to_do(result, tmp_path):
    with pytest.raises(AccordError, match=r"reward_evaluation.json: it is damaged .*Remove it"):
        reward_view(run_with(tmp_path / "run", result))
