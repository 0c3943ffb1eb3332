"""A key/value cache that is written in place, grows in blocks and gives up the rows that have finished.

transformers' `DynamicCache` copies everything it holds at every token; for small models on a CPU that copy costs as much as the model.
"""

from __future__ import annotations

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
        assert self.key_store is not None and self.value_store is not None
        return self.key_store[:, :, : self.length], self.value_store[:, :, : self.length]


def supports_slots(config: object) -> bool:
    """Whether every layer of the model keeps plain keys and values (no recurrent state, no layers that share another's cache)."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in DynamicCache(config=config).layers)


def prefill_cache(layers: int) -> Cache:
    """An empty cache for one forward over whole prompts."""
    return Cache(layers=[SlotLayer() for _ in range(layers)])


def join(parts: list[tuple[Cache, Tensor, Tensor]], rows: int, width: int, room: int) -> Cache:
    """One cache of `rows` rows from prefilled parts, right-aligned at column `width`, with `room` free columns after it.

    A part is (cache, source rows [n], destination rows [n]): a prompt that is sampled several times is computed once.
    """
    layers = []
    for number in range(len(parts[0][0].layers)):
        stores = []
        for which in (0, 1):
            first = parts[0][0].layers[number].filled()[which]
            # zeros, not empty: a masked column still takes part in 0 · value, and 0 · NaN is NaN
            store = first.new_zeros(rows, first.shape[1], width + room, first.shape[3])
            for cache, source, destination in parts:
                filled = cache.layers[number].filled()[which]
                store[destination, :, width - filled.shape[2] : width] = filled.index_select(0, source)
            stores.append(store)
        layers.append(SlotLayer(stores[0], stores[1], width))
    return Cache(layers=layers)


def select(cache: Cache, keep: Tensor | None, trim: int, room: int) -> None:
    """Keeps the rows `keep` (None: all), forgets the first `trim` columns and makes `room` free columns at the end."""
    for layer in cache.layers:
        stores = []
        for filled in layer.filled():
            size = filled.shape[0] if keep is None else len(keep)
            length = filled.shape[2] - trim
            store = filled.new_empty(size, filled.shape[1], length + room, filled.shape[3])
            kept = filled[:, :, trim:]
            store[:, :, :length] = kept if keep is None else kept[keep]
            stores.append(store)
        layer.key_store, layer.value_store = stores
        layer.length -= trim
