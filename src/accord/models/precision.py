"""Whether this machine computes in bfloat16 as fast as one expects of it."""

from __future__ import annotations

import logging
from functools import cache

import torch

log = logging.getLogger(__name__)


def has_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 matrices run on instructions made for them. Without, a CPU takes some forty times float32's time."""
    if device.type != "cpu":
        return True
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # built without oneDNN: nothing is known
        return True


def check_bfloat16(dtype: torch.dtype | None, device: torch.device) -> None:
    """Warn, once, where `dtype` is bfloat16 and the processor has no instructions for it."""
    if dtype == torch.bfloat16 and not has_bfloat16(device):
        _warn()


@cache
def _warn() -> None:
    log.warning(
        "This processor has no bfloat16 instructions: products in bfloat16 take many times as long as in float32. Set "
        "train.precision=float32, and float32 for model.dtype, reference.dtype, reward_model.dtype and engine.dtype where they are set."
    )
