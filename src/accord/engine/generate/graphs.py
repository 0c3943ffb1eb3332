"""Decoding steps recorded as CUDA graphs: a step of a small model is bound by the launches of its kernels, a replay is one launch.

A graph has fixed shapes, so steps are rounded up: the sequences to a power of two (the added rows write to slots that nobody uses), the
longest of them to blocks of 64 tokens (the mask hides the rest). Steps with prompts in them are computed without a graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accord.engine.generate.decoder import Decoder, Step
from accord.engine.generate.kv_cache import BLOCK, KeyValueCache

log = logging.getLogger(__name__)

Recorder = Callable[
    [Callable[[], Tensor]], Callable[[], Tensor]
]  # a function → one that does the same again, and gives its result


@dataclass
class _Recorded:
    step: Step  # its tensors are the graph's inputs
    replay: Callable[[], Tensor]


class GraphedDecoder:
    """`forward` as the decoder's own; the same numbers up to the order of sums in attention."""

    def __init__(self, decoder: Decoder, record: Recorder | None = None) -> None:
        self.decoder = decoder
        self.record = record or _record_cuda
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._key: tuple[Any, ...] = ()
        self._broken = False

    def forward(self, step: Step, cache: KeyValueCache) -> Tensor:
        """The logits [R, V] of a step."""
        rows = _next_power_of_two(step.decoding)
        longest = min(-(-step.longest // BLOCK) * BLOCK, cache.capacity)
        if self._broken or step.prompts is not None or step.decoding == 0 or rows > cache.slots:
            return self.decoder.forward(step, cache)
        key = (id(cache), cache.moves, self.decoder.moves)
        if key != self._key:  # what the graphs point to has moved
            self._recorded, self._key = {}, key
        recorded = self._recorded.get((rows, longest))
        if recorded is None:
            recorded = self._record(rows, longest, step, cache)
            if recorded is None:
                return self.decoder.forward(step, cache)
        n = step.decoding
        recorded.step.ids[:n].copy_(step.ids)
        recorded.step.positions[:n].copy_(step.positions)
        recorded.step.positions[n:].zero_()
        return recorded.replay()[:n]

    def _record(self, rows: int, longest: int, step: Step, cache: KeyValueCache) -> _Recorded | None:
        device, n = step.ids.device, step.decoding
        every = torch.arange(rows, device=device)
        ids, positions = torch.zeros_like(every), torch.zeros_like(every)
        ids[:n], positions[:n] = step.ids, step.positions
        fixed = Step(ids, positions, every, rows, longest, None, every, masked=True)
        try:
            replay = self.record(lambda: self.decoder.forward(fixed, cache))
        except RuntimeError as error:
            self._broken = True
            log.warning(
                "engine.enable_cuda_graph: the step could not be recorded (%s); it is computed as it is.",
                str(error).splitlines()[0],
            )
            return None
        self._recorded[rows, longest] = recorded = _Recorded(fixed, replay)
        return recorded


def _record_cuda(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Runs on a side stream first, as CUDA wants it, then records."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _next_power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
