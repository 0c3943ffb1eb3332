"""What is written loads in plain transformers, with the same numbers."""

from __future__ import annotations

import copy
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from accord.config import Lora, Model
from accord.errors import AccordError
from accord.models import save as saving
from accord.models.load import LoadedModel, load_causal, load_scalar
from accord.models.save import save_model

IDS = torch.tensor([[5, 9, 200, 31, 7, 44, 300, 12, 80, 3, 6, 17], [8, 7, 6, 5, 9, 12, 13, 14, 15, 16, 17, 2]])
FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "opt",
    "gpt_neox",
    "olmo2",
    "qwen3_moe",
    "bloom",
    "falcon",
]


def load(kind: str, folder: Path, lora: bool = False) -> LoadedModel:
    model = Model(path=str(folder), lora=Lora(rank=2) if lora else None)
    if kind == "causal":
        return load_causal(model, seed=1, trainable=True)
    return load_scalar(None, model, seed=1, trainable=True)


def train_a_little(loaded: LoadedModel) -> None:
    """Move every trained weight, as training would."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["causal", "scalar"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_gives_the_same_logits_in_plain_transformers(
    family: str, kind: str, lora: bool, tiny_folder: Callable[..., Path], tmp_path: Path
):
    loaded = load(kind, tiny_folder(family), lora)
    train_a_little(loaded)
    loaded.module.eval()
    before = {name: tensor.clone() for name, tensor in loaded.module.state_dict().items()}
    save_model(loaded, tmp_path / "model", stop_token_ids=[2], card="# A card\n")

    auto: Any = AutoModelForCausalLM if kind == "causal" else AutoModelForSequenceClassification
    plain, report = auto.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, loaded.module(IDS).logits, rtol=1e-5, atol=3e-6)
    after = loaded.module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), "saving must not touch training weights"
    assert (tmp_path / "model" / "README.md").read_text() == "# A card\n"


def test_tied_embeddings_stay_tied_and_are_written_once(tiny_folder: Callable[..., Path], tmp_path: Path):
    from safetensors import safe_open

    loaded = load("causal", tiny_folder("llama", tie_word_embeddings=True))
    save_model(loaded, tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert plain.lm_head.weight is plain.model.embed_tokens.weight


def test_template_and_stop_tokens_travel_with_the_model(tiny_folder: Callable[..., Path], tmp_path: Path):
    loaded = load("causal", tiny_folder())
    loaded.tokenizer = copy.deepcopy(loaded.tokenizer)
    loaded.tokenizer.eos_token = "<|endoftext|>"
    save_model(loaded, tmp_path / "model", stop_token_ids=[2])
    settings = GenerationConfig.from_pretrained(tmp_path / "model")
    assert settings.eos_token_id == [0, 2]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template == loaded.tokenizer.chat_template
    text = "Human: how are you? 你好 😀 <|im_end|>"
    assert tokenizer(text).input_ids == loaded.tokenizer(text).input_ids
    assert loaded.module.generation_config.eos_token_id == 2, "the module that goes on training keeps its settings"  # type: ignore[union-attr]


def test_generation_settings_that_transformers_would_refuse_to_write_do_not_stop_the_save(
    tiny_folder: Callable[..., Path], tmp_path: Path
):
    loaded = load("causal", tiny_folder())
    loaded.module.generation_config.temperature = 0.6  # type: ignore[union-attr]
    loaded.module.generation_config.do_sample = False  # type: ignore[union-attr]
    save_model(loaded, tmp_path / "model", stop_token_ids=[2])
    assert GenerationConfig.from_pretrained(tmp_path / "model").temperature == 0.6


# -------------------------------------------------------------------------------------------------------------- reward models in batches


def scores_in_a_batch(folder: Path, rows: list[list[int]]) -> torch.Tensor:
    """As a user would score: plain transformers, padded batch, right padding."""
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt", padding_side="right")
    with torch.no_grad():
        return plain(**batch).logits.squeeze(-1)


@pytest.mark.parametrize("pad", ["own", "is the end token", "none"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_saved_reward_model_scores_the_end_token_whatever_the_batch(
    pad: str, family: str, tiny_folder: Callable[..., Path], tmp_path: Path
):
    loaded = load("scalar", tiny_folder(family))
    loaded.tokenizer = copy.deepcopy(loaded.tokenizer)
    if pad != "own":
        loaded.tokenizer.pad_token = "<|im_end|>" if pad == "is the end token" else None
    save_model(loaded, tmp_path / "rm", stop_token_ids=[2])
    rows = [[5, 9, 200, 31, 2], [7, 44, 300, 12, 80, 6, 6, 17, 2], [8, 2]]
    loaded.module.eval()
    with torch.no_grad():
        alone = torch.stack([loaded.module(torch.tensor([row])).logits[0, 0] for row in rows])
    torch.testing.assert_close(scores_in_a_batch(tmp_path / "rm", rows), alone, rtol=1e-5, atol=1e-6)
    assert AutoTokenizer.from_pretrained(tmp_path / "rm").pad_token_id not in (None, 2)


def test_a_vocabulary_without_a_spare_token_gets_one_and_one_more_row(tiny_folder: Callable[..., Path], tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(511)} | {"<end>": 511}
    backend = Tokenizer(models.WordLevel(words, unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    loaded = load("scalar", tiny_folder())
    loaded.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", bos_token="<end>")
    save_model(loaded, tmp_path / "rm", stop_token_ids=[511])
    rows = [[5, 9, 511], [7, 511], [1, 2, 3, 4, 511]]
    loaded.module.eval()
    with torch.no_grad():
        alone = torch.stack([loaded.module(torch.tensor([row])).logits[0, 0] for row in rows])
    torch.testing.assert_close(scores_in_a_batch(tmp_path / "rm", rows), alone, rtol=1e-5, atol=1e-6)
    assert loaded.module.get_input_embeddings().weight.shape[0] == 512, "the trained module is as it was"  # type: ignore[operator]
    again = load_scalar(str(tmp_path / "rm"), Model(), seed=1, trainable=True)
    assert again.module.get_input_embeddings().weight.shape[0] == 513  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------------------------- whole or absent


def test_the_folder_is_whole_or_as_it_was(tiny_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loaded = load("causal", tiny_folder())
    save_model(loaded, tmp_path / "model", stop_token_ids=[2], card="first")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(type(loaded.tokenizer), "save_pretrained", full)
    with pytest.raises(AccordError, match=r"could not write .*model: No space left on device"):
        save_model(loaded, tmp_path / "model", stop_token_ids=[2], card="second")
    assert (tmp_path / "model" / "README.md").read_text() == "first"
    assert sorted(os.listdir(tmp_path)) == ["model"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_an_older_model_is_replaced_not_mixed(tiny_folder: Callable[..., Path], tmp_path: Path):
    loaded = load("causal", tiny_folder())
    save_model(loaded, tmp_path / "model", stop_token_ids=[2])
    (tmp_path / "model" / "model-00001-of-00002.safetensors").write_bytes(b"left over")
    save_model(loaded, tmp_path / "model", stop_token_ids=[2])
    assert not (tmp_path / "model" / "model-00001-of-00002.safetensors").exists()


def test_if_the_last_rename_fails_the_older_folder_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "file").write_text("old")
    rename, calls = os.replace, []

    def failing(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(saving.os, "replace", failing)
    with pytest.raises(AccordError, match="Input/output error"), saving.whole_folder(tmp_path / "model") as beside:
        (beside / "file").write_text("new")
    assert (tmp_path / "model" / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["model"]


def test_what_a_killed_save_left_is_cleared_away_and_the_older_folder_kept(tmp_path: Path):
    for name in (".model.77.tmp", ".model.77.old"):  # killed between the two renames
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(RuntimeError), saving.whole_folder(tmp_path / "model"):
        raise RuntimeError
    assert os.listdir(tmp_path) == ["model"] and (tmp_path / "model" / "file").read_text() == ".model.77.old"


def test_written_files_can_be_read_by_others_as_the_umask_says(tiny_folder: Callable[..., Path], tmp_path: Path):
    mask = os.umask(0o022)
    try:
        save_model(load("causal", tiny_folder()), tmp_path / "model")
    finally:
        os.umask(mask)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "model").iterdir()} == {0o644}
