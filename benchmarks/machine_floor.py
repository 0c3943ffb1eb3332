"""The time that no engine can beat on this machine: products at the measured matrix rate, bytes at the measured bandwidth.

    prefill  max(2 · parameters · prompt tokens / rate, weight bytes / bandwidth), a prompt that is asked twice counted once
    decode   Σ over steps  max(2 · parameters · rows / rate, weight bytes / bandwidth) + key and value bytes / bandwidth

The longest answers take their slots first, which leaves the fewest idle at the end. Attention's own products, norms and sampling are
left out, and so is what a processor cache that holds a whole small model could save: a yardstick more than a proof.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from workloads import Request

_REPEATS = 5
_SHAPES = ((2048, 2048, 2048), (1024, 576, 1536), (1024, 1536, 576), (512, 576, 49152))  # rows, in, out
_READ_BYTES = 2**30  # many times the last-level cache


@dataclass(frozen=True)
class Limits:
    flops: float  # a second
    bytes: float  # read a second


def measure_limits(dtype: torch.dtype) -> Limits:
    """The best of some repetitions: what the machine can do, not what it does on average."""
    rate = 0.0
    for rows, width, out in _SHAPES:
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(out, width).to(dtype)
        columns = weight.T.contiguous()
        work = 2 * rows * width * out
        rate = max(rate, work / _best(partial(F.linear, x, weight)), work / _best(partial(torch.matmul, x, columns)))
    block = torch.ones(_READ_BYTES // 4)
    return Limits(rate, _READ_BYTES / _best(block.sum))


def _best(call: Callable[[], Any]) -> float:
    call()
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


@dataclass(frozen=True)
class ModelSize:
    """What a forward reads and multiplies."""

    layers: int  # parameters of the layers' matrices
    head: int
    cached: int  # numbers that one token leaves in the key/value cache
    itemsize: int

    @classmethod
    def of(cls, module: Any, dtype: torch.dtype) -> ModelSize:
        config = module.config
        head = module.get_output_embeddings().weight
        outside = {id(head), id(module.get_input_embeddings().weight)}
        layers = sum(p.numel() for p in module.parameters() if p.ndim > 1 and id(p) not in outside)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
        return cls(layers, head.numel(), cached, dtype.itemsize)


def floor_seconds(requests: Sequence[Request], slots: int, size: ModelSize, limits: Limits) -> float:
    return _prefill_seconds(requests, size, limits) + _decode_seconds(requests, slots, size, limits)


def _prefill_seconds(requests: Sequence[Request], size: ModelSize, limits: Limits) -> float:
    prompts = {tuple(request.prompt) for request in requests}
    work = 2 * (size.layers * sum(map(len, prompts)) + size.head * len(prompts))
    return max(work / limits.flops, (size.layers + size.head) * size.itemsize / limits.bytes)


def _decode_seconds(requests: Sequence[Request], slots: int, size: ModelSize, limits: Limits) -> float:
    """The first token of an answer comes out of its prefill, so n tokens are n - 1 steps."""
    waiting = deque(sorted((request for request in requests if request.answer > 1), key=lambda request: -request.answer))
    active: list[tuple[Request, int]] = []  # with the tokens it has
    parameters, seconds = size.layers + size.head, 0.0
    while waiting or active:
        while waiting and len(active) < slots:
            active.append((waiting.popleft(), 1))
        prompts = {tuple(request.prompt) for request, _ in active}  # the keys of a shared prompt need reading once
        seen = sum(map(len, prompts)) + sum(tokens for _, tokens in active)
        seconds += max(2 * parameters * len(active) / limits.flops, parameters * size.itemsize / limits.bytes)
        seconds += seen * size.cached * size.itemsize / limits.bytes
        active = [(request, tokens + 1) for request, tokens in active if tokens + 1 < request.answer]
    return seconds


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
