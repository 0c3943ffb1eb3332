"""`launch.type=local`: several processes of this machine, started, watched and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.errors import Interrupted, UserError
from accord.launch.environment import free_port, threads_for, worker_environment
from accord.launch.process import INTERRUPTED, Worker, first_failure

if TYPE_CHECKING:
    from accord.config import Config, Launch

LOOPBACK = "127.0.0.1"
LINGER_S = 5.0  # how long the others may take to end by themselves when one has failed, or all after a second signal


def number_of_processes(settings: Launch) -> int:
    """`launch.processes` as a number; auto counts GPUs (in a process of its own, for the parent needs no torch)."""
    if settings.processes != "auto":
        return settings.processes
    counted = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], capture_output=True, text=True, check=True
    )
    return max(1, int(counted.stdout))


def run_local(config: Config, command: Sequence[str], processes: int) -> int:
    """Run `command` as so many workers and return the exit code: that of the first to fail, whose error is shown first.

    The main rank's output is on the terminal, that of the others in RUN/logs/rank-<n>.log. SIGINT and SIGTERM are passed on to all.
    When one fails, the others are ended within seconds. If this process is killed, they end by themselves.
    """
    logs = Path(config.run.dir) / "logs"
    port, threads = free_port(LOOPBACK), threads_for(processes)
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="accord-launch-") as scratch, PassedOn() as signals:
        try:
            for rank in range(processes):
                environment = os.environ | worker_environment(rank, processes, rank, processes, LOOPBACK, port, threads)
                log = logs / f"rank-{rank}.log" if rank else None
                workers.append(Worker(rank, command, environment, Path(scratch), log))
            watch(workers, signals)
        finally:
            for worker in workers:
                worker.kill()
        return told(workers, signals)


def watch(workers: Sequence[Worker], signals: PassedOn) -> None:
    """Return when all have ended by themselves, or should have."""
    passed_on, deadline = 0, float("inf")
    while any(worker.running for worker in workers) and time.monotonic() < deadline:
        while passed_on < len(signals.received):
            for worker in workers:
                worker.send(signals.received[passed_on])
            passed_on += 1
        # one that was interrupted has saved, and so will the others
        failed = any(worker.code not in (None, 0, INTERRUPTED) for worker in workers)
        if (failed or passed_on > 1) and deadline == float("inf"):
            deadline = time.monotonic() + LINGER_S
        time.sleep(0.05)


def told(workers: Sequence[Worker], signals: PassedOn) -> int:
    """Say what happened, the first failure first, and return the exit code. Raises Interrupted where a signal ended the run."""
    first = first_failure(workers)
    if first is None and not any(worker.ended_by_us for worker in workers):
        return 0
    if first is None or -(first.code or 0) in signals.received:
        raise Interrupted("interrupted")  # by a second signal, or before a worker could answer the first
    code = first.code or 0
    if code == INTERRUPTED:
        raise Interrupted(first.message())
    print(first.message(), file=sys.stderr)
    if len({worker.message() for worker in workers if worker.code not in (None, 0)}) > 1:
        log = f"; its output: {first.log}" if first.log and first.log.exists() else ""
        print(f"       (rank {first.rank} of {len(workers)} failed first, the others were ended{log})", file=sys.stderr)
    return UserError.exit_code if code == UserError.exit_code else 1


class PassedOn:
    """SIGINT and SIGTERM in the order they came; the parent itself does not end by them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, frame: Any) -> None:
        self.received.append(number)

    def __enter__(self) -> PassedOn:
        with suppress(ValueError):  # only the main thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
