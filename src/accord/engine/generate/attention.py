"""Attention by torch's own operations: of decoding (one query a sequence over its cache) and of prompts (a pack of segments)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from accord.models.packed import SegmentLayout, segment_attention


class DecodeAttention:
    """Of one step: n sequences in the slots 0 … n-1, one new token each, whose keys are in the cache already."""

    def __init__(self, longest: int, positions: Tensor, dtype: torch.dtype, masked: bool = False) -> None:
        """`positions` [n] of the new tokens; a sequence sees its cache up to and including that position."""
        self.longest, self.positions, self.dtype = longest, positions, dtype
        self.masked = masked
        self._masks: dict[int | None, Tensor | None] = {}

    def mask(self, window: int | None) -> Tensor | None:
        """[n, 1, 1, longest] what to add to the scores; None: everything is seen."""
        if window is not None and window >= self.longest:
            window = None
        if window not in self._masks:
            column = torch.arange(self.longest, device=self.positions.device)[None]
            hidden = column > self.positions[:, None]
            if window is not None:
                hidden |= column <= self.positions[:, None] - window
            if self.masked or bool(hidden.any()):
                zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
                self._masks[window] = zeros.masked_fill_(hidden, float("-inf"))[:, None, None]
            else:
                self._masks[window] = None
        return self._masks[window]

    def __call__(
        self,
        query: Tensor,  # [n, heads, d]
        keys: Tensor,  # [slots, key heads, capacity, d]
        values: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """[n, heads, d]."""
        n, heads, d = query.shape
        keys, values = keys[:n, :, : self.longest], values[:n, :, : self.longest]
        # Queries that share a key head stand as rows of one product, so that its keys are read once.
        q = query.reshape(n, keys.shape[1], heads // keys.shape[1], d)
        mask = self.mask(window)
        if softcap is None:
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scaling)
        else:
            scores = softcap * torch.tanh((q @ keys.transpose(-1, -2)) * (scaling / softcap))
            scores = scores if mask is None else scores + mask
            out = torch.softmax(scores.float(), dim=-1).to(values.dtype) @ values
        return out.reshape(n, heads, d)


def prompt_attention(
    query: Tensor,  # [T, heads, d]
    key: Tensor,  # [T, key heads, d]
    value: Tensor,
    layout: SegmentLayout,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """[T, heads, d]: each prompt sees itself."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out, _ = segment_attention(None, q, k, v, None, layout, scaling=scaling, sliding_window=window, softcap=softcap)
    return out[0]
