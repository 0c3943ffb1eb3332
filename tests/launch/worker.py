"""A worker for tests: sums over gloo in steps and ends as its argument says. `python worker.py WHAT [RANK]`."""

from __future__ import annotations

import os
import signal
import sys
import time

from accord.cli import guarded
from accord.errors import DataError, Interrupted
from accord.launch.environment import follow_parent


def train(what: str, which: int) -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    follow_parent()
    print(f"rank {rank} of {world} has pid {os.getpid()} and {os.environ['OMP_NUM_THREADS']} threads", flush=True)
    if what == "exit" and rank == which:
        os._exit(3)  # before it has joined: the others wait for it
    import torch
    import torch.distributed as dist

    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.append(number))
    dist.init_process_group("gloo")
    try:
        for step in range(1, 4 if what == "ok" else 100_000):
            total = torch.ones(1) + rank
            dist.all_reduce(total)
            stop = torch.tensor([float(len(received) > 0)])
            dist.all_reduce(stop)
            print(f"step {step}: {total.item():g}", flush=True)
            if stop.item() and what != "deaf":
                raise Interrupted(f"stopped after step {step}")
            if step == 2 and rank == which:
                if what == "user-error":
                    raise DataError("rows.jsonl:7  the answer is empty.")
                if what == "bug":
                    raise RuntimeError("no such thing")
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)
    finally:
        dist.destroy_process_group()  # left to the interpreter, gloo's threads may end with "terminate called"
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1)))
