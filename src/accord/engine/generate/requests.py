"""What every generator makes of a call: parameters and a seed for each prompt, and the refusals before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from accord.engine.generate.sampling import row_seeds
from accord.engine.generate.types import SamplingParams
from accord.errors import ConfigError, DataError


def params_of_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """One a prompt. Raises ValueError if there are not as many."""
    every = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(every) != count:
        raise ValueError(f"{len(every)} sampling parameters for {count} prompts")
    return every


def seeds_of_each(params: Sequence[SamplingParams], seeds: Sequence[int] | None) -> np.ndarray:
    """[prompts] uint64: as given, or from the first prompt's `seed`, or from torch's generator. Raises ValueError for another number."""
    if seeds is not None:
        if len(seeds) != len(params):
            raise ValueError(f"{len(seeds)} seeds for {len(params)} prompts")
        return np.asarray([seed % 2**64 for seed in seeds], dtype=np.uint64)
    seed = params[0].seed if params else 0
    return row_seeds(int(torch.randint(2**62, ()).item()) if seed is None else seed, len(params))


def check_lengths(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], context: int | None, max_tokens: int | None = None
) -> None:
    """Raises DataError for an empty prompt, ConfigError when prompt and answer exceed the model's context or engine.max_out_tokens."""
    for number, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        if not len(prompt):
            raise DataError(f"prompt {number} is empty: there is no token to continue from.")
        needed = len(prompt) + p.max_new_tokens
        for limit, has in ((context, "the model has {:,}"), (max_tokens, "engine.max_out_tokens is {:,}")):
            if limit is not None and needed > limit:
                cure = (
                    f"Lower generate.max_new_tokens to {limit - len(prompt):,}." if len(prompt) < limit else "Shorten the prompt."
                )
                if limit == max_tokens != context:
                    cure = f"{cure[:-1]}, or raise engine.max_out_tokens."
                raise ConfigError(
                    f"a prompt of {len(prompt):,} tokens with generate.max_new_tokens={p.max_new_tokens:,} needs "
                    f"{needed:,} tokens of context but {has.format(limit)}. {cure}"
                )
