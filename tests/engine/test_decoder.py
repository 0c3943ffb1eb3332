"""The lean decoder against transformers' own generate and the module's own forward, for every family it knows."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model

from accord.config import Lora
from accord.engine.generate import DecoderGenerator, PlainGenerator, SamplingParams
from accord.engine.generate import decoding as decoding_module
from accord.engine.generate.native import kernels
from accord.engine.generate.spec import decoder_spec
from accord.errors import NonFiniteError
from accord.models.lora import add_lora, as_reference
from accord.models.packed import ATTENTION_NAME
from tests.engine.decoder_setup import (
    PLACEMENTS,
    SPECS,
    generator_of,
    greedy_of,
    ids,
    known,
    logprobs_of,
    ragged,
    tiny,
)


@pytest.fixture(params=["0", "1"], ids=["torch", "native"])
def native(request, monkeypatch):
    """Once without the compiled kernels and once with them."""
    monkeypatch.setenv("ACCORD_NATIVE", request.param)
    if request.param == "1" and kernels(torch.float32, torch.device("cpu"), 8, 2) is None:
        pytest.skip("no C compiler")
    return request.param == "1"


# ------------------------------------------------------------------------------------------------------------------- equal, by family


@pytest.mark.parametrize("family", SPECS)
def test_greedy_equals_transformers_token_for_token_with_any_number_of_slots(family, native):
    module, answers = known(family)
    generator = generator_of(module)
    assert (generator.decoder.native is not None) == native
    expected = answers.expected()
    for slots, count in ((1, 3), (3, 9), (8, 30), (64, 70)):
        generator.max_slots = slots
        rollouts = generator.generate(answers.prompts[:count], answers.params()[:count])
        assert [rollout.token_ids for rollout in rollouts] == expected[:count]
        assert all(rollout.finish_reason == "length" for rollout in rollouts)


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_greedy_is_the_same_in_every_placement_while_rows_end_and_leave(family, placement, native):
    module, answers = known(family)
    first = answers.answers[:14]
    every = sorted({token for answer in first for token in answer})
    stop = (min(every, key=lambda token: abs(sum(token in answer for answer in first) - 7)),)  # ends about half of them
    generator = generator_of(module, placement, max_slots=6)
    prompts, params = answers.prompts[:14], answers.params(stop)[:14]
    prompts, params = prompts + prompts[:5] * 2, params + params[:5] * 2  # several samples of one prompt
    expected = answers.expected(stop)[:14]
    rollouts = generator.generate(prompts, params)
    assert [rollout.token_ids for rollout in rollouts] == expected + expected[:5] * 2
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert rollout.truncated == (rollout.token_ids[-1] not in stop)


@pytest.mark.parametrize("family", SPECS)
def test_logprobs_are_those_of_a_forward_over_the_whole_at_that_temperature(family, native):
    module, prompts = known(family)[0], ragged((3, 17, 1, 8)) * 2
    params = SamplingParams(max_new_tokens=10, temperature=0.7, top_k=20, top_p=0.9, seed=5)  # truncation must not show
    rollouts = generator_of(module, max_slots=5).generate(prompts, params)
    assert len({tuple(rollout.token_ids) for rollout in rollouts}) == 8
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        expected = logprobs_of(module, prompt, rollout.token_ids, 0.7)
        torch.testing.assert_close(torch.tensor(rollout.logprobs).double(), expected, atol=1e-4, rtol=0)


# --------------------------------------------------------------------------------------------------------------------- weights that move


def train_one_step(module, kind: str, lr: float = 0.02) -> None:
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=lr, **{kind: True})
    batch = torch.tensor(ragged((24, 24)))
    module(batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize(
    "family,placement", [("llama", "packed"), ("gpt2", "copied"), ("gemma3_text", "packed"), ("opt", "shared")]
)
def test_after_an_optimizer_step_the_answers_are_those_of_the_new_weights(family, placement, kind):
    module, prompts = tiny(family), ragged((4, 11))
    generator = generator_of(module, placement)
    params = SamplingParams(max_new_tokens=12, temperature=0)
    before = generator.generate(prompts, params)
    for _ in range(2):
        train_one_step(module, kind)
        after = generator.generate(prompts, params)
        assert [rollout.token_ids for rollout in after] == greedy_of(module, prompts, 12)
        assert all(new.logprobs != old.logprobs for new, old in zip(after, before, strict=True))
        before = after


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_after_a_change_that_leaves_no_trace_refresh_brings_the_new_weights(placement):
    module, prompts = tiny("qwen2"), ragged((4, 11))
    generator = generator_of(module, placement)
    before = ids(generator, prompts, 12)
    draw = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=draw), alpha=0.1)
    generator.refresh()
    assert ids(generator, prompts, 12) == greedy_of(module, prompts, 12) != before


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_every_parameter_reaches_the_answers(family):
    module, prompts = tiny(family), ragged((6,))
    generator = generator_of(module)
    rollout = generator.generate(prompts, SamplingParams(max_new_tokens=4, temperature=0))[0]
    for name, parameter in module.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            # Not all alike: of a key's bias what is the same for all keys changes nothing.
            parameter.mul_(torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter))
        changed = generator.generate(prompts, SamplingParams(max_new_tokens=4, temperature=0))[0]
        assert changed.logprobs != rollout.logprobs, name
        with torch.no_grad():
            parameter.copy_(kept)
    assert generator.generate(prompts, SamplingParams(max_new_tokens=4, temperature=0))[0] == rollout


def test_the_training_weights_can_be_trained_after_and_while_they_are_sampled():
    module = tiny("llama")
    generator = generator_of(module)
    ids(generator, ragged((5,)), 3)
    tensors = [*module.parameters(), *module.buffers()]
    assert not any(tensor.is_inference() for tensor in tensors)
    batch = torch.tensor(ragged((10,)))
    loss = module(batch, labels=batch).loss
    ids(generator, ragged((5,)), 3)  # between a forward and its backward
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


# ----------------------------------------------------------------------------------------------------------------------------------- LoRA


def with_adapter(family: str, seed: int = 5, **options):
    """A tiny model under an adapter that is not the identity."""
    module = add_lora(tiny(family), Lora(rank=4, **options), seed=seed)
    shake_adapter(module, seed)
    return module.eval()


def shake_adapter(module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name and parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.1)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox", "gemma3_text"])
def test_an_adapter_is_applied_and_switched_off_and_no_weight_is_touched(family, placement):
    module, prompts = with_adapter(family), ragged((4, 11))
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    generator = generator_of(module, placement)
    adapted, base = greedy_of(module, prompts, 12), greedy_of(tiny(family), prompts, 12)
    assert adapted != base
    assert ids(generator, prompts, 12) == adapted
    with as_reference(module):
        assert ids(generator, prompts, 12) == base
    with module.disable_adapter():
        assert ids(generator, prompts, 12) == base
    assert ids(generator, prompts, 12) == adapted
    state = module.state_dict()
    assert state.keys() == kept.keys() and all(torch.equal(state[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_trained_adapter_is_followed_without_a_call(placement):
    module, prompts = with_adapter("llama"), ragged((4, 11))
    generator = generator_of(module, placement)
    before = ids(generator, prompts, 12)
    train_one_step(module, "fused", lr=0.1)
    assert ids(generator, prompts, 12) == greedy_of(module, prompts, 12) != before


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_reference_of_a_continued_adapter_is_the_adapter_as_it_was(tmp_path, placement):
    first, prompts = with_adapter("llama"), ragged((4, 11))
    first.save_pretrained(str(tmp_path))
    at_start = greedy_of(first, prompts, 12)
    module = add_lora(tiny("llama"), Lora(path=str(tmp_path)), seed=0).eval()
    generator = generator_of(module, placement)
    assert ids(generator, prompts, 12) == at_start
    shake_adapter(module, seed=9)
    now = greedy_of(module, prompts, 12)
    assert ids(generator, prompts, 12) == now != at_start
    with as_reference(module):
        assert ids(generator, prompts, 12) == at_start
    assert ids(generator, prompts, 12) == now


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_adapter_that_is_merged_into_the_weights_or_scaled_counts_once(placement):
    module, prompts = with_adapter("llama"), ragged((4, 11))
    generator = generator_of(module, placement)
    adapted = ids(generator, prompts, 12)
    module.merge_adapter()
    assert ids(generator, prompts, 12) == adapted
    module.unmerge_adapter()
    assert ids(generator, prompts, 12) == adapted
    for part in module.modules():
        if hasattr(part, "scale_layer"):
            part.scale_layer(0.3)
    assert ids(generator, prompts, 12) == greedy_of(module, prompts, 12) != adapted


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_adapters_of_another_kind_are_right_too(options):
    import peft

    module = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **options)).eval()
    generator, prompts = DecoderGenerator(module, None), ragged((4, 11))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))), alpha=0.1)
    assert ids(generator, prompts, 12) == greedy_of(module, prompts, 12)


def test_a_float32_decoder_does_not_round_the_adapter_to_a_bfloat16_base():
    module = with_adapter("llama")
    for name, parameter in module.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    prompt = ragged((9,))
    rollout = generator_of(module, "packed", dtype="float32").generate(prompt, SamplingParams(max_new_tokens=6, temperature=0))[0]
    wide = with_adapter("llama")  # the same with its base rounded once and then wide
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            parameter.copy_(module.get_parameter(name))
    expected = logprobs_of(wide, prompt[0], rollout.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(rollout.logprobs).double(), expected, atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------------------------------------------- variants

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 500.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}

VARIANTS = [
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {"rotary_pct": 1.0, "tie_word_embeddings": True}),
    ("gpt_neox", {"attention_bias": False, "hidden_act": "relu"}),
    ("gpt2", {"tie_word_embeddings": True, "activation_function": "gelu"}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}),
    ("opt", {"enable_bias": False, "tie_word_embeddings": True}),
    ("opt", {"layer_norm_elementwise_affine": False}),
    ("opt", {"_remove_final_layer_norm": True}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 12}),
    ("llama", {"head_dim": 64, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 0.5}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}),
    ("llama", {"rope_parameters": YARN}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ("qwen3", {"attention_bias": True, "num_key_value_heads": 1, "rope_parameters": YARN}),
    ("mistral", {"sliding_window": 3}),
    ("mistral", {"sliding_window": 200}),
    ("mistral", {"sliding_window": None}),
    ("gemma2", {"sliding_window": 200, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "num_key_value_heads": 1}),
    ("gemma3_text", {"sliding_window": 200, "tie_word_embeddings": True}),
    ("gemma3_text", {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                     "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                                         "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0}}}),
    ("olmo2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
]  # fmt: skip


@pytest.mark.parametrize("family,changes", VARIANTS, ids=[f"{family}-{'-'.join(changes)}" for family, changes in VARIANTS])
def test_unusual_members_of_a_family_are_computed_as_the_module_does(family, changes, native):
    module, prompts = tiny(family, **changes), ragged((2, 30, 7))
    generator = generator_of(module, max_slots=2)
    rollouts = generator.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0))
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        logprobs = logprobs_of(module, prompt, rollout.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(rollout.logprobs).double(), logprobs, atol=1e-4, rtol=0)
    assert rollouts[1].token_ids == greedy_of(module, prompts[1:2], 12)[0]


@pytest.mark.parametrize(
    "family,changes,why",
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}}, "dynamic position encoding"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0, "rope_theta": 500.0, "short_factor": [1.0] * 4,
                                       "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}}, "longrope position encoding"),
        ("opt", {"word_embed_proj_dim": 16}, "projects its embeddings"),
        ("opt", {"do_layer_norm_before": False}, "normalises after"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention"),
        ("qwen3_moe", {}, "qwen3_moe is not among the families"),
        ("bloom", {}, "bloom is not among the families"),
        ("falcon", {}, "falcon is not among the families"),
    ],
)  # fmt: skip
def test_what_has_no_spec_is_generated_by_its_own_forward_with_one_warning(family, changes, why, caplog):
    module, prompts = tiny(family, **changes), ragged((2, 14))
    generator = DecoderGenerator(module, None)
    assert generator.decoder is None and why in generator.reason
    for _ in range(2):
        assert ids(generator, prompts, 8) == greedy_of(module, prompts, 8)
    warnings = [record for record in caplog.records if record.name.startswith("accord")]
    assert len(warnings) == 1 and why in warnings[0].getMessage()
    assert generator.nbytes == 0
    for call in (generator.prepare, generator.refresh, generator.release):
        call()


@pytest.mark.parametrize("field,change", [
    ("scaling", lambda layer: layer.scaling * 1.2),
    ("window", lambda layer: 5),
    ("activation", lambda layer: "gelu"),
    ("qkv", lambda layer: (layer.qkv[0], layer.qkv[2], layer.qkv[1])),
    ("mlp_norm", lambda layer: layer.attention_norm),
])  # fmt: skip
def test_a_spec_that_does_not_fit_is_found_out(field, change, monkeypatch, caplog):
    def wrong(module):
        spec = decoder_spec(module)
        layers = tuple(dataclasses.replace(layer, **{field: change(layer)}) for layer in spec.layers)
        return dataclasses.replace(spec, layers=layers)

    module, prompts = tiny("llama"), ragged((2, 14))
    monkeypatch.setattr(decoding_module, "decoder_spec", wrong)
    generator = DecoderGenerator(module, None)
    assert generator.decoder is None and "differ from the model's own" in generator.reason
    assert len([record for record in caplog.records if record.name.startswith("accord")]) == 1
    assert ids(generator, prompts, 8) == greedy_of(module, prompts, 8)


# ------------------------------------------------------------------------------------------------------------- precision, memory, modes


def linear_weights(module) -> int:
    """Numbers in the linear layers and the head."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, torch.nn.Linear))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox", "olmo2"])
def test_a_bfloat16_decoder_of_a_float32_model_is_near_it_and_not_the_same(family, native):
    module, prompts = known(family)[0], ragged((3, 17, 8))
    generator = generator_of(module, dtype="bfloat16")
    rollouts = generator.generate(prompts, SamplingParams(max_new_tokens=10, seed=5))
    differences = torch.cat([
        (torch.tensor(rollout.logprobs).double() - logprobs_of(module, prompt, rollout.token_ids, 1.0)).abs()
        for prompt, rollout in zip(prompts, rollouts, strict=True)
    ])  # fmt: skip
    assert 0 < differences.max() < 0.2 and differences.mean() < 0.05
    assert generator.decoder.copied_bytes == 2 * linear_weights(module)


def test_copies_are_counted_while_they_are_there():
    module = tiny("llama")
    generator = generator_of(module, "copied")
    assert generator.nbytes == 0
    ids(generator, ragged((5,)), 3)
    copies = 4 * linear_weights(module)
    assert generator.decoder.copied_bytes == copies
    assert generator.nbytes == copies + generator.cache.nbytes > copies
    generator.refresh()  # out of date, and still there
    assert generator.decoder.copied_bytes == copies
    generator.release()
    assert generator.nbytes == generator.decoder.copied_bytes == 0
    shared = generator_of(module, "shared")
    ids(shared, ragged((5,)), 3)
    assert shared.decoder.copied_bytes == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager", ATTENTION_NAME])
def test_the_module_is_given_back_as_it_was(attention):
    module = tiny("llama")
    module.set_attn_implementation(attention)
    module.train()
    module.model.layers[0].eval()
    modes = [part.training for part in module.modules()]
    generator = generator_of(module)
    ids(generator, ragged((5, 9)), 4)
    assert [part.training for part in module.modules()] == modes
    assert module.config._attn_implementation == attention
    with pytest.raises(RuntimeError, match="in the middle"):
        generator.generate(ragged((5,)), SamplingParams(max_new_tokens=4), on_token=lambda *_: fail())
    assert [part.training for part in module.modules()] == modes


def fail() -> None:
    raise RuntimeError("in the middle")


def test_dropout_is_off_while_a_module_in_training_is_sampled():
    module = add_lora(tiny("llama"), Lora(rank=4, dropout=0.5), seed=0)
    shake_adapter(module, 5)
    prompts = ragged((4, 11))
    module.train()
    answers = ids(generator_of(module, "shared"), prompts, 12)
    assert answers == greedy_of(module.eval(), prompts, 12)


@pytest.mark.parametrize("kind", [DecoderGenerator, PlainGenerator])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_told_and_not_sampled_from(kind, temperature, value, tiny_tokenizer):
    module = tiny("llama")
    generator = kind(module, tiny_tokenizer)
    params = SamplingParams(max_new_tokens=4, temperature=temperature, seed=1)
    wanted = generator.generate([[5, 6, 7]], params)
    old, told = module.lm_head.weight[5].detach().clone(), []
    with torch.no_grad():
        module.lm_head.weight[5].fill_(value)
    with pytest.raises(NonFiniteError, match="logits are not finite"):
        generator.generate([[5, 6, 7]], params, on_token=lambda *token: told.append(token))
    assert not told
    with torch.no_grad():
        module.lm_head.weight[5].copy_(old)
    assert generator.generate([[5, 6, 7]], params) == wanted


def test_a_model_made_in_inference_mode_is_followed():
    with torch.inference_mode():
        module = tiny("llama")
    generator = generator_of(module)
    assert generator.decoder is not None and ids(generator, ragged()) == greedy_of(module, ragged())
    with torch.inference_mode():
        module.lm_head.weight.copy_(module.lm_head.weight.flip(0))
    assert ids(generator, ragged()) == greedy_of(module, ragged())


def test_modules_put_in_others_places_are_read():
    module = tiny("llama")
    generator = generator_of(module)
    before = ids(generator, ragged())
    module.lm_head = tiny("llama", seed=9).lm_head
    assert ids(generator, ragged()) == greedy_of(module, ragged()) != before
    get_peft_model(module, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    assert ids(generator, ragged()) == greedy_of(module, ragged())
    module.model.layers = module.model.layers[:1]
    module.config.num_hidden_layers = 1
    assert ids(generator, ragged()) == greedy_of(module, ragged())
    assert generator.decoder is not None


def test_calls_from_several_threads_take_turns():
    generator = generator_of(tiny("llama"))
    jobs = [(ragged(), 12), ([[9, 8, 7] * 5] * 3, 90)]
    wanted = [ids(generator, *job) for job in jobs]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda job: ids(generator, *job), jobs * 6)) == wanted * 6


def test_a_call_from_on_token_is_refused_and_the_next_one_is_right():
    generator = generator_of(tiny("llama"))
    wanted = ids(generator, ragged())
    with pytest.raises(RuntimeError, match="from on_token"):
        generator.generate(ragged(), SamplingParams(max_new_tokens=4), on_token=lambda *_: ids(generator, ragged()))
    assert ids(generator, ragged()) == wanted


def test_no_slot_at_all_is_refused():
    with pytest.raises(ValueError, match="max_slots=0"):
        generator_of(tiny("llama"), max_slots=0)
