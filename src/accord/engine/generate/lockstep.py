"""Decoding by several ranks of which none can compute a forward alone: all take the same number of steps.

- *by groups of layers*: weights are sharded (FSDP2), and every forward brings them together a group at a time. Each rank has answers of its own.
- *tensor parallel* (Shoeybi et al. 2019, arXiv:1909.08053, §3): each rank applies its part of every layer; they work on the same answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accord.errors import ConfigError

if TYPE_CHECKING:
    from accord.engine.generate.kv_cache import KeyValueCache
    from accord.engine.generate.spec import DecoderSpec
    from accord.engine.ranks import Ranks
    from accord.models.sharded import LayerGroups

_DONE, _BUSY, _FAILED = 0, 1, 2


class Abandoned(Exception):
    """Another rank has failed and says why."""


class Lockstep:
    """Which ranks step together, and how their weights lie.

    `ranks`: those that take a forward together. `groups`: the sharded model's layers. `tensor_parallel`: each of `ranks` has its part of
    every layer and the same answers; else all have all layers, in turn, and answers of their own.
    """

    def __init__(self, ranks: Ranks, groups: LayerGroups, tensor_parallel: bool) -> None:
        self.ranks, self.groups, self.tensor_parallel = ranks, groups, tensor_parallel

    def forward(self, compute: Callable[[Any, KeyValueCache], Tensor]) -> Callable[[Any, KeyValueCache], Tensor]:
        """`compute`, once all know that there is a forward to be taken."""

        def together(step: Any, cache: KeyValueCache) -> Tensor:
            if self._agree(_BUSY) == _FAILED:
                raise Abandoned
            return compute(step, cache)

        return together

    def finish(self, failed: bool) -> None:
        """This rank has no forward of its own left: take part in those of the others until all are done, or one has failed."""
        while self._agree(_FAILED if failed else _DONE) == _BUSY:
            self.groups.pass_through()

    def _agree(self, state: int) -> int:
        return int(self.ranks.max_(torch.tensor(state)))

    def share(self, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """What was sampled [n] each: that of the first rank, where all work on the same answers.

        A sum over ranks has the same bits on each, but the head need not be computed alike on different devices, and one token that
        differs would part the ranks for good.
        """
        if not self.tensor_parallel:
            return tokens, logprobs
        both = self.ranks.broadcast(torch.stack([tokens.double(), logprobs.double()]))  # exact: ids are below 2^53
        return both[0].long(), both[1].to(logprobs.dtype)


def divide(spec: DecoderSpec, count: int, widths: dict[int, int]) -> DecoderSpec:
    """The spec of one of `count` ranks: its share of the heads. `widths`: of each layer's MLP. Raises ConfigError where they don't divide."""
    said = f"engine.inference_tp_size={count}: "
    numbers = {"attention heads": spec.heads, "key-value heads": spec.key_value_heads}
    numbers |= {f"numbers in the MLP of layer {layer}": width for layer, width in widths.items()}
    if bad := next((f"{number} {name}" for name, number in numbers.items() if number % count), None):
        fitting = [n for n in range(2, count) if all(number % n == 0 for number in numbers.values())]
        raise ConfigError(
            f"{said}this model has {bad}, which {count} processes can't share evenly. "
            f"Set it to {' or '.join(map(str, [1, *fitting]))}, or use engine.pin_parameters=false."
        )
    if any(layer.query_norm is not None and not layer.norm_heads for layer in spec.layers):
        raise ConfigError(
            f"{said}this model normalises queries and keys over all heads together (OLMo 2), which no process has. "
            "Set it to 1, or use engine.pin_parameters=false."
        )
    return replace(spec, heads=spec.heads // count, key_value_heads=spec.key_value_heads // count)
