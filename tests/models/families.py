"""Tiny random models of each family, float32, made on the spot."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 97
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict] = {
    "llama": LLAMA_LIKE,
    "mistral": {**LLAMA_LIKE, "sliding_window": 8},
    "qwen2": LLAMA_LIKE,
    "qwen3": {**LLAMA_LIKE, "head_dim": 8},
    "gemma2": {
        **LLAMA_LIKE,
        "head_dim": 8,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**LLAMA_LIKE, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "num_hidden_layers": 7},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 32,
    },
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    },
    "olmo2": LLAMA_LIKE,
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4},
}
OUTSIDE_THE_INTERFACE = {"bloom"}


def tiny(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **COMMON, **FAMILIES[family])
    for name in config.to_dict():
        if "dropout" in name or name.endswith("pdrop"):
            setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # fresh weights are so small that every mistake in attention would vanish in the rounding
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            elif "norm" not in name and "ln" not in name:
                parameter.normal_(0, 0.05)
    return model.eval()
