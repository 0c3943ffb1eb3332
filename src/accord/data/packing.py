"""From trees to packs: one padding-free row of tokens, with everything a loss needs to know about it.

Sources: prefix sharing for preference training, arXiv:2410.20305; first-fit decreasing, Johnson 1973; largest differencing, Karmarkar
and Karp 1982.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from accord.data.trees import Tree
from accord.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


PACKED_AT_ONCE = 512  # trees


@dataclass(frozen=True)
class Pack:
    """Trees laid end to end in one row of T tokens.

    N targets (trained tokens that have a predecessor in their own sequence) and S sequences (the trees' leaves, in order).
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64: continues from the parent's end, so each sequence counts 0, 1, 2 …
    segments: tuple[tuple[int, int, int], ...]  # (start, end, parent segment or -1), rows of the pack
    predict: Tensor  # [N] the position whose next token is the target; a child's first token is predicted by its parent's last
    targets: Tensor  # [N] token ids
    sequence: Tensor  # [N] which of the S sequences each target belongs to
    ends: Tensor  # [S] position of each sequence's last token
    index: tuple[int, ...]  # [S] the number of the sequence's tree in the list that was packed
    trees: tuple[Tree, ...]
    tree_index: tuple[int, ...]  # the number of each tree in the list that was packed

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.index)

    @property
    def num_targets(self) -> int:
        return len(self.targets)

    @cached_property
    def target_counts(self) -> Tensor:
        """[S] how many targets each sequence has."""
        import torch

        return torch.bincount(self.sequence, minlength=self.num_sequences)

    def to(self, device) -> Pack:
        moved = {
            name: getattr(self, name).to(device)
            for name in ("input_ids", "position_ids", "predict", "targets", "sequence", "ends")
        }
        return replace(self, **moved)

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """[N] → [S]: the sum of `values` over each sequence's targets, accumulated in float64 (a long pair can change sign in float32)."""
        import torch

        total = torch.zeros(self.num_sequences, dtype=torch.float64, device=values.device)
        return total.index_add(0, self.sequence.to(values.device), values.double())


def make_pack(trees: Sequence[Tree], index: Sequence[int]) -> Pack:
    """Lay `trees` end to end. `index[i]` is the number of trees[i] in the list it came from."""
    import torch

    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[tuple[int, int, int]] = []
    predict: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    sequence: list[np.ndarray] = []
    ends: list[int] = []
    sequence_index: list[int] = []
    row = 0
    for tree, number in zip(trees, index, strict=True):
        first = len(segments)
        depth: list[int] = []  # sequence length up to and including each segment
        leaves = set(tree.leaves)
        for i, segment in enumerate(tree.segments):
            length = len(segment)
            before = depth[segment.parent] if segment.parent >= 0 else 0
            depth.append(before + length)
            parent = first + segment.parent if segment.parent >= 0 else -1
            tokens.append(segment.tokens)
            positions.append(np.arange(before, before + length, dtype=np.int64))
            segments.append((row, row + length, parent))
            if i in leaves:
                where = np.flatnonzero(segment.trained)
                # The token at `where` is predicted one position earlier; the first of a child by the end of its parent.
                source = row + where - 1
                if len(where) and where[0] == 0:
                    if parent < 0:
                        where, source = where[1:], source[1:]  # nothing comes before the first token of a sequence
                    else:
                        source[0] = segments[parent][1] - 1
                predict.append(source)
                targets.append(segment.tokens[where])
                sequence.append(np.full(len(where), len(ends), dtype=np.int64))
                ends.append(row + length - 1 if length else segments[parent][1] - 1)
                sequence_index.append(number)
            row += length

    def joined(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)) if parts else torch.zeros(0, dtype=torch.int64)

    return Pack(
        joined(tokens),
        joined(positions),
        tuple(segments),
        joined(predict),
        joined(targets),
        joined(sequence),
        torch.tensor(ends, dtype=torch.int64),
        tuple(sequence_index),
        tuple(trees),
        tuple(index),
    )


def first_fit_decreasing(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of item numbers whose sizes sum to at most `budget`, few and full. Ties keep the order given: the result is deterministic."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        for b, free in enumerate(room):
            if sizes[item] <= free:
                bins[b].append(item)
                room[b] -= sizes[item]
                break
        else:
            bins.append([item])
            room.append(budget - sizes[item])
    return [sorted(b) for b in bins]


def karmarkar_karp(sizes: Sequence[int], k: int) -> list[list[int]]:
    """`k` bins of item numbers with sums as equal as the largest differencing method makes them; bins are empty where items run out.

    Every item begins as a partition of its own: itself and k - 1 empty bins. The two partitions whose sums differ most are joined, the
    largest bin of one with the smallest of the other, the second largest with the second smallest …, until one is left. The largest sum
    is at most 4/3 - 1/(3k) of the best possible. Deterministic: of equal differences the one with the earliest item comes first.
    """
    if not sizes:
        return [[] for _ in range(k)]
    # (-(largest - smallest sum), earliest item, bins as (sum, items) with the largest sum first)
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-size if k > 1 else 0, item, [(size, [item]), *((0, []) for _ in range(k - 1))]) for item, size in enumerate(sizes)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, bins = heapq.heappop(heap)
        _, second, others = heapq.heappop(heap)
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(bins, reversed(others), strict=True)]
        joined.sort(key=lambda one: -one[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], min(first, second), joined))
    return sorted((sorted(items) for _, items in heap[0][2]), key=lambda items: items or [len(sizes)])


def _balanced(sizes: Sequence[int], bins: list[list[int]], count: int) -> list[list[int]]:
    """`count` bins with sums near to each other, or `bins` where that would make the largest larger or the spread of as many bins wider."""
    even = karmarkar_karp(sizes, count)
    before, after = ([sum(sizes[i] for i in b) for b in some] for some in (bins, even))
    narrower = count > len(bins) or max(after) - min(after) <= max(before) - min(before)
    better = max(after) <= max(before) and narrower
    return even if better else bins


def pack_trees(trees: Sequence[Tree], max_tokens: int, multiple: int = 1) -> list[Pack]:
    """As few packs of at most `max_tokens` tokens as first-fit decreasing needs, then evened out: the largest decides the peak of memory.

    Where there are trees enough their number is a multiple of `multiple`: each of so many processes has as many to compute.

    A tree is never split. More than `PACKED_AT_ONCE` trees are packed in runs of so many, since evening out takes time that grows with
    the square of their number. The result depends on nothing but the arguments.

    Raises DataError when a tree alone is larger than the budget.
    """
    sizes = [tree.num_tokens for tree in trees]
    if sizes and max(sizes) > max_tokens:
        largest = max(range(len(sizes)), key=lambda i: sizes[i])
        raise DataError(
            f"an example needs {sizes[largest]:,} tokens (its prompt and all its answers) but train.max_tokens is {max_tokens:,}. "
            f"Raise train.max_tokens to {sizes[largest]:,} or lower data.max_length."
        )
    runs = [range(start, min(start + PACKED_AT_ONCE, len(sizes))) for start in range(0, len(sizes), PACKED_AT_ONCE)]
    found = [first_fit_decreasing([sizes[i] for i in run], max_tokens) for run in runs]
    wanted = _spread(-sum(map(len, found)) % multiple, [len(run) - len(bins) for run, bins in zip(runs, found, strict=True)])
    packs = []
    for run, bins, more in zip(runs, found, wanted, strict=True):
        count = len(bins) + more
        for members in _balanced([sizes[i] for i in run], bins, count) if count > 1 else bins:
            if not members:
                continue
            numbers = [run.start + i for i in members]
            packs.append(make_pack([trees[i] for i in numbers], numbers))
    return packs


def _spread(more: int, rooms: Sequence[int]) -> list[int]:
    """`more` in shares as equal as `rooms` allow; less where they are all full."""
    shares = [0] * len(rooms)
    for left, i in enumerate(sorted(range(len(rooms)), key=lambda i: rooms[i])):
        shares[i] = min(rooms[i], more // (len(rooms) - left))
        more -= shares[i]
    return shares
