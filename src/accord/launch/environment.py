"""The environment variables that make a process a worker, and what a worker that Accord started owes its parent."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from accord.errors import ConfigError

if TYPE_CHECKING:
    from accord.config import Launch

# Set for the workers that Accord starts itself: the file that takes the last words of one that fails (cli.py writes it).
ERROR_FILE = "ACCORD_ERROR_FILE"


def world_size() -> int | None:
    """WORLD_SIZE where the environment makes this process a worker (RANK is set too), else None."""
    world = os.environ.get("WORLD_SIZE", "")
    return int(world) if world.isdigit() and "RANK" in os.environ else None


def is_started_here() -> bool:
    """Whether Accord started this worker, rather than torchrun or another launcher."""
    return ERROR_FILE in os.environ


def worker_environment(
    rank: int, world: int, local_rank: int, local_world: int, address: str, port: int, threads: int
) -> dict[str, str]:
    """What a worker's environment says beside what it inherits."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",  # a log that is read while it grows
    }


def threads_for(processes: int, environment: Mapping[str, str] = os.environ) -> int:
    """Threads of one of so many processes of this machine: OMP_NUM_THREADS where it is set, else a fair share of the cores."""
    written = environment.get("OMP_NUM_THREADS", "")
    if written.isdigit() and int(written) > 0:
        return int(written)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def free_port(host: str) -> int:
    """A port of this machine that nobody listens on at `host` now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def follow_parent() -> None:
    """Hear the signals that the parent passes on, and end as soon as it is gone, however that ended.

    Standard input is a pipe that only the parent holds open. A checkpoint is complete or absent, so nothing is lost but the steps since; a
    worker that went on would hold the run's lock.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # Ray starts its workers with SIGINT blocked

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def check_mesh(settings: Launch, processes: int) -> None:
    """Raise ConfigError unless `launch.mesh` holds so many processes."""
    mesh = settings.mesh
    if mesh.data != "auto" and mesh.data * mesh.tensor != processes:
        raise ConfigError(
            f"launch.mesh.data: {mesh.data} × tensor {mesh.tensor} are {mesh.data * mesh.tensor} processes, but there are {processes}. "
            "Leave it at auto."
        )
    if processes % mesh.tensor:
        number = {"local": "Set launch.processes to", "ray": "Set launch.ray.workers to"}[settings.type]
        if world_size() is not None and not is_started_here():
            number = "Have the launcher start (torchrun: --nproc-per-node)"
        raise ConfigError(
            f"launch.mesh.tensor: {processes} {'process' if processes == 1 else 'processes'} can't be put into groups of {mesh.tensor}. "
            f"{number} {mesh.tensor} or a multiple of it, or set launch.mesh.tensor=1."
        )
