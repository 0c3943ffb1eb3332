"""Choosing a token: the distribution, the truncation and the random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accord.engine.generate.sampling import RowSampling, choose, inverse_cdf, row_seeds, truncate, uniforms
from accord.engine.generate.types import SamplingParams
from accord.errors import ConfigError


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that transformers samples from."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores.softmax(-1)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.integers(2, 60),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 200]),
    top_p=st.sampled_from([1.0, 0.9, 0.4, 0.01]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_truncation_leaves_the_distribution_that_transformers_samples_from(seed, vocabulary, temperature, top_k, top_p, min_p):
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = truncate((logits / temperature).softmax(-1), RowSampling.of([params]))
    torch.testing.assert_close(ours / ours.sum(-1, keepdim=True), warped(logits, params), atol=1e-6, rtol=1e-5)


def test_drawn_frequencies_are_the_probabilities():
    probs = torch.tensor([0.05, 0.0, 0.5, 0.2, 0.0, 0.25])
    draws = torch.from_numpy(uniforms(row_seeds(3, 200), 500).reshape(-1))
    counts = torch.bincount(inverse_cdf(probs.expand(len(draws), -1), draws), minlength=6)
    assert counts[1] == 0 and counts[4] == 0
    error = (probs * (1 - probs) / len(draws)).sqrt()
    assert ((counts / len(draws) - probs).abs() <= 4.5 * error).all()


def test_a_token_of_probability_zero_is_never_chosen_at_the_ends_of_the_interval():
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    assert inverse_cdf(probs, torch.tensor([0.0], dtype=torch.float64)).item() == 1
    assert inverse_cdf(probs, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 3
    for total in np.random.default_rng(0).uniform(1e-3, 1e3, 200):  # not normalised: u · total may round up to total
        assert inverse_cdf(probs * total, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 3


def test_uniforms_are_uniform_and_a_rows_numbers_are_its_own():
    block = uniforms(row_seeds(1, 300), 400)
    assert block.min() >= 0 and block.max() < 1
    assert abs(block.mean() - 0.5) < 0.005 and abs(block.var() - 1 / 12) < 0.002
    for a, b in ((block[:, :-1], block[:, 1:]), (block[:-1], block[1:])):  # neither steps nor rows hang together
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
    seeds = row_seeds(1, 300)
    np.testing.assert_array_equal(uniforms(seeds[[7, 250]], 400), block[[7, 250]])
    np.testing.assert_array_equal(uniforms(seeds, 100), block[:, :100])


def test_neighbouring_seeds_give_unrelated_numbers():
    block = uniforms(np.arange(1000, dtype=np.uint64), 50)
    assert abs(np.corrcoef(block[:-1].ravel(), block[1:].ravel())[0, 1]) < 0.02
    assert len(np.unique(block)) == block.size


def test_logprobs_know_nothing_of_truncation_penalty_or_forbidden_tokens():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    seen = torch.rand(5, 30, generator=torch.Generator().manual_seed(1)) < 0.5
    forbidden = torch.arange(30) < 10
    params = SamplingParams(temperature=0.5, top_k=3, repetition_penalty=2.0)
    u = torch.full((5,), 0.3, dtype=torch.float64)
    tokens, logprobs = choose(logits, RowSampling.of([params]), u, seen=seen, forbidden=forbidden)
    assert (tokens >= 10).all()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits / 0.5, -1).gather(-1, tokens[:, None])[:, 0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 4, "min_new_tokens": 5},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"stop": ("",)},
    ],
)
def test_values_outside_their_range_are_refused(wrong):
    with pytest.raises(ConfigError, match="generate." + list(wrong)[-1]):
        SamplingParams(**wrong)


@pytest.mark.parametrize("value", [1e-7, 1e-44, 1e-320])
def test_a_temperature_whose_quotients_are_no_float32_numbers_is_refused(value):
    with pytest.raises(ConfigError, match=r"generate.temperature=.*0 \(greedy\), or 1e-06 or more"):
        SamplingParams(temperature=value)
    with pytest.raises(ConfigError, match=r"generate.repetition_penalty=.*between 1e-06 and 1e\+06"):
        SamplingParams(repetition_penalty=value)


def test_the_extremes_that_are_allowed_give_numbers():
    logits = torch.tensor([[30.0, 29.0, -40.0, 0.0]])
    u, seen = torch.tensor([0.5], dtype=torch.float64), torch.tensor([[True, False, True, True]])
    for temperature in (1e-6, 1e6):
        for penalty in (1e-6, 1e6):
            params = SamplingParams(temperature=temperature, repetition_penalty=penalty, top_k=2**70)
            token, logprob = choose(logits, RowSampling.of([params]), u, seen=seen)
            expected = torch.log_softmax(logits.double() / temperature, -1)[0, token]
            assert logprob.isfinite().all()
            torch.testing.assert_close(logprob.double(), expected, rtol=1e-6, atol=1e-4)
    assert choose(logits, RowSampling.of([SamplingParams(temperature=1e-6)]), u)[0].item() == 0
