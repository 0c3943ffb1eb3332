"""Keys and values of the sequences under way: one slot a sequence, written in place, grown by blocks, given back when asked."""

from __future__ import annotations

import ctypes
import gc
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accord.errors import OutOfMemoryError

if TYPE_CHECKING:
    from accord.engine.generate.spec import DecoderSpec

BLOCK = 64  # tokens by which a slot grows


class KeyValueCache:
    """For every layer keys and values [slots, key-value heads, capacity, head dim].

    The active sequences are always in the slots 0 … n-1, so that attention reads slices and copies nothing.
    `lanes`: so many positions of the keys stand side by side, [slots, key-value heads, capacity / lanes, head dim, lanes], for the compiled
    kernels; None: plain.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, lanes: int | None = None) -> None:
        self.spec, self.dtype, self.device, self.lanes = spec, dtype, device, lanes
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.slots = self.capacity = 0
        self.moves = 0  # how often its tensors have been replaced

    @property
    def nbytes(self) -> int:
        """What is taken now."""
        return self.spec.cache_bytes(self.slots, self.capacity, self.dtype)

    def start(self, slots: int, tokens: int) -> None:
        """A new batch, which will reserve this much at most; what is there is not needed any more.

        Many short sequences after a few long ones, or the reverse: the cache is given up, rather than grown to many long ones.
        """
        grown = self.spec.cache_bytes(max(slots, self.slots), max(tokens, self.capacity), self.dtype)
        if grown > 2 * max(self.nbytes, self.spec.cache_bytes(slots, max(tokens, BLOCK), self.dtype)):
            self.release()

    def reserve(self, slots: int, tokens: int) -> None:
        """Room for `slots` sequences of `tokens` each; what is there stays.

        Raises OutOfMemoryError, after one retry with everything collectable collected, saying what would fit.
        """
        capacity = max(self.capacity, -(-tokens // BLOCK) * BLOCK)
        slots = max(slots, self.slots)
        if (slots, capacity) == (self.slots, self.capacity):
            return
        try:
            self._resize(slots, capacity)
        except KeyboardInterrupt:
            self.release()  # some layers have grown and others not
            raise
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            collect()
            try:
                self._resize(slots, capacity)
            except (torch.OutOfMemoryError, RuntimeError) as again:
                if not _is_out_of_memory(again):
                    raise
                self.release()  # half of it may have grown
                raise OutOfMemoryError(
                    f"the cache for {slots} sequences of {capacity:,} tokens needs {self.spec.cache_bytes(slots, capacity, self.dtype) / 2**30:.2f} GiB, "
                    f"{self.spec.cache_bytes(1, capacity, self.dtype) / 2**20:,.0f} MiB a sequence, and the device has not that much free. "
                    f"Lower engine.max_slots (it is {slots} now) or generate.max_new_tokens, or set engine.release_inference_cache=true."
                ) from again

    def _resize(self, slots: int, capacity: int) -> None:
        """Layer by layer, so that the old cache and the new one are never both there whole."""
        values = (slots, self.spec.key_value_heads, capacity, self.spec.head_dim)
        lanes = self.lanes
        keys = values if lanes is None else (*values[:2], capacity // lanes, self.spec.head_dim, lanes)
        for stores, shape in ((self.keys, keys), (self.values, values)):
            while len(stores) < len(self.spec.layers):
                stores.append(torch.zeros(0, *shape[1:], dtype=self.dtype, device=self.device))
            for i, old in enumerate(stores):
                if old.shape == shape:  # an earlier attempt got this far
                    continue
                # Zeros: a masked column still takes part in 0 · value, and 0 · NaN is NaN.
                new = torch.zeros(shape, dtype=self.dtype, device=self.device)
                new[: old.shape[0], :, : old.shape[2]] = old
                stores[i] = new
        self.slots, self.capacity, self.moves = slots, capacity, self.moves + 1

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """keys, values [T, key-value heads, head dim] of the tokens at (slots [T], positions [T]), into a plain cache."""
        self.keys[layer][slots, :, positions] = keys
        self.values[layer][slots, :, positions] = values

    def copy(self, source: int, destination: int, tokens: int) -> None:
        """The first `tokens` of one slot, also in another."""
        for stores, width in ((self.keys, self.lanes or 1), (self.values, 1)):
            for store in stores:
                store[destination, :, : -(-tokens // width)] = store[source, :, : -(-tokens // width)]

    def release(self) -> None:
        """Give the memory back to the system."""
        self.keys, self.values = [], []
        self.slots = self.capacity = 0
        self.moves += 1
        collect()


def collect() -> None:
    """Free what nothing refers to, and hand free memory back to the system."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(_libc(), "malloc_trim", None)  # glibc keeps what was freed for itself otherwise
    if trim is not None:
        trim(0)


def _libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)
