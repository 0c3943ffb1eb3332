"""Packs lose nothing and mix nothing; the order of data is a pure function of (seed, epoch, step)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accord.data.loader import BatchOrder
from accord.data.packing import first_fit_decreasing, make_pack, pack_trees
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
