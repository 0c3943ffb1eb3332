"""KL estimates against the exact divergence, rewards placed on tokens, and the controllers."""

import math

import pytest
import torch

from accord.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate, token_rewards


def distributions(n: int = 40_000):
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    reference = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    sampled = torch.multinomial(policy.exp(), n, replacement=True, generator=generator)
    return policy, reference, sampled


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_estimators_agree_with_the_exact_kl_of_policy_to_reference(estimator):
    policy, reference, sampled = distributions()
    exact = (policy.exp() * (policy - reference)).sum().item()
    backward = (reference.exp() * (reference - policy)).sum().item()
    estimate = kl_estimate(policy[sampled], reference[sampled], estimator).mean().item()
    assert estimate == pytest.approx(exact, abs=0.03)
    assert abs(exact - backward) > 0.05  # so the direction was really checked


def test_each_estimator_against_its_formula():
    logprobs, ref = [-1.0, -0.2, -3.0], [-1.5, -2.0, -0.1]
    d = [a - b for a, b in zip(logprobs, ref, strict=True)]
    expected = {
        "k1": d,
        "k2": [0.5 * x * x for x in d],
        "k3": [math.exp(-x) - 1 + x for x in d],
        "abs": [abs(x) for x in d],
    }
    for name, values in expected.items():
        estimate = kl_estimate(torch.tensor(logprobs).double(), torch.tensor(ref).double(), name)
        assert estimate.tolist() == pytest.approx(values, rel=1e-6)
    with pytest.raises(ValueError, match="unknown KL estimator"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


def test_k3_is_never_negative():
    policy, reference, sampled = distributions()
    assert kl_estimate(policy[sampled], reference[sampled], "k3").min() >= 0


def test_gradient_of_k2_in_the_loss_points_to_the_exact_gradient_and_that_of_k1_vanishes():
    """Why `place: loss` refuses k1 (ALGORITHMS §4): its expected gradient is zero."""
    policy, reference, _ = distributions()
    logits = policy.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)

    def expected_gradient(estimator):
        terms = policy.exp() * kl_estimate(logprobs, reference, estimator)  # the expectation over samples of π, exactly
        return torch.autograd.grad(terms.sum(), logits, retain_graph=True)[0]

    assert torch.allclose(expected_gradient("k2"), exact, atol=1e-12)
    assert expected_gradient("k1").abs().max() < 1e-12


def test_the_score_is_added_once_on_the_last_action_of_each_response():
    kl = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    rewards = token_rewards(kl, torch.tensor([2.0, -1.0]), torch.tensor([2, 4]), coef=0.5)
    assert rewards.tolist() == pytest.approx([-0.05, -0.1, 2 - 0.15, -0.2, -1 - 0.25])
    assert rewards.sum().item() == pytest.approx(1.0 - 0.5 * kl.sum().item())


def test_the_adaptive_controller_follows_its_formula_and_its_clip():
    controller = AdaptiveKL(coef=0.1, target=6.0, horizon=100)
    controller.update(kl=6.6, episodes=10)  # error 0.1
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    for kl, error in ((600.0, 0.2), (0.0, -0.2)):
        before = controller.coef
        controller.update(kl=kl, episodes=10)
        assert controller.coef == pytest.approx(before * (1 + error * 0.1))


def test_the_adaptive_controller_brings_a_simple_system_to_its_target():
    """A policy whose KL is inversely proportional to β settles at the target."""
    controller = AdaptiveKL(coef=1.0, target=6.0, horizon=200)
    for _ in range(500):
        controller.update(kl=1.2 / controller.coef, episodes=20)
    assert 1.2 / controller.coef == pytest.approx(6.0, rel=1e-3)


def test_controllers_resume_from_their_state():
    adaptive = AdaptiveKL(coef=0.1)
    adaptive.update(kl=9.0, episodes=64)
    again = AdaptiveKL(coef=0.1)
    again.load_state(adaptive.state())
    assert again == adaptive
    fixed = FixedKL(0.05)
    fixed.update(kl=100.0, episodes=64)
    assert fixed.coef == 0.05


def test_scores_of_single_tokens_are_added_to_their_rewards():
    kl, own = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64)
    rewards = token_rewards(kl, torch.tensor([5.0, 7.0]), torch.tensor([1, 2]), 0.5, own)
    assert rewards.tolist() == pytest.approx([1 - 0.05, 5 - 0.1, 7 - 2 - 0.15]) and rewards.dtype == kl.dtype
    with pytest.raises(ValueError, match="token_scores"):
        token_rewards(kl, torch.tensor([5.0, 7.0]), torch.tensor([1, 2]), 0.5, own[:, None])
