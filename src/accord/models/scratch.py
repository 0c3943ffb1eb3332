"""A model from nothing: a small architecture from its sizes, and a byte-level BPE tokenizer trained from the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accord.data.chat_templates import set_template
from accord.errors import ConfigError

if TYPE_CHECKING:
    from accord.config import FromScratch

END_OF_TEXT, TURN_START, TURN_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END, PAD)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int = 2048) -> Any:
    """A byte-level BPE tokenizer with the chatml specials and template: any text in any script can be written with it, without unknown tokens.

    At most `vocab_size` tokens, fewer when the texts are small. The same texts give the same tokenizer. Raises ConfigError when
    `vocab_size` leaves no room for the 256 bytes and the four specials, or when there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    room = 256 + len(SPECIALS)
    if vocab_size < room:
        raise ConfigError(
            f"model.from_scratch.vocab_size is {vocab_size}: at least {room} are needed (256 bytes and {len(SPECIALS)} special tokens)"
        )
    tokenizer = Tokenizer(models.BPE())
    # Digits one by one: sums are learnable, and numbers of any length are made of the same few tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    counted = _Counted(texts)
    tokenizer.train_from_iterator(counted, trainer=trainer)
    if counted.count == 0:
        raise ConfigError("model.from_scratch: the tokenizer is trained from data.train, which gave no text")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token=TURN_END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    # The specials that are no one's eos or pad must be special too: they're never content.
    fast.add_special_tokens({"additional_special_tokens": [END_OF_TEXT, TURN_START]})
    set_template(fast, "chatml")
    return fast


def build_config(settings: FromScratch, tokenizer: Any) -> Any:
    """The `transformers` configuration of a from-scratch model; embeddings are tied and exactly as many as the tokenizer's tokens.

    Raises ConfigError for an unknown architecture (with the nearest names) or sizes that don't go together.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = settings.architecture
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        from difflib import get_close_matches

        near = get_close_matches(architecture, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), n=3) or ["llama", "qwen2", "gpt2"]
        raise ConfigError(
            f"model.from_scratch.architecture: {architecture!r} is no causal model of transformers. Did you mean {' or '.join(near)}?"
        )
    hidden, heads = settings.hidden_size, settings.num_heads
    kv_heads = settings.num_kv_heads or heads
    if hidden % heads:
        raise ConfigError(f"model.from_scratch: hidden_size {hidden} is not a multiple of num_heads {heads}")
    if heads % kv_heads:
        raise ConfigError(f"model.from_scratch: num_heads {heads} is not a multiple of num_kv_heads {kv_heads}")
    known = AutoConfig.for_model(architecture)
    inner = settings.intermediate_size or _default_intermediate(architecture, hidden)
    wanted = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": inner,
        "ffn_dim": inner,  # OPT
        "word_embed_proj_dim": hidden,  # OPT
        "n_inner": inner,  # GPT-2
        "max_position_embeddings": settings.max_length,
    }
    options = {name: value for name, value in wanted.items() if value is not None and hasattr(known, name)}
    if settings.max_length and "max_position_embeddings" not in options:
        raise ConfigError(f"model.from_scratch.max_length: {architecture} has no longest length; leave it out")
    if settings.num_kv_heads and "num_key_value_heads" not in options:
        raise ConfigError(f"model.from_scratch.num_kv_heads: {architecture} has no key-value heads of its own; leave it out")
    return AutoConfig.for_model(
        architecture,
        **options,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_module(config: Any, *, seed: int, auto_class: Any, attn_implementation: str | None) -> nn.Module:
    """A randomly initialised float32 model; the same seed gives the same weights, and the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto_class.from_config(config, attn_implementation=attn_implementation).float()


def _default_intermediate(architecture: str, hidden: int) -> int:
    """Gated MLPs have three matrices: 8/3 H (rounded up to 16) costs what 4 H does in the older ones with two."""
    if architecture in {"gpt2", "opt", "gpt_neox", "bloom", "falcon", "gpt_neo", "gptj", "phi"}:
        return 4 * hidden
    return -(-8 * hidden // 3 // 16) * 16


class _Counted:
    """Passes texts through and counts them, so that nothing is read twice."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts, self.count = texts, 0

    def __iter__(self) -> Any:
        for text in self.texts:
            self.count += 1
            yield text
