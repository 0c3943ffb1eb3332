"""Log-probabilities of chosen tokens without the full logits (ALGORITHMS §0.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ELEMENTS = 64 * 1024 * 1024  # logits alive at a time (256 MiB in float32)


@dataclass(frozen=True)
class TokenLogprobs:
    """Of N targets, in the order of `Pack.targets`, in float32."""

    logprobs: Tensor  # [N] log π(target | what comes before)
    entropy: Tensor | None = None  # [N] -Σ_v π(v) log π(v), when asked for
    mean_logprobs: Tensor | None = None  # [N] mean_v log π(v), when asked for (label smoothing)


def logprobs_from_logits(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, entropy: bool = False, mean: bool = False
) -> TokenLogprobs:
    """The same from logits [N, V] that exist already."""
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = logp.gather(-1, targets[:, None])[:, 0]
    return TokenLogprobs(chosen, -(logp.exp() * logp).sum(-1) if entropy else None, logp.mean(-1) if mean else None)


def chunked_logprobs(
    hidden: Tensor,  # [N, d] hidden states at the positions that predict the targets
    weight: Tensor,  # [V, d] the output embedding
    bias: Tensor | None,  # [V]
    targets: Tensor,  # [N]
    temperature: float = 1.0,
    entropy: bool = False,
    mean: bool = False,
    dtype: torch.dtype | None = None,  # of the product with the head; None: the head's own
) -> TokenLogprobs:
    """log_softmax((hidden · weightᵀ + bias) / temperature) at the targets.

    Logits live for one chunk of rows at a time and are computed again in the backward pass: the [N, V] matrix is never alive,
    at the price of one more product with the head.
    """
    with torch.autocast(hidden.device.type, enabled=False):  # the dtype is ours to choose, forward and backward
        out = _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature, entropy, mean, dtype or weight.dtype)
    return TokenLogprobs(out[0], out[1] if entropy else None, out[2] if mean else None)


def rows_per_chunk(vocabulary: int) -> int:
    """How many positions' logits may live at once."""
    return max(1, CHUNK_ELEMENTS // vocabulary)


def _chunk_logp(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


class _ChunkedLogprobs(torch.autograd.Function):
    """With p = softmax(z) and z = logits / temperature:

    ∂logp_y/∂z = 1_y - p;   ∂H/∂z = -p ⊙ (log p + H);   ∂mean/∂z = 1/V - p.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, entropy, mean, dtype):
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.options = (temperature, entropy, mean, dtype)
        n, vocabulary = len(hidden), len(weight)
        logprobs = hidden.new_empty(n, dtype=torch.float32)
        entropies = hidden.new_empty(n if entropy else 0, dtype=torch.float32)
        means = hidden.new_empty(n if mean else 0, dtype=torch.float32)
        weight, bias = weight.to(dtype), bias.to(dtype) if bias is not None else None
        step = rows_per_chunk(vocabulary)
        for start in range(0, n, step):
            rows = slice(start, start + step)
            logp = _chunk_logp(hidden[rows].to(dtype), weight, bias, temperature)
            logprobs[rows] = logp.gather(-1, targets[rows, None])[:, 0]
            if entropy:
                entropies[rows] = torch.special.entr(logp.exp()).sum(-1)
            if mean:
                means[rows] = logp.mean(-1)
        return logprobs, entropies, means

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, grad_mean):
        hidden, weight, bias, targets = ctx.saved_tensors
        temperature, entropy, mean, dtype = ctx.options
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        n, vocabulary = len(hidden), len(weight)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        w, b = weight.to(dtype), bias.to(dtype) if bias is not None else None
        step = rows_per_chunk(vocabulary)
        for start in range(0, n, step):
            rows = slice(start, start + step)
            h = hidden[rows].to(dtype)
            p = _chunk_logp(h, w, b, temperature).exp_()
            g = grad_logprobs[rows, None]
            pulled = None
            if entropy:
                surprise = torch.special.entr(p)
                pulled = grad_entropy[rows, None] * (surprise - p * surprise.sum(-1, keepdim=True))
            grad = p.mul_(-(g + grad_mean[rows, None]) if mean else -g)
            grad.scatter_add_(-1, targets[rows, None], g)
            if pulled is not None:
                grad += pulled
            if mean:
                grad += grad_mean[rows, None] / vocabulary
            if temperature != 1.0:
                grad /= temperature
            grad = grad.to(dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ w).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.add_(grad.T @ h)
            if grad_bias is not None:
                grad_bias += grad.float().sum(0)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *[None] * 5,
        )
