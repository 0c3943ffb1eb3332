"""Child processes that take a turn: what they answer, what their memory is, what is said when one fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rivals import child
from worker import Clock, step_of


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ask(source, settings)`: the answer of a worker with this source."""
    monkeypatch.setattr(child, "__file__", str(tmp_path / "child.py"))

    def call(source: str, settings: dict[str, Any]) -> dict[str, Any]:
        folder = Path(sys.modules["worker"].__file__ or "").parent
        head = f"import os, sys\nsys.path.append({str(folder)!r})\nfrom worker import answer\n"
        (tmp_path / "some.py").write_text(head + source, encoding="utf-8")
        return child.ask(sys.executable, "some", settings, threads=3)

    return call


def test_a_worker_is_told_its_settings_and_threads_and_what_it_prints_does_not_disturb(ask):
    answer = ask(
        "print('noise')\nanswer(lambda s: print('more') or {'twice': 2 * s['x'], 'threads': os.environ['OMP_NUM_THREADS']})",
        {"x": 4},
    )
    assert answer.pop("peak_gib") > 0
    assert answer == {"twice": 8, "threads": "3"}


def test_the_peak_is_the_workers_own_and_not_its_parents(ask):
    heavy = bytearray(300 * 2**20)
    heavy[:: 2**12] = b"x" * len(heavy[:: 2**12])
    small = ask("answer(lambda s: {})", {})["peak_gib"]
    large = ask("answer(lambda s: {'sum': sum(bytearray(b'x') * (200 * 2**20))} and {})", {})["peak_gib"]
    del heavy
    assert small < 0.1
    assert 0.19 < large < 0.29


def test_a_worker_that_fails_is_told_with_the_end_of_its_log(ask):
    with pytest.raises(RuntimeError, match=r"some ended with 1:[\s\S]*ValueError: broken here"):
        ask("raise ValueError('broken here')", {})


def test_parts_that_are_not_known_are_other_and_all_add_up_to_the_step():
    step = step_of(10.0, {"generate": 3.0, "train": 5.0}, 7)
    assert step == {
        "seconds": 10.0,
        "parts": {"generate": 3.0, "score": 0.0, "logprob": 0.0, "train": 5.0, "other": 2.0},
        "tokens": 7,
    }


def test_a_clock_adds_up_the_calls_of_a_part_also_those_that_raise():
    clock = Clock()

    def wait(fail: bool) -> int:
        time.sleep(0.01)
        if fail:
            raise ValueError
        return 5

    timed = clock.timed("score", wait)
    assert timed(False) == 5
    with pytest.raises(ValueError):
        timed(True)
    assert 0.02 <= clock.seconds["score"] <= clock.elapsed()
    clock.start()
    assert clock.seconds == {}
