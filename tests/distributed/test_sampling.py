"""Sampling in groups of real processes (gloo): whole weights, groups of layers, tensor parallel. The answers are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.group import Job, answers
from tests.distributed.sampling import do

GATHERED: dict[str, Any] = {}
BY_ONE = {"engine": {"pin_parameters": False, "tp_gather_partition_size": 1}}
BY_TWO = {"engine": {"pin_parameters": False, "tp_gather_partition_size": 2}}
SPLIT = {"engine": {"inference_tp_size": 2, "tp_gather_partition_size": 1}}
WHOLE = {"train": {"shard": "never"}}
WORKER = "tests.distributed.sampling"


def job(model: Any, changes: dict[str, Any], name: str = "sample", **more: Any) -> Job:
    return {"do": name, "model": str(model), "changes": changes, **more}


def assert_same_answers(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["greedy"] == wanted["greedy"] and found["sampled"] == wanted["sampled"]
    for one, other in zip(found["logprobs"], wanted["logprobs"], strict=True):
        assert [len(answer) for answer in one] == [len(answer) for answer in other]
        for a, b in zip(one, other, strict=True):
            assert a == pytest.approx(b, abs=2e-4)


def test_every_way_gives_the_answers_of_one_process(tiny_folder, tmp_path):
    """Uneven lengths: one process's answers end early. Fewer prompts than processes: one has none."""
    model = tiny_folder("llama")
    wanted, one = do(job(model, WHOLE)), do(job(model, WHOLE, prompts=1))
    assert wanted["greedy"][0] != wanted["greedy"][1]  # the step has changed the weights
    ways = [GATHERED, BY_ONE, BY_TWO, SPLIT, {**SPLIT, **WHOLE}]
    jobs = [*(job(model, way) for way in ways), *(job(model, way, prompts=1) for way in (BY_ONE, SPLIT))]
    for found in answers(2, jobs, tmp_path, WORKER):
        for result in found[: len(ways)]:
            assert_same_answers(result, wanted)
        for result in found[len(ways) :]:
            assert_same_answers(result, one)
