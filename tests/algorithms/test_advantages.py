"""GAE against the double sum of its definition; whitening and running moments against numpy and statistics."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accord.algorithms.advantages import (
    RunningMoments,
    explained_variance,
    gae,
    grpo,
    returns_to_go,
    rloo,
    sum_by_response,
    whiten,
)


def gae_by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = Σ_k (γλ)^k δ_{t+k}, one response, straight from the paper."""
    T = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < T else 0.0) - values[t] for t in range(T)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(T - t)) for t in range(T)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.sampled_from([1.0, 0.99, 0.5]),
    st.sampled_from([1.0, 0.95, 0.0]),
    st.integers(0, 1000),
)
def test_gae_of_ragged_responses_against_its_definition(lengths, gamma, lam, seed):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=sum(lengths)), rng.normal(size=sum(lengths))
    advantages, returns = gae(torch.tensor(rewards), torch.tensor(values), lengths, gamma, lam)
    expected, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        expected += gae_by_definition(rewards[part].tolist(), values[part].tolist(), gamma, lam)
        start += length
    assert advantages.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert returns.tolist() == pytest.approx((np.array(expected) + values).tolist(), rel=1e-10, abs=1e-12)


def test_with_lambda_and_gamma_one_the_return_is_the_sum_of_rewards_to_come():
    rewards = torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0])
    _, returns = gae(rewards, torch.randn(5), [3, 2], gamma=1.0, lam=1.0)
    assert returns.tolist() == pytest.approx([6, 5, 3, 30, 20], rel=1e-5)


def test_nothing_crosses_from_one_response_to_the_next():
    rewards, values = torch.randn(7), torch.randn(7)
    together, _ = gae(rewards, values, [4, 3])
    changed = rewards.clone()
    changed[4:] += 100
    assert torch.equal(gae(changed, values, [4, 3])[0][:4], together[:4])


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="lengths"):
        gae(torch.zeros(5), torch.zeros(5), [2, 2])


def test_whitening_gives_mean_zero_and_variance_one():
    values = torch.randn(100, dtype=torch.float64) * 7 + 3
    white = whiten(values)
    assert white.mean().item() == pytest.approx(0, abs=1e-12)
    assert statistics.pstdev(white.tolist()) == pytest.approx(1, rel=1e-6)
    kept = whiten(values, shift_mean=False)
    assert kept.mean().item() == pytest.approx(values.mean().item())


@pytest.mark.parametrize("values", [[5.0], [2.0, 2.0, 2.0], []])
def test_whitening_a_batch_of_one_or_of_equals_is_finite(values):
    assert whiten(torch.tensor(values)).tolist() == [0.0] * len(values)


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((4,), 2.5), returns) == pytest.approx(0)
    assert math.isnan(explained_variance(torch.zeros(3), torch.ones(3)))


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=8), max_size=6))
@settings(deadline=None)
def test_running_moments_are_those_of_all_values_seen(batches):
    moments = RunningMoments()
    for batch in batches:
        moments.update(batch)
    seen = [x for batch in batches for x in batch]
    assert moments.count == len(seen)
    if seen:
        assert moments.mean == pytest.approx(statistics.fmean(seen), rel=1e-9, abs=1e-6)
    if len(seen) > 1 and statistics.stdev(seen) > 1e-3:
        assert moments.std == pytest.approx(statistics.stdev(seen), rel=1e-6)


def test_running_moments_of_one_score_are_safe_and_resume_exactly():
    moments = RunningMoments()
    moments.update([3.0])
    assert moments.normalize([3.0]) == [0.0] and moments.std == 1.0
    moments.update([1.5, -2.25])
    again = RunningMoments()
    again.load_state(moments.state())
    again.update([0.125])
    moments.update([0.125])
    assert again.state() == moments.state()


# -- without a critic ------------------------------------------------------------------------------------------------------

groups_of_answers = st.lists(st.integers(2, 5), min_size=1, max_size=5).flatmap(
    lambda sizes: st.tuples(
        st.permutations([g for g, size in enumerate(sizes) for _ in range(size)]),
        st.lists(st.floats(-50, 50), min_size=sum(sizes), max_size=sum(sizes)),
    )
)


@given(groups_of_answers)
@settings(max_examples=60, deadline=None)
def test_grpo_and_rloo_against_loops_over_the_groups(drawn):
    groups, scores = drawn
    given = torch.tensor(scores, dtype=torch.float64)
    for i, (group, score) in enumerate(zip(groups, scores, strict=True)):
        members = [s for s, g in zip(scores, groups, strict=True) if g == group]
        others = [s for j, (s, g) in enumerate(zip(scores, groups, strict=True)) if g == group and j != i]
        centred = score - statistics.fmean(members)
        assert grpo(given, groups, divide_by_std=False)[i].item() == pytest.approx(centred, abs=1e-9)
        if statistics.stdev(members) > 1e-3:
            expected = centred / (statistics.stdev(members) + 1e-6)
            assert grpo(given, groups)[i].item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert rloo(given, groups)[i].item() == pytest.approx(score - statistics.fmean(others), abs=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(2, 9), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None)
def test_a_group_of_equal_scores_gives_exactly_nothing(score, size, dtype):
    """Also where the mean of equal numbers is another number (three times 0.1)."""
    scores = torch.tensor([score] * size + [1.0, 2.0], dtype=dtype)
    groups = [4] * size + [7, 7]
    for advantages in (grpo(scores, groups), grpo(scores, groups, divide_by_std=False), rloo(scores, groups)):
        assert advantages[:size].tolist() == [0.0] * size
        assert advantages[size] < 0 < advantages[size + 1]


def test_rloo_is_grpo_without_division_up_to_a_factor():
    """G_i - mean_{j≠i} G_j = n/(n-1) · (G_i - mean G)."""
    scores, groups = torch.randn(12, dtype=torch.float64), [0, 1, 2] * 4
    assert torch.allclose(rloo(scores, groups), 4 / 3 * grpo(scores, groups, divide_by_std=False), rtol=1e-12)


@pytest.mark.parametrize("estimate", [grpo, rloo])
def test_what_has_nothing_to_compare_with_is_refused(estimate):
    with pytest.raises(ValueError, match="one response"):
        estimate(torch.zeros(3), [0, 0, 1])
    with pytest.raises(ValueError, match="differ"):
        estimate(torch.zeros(3), [0, 0])


@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_returns_to_go_against_the_double_sum(gamma):
    rewards, lengths = torch.randn(11, dtype=torch.float64), [3, 1, 5, 2]
    expected, start = [], 0
    for length in lengths:
        part = rewards[start : start + length].tolist()
        expected += [sum(gamma ** (k - t) * part[k] for k in range(t, length)) for t in range(length)]
        start += length
    assert returns_to_go(rewards, lengths, gamma).tolist() == pytest.approx(expected, rel=1e-12)
    assert sum_by_response(rewards, lengths).tolist() == pytest.approx(
        [sum(rewards[a:b].tolist()) for a, b in ((0, 3), (3, 4), (4, 9), (9, 11))]
    )
