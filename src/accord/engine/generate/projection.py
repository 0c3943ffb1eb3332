"""Linear layers of the training module as the decoder applies them.

- *shared*: the modules themselves, on the very tensors that are trained; a LoRA adapter is applied on the fly.
- *copied*: one matrix for modules that stand side by side, in the decoder's type; an adapter is merged into the copy.
- *packed*: a copy in oneDNN's blocked layout (CPU). A product with few rows, as in decoding, runs faster on it.

Copies are renewed by `refresh()` after the weights have changed; the training weights are never touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from accord.models.quantized import QuantizedLinear
from accord.models.tensor_parallel import is_cut, own

Placement = Literal["shared", "copied", "packed"]

_ROWS_HINT = 32  # for the packed layout: rows of a decoding step


@dataclass(frozen=True)
class Slice:
    """The part of a linear layer that rank `rank` of `count` applies: some outputs, or (`inputs`) what some inputs add to all outputs.

    `parts`: so many equal blocks of outputs are cut alike (queries, keys and values in one matrix).
    """

    rank: int
    count: int
    inputs: bool = False
    parts: int = 1

    def of(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Of W [out, in] and b [out]. The first rank adds the whole bias where the ranks' results are summed."""
        if self.inputs:
            return weight.chunk(self.count, dim=1)[self.rank], bias if self.rank == 0 else None
        rows = torch.arange(len(weight), device=weight.device).view(self.parts, self.count, -1)[:, self.rank].flatten()
        return weight[rows], None if bias is None else bias[rows]


class Projection:
    """x ↦ x · [W₁; W₂; …]ᵀ + [b₁; b₂; …] of one or more linear modules that read the same input.

    `part`: only that of W and b is applied, of a copy. `sum_` adds the results of all ranks up where each has some of the inputs.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        dtype: torch.dtype,
        placement: Placement,
        part: Slice | None = None,
        sum_: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.modules, self.dtype, self.placement, self.part, self.sum_ = modules, dtype, placement, part, sum_
        self.weight: Any = None
        self.bias: Tensor | None = None
        self.copied_bytes = 0  # of the weight, now

    def refresh(self) -> None:
        """Copy the weights as they are now, into the same memory if there is some: what points to it (a CUDA graph) stays right."""
        if self.placement == "shared":
            return
        weights, biases = zip(*map(self._weight, self.modules), strict=True)
        weight = weights[0].to(self.dtype) if len(weights) == 1 else torch.cat([w.to(self.dtype) for w in weights])
        if any(bias is not None for bias in biases):
            whole = [bias if bias is not None else weight.new_zeros(len(w)) for bias, w in zip(biases, weights, strict=True)]
            self.bias = renewed(self.bias, torch.cat([bias.to(self.dtype) for bias in whole]))
        self.copied_bytes = weight.numel() * self.dtype.itemsize
        if self.placement == "packed":
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
        else:
            self.weight = renewed(self.weight, weight)

    def _weight(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        if self.part is None:
            return merged_weight(module)
        if is_cut(module):
            weight, bias = merged_weight(module)
            return weight, bias if not self.part.inputs or self.part.rank == 0 else None
        return self.part.of(*merged_weight(module))

    def release(self) -> None:
        """Free the copies."""
        self.weight = self.bias = None
        self.copied_bytes = 0

    def __call__(self, x: Tensor) -> Tensor:
        y = self._apply(x)
        return y if self.sum_ is None else self.sum_(y)

    def _apply(self, x: Tensor) -> Tensor:
        if self.placement == "packed":
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        if self.placement == "copied":
            return F.linear(x, self.weight, self.bias)
        if len(self.modules) == 1:
            return self.modules[0](x)
        return torch.cat([module(x) for module in self.modules], dim=-1)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + projection of x."""
        if self.placement == "packed" and self.sum_ is None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return self(x).add_(residual)


def renewed(old: Tensor | None, new: Tensor) -> Tensor:
    """The numbers of `new`, in the memory of `old` if there is one; never the training tensor itself."""
    return new.clone(memory_format=torch.contiguous_format) if old is None else old.copy_(new)


def merged_weight(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(W [out, in], b) of a linear module, GPT-2's transposed kind and those in 4 bits included; an active LoRA adapter is merged in, in float32.

    Of one whose product is divided (models/tensor_parallel.py), this process's part.
    """
    part: Any = module
    delta = None
    if hasattr(part, "get_delta_weight"):
        off = part.disable_adapters or part.merged  # merged: W holds it already
        active = [] if off else [name for name in part.active_adapters if name in part.lora_A]
        for name in active:
            change = _own_change(part, name) if is_cut(part) else part.get_delta_weight(name).float()
            delta = change if delta is None else delta + change
        part = part.base_layer
    weight = own(part.weight).detach()
    if delta is not None:
        weight = weight.float() + delta
    if isinstance(part, Conv1D):
        weight = weight.T
    return weight, None if part.bias is None else own(part.bias).detach()


def _own_change(layer: Any, name: str) -> Tensor:
    """Of (α/r) B A of an adapter, the rows or columns that this process has, in float32."""
    return layer.scaling[name] * (
        own(layer.lora_B[name].weight).detach().float() @ own(layer.lora_A[name].weight).detach().float()
    )


def is_projection(module: nn.Module) -> bool:
    """Whether `merged_weight` understands the module: plain linear, in 4 bits, GPT-2's, or one of them under LoRA."""
    part: Any = module
    if hasattr(part, "get_delta_weight"):
        if not hasattr(part, "lora_A") or part.lora_variant or any(part.lora_bias.values()):  # DoRA is a variant
            return False
        part = part.base_layer
    return type(part) in (nn.Linear, QuantizedLinear, Conv1D)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN packs weights of this type here and gives the right product."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    try:
        draw = torch.Generator().manual_seed(0)
        x, weight = torch.randn(3, 32, generator=draw).to(dtype), torch.randn(48, 32, generator=draw).to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        both = torch.ops.mkldnn._linear_pointwise.binary(x, product, packed, None, "add")
    except (AttributeError, RuntimeError):  # not built in, or a processor that oneDNN doesn't serve in this type
        return False
    wanted = F.linear(x.double(), weight.double())
    return torch.allclose(product.double(), wanted, rtol=0.05, atol=0.2) and torch.allclose(
        both.double(), 2 * wanted, rtol=0.05, atol=0.4
    )
