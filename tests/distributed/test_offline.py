"""SFT, reward model and DPO in groups of real processes (gloo): the numbers of one process, whole or sharded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.group import alone, answers

KINDS = ["sft", "reward", "dpo"]
# Fewer tokens at once than a batch has: several packs a process, and a last turn that is not there for all.
TRAIN = {"batch_size": 4, "max_tokens": 60, "lr": 1e-3, "ema_decay": 0.9}


def jobs(model: Any, run: Any, **train: Any) -> list[dict[str, Any]]:
    """Every kind on 7 rows in batches of 4: the last batch of an epoch has 3."""
    changes = {"train": {**TRAIN, **train}, "data": {"max_length": 60}}
    return [
        {"do": "offline", "kind": kind, "model": str(model), "run": f"{run}/{kind}", "changes": changes, "steps": 4}
        for kind in KINDS
    ]


def assert_alike(found: dict[str, Any], wanted: dict[str, Any], exact: float = 1e-5) -> None:
    for one, other in zip(
        [found["before"], *found["steps"], found["after"]], [wanted["before"], *wanted["steps"], wanted["after"]], strict=True
    ):
        assert one.keys() == other.keys()
        for name in one:
            if name not in ("train/pack_fill",):  # there are more packs, so that all have some
                assert one[name] == pytest.approx(other[name], rel=exact, abs=exact), name
    for name, sums in wanted["weights"].items():
        assert found["weights"][name] == pytest.approx(sums, rel=1e-4, abs=1e-4), name


@pytest.fixture(scope="module")
def wanted(tiny_folder, tmp_path_factory):
    return alone(jobs(tiny_folder("llama"), tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("shard", ["never", "always"])
def test_two_processes_learn_what_one_learns(shard, wanted, tiny_folder, tmp_path):
    for found in answers(2, jobs(tiny_folder("llama"), tmp_path / "runs", shard=shard), tmp_path / "group"):
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other)
