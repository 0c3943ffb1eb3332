"""Packs lose nothing and mix nothing; the order of data is a pure function of (seed, epoch, step)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accord.data.loader import BatchOrder
from accord.data.packing import PACKED_AT_ONCE, first_fit_decreasing, karmarkar_karp, make_pack, pack_trees
from accord.data.trees import branching, single
from accord.errors import DataError

tokens = st.lists(st.integers(3, 99), min_size=1, max_size=12)
masked = tokens.flatmap(lambda t: st.tuples(st.just(t), st.lists(st.booleans(), min_size=len(t), max_size=len(t))))
trees = st.lists(
    st.one_of(
        masked.map(lambda pair: single(*pair)),
        st.tuples(st.lists(st.integers(3, 99), max_size=9), st.lists(tokens, min_size=1, max_size=4)).map(
            lambda t: branching(*t)
        ),
    ),
    min_size=1,
    max_size=8,
)


@given(trees)
@settings(deadline=None)
def test_every_target_is_predicted_by_the_token_before_it_in_its_own_sequence(forest):
    pack = make_pack(forest, range(len(forest)))
    row = [int(t) for t in pack.input_ids]
    expected = []
    for tree in forest:
        for leaf in tree.leaves:
            sequence, trained = tree.sequence(leaf).tolist(), tree.sequence_trained(leaf).tolist()
            expected.append([(sequence[t - 1], sequence[t], t - 1) for t in range(1, len(sequence)) if trained[t]])
    found = [[] for _ in expected]
    for position, target, owner in zip(pack.predict.tolist(), pack.targets.tolist(), pack.sequence.tolist(), strict=True):
        found[owner].append((row[position], target, int(pack.position_ids[position])))
    assert found == expected
    assert [row[e] for e in pack.ends.tolist()] == [int(tree.sequence(leaf)[-1]) for tree in forest for leaf in tree.leaves]
    assert pack.target_counts.tolist() == [len(e) for e in expected]
    assert len(pack) == sum(tree.num_tokens for tree in forest)


@given(trees, st.integers(60, 200))
@settings(deadline=None)
def test_packing_keeps_every_tree_whole_and_once(forest, budget):
    packs = pack_trees(forest, budget)
    assert sorted(i for pack in packs for i in pack.tree_index) == list(range(len(forest)))
    assert all(0 < len(pack) <= budget for pack in packs)
    for pack in packs:
        assert all(pack.trees[k] is forest[i] for k, i in enumerate(pack.tree_index))
    assert [p.tree_index for p in pack_trees(forest, budget)] == [p.tree_index for p in packs]


def test_first_fit_decreasing_fills_bins():
    assert first_fit_decreasing([5, 4, 3, 3, 2, 1], 9) == [[0, 1], [2, 3, 4, 5]]


item_sizes = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def sums(sizes, bins):
    return [sum(sizes[i] for i in b) for b in bins]


def test_largest_differencing_by_hand():
    assert karmarkar_karp([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]  # 8-7, 6-5, then 4-1, 3-1: the sums differ by 2
    assert sums([5] * 4, karmarkar_karp([5] * 4, 2)) == [10, 10]
    assert karmarkar_karp([3, 1], 3) == [[0], [1], []] and karmarkar_karp([], 2) == [[], []]
    assert karmarkar_karp([3, 1, 2], 1) == [[0, 1, 2]]


@given(item_sizes, st.integers(1, 6))
@settings(deadline=None)
def test_balanced_bins_hold_every_item_once(sizes, k):
    bins = karmarkar_karp(sizes, k)
    assert len(bins) == k and sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert sum(map(bool, bins)) == min(k, len(sizes))
    assert bins == karmarkar_karp(list(sizes), k)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(2, 3))
@settings(deadline=None, max_examples=60)
def test_the_largest_sum_is_near_the_best_that_trying_everything_finds(sizes, k):
    choices = itertools.product(range(k), repeat=len(sizes))
    best = min(max(sum(s for s, c in zip(sizes, choice, strict=True) if c == b) for b in range(k)) for choice in choices)
    assert 3 * k * max(sums(sizes, karmarkar_karp(sizes, k))) <= (4 * k - 1) * best  # 4/3 - 1/(3k)


@given(item_sizes, st.integers(40, 120))
@settings(deadline=None)
def test_packs_are_as_few_as_before_and_never_less_even(sizes, budget):
    packs = pack_trees([single([3] * size, [True] * size) for size in sizes], budget)
    before, after = sums(sizes, first_fit_decreasing(sizes, budget)), [len(pack) for pack in packs]
    assert len(after) == len(before) and sum(after) == sum(sizes) and max(after) <= max(before) <= budget
    assert max(after) - min(after) <= max(before) - min(before)


def test_packs_of_a_step_have_nearly_the_same_size():
    sizes = [30, 30, 30, 10, 10, 10]
    assert sums(sizes, first_fit_decreasing(sizes, 100)) == [100, 20]
    assert [len(pack) for pack in pack_trees([single([3] * size, [True] * size) for size in sizes], 100)] == [60, 60]


def test_a_tree_above_the_budget_names_both_ways_out():
    with pytest.raises(
        DataError, match=r"needs 30 tokens .* train\.max_tokens is 20\. Raise train\.max_tokens to 30 or lower data\.max_length"
    ):
        pack_trees([branching(range(10), [range(10), range(10)])], 20)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 5))
@settings(deadline=None)
def test_an_epoch_is_every_example_once_in_an_order_of_its_own(size, batch, seed):
    if size < batch:
        with pytest.raises(DataError):
            BatchOrder(size, batch, seed)
        return
    order = BatchOrder(size, batch, seed)
    epochs = [[i for s in range(order.steps_per_epoch) for i in order.batch(e * order.steps_per_epoch + s + 1)] for e in range(2)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    late = BatchOrder(size, batch, seed)
    assert late.batch(order.steps_per_epoch + 1) == order.batch(order.steps_per_epoch + 1)  # no earlier step is needed
    if size > 8:
        assert epochs[0] != epochs[1] and epochs[0] != list(range(size))
        assert [i for s in range(order.steps_per_epoch) for i in BatchOrder(size, batch, seed + 1).batch(s + 1)] != epochs[0]


def test_steps_from_epochs_and_a_limit():
    order = BatchOrder(10, 4, 1)
    assert (order.steps_per_epoch, order.total_steps(2, None), order.total_steps(0.5, None), order.total_steps(1, 40)) == (
        3,
        6,
        2,
        40,
    )
    assert order.epoch(3) == 1.0
    assert BatchOrder(10, 4, 1, shuffle=False).batch(3) == [8, 9]


def test_sums_over_a_sequence_are_float64():
    import torch

    pack = make_pack([branching([3, 4], [list(range(5, 2005)), [7]])], [0])
    values = torch.full((2001,), 1e8, dtype=torch.float32)
    values[1999] = -1.0
    exact = np.float64(1e8) * 1999 - 1.0
    assert pack.sum_by_sequence(values)[0].item() == exact


def test_many_trees_are_packed_in_runs_and_keep_their_numbers():
    forest = [single([3] * (1 + i % 7), [True] * (1 + i % 7)) for i in range(PACKED_AT_ONCE + 300)]
    packs = pack_trees(forest, 64)
    assert sorted(i for pack in packs for i in pack.tree_index) == list(range(len(forest)))
    assert all(pack.trees[0] is forest[pack.tree_index[0]] and len(pack) <= 64 for pack in packs)
    first = pack_trees(forest[:PACKED_AT_ONCE], 64)
    assert [pack.tree_index for pack in packs[: len(first)]] == [pack.tree_index for pack in first]
    assert min(packs[len(first)].tree_index) >= PACKED_AT_ONCE


def test_many_ranks_get_as_many_packs_though_trees_are_packed_in_runs():
    trees = [single([1] * 5, [True] * 5) for _ in range(1100)]
    packs = pack_trees(trees, 10, multiple=600)  # 256 + 256 + 38 fill the runs of 512, 512 and 76
    assert len(packs) == 600
    assert sorted(i for pack in packs for i in pack.tree_index) == list(range(1100))
    assert max(map(len, packs)) == 10
