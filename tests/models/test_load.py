"""What a model path may be, what comes back, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from accord.config import FromScratch, Lora, Model
from accord.errors import ConfigError
from accord.models import heads
from accord.models.load import load_causal, load_scalar, load_tokenizer, resolve
from accord.models.save import save_model

IDS = torch.tensor([[5, 9, 200, 31, 7, 44, 300, 12, 80, 3, 6, 17]])


def model(path: Path | str | None, **changes: Any) -> Model:
    return Model(path=None if path is None else str(path), **changes)


def editable(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


# ------------------------------------------------------------------------------------------------------------------ what a path means


def test_a_run_folder_stands_for_its_model(tiny_folder: Callable[..., Path], tmp_path: Path):
    shutil.copytree(tiny_folder(), tmp_path / "run" / "model")
    assert resolve(tmp_path / "run") == str(tmp_path / "run" / "model")


def test_a_pipeline_stands_for_its_last_stage_by_its_own_configuration(tiny_folder: Callable[..., Path], tmp_path: Path):
    for stage in ("sft", "ppo", "dpo"):
        shutil.copytree(tiny_folder(), tmp_path / stage / "model")
    assert resolve(tmp_path) == str(tmp_path / "ppo" / "model")
    (tmp_path / "config.yaml").write_text("pipeline: {stages: [sft, ppo, dpo]}\n")
    assert resolve(tmp_path) == str(tmp_path / "dpo" / "model")


def test_a_pipeline_that_has_only_come_to_sft_stands_for_the_sft_model(tiny_folder: Callable[..., Path], tmp_path: Path):
    shutil.copytree(tiny_folder(), tmp_path / "sft" / "model")
    (tmp_path / "ppo").mkdir()
    assert resolve(tmp_path) == str(tmp_path / "sft" / "model")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "holds no model"),
        (["adapter_config.json"], "model.lora.path"),
        (["metrics.jsonl"], "no finished model yet"),
        (["weights.gguf"], "name one of them"),
    ],
)
def test_a_folder_without_a_model_is_refused_with_the_cure(files: list[str], said: str, tmp_path: Path):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=said):
        resolve(tmp_path)


def test_missing_paths_and_other_files_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no such file or folder: .*nowhere/at/all"):
        resolve(tmp_path / "nowhere/at/all")
    (tmp_path / "model.bin").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        resolve(tmp_path / "model.bin")
    with pytest.raises(ConfigError, match="demo:base"):
        resolve("demo:other")


def test_a_hub_id_that_cannot_be_had_names_folder_and_network():
    assert resolve("some-one/some-model") == "some-one/some-model"
    with pytest.raises(ConfigError, match=r"some-one/some-model is no folder here.*(?s:.*)HF_HUB_OFFLINE"):
        load_tokenizer("some-one/some-model")


# ------------------------------------------------------------------------------------------------------------------------- dtype


def test_what_is_trained_is_float32_whatever_the_dtype(tiny_folder: Callable[..., Path]):
    loaded = load_causal(model(tiny_folder(), dtype="bfloat16"), seed=1, trainable=True)
    assert {p.dtype for p in loaded.module.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in loaded.module.parameters()) and loaded.module.training


def test_what_is_frozen_has_its_dtype_and_no_gradient(tiny_folder: Callable[..., Path]):
    loaded = load_causal(model(tiny_folder()), seed=1, trainable=False, dtype="bfloat16")
    assert {p.dtype for p in loaded.module.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in loaded.module.parameters()) and not loaded.module.training


def test_with_lora_the_base_has_its_dtype_and_the_adapter_is_float32(tiny_folder: Callable[..., Path]):
    loaded = load_causal(model(tiny_folder(), dtype="bfloat16", lora=Lora(rank=2)), seed=1, trainable=True)
    trained = [p for p in loaded.module.parameters() if p.requires_grad]
    frozen = [p for p in loaded.module.parameters() if not p.requires_grad]
    assert loaded.lora and {p.dtype for p in trained} == {torch.float32} and {p.dtype for p in frozen} == {torch.bfloat16}


def test_a_frozen_reward_model_keeps_its_head_in_float32(tiny_folder: Callable[..., Path], tmp_path: Path):
    trained = load_scalar(str(tiny_folder()), model(None), seed=3, trainable=True)
    save_model(trained, tmp_path / "rm", stop_token_ids=[2])
    frozen = load_scalar(str(tmp_path / "rm"), model(None), seed=9, trainable=False, dtype="bfloat16")
    assert heads.backbone(frozen.module).get_input_embeddings().weight.dtype == torch.bfloat16  # type: ignore[operator]
    assert torch.equal(heads.score_head(frozen.module).weight, heads.score_head(trained.module).weight)  # type: ignore[arg-type]
    with torch.no_grad():
        assert frozen.module(IDS).logits.dtype == torch.float32


# -------------------------------------------------------------------------------------------------------------- dropout, checkpointing


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "gpt_neox"])
def test_dropout_is_off_unless_wanted(family: str, tiny_model: Callable[..., Any], tiny_tokenizer: Any, tmp_path: Path):
    rates = {"gpt2": {"resid_pdrop": 0.5, "attn_pdrop": 0.5}, "opt": {"dropout": 0.5}, "llama": {"attention_dropout": 0.5}}
    module = tiny_model(family)
    for name, rate in rates.get(family, {"hidden_dropout": 0.5, "attention_dropout": 0.5}).items():
        setattr(module.config, name, rate)
    module.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)

    def differs(disable: bool) -> bool:
        loaded = load_causal(model(tmp_path, disable_dropout=disable), seed=1, trainable=True).module.train()
        return not torch.equal(loaded(IDS).logits, loaded(IDS).logits)

    assert not differs(True)
    assert differs(False)


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_gradient_checkpointing_changes_no_gradient(lora: Lora | None, tiny_folder: Callable[..., Path]):
    gradients = []
    for checkpointing in (False, True):
        module = load_causal(model(tiny_folder(), gradient_checkpointing=checkpointing, lora=lora), seed=1, trainable=True).module
        assert any(getattr(part, "gradient_checkpointing", False) for part in module.modules()) is checkpointing
        module(IDS, use_cache=False).logits.square().mean().backward()
        gradients.append([p.grad for p in module.parameters() if p.grad is not None])
    assert gradients[0] and len(gradients[0]) == len(gradients[1])
    for without, with_ in zip(*gradients, strict=True):
        torch.testing.assert_close(with_, without, rtol=1e-5, atol=1e-8)


# ------------------------------------------------------------------------------------------------------------------------ refusals


def test_a_folder_without_tokenizer_is_refused(tiny_folder: Callable[..., Path], tmp_path: Path):
    folder = editable(tiny_folder(), tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"holds no tokenizer.*tokenizer\.json"):
        load_causal(model(folder), seed=1, trainable=True)


def test_missing_weights_are_named(tiny_folder: Callable[..., Path], tmp_path: Path):
    folder = editable(tiny_folder(), tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for load in (
        lambda: load_causal(model(folder), seed=1, trainable=True),
        lambda: load_scalar(str(folder), model(None), seed=1, trainable=True),
    ):
        with pytest.raises(ConfigError, match=r"lacks weights.*layers\.1\.mlp\.up_proj"):
            load()


def test_damaged_weights_and_configuration_are_refused(tiny_folder: Callable[..., Path], tmp_path: Path):
    folder = editable(tiny_folder(), tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"weights in .* (damaged|could not be read)"):
        load_causal(model(folder), seed=1, trainable=True)
    (folder / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match=r"configuration in .* could not be read"):
        load_causal(model(folder), seed=1, trainable=True)


def test_a_reward_model_is_no_language_model_and_a_classifier_no_reward_model(tiny_folder: Callable[..., Path], tmp_path: Path):
    save_model(load_scalar(str(tiny_folder()), model(None), seed=1, trainable=True), tmp_path / "rm", stop_token_ids=[2])
    with pytest.raises(ConfigError, match="is a reward model"):
        load_causal(model(tmp_path / "rm"), seed=1, trainable=True)
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    config["id2label"] = {"0": "a", "1": "b", "2": "c"}
    (tmp_path / "rm" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="classifier with 3 labels"):
        load_scalar(str(tmp_path / "rm"), model(None), seed=1, trainable=True)


def test_no_model_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"model.path is not set"):
        load_causal(model(None), seed=1, trainable=True)


# --------------------------------------------------------------------------------------------------------------------- score heads


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_a_bf16_reward_model_keeps_its_rotary_frequencies_and_its_head(lora: Lora | None, tiny_folder: Callable[..., Path]):
    """As where transformers loads in bfloat16: frequencies of 8 bits would turn far positions wrongly."""
    loaded = load_scalar(str(tiny_folder()), Model(dtype="bfloat16", lora=lora), seed=3, trainable=lora is not None)
    module, exact = heads.unwrap(loaded.module), load_scalar(str(tiny_folder()), model(None), seed=3, trainable=False).module
    assert torch.equal(module.model.rotary_emb.inv_freq, exact.model.rotary_emb.inv_freq)
    assert module.model.embed_tokens.weight.dtype == torch.bfloat16
    head = [tensor for name, tensor in module.state_dict().items() if name.startswith("score.")]
    assert head and all(torch.equal(tensor, exact.score.weight) for tensor in head)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt", "gpt_neox", "gemma3_text", "bloom"])
def test_a_fresh_head_is_seeded_and_reads_the_causal_models_hidden_states(family: str, tiny_folder: Callable[..., Path]):
    folder = tiny_folder(family)
    one, same, other = (load_scalar(str(folder), model(None), seed=seed, trainable=True).module.eval() for seed in (1, 1, 2))
    weight = heads.score_head(one).weight
    assert torch.equal(weight, heads.score_head(same).weight) and not torch.equal(weight, heads.score_head(other).weight)  # type: ignore[arg-type]
    causal = load_causal(model(folder), seed=1, trainable=False).module
    with torch.no_grad():
        hidden = heads.backbone(causal)(IDS).last_hidden_state
        torch.testing.assert_close(heads.scores(one, heads.backbone(one)(IDS).last_hidden_state), (hidden @ weight.T).squeeze(-1))  # type: ignore[operator]
        torch.testing.assert_close(one(IDS).logits[0, 0], (hidden[0, -1] @ weight.T).squeeze())  # type: ignore[operator]


def test_the_head_is_drawn_with_variance_one_over_hidden_plus_one():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(40_000, 1, bias=False)

    wide = Wide()
    heads.init_score_head(wide, seed=0)
    assert wide.score.weight.std().item() == pytest.approx(1 / 40_001**0.5, rel=0.02)


# ------------------------------------------------------------------------------------------------------------------- from scratch


SIZES = {"architecture": "llama", "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 300}


def scratch(**changes: Any) -> Model:
    return Model(from_scratch=FromScratch(**{**SIZES, **changes}))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gpt2", "opt", "gpt_neox", "mistral", "gemma3_text"])
def test_a_model_from_scratch_fits_its_tokenizer_and_repeats(architecture: str):
    texts = ["one two three", "你好,世界", "four"]
    one, same, other = (
        load_causal(scratch(architecture=architecture), seed=seed, trainable=True, texts=texts) for seed in (1, 1, 2)
    )
    rows = one.module.get_input_embeddings().weight  # type: ignore[operator]
    assert rows.shape == (len(one.tokenizer), 32) and len(one.tokenizer) <= 300
    assert heads.unwrap(one.module).config.num_hidden_layers == 2
    assert all(
        torch.equal(a, b) for a, b in zip(one.module.state_dict().values(), same.module.state_dict().values(), strict=True)
    )
    assert not torch.equal(rows, other.module.get_input_embeddings().weight)  # type: ignore[operator]
    assert one.module(IDS % len(one.tokenizer)).logits.isfinite().all()


def test_loading_leaves_the_callers_random_state_alone(tiny_folder: Callable[..., Path]):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_causal(scratch(), seed=1, trainable=True, texts=["some text"])
    load_scalar(str(tiny_folder()), Model(lora=Lora(rank=2)), seed=1, trainable=True)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "lama"}, "Did you mean .*llama"),
        ({"hidden_size": 30}, "30 is not a multiple of num_heads 4"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"architecture": "gpt2", "num_kv_heads": 2}, "gpt2 has no key-value heads"),
        ({"architecture": "bloom", "max_length": 64}, "bloom has no longest length"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        load_causal(scratch(**changes), seed=1, trainable=True, texts=["text"])


def test_from_scratch_needs_texts():
    with pytest.raises(ConfigError, match=r"trained from data.train, which gave no text"):
        load_causal(scratch(), seed=1, trainable=True, texts=[])
    with pytest.raises(ConfigError, match="only the first stage"):
        load_causal(scratch(), seed=1, trainable=True)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_survives_the_from_scratch_tokenizer(text: str):
    tokenizer = _tokenizer()
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < len(tokenizer)


_made: list[Any] = []


def _tokenizer() -> Any:
    if not _made:
        from accord.models.scratch import train_tokenizer

        _made.append(train_tokenizer(["hello there", "你好 😀"] * 3, 300))
    return _made[0]


def test_the_from_scratch_tokenizer_writes_digits_one_by_one_and_turns_in_chatml():
    tokenizer = _tokenizer()
    assert tokenizer.tokenize("2026") == ["2", "0", "2", "6"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
