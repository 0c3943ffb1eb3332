"""PPO's objective beyond the plain clip, against loops in double precision with gradients by central differences."""

import math
import random

import pytest
import torch

from accord.algorithms.losses import mean_by_sequence, ppo_policy_loss, ppo_value_loss, token_weights

LENGTHS = [4, 1, 6, 3]
OWNER = [i for i, length in enumerate(LENGTHS) for _ in range(length)]
N = len(OWNER)


def numbers(seed: int, scale: float = 1.0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0, scale) for _ in range(N)]


NEW, OLD, ADVANTAGES = numbers(1, 0.7), numbers(2, 0.7), numbers(3)
WEIGHTS = [abs(x) + 0.1 for x in numbers(4)]


def loop(new, *, low, high, dual, sequence) -> tuple[float, float, float]:
    """(loss, clip fraction, mean ratio), token by token."""
    loss = clipped = mean = 0.0
    for t in range(N):
        members = [j for j in range(N) if OWNER[j] == OWNER[t]] if sequence else [t]
        ratio = math.exp(sum(new[j] - OLD[j] for j in members) / len(members))
        plain, limited = -ADVANTAGES[t] * ratio, -ADVANTAGES[t] * min(max(ratio, 1 - low), 1 + high)
        term, cut = max(plain, limited), limited > plain
        if dual is not None and ADVANTAGES[t] < 0 and term > -dual * ADVANTAGES[t]:
            term, cut = -dual * ADVANTAGES[t], True
        loss += WEIGHTS[t] * term
        clipped += WEIGHTS[t] * cut
        mean += WEIGHTS[t] * ratio
    return loss, clipped, mean


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("low", "high", "dual"), [(0.2, None, None), (0.2, 0.5, None), (0.1, 0.3, 1.5), (3e-4, 4e-4, None), (0.2, None, 3.0)]
)
def test_every_form_of_the_objective_and_its_gradient_against_a_loop(sequence, low, high, dual):
    def tensor(values):
        return torch.tensor(values, dtype=torch.float64)

    options = {"low": low, "high": low if high is None else high, "dual": dual, "sequence": sequence}
    new = tensor(NEW).requires_grad_()
    loss, stats = ppo_policy_loss(
        new, tensor(OLD), tensor(ADVANTAGES), tensor(WEIGHTS), low, high, dual, torch.tensor(OWNER) if sequence else None
    )
    expected, clipped, mean = loop(NEW, **options)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert stats.clip_fraction.item() == pytest.approx(clipped, rel=1e-12) and 0 < clipped < sum(WEIGHTS)
    assert stats.ratio_mean.item() == pytest.approx(mean, rel=1e-12)
    k3 = sum(w * (math.exp(a - b) - 1 - (a - b)) for w, a, b in zip(WEIGHTS, NEW, OLD, strict=True))
    assert stats.approx_kl.item() == pytest.approx(k3, rel=1e-12)  # of tokens, whatever the ratio
    loss.backward()
    for t in range(N):
        step = 1e-7
        up, down = ([x + sign * step * (i == t) for i, x in enumerate(NEW)] for sign in (1, -1))
        slope = (loop(up, **options)[0] - loop(down, **options)[0]) / (2 * step)
        assert new.grad[t].item() == pytest.approx(slope, abs=1e-6)


def test_the_dual_clip_acts_on_negative_advantages_alone_and_ends_their_gradient():
    new = torch.tensor([2.0, 2.0, -2.0], dtype=torch.float64, requires_grad=True)  # ρ = 7.4, 7.4, 0.14
    advantages = torch.tensor([-1.0, 1.0, -1.0], dtype=torch.float64)
    loss, stats = ppo_policy_loss(new, torch.zeros(3).double(), advantages, torch.ones(3).double() / 3, dual_clip=3.0)
    loss.backward()
    assert loss.item() == pytest.approx((3.0 - 1.2 + 0.8) / 3) and new.grad.tolist() == [0, 0, 0]
    assert stats.clip_fraction.item() == pytest.approx(1)


def test_with_equal_tokens_the_ratio_of_the_sequence_is_that_of_its_tokens():
    new, old = torch.randn(1).repeat(5), torch.randn(1).repeat(5)
    a, b, w = torch.randn(5), torch.zeros(5, dtype=torch.long), torch.full((5,), 0.2)
    assert ppo_policy_loss(new, old, a, w)[0].item() == pytest.approx(
        ppo_policy_loss(new, old, a, w, sequence=b)[0].item(), rel=1e-6
    )


def test_mean_by_sequence_does_not_mind_the_order_of_tokens_or_the_numbers_of_sequences():
    values, owner = torch.randn(N), torch.tensor(OWNER) * 10 + 3
    shuffled = torch.randperm(N)
    means = mean_by_sequence(values, owner)
    assert torch.allclose(mean_by_sequence(values[shuffled], owner[shuffled]), means[shuffled])
    for i, length in enumerate(LENGTHS):
        part = torch.tensor(OWNER) == i
        assert torch.allclose(means[part], values[part].mean().expand(length))


def test_token_weights_are_what_their_names_say():
    by_token = torch.tensor([LENGTHS[i] for i in OWNER])
    values = torch.randn(N, dtype=torch.float64)
    means = [values[torch.tensor(OWNER) == i].mean().item() for i in range(4)]
    expected = {"token": values.mean().item(), "sequence": sum(means) / 4, "constant": values.sum().item() / (4 * 10)}
    for aggregation, value in expected.items():
        weights = token_weights(by_token, N, 4, aggregation, 10)
        assert (weights.double() * values).sum().item() == pytest.approx(value, rel=1e-6)
    assert token_weights(by_token, N, 4, "sequence").sum().item() == pytest.approx(1)
    with pytest.raises(ValueError, match="unknown aggregation"):
        token_weights(by_token, N, 4, "median")  # type: ignore[arg-type]


def test_statistics_count_by_their_own_shares():
    """What is reported is a mean over tokens, also where the loss weighs them otherwise."""
    new, old, a = (torch.tensor(x, dtype=torch.float64) for x in (NEW, OLD, ADVANTAGES))
    shares = torch.full((N,), 1 / N, dtype=torch.float64)
    _, plain = ppo_policy_loss(new, old, a, shares)
    _, weighted = ppo_policy_loss(new, old, a, 7 * shares, shares=shares)
    assert plain == weighted
    assert ppo_value_loss(new, old, a, shares)[1] == ppo_value_loss(new, old, a, 7 * shares, shares=shares)[1] > 0
