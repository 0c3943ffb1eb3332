"""Continuous batching and its cache: an answer is its request's own, and nothing is computed or kept that need not be."""

from __future__ import annotations

import heapq
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accord.engine.generate import PlainGenerator, SamplingParams
from accord.engine.generate import kv_cache as kv_cache_module
from accord.engine.generate import scheduler as scheduler_module
from accord.engine.generate.kv_cache import KeyValueCache
from accord.engine.generate.scheduler import Request, Scheduler
from accord.errors import ConfigError, OutOfMemoryError
from tests.engine.decoder_setup import generator_of, greedy_of, ids, ragged, tiny

GREEDY = SamplingParams(max_new_tokens=6, temperature=0)


@cache
def generator():
    """One for the tests that change nothing of it but `max_slots`."""
    return generator_of(tiny("llama"))


class Recorded:
    """A scheduler whose decoding steps are written down."""

    def __init__(self, slots: int, tokenizer=None) -> None:
        inner = generator()
        self.steps = []
        self.scheduler = Scheduler(inner.decoder, self.forward, inner.decoder.cache(), tokenizer, slots)
        self.inner = inner.decoder

    def forward(self, step, cache):
        self.steps.append(step)
        return self.inner.forward(step, cache)

    @property
    def prompt_tokens(self) -> list[int]:
        """Of each step."""
        return [len(step.ids) - step.decoding for step in self.steps]

    def run(self, *requests: Request) -> dict[int, list[int]]:
        """To the end: {number: tokens}."""
        for request in requests:
            self.scheduler.add(request)
        answers = {}
        generator().prepare()
        with torch.inference_mode():
            while self.scheduler.busy:
                answers |= {number: rollout.token_ids for number, rollout in self.scheduler.step()}
        return answers

    def step(self) -> dict[int, list[int]]:
        generator().prepare()
        with torch.inference_mode():
            return {number: rollout.token_ids for number, rollout in self.scheduler.step()}


def request(number: int, prompt: list[int], new: int = 6, **options) -> Request:
    return Request(number, tuple(prompt), SamplingParams(max_new_tokens=new, temperature=0, **options), number)


# ------------------------------------------------------------------------------------------------------------------- whose tokens are whose


@st.composite
def asked(draw):
    """(prompt, parameters, seed)"""
    prompt = ragged([draw(st.integers(1, 20))], seed=draw(st.integers(0, 1)))[0]  # some are equal
    most = draw(st.integers(1, 12))
    params = SamplingParams(
        max_new_tokens=most,
        min_new_tokens=draw(st.integers(0, most)),
        temperature=draw(st.sampled_from([0, 0.7, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 5])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        stop_token_ids=draw(st.sampled_from([(), (9,), tuple(range(4, 90)), (100, 600), tuple(range(1, 512, 5))])),
    )
    return prompt, params, draw(st.integers(0, 2**64 - 1))


@settings(max_examples=40, deadline=None, derandomize=True)  # the same examples always: rounding may decide between two tokens
@given(requests=st.lists(asked(), min_size=1, max_size=7), slots=st.integers(1, 8), order=st.randoms(use_true_random=False))
def test_an_answer_depends_on_its_prompt_parameters_and_seed_only(requests, slots, order):
    def run(numbers: list[int], slots: int) -> dict[int, tuple]:
        prompts, params, seeds = zip(*(requests[i] for i in numbers), strict=True)
        generator().max_slots = slots
        rollouts = generator().generate(prompts, params, seeds=seeds)
        return {i: (r.token_ids, r.finish_reason) for i, r in zip(numbers, rollouts, strict=True)}

    every = list(range(len(requests)))
    together = run(every, slots)
    shuffled = order.sample(every, len(every))
    assert run(shuffled, 3) == together
    assert {i: run([i], 1)[i] for i in every} == together
    plain = PlainGenerator(generator().module, None)
    for i, (prompt, params, seed) in enumerate(requests):
        [rollout] = plain.generate([prompt], params, seeds=[seed])
        assert (rollout.token_ids, rollout.finish_reason) == together[i]


def test_logprobs_of_a_request_are_its_own_too():
    prompts = ragged((3, 17, 1, 8))
    params = [
        SamplingParams(max_new_tokens=8, temperature=t, repetition_penalty=p) for t, p in ((0.5, 1), (0, 1.5), (1, 1), (2, 0.8))
    ]
    generator().max_slots = 3
    together = generator().generate(prompts, params, seeds=range(4))
    plain = PlainGenerator(generator().module, None)
    for i, rollout in enumerate(together):
        [alone] = plain.generate(prompts[i : i + 1], params[i], seeds=[i])
        torch.testing.assert_close(torch.tensor(rollout.logprobs), torch.tensor(alone.logprobs), atol=1e-4, rtol=0)


def test_more_end_tokens_of_a_late_request_do_not_end_the_early_ones():
    """Token 0 is an end token of nobody here, though it is what an empty table holds."""
    recorded = Recorded(slots=4)
    module = generator().module
    with torch.no_grad():
        kept = module.lm_head.weight.clone()
        module.lm_head.weight.zero_()  # all logits are 0, and the most likely token is the first
    try:
        recorded.scheduler.add(request(0, [5, 6], 8, stop_token_ids=(7,)))
        recorded.step()
        answers = recorded.run(request(1, [8, 9], 8, stop_token_ids=(7, 8, 9)), request(2, [10], 8))
    finally:
        with torch.no_grad():
            module.lm_head.weight.copy_(kept)
    assert answers == {i: [0] * 8 for i in range(3)}


def test_min_new_tokens_keeps_every_end_token_away():
    stop, prompts = tuple(range(0, 512, 2)), ragged((3, 17, 1, 8, 4))
    params = [SamplingParams(max_new_tokens=12, min_new_tokens=least, stop_token_ids=stop) for least in (0, 3, 5, 11, 12)]
    generator().max_slots = 4
    for p, rollout in zip(params, generator().generate(prompts, params, seeds=range(5)), strict=True):
        assert not set(rollout.token_ids[: p.min_new_tokens]) & set(stop)
        assert len(rollout.token_ids) >= min(12, p.min_new_tokens + 1)
        assert (rollout.finish_reason == "stop") == (rollout.token_ids[-1] in stop)


def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it(tiny_tokenizer):
    prompts = ragged((3, 17, 1, 8, 4, 6))
    sampler = generator_of(generator().module, tokenizer=tiny_tokenizer, max_slots=4)
    plain = PlainGenerator(generator().module, tiny_tokenizer)
    free = sampler.generate(prompts, SamplingParams(max_new_tokens=20), seeds=range(6))
    texts = [tiny_tokenizer.decode(rollout.token_ids) for rollout in free]
    row, stop = next((i, text[k : k + 3]) for i, text in enumerate(texts) for k in range(7, 15) if text[k : k + 3].isascii())
    for least in (0, 12):
        params = [SamplingParams(max_new_tokens=20, min_new_tokens=least, stop=(stop, "never this")) for _ in prompts]
        params[5] = SamplingParams(max_new_tokens=20)  # one without
        rollouts = sampler.generate(prompts, params, seeds=range(6))
        assert [r.token_ids for r in rollouts] == [r.token_ids for r in plain.generate(prompts, params, seeds=range(6))]
        assert len(rollouts[5].token_ids) == 20
        if not least:
            assert rollouts[row].finish_reason == "stop" and len(rollouts[row].token_ids) < 20
            assert stop in tiny_tokenizer.decode(rollouts[row].token_ids)
            assert stop not in tiny_tokenizer.decode(rollouts[row].token_ids[:-1])


def test_every_token_is_told_once_in_its_order_and_nothing_after_the_end():
    prompts, told = ragged((3, 17, 1, 8, 4, 6)), []
    params = SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(4, 60)))
    generator().max_slots = 3
    rollouts = generator().generate(prompts, params, seeds=range(6), on_token=lambda number, token: told.append((number, token)))
    for i, rollout in enumerate(rollouts):
        assert [token for number, token in told if number == i] == rollout.token_ids
    # Answers that are under way together are told together: no one's first token waits for another's last.
    firsts = {i: [number for number, _ in told].index(i) for i in range(6)}
    lasts = {i: len(told) - 1 - [number for number, _ in told][::-1].index(i) for i in range(6)}
    longest_first = sorted(range(6), key=lambda i: -len(prompts[i]))
    assert max(firsts[i] for i in longest_first[:3]) < min(lasts[i] for i in longest_first[:3] if len(rollouts[i].token_ids) > 1)


# ------------------------------------------------------------------------------------------------------------------ what is computed


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 40])
def test_steps_are_as_many_as_continuous_batching_needs(slots):
    """A slot is free in the step after its answer ended, and the next in the queue has it."""
    lengths = [3, 9, 1, 6, 2, 12, 4, 1, 8, 5, 7, 2]
    recorded = Recorded(slots)
    answers = recorded.run(*(request(i, [20 + i, 3], new) for i, new in enumerate(lengths)))
    assert [len(answers[i]) for i in range(len(lengths))] == lengths
    ends = [0] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    assert len(recorded.steps) == max(ends)
    # Rows: every token but an answer's first is one decoded row, and no row is padding.
    assert sum(step.decoding for step in recorded.steps) == sum(lengths) - len(lengths)
    assert sum(recorded.prompt_tokens) == 2 * len(lengths)


def test_requests_may_come_while_others_are_under_way():
    prompts = ragged((3, 17, 1, 8, 4, 6))
    expected = greedy_of(generator().module, prompts, 6)
    recorded = Recorded(slots=3)
    answers = {}
    for i, prompt in enumerate(prompts):
        recorded.scheduler.add(request(i, prompt))
        answers |= recorded.step()
    answers |= recorded.run()
    assert [answers[i] for i in range(6)] == expected
    assert recorded.step() == {} and not recorded.scheduler.busy  # nothing left to do


def test_a_cancelled_request_leaves_and_the_others_stay_as_they_are():
    prompts = ragged((3, 17, 1, 8, 4, 6))
    expected = greedy_of(generator().module, prompts, 6)
    recorded = Recorded(slots=4)
    penalised = Request(
        9, tuple(prompts[0]), replace(GREEDY, repetition_penalty=1.4), 9
    )  # tables of what was seen move with the slots
    alone = Recorded(slots=1).run(penalised)[9]
    for i, prompt in enumerate(prompts):
        recorded.scheduler.add(request(i, prompt))
    recorded.scheduler.add(penalised)
    answers = recorded.step()
    recorded.scheduler.cancel(4)  # waiting
    recorded.scheduler.cancel(1)  # under way, in a middle slot
    answers |= recorded.step()
    recorded.scheduler.cancel(0)
    recorded.scheduler.cancel(77)  # nobody
    answers |= recorded.run()
    assert answers == {2: expected[2], 3: expected[3], 5: expected[5], 9: alone}
    recorded.scheduler.add(request(1, prompts[1]))
    recorded.scheduler.cancel(1)
    assert not recorded.scheduler.busy


def test_a_prompt_is_computed_once_for_all_its_samples_also_for_those_that_come_later():
    prompt, other = ragged((17, 5))
    recorded = Recorded(slots=6)
    params = SamplingParams(max_new_tokens=8)
    samples = [Request(i, tuple(prompt), params, i) for i in range(7)]
    for sample in samples[:3]:
        recorded.scheduler.add(sample)
    answers = recorded.step() | recorded.step()
    answers |= recorded.run(request(7, other, 8), *samples[3:6])  # twins of one that is under way
    assert sum(recorded.prompt_tokens) == 17 + 5
    assert max(recorded.prompt_tokens) == 17
    answers |= recorded.run(samples[6])  # nobody has it any more
    assert sum(recorded.prompt_tokens) == 17 + 5 + 17
    assert len({tuple(answers[i]) for i in range(7)}) == 7
    [alone] = [Recorded(slots=1).run(sample) for sample in samples[4:5]]
    assert answers[4] == alone[4]


def test_one_token_prompts_have_twins_too():
    recorded = Recorded(slots=4)
    recorded.scheduler.add(request(0, [5]))
    recorded.step()
    answers = recorded.run(request(1, [5]), request(2, [5]))
    assert answers[0] == answers[1] == answers[2] == greedy_of(generator().module, [[5]], 6)[0]
    assert sum(recorded.prompt_tokens) == 1


def test_a_step_takes_no_more_prompt_tokens_than_its_share_and_a_longer_prompt_alone(monkeypatch):
    monkeypatch.setattr(scheduler_module, "PREFILL_TOKENS", 20)
    prompts = ragged((9, 8, 7, 50, 3, 20, 1, 1))
    recorded = Recorded(slots=8)
    answers = recorded.run(*(request(i, prompt) for i, prompt in enumerate(prompts)))
    assert [answers[i] for i in range(8)] == greedy_of(generator().module, prompts, 6)
    assert [tokens for tokens in recorded.prompt_tokens if tokens] == [17, 7, 50, 3, 20, 2]
    assert sum(recorded.prompt_tokens) == sum(map(len, prompts))


def test_a_prompt_longer_than_a_steps_share_is_answered():
    module = tiny("mistral", max_position_embeddings=4096)
    [long] = ragged((scheduler_module.PREFILL_TOKENS + 60,))
    prompts = [long[:7], long, long[:90]]
    assert ids(generator_of(module), prompts, 5) == greedy_of(module, prompts, 5)


# --------------------------------------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("family,layers,heads,dim", [("llama", 2, 2, 8), ("gpt2", 2, 4, 8), ("gemma3_text", 2, 2, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_takes_what_the_formula_says(family, layers, heads, dim, dtype):
    cache = KeyValueCache(generator_of(tiny(family)).decoder.spec, dtype, torch.device("cpu"))
    assert cache.nbytes == 0
    for slots, tokens, capacity in ((3, 1, 64), (3, 64, 64), (5, 65, 128), (2, 300, 320)):
        cache.reserve(slots, tokens)
        assert cache.capacity == max(capacity, 64)
        assert cache.nbytes == 2 * layers * cache.slots * heads * capacity * dim * dtype.itemsize
        assert cache.nbytes == sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
        assert cache.slots >= slots
    cache.release()
    assert cache.nbytes == 0 and not cache.keys and not cache.values


def test_growing_keeps_what_is_there():
    cache = KeyValueCache(generator().decoder.spec, torch.float32, torch.device("cpu"))
    cache.reserve(2, 10)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    cache.reserve(2, 65)
    cache.reserve(7, 20)
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        assert new.shape == (7, 2, 128, 8)
        assert torch.equal(new[:2, :, :64], old) and not new[2:].any() and not new[:, :, 64:].any()


def test_an_answer_that_outgrows_its_block_is_the_same():
    prompts = ragged((60, 5, 120))
    recorded = Recorded(slots=3)
    answers = recorded.run(*(request(i, prompt, 70) for i, prompt in enumerate(prompts)))
    assert [answers[i] for i in range(3)] == greedy_of(generator().module, prompts, 70)
    assert recorded.scheduler.cache.capacity % 64 == 0 and recorded.scheduler.cache.capacity >= 189


def test_the_cache_of_one_call_is_not_multiplied_by_the_next():
    """Many short answers, then a long one, then many short ones: never as many slots as the one of the length of the other."""
    sampler = generator_of(tiny("llama", max_position_embeddings=4096))
    one_token = sampler.decoder.spec.cache_bytes(1, 1, torch.float32)
    two = SamplingParams(max_new_tokens=2, temperature=0)
    for _ in range(2):
        sampler.generate([[5, 6, i] for i in range(7, 107)], two)
        assert sampler.cache.nbytes == 100 * 64 * one_token
        sampler.generate([[5] * 1000], two)
        assert sampler.cache.nbytes == 1024 * one_token
    held = sampler.cache.keys[0]
    sampler.generate([[5] * 900], two)
    assert sampler.cache.keys[0] is held  # what is large enough is used again


RELEASE = """
import gc, re, types, torch
from accord.engine.generate.kv_cache import KeyValueCache
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
spec = types.SimpleNamespace(layers=[None] * 24, key_value_heads=4, head_dim=64)
spec.cache_bytes = lambda slots, tokens, dtype: 2 * 24 * slots * 4 * tokens * 64 * dtype.itemsize
cache = KeyValueCache(spec, torch.float32, torch.device("cpu"))
for tokens in (64, 128, 192, 256):  # as it grows in use
    cache.reserve(24, tokens)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(1)
taken, before = cache.nbytes, resident()
cache.release()
print(taken, before - resident())
"""


def test_release_gives_the_memory_back_to_the_system():
    out = subprocess.run([sys.executable, "-c", RELEASE], capture_output=True, text=True, check=True).stdout
    taken, returned = map(int, out.split())
    assert taken == 2 * 24 * 24 * 4 * 256 * 64 * 4 > 280 * 2**20
    assert returned >= 0.8 * taken


# ------------------------------------------------------------------------------------------------------------------------ too large


class ScarceMemory:
    """torch for kv_cache: `zeros` fails as the allocator does, so many times."""

    def __init__(
        self, failures: float, most: int = 10**9, text: str = "DefaultCPUAllocator: can't allocate memory: you tried"
    ) -> None:
        self.failures, self.most, self.text = failures, most, text
        self.calls = 0

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, *shape, **options):
        made = torch.zeros(*shape, **options)
        self.calls += 1
        if made.nbytes and self.failures > 0 and (self.calls > 3 or made.nbytes > self.most):
            self.failures -= 1
            raise RuntimeError(self.text)
        return made


def test_a_cache_that_does_not_fit_is_tried_again_once(monkeypatch):
    scarce = ScarceMemory(failures=1)
    monkeypatch.setattr(kv_cache_module, "torch", scarce)
    sampler = generator_of(tiny("llama"))
    prompts = ragged((3, 17, 8))
    assert ids(sampler, prompts, 6) == greedy_of(sampler.module, prompts, 6)
    assert scarce.failures == 0


def test_a_cache_that_never_fits_is_refused_with_what_would(monkeypatch):
    sampler = generator_of(tiny("llama"))
    kept = ids(sampler, ragged((3,)), 6)
    scarce = ScarceMemory(failures=float("inf"), most=8 * 2 * 64 * 8 * 4)
    scarce.calls = -(10**9)
    monkeypatch.setattr(kv_cache_module, "torch", scarce)
    with pytest.raises(
        OutOfMemoryError,
        match=r"20 sequences of 64 tokens needs 0.00 GiB.* MiB a sequence.*Lower engine.max_slots \(it is 20 now\)",
    ):
        ids(sampler, [[5, i] for i in range(10, 30)], 6)
    assert ids(sampler, ragged((3,)), 6) == kept  # what fits is answered afterwards
    assert sampler.cache.nbytes == sum(tensor.nbytes for tensor in (*sampler.cache.keys, *sampler.cache.values))


def test_a_cache_that_was_interrupted_while_it_grew_is_usable(monkeypatch):
    sampler = generator()
    wanted = ids(sampler, ragged())
    zeros, made = torch.zeros, []

    def interrupted(*shape, **options):
        made.append(shape)
        if len(made) == 3:
            raise KeyboardInterrupt
        return zeros(*shape, **options)

    with monkeypatch.context() as patched:
        patched.setattr(kv_cache_module.torch, "zeros", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sampler.cache.reserve(9, 200)
    assert sampler.cache.nbytes == 0 and ids(sampler, ragged()) == wanted


def test_another_error_of_the_allocator_is_not_hidden(monkeypatch):
    monkeypatch.setattr(kv_cache_module, "torch", ScarceMemory(failures=1, text="something else"))
    cache = KeyValueCache(generator().decoder.spec, torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="something else"):
        cache.reserve(4, 4)


def test_prompt_and_answer_beyond_a_limit_are_refused_with_the_cure():
    sampler = generator_of(generator().module)
    with pytest.raises(ConfigError, match=r"the model has 256. Lower generate.max_new_tokens to 156"):
        sampler.generate([[5] * 100], SamplingParams(max_new_tokens=157))
    with pytest.raises(ConfigError, match="Shorten the prompt"):
        sampler.generate([[5] * 256], SamplingParams(max_new_tokens=1))
    assert sampler.context_length == 256
    limited = generator_of(generator().module, max_tokens=50)
    assert limited.context_length == 50
    with pytest.raises(
        ConfigError, match=r"engine.max_out_tokens is 50. Lower generate.max_new_tokens to 10, or raise engine.max_out_tokens"
    ):
        limited.generate([[5], [5] * 40], SamplingParams(max_new_tokens=11))
    rollout = limited.generate([[5] * 40], SamplingParams(max_new_tokens=10, temperature=0))[0]
    assert rollout.token_ids == greedy_of(limited.module, [[5] * 40], 10)[0]


def test_an_answer_may_fill_the_context_to_the_last_token():
    sampler = generator_of(tiny("opt", max_position_embeddings=70))
    assert ids(sampler, [[5] * 10], 60) == greedy_of(sampler.module, [[5] * 10], 60)


def test_no_prompts_give_no_answers():
    assert generator().generate([], GREEDY) == []
