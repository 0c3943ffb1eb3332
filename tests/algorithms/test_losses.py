"""Every loss against a plain Python loop in double precision."""

import math
import random

import pytest
import torch

from accord.algorithms.losses import ppo_policy_loss, ppo_value_loss, sft_loss
from accord.algorithms.preference_losses import (
    CERTAIN,
    dpo_loss,
    kto_loss,
    kto_reference_point,
    log_odds,
    orpo_loss,
    rpo_term,
    scheduled_beta,
    simpo_loss,
)
from accord.algorithms.reward_losses import mse_reward_loss, pairwise_reward_loss


def numbers(n: int, seed: int, scale: float = 1.0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0, scale) for _ in range(n)]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def positive_weights(n: int, seed: int = 9) -> list[float]:
    raw = [abs(x) + 0.1 for x in numbers(n, seed)]
    return [x / sum(raw) for x in raw]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def test_sft_loss_is_the_weighted_negative_log_likelihood():
    logprobs, weights = [-abs(x) for x in numbers(7, 1)], positive_weights(7)
    expected = sum(-w * lp for w, lp in zip(weights, logprobs, strict=True))
    assert sft_loss(tensor(logprobs), tensor(weights)).item() == pytest.approx(expected, rel=1e-12)


def test_sft_label_smoothing_equals_cross_entropy_of_torch():
    logits = torch.randn(6, 11, dtype=torch.float64)
    targets = torch.randint(11, (6,))
    logprobs = logits.log_softmax(-1)
    ours = sft_loss(logprobs.gather(1, targets[:, None])[:, 0], torch.full((6,), 1 / 6), logprobs.mean(-1), label_smoothing=0.2)
    theirs = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.2)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-7)


def test_label_smoothing_without_the_means_is_refused():
    with pytest.raises(ValueError, match="mean_logprobs"):
        sft_loss(torch.zeros(2), torch.ones(2), label_smoothing=0.1)


@pytest.mark.parametrize("center", [0.0, 0.01])
@pytest.mark.parametrize("with_margin", [False, True])
def test_pairwise_reward_loss_against_a_loop(with_margin, center):
    chosen, rejected, weights = numbers(9, 2, 3), numbers(9, 3, 3), positive_weights(9)
    margin = [abs(x) for x in numbers(9, 4)] if with_margin else [0.0] * 9
    expected = sum(
        w * (-log_sigmoid(c - r - m) + center * (c + r) ** 2)
        for w, c, r, m in zip(weights, chosen, rejected, margin, strict=True)
    )
    loss = pairwise_reward_loss(
        tensor(chosen), tensor(rejected), tensor(weights), tensor(margin) if with_margin else None, center
    )  # fmt: skip
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_pairwise_reward_loss_is_finite_far_out():
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = pairwise_reward_loss(far, torch.zeros(2), torch.full((2,), 0.5))
    loss.backward()
    assert loss.item() == pytest.approx(5e3) and torch.isfinite(far.grad).all()


def test_mse_reward_loss_counts_a_score_of_zero():
    assert mse_reward_loss(tensor([1.0, 3.0]), tensor([0.0, 5.0]), tensor([0.5, 0.5])).item() == pytest.approx(2.5)


def pairs(n: int = 8):
    values = [[-abs(x) - 5 for x in numbers(n, seed, 20)] for seed in range(4)]
    return values, [random.Random(i).randint(1, 30) for i in range(n)], [random.Random(-i).randint(1, 30) for i in range(n)]


@pytest.mark.parametrize("epsilon", [0.0, 0.15])
def test_dpo_sigmoid_against_a_loop(epsilon):
    (w, lo, rw, rl), _, _ = pairs()
    weights, beta = positive_weights(8), 0.13
    losses = []
    for i in range(8):
        delta = (w[i] - rw[i]) - (lo[i] - rl[i])
        losses.append(-(1 - epsilon) * log_sigmoid(beta * delta) - epsilon * log_sigmoid(-beta * delta))
    loss, stats = dpo_loss(*map(tensor, (w, lo, rw, rl, weights)), beta=beta, label_smoothing=epsilon)
    assert loss.item() == pytest.approx(sum(a * b for a, b in zip(weights, losses, strict=True)), rel=1e-12)
    assert stats.losses.tolist() == pytest.approx(losses, rel=1e-12)
    assert stats.chosen_rewards.tolist() == pytest.approx([beta * (w[i] - rw[i]) for i in range(8)])
    assert stats.rejected_rewards.tolist() == pytest.approx([beta * (lo[i] - rl[i]) for i in range(8)])
    assert stats.margins.tolist() == pytest.approx([beta * (w[i] - rw[i] - lo[i] + rl[i]) for i in range(8)])


def test_ipo_against_a_loop_uses_the_mean_per_token():
    (w, lo, rw, rl), lw, ll = pairs()
    weights, beta = positive_weights(8), 0.2
    expected = sum(weights[i] * ((w[i] - rw[i]) / lw[i] - (lo[i] - rl[i]) / ll[i] - 1 / (2 * beta)) ** 2 for i in range(8))
    lengths = {"chosen_lengths": tensor(lw), "rejected_lengths": tensor(ll)}
    loss, _ = dpo_loss(*map(tensor, (w, lo, rw, rl, weights)), beta=beta, loss_type="ipo", **lengths)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_dpo_of_equal_models_is_ln_2_with_margin_and_accuracy_zero():
    (w, lo, _, _), _, _ = pairs()
    loss, stats = dpo_loss(*map(tensor, (w, lo, w, lo)), torch.full((8,), 1 / 8, dtype=torch.float64), beta=0.1)
    assert loss.item() == math.log(2)
    assert stats.margins.abs().max() == 0 and stats.accuracies.sum() == 0


def test_dpo_refuses_beta_zero_and_ipo_without_lengths():
    zeros = [torch.zeros(2)] * 5
    with pytest.raises(ValueError, match="beta"):
        dpo_loss(*zeros, beta=0.0)
    with pytest.raises(ValueError, match="lengths"):
        dpo_loss(*zeros, beta=0.1, loss_type="ipo")


def sigma(x: float) -> float:
    return math.exp(log_sigmoid(x))


BETA, EPSILON, GAMMA, LAMBDA, ALPHA = 0.13, 0.15, 0.7, 0.3, 1.4


def by_hand(name: str, w: float, lo: float, rw: float, rl: float, lw: int, ll: int) -> tuple[float, float, float]:
    """One pair's loss, and its derivatives by log π(y_w) and log π(y_l), worked out on paper."""
    z = BETA * ((w - rw) - (lo - rl))
    if name == "sigmoid":
        slope = -(1 - EPSILON) * sigma(-z) + EPSILON * sigma(z)
        return -(1 - EPSILON) * log_sigmoid(z) - EPSILON * log_sigmoid(-z), BETA * slope, -BETA * slope
    if name == "ipo":
        error = (w - rw) / lw - (lo - rl) / ll - 1 / (2 * BETA)
        return error**2, 2 * error / lw, -2 * error / ll
    if name == "hinge":
        return max(0.0, 1 - z), -BETA * (z < 1), BETA * (z < 1)
    if name == "robust":
        slope = (-(1 - EPSILON) * sigma(-z) - EPSILON * sigma(z)) / (1 - 2 * EPSILON)
        loss = (-(1 - EPSILON) * log_sigmoid(z) + EPSILON * log_sigmoid(-z)) / (1 - 2 * EPSILON)
        return loss, BETA * slope, -BETA * slope
    mean_w, mean_l = w / lw, lo / ll
    if name == "simpo":
        z = BETA * mean_w - BETA * mean_l - GAMMA
        return -log_sigmoid(z), -BETA * sigma(-z) / lw, BETA * sigma(-z) / ll
    if name == "orpo":
        p_w, p_l = math.exp(mean_w), math.exp(mean_l)
        z = math.log(p_w / (1 - p_w)) - math.log(p_l / (1 - p_l))
        pull = LAMBDA * sigma(-z)
        return -mean_w - LAMBDA * log_sigmoid(z), -1 / lw - pull / (1 - p_w) / lw, pull / (1 - p_l) / ll
    assert name == "rpo"
    return -ALPHA * mean_w, -ALPHA / lw, 0.0


def family(name: str, w, lo, rw, rl, lw, ll, weights):
    """The same from the code under test: the loss and what it reports of each pair."""
    if name == "rpo":
        return rpo_term(w, lw, weights, ALPHA)
    if name == "simpo":
        loss, stats = simpo_loss(w, lo, lw, ll, weights, beta=BETA, gamma=GAMMA)
    elif name == "orpo":
        loss, stats = orpo_loss(w, lo, lw, ll, weights, lambda_=LAMBDA)
    else:
        epsilon = EPSILON if name in ("sigmoid", "robust") else 0.0
        lengths = {"chosen_lengths": lw, "rejected_lengths": ll} if name == "ipo" else {}
        loss, stats = dpo_loss(w, lo, rw, rl, weights, beta=BETA, loss_type=name, label_smoothing=epsilon, **lengths)
    return loss, stats.losses


FAMILY = ["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo", "rpo"]


@pytest.mark.parametrize("name", FAMILY)
def test_each_loss_of_the_family_and_its_gradient_against_a_loop(name):
    (w, lo, rw, rl), lw, ll = pairs()
    weights = positive_weights(8)
    expected = [by_hand(name, *values) for values in zip(w, lo, rw, rl, lw, ll, strict=True)]
    chosen, rejected = tensor(w).requires_grad_(), tensor(lo).requires_grad_()
    loss, losses = family(name, chosen, rejected, *map(tensor, (rw, rl, lw, ll, weights)))
    gradients = torch.autograd.grad(loss, (chosen, rejected), allow_unused=True, materialize_grads=True)
    assert losses.tolist() == pytest.approx([e[0] for e in expected], rel=1e-12) and not losses.requires_grad
    assert loss.item() == pytest.approx(sum(a * e[0] for a, e in zip(weights, expected, strict=True)), rel=1e-12)
    for i, gradient in enumerate(gradients, start=1):
        assert gradient.tolist() == pytest.approx([a * e[i] for a, e in zip(weights, expected, strict=True)], rel=1e-11)
    if name == "hinge":
        assert 0 < sum(e[1] == 0 for e in expected) < 8  # both sides of the corner were seen


def test_while_policy_and_reference_are_the_same_the_losses_are_known():
    (w, lo, _, _), lw, ll = pairs()
    weights = torch.full((8,), 1 / 8, dtype=torch.float64)
    same = [*map(tensor, (w, lo, w, lo)), weights]
    hinge, stats = dpo_loss(*same, beta=BETA, loss_type="hinge")
    assert hinge.item() == 1 and stats.margins.abs().max() == 0 and stats.accuracies.sum() == 0
    for epsilon in (0.0, 0.1, 0.49):
        robust, stats = dpo_loss(*same, beta=BETA, loss_type="robust", label_smoothing=epsilon)
        assert robust.item() == pytest.approx(math.log(2), rel=1e-12)
        assert stats.margins.abs().max() == 0 and stats.accuracies.sum() == 0
    ipo, _ = dpo_loss(*same, beta=BETA, loss_type="ipo", chosen_lengths=tensor(lw), rejected_lengths=tensor(ll))
    assert ipo.item() == pytest.approx(1 / (2 * BETA) ** 2, rel=1e-12)


def test_robust_averages_to_the_sigmoid_loss_of_the_right_labels():
    """What it is for: with a share ε of the pairs swapped, the expected loss is that of none swapped."""
    (w, lo, rw, rl), _, _ = pairs()
    weights = torch.full((8,), 1 / 8, dtype=torch.float64)
    w, lo, rw, rl = map(tensor, (w, lo, rw, rl))
    right, _ = dpo_loss(w, lo, rw, rl, weights, beta=BETA, loss_type="robust", label_smoothing=EPSILON)
    swapped, _ = dpo_loss(lo, w, rl, rw, weights, beta=BETA, loss_type="robust", label_smoothing=EPSILON)
    plain, _ = dpo_loss(w, lo, rw, rl, weights, beta=BETA)
    assert ((1 - EPSILON) * right + EPSILON * swapped).item() == pytest.approx(plain.item(), rel=1e-12)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("far", [1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_family_is_finite_far_out(name, far, dtype):
    """Log-ratios of a million, means per token of a million and of zero, either answer the better one."""
    chosen = torch.tensor([-far, 0.0, -far, 0.0], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([0.0, -far, -far, 0.0], dtype=dtype, requires_grad=True)
    zeros, ones = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
    loss, losses = family(name, chosen, rejected, zeros, zeros, ones, ones, ones / 4)
    gradients = torch.autograd.grad(loss, (chosen, rejected), allow_unused=True, materialize_grads=True)
    assert torch.isfinite(losses).all() and all(torch.isfinite(g).all() for g in gradients)
    if name not in ("sigmoid", "ipo"):  # those two turn round beyond their best margin
        assert (gradients[0] <= 0).all() and (gradients[1] >= 0).all()
    if name in ("hinge", "simpo"):
        assert losses[0].item() == pytest.approx(BETA * far + (1 if name == "hinge" else GAMMA), rel=1e-6)
        assert losses[1].item() == pytest.approx(0, abs=1e-50)


def test_log_odds_are_exact_where_they_are_finite_and_held_where_they_are_not():
    from fractions import Fraction

    for mean in (-50.0, -1.0, -1e-3, -1e-6):
        p = sum(Fraction(mean) ** k / math.factorial(k) for k in range(200))  # e^mean, exactly enough
        expected = mean - (math.log((1 - p).numerator) - math.log((1 - p).denominator))
        assert log_odds(tensor([mean])).item() == pytest.approx(expected, rel=1e-10, abs=1e-10)
    certain = tensor([0.0, CERTAIN / 3]).requires_grad_()
    odds = log_odds(certain)
    odds.sum().backward()
    assert odds.tolist() == [log_odds(tensor([CERTAIN])).item()] * 2
    assert certain.grad.tolist() == pytest.approx([1 / -math.expm1(CERTAIN)] * 2)


def test_simpo_and_orpo_rank_answers_by_what_takes_the_place_of_the_reward():
    """β p̄ and log odds: both grow with the mean log-probability per token, so the accuracies are the same."""
    (w, lo, _, _), lw, ll = pairs()
    arguments = [*map(tensor, (w, lo, lw, ll, positive_weights(8)))]
    _, simpo = simpo_loss(*arguments, beta=2.0, gamma=5.0)
    _, orpo = orpo_loss(*arguments)
    likelier = [w[i] / lw[i] > lo[i] / ll[i] for i in range(8)]
    assert simpo.accuracies.bool().tolist() == orpo.accuracies.bool().tolist() == likelier and 0 < sum(likelier) < 8
    assert simpo.chosen_rewards.tolist() == pytest.approx([2 * w[i] / lw[i] for i in range(8)])
    odds = [math.log(math.exp(lo[i] / ll[i]) / (1 - math.exp(lo[i] / ll[i]))) for i in range(8)]
    assert orpo.rejected_rewards.tolist() == pytest.approx(odds, rel=1e-12)


@pytest.mark.parametrize("z0", [0.0, 1.7])
def test_kto_and_its_gradient_against_a_loop(z0):
    logps, reference, weights = numbers(9, 1, 4.0), numbers(9, 2, 4.0), positive_weights(9)
    desirable = [i % 3 > 0 for i in range(9)]
    expected, slopes = [], []
    for p, r, good in zip(logps, reference, desirable, strict=True):
        x = BETA * (p - r) - BETA * z0
        expected.append(1.2 * (1 - sigma(x)) if good else 0.8 * (1 - sigma(-x)))
        slopes.append((-1.2 if good else 0.8) * BETA * sigma(x) * sigma(-x))
    policy = tensor(logps).requires_grad_()
    loss, stats = kto_loss(
        policy, tensor(reference), torch.tensor(desirable), tensor(z0), tensor(weights), BETA,
        desirable_weight=1.2, undesirable_weight=0.8,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, policy)
    assert stats.losses.tolist() == pytest.approx(expected, rel=1e-12) and not stats.losses.requires_grad
    assert stats.rewards.tolist() == pytest.approx([BETA * (p - r) for p, r in zip(logps, reference, strict=True)])
    assert loss.item() == pytest.approx(sum(w * e for w, e in zip(weights, expected, strict=True)), rel=1e-12)
    assert gradient.tolist() == pytest.approx([w * s for w, s in zip(weights, slopes, strict=True)], rel=1e-11)


def test_the_reference_point_of_kto_is_a_mean_that_is_never_negative_and_has_no_gradient():
    policy = tensor([-3.0, -5.0, -1.0]).requires_grad_()
    assert kto_reference_point(policy, tensor([-4.0, -5.5, -2.0])).item() == pytest.approx(2.5 / 3)
    assert kto_reference_point(policy, tensor([-1.0, -1.0, -1.0])).item() == 0
    assert not kto_reference_point(policy, tensor([-4.0, -5.0, -2.0])).requires_grad
    assert kto_reference_point(tensor([]), tensor([])).item() == 0


@pytest.mark.parametrize("far", [1e3, 1e6])
def test_kto_is_bounded_far_out(far):
    policy = tensor([far, -far, far, -far]).requires_grad_()
    loss, stats = kto_loss(policy, torch.zeros_like(policy), torch.tensor([True, True, False, False]), tensor(0.0), torch.ones_like(policy) / 4, 1.0)  # fmt: skip
    loss.backward()
    assert stats.losses.tolist() == pytest.approx([0, 1, 1, 0], abs=1e-12) and torch.isfinite(policy.grad).all()
    with pytest.raises(ValueError, match="beta must be positive"):
        kto_loss(policy, policy, torch.tensor([True] * 4), tensor(0.0), policy, 0.0)


def test_beta_goes_from_its_start_to_its_end_by_a_line_or_half_a_cosine():
    assert [scheduled_beta(step, 5, 0.1, None, "linear") for step in (0, 1, 5)] == [0.1] * 3
    assert [scheduled_beta(step, 5, 0.1, 0.5, "linear") for step in range(6)] == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5])
    cosine = [scheduled_beta(step, 5, 0.5, 0.1, "cosine") for step in range(1, 6)]
    assert cosine == pytest.approx([0.5, 0.5 - 0.4 * (1 - math.sqrt(0.5)) / 2, 0.3, 0.1 + 0.4 * (1 - math.sqrt(0.5)) / 2, 0.1])
    assert scheduled_beta(1, 1, 0.1, 0.5, "linear") == 0.1


def test_the_family_refuses_what_is_not_defined():
    zeros, lengths = [torch.zeros(2)] * 5, [torch.zeros(2)] * 2 + [torch.ones(2)] * 3
    for loss_type in ("ipo", "hinge"):
        with pytest.raises(ValueError, match=f"not defined for {loss_type}"):
            dpo_loss(*zeros, beta=0.1, loss_type=loss_type, label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"below 0\.5"):
        dpo_loss(*zeros, beta=0.1, loss_type="robust", label_smoothing=0.5)
    with pytest.raises(ValueError, match="expected sigmoid, ipo, hinge or robust"):
        dpo_loss(*zeros, beta=0.1, loss_type="simpo")
    with pytest.raises(ValueError, match="beta"):
        simpo_loss(*lengths, beta=0.0)
    for loss in (simpo_loss, orpo_loss):
        with pytest.raises(ValueError, match="shapes differ"):
            loss(*lengths[:4], torch.ones(2, 1))
    with pytest.raises(ValueError, match="shapes differ"):
        rpo_term(torch.zeros(2), torch.ones(2, 1), torch.ones(2), 1.0)


@pytest.mark.parametrize("clip_high", [None, 0.28])
def test_ppo_policy_loss_against_a_loop(clip_high):
    n = 40
    new, old = [-abs(x) for x in numbers(n, 5)], [-abs(x) for x in numbers(n, 6)]
    advantages, weights = numbers(n, 7), positive_weights(n)
    loss = kl = clipped = mean_ratio = 0.0
    for lp, lo, a, w in zip(new, old, advantages, weights, strict=True):
        ratio = math.exp(lp - lo)
        limited = min(max(ratio, 0.8), 1 + (0.2 if clip_high is None else clip_high))
        loss += w * max(-a * ratio, -a * limited)
        kl += w * (ratio - 1 - (lp - lo))
        clipped += w * (-a * limited > -a * ratio)
        mean_ratio += w * ratio
    ours, stats = ppo_policy_loss(*map(tensor, (new, old, advantages, weights)), clip_low=0.2, clip_high=clip_high)
    assert ours.item() == pytest.approx(loss, rel=1e-12)
    assert stats.approx_kl.item() == pytest.approx(kl, rel=1e-12)
    assert stats.clip_fraction.item() == pytest.approx(clipped, rel=1e-12)
    assert stats.ratio_mean.item() == pytest.approx(mean_ratio, rel=1e-12)


def test_ppo_policy_gradient_is_the_policy_gradient_while_ratio_is_one():
    """At ρ = 1 nothing is clipped: dL/dlogπ_t = -w_t A_t."""
    logprobs = tensor([-1.0, -2.0, -0.5]).requires_grad_()
    advantages, weights = tensor([1.0, -2.0, 0.5]), tensor([0.2, 0.3, 0.5])
    loss, stats = ppo_policy_loss(logprobs, logprobs.detach(), advantages, weights)
    loss.backward()
    assert torch.allclose(logprobs.grad, -weights * advantages)
    assert stats.approx_kl == 0 and stats.ratio_mean == 1 and stats.clip_fraction == 0


def test_ppo_clips_only_where_clipping_is_worse():
    """No gradient where the ratio has already moved too far in the favoured direction; full gradient in the other."""
    log_ratio = tensor([0.5, 0.5, -0.5, -0.5]).requires_grad_()
    loss, _ = ppo_policy_loss(
        log_ratio, torch.zeros(4, dtype=torch.float64), tensor([1.0, -1.0, 1.0, -1.0]), torch.full((4,), 0.25)
    )
    loss.backward()
    assert (log_ratio.grad != 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize("clip", [None, 0.2])
def test_ppo_value_loss_against_a_loop(clip):
    n = 30
    values, old, returns, weights = numbers(n, 11), numbers(n, 12), numbers(n, 13), positive_weights(n)
    expected = share = 0.0
    for v, o, r, w in zip(values, old, returns, weights, strict=True):
        plain = (v - r) ** 2
        limited = plain if clip is None else (min(max(v, o - clip), o + clip) - r) ** 2
        expected += 0.5 * w * max(plain, limited)
        share += w * (limited > plain)
    loss, fraction = ppo_value_loss(*map(tensor, (values, old, returns, weights)), clip=clip)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert fraction.item() == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("loss", [sft_loss, lambda a, w: pairwise_reward_loss(a, a, w), lambda a, w: mse_reward_loss(a, a, w)])
def test_shapes_that_would_broadcast_are_refused(loss):
    with pytest.raises(ValueError, match="shapes differ"):
        loss(torch.zeros(3, 1), torch.ones(3))


def test_splitting_a_step_changes_neither_loss_nor_gradient():
    """The weights carry the normalisation: 8 × 1 = 1 × 8."""
    old, advantages = tensor(numbers(8, 1)), tensor(numbers(8, 2))
    weights = torch.full((8,), 1 / 8, dtype=torch.float64)
    whole = tensor(numbers(8, 3)).requires_grad_()
    ppo_policy_loss(whole, old, advantages, weights)[0].backward()
    parts = whole.detach().clone().requires_grad_()
    for i in range(8):
        ppo_policy_loss(parts[i : i + 1], old[i : i + 1], advantages[i : i + 1], weights[i : i + 1])[0].backward()
    assert torch.allclose(whole.grad, parts.grad, rtol=1e-14)
