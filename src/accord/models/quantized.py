"""A frozen base in 4 bits, for LoRA (QLoRA: Dettmers et al. 2023, arXiv:2305.14314, §3 and appendix E).

A matrix is cut, row after row, into blocks of 64 numbers. Of a block are kept its largest absolute value c and, for each number w, which of
16 levels is nearest to w / c (NF4: quantiles of a normal distribution, 0 and ±1 among them). The c of 256 blocks, less the mean of all, are
kept in 8 bits in the same manner ("double quantization"):

    W ≈ level[q] · c        4 + 8/64 + 32/(64 · 256) bits a number: 0.516 bytes

W is made again for every product, forward and backward, one matrix at a time; nothing else is quantised, and what is computed with W is the
same everywhere: training, reference, sampler, the merged model. The kernels are bitsandbytes', for CPUs and GPUs. Its own layer is not used:
on a CPU with bfloat16 instructions `Linear4bit` turns to products in bfloat16 as soon as it is asked without a gradient, so that policy and
reference would differ before the first step, and goes on without gradients afterwards.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accord.errors import ConfigError
from accord.models.sharded import blocks_of

BLOCK, SCALES_BLOCK = 64, 256  # numbers that share a c, and c that share a scale of their own
BYTES = (4 + 8 / BLOCK + 32 / (BLOCK * SCALES_BLOCK)) / 8  # of a number

# When it is imported it asks for a package with a product in bfloat16, which is not wanted here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with its matrix in 4 bits; peft adapts it like any other."""

    packed: Tensor  # [⌈out · in / 2⌉, 1] uint8: two levels a byte
    absmax: Tensor  # [blocks] uint8: c, less their mean
    absmax_scale: Tensor  # [⌈blocks / 256⌉]
    absmax_mean: Tensor  # []

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        """From a layer of its own, which is left as it is. `device`: where the matrix is quantised and kept."""
        nn.Module.__init__(self)  # the parent's would make a matrix
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        packed, state = _kernels().quantize_4bit(
            linear.weight.detach().to(device), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        self.register_buffer("packed", packed)
        self.register_buffer("absmax", state.absmax)
        self.register_buffer("absmax_scale", state.state2.absmax)
        self.register_buffer("absmax_mean", state.offset)
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in] what is multiplied with, made anew: 4 bytes a number (2 in a half-precision `model.dtype`). It takes no gradient."""
        kernels = _kernels()
        largest = kernels.dequantize_blockwise(self.absmax, absmax=self.absmax_scale, blocksize=SCALES_BLOCK) + self.absmax_mean
        # As one row: told of several, a CPU's kernel begins a block with each, and blocks run across rows unless these are multiples of 64.
        row = torch.Size((self.out_features * self.in_features,))
        state = kernels.QuantState(absmax=largest, shape=row, dtype=self.dtype, blocksize=BLOCK, quant_type="nf4")
        return kernels.dequantize_4bit(self.packed, state).view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b in the type of x; under autocast in that one's."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        return _Product.apply(x, self)


class _Product(torch.autograd.Function):
    """x Wᵀ + b. The graph keeps neither W nor x: the backward pass makes W again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient @ ctx.layer.weight.to(gradient.dtype), None


def quantize_base(module: nn.Module, device: torch.device) -> None:
    """Keep the linear layers of the blocks of a `transformers` model, which is frozen, in 4 bits; not embeddings, norms and heads.

    They go to `device` and are quantised there one by one. Raises ConfigError when bitsandbytes is missing, or the blocks have matrices
    that are in no plain linear layer.
    """
    blocks = blocks_of(module)
    others = sorted({type(part).__name__ for block in blocks for part in block.modules() if _has_other_matrix(part)})
    if others or not blocks:
        found = f"its layers have matrices of another kind ({', '.join(others)})" if others else "it has no list of layers"
        raise ConfigError(
            f"model.quantization: {type(module).__name__} can't be kept in 4 bits: {found}, not plain linear layers. "
            "Set model.quantization=null; model.dtype=bfloat16 halves the base."
        )
    for block in blocks:
        for parent in list(block.modules()):
            for name, part in list(parent.named_children()):
                if type(part) is nn.Linear:
                    setattr(parent, name, QuantizedLinear(part, device))
    for parameter in module.parameters():
        # Weights are pages of the file they came from. As long as one of them is, the pages of the others stay resident too.
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def is_quantized(module: nn.Module) -> bool:
    """Whether some of its layers are kept in 4 bits."""
    return any(isinstance(part, QuantizedLinear) for part in module.modules())


def _has_other_matrix(part: nn.Module) -> bool:
    return type(part) is not nn.Linear and any(parameter.dim() > 1 for parameter in part.parameters(recurse=False))


def _kernels() -> Any:
    try:
        from bitsandbytes import functional
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"model.quantization: bitsandbytes can't be used ({error}). Run: pip install 'accord[quantization]', or set it to null."
        ) from error
    return functional
