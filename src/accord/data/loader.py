"""Which examples make up which step: a pure function of (seed, epoch, step), so that a step number is all a resume needs."""

from __future__ import annotations

import math

import numpy as np

from accord.errors import DataError


class BatchOrder:
    """`size` examples in batches of `batch_size`, shuffled anew every epoch by (seed, epoch). The last batch of an epoch may be partial."""

    def __init__(self, size: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if size < batch_size:
            raise DataError(
                f"{size:,} training examples are fewer than one batch of train.batch_size={batch_size:,}. "
                f"Add data or set train.batch_size to {max(size, 1):,} or less."
            )
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.steps_per_epoch = math.ceil(size / batch_size)
        self._cached: tuple[int, np.ndarray] | None = None

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.size) if self.shuffle else np.arange(self.size)
            self._cached = (epoch, order)
        return self._cached[1]

    def batch(self, step: int) -> list[int]:
        """The example numbers of `step` (1-based)."""
        epoch, within = divmod(step - 1, self.steps_per_epoch)
        return self._order(epoch)[within * self.batch_size : (within + 1) * self.batch_size].tolist()

    def epoch(self, step: int) -> float:
        """Epochs done after `step` steps."""
        return step / self.steps_per_epoch

    def total_steps(self, epochs: float, max_steps: int | None) -> int:
        """`max_steps` where it is set, however many epochs that is; else the steps of `epochs`."""
        return max_steps if max_steps is not None else max(1, math.ceil(self.steps_per_epoch * epochs))
