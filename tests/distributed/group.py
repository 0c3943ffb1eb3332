"""Real process groups for tests: `answers(2, jobs)` runs jobs of worker.py in a group of two, `alone(jobs)` in this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
Job = dict[str, Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(world: int, command: list[str], folder: Path, **environment: str) -> list[subprocess.Popen]:
    """A group on this machine, as torchrun would start it. What each process prints goes to FOLDER/<rank>.log."""
    folder.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    processes = []
    for rank in range(world):
        own = {
            **os.environ,
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **environment,
        }  # fmt: skip
        log = (folder / f"{rank}.log").open("w")
        processes.append(subprocess.Popen([sys.executable, *command], env=own, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
    return processes


def finish(processes: list[subprocess.Popen], folder: Path, timeout: float = 900) -> list[int]:
    """Their exit codes. Those that still run after `timeout` are killed, and the test fails with what they said."""
    end = time.monotonic() + timeout
    try:
        return [process.wait(max(1.0, end - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"a process hangs:\n{said(folder)}") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def said(folder: Path) -> str:
    return "\n".join(f"-- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log")))


def answers(world: int, jobs: list[Job], folder: Path, worker: str = "tests.distributed.worker") -> list[list[Any]]:
    """What every process gives for every job: [rank][job]."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    processes = start(world, ["-m", worker, str(folder)], folder)
    codes = finish(processes, folder)
    assert codes == [0] * world, said(folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def alone(jobs: list[Job]) -> list[Any]:
    """The same jobs in this very process."""
    from tests.distributed.worker import do

    return [do(job) for job in jobs]


def set_shard(job: Job, shard: str) -> Job:
    return {**job, "changes": {**job["changes"], "train": {**job["changes"].get("train", {}), "shard": shard}}}


def assert_alike(found: dict[str, Any], wanted: dict[str, Any], exact: float = 1e-5) -> None:
    """The same curve, the same evaluations, the same weights. What depends on the clock, or on how many packs there are, is left out."""
    for key in ("before", "after"):
        _assert_metrics(found[key], wanted[key], exact)
    for one, other in zip(found["steps"], wanted["steps"], strict=True):
        _assert_metrics(one, other, exact)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, sums in wanted["weights"].items():
        assert found["weights"][name] == pytest.approx(sums, rel=1e-4, abs=1e-4), name


def _assert_metrics(one: dict[str, float], other: dict[str, float], exact: float) -> None:
    assert one.keys() == other.keys()
    for name in one:
        # A share of clipped tokens jumps where a ratio lies on the border; packs are more, so that all processes have some.
        if (
            not name.startswith(("time/", "throughput/", "memory/", "train/pack_fill", "train/tokens"))
            and "clip_fraction" not in name
        ):
            assert one[name] == pytest.approx(other[name], rel=exact, abs=exact), name
