"""A tiny classifier that is nothing like the policy."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from tests.conftest import TEXTS


def save_tiny_bert(folder: Path) -> Path:
    """A BERT with the labels bad, fair and good, random weights, and a byte-level tokenizer of its own: [CLS] a [SEP] b [SEP]."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["[PAD]", "[CLS]", "[SEP]"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", model_max_length=64,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    config = BertConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64,
        pad_token_id=0, num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"}, label2id={"bad": 0, "fair": 1, "good": 2},
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
