"""Choosing the next token: pure functions of logits and of one uniform number a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from accord.engine.generate.types import SamplingParams
from accord.errors import NonFiniteError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 256  # tokens whose probabilities are summed before they are searched one by one
_NUCLEUS = 512  # most likely tokens looked at before all of them are sorted for top-p


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


@dataclass(frozen=True)
class RowSampling:
    """The sampling parameters of B rows that may differ, each [B, 1] (or [1, 1] for all); None where no row uses it."""

    temperature: Tensor | None  # float32, 1 for greedy rows
    greedy: Tensor | None  # bool; None: no row is greedy
    only_greedy: bool
    top_k: Tensor | None  # int64, V or more: all
    top_p: Tensor | None
    min_p: Tensor | None
    repetition_penalty: Tensor | None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> RowSampling:
        """One a row."""

        def column(values: Sequence[float], unused: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            if all(value == unused for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        greedy = [p.greedy for p in params]
        return cls(
            temperature=column([p.temperature or 1.0 for p in params], 1.0),
            greedy=torch.tensor(greedy, device=device)[:, None] if any(greedy) else None,
            only_greedy=all(greedy),
            top_k=column([min(p.top_k or 2**62, 2**62) for p in params], 2**62, torch.int64),
            top_p=column([p.top_p for p in params], 1.0),
            min_p=column([p.min_p for p in params], 0.0),
            repetition_penalty=column([p.repetition_penalty for p in params], 1.0),
        )


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float | Tensor) -> Tensor:
    """Keskar et al. 2019 (arXiv:1909.05858): logits [B, V] of tokens in `seen` [B, V] bool are divided by the penalty
    where positive and multiplied where negative."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def truncate(probs: Tensor, rows: RowSampling) -> Tensor:
    """Sets to 0 the probabilities [B, V] that top-k, then top-p, then min-p leave out. They need not be normalised, nor is the result.

    top-p keeps the smallest set of most probable tokens whose share of what top-k left reaches p (Holtzman et al. 2020);
    min-p keeps tokens with at least p times the highest probability. The most probable token always stays.
    """
    vocabulary = probs.shape[-1]
    if rows.top_k is not None:
        kept = rows.top_k.clamp(max=vocabulary).expand(len(probs), 1)
        ordered = probs.topk(int(kept.max()), dim=-1).values
        probs = torch.where(probs >= ordered.gather(-1, kept - 1), probs, 0.0)
    if rows.top_p is not None:
        probs = torch.where(probs >= _nucleus_threshold(probs, rows.top_p), probs, 0.0)
    if rows.min_p is not None:
        probs = torch.where(probs >= rows.min_p * probs.amax(dim=-1, keepdim=True), probs, 0.0)
    return probs


def _nucleus_threshold(probs: Tensor, top_p: Tensor) -> Tensor:
    """[B, 1] the smallest probability that top-p keeps. Looks at the likeliest tokens first: they nearly always suffice."""
    target = top_p * probs.sum(dim=-1, keepdim=True)
    count = min(_NUCLEUS, probs.shape[-1])
    while True:
        ordered = probs.topk(count, dim=-1).values
        before = ordered.cumsum(dim=-1) - ordered  # what the more probable tokens already hold
        kept = (before < target).sum(dim=-1, keepdim=True).clamp(min=1)
        if count == probs.shape[-1] or bool((kept < count).all()):
            # p = 1 keeps all, which a sum that is rounded differently might not
            return torch.where(top_p < 1, ordered.gather(-1, kept - 1), 0.0)
        count = probs.shape[-1]


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The token at which the cumulative probability first exceeds u · total: probs [B, V] (not normalised), u [B] → [B] int64.

    A token of probability 0 is never chosen, since the cumulative sum does not rise there. Large vocabularies are summed by blocks
    first, so that only one block a row is searched token by token.
    """
    vocabulary = probs.shape[-1]
    if vocabulary <= 4 * _BLOCK:
        return _search(probs.to(torch.float64).cumsum(dim=-1), u[:, None] * 1.0, scaled=True).squeeze(-1)
    if vocabulary % _BLOCK:
        probs = F.pad(probs, (0, -vocabulary % _BLOCK))
    blocks = probs.unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(dim=-1).to(torch.float64)
    cumulative = sums.cumsum(dim=-1)
    target = u[:, None] * cumulative[:, -1:]
    block = _search(cumulative, target)
    rest = target - (cumulative - sums).gather(-1, block)
    inside = blocks[torch.arange(len(probs), device=probs.device), block.squeeze(-1)].to(torch.float64).cumsum(dim=-1)
    return (block * _BLOCK + _search(inside, rest.clamp(min=0))).squeeze(-1)


def _search(cumulative: Tensor, target: Tensor, scaled: bool = False) -> Tensor:
    """[B, 1] the first index whose cumulative sum exceeds the target [B, 1], which may be given as a share of the total."""
    total = cumulative[:, -1:]
    if scaled:
        target = target * total
    # a target below the total may be rounded up to it, beyond which there is nothing
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    # sums of NaN are exceeded nowhere; `check_numbers` tells of them
    return torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[-1] - 1)


def choose(
    logits: Tensor,  # [B, V] float32
    rows: RowSampling,
    u: Tensor,  # [B] float64 in [0, 1); unused by greedy rows
    *,
    seen: Tensor | None = None,  # [B, V] bool, tokens of prompt and answer so far; only with a repetition penalty
    forbidden: Tensor | None = None,  # bool, broadcast to [B, V]: tokens that may not be sampled now
) -> tuple[Tensor, Tensor]:
    """Samples one token a row. Returns (tokens [B] int64, their tempered untruncated log-probabilities [B] float32)."""
    tempered = logits if rows.temperature is None else logits / rows.temperature
    peak = tempered.amax(dim=-1, keepdim=True)
    weights = (tempered - peak).exp_()
    log_total = weights.sum(dim=-1, keepdim=True).log()

    altered = tempered
    if seen is not None and rows.repetition_penalty is not None:
        altered = penalise_repetition(altered, seen, rows.repetition_penalty)
    if forbidden is not None:
        altered = altered.masked_fill(forbidden, -torch.inf)
    if rows.only_greedy:
        tokens = altered.argmax(dim=-1)
    else:
        if altered is not tempered:
            weights = (altered - altered.amax(dim=-1, keepdim=True)).exp_()
        tokens = inverse_cdf(truncate(weights, rows), u)
        if rows.greedy is not None:
            tokens = torch.where(rows.greedy.squeeze(-1), altered.argmax(dim=-1), tokens)
    logprobs = tempered.gather(-1, tokens[:, None]) - peak - log_total
    return tokens, logprobs.squeeze(-1)


def check_numbers(logprobs: Tensor) -> None:
    """Raises NonFiniteError if the log-probabilities of sampled tokens [B] say that logits were NaN or infinite: the tokens mean nothing."""
    if bool(logprobs.isnan().any()):
        raise NonFiniteError(
            "the model's logits are not finite: its weights hold NaN or infinities, or a value exceeds what the type it is sampled in can "
            "hold (float16 ends at 65,504; engine.dtype=bfloat16 or float32 does not). Take an earlier checkpoint, or another engine.dtype."
        )
