"""What a Ray worker does: it starts the same command as any other launcher, as a process of its own, and watches over it.

So the worker is everywhere the same, has its own threads and signals, and joins its own group. What the Ray workers and the process
that started them tell each other goes through a folder that all of them see, RUN/.launch-*:

    signal-<k>                  the k-th signal that the user sent
    attempt-<n>/rank-<r>.json   how that rank ended at the n-th attempt
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accord.errors import AccordError
from accord.launch.environment import free_port, threads_for, worker_environment
from accord.launch.process import LINGER_S, Outcome, Worker
from accord.track.files import write_atomically

TOKEN = "token"
SEEN_WITHIN_S = 10.0  # a network file system may take so long to show a new file


@dataclass(frozen=True)
class Job:
    """What every Ray worker must know; plain data."""

    command: tuple[str, ...]
    cwd: str
    run: str
    folder: str  # RUN/.launch-*
    token: str
    environment: dict[str, str]  # launch.ray.env_vars, and OMP_NUM_THREADS where the user has set it


def look_around(job: Job) -> dict[str, Any]:
    """What a machine of the cluster sees of what must be the same everywhere."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        accord = version("accord")
    except PackageNotFoundError:
        accord = "none"
    return {"host": socket.gethostname(), "folder": _sees(job), "cwd": Path(job.cwd).is_dir(), "accord": accord}


def _sees(job: Job) -> bool:
    token, deadline = Path(job.folder) / TOKEN, time.monotonic() + SEEN_WITHIN_S
    while not (token.is_file() and token.read_text() == job.token):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def work(settings: dict[str, Any]) -> None:
    """The training function of Ray Train: run the command as this rank, once, and leave how it ended in the folder.

    Raises AccordError where starting again may help: the process was killed, or lost the others without one of them having a reason.
    """
    import ray
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    job, context = Job(**settings), get_context()
    if not _sees(job):
        raise AccordError(f"{socket.gethostname()} does not see {job.run}")
    rank, folder = context.get_world_rank(), Path(job.folder)
    offer = None
    if rank == 0:
        address = ray.util.get_node_ip_address()
        number = len(list(folder.glob("attempt-*"))) + 1
        (folder / f"attempt-{number}").mkdir()
        offer = {"address": address, "port": free_port(address), "attempt": number}
    meeting: Any = broadcast_from_rank_zero(offer)
    attempt = folder / f"attempt-{meeting['attempt']}"
    local = context.get_local_world_size()
    environment = (
        os.environ
        | worker_environment(
            rank, context.get_world_size(), context.get_local_rank(), local,
            meeting["address"], meeting["port"], threads_for(local, job.environment),
        )
        | job.environment
    )  # fmt: skip
    log = Path(job.run) / "logs" / f"rank-{rank}.log"
    with tempfile.TemporaryDirectory(prefix="accord-launch-") as scratch:
        worker = Worker(rank, job.command, environment, Path(scratch), log, Path(job.cwd))
        try:
            _watch(worker, folder, attempt)
        finally:
            worker.kill()
        outcome = worker.outcome()
    write_atomically(attempt / f"rank-{rank}.json", json.dumps(asdict(outcome)).encode())
    if not (outcome.is_final or outcome.ended_by_us or (outcome.is_consequence and _has_reason(attempt))):
        raise AccordError(outcome.message)


def _watch(worker: Worker, folder: Path, attempt: Path) -> None:
    """Return when the worker has ended by itself, or should have."""
    passed_on, deadline = 0, float("inf")
    while worker.running and time.monotonic() < deadline:
        while (path := folder / f"signal-{passed_on + 1}").exists():
            worker.send(int(path.read_text()))
            passed_on += 1
        failed = any(outcome.code and outcome.code != 130 for outcome in outcomes(attempt))
        if (failed or passed_on > 1) and deadline == float("inf"):
            deadline = time.monotonic() + LINGER_S
        time.sleep(0.2)


def _has_reason(attempt: Path) -> bool:
    """Whether one of the others has ended for a reason that starting again does not mend; it may need a moment to say so."""
    deadline = time.monotonic() + LINGER_S
    while time.monotonic() < deadline:
        if any(outcome.code and outcome.is_final for outcome in outcomes(attempt)):
            return True
        time.sleep(0.2)
    return False


def outcomes(attempt: Path) -> Sequence[Outcome]:
    """How the ranks ended that have so far."""
    return [Outcome(**json.loads(path.read_text())) for path in sorted(attempt.glob("rank-*.json"))]
