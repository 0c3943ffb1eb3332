"""Whole next-token distributions at the positions of a pack's targets, held as what gives their logits, and the KL between two of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accord.models.logprobs import TokenLogprobs, chunked_logprobs, logprobs_from_logits

LOGITS_ALIVE = 64 * 1024 * 1024  # of both distributions at a time (256 MiB in float32)


@dataclass(frozen=True)
class Distribution:
    """π(· | what comes before) at N positions: hidden states and a linear head, or where the head is none, the logits themselves."""

    temperature: float
    hidden: Tensor | None = None  # [N, d]
    weight: Tensor | None = None  # [V, d] the output embedding
    bias: Tensor | None = None  # [V]
    dtype: torch.dtype | None = None  # of the product with the head; None: the head's own
    logits: Tensor | None = None  # [N, V]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def _rows(self) -> Tensor:
        rows = self.hidden if self.logits is None else self.logits
        assert rows is not None
        return rows

    @property
    def vocabulary(self) -> int:
        if self.logits is not None:
            return self.logits.shape[-1]
        assert self.weight is not None
        return len(self.weight)

    def at(self, targets: Tensor, entropy: bool = False, mean: bool = False) -> TokenLogprobs:
        """Log-probabilities of `targets` [N], with entropy and mean log-probability when asked for."""
        if self.logits is not None:
            return logprobs_from_logits(self.logits, targets, self.temperature, entropy, mean)
        assert self.hidden is not None and self.weight is not None
        return chunked_logprobs(self.hidden, self.weight, self.bias, targets, self.temperature, entropy, mean, self.dtype)

    def logp(self, rows: slice) -> Tensor:
        """[n, V] log-probabilities of some positions, in float32."""
        if self.logits is not None:
            return torch.log_softmax(self.logits[rows].float() / self.temperature, dim=-1)
        assert self.hidden is not None and self.weight is not None
        dtype = self.dtype or self.weight.dtype
        with torch.autocast(self.hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = torch.nn.functional.linear(self.hidden[rows].to(dtype), self.weight.to(dtype), bias)
            return torch.log_softmax(logits.float() / self.temperature, dim=-1)

    def detach(self) -> Distribution:
        """The same numbers, without gradient."""

        def bare(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach()

        return Distribution(
            self.temperature, bare(self.hidden), bare(self.weight), bare(self.bias), self.dtype, bare(self.logits)
        )


def full_kl(policy: Distribution, reference: Distribution) -> Tensor:
    """[N] Σ_v π(v) (log π(v) - log π_ref(v)) in float32, with gradient for the policy where enabled: exact, with no sampling noise.

    Two vocabularies of logits live for one chunk of positions at a time; the backward pass computes them again.
    Raises ValueError if the positions or the vocabularies differ.
    """
    if len(policy) != len(reference) or policy.vocabulary != reference.vocabulary:
        raise ValueError(
            f"policy [{len(policy)}, {policy.vocabulary}] and reference [{len(reference)}, {reference.vocabulary}] differ: "
            "positions and vocabularies must match one to one"
        )
    reference = reference.detach()

    def of(rows: slice) -> Tensor:
        logp = policy.logp(rows)
        return (logp.exp() * (logp - reference.logp(rows))).sum(-1)

    step = max(1, LOGITS_ALIVE // (2 * policy.vocabulary))
    chunks = [slice(start, start + step) for start in range(0, len(policy), step)]
    if not chunks:
        return policy._rows.new_zeros(0, dtype=torch.float32)
    if not torch.is_grad_enabled():
        return torch.cat([of(rows) for rows in chunks])
    from torch.utils.checkpoint import checkpoint

    return torch.cat([checkpoint(of, rows, use_reentrant=False) for rows in chunks])  # type: ignore[misc]
