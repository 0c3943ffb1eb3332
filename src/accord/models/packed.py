"""Segment attention: a pack's sequences share their prompt's computation and cannot see each other.

Attention of a segment = causal over itself plus all of its ancestors, within the layer's sliding window (measured in position
ids) and with its soft-cap if it has them. It is one function registered with `transformers`' attention interface; the layout of
the pack travels as a keyword argument through the model's forward, so every architecture that uses that interface works unchanged.

Source of the idea: prefix sharing for preference training, arXiv:2410.20305.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION_NAME = "accord_segments"
SMALL = 96  # segments up to this long are computed together in padded groups: a call of their own costs more than the padding
GROUP_WASTE = 1.5  # a group's padded size over its first member's, at most

_in_pack: ContextVar[bool] = ContextVar("accord_in_pack", default=False)


@dataclass(frozen=True)
class Group:
    """G segments whose attention is one call, padded to L queries and K keys."""

    queries: Tensor  # [G, L] rows of the pack; padding repeats row 0 of the segment
    keys: Tensor  # [G, K] rows of the pack: ancestors, then the segment itself
    query_mask: Tensor  # [G, L] bool
    key_mask: Tensor  # [G, K] bool
    causal: bool  # one segment without ancestors: no mask is needed to say who sees whom

    def mask(self, positions: Tensor, window: int | None) -> Tensor:
        """[G, 1, L, K] bool: key at or before the query in its own sequence, and within the window."""
        distance = positions[self.queries][:, :, None] - positions[self.keys][:, None, :]
        allowed = (distance >= 0) & self.key_mask[:, None, :]
        if window is not None:
            allowed &= distance < window
        allowed |= ~self.query_mask[:, :, None]  # a padded query sees anything, or its softmax would be 0/0
        return allowed[:, None]


class SegmentLayout:
    """How the attention of one pack is cut into calls. Built once per pack, used by every layer, forward and backward."""

    def __init__(self, segments: Sequence[tuple[int, int, int]], positions: Tensor) -> None:
        """`segments`: (start, end, parent or -1), parents first; `positions`: [T] position ids."""
        self.positions = positions
        self.groups = _make_groups(segments, positions.device)
        # What one gather a layer takes from the pack: the groups' rows, laid end to end with their padding.
        self.queries = torch.cat([group.queries.flatten() for group in self.groups])
        self.keys = torch.cat([group.keys.flatten() for group in self.groups])
        self.query_sizes = [group.queries.numel() for group in self.groups]
        self.key_sizes = [group.keys.numel() for group in self.groups]
        natural = torch.arange(len(positions), device=positions.device)
        self.plain = torch.equal(self.queries, natural) and torch.equal(self.keys, natural)  # then there is nothing to gather
        # Where each row of the pack stands among those of the groups.
        real = torch.cat([group.query_mask.flatten() for group in self.groups])
        self.order = torch.empty(int(real.sum()), dtype=torch.int64, device=real.device)
        self.order[self.queries[real]] = real.nonzero()[:, 0]
        self.longest = int(positions.max()) + 1 if len(positions) else 0
        self._masks: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}

    def masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """What to add to the scores of each group: 0 or -inf, in `dtype` (a boolean mask would be turned into this in every layer)."""
        if window is not None and window >= self.longest:
            window = None  # the window never cuts anything here
        if (window, dtype) not in self._masks:
            allowed = [group.mask(self.positions, window) for group in self.groups]
            zeros = [torch.zeros(mask.shape, dtype=dtype, device=mask.device) for mask in allowed]
            self._masks[window, dtype] = [
                zero.masked_fill_(~mask, float("-inf")) for zero, mask in zip(zeros, allowed, strict=True)
            ]
        return self._masks[window, dtype]


def _make_groups(segments: Sequence[tuple[int, int, int]], device: torch.device) -> list[Group]:
    ancestors: list[list[tuple[int, int]]] = []
    for _start, _end, parent in segments:
        ancestors.append([*ancestors[parent], segments[parent][:2]] if parent >= 0 else [])
    items = [i for i, (start, end, _) in enumerate(segments) if end > start]
    key_length = {i: sum(e - s for s, e in ancestors[i]) + segments[i][1] - segments[i][0] for i in items}
    length = {i: segments[i][1] - segments[i][0] for i in items}
    # Neighbours in this order have similar shapes, so that padding a group wastes little.
    small = sorted((i for i in items if length[i] <= SMALL), key=lambda i: (-key_length[i], -length[i]))
    buckets: list[list[int]] = [[i] for i in items if length[i] > SMALL]
    bucket: list[int] = []
    used = 0
    for i in small:
        padded = (len(bucket) + 1) * max(length[j] for j in [*bucket, i]) * max(key_length[j] for j in [*bucket, i])
        if bucket and padded > GROUP_WASTE * (used + length[i] * key_length[i]):
            buckets.append(bucket)
            bucket, used = [], 0
        bucket.append(i)
        used += length[i] * key_length[i]
    if bucket:
        buckets.append(bucket)

    groups = []
    for members in buckets:
        query_rows = [torch.arange(segments[i][0], segments[i][1]) for i in members]
        key_rows = [torch.cat([torch.arange(s, e) for s, e in [*ancestors[i], segments[i][:2]]]) for i in members]
        queries, query_mask = _pad(query_rows)
        keys, key_mask = _pad(key_rows)
        only = members[0]
        causal = len(members) == 1 and not ancestors[only]
        groups.append(Group(queries.to(device), keys.to(device), query_mask.to(device), key_mask.to(device), causal))
    return groups


def _pad(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in rows)
    padded = torch.stack([F.pad(row, (0, width - len(row)), value=int(row[0])) for row in rows])
    mask = torch.stack([torch.arange(width) < len(row) for row in rows])
    return padded, mask


def segment_attention(
    module: nn.Module | None,  # only read without a layout
    query: Tensor,  # [1, heads, T, d]
    key: Tensor,  # [1, key heads, T, d]
    value: Tensor,  # [1, key heads, T, d]
    attention_mask: Tensor | None,
    accord_layout: SegmentLayout | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention of one layer over a pack: [1, T, heads, d]. Without a layout it is `transformers`' ordinary attention."""
    if accord_layout is None:
        if softcap is not None:
            return _plain_softcap(module, query, key, value, attention_mask, scaling, softcap), None
        assert module is not None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    if kwargs.get("position_bias") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention with a position bias or with sinks")  # the self-test sees it and falls back
    repeat = query.shape[1] // key.shape[1]
    dtype = query.dtype
    if query.device.type == "cpu":
        # The CPU kernel's backward is three times slower in bfloat16 than in float32, and its forward no faster.
        query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
        with torch.autocast("cpu", enabled=False):
            out = _attend(query, key, value, accord_layout, repeat, dropout, scaling, sliding_window, softcap)
        return out.to(dtype), None
    return _attend(query, key, value, accord_layout, repeat, dropout, scaling, sliding_window, softcap), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SegmentLayout,
    repeat: int,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The groups' attention, one call each: [1, T, heads, d]."""
    windowed = window is not None and window < layout.longest
    masked = windowed or softcap is not None or not all(group.causal for group in layout.groups)
    masks = layout.masks(window, query.dtype) if masked else []
    # The CPU kernel shares keys between heads by itself; CUDA's fused ones do so only without a mask.
    shared_keys = repeat > 1 and softcap is None and query.device.type == "cpu"
    queries = _gathered(query, layout.queries, layout.query_sizes, layout.plain)
    keys = _gathered(key, layout.keys, layout.key_sizes, layout.plain)
    values = _gathered(value, layout.keys, layout.key_sizes, layout.plain)
    outputs = []
    for i, group in enumerate(layout.groups):
        q = queries[i].view(*group.queries.shape, *queries[i].shape[1:]).transpose(1, 2)  # [G, heads, L, d]
        k = keys[i].view(*group.keys.shape, *keys[i].shape[1:]).transpose(1, 2)
        v = values[i].view(*group.keys.shape, *values[i].shape[1:]).transpose(1, 2)
        if not shared_keys:
            k, v = repeat_kv(k, repeat), repeat_kv(v, repeat)
        causal = group.causal and not windowed and softcap is None
        mask = None if causal else masks[i]
        if softcap is None:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=causal, enable_gqa=shared_keys
            )
        else:
            out = _softcap_attention(q, k, v, mask, scaling, softcap)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # [rows with padding, heads, d]
    joined = torch.cat(outputs)
    return (joined if layout.plain else joined.index_select(0, layout.order))[None]


def _gathered(x: Tensor, rows: Tensor, sizes: list[int], plain: bool) -> tuple[Tensor, ...]:
    """[1, heads, T, d] → of each group its rows [G·L, heads, d]. One gather and one split: their backward is one pass each."""
    x = x[0].transpose(0, 1)
    return (x.contiguous() if plain else x.index_select(0, rows)).split(sizes)


def _softcap_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, softcap: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    return torch.softmax(scores.float(), dim=-1).to(v.dtype) @ v


def _plain_softcap(module, query, key, value, mask, scaling, softcap) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(key.shape[2] - query.shape[2])
    return _softcap_attention(query, repeat_kv(key, repeat), repeat_kv(value, repeat), mask, scaling, softcap).transpose(1, 2)


def _segment_mask(*args, **kwargs):
    """In a pack the layout says who sees whom; elsewhere (plain `generate`) the ordinary mask."""
    return None if _in_pack.get() else sdpa_mask(*args, **kwargs)


AttentionInterface.register(ATTENTION_NAME, segment_attention)
AttentionMaskInterface.register(ATTENTION_NAME, _segment_mask)


@contextmanager
def packed_forward() -> Iterator[None]:
    """Inside, no [T, T] mask is built."""
    token = _in_pack.set(True)
    try:
        yield
    finally:
        _in_pack.reset(token)
