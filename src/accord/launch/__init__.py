"""Where a training command runs: in this process, in several of this machine, or on a Ray cluster. The worker is always the same.

A worker is the very command that the user typed, in a process whose environment says which one it is: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them. `engine/` joins them to a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from accord.launch.environment import check_mesh, follow_parent, is_started_here, world_size
from accord.launch.local import number_of_processes, run_local

if TYPE_CHECKING:
    from accord.config import Config


def launch(config: Config, command: Sequence[str], work: Callable[[], None]) -> int:
    """Do `work` if this process is a worker or the only one; else have workers do it, each started with `command`. The exit code.

    Raises ConfigError where the processes there are do not fit `launch.mesh`, and what `work` raises.
    """
    settings = config.launch
    world = world_size()
    if world is not None:
        check_mesh(settings, world)
        if is_started_here():
            follow_parent()
        work()
        return 0
    if settings.type == "ray":
        from accord.launch.ray_cluster import run_on_ray

        return run_on_ray(config, command)
    processes = number_of_processes(settings)
    check_mesh(settings, processes)
    if processes > 1:
        return run_local(config, command, processes)
    work()
    return 0
