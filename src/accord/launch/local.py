"""`launch.type=local`: several processes of this machine, started, watched and ended together."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accord.errors import ConfigError, Interrupted
from accord.launch.environment import free_port, threads_for, worker_environment
from accord.launch.process import LINGER_S, PassedOn, Worker, told

if TYPE_CHECKING:
    from accord.config import Config, Launch

LOOPBACK = "127.0.0.1"
MOST_PER_CORE = 8


def number_of_processes(settings: Launch) -> int:
    """`launch.processes` as a number; auto counts GPUs (in a process of its own, for the parent needs no torch).

    Raises ConfigError for more than this machine could start: before the first one, for so many would take it down.
    """
    if settings.processes != "auto":
        most = MOST_PER_CORE * (os.cpu_count() or 1)
        if settings.processes > most:
            raise ConfigError(
                f"launch.processes: {settings.processes:,} processes are too many for the {os.cpu_count()} cores of this machine. Set it "
                f"to the number of its GPUs (auto), without GPUs to that of its cores; at most {most}."
            )
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
                if signals.received:  # before all are started: those that are would wait for the others
                    raise Interrupted("interrupted")
                environment = os.environ | worker_environment(rank, processes, rank, processes, LOOPBACK, port, threads)
                log = logs / f"rank-{rank}.log" if rank else None
                workers.append(Worker(rank, command, environment, Path(scratch), log))
            watch(workers, signals)
        finally:
            for worker in workers:
                worker.kill()
        return told([worker.outcome() for worker in workers], signals.received)


def watch(workers: Sequence[Worker], signals: PassedOn) -> None:
    """Return when all have ended by themselves, or should have."""
    passed_on, deadline = 0, float("inf")
    while any(worker.running for worker in workers) and time.monotonic() < deadline:
        while passed_on < len(signals.received):
            for worker in workers:
                worker.send(signals.received[passed_on])
            passed_on += 1
        # one that was interrupted has saved, and so will the others
        failed = any(worker.code not in (None, 0, Interrupted.exit_code) for worker in workers)
        if (failed or passed_on > 1) and deadline == float("inf"):
            deadline = time.monotonic() + LINGER_S
        time.sleep(0.05)
