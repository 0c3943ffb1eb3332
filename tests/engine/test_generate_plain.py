"""The batched decode loop against the model's own forward and against transformers' generate."""

from __future__ import annotations

import pytest
import torch

from accord.engine.generate import PlainGenerator, SamplingParams
from accord.errors import ConfigError, DataError

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "opt", "gpt_neox", "olmo2", "bloom", "falcon"]
GREEDY = SamplingParams(max_new_tokens=40, temperature=0)


def some_prompts(count: int = 13, longest: int = 30, seed: int = 3) -> list[list[int]]:
    """Prompts of very different lengths, two of them equal."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=draw).tolist()
    prompts = [torch.randint(4, 512, (length,), generator=draw).tolist() for length in lengths]
    prompts[4] = list(prompts[2])
    return prompts


def transformers_greedy(module, prompt: list[int], stop: tuple[int, ...], max_new_tokens: int = 40, **options) -> list[int]:
    ids = torch.tensor([prompt])
    out = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop) or None,
        pad_token_id=3,
        **options,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_token_for_token_while_rows_end_and_leave(tiny_model, family):
    module = tiny_model(family)
    generator = PlainGenerator(module, None, max_batch=9)
    prompts = some_prompts()
    free = generator.generate(prompts, GREEDY)
    stop = tuple(rollout.token_ids[6] for rollout in free[:4])  # makes some rows end early and others not
    rollouts = generator.generate(prompts, SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=stop))
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        assert rollout.token_ids == transformers_greedy(module, prompt, stop)
        assert rollout.finish_reason == ("stop" if rollout.token_ids[-1] in stop else "length")
        assert rollout.truncated == (rollout.finish_reason == "length")
    assert len({len(rollout.token_ids) for rollout in rollouts}) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_a_forward_over_the_whole_at_that_temperature(tiny_model, family):
    module = tiny_model(family)
    prompts = some_prompts()
    params = SamplingParams(max_new_tokens=12, temperature=0.7, top_k=20, top_p=0.9, seed=5)  # truncation must not show
    for prompt, rollout in zip(prompts, PlainGenerator(module, None).generate(prompts, params), strict=True):
        with torch.no_grad():
            logits = module(torch.tensor([prompt + rollout.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits.double() / 0.7, -1).gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.logprobs).double(), expected, atol=1e-4, rtol=0)


def test_a_recurrent_family_without_plain_keys_and_values_is_generated_through_its_own_cache():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512, intermediate_size=64,
        layer_types=["conv", "full_attention"], initializer_range=0.06, max_position_embeddings=256,
    )  # fmt: skip
    module = Lfm2ForCausalLM(config).eval()
    generator = PlainGenerator(module, None)
    assert not generator._slots
    prompts = [prompt[:5] for prompt in some_prompts() if len(prompt) >= 5]
    stop = tuple(rollout.token_ids[3] for rollout in generator.generate(prompts, GREEDY)[:2])
    rollouts = generator.generate(prompts, SamplingParams(max_new_tokens=20, temperature=0, stop_token_ids=stop))
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        assert rollout.token_ids == transformers_greedy(module, prompt, stop, 20)


def test_a_row_depends_on_its_prompt_and_seed_and_not_on_its_neighbours(tiny_llama):
    prompts = some_prompts()
    params = SamplingParams(max_new_tokens=20, stop_token_ids=tuple(range(40)))
    together = PlainGenerator(tiny_llama, None).generate(prompts, params, seeds=range(len(prompts)))
    in_threes = PlainGenerator(tiny_llama, None, max_batch=3).generate(prompts, params, seeds=range(len(prompts)))
    alone = [PlainGenerator(tiny_llama, None).generate([p], params, seeds=[i])[0] for i, p in enumerate(prompts)]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone] == [r.token_ids for r in in_threes]


def test_samples_of_one_prompt_differ_and_the_same_seed_repeats_them(tiny_llama):
    generator = PlainGenerator(tiny_llama, None)
    params = SamplingParams(max_new_tokens=20, seed=7)
    first = [r.token_ids for r in generator.generate([[5, 6, 7]] * 4, params)]
    assert len({tuple(ids) for ids in first}) == 4
    assert first == [r.token_ids for r in generator.generate([[5, 6, 7]] * 4, params)]
    assert first != [r.token_ids for r in generator.generate([[5, 6, 7]] * 4, SamplingParams(max_new_tokens=20, seed=8))]


def test_without_a_seed_torchs_generator_decides(tiny_llama):
    generator = PlainGenerator(tiny_llama, None)

    def sample() -> list[int]:
        return generator.generate([[5, 6, 7]], SamplingParams(max_new_tokens=20))[0].token_ids

    torch.manual_seed(1)
    first, second = sample(), sample()
    torch.manual_seed(1)
    assert first == sample() and first != second


def test_repeated_prompts_are_prefilled_once(tiny_llama):
    seen = []
    handle = tiny_llama.model.embed_tokens.register_forward_hook(lambda _m, args, _o: seen.append(tuple(args[0].shape)))
    PlainGenerator(tiny_llama, None).generate([[5, 6, 7]] * 8 + [[5, 6, 8]] * 8, SamplingParams(max_new_tokens=2, seed=1))
    handle.remove()
    assert seen == [(2, 3), (16, 1)]


def test_finished_rows_leave_the_batch(tiny_llama):
    prompts = some_prompts(16)
    generator = PlainGenerator(tiny_llama, None)
    free = generator.generate(prompts, GREEDY)
    stop = tuple({rollout.token_ids[2] for rollout in free[:12]})
    rows = []
    handle = tiny_llama.model.embed_tokens.register_forward_hook(lambda _m, args, _o: rows.append(args[0].shape[0]))
    rollouts = generator.generate(prompts, SamplingParams(max_new_tokens=40, temperature=0, stop_token_ids=stop))
    handle.remove()
    assert sum(rows[1:]) <= 1.2 * sum(len(rollout.token_ids) for rollout in rollouts) + 16


def test_min_new_tokens_keeps_the_end_token_away(tiny_llama):
    prompts = some_prompts()
    stop = tuple(range(256))  # half of the vocabulary ends the answer
    params = SamplingParams(max_new_tokens=30, min_new_tokens=5, seed=2, stop_token_ids=stop)
    for rollout in PlainGenerator(tiny_llama, None).generate(prompts, params):
        assert len(rollout.token_ids) > 5
        assert not set(rollout.token_ids[:5]) & set(stop)


def test_repetition_penalty_equals_transformers(tiny_llama):
    prompts = some_prompts()
    rollouts = PlainGenerator(tiny_llama, None).generate(
        prompts, SamplingParams(max_new_tokens=30, temperature=0, repetition_penalty=1.7)
    )
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        assert rollout.token_ids == transformers_greedy(tiny_llama, prompt, (), 30, repetition_penalty=1.7)


def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it(tiny_llama, tiny_tokenizer):
    generator = PlainGenerator(tiny_llama, tiny_tokenizer)
    prompts = some_prompts()
    free = generator.generate(prompts, SamplingParams(max_new_tokens=40, seed=1))
    texts = [tiny_tokenizer.decode(rollout.token_ids) for rollout in free]
    row, stop = next((i, text[k : k + 3]) for i, text in enumerate(texts) for k in range(7, 20) if text[k : k + 3].isascii())
    rollouts = generator.generate(prompts, SamplingParams(max_new_tokens=40, seed=1, stop=(stop,)))
    assert rollouts[row].finish_reason == "stop" and len(rollouts[row].token_ids) < 40
    for before, after in zip(free, rollouts, strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        if after.finish_reason == "stop":
            assert stop in tiny_tokenizer.decode(after.token_ids) and stop not in tiny_tokenizer.decode(after.token_ids[:-1])


def test_streaming_tells_every_token_of_every_row_and_nothing_after_its_end(tiny_llama):
    prompts = some_prompts()
    told: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    params = SamplingParams(max_new_tokens=20, seed=4, stop_token_ids=tuple(range(60)))
    rollouts = PlainGenerator(tiny_llama, None, max_batch=5).generate(
        prompts, params, on_token=lambda row, token: told[row].append(token)
    )
    assert [told[i] for i in range(len(prompts))] == [rollout.token_ids for rollout in rollouts]


def test_generation_follows_the_weights(tiny_llama):
    generator = PlainGenerator(tiny_llama, None)
    before = generator.generate([[5, 6, 7]], GREEDY)[0].token_ids
    with torch.no_grad():
        for parameter in tiny_llama.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    after = generator.generate([[5, 6, 7]], GREEDY)[0].token_ids
    assert after != before
    assert after == transformers_greedy(tiny_llama, [5, 6, 7], ())


def test_the_module_is_given_back_as_it_was(tiny_llama):
    tiny_llama.train()
    tiny_llama.model.layers[0].eval()
    tiny_llama.gradient_checkpointing_enable()
    modes = [part.training for part in tiny_llama.modules()]
    implementation = tiny_llama.config._attn_implementation
    with pytest.raises(ConfigError):
        PlainGenerator(tiny_llama, None).generate([[5] * 200], SamplingParams(max_new_tokens=100))
    rollout = PlainGenerator(tiny_llama, None).generate([[5, 6, 7]], GREEDY)[0]
    assert [part.training for part in tiny_llama.modules()] == modes
    assert tiny_llama.config._attn_implementation == implementation
    assert rollout.token_ids == transformers_greedy(tiny_llama.eval(), [5, 6, 7], ())
    assert not any(buffer.is_inference() for buffer in tiny_llama.buffers())


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "opt"])
def test_a_module_switched_to_segment_attention_answers_the_same(tiny_model, family):
    from accord.models.packed import ATTENTION_NAME

    module = tiny_model(family)
    prompts = some_prompts()
    expected = [r.token_ids for r in PlainGenerator(module, None).generate(prompts, GREEDY)]
    module.set_attn_implementation(ATTENTION_NAME)
    assert [r.token_ids for r in PlainGenerator(module, None).generate(prompts, GREEDY)] == expected
    assert module.config._attn_implementation == ATTENTION_NAME


def test_lora_is_applied_while_generating(tiny_llama):
    import peft

    module = peft.get_peft_model(tiny_llama, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    module.eval()
    rollout = PlainGenerator(module, None).generate([[5, 6, 7]], GREEDY)[0]
    assert rollout.token_ids == transformers_greedy(module, [5, 6, 7], ())
    with module.disable_adapter():
        assert PlainGenerator(module, None).generate([[5, 6, 7]], GREEDY)[0].token_ids != rollout.token_ids


def test_prompt_and_answer_beyond_the_context_are_refused_with_the_cure(tiny_llama):
    with pytest.raises(ConfigError, match=r"Lower generate.max_new_tokens to 156"):
        PlainGenerator(tiny_llama, None).generate([[5] * 100], SamplingParams(max_new_tokens=157))
    with pytest.raises(ConfigError, match="Shorten the prompt"):
        PlainGenerator(tiny_llama, None).generate([[5] * 256], SamplingParams(max_new_tokens=1))
    assert len(PlainGenerator(tiny_llama, None).generate([[5] * 100], SamplingParams(max_new_tokens=156))[0].token_ids) == 156


def test_an_empty_prompt_is_refused_and_no_prompts_give_no_answers(tiny_llama):
    with pytest.raises(DataError, match="prompt 1 is empty"):
        PlainGenerator(tiny_llama, None).generate([[5], []], GREEDY)
    assert PlainGenerator(tiny_llama, None).generate([], GREEDY) == []


@pytest.mark.real_model
def test_smollm2_greedy_equals_transformers(smol_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(smol_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(smol_path)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in ("What is the capital of France?", "Count to three.")
    ]
    stop = (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    params = SamplingParams(max_new_tokens=24, temperature=0, stop_token_ids=stop)
    for prompt, rollout in zip(prompts, PlainGenerator(module, tokenizer).generate(prompts, params), strict=True):
        assert rollout.token_ids == transformers_greedy(module, prompt, stop, 24)
