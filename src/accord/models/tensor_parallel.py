"""Tensor parallelism: the attention heads and the MLP's width of every block are divided over processes (Shoeybi et al. 2019, arXiv:1909.08053, §3).

With the matrices W₁ (queries, keys, values, the way up) cut by rows and W₂ (the way out, the way down) by columns, each process computes

    Σ over processes of W₂[:, own] · f(W₁[own, :] · x)        one sum where a branch ends, and one of ∂x where it begins

on the same x. Norms, embeddings and head stay whole. Which linear layer is cut how is the model's own knowledge: its configuration's
`base_model_tp_plan` in `transformers`. Parameters become DTensors over the mesh's `tensor` dimension; `sharded.shard` divides them further.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accord.errors import ConfigError
from accord.models.heads import backbone, unwrap

_ROWS, _COLUMNS, _HEAD_NORM = "colwise", "rowwise", "replicated_with_grad_allreduce"  # transformers' words; W is [out, in]
_BLOCK = re.compile(r"(?<=\.)\d+(?=\.)")


def divide_products(module: nn.Module, mesh: Any) -> list[nn.Module]:
    """Give each process of `mesh` its part of the blocks' matrices, in place, adapters included.

    Returns the modules that stay whole but see only this process's heads (norms of a head): their gradients are parts of a sum.
    Raises ConfigError where the model says nothing of how it is divided, or its sizes don't divide.
    """
    base = unwrap(module)
    _check(base, mesh.size())
    partial: list[nn.Module] = []
    sums: dict[str, _Sum] = {}  # by block
    for part, kind, name in _planned(base):
        if kind == _HEAD_NORM:
            partial.append(part)
            continue
        by_rows = kind == _ROWS
        for linear in _linears(part, by_rows):
            if type(linear) is not nn.Linear:
                raise ConfigError(f"{_SAID}{name} is no plain linear layer ({type(linear).__name__}). {_WAY_OUT}")
            _cut(linear, mesh, by_rows, sums.setdefault(_block_of(name), _Sum(mesh.get_group())))
    return partial


_SAID = "launch.mesh.tensor: "
_WAY_OUT = "Set launch.mesh.tensor=1."


def _planned(base: Any) -> Iterator[tuple[nn.Module, str, str]]:
    """The modules of the blocks that are cut, each with how and its name. Raises ConfigError for kinds that are not known here."""
    plan = {name: kind for name, kind in (getattr(_text_config(base), "base_model_tp_plan", None) or {}).items() if "*" in name}
    if not plan:
        raise ConfigError(
            f"{_SAID}{type(base).__name__} does not say how it is divided (no base_model_tp_plan in transformers). {_WAY_OUT}"
        )
    if unknown := {kind for kind in plan.values()} - {_ROWS, _COLUMNS, _HEAD_NORM}:
        raise ConfigError(
            f"{_SAID}{type(base).__name__} is divided in a way that is not built ({sorted(unknown)[0]}). {_WAY_OUT}"
        )
    for name, part in backbone(base).named_modules():
        if (kind := plan.get(_BLOCK.sub("*", name, count=1))) is not None:
            yield part, kind, name


def _block_of(name: str) -> str:
    """The name as far as the block's number."""
    found = _BLOCK.search(name)
    return name[: found.end()] if found else ""


def _check(base: Any, count: int) -> None:
    config = _text_config(base)
    heads = config.num_attention_heads
    sizes = {"attention heads": heads, "key-value heads": getattr(config, "num_key_value_heads", None) or heads}
    for part, kind, name in _planned(base):
        plain: Any = getattr(part, "base_layer", part)
        if kind != _HEAD_NORM:
            sizes[f"{'outputs' if kind == _ROWS else 'inputs'} of {name}"] = plain.weight.shape[0 if kind == _ROWS else 1]
    if apart := _unplanned(base):
        raise ConfigError(
            f"{_SAID}{type(base).__name__} does not say how {apart} is divided, which lies between what is. {_WAY_OUT}"
        )
    if bad := next((f"{size} {name}" for name, size in sizes.items() if size % count), None):
        fitting = [n for n in range(1, count) if all(size % n == 0 for size in sizes.values())]
        raise ConfigError(
            f"{_SAID}this model has {bad}, which {count} processes can't share evenly. Set it to {' or '.join(map(str, fitting))}."
        )


def _unplanned(base: Any) -> str | None:
    """A parameter inside a branch that the plan is silent about: it may see a part of the heads or of the width, but which is not known."""
    planned = list(_planned(base))
    known = {id(parameter) for part, _, _ in planned for parameter in part.parameters()}
    for branch in dict.fromkeys(name.rpartition(".")[0] for _, _, name in planned):
        for name, parameter in backbone(base).get_submodule(branch).named_parameters(prefix=branch):
            if id(parameter) not in known:
                return name
    return None


def _text_config(base: Any) -> Any:
    config = base.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _linears(part: Any, by_rows: bool) -> list[Any]:
    """What is cut of one layer. Of W + B·A, rows are cut of W and B, columns of W and A; the other factor stays whole."""
    if not hasattr(part, "base_layer"):
        return [part]
    return [part.base_layer, *(part.lora_B if by_rows else part.lora_A).values()]


def _cut(linear: Any, mesh: Any, by_rows: bool, sum_: _Sum) -> None:
    """Keep this process's rows or columns of W (and of b, where rows are cut), and compute with them alone."""
    for name, parameter in list(linear._parameters.items()):
        if parameter is not None and (by_rows or name == "weight"):
            part = distribute_tensor(
                parameter.detach(), mesh, [Shard(0 if by_rows else 1)], src_data_rank=None
            )  # all have the same
            linear._parameters[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    linear.forward = MethodType(_by_rows(sum_) if by_rows else _by_columns(sum_), linear)


def _by_rows(sum_: _Sum) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(sum_.begin(x), own(self.weight), None if self.bias is None else own(self.bias))

    return forward


def _by_columns(sum_: _Sum) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = sum_.end(F.linear(x, own(self.weight)))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    return forward


def own(parameter: Tensor) -> Tensor:
    """This process's part of a parameter that is cut, with gradient; another one itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def is_cut(linear: nn.Module) -> bool:
    """Whether this process has a part of the layer's rows or columns alone (where its weights have been brought together)."""
    plain: Any = getattr(linear, "base_layer", linear)
    return isinstance(plain.weight, DTensor)


class _Sum:
    """Where the branches of a block begin and end: sums over the processes of `group`."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._begun: tuple[Tensor, Tensor] | None = None  # what a branch reads, until it ends

    def begin(self, x: Tensor) -> Tensor:
        """x; its gradient is the sum of the processes'. Layers that read the same x share one sum."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._begun is None or self._begun[0] is not x:
            self._begun = x, _Begin.apply(x, self.group)
        return self._begun[1]

    def end(self, y: Tensor) -> Tensor:
        """The sum of the processes' y, in its place; its gradient is passed on as it is."""
        self._begun = None
        return _End.apply(y.contiguous(), self.group)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(y)
        torch.distributed.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
