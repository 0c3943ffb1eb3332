"""A model whose weights, gradients and moments are divided over processes: FSDP2 (`torch.distributed.fsdp.fully_shard`).

Each block is one unit; the embeddings, the last norm and the head are another, the root. The root's weights stay whole after a forward,
so that what reads the head directly (`Distribution`) finds it. Gradients are summed, not averaged: losses are shares of one sum already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate

from accord.models.heads import READ, backbone, unwrap
from accord.models.tensor_parallel import divide_products


def shard(module: nn.Module, mesh: Any, *, offload: bool = False) -> list[nn.Module]:
    """Divide `module` over `mesh`, in place: its parameters become DTensors, split along their first dimension over `data`.

    Where the mesh has a second dimension, `tensor`, the blocks' products are divided over it first (models/tensor_parallel.py); returned are
    the modules that then see a part of the heads alone.
    `offload`: what belongs to this process lies in the CPU's memory and goes to the GPU for each use.
    """
    base = unwrap(module)
    partial: list[nn.Module] = []
    if mesh.ndim > 1:
        partial, mesh = divide_products(module, mesh["tensor"]), mesh["data"]
    policy: OffloadPolicy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    for block in blocks_of(base):
        fully_shard(block, mesh=mesh, reshard_after_forward=True, offload_policy=policy)
    fully_shard(base, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
    for part in _units(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
    base.set_reduce_scatter_unused_params(True)  # a process whose pack left an expert out waits for nobody
    # The backbone is read without the head around it: that is a forward of the root too.
    setattr(base, READ, MethodType(_read, base))
    register_fsdp_forward_method(base, READ)
    return partial


def _read(base: nn.Module, **inputs: Any) -> Tensor:
    hidden: Tensor = backbone(base)(**inputs).last_hidden_state
    return hidden if hidden._base is None else hidden.clone()  # FSDP follows the tensor it is given; some families return a view


def blocks_of(base: nn.Module) -> list[nn.Module]:
    """The transformer's blocks: the outermost list of modules in the backbone."""
    lists = (part for part in backbone(base).modules() if isinstance(part, nn.ModuleList))
    return list(next(lists, []))


def _units(module: nn.Module) -> list[Any]:
    """The root first."""
    return [part for part in unwrap(module).modules() if isinstance(part, FSDPModule)]


def is_sharded(module: nn.Module) -> bool:
    return isinstance(unwrap(module), FSDPModule)


def reduce_gradients(module: nn.Module, now: bool) -> None:
    """Whether the next backward pass sums the gradients over the processes, or keeps adding them up here."""
    root = unwrap(module)
    root.set_requires_gradient_sync(now)
    root.set_is_last_backward(now)


def reshard(module: nn.Module) -> None:
    """Give whole weights back: the parts that belong to the processes have changed."""
    for part in _units(module):
        part.reshard()


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, all weights are whole in every process and no forward needs another process: each may stop when it likes. No gradient."""
    if not is_sharded(module):
        yield
        return
    root, *blocks = _units(module)
    reshard(module)
    for part in (root, *blocks):
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(True, recurse=False)
        reshard(module)


class LayerGroups:
    """The blocks of a sharded model, `size` of them whole at a time. Every method is for all processes; none is needed where nothing is sharded."""

    def __init__(self, module: nn.Module, size: int) -> None:
        self.size, self.module = size, module
        self.blocks: list[Any] = blocks_of(unwrap(module)) if is_sharded(module) else []
        self._whole: list[Any] = []

    def gather(self, first: int) -> None:
        """Bring blocks `first` … first + size - 1 together; those of another group are given back before."""
        self.free()
        with torch.inference_mode(False), torch.no_grad():  # training could not use what is made in inference mode
            for block in self.blocks[first : first + self.size]:
                self._whole.append(block)
                block.unshard()

    def free(self) -> None:
        """Give the group back that is whole now."""
        with torch.inference_mode(False):
            while self._whole:
                self._whole.pop().reshard()

    def pass_through(self) -> None:
        """All groups in turn, for the other processes' sake."""
        for first in range(0, len(self.blocks), self.size):
            self.gather(first)
        self.free()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, the embeddings, the last norm and the head are whole, and blocks where `gather` says so. No gradient."""
        if not self.blocks:
            yield
            return
        reshard(self.module)
        unwrap(self.module).unshard()
        try:
            yield
        finally:
            self._whole.clear()
            reshard(self.module)


@contextmanager
def whole_weights(module: nn.Module, keep: bool) -> Iterator[None]:
    """Inside, in the process that `keep`s them, the parameters are plain tensors on the CPU, as if nothing were divided: to be written.

    All processes have to be here; no forward is possible inside.
    """
    if not is_sharded(module):
        yield
        return
    reshard(module)
    replaced: list[tuple[nn.Module, str, Any]] = []
    known: dict[int, nn.Parameter] = {}  # tied weights are gathered once, and stay tied
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in known:
                full = whole(parameter)
                known[id(parameter)] = nn.Parameter(full.cpu() if keep else full[:0], requires_grad=parameter.requires_grad)
            if keep:
                replaced.append((part, name, parameter))
    for part, name, parameter in replaced:
        part._parameters[name] = known[id(parameter)]
    try:
        yield
    finally:
        for part, name, parameter in replaced:
            part._parameters[name] = parameter


# ------------------------------------------------------------------------------------------------------------------ tensors


def is_parted(tensor: Tensor) -> bool:
    """Whether other processes hold the rest of it."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a divided tensor that is here; another one itself. Written to, the tensor changes."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A divided tensor as a whole, for which all processes have to ask; another one itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    parts: DTensor = tensor
    if parts.device_mesh.ndim > 1:  # one dimension after the other: both at once PyTorch warns of
        parts = parts.redistribute(placements=[Replicate(), *parts.placements[1:]])
    return parts.full_tensor().detach()


def by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those that one fused operation can take together: divided over the same processes, or not divided."""
    groups: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh.ndim if isinstance(tensor, DTensor) else 0, []).append(tensor)
    return list(groups.values())


def copies(tensor: Tensor, tensor_parallel: int) -> int:
    """Processes that hold the same part of a divided tensor, where so many divide each product."""
    return tensor_parallel if isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 1 else 1


@torch.no_grad()
def squared_norm(tensors: Sequence[Tensor], tensor_parallel: int = 1) -> float:
    """This process's share of Σ x², in float64: what several hold counts for each of them in part."""
    norms = [torch.linalg.vector_norm(local(tensor), dtype=torch.float64) for tensor in tensors]
    shares = [1 / copies(tensor, tensor_parallel) for tensor in tensors]
    return float((torch.stack(norms).square() * torch.tensor(shares, device=norms[0].device)).sum()) if norms else 0.0
