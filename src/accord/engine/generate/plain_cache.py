"""A key/value cache that is written in place, grows in blocks and gives up the rows that have finished.

transformers' `DynamicCache` copies everything it holds at every token; for small models on a CPU that copy costs as much as the model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


class SlotLayer(DynamicLayer):
    """Keys and values [rows, heads, capacity, head_dim], of which the first `length` columns are filled.

    Layers with a sliding window keep all columns as well; the model's own mask hides what is out of the window.
    """

    is_sliding = False

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None, length: int = 0) -> None:
        super().__init__()
        self.key_store, self.value_store, self.length = keys, values, length
        self.is_initialized = keys is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if self.key_store is None or self.value_store is None:  # prefill: what the model computed is the store
            self.key_store, self.value_store, self.length = key_states, value_states, key_states.shape[-2]
            self.is_initialized = True
            return key_states, value_states
        end = self.length + key_states.shape[-2]
        self.key_store[:, :, self.length : end] = key_states
        self.value_store[:, :, self.length : end] = value_states
        self.length = end
        return self.key_store[:, :, :end], self.value_store[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def filled(self) -> tuple[Tensor, Tensor]:
        """The columns in use: [rows, heads, length, head_dim] twice."""
        assert self.key_store is not None and self.value_store is not None
        return self.key_store[:, :, : self.length], self.value_store[:, :, : self.length]


class SlotCache(Cache):
    """One `SlotLayer` for every layer of the model, all of the same length."""

    def __init__(self, slots: list[SlotLayer]) -> None:
        super().__init__(layers=list(slots))
        self.slots = slots

    @property
    def length(self) -> int:
        return self.slots[0].length

    @property
    def full(self) -> bool:
        """There is no column for one more token."""
        store = self.slots[0].key_store
        return store is not None and self.length == store.shape[2]

    def select(self, keep: Tensor | None, trim: int, room: int) -> None:
        """Keeps the rows `keep` (None: all), forgets the first `trim` columns and makes `room` free columns at the end."""
        for layer in self.slots:
            stores = []
            for filled in layer.filled():
                rows = filled.shape[0] if keep is None else len(keep)
                length = filled.shape[2] - trim
                store = filled.new_empty(rows, filled.shape[1], length + room, filled.shape[3])
                store[:, :, :length] = filled[:, :, trim:] if keep is None else filled[keep, :, trim:]
                stores.append(store)
            layer.key_store, layer.value_store = stores
            layer.length -= trim


def supports_slots(config: Any) -> bool:
    """Whether every layer of the model keeps plain keys and values (no recurrent state, no layers that share another's cache)."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in DynamicCache(config=config).layers)


def empty_slots(config: Any) -> SlotCache:
    """A cache for one forward over whole prompts."""
    return SlotCache([SlotLayer() for _ in DynamicCache(config=config).layers])


def join(parts: list[tuple[SlotCache, Tensor, Tensor]], rows: int, width: int, room: int) -> SlotCache:
    """One cache of `rows` rows from prefilled parts, right-aligned at column `width`, with `room` free columns after it.

    A part is (cache, source rows [n], destination rows [n]): a prompt that is sampled several times is computed once.
    """
    layers = []
    for number in range(len(parts[0][0].slots)):
        stores = []
        for which in (0, 1):
            first = parts[0][0].slots[number].filled()[which]
            # zeros, not empty: a masked column still takes part in 0 · value, and 0 · NaN is NaN
            store = first.new_zeros(rows, first.shape[1], width + room, first.shape[3])
            for cache, source, destination in parts:
                filled = cache.slots[number].filled()[which]
                store[destination, :, width - filled.shape[2] : width] = filled.index_select(0, source)
            stores.append(store)
        layers.append(SlotLayer(stores[0], stores[1], width))
    return SlotCache(layers)
