"""The two ends of a model: the backbone that gives hidden states, and the head that turns one into a score.

A scalar model (reward model or critic) is `transformers`' one-label sequence classifier, so that what is saved loads anywhere. Its head
computes in float32 whatever the backbone's dtype (ALGORITHMS §2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accord.errors import ConfigError

READ = "accord_hidden"  # the method by which a sharded model reads its backbone (models/sharded.py)


def unwrap(module: nn.Module) -> Any:
    """The `transformers` model itself, without peft's wrapper around it."""
    base: Any = module
    return base.get_base_model() if hasattr(base, "get_base_model") else base


def context_length(module: nn.Module) -> int | None:
    """The most tokens of one sequence; None where the family has no limit (ALiBi)."""
    length = getattr(unwrap(module).config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def backbone(module: nn.Module) -> nn.Module:
    """The model without its head: its output's `last_hidden_state` is what the head reads."""
    base = unwrap(module)
    return getattr(base, base.base_model_prefix)


def last_hidden(module: nn.Module, **inputs: Any) -> Tensor:
    """The hidden states of the backbone's last layer."""
    base = unwrap(module)
    read = getattr(base, READ, None)  # of a sharded model: its weights are brought together first
    return read(**inputs) if read is not None else backbone(base)(**inputs).last_hidden_state


def score_head(module: nn.Module) -> nn.Module:
    """The linear layer hidden → 1 of a scalar model. Raises ConfigError for an architecture whose classifier has none."""
    base = unwrap(module)
    for name in ("score", "classifier"):
        head = getattr(base, name, None)
        # The type says it; peft wraps a trained head in a module of its own.
        if head is not None and (isinstance(head, nn.Linear) or hasattr(head, "modules_to_save")):
            return head
    raise ConfigError(f"{type(base).__name__} has no linear score head; reward models of this architecture are not supported")


def scores(module: nn.Module, hidden: Tensor) -> Tensor:
    """Scores of hidden states [..., H] → [...], in float32."""
    return score_head(module)(hidden.float()).squeeze(-1).float()


def init_score_head(module: nn.Module, seed: int) -> None:
    """A fresh head: w ~ N(0, 1/(H+1)), no bias (Stiennon et al. 2020, appendix). The same seed gives the same head."""
    head = score_head(module)
    weight: Tensor = head.weight  # type: ignore[assignment]
    with torch.no_grad():
        weight.copy_(_drawn(weight.shape[-1], seed))
        if getattr(head, "bias", None) is not None:
            head.bias.zero_()  # type: ignore[union-attr,operator]


def new_score_head(width: int, seed: int, device: torch.device) -> nn.Linear:
    """A head of its own, beside a model that has none: float32, drawn as `init_score_head` does."""
    head = nn.Linear(width, 1, bias=False, device=device)
    with torch.no_grad():
        head.weight.copy_(_drawn(width, seed))
    return head


def _drawn(width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, width), generator=generator, dtype=torch.float32) / math.sqrt(width + 1)


def _cast_input(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0].to(head.weight.dtype), *args[1:])


def keep_head_in_float32(module: nn.Module, rest: torch.dtype) -> None:
    """Bring a float32 scalar model to dtype `rest`, its score head excepted; the head casts what it is given, so the model's own forward works.

    Buffers keep their type, as where `transformers` loads in `rest`: rotary frequencies rounded to bfloat16 would turn far positions wrongly.
    """
    head = score_head(module)
    kept = {id(parameter) for parameter in head.parameters()}
    for parameter in module.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(rest)
    head.register_forward_pre_hook(_cast_input)


def disable_dropout(target: Any) -> None:
    """Turn every dropout off: in a configuration (before the model is built) or in a module.

    Configurations name it in many ways (attention_dropout, resid_pdrop, layerdrop …): every number whose name holds "drop" becomes 0.
    """
    if isinstance(target, nn.Module):
        for part in target.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        return
    for name, value in list(vars(target).items()):
        if "drop" in name and isinstance(value, float):
            setattr(target, name, 0.0)
        elif name.endswith("_config") and hasattr(value, "to_dict"):  # composite models keep one configuration a part
            disable_dropout(value)


def checkpoint_activations(module: nn.Module) -> None:
    """Compute activations again in the backward pass; non-reentrant, which also works when no input needs a gradient (LoRA)."""
    base = unwrap(module)
    if hasattr(base, "activation_checkpointing_enable"):  # the newer name
        base.activation_checkpointing_enable({"use_reentrant": False})
    else:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' loading report to itself: what is missing is checked here and said once."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
