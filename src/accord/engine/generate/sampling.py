"""Choosing the next token: pure functions of logits and of one uniform number a row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from accord.engine.generate.types import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014): a bijection of 64-bit words whose output bits look independent."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_seeds(seed: int, count: int) -> np.ndarray:
    """One seed a row from one seed for all: [count] uint64."""
    with np.errstate(over="ignore"):
        start = _mix(np.asarray([seed % 2**64], dtype=np.uint64) + _GOLDEN)
        return _mix(start + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def uniforms(seeds: np.ndarray, steps: int) -> np.ndarray:
    """u[i, t] in [0, 1), a pure function of (seeds[i], t): [rows, steps] float64.

    A counter-based stream for each row, so that a row's numbers don't depend on which rows stand beside it.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64) + _GOLDEN)[:, None]
        words = _mix(state + np.arange(1, steps + 1, dtype=np.uint64)[None, :] * _GOLDEN)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Keskar et al. 2019 (arXiv:1909.05858): logits [B, V] of tokens in `seen` [B, V] bool are divided by the penalty
    where positive and multiplied where negative."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def truncate(probs: Tensor, params: SamplingParams) -> Tensor:
    """Sets to 0 the probabilities [B, V] that top-k, then top-p, then min-p leave out. The result is not normalised.

    top-p keeps the smallest set of most probable tokens whose share of what top-k left reaches p (Holtzman et al. 2020);
    min-p keeps tokens with at least p times the highest probability. The most probable token always stays.
    """
    if 0 < params.top_k < probs.shape[-1]:
        least = probs.topk(params.top_k, dim=-1).values[:, -1:]
        probs = torch.where(probs >= least, probs, 0.0)
    if params.top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        total = ordered.sum(dim=-1, keepdim=True)
        before = ordered.cumsum(dim=-1) - ordered  # what the more probable tokens already hold
        drop = before >= params.top_p * total
        drop[:, 0] = False
        probs = probs.masked_fill(torch.zeros_like(drop).scatter(-1, index, drop), 0.0)
    if params.min_p > 0:
        probs = torch.where(probs >= params.min_p * probs.amax(dim=-1, keepdim=True), probs, 0.0)
    return probs


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative probability first exceeds u · total: probs [B, V] (not normalised), u [B] → [B] int64.

    A token of probability 0 is never chosen, since the cumulative sum does not rise there.
    """
    cumulative = probs.to(torch.float64).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # u < 1, but u · total may round up to total, beyond which there is no token
    target = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def choose(
    logits: Tensor,  # [B, V] float32
    params: SamplingParams,
    u: Tensor,  # [B] float64 in [0, 1); unused when greedy
    *,
    seen: Tensor | None = None,  # [B, V] bool, tokens of prompt and answer so far; only with a repetition penalty
    forbidden: Tensor | None = None,  # [V] bool, tokens that may not be sampled now
) -> tuple[Tensor, Tensor]:
    """Samples one token a row. Returns (tokens [B] int64, their tempered untruncated log-probabilities [B] float32)."""
    logprobs = torch.log_softmax(logits if params.greedy else logits / params.temperature, dim=-1)
    altered = logits
    if seen is not None and params.repetition_penalty != 1:
        altered = penalise_repetition(altered, seen, params.repetition_penalty)
    if forbidden is not None:
        altered = altered.masked_fill(forbidden, -torch.inf)
    if params.greedy:
        tokens = altered.argmax(dim=-1)
    else:
        probs = logprobs.exp() if altered is logits else torch.softmax(altered / params.temperature, dim=-1)
        tokens = inverse_cdf(truncate(probs, params), u)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
