"""The segment tree: an example as runs of tokens, where answers to one prompt share the prompt's run.

A plain conversation is one segment. A preference pair is prompt → {chosen, rejected}; n samples are prompt → {y1 … yn}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Segment:
    """A run of tokens that continues its parent segment."""

    tokens: np.ndarray  # [L] int32
    trained: np.ndarray  # [L] bool: the token is a target of the loss
    parent: int = -1  # index of the parent within the tree; -1: the segment begins its sequence

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Tree:
    """Segments with parents before children. Its leaves, in order, are the example's sequences (chosen before rejected)."""

    segments: tuple[Segment, ...]

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        parents = {segment.parent for segment in self.segments}
        return tuple(i for i in range(len(self.segments)) if i not in parents)

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed: every segment once."""
        return sum(len(segment) for segment in self.segments)

    def path(self, leaf: int) -> list[int]:
        """Segment indices from the root to `leaf`."""
        path = [leaf]
        while (parent := self.segments[path[0]].parent) >= 0:
            path.insert(0, parent)
        return path

    def sequence(self, leaf: int) -> np.ndarray:
        """The tokens from the root to the end of `leaf`, as they would stand alone: [L] int32."""
        return np.concatenate([self.segments[i].tokens for i in self.path(leaf)])

    def sequence_trained(self, leaf: int) -> np.ndarray:
        """The loss mask that goes with `sequence`: [L] bool."""
        return np.concatenate([self.segments[i].trained for i in self.path(leaf)])

    @property
    def longest(self) -> int:
        """Length of the longest sequence, in tokens."""
        return max(sum(len(self.segments[i]) for i in self.path(leaf)) for leaf in self.leaves)


def single(tokens: Sequence[int], trained: Sequence[bool]) -> Tree:
    """A plain sequence: one segment."""
    return Tree((Segment(np.asarray(tokens, dtype=np.int32), np.asarray(trained, dtype=bool)),))


def branching(prompt: Sequence[int], responses: Sequence[Sequence[int]], trained: Sequence[Sequence[bool]] | None = None) -> Tree:
    """prompt → {responses}. Every response token is trained on unless `trained` says otherwise; no prompt token is.

    An empty `prompt` gives a tree whose responses are roots.
    """
    segments: list[Segment] = []
    parent = -1
    if len(prompt):
        segments.append(Segment(np.asarray(prompt, dtype=np.int32), np.zeros(len(prompt), dtype=bool)))
        parent = 0
    for i, response in enumerate(responses):
        mask = np.ones(len(response), dtype=bool) if trained is None else np.asarray(trained[i], dtype=bool)
        segments.append(Segment(np.asarray(response, dtype=np.int32), mask, parent))
    return Tree(tuple(segments))
