"""Generation through the model's own forward: any family that transformers knows, no second copy of the weights.

One batch is: prefill (each different prompt once, padded on the left), then a loop that samples one token a row, drops the rows
that have ended, and runs the model on what is left. Nothing in that loop is done row by row in Python, except where a stop string
or a listener asks for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from accord.engine.generate.plain_cache import SlotCache, empty_slots, join, supports_slots
from accord.engine.generate.requests import check_lengths, params_of_each, seeds_of_each
from accord.engine.generate.sampling import RowSampling, check_numbers, choose, uniforms
from accord.engine.generate.types import OnToken, Rollout, SamplingParams
from accord.models.heads import context_length
from accord.models.precision import check_bfloat16

_PREFILL_TOKENS = 8192  # padded prompt tokens of one forward
_SMALL_PREFILL = 512  # below this many tokens a forward costs more than the padding it would save
_CACHE_BYTES = 2 * 2**30  # what the cache of one batch may take when `max_batch` is None
_MOST_ROWS = 512
_GROWTH = 64  # columns by which the cache grows at least


class PlainGenerator:
    """A `Generator` that decodes with `module.forward` and reads the very tensors that are being trained.

    `max_batch`: rows computed together; None chooses as many as fit a cache of 2 GiB, at most 512.
    `dtype`: computed in under autocast, where it is not the weights' own.
    The module is put in evaluation mode while it generates and is given back as it was.
    """

    def __init__(self, module: nn.Module, tokenizer: Any, max_batch: int | None = None, dtype: torch.dtype | None = None) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.dtype = dtype
        weight = next(module.parameters())
        check_bfloat16(dtype or weight.dtype, weight.device)
        base: Any = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
        self._config = base.config.get_text_config()
        accepted = inspect.signature(base.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_logits_to_keep = "logits_to_keep" in accepted
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.2x
        self._slots = supports_slots(self._config)

    @property
    def context_length(self) -> int | None:
        """The most tokens that prompt and answer may have together; None if the family has no limit (ALiBi)."""
        return context_length(self.module)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        seeds: Sequence[int] | None = None,
        on_token: OnToken | None = None,
    ) -> list[Rollout]:
        """Answers every prompt, in order; `params` for all, or one a prompt.

        Raises DataError for an empty prompt, ConfigError when prompt + `max_new_tokens` is beyond the model's context.
        """
        every = params_of_each(params, len(prompts))
        check_lengths(prompts, every, self.context_length)
        row_seed = seeds_of_each(every, seeds)
        alike: dict[SamplingParams, list[int]] = {}
        for i, p in enumerate(every):
            alike.setdefault(p, []).append(i)
        rollouts: list[Rollout | None] = [None] * len(prompts)
        with torch.no_grad(), inference_mode(self.module, self._config), self._casting():
            for p, rows in alike.items():
                for numbers in self._batches(prompts, np.asarray(rows), p):
                    batch = _Batch(self, [prompts[i] for i in numbers], numbers, p, row_seed[numbers], on_token)
                    for number, rollout in zip(numbers, batch.run(), strict=True):
                        rollouts[number] = rollout
        return [rollout for rollout in rollouts if rollout is not None]

    def prepare(self) -> None:
        """Nothing: it reads the module itself."""

    def refresh(self) -> None:
        """Nothing."""

    def release(self) -> None:
        """Nothing: its cache lives as long as a batch."""

    def _casting(self) -> AbstractContextManager[Any]:
        weight = next(self.module.parameters())
        return nullcontext() if self.dtype in (None, weight.dtype) else torch.autocast(weight.device.type, self.dtype)

    def _batches(self, prompts: Sequence[Sequence[int]], rows: np.ndarray, params: SamplingParams) -> Iterator[np.ndarray]:
        """Numbers of the prompts of each batch: longest first, so that rows of one batch need little padding."""
        order = np.asarray(sorted(rows.tolist(), key=lambda i: -len(prompts[i])))
        start = 0
        while start < len(order):
            size = self.max_batch or self._rows_that_fit(len(prompts[order[start]]) + params.max_new_tokens)
            yield order[start : start + size]
            start += size

    def _rows_that_fit(self, length: int) -> int:
        config = self._config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = next(self.module.parameters()).element_size()
        return int(min(_MOST_ROWS, max(1, _CACHE_BYTES // (2 * config.num_hidden_layers * heads * head_dim * size * length))))

    # -- the model -------------------------------------------------------------------------------------------------

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        """The logits [rows, V] float32 after the last column of ids [rows, q]. `mask` [rows, columns so far]; None: no padding."""
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, self._cache_name: cache, "use_cache": True}
        if self._takes_positions:
            arguments["position_ids"] = positions
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        return self.module(**arguments, return_dict=True).logits[:, -1].float()

    def prefill(self, prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Cache, Tensor]:
        """Runs every different prompt once. Returns the cache of all rows, left-padded to the longest, and the logits [rows, V]."""
        if not self._slots:  # recurrent states and the like: one forward, the family's own cache
            ids, mask = _left_pad(prompts, device)
            cache: Cache = DynamicCache(config=self._config)
            return cache, self.forward(ids, _positions(mask), mask, cache)
        different: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            different.setdefault(tuple(prompt), []).append(row)
        parts, logits = [], None
        for chunk in _chunks(list(different), _PREFILL_TOKENS):
            ids, mask = _left_pad(chunk, device)
            padded = None if bool(mask.all()) else mask
            part = empty_slots(self._config)
            last = self.forward(ids, _positions(mask), padded, part)
            source = torch.tensor([i for i, prompt in enumerate(chunk) for _ in different[prompt]], device=device)
            destination = torch.tensor([row for prompt in chunk for row in different[prompt]], device=device)
            if logits is None:
                logits = last.new_empty(len(prompts), last.shape[-1])
            logits[destination] = last[source]
            parts.append((part, source, destination))
        assert logits is not None
        return join(parts, len(prompts), max(map(len, prompts)), _GROWTH), logits


@dataclass
class _Live:
    """The rows that are still being computed."""

    rows: Tensor  # [b] which row of the batch each is
    padding: Tensor  # [b] padded columns at its left
    lengths: Tensor  # [b] prompt tokens
    mask: Tensor | None  # [b, columns to come] True where a column is not padding; None: no row is padded
    ended: Tensor  # [b] bool
    uniforms: Tensor  # [b, max_new_tokens]
    seen: Tensor | None  # [b, V] bool, only with a repetition penalty


class _Batch:
    """One batch from prompts to rollouts."""

    def __init__(
        self,
        generator: PlainGenerator,
        prompts: Sequence[Sequence[int]],
        numbers: np.ndarray,
        params: SamplingParams,
        seeds: np.ndarray,
        on_token: OnToken | None,
    ) -> None:
        self.generator, self.prompts, self.numbers, self.params, self.on_token = generator, prompts, numbers, params, on_token
        self.seeds = seeds
        self.device = next(generator.module.parameters()).device

    def run(self) -> list[Rollout]:
        params, count, steps = self.params, len(self.prompts), self.params.max_new_tokens
        cache, logits = self.generator.prefill(self.prompts, self.device)
        live = self._start(logits.shape[-1])
        ends = self._end_table(logits.shape[-1])
        self.tokens = torch.zeros(count, steps, dtype=torch.int64, device=self.device)
        self.logprobs = torch.zeros(count, steps, dtype=torch.float32, device=self.device)
        self.taken = torch.full((count,), steps, dtype=torch.int64, device=self.device)
        self.stopped = torch.zeros(count, dtype=torch.bool, device=self.device)

        sampling = RowSampling.of([params], self.device)  # one row, for all
        for step in range(steps):
            early = step < params.min_new_tokens
            token, logprob = choose(
                logits, sampling, live.uniforms[:, step], seen=live.seen, forbidden=ends if early and ends.any() else None
            )
            check_numbers(logprob)
            self.tokens[live.rows, step] = token
            self.logprobs[live.rows, step] = logprob
            if live.seen is not None:
                live.seen.scatter_(1, token[:, None], True)
            if self.on_token is not None:
                self._tell(live, token)
            ending = ends[token] & ~live.ended
            if params.stop and not early:
                ending |= self._stop_strings(live, step) & ~live.ended
            if bool(ending.any()):
                rows = live.rows[ending]
                self.taken[rows] = step + 1
                self.stopped[rows] = True
                live.ended |= ending
            alive = len(live.rows) - int(live.ended.sum())
            if not alive or step + 1 == steps:
                break
            if alive <= 0.875 * len(live.rows):
                keep = (~live.ended).nonzero().squeeze(-1)
                live, token = self._keep(live, cache, keep, remaining=steps - step - 1), token[keep]
            elif isinstance(cache, SlotCache) and cache.full:
                cache.select(None, 0, _room(cache.length, steps - step - 1))
            column = cache.get_seq_length() + 1
            mask = None if live.mask is None else live.mask[:, :column]
            logits = self.generator.forward(token[:, None], (live.lengths + step)[:, None], mask, cache)
        return self._rollouts()

    def _start(self, vocabulary: int) -> _Live:
        count, width = len(self.prompts), max(map(len, self.prompts))
        lengths = torch.tensor([len(prompt) for prompt in self.prompts], device=self.device)
        padding = width - lengths
        mask = None
        if bool(padding.any()):
            mask = torch.arange(width + self.params.max_new_tokens, device=self.device)[None, :] >= padding[:, None]
        seen = None
        if self.params.repetition_penalty != 1:
            seen = torch.zeros(count, vocabulary, dtype=torch.bool, device=self.device)
            for row, prompt in enumerate(self.prompts):
                seen[row, list(prompt)] = True
        if self.params.greedy:
            u = torch.zeros(count, 1, dtype=torch.float64).expand(count, self.params.max_new_tokens)
        else:
            u = torch.from_numpy(uniforms(self.seeds, self.params.max_new_tokens))
        ended = torch.zeros(count, dtype=torch.bool, device=self.device)
        return _Live(torch.arange(count, device=self.device), padding, lengths, mask, ended, u.to(self.device), seen)

    def _end_table(self, vocabulary: int) -> Tensor:
        """[V] bool: the token ends the answer."""
        table = torch.zeros(vocabulary, dtype=torch.bool, device=self.device)
        table[[token for token in self.params.stop_token_ids if 0 <= token < vocabulary]] = True
        return table

    def _keep(self, live: _Live, cache: Cache, keep: Tensor, remaining: int) -> _Live:
        """Goes on with the rows `keep` only, and forgets columns that are padding in all of them."""
        trim = 0
        if isinstance(cache, SlotCache):
            trim = int(live.padding[keep].min())
            cache.select(keep, trim, _room(cache.length - trim, remaining))
        else:
            cache.reorder_cache(keep)  # type: ignore[arg-type]
        padding = live.padding[keep] - trim
        mask = None if live.mask is None or not bool(padding.any()) else live.mask[keep, trim:]
        return _Live(
            live.rows[keep],
            padding,
            live.lengths[keep],
            mask,
            live.ended[keep],
            live.uniforms[keep],
            None if live.seen is None else live.seen[keep],
        )

    def _tell(self, live: _Live, token: Tensor) -> None:
        assert self.on_token is not None
        for row, value, ended in zip(live.rows.tolist(), token.tolist(), live.ended.tolist(), strict=True):
            if not ended:
                self.on_token(int(self.numbers[row]), value)

    def _stop_strings(self, live: _Live, step: int) -> Tensor:
        """[b] bool: the answer now holds one of the stop strings.

        A string of n bytes lies within the last n tokens; a few more are decoded since some tokenizers treat a first token apart.
        """
        tail = max(len(stop.encode()) for stop in self.params.stop) + 8
        recent = self.tokens[live.rows, max(0, step + 1 - tail) : step + 1].tolist()
        texts = self.generator.tokenizer.batch_decode(recent, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return torch.tensor([any(stop in text for stop in self.params.stop) for text in texts], device=self.device)

    def _rollouts(self) -> list[Rollout]:
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        rollouts = []
        for row, (taken, stopped) in enumerate(zip(self.taken.tolist(), self.stopped.tolist(), strict=True)):
            rollouts.append(Rollout(tokens[row][:taken], logprobs[row][:taken], "stop" if stopped else "length"))
        return rollouts


def _room(length: int, remaining: int) -> int:
    """Free columns to add: a quarter of what is there, so that all copies together cost a few times the last one."""
    return min(remaining, max(_GROWTH, length // 4))


def _chunks(prompts: list[tuple[int, ...]], budget: int) -> Iterator[list[tuple[int, ...]]]:
    """Prompts of similar length together: at most `budget` padded tokens (one prompt at least).

    A chunk that is worth a forward of its own takes no prompt that would be padded to more than 4/3 of its length.
    """
    chunk: list[tuple[int, ...]] = []
    for prompt in sorted(prompts, key=len, reverse=True):
        if chunk:
            width = len(chunk[0])
            padded_much = 4 * len(prompt) < 3 * width and len(chunk) * width >= _SMALL_PREFILL
            if padded_much or (len(chunk) + 1) * width > budget:
                yield chunk
                chunk = []
        chunk.append(prompt)
    if chunk:
        yield chunk


def _left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """ids [rows, width] and the mask of what is not padding. The padding is token 0: no value of it is ever looked at."""
    width = max(map(len, prompts))
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = True
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def _positions(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(dim=1) - 1).clamp_(min=0)


@contextmanager
def inference_mode(module: nn.Module, config: Any) -> Iterator[None]:
    """Evaluation mode, and an attention that knows left padding and a cache; both as before afterwards.

    The training attention (segments of a pack) reads its layout from the trainer; here every row is one sequence.
    """
    training = [part for part in module.modules() if part.training]
    before = config._attn_implementation
    if before is not None and before.startswith("accord"):
        config._attn_implementation = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    module.eval()
    try:
        yield
    finally:
        config._attn_implementation = before
        for part in training:
            part.training = True
