"""Tokenizers of the kinds that trip up loss masks, and settings as `accord.config` would give them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accord.data.records import Message
from accord.data.template import ConversationEncoder

TEXTS = [
    "The quick brown fox jumps over the lazy dog. How many legs does it have? It has four legs.",
    "Human: Can you help me? Assistant: Of course, I would be glad to help you with that.",
    "你好,世界。今天天气怎么样?天气很好,谢谢你。\n\nnew lines\tand tabs. naïve café 😀👍🏽",
] * 8


def talk(*contents: str, system: str | None = None) -> tuple[Message, ...]:
    """User and assistant in turns."""
    turns = tuple(Message("assistant" if i % 2 else "user", content) for i, content in enumerate(contents))
    return turns if system is None else (Message("system", system), *turns)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads what another (or a user) has cached."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ACCORD_CACHE", str(folder))
    return folder


@pytest.fixture
def tokenizer(tiny_tokenizer: Any) -> Any:
    """One of its own: encoders set the template on it."""
    return copy.deepcopy(tiny_tokenizer)


@pytest.fixture
def encoder(tokenizer: Any) -> ConversationEncoder:
    return ConversationEncoder(tokenizer)


def _fast(backend: Any, **special: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


@pytest.fixture(scope="session")
def byte_level() -> Callable[[], Any]:
    """Llama 3's way: byte-level BPE that adds BOS itself and trims white space from offsets; no template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=420, special_tokens=specials, initial_alphabet=alphabet))
    backend.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])]
    )
    return lambda: copy.deepcopy(_fast(backend, bos_token="<s>", eos_token="</s>"))


@pytest.fixture(scope="session")
def metaspace() -> Callable[[], Any]:
    """Llama 2's way: SentencePiece-like BPE that puts a space before the text, bytes for what it doesn't know; BOS of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=600, special_tokens=specials))
    state = json.loads(backend.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if not token["content"].startswith("<0x")
    ]  # those are in the vocabulary
    backend = Tokenizer.from_str(json.dumps(state))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return lambda: copy.deepcopy(_fast(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"))


@pytest.fixture(scope="session")
def metaspace_everywhere(metaspace: Callable[[], Any]) -> Callable[[], Any]:
    """The older Llama 2 way: the space is put before every stretch between special tokens."""
    from tokenizers import normalizers

    def make() -> Any:
        tokenizer = metaspace()
        tokenizer.backend_tokenizer.pre_tokenizer = None
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        return tokenizer

    return make


@pytest.fixture
def settings() -> Callable[..., Any]:
    """The section `data` with its defaults, and what a test changes."""

    def make(train: Any = None, **changes: Any) -> Any:
        from accord.config import Config

        return Config.model_validate({"data": {"train": train, **changes}}).data

    return make


@pytest.fixture
def loose_settings() -> Callable[..., Any]:
    """Like `settings`, for rows in memory only."""
    return lambda **changes: SimpleNamespace(
        **{
            "train": None,
            "valid": None,
            "holdout": 0.0,
            "format": "auto",
            "columns": {},
            "truncate": "drop",
            "on_bad_row": "fail",
            "cache": True,
            **changes,
        }
    )
