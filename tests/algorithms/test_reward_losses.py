"""The reward model's losses and calibration against plain Python loops in double precision."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accord.algorithms.calibration import calibration_error, confidence_bins, score_bins
from accord.algorithms.reward_losses import (
    compared_positions,
    log_exp_reward_loss,
    mse_reward_loss,
    pairwise_reward_loss,
    ranked_pairs,
    ranking_reward_loss,
    token_pairwise_reward_loss,
)
from tests.algorithms.test_losses import log_sigmoid, numbers, positive_weights, tensor


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# Three prompts with 4, 2 and 3 answers; two of the first share a rank.
RANKS = [0, 1, 1, 2, 1, 0, 2, 0, 1]
PROMPTS = [0, 0, 0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("center", [0.0, 0.02])
def test_ranking_against_a_loop_over_all_pairs(center):
    scores, weights = numbers(9, 2, 3), positive_weights(3)
    expected, gradient = 0.0, [0.0] * 9
    for prompt, weight in enumerate(weights):
        own = [i for i in range(9) if PROMPTS[i] == prompt]
        ordered = [(w, loser) for w, loser in itertools.permutations(own, 2) if RANKS[w] < RANKS[loser]]
        assert len(ordered) == (5, 1, 3)[prompt]
        for w, loser in ordered:
            share, d, total = weight / len(ordered), scores[w] - scores[loser], scores[w] + scores[loser]
            expected += share * (-log_sigmoid(d) + center * total**2)
            gradient[w] += share * (-sigmoid(-d) + 2 * center * total)
            gradient[loser] += share * (sigmoid(-d) + 2 * center * total)
    given_scores = tensor(scores).requires_grad_()
    loss = ranking_reward_loss(given_scores, torch.tensor(RANKS), torch.tensor(PROMPTS), tensor(weights), center)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert given_scores.grad.tolist() == pytest.approx(gradient, rel=1e-12, abs=1e-15)


def test_ranking_of_two_is_pairwise_and_a_prompt_of_ties_adds_nothing():
    chosen, rejected, weights = tensor(numbers(5, 2)), tensor(numbers(5, 3)), tensor(positive_weights(5))
    both = torch.stack([chosen, rejected], 1).flatten()
    prompts = torch.arange(5).repeat_interleave(2)
    assert ranking_reward_loss(both, torch.tensor([0, 1] * 5), prompts, weights, 0.01).item() == pytest.approx(
        pairwise_reward_loss(chosen, rejected, weights, None, 0.01).item(), rel=1e-12
    )
    more = torch.cat([both, tensor([7.0, 8.0])])
    ranks, weights = torch.tensor([0, 1] * 5 + [3, 3]), torch.cat([weights, tensor([1.0])])
    assert ranking_reward_loss(more, ranks, torch.cat([prompts, torch.tensor([5, 5])]), weights).item() == pytest.approx(
        pairwise_reward_loss(chosen, rejected, weights[:5]).item(), rel=1e-12
    )
    nothing = tensor([1.0, 2.0]).requires_grad_()
    loss = ranking_reward_loss(nothing, torch.tensor([1, 1]), torch.tensor([0, 0]), tensor([1.0]))
    loss.backward()
    assert loss.item() == 0 and nothing.grad.tolist() == [0, 0]


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=4))
def test_ranked_pairs_are_the_ordered_ones_of_each_prompt(by_prompt):
    ranks = [rank for own in by_prompt for rank in own]
    prompts = [p for p, own in enumerate(by_prompt) for _ in own]
    found = zip(*(part.tolist() for part in ranked_pairs(torch.tensor(ranks), torch.tensor(prompts))), strict=True)
    expected = [
        (i, j, prompts[i])
        for i, j in itertools.product(range(len(ranks)), repeat=2)
        if prompts[i] == prompts[j] and ranks[i] < ranks[j]
    ]
    assert sorted(found) == expected


@pytest.mark.parametrize("center", [0.0, 0.02])
def test_log_exp_is_pairwise_without_margin_in_loss_and_gradient(center):
    results = []
    for loss in (
        lambda w, loser, weights: log_exp_reward_loss(w, loser, weights, center),
        lambda w, loser, weights: pairwise_reward_loss(w, loser, weights, None, center),
    ):
        chosen, rejected = tensor([*numbers(7, 2, 3), 800.0, -800.0]), tensor([*numbers(7, 3, 3), 0.0, 0.0])
        chosen.requires_grad_(), rejected.requires_grad_()
        value = loss(chosen, rejected, tensor(positive_weights(9)))
        value.backward()
        results.append((value.item(), chosen.grad.tolist(), rejected.grad.tolist()))
    for one, other in zip(*results, strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-15)
    plain = sum(
        w * (math.log(1 + math.exp(b - a)) + center * (a + b) ** 2)
        for w, a, b in zip(positive_weights(4), numbers(4, 5), numbers(4, 6), strict=True)
    )
    assert log_exp_reward_loss(
        tensor(numbers(4, 5)), tensor(numbers(4, 6)), tensor(positive_weights(4)), center
    ).item() == pytest.approx(plain, rel=1e-12)


# (better text, worse text, where they are first compared); the texts hold prompt and answer
TEXTS = [
    ([1, 2, 3, 4, 5, 9], [1, 2, 3, 6, 9], 3),  # the longer one is better
    ([1, 2, 7, 9], [1, 2, 8, 8, 8, 8, 9], 2),  # the shorter one is better
    ([1, 5, 6, 7, 8], [1, 5, 6, 0, 8], 3),  # the answers share opening words and their end
    ([1, 2], [1, 2, 3, 4], 2),  # one is cut where the other goes on
    ([4, 4], [5, 4], 0),  # nothing is shared
]


def test_positions_run_from_the_first_difference_to_the_end_of_the_longer_text():
    for chosen, rejected, start in TEXTS:
        of_chosen, of_rejected = compared_positions(torch.tensor(chosen), torch.tensor(rejected))
        length = max(len(chosen), len(rejected)) - start
        assert of_chosen.tolist() == [min(start + t, len(chosen) - 1) for t in range(length)]
        assert of_rejected.tolist() == [min(start + t, len(rejected) - 1) for t in range(length)]
    with pytest.raises(ValueError, match="the same"):
        compared_positions(torch.tensor([1, 2]), torch.tensor([1, 2]))


@pytest.mark.parametrize("center", [0.0, 0.02])
@pytest.mark.parametrize("with_margin", [False, True])
def test_token_pairwise_against_a_loop_over_positions(with_margin, center):
    rng, weights = random.Random(3), positive_weights(len(TEXTS))
    margins = [abs(x) for x in numbers(len(TEXTS), 4)] if with_margin else [0.0] * len(TEXTS)
    texts = [[tensor([rng.gauss(0, 2) for _ in text]).requires_grad_() for text in pair[:2]] for pair in TEXTS]
    expected, gradients = 0.0, [[[0.0] * len(side) for side in pair] for pair in texts]
    for i, (chosen, rejected, start) in enumerate(TEXTS):
        count = max(len(chosen), len(rejected)) - start
        for t in range(start, start + count):
            w, loser = min(t, len(chosen) - 1), min(t, len(rejected) - 1)
            a, b = texts[i][0][w].item(), texts[i][1][loser].item()
            share, d = weights[i] / count, a - b - margins[i]
            expected += share * (-log_sigmoid(d) + center * (a + b) ** 2)
            gradients[i][0][w] += share * (-sigmoid(-d) + 2 * center * (a + b))
            gradients[i][1][loser] += share * (sigmoid(-d) + 2 * center * (a + b))
    places = [compared_positions(torch.tensor(c), torch.tensor(r)) for c, r, _ in TEXTS]
    chosen_scores = torch.cat([texts[i][0][place[0]] for i, place in enumerate(places)])
    rejected_scores = torch.cat([texts[i][1][place[1]] for i, place in enumerate(places)])
    pairs = torch.cat([torch.full((len(place[0]),), i) for i, place in enumerate(places)])
    margin = tensor(margins) if with_margin else None
    loss = token_pairwise_reward_loss(chosen_scores, rejected_scores, pairs, tensor(weights), margin, center)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    for pair, own in zip(texts, gradients, strict=True):
        for side, gradient in zip(pair, own, strict=True):
            assert side.grad.tolist() == pytest.approx(gradient, rel=1e-12, abs=1e-15)


def test_token_pairwise_of_one_position_a_pair_is_pairwise():
    chosen, rejected, weights = tensor(numbers(5, 2)), tensor(numbers(5, 3)), tensor(positive_weights(5))
    loss = token_pairwise_reward_loss(chosen, rejected, torch.arange(5), weights, chosen.abs(), 0.01)
    assert loss.item() == pytest.approx(pairwise_reward_loss(chosen, rejected, weights, chosen.abs(), 0.01).item(), rel=1e-12)


def test_what_does_not_belong_together_is_refused():
    three, two = torch.zeros(3), torch.zeros(2)
    for call in (
        lambda: log_exp_reward_loss(three, torch.zeros(3, 1), three),
        lambda: ranking_reward_loss(three, torch.zeros(2), torch.zeros(3), two),
        lambda: ranked_pairs(torch.zeros(2), torch.zeros(3)),
        lambda: token_pairwise_reward_loss(three, two, torch.zeros(3, dtype=torch.long), two),
        lambda: token_pairwise_reward_loss(three, three, torch.zeros(3, dtype=torch.long), torch.ones(1), two),
        lambda: mse_reward_loss(three, two, three),
    ):
        with pytest.raises(ValueError, match="shapes differ"):
            call()
    for pairs in ([0, 0, 0], [0, 1, 2]):  # the second pair has no position; there is no third
        with pytest.raises(ValueError, match="every one of the 2 pairs needs a position"):
            token_pairwise_reward_loss(three, three, torch.tensor(pairs), two)


# -- calibration -------------------------------------------------------------------------------------------------------


def test_confidence_bins_against_a_loop_over_both_orders():
    """Shown in both orders, a pair says σ(Δ) of "the first is better" (true) and σ(-Δ) (false): the same error, bin by bin."""
    differences = [*numbers(200, 1, 2.0), 0.0, 0.0]
    items = [(sigmoid(d), 1.0) for d in differences] + [(sigmoid(-d), 0.0) for d in differences]
    whole = 0.0
    for b in range(20):  # over [0, 1]: ten bins below ½ mirror the ten above
        inside = [(p, y) for p, y in items if b / 20 <= p < (b + 1) / 20]
        if inside:
            whole += abs(sum(p for p, _ in inside) - sum(y for _, y in inside)) / len(items)
    bins = confidence_bins(tensor(differences))
    assert sum(b.count for b in bins) == 202 and all(b.low <= b.predicted <= b.high for b in bins)
    assert calibration_error(bins) == pytest.approx(whole, abs=1e-12)


def test_a_coin_is_calibrated_and_a_sure_model_that_errs_is_not():
    assert calibration_error(confidence_bins(torch.zeros(10))) == 0
    half = confidence_bins(tensor([50.0, -50.0] * 5))
    assert [(b.low, b.high, b.count, b.observed) for b in half] == [(0.95, 1.0, 10, 0.5)]
    assert calibration_error(half) == pytest.approx(0.5)
    odds = math.log(3)  # σ = ¾
    assert calibration_error(confidence_bins(tensor([odds, odds, odds, -odds]))) == pytest.approx(0, abs=1e-12)


def test_score_bins_are_groups_of_equal_size_by_prediction():
    predicted, targets = numbers(23, 1), numbers(23, 2)
    order = sorted(range(23), key=lambda i: predicted[i])
    groups = [order[:5], order[5:10], order[10:15], order[15:19], order[19:]]
    found = score_bins(tensor(predicted), tensor(targets), bins=5)
    assert [b.count for b in found] == [5, 5, 5, 4, 4]
    for b, group in zip(found, groups, strict=True):
        assert b.predicted == pytest.approx(sum(predicted[i] for i in group) / len(group))
        assert b.observed == pytest.approx(sum(targets[i] for i in group) / len(group))
    assert [b.count for b in score_bins(tensor([1.0, 2.0]), tensor([1.0, 4.0]))] == [1, 1]
    assert calibration_error(score_bins(tensor([1.0, 2.0]), tensor([1.0, 4.0]))) == pytest.approx(1.0)


@pytest.mark.parametrize(("pairs", "low", "high"), [(200, 0.055, 0.075), (2000, 0.015, 0.025)])
def test_a_perfect_model_has_an_error_too_where_pairs_are_few(pairs, low, high):
    """The figures of docs/algorithms/reward.md: labels drawn with the very probabilities that the model states."""
    generator = torch.Generator().manual_seed(0)
    for spread in (0.4, 0.8, 1.5):
        errors = []
        for _ in range(40):
            differences = spread * torch.randn(pairs, generator=generator, dtype=torch.float64)
            drawn = torch.rand(pairs, generator=generator, dtype=torch.float64) < differences.sigmoid()
            errors.append(calibration_error(confidence_bins(torch.where(drawn, differences, -differences))))
        assert low < sum(errors) / len(errors) < high
