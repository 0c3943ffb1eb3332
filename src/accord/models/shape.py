"""What a model would hold, weight by weight, from its `transformers` configuration alone: it is built on the meta device, where nothing has memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from accord.models.forward import round_linears
from accord.models.heads import keep_head_in_float32, unwrap
from accord.models.lora import add_lora
from accord.models.quantized import BYTES
from accord.models.sharded import blocks_of

if TYPE_CHECKING:
    from accord.config import Lora

_PLAIN_MLP = {"gpt2", "opt", "gpt_neox", "bloom", "falcon"}  # families whose MLP has two matrices instead of three


class Weight(NamedTuple):
    """One parameter; tied ones are one."""

    shape: tuple[int, ...]
    itemsize: float  # bytes of a number
    trained: bool
    multiplies: bool  # whether it is a linear layer's matrix

    @property
    def numbers(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return ceil(self.numbers * self.itemsize)


@dataclass(frozen=True)
class Shape:
    """A model's weights, as sharding groups them (models/sharded.py), and the sizes that decide what its forward keeps."""

    blocks: tuple[tuple[Weight, ...], ...]  # the transformer's, each one unit
    root: tuple[Weight, ...]  # embeddings, last norm and head: the unit that stays whole after a forward
    hidden: int
    intermediate: int
    queries: int  # heads · head dimension
    keys: int  # key-value heads · head dimension
    heads: int
    head_dim: int
    vocabulary: int  # 0: a scalar head
    gated: bool  # MLP with three matrices

    @property
    def units(self) -> tuple[tuple[Weight, ...], ...]:
        return (self.root, *self.blocks)

    @property
    def weights(self) -> list[Weight]:
        return [weight for unit in self.units for weight in unit]

    @property
    def trained(self) -> list[Weight]:
        return [weight for weight in self.weights if weight.trained]

    @property
    def products(self) -> int:
        """Numbers of the blocks' matrices: each multiplies, and is added, once a token."""
        return sum(weight.numbers for block in self.blocks for weight in block if weight.multiplies)

    @property
    def layers(self) -> int:
        return len(self.blocks)


def shape_of(
    config: Any,
    *,
    scalar: bool = False,
    trained: bool = True,
    lora: Lora | None = None,
    dtype: torch.dtype = torch.float32,
    rounded: torch.dtype | None = None,
    quantized: bool = False,
) -> Shape:
    """The shape of the model that `load_causal` (`scalar`: `load_scalar`) would make of a `transformers` configuration.

    `dtype`: of frozen weights, a LoRA base included; trained ones are float32. `rounded`: what a frozen model's linear layers are kept in
    under `train.precision: bf16` (`FrozenModel`). `quantized`: the matrices of a LoRA base are kept in 4 bits (models/quantized.py).
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = copy.deepcopy(config)
    config.num_labels = 1
    auto: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    with torch.device("meta"):
        module: nn.Module = auto.from_config(config, dtype=torch.float32 if scalar or (trained and lora is None) else dtype)
        if scalar:
            keep_head_in_float32(module, rest=torch.float32 if trained and lora is None else dtype)
        module.requires_grad_(trained and lora is None)
        if lora is not None:
            module = add_lora(module, lora.model_copy(update={"path": None}), seed=0, scalar=scalar)
    if rounded is not None and not trained:
        round_linears(module, rounded)
    shape = _read(module, config.get_text_config(), scalar)
    return replace(shape, blocks=tuple(map(_in_four_bits, shape.blocks))) if quantized else shape


def _read(module: nn.Module, text: Any, scalar: bool) -> Shape:
    base = unwrap(module)
    head = None if scalar else base.get_output_embeddings()
    matrices = {id(part.weight) for part in base.modules() if hasattr(part, "weight") and _is_matrix(part)}
    owner = {id(p): number for number, block in enumerate(blocks_of(base)) for p in block.parameters()}
    units: list[list[Weight]] = [[] for _ in range(len(blocks_of(base)) + 1)]
    for parameter in module.parameters():  # tied ones come once
        weight = Weight(tuple(parameter.shape), parameter.element_size(), parameter.requires_grad, id(parameter) in matrices)
        units[owner.get(id(parameter), -1)].append(weight)
    *blocks, root = map(tuple, units)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    inner = next((size for name in ("intermediate_size", "ffn_dim", "n_inner") if (size := getattr(text, name, None))), None)
    return Shape(
        blocks=tuple(blocks),
        root=root,
        hidden=text.hidden_size,
        intermediate=inner or 4 * text.hidden_size,
        queries=text.num_attention_heads * head_dim,
        keys=keys * head_dim,
        heads=text.num_attention_heads,
        head_dim=head_dim,
        vocabulary=0 if head is None else head.weight.shape[0],
        gated=text.model_type not in _PLAIN_MLP,
    )


def _in_four_bits(block: tuple[Weight, ...]) -> tuple[Weight, ...]:
    return tuple(w._replace(itemsize=BYTES) if w.multiplies and not w.trained else w for w in block)


def _is_matrix(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"  # GPT-2's linear layer
