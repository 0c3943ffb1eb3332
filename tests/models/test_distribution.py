"""Full-vocabulary KL against its definition on plain logits, its gradient, and any split into chunks."""

import pytest
import torch

from accord.data.packing import make_pack
from accord.data.trees import branching
from accord.models import logprobs
from accord.models.distribution import Distribution, full_kl
from accord.models.forward import FrozenModel, PackedModel


def exact(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradient_are_those_of_plain_logits_whatever_the_chunk(monkeypatch, rows, bias):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", rows * 2 * 17)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, other_hidden, other_weight, offset = (
        torch.randn(*shape, generator=generator) for shape in ((7, 5), (17, 5), (7, 4), (17, 4), (17,))
    )
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, offset)]
    policy = Distribution(0.7, leaves[0], leaves[1], leaves[2] if bias else None)
    reference = Distribution(0.7, other_hidden, other_weight)
    upstream = torch.randn(7, generator=generator)
    kl = full_kl(policy, reference)
    (kl * upstream).sum().backward()
    plain = [x.double().requires_grad_() for x in (hidden, weight, offset)]
    p = ((plain[0] @ plain[1].T + (plain[2] if bias else 0)) / 0.7).log_softmax(-1)
    expected = exact(p, ((other_hidden @ other_weight.T).double() / 0.7).log_softmax(-1))
    (expected * upstream).sum().backward()
    assert torch.allclose(kl.double(), expected, atol=1e-5) and (kl > 0).all()
    for ours, theirs in zip(leaves[: 2 + bias], plain, strict=False):
        assert torch.allclose(ours.grad.double(), theirs.grad, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(full_kl(policy, reference), kl)


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])  # linear head, soft-capped head, padded rows
def test_two_models_at_the_same_positions_of_a_pack(tiny_model, family):
    pack = make_pack([branching([5, 6, 7], [[8, 9], [10, 11, 12]]), branching([20, 21], [[22, 23, 24]])], range(2))
    policy, reference = PackedModel(tiny_model(family, seed=1)), FrozenModel(tiny_model(family, seed=2))
    kl = full_kl(policy.distribution(pack, 0.9), reference.distribution(pack, 0.9))
    expected = []
    for prompt, answer in (([5, 6, 7], [8, 9]), ([5, 6, 7], [10, 11, 12]), ([20, 21], [22, 23, 24])):
        ids = torch.tensor([prompt + answer])
        at = slice(len(prompt) - 1, -1)
        p, q = ((m.module(input_ids=ids).logits[0, at].double() / 0.9).log_softmax(-1) for m in (policy, reference))
        expected.append(exact(p, q))
    assert torch.allclose(kl.double(), torch.cat(expected), atol=1e-5)
    kl.sum().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in policy.module.parameters())
    assert all(p.grad is None for p in reference.module.parameters())


def test_it_is_the_mean_of_k1_over_samples():
    """Monte Carlo agrees with it, and tells the direction: the other one is clearly another number."""
    generator = torch.Generator().manual_seed(0)
    p, q = (Distribution(1.0, logits=torch.randn(1, 9, generator=generator)) for _ in range(2))
    drawn = torch.multinomial(p.logp(slice(0, 1)).exp()[0], 40_000, replacement=True, generator=generator)
    estimate = (p.logp(slice(0, 1)) - q.logp(slice(0, 1)))[0, drawn].mean().item()
    assert full_kl(p, q).item() == pytest.approx(estimate, abs=0.03)
    assert abs(full_kl(p, q).item() - full_kl(q, p).item()) > 0.05


def test_what_does_not_match_is_refused():
    a, b, c = (Distribution(1.0, logits=torch.zeros(shape)) for shape in ((2, 5), (2, 6), (3, 5)))
    for other in (b, c):
        with pytest.raises(ValueError, match="one to one"):
            full_kl(a, other)
    assert full_kl(Distribution(1.0, logits=torch.zeros(0, 5)), Distribution(1.0, logits=torch.zeros(0, 5))).shape == (0,)


@pytest.mark.parametrize("width", [64, 1024, 4096])
def test_entropy_of_logits_far_from_zero_is_as_exact_by_blocks_as_in_one(monkeypatch, width):
    """With log Σ e^z around 400 the blocks' shares add up to 1 only to some 1e-5, which must not be multiplied by 400."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(logprobs, "_LEAST_COLUMNS", width)
    generator = torch.Generator().manual_seed(1)
    rows, vocabulary = 64, 3000
    hidden = torch.eye(rows).requires_grad_()
    weight = (torch.randn(vocabulary, rows, generator=generator) + 400).requires_grad_()
    found = logprobs.chunked_logprobs(hidden, weight, None, torch.zeros(rows, dtype=torch.long), entropy=True).entropy
    logp = (hidden.detach() @ weight.detach().T).double().log_softmax(-1)
    assert torch.allclose(found.double(), -(logp.exp() * logp).sum(-1), rtol=0, atol=3e-4)
