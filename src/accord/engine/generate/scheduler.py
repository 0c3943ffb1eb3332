"""Continuous batching: sequences enter and leave between steps, so that a slot is never kept by one that has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accord.engine.generate.decoder import Decoder, Step
from accord.engine.generate.kv_cache import BLOCK, KeyValueCache
from accord.engine.generate.sampling import RowSampling, check_numbers, choose, uniforms
from accord.engine.generate.types import Rollout, SamplingParams
from accord.models.packed import SegmentLayout

PREFILL_TOKENS = 2048  # prompt tokens of one step: more would make the sequences under way wait


@dataclass(frozen=True, eq=False)
class Request:
    """One answer to be sampled. `number` names it in callbacks and results."""

    number: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    on_token: Callable[[int, int], None] | None = None  # (number, token) as it is sampled


class _Slots:
    """What is known of the sequences under way, by slot: arrays, so that a step's bookkeeping is not done row by row."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cached = np.zeros(0, dtype=np.int64)  # tokens in the cache
        self.next = np.zeros(0, dtype=np.int64)  # the token to be read next
        self.count = np.zeros(0, dtype=np.int64)  # tokens sampled
        self.limit = np.zeros(0, dtype=np.int64)
        self.least = np.zeros(0, dtype=np.int64)
        self.ends = np.zeros((0, 1), dtype=np.int64)  # stop token ids, -1: none
        self.uniforms = np.zeros((0, 1))
        self.tokens = np.zeros((0, 1), dtype=np.int64)
        self.logprobs = np.zeros((0, 1), dtype=np.float32)

    _ARRAYS = ("cached", "next", "count", "limit", "least", "ends", "uniforms", "tokens", "logprobs")

    def __len__(self) -> int:
        return len(self.requests)

    def append(self, request: Request) -> None:
        """A new sequence in the next slot."""
        slot, steps, ends = len(self), request.params.max_new_tokens, request.params.stop_token_ids
        self._grow("ends", slot + 1, len(ends))
        for name in ("uniforms", "tokens", "logprobs"):
            self._grow(name, slot + 1, 1 if request.params.greedy and name == "uniforms" else steps)
        for name in ("cached", "next", "count", "limit", "least"):
            self._grow(name, slot + 1)
        self.requests.append(request)
        self.cached[slot], self.next[slot], self.count[slot] = 0, request.prompt[-1], 0
        self.limit[slot], self.least[slot] = steps, request.params.min_new_tokens
        self.ends[slot] = -1
        self.ends[slot, : len(ends)] = ends
        if not request.params.greedy:
            self.uniforms[slot, :steps] = uniforms(np.asarray([request.seed % 2**64], dtype=np.uint64), steps)[0]

    def _grow(self, name: str, rows: int, width: int = 0) -> None:
        old = getattr(self, name)
        wanted = (max(rows, old.shape[0] if rows <= old.shape[0] else 2 * old.shape[0]), *(max(w, width) for w in old.shape[1:]))
        if wanted != old.shape:
            new = np.full(wanted, -1 if name == "ends" else 0, dtype=old.dtype)
            new[tuple(slice(0, n) for n in old.shape)] = old
            setattr(self, name, new)

    def remove(self, slot: int) -> int:
        """Forget a sequence; the last one takes its slot. Returns the slot that the last one had."""
        last = len(self) - 1
        if slot != last:
            for name in self._ARRAYS:
                array = getattr(self, name)
                array[slot] = array[last]
            self.requests[slot] = self.requests[last]
        self.requests.pop()
        return last

    def uniform(self, n: int) -> np.ndarray:
        """[n] each sequence's number for the token it samples now."""
        column = np.minimum(self.count[:n], self.uniforms.shape[1] - 1)  # greedy ones need none
        return self.uniforms[np.arange(n), column]


class Scheduler:
    """Runs requests through a decoder: `add` them at any time, call `step` until nothing is `busy`."""

    def __init__(
        self,
        decoder: Decoder,
        forward: Callable[[Step, KeyValueCache], Tensor],
        cache: KeyValueCache,
        tokenizer: Any,
        max_slots: int,
        share: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """`forward`: the decoder's own, or one that replays it. `share` makes what was sampled the same for all ranks (`Lockstep`)."""
        self.share = share
        self.decoder, self.forward, self.cache, self.tokenizer, self.max_slots = decoder, forward, cache, tokenizer, max_slots
        self.waiting: deque[Request] = deque()
        self.slots = _Slots()
        self._seen: Tensor | None = None  # [slots, V] bool, only while a sequence has a repetition penalty
        self._sampling: RowSampling | None = None

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or len(self.slots) > 0

    def add(self, request: Request) -> None:
        """Queue a request: first come, first served."""
        self.waiting.append(request)

    @torch.inference_mode()
    def cancel(self, number: int) -> None:
        """Forget a request, waiting or under way. Between steps: not from `on_token`."""
        self.waiting = deque(request for request in self.waiting if request.number != number)
        for slot in reversed(range(len(self.slots))):
            if self.slots.requests[slot].number == number:
                self._leave(slot)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Rollout]]:
        """One token more for every sequence under way, and the first for as many waiting ones as there is room for.

        Returns the answers that are complete now, as (number of the request, rollout).
        """
        plan = self._admit()
        n = len(self.slots)
        if not n:
            return []
        logits = self.forward(self._step(plan), self.cache)
        for source, slot in plan.twins:
            self.cache.copy(source, slot, plan.lengths[source])
        if plan.twins:
            logits = logits.index_select(0, torch.tensor(plan.rows, device=logits.device))
        self.slots.cached[: plan.decoding] += 1
        for slot in range(plan.decoding, n):
            self.slots.cached[slot] = plan.lengths[slot]
        return self._sample(logits)

    # -- who is computed ---------------------------------------------------------------------------------------------

    def _admit(self) -> _Plan:
        """Give free slots to waiting requests, as far as this step's prompt tokens allow.

        A prompt that is in the cache already, or enters in this very step, is not computed again.
        """
        slots, budget = self.slots, PREFILL_TOKENS
        at = {request.prompt: slot for slot, request in enumerate(slots.requests)} if self.waiting else {}
        fresh: list[Request] = []
        entering: set[tuple[int, ...]] = set()
        while self.waiting and len(slots) + len(fresh) < self.max_slots:
            request = self.waiting[0]
            source = at.get(request.prompt)
            if source is None and request.prompt not in entering:
                if fresh and len(request.prompt) > budget:
                    break
                budget -= len(request.prompt)
            self.waiting.popleft()
            if source is None:
                fresh.append(request)
                entering.add(request.prompt)
                continue
            self._enter(request)  # reads its last prompt token as if it had been sampled
            slot, known = len(slots) - 1, len(request.prompt) - 1
            self._reserve(len(slots), known + 1)
            self.cache.copy(source, slot, known)
            slots.cached[slot] = known
        plan = _Plan(decoding=len(slots), rows=list(range(len(slots))))
        first: dict[tuple[int, ...], int] = {}
        for request in fresh:
            self._enter(request)
            slot = len(slots) - 1
            plan.lengths[slot] = len(request.prompt)
            if request.prompt in first:
                plan.twins.append((first[request.prompt], slot))
                plan.rows.append(plan.rows[first[request.prompt]])
            else:
                first[request.prompt] = slot
                plan.rows.append(plan.decoding + len(plan.prompts))
                plan.prompts.append((slot, request.prompt))
        return plan

    def _enter(self, request: Request) -> None:
        self.slots.append(request)
        self._sampling = self._seen = None  # made anew for all that enter in this step

    def _leave(self, slot: int) -> None:
        last = self.slots.remove(slot)
        self._sampling = None
        if slot != last:
            self.cache.copy(last, slot, int(self.slots.cached[slot]))
            if self._seen is not None:
                self._seen[slot] = self._seen[last]
        if self._seen is not None:
            self._seen = self._seen[:last] if last else None

    def _mark_seen(self) -> None:
        """[slots, V] made only when a sequence has a penalty: they are rare, and the table is large."""
        vocabulary = self.decoder.vocabulary
        seen = torch.zeros(len(self.slots), vocabulary, dtype=torch.bool, device=self.decoder.device)
        for slot, request in enumerate(self.slots.requests):
            seen[slot, list(request.prompt)] = True
            seen[slot, self.slots.tokens[slot, : self.slots.count[slot]]] = True
        self._seen = seen

    def _reserve(self, slots: int, tokens: int) -> None:
        """Room in the cache: all slots that will be used at once, tokens as they come."""
        if slots > self.cache.slots:
            slots = min(self.max_slots, slots + len(self.waiting))
        if tokens > self.cache.capacity and self.cache.capacity:
            tokens = max(tokens, self.cache.capacity + max(BLOCK, self.cache.capacity // 4))
        self.cache.reserve(slots, tokens)

    def _step(self, plan: _Plan) -> Step:
        slots, n, device = self.slots, plan.decoding, self.decoder.device
        longest = int(slots.cached[:n].max()) + 1 if n else 0
        self._reserve(len(slots), max([longest, *plan.lengths.values()]))
        sizes = [len(prompt) for _, prompt in plan.prompts]
        ids = np.concatenate([slots.next[:n], *(np.asarray(prompt, dtype=np.int64) for _, prompt in plan.prompts)])
        positions = torch.from_numpy(np.concatenate([slots.cached[:n], *(np.arange(size) for size in sizes)])).to(device)
        where = np.concatenate([np.arange(n), np.repeat([slot for slot, _ in plan.prompts], sizes).astype(np.int64)])
        ends = np.cumsum([0, *sizes])
        layout = None
        if sizes:
            segments = [(int(start), int(end), -1) for start, end in pairwise(ends)]
            layout = SegmentLayout(segments, positions[n:])
        last = np.concatenate([np.arange(n), n + ends[1:] - 1])
        return Step(
            torch.from_numpy(ids).to(device), positions, torch.from_numpy(where).to(device), n, longest, layout,
            torch.from_numpy(last).to(device),
        )  # fmt: skip

    # -- what they say -----------------------------------------------------------------------------------------------

    def _sample(self, logits: Tensor) -> list[tuple[int, Rollout]]:
        slots, n = self.slots, len(self.slots)
        if self._sampling is None:
            self._sampling = RowSampling.of([request.params for request in slots.requests], logits.device)
        if self._sampling.repetition_penalty is not None and self._seen is None:
            self._mark_seen()
        u = torch.from_numpy(slots.uniform(n)).to(logits.device)
        chosen, chosen_logprobs = choose(logits, self._sampling, u, seen=self._seen, forbidden=self._forbidden(logits))
        if self.share is not None:
            chosen, chosen_logprobs = self.share(chosen, chosen_logprobs)
        if self._seen is not None:
            self._seen.scatter_(1, chosen[:, None], True)
        tokens, chosen_logprobs, rows = chosen.cpu().numpy(), chosen_logprobs.cpu(), np.arange(n)
        check_numbers(chosen_logprobs)
        slots.tokens[rows, slots.count[:n]] = tokens
        slots.logprobs[rows, slots.count[:n]] = chosen_logprobs.numpy()
        slots.next[:n] = tokens
        slots.count[:n] += 1

        may_end = slots.count[:n] > slots.least[:n]
        stopped = (tokens[:, None] == slots.ends[:n]).any(axis=1) & may_end
        stopped |= self._stop_strings(n) & may_end
        done = stopped | (slots.count[:n] == slots.limit[:n])
        for slot, request in enumerate(slots.requests):
            if request.on_token is not None:
                request.on_token(request.number, int(tokens[slot]))
        finished = []
        for slot in np.flatnonzero(done)[::-1].tolist():  # from the back: a slot that is taken over is done with already
            count = int(slots.count[slot])
            rollout = Rollout(
                slots.tokens[slot, :count].tolist(), slots.logprobs[slot, :count].tolist(), "stop" if stopped[slot] else "length"
            )
            finished.append((slots.requests[slot].number, rollout))
            self._leave(slot)
        return finished

    def _forbidden(self, logits: Tensor) -> Tensor | None:
        """[n, V] the end tokens of sequences that may not end yet."""
        n = len(logits)
        early = (self.slots.count[:n] < self.slots.least[:n]) & (self.slots.ends[:n] >= 0).any(axis=1)
        if not early.any():
            return None
        rows, columns = np.nonzero(early[:, None] & (self.slots.ends[:n] >= 0) & (self.slots.ends[:n] < logits.shape[1]))
        forbidden = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        forbidden[torch.from_numpy(rows), torch.from_numpy(self.slots.ends[rows, columns])] = True
        return forbidden

    def _stop_strings(self, n: int) -> np.ndarray:
        """[n] bool: the answer now holds one of its stop strings.

        A string of n bytes lies within the last n tokens; a few more are decoded since some tokenizers treat a first token apart.
        """
        found = np.zeros(n, dtype=bool)
        rows = [slot for slot in range(n) if self.slots.requests[slot].params.stop]
        if not rows:
            return found
        tails = []
        for slot in rows:
            count, stop = int(self.slots.count[slot]), self.slots.requests[slot].params.stop
            tails.append(self.slots.tokens[slot, max(0, count - max(len(s.encode()) for s in stop) - 8) : count].tolist())
        texts = self.tokenizer.batch_decode(tails, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for slot, text in zip(rows, texts, strict=True):
            found[slot] = any(stop in text for stop in self.slots.requests[slot].params.stop)
        return found


class _Plan:
    """What enters in a step beside the sequences under way."""

    def __init__(self, decoding: int, rows: list[int]) -> None:
        self.decoding = decoding  # slots whose next token is read
        self.rows = rows  # for every slot the row of logits that it samples from
        self.prompts: list[tuple[int, tuple[int, ...]]] = []  # computed whole, and for which slot
        self.twins: list[tuple[int, int]] = []  # (slot that computes the prompt, slot that gets a copy)
        self.lengths: dict[int, int] = {}  # prompt tokens of the slots that enter
