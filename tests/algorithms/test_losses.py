"""Every loss against a plain Python loop in double precision."""

import math
import random

import pytest
import torch

from accord.algorithms.losses import dpo_loss, mse_reward_loss, pairwise_reward_loss, ppo_policy_loss, ppo_value_loss, sft_loss


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
