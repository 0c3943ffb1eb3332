"""Groups of real processes for tests: gloo on this machine, a free port, one thread each."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def in_processes(count: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(rank, *arguments)` of every rank of a new group, in the order of the ranks. An error in one is raised here."""
    context = multiprocessing.get_context("spawn")
    answers, port = context.Queue(), free_port()
    processes = [context.Process(target=_work, args=(rank, count, port, answers, work, arguments)) for rank in range(count)]
    for process in processes:
        process.start()
    try:
        found = dict(answers.get(timeout=600) for _ in processes)
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    failed = [answer for answer in found.values() if isinstance(answer, _Failed)]
    assert not failed, failed[0].text
    return [found[rank] for rank in range(count)]


class _Failed:
    def __init__(self, text: str) -> None:
        self.text = text


def _work(rank: int, count: int, port: int, answers: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count, timeout=timedelta(seconds=120)
    )
    try:
        answers.put((rank, work(rank, *arguments)))
        dist.barrier()
    except BaseException:
        answers.put((rank, _Failed(f"rank {rank}: {traceback.format_exc()}")))
    finally:
        dist.destroy_process_group()
