"""GGUF files: written here with the gguf package from a known model, and SmolLM2's real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accord.config import Lora, Model
from accord.errors import ConfigError
from accord.models.gguf import convert_gguf, is_gguf
from accord.models.load import load_causal, load_scalar, load_tokenizer, resolve
from accord.models.quantized import QuantizedLinear
from accord.models.save import save_model

IDS = torch.tensor([[5, 9, 200, 31, 7, 44, 300, 12]])
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp keeps the two halves of each rotary head interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def gguf_file(tiny_model: Callable[..., Any], tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama and tokenizer as a GGUF file, written independently of what reads it."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    module = tiny_model("llama", vocab_size=len(tiny_tokenizer))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(module.config.rms_norm_eps)
    writer.add_rope_freq_base(module.config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(tiny_tokenizer))
    backend = json.loads(tiny_tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tiny_tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([3 if token in tiny_tokenizer.all_special_tokens else 1 for token, _ in tokens])
    writer.add_token_merges([" ".join(pair) for pair in backend["merges"]])
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny_tokenizer.chat_template)
    for name, tensor in module.state_dict().items():
        tensor = tensor.float()
        if name == "model.embed_tokens.weight":
            target = "token_embd.weight"
        elif name in ("model.norm.weight", "lm_head.weight"):
            target = {"model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            target = f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
            if "q_proj" in name or "k_proj" in name:
                tensor = interleaved(tensor, 4 if "q_proj" in name else 2)
        writer.add_tensor(target, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def original(tiny_model: Callable[..., Any], tiny_tokenizer: Any) -> Any:
    return tiny_model("llama", vocab_size=len(tiny_tokenizer))


def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(gguf_file: Path, original: Any):
    loaded = load_causal(Model(path=str(gguf_file)), seed=1, trainable=True)
    assert {p.dtype for p in loaded.module.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in loaded.module.parameters())
    with torch.no_grad():
        torch.testing.assert_close(loaded.module.eval()(IDS).logits, original(IDS).logits, rtol=1e-5, atol=1e-5)


def test_a_model_from_gguf_can_be_kept_in_4_bits(gguf_file: Path, original: Any):
    pytest.importorskip("bitsandbytes")
    loaded = load_causal(Model(path=str(gguf_file), lora=Lora(), quantization="nf4"), seed=1, trainable=True)
    parts = {name: part for name, part in loaded.module.named_modules() if isinstance(part, QuantizedLinear)}
    assert len(parts) == 7 * 2
    for name, part in parts.items():
        exact = original.get_submodule(name.removeprefix("base_model.model.").removesuffix(".base_layer")).weight
        # half of the widest gap between levels is 0.152; the largest of each block is rounded too
        assert float((part.weight - exact.detach()).abs().max()) < 0.17 * float(exact.detach().abs().max())


def test_a_gguf_tokenizer_writes_the_same_tokens_and_template(gguf_file: Path, tiny_tokenizer: Any):
    tokenizer = load_tokenizer(gguf_file)
    for text in ("The quick brown fox, 12 legs.", "你好,世界 😀", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer(text).input_ids == tiny_tokenizer(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template == tiny_tokenizer.chat_template
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 3)


def test_a_model_from_gguf_is_saved_as_an_ordinary_one(gguf_file: Path, original: Any, tmp_path: Path):
    loaded = load_causal(Model(path=str(gguf_file)), seed=1, trainable=True)
    save_model(loaded, tmp_path / "model", stop_token_ids=[2])
    assert "quantization" not in (tmp_path / "model" / "config.json").read_text()
    again = load_causal(Model(path=str(tmp_path / "model")), seed=1, trainable=False)
    with torch.no_grad():
        torch.testing.assert_close(again.module(IDS).logits, original(IDS).logits, rtol=1e-5, atol=1e-5)


def test_a_reward_model_may_start_from_gguf(gguf_file: Path):
    loaded = load_scalar(str(gguf_file), Model(), seed=1, trainable=True)
    with torch.no_grad():
        assert loaded.module(IDS).logits.shape == (1, 1)


def test_conversion_happens_once_and_leaves_nothing_half_done(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = convert_gguf(gguf_file, tmp_path / "made")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert convert_gguf(gguf_file, folder) == folder and (folder / "model.safetensors").stat().st_mtime_ns == before
    monkeypatch.setattr("accord.models.gguf.load_gguf_tokenizer", lambda path: (_ for _ in ()).throw(ConfigError("no")))
    with pytest.raises(ConfigError):
        convert_gguf(gguf_file, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_gguf_file_is_told_by_its_content(gguf_file: Path, tmp_path: Path):
    assert is_gguf(gguf_file) and resolve(gguf_file) == str(gguf_file)
    (tmp_path / "false.gguf").write_bytes(b"not one")
    assert not is_gguf(tmp_path / "false.gguf")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        resolve(tmp_path / "false.gguf")


@pytest.mark.parametrize("share", [0.02, 0.9], ids=["in its header", "in its weights"])
def test_a_cut_gguf_file_is_refused(share: float, gguf_file: Path, tmp_path: Path):
    whole = gguf_file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ConfigError, match=r"cut\.gguf could not be read|in .*cut\.gguf could not be read"):
        load_causal(Model(path=str(tmp_path / "cut.gguf")), seed=1, trainable=True)


def test_without_the_packages_the_cure_is_named(gguf_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"gguf and accelerate.*accord\[gguf\]"):
        load_tokenizer(gguf_file)


@pytest.mark.real_model
def test_smollm2_knows_the_capital_of_france(smol_path: Path):
    loaded = load_causal(Model(path=str(smol_path)), seed=1, trainable=False)
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids
    answer: Any = loaded.module.generate(ids, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    assert loaded.tokenizer.decode(answer[0, ids.shape[1] :]).startswith("The capital of France is Paris.<|im_end|>")
