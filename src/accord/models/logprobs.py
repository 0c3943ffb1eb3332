"""Log-probabilities of chosen tokens without the full logits (ALGORITHMS §0.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits alive at a time. Those of one chunk stay in a processor's cache between the product and what follows it; a GPU has the
# bandwidth and wants large products.
CHUNK_ELEMENTS = 4 * 1024 * 1024
CHUNK_ELEMENTS_GPU = 64 * 1024 * 1024
KEPT_ELEMENTS = 64 * 1024 * 1024  # logits that the backward pass finds as they were; the others it computes again
_ALIGNED = 64  # rows of logits that begin on a cache line: the product is a third faster for it
_LEAST_COLUMNS = 1024  # of a block, however many rows there are: narrower products are slow


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

    The vocabulary is taken a block of columns at a time, so that the [N, V] matrix is never alive and a row of the weight's
    gradient is written once. Where a gradient is wanted the first `KEPT_ELEMENTS` logits are kept for it, a fifth of the work saved;
    those of the blocks beyond are computed again.
    """
    with torch.autocast(hidden.device.type, enabled=False):  # the dtype is ours to choose, forward and backward
        out = _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature, entropy, mean, dtype or weight.dtype)
    return TokenLogprobs(out[0], out[1] if entropy else None, out[2] if mean else None)


def vocabulary_blocks(rows: int, vocabulary: int, device: torch.device) -> list[slice]:
    """The vocabulary in blocks of columns; `rows` of logits over one of them are one chunk."""
    most = CHUNK_ELEMENTS if device.type == "cpu" else CHUNK_ELEMENTS_GPU
    width = max(_LEAST_COLUMNS, most // max(1, rows) // _ALIGNED * _ALIGNED)
    return [slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]


def _here(targets: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """The rows whose target lies in `block`, and the target's column there."""
    rows = ((targets >= block.start) & (targets < block.stop)).nonzero()[:, 0]
    return rows, targets[rows] - block.start


class _ChunkedLogprobs(torch.autograd.Function):
    """With z = logits / temperature, lse = logsumexp(z) and p = exp(z - lse):

    log p_y = z_y - lse;   H = lse - Σ_v p_v z_v;   mean = (Σ_v z_v)/V - lse
    ∂log p_y/∂z = 1_y - p;   ∂H/∂z = -p ⊙ (log p + H);   ∂mean/∂z = 1/V - p.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, entropy, mean, dtype):
        ctx.set_materialize_grads(False)  # what is only looked at costs no backward pass
        n, vocabulary = len(hidden), len(weight)
        blocks = vocabulary_blocks(n, vocabulary, hidden.device)
        h = hidden.to(dtype)
        kept: list[Tensor] = []
        keep = KEPT_ELEMENTS if any(ctx.needs_input_grad[:3]) else 0
        chosen = hidden.new_empty(n, dtype=torch.float32)
        total = hidden.new_zeros(n if mean else 0, dtype=torch.float32)
        parts, expected = [], []  # of each block: logsumexp, and Σ_v p_v z_v with p normalised within the block
        for block in blocks:
            z = F.linear(h, weight[block].to(dtype), bias[block].to(dtype) if bias is not None else None)
            if (keep := keep - z.numel()) >= 0:
                kept.append(z)
            z = _scaled(z, temperature)
            rows, columns = _here(targets, block)
            chosen[rows] = z[rows, columns]
            parts.append(torch.logsumexp(z, dim=-1))
            if mean:
                total += z.sum(-1)
            if entropy:
                expected.append((torch.softmax(z, dim=-1) * z).sum(-1))
        of_block = torch.stack(parts)
        lse = torch.logsumexp(of_block, dim=0)
        # The difference is taken before it is weighted: the blocks' shares add up to 1 only to |lse|'s rounding.
        entropies = ((of_block - lse).exp() * (lse - torch.stack(expected))).sum(0) if entropy else total.new_empty(0)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropies)
        ctx.kept = kept
        ctx.options = (temperature, entropy, mean, dtype)
        return chosen - lse, entropies, total / vocabulary - lse if mean else total

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, grad_mean):
        hidden, weight, bias, targets, lse, entropies = ctx.saved_tensors
        temperature, _, _, dtype = ctx.options
        entropy, mean = grad_entropy is not None, grad_mean is not None
        if grad_logprobs is None:
            grad_logprobs = hidden.new_zeros(len(hidden), dtype=torch.float32)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        n, vocabulary = len(hidden), len(weight)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        grad_bias = torch.empty_like(bias) if need_bias else None
        h = hidden.to(dtype)
        kept, ctx.kept = ctx.kept, []
        pull = (grad_logprobs + grad_mean if mean else grad_logprobs)[:, None]
        for i, block in enumerate(vocabulary_blocks(n, vocabulary, hidden.device)):
            w = weight[block].to(dtype)
            z = kept[i] if i < len(kept) else F.linear(h, w, bias[block].to(dtype) if bias is not None else None)
            if i < len(kept):
                kept[i] = None
            logp = _scaled(z, temperature).sub_(lse[:, None])  # in place: nobody reads the logits again
            if entropy:
                surprise = grad_entropy[:, None] * (logp + entropies[:, None])
                p = logp.exp_()
                grad = p.mul_(-(pull + surprise))
            else:
                grad = logp.exp_().mul_(-pull)
            rows, columns = _here(targets, block)
            grad[rows, columns] += grad_logprobs[rows]
            if mean:
                grad += grad_mean[:, None] / vocabulary
            if temperature != 1.0:
                grad /= temperature
            if grad_bias is not None:
                grad_bias[block] = grad.sum(0)
            grad = grad.to(dtype)
            if grad_hidden is not None:
                _add_product(grad_hidden, grad, w)
            if grad_weight is not None:
                if grad_weight.dtype == dtype:
                    torch.mm(grad.T, h, out=grad_weight[block])
                else:
                    grad_weight[block] = grad.T @ h
        return grad_hidden.to(hidden.dtype) if grad_hidden is not None else None, grad_weight, grad_bias, *[None] * 5


def _scaled(z: Tensor, temperature: float) -> Tensor:
    z = z.float()
    return z if temperature == 1.0 else z / temperature


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, without a temporary where the types allow it."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
