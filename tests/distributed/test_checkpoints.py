"""Checkpoints of several processes: each writes what it holds, any other number of them reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import saving
from tests.distributed.group import Job, answers

pytestmark = pytest.mark.slow
SAVING = "tests.distributed.saving"


@pytest.fixture(scope="module")
def model(tiny_folder: Any) -> str:
    """Its vocabulary and its norms can't be divided by three."""
    return str(tiny_folder("llama", vocab_size=512))


@pytest.mark.parametrize("shard", ["always", "never"])
def test_what_three_processes_saved_any_number_goes_on_with(shard: str, model: str, tmp_path: Path):
    jobs: list[Job] = [
        {"do": "save", "model": model, "root": str(tmp_path / str(asynchronous)), "shard": shard, "asynchronous": asynchronous}
        for asynchronous in (False, True)
    ]
    at_once, in_background = answers(3, jobs, tmp_path / "three", SAVING)[0]
    assert at_once == in_background and len(at_once) > 80
    saving.do({**jobs[0], "root": str(tmp_path / "one")})
    whole = sum(file.stat().st_size for file in (tmp_path / "one" / "step-00000002" / "model").iterdir())
    for job in jobs:
        shards = list((Path(job["root"]) / "step-00000002" / "model").iterdir())
        assert len(shards) == 3
        assert sum(file.stat().st_size for file in shards) < 1.1 * whole + 3 * 4096, "each part is written once"
    loads = [{"do": "load", "model": model, "root": job["root"], "shard": shard} for job in jobs]
    assert [saving.do(load) for load in loads] == [at_once, at_once]
    for rank in answers(2, loads, tmp_path / "two", SAVING):
        assert rank == [at_once, at_once]


def test_a_process_that_cannot_write_stops_all_with_its_reason(tmp_path: Path):
    (tmp_path / "damaged" / "step-00000001").mkdir(parents=True)
    jobs: list[Job] = [
        {"do": "full_disk", "root": str(tmp_path / "full"), "asynchronous": False},
        {"do": "full_disk", "root": str(tmp_path / "full"), "asynchronous": True},
        {"do": "look", "root": str(tmp_path / "damaged")},
    ]
    for *full, damaged in answers(2, jobs, tmp_path / "group", SAVING):
        assert all("rank 1: No space left on device" in message and "step-00000001" in message for message in full)
        assert "no checkpoint can be used" in damaged and "manifest.json can't be read" in damaged
    assert not list((tmp_path / "full").iterdir())
