"""bfloat16 on a processor without instructions for it is told once, wherever it is asked for."""

import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accord.models import precision
from accord.models.forward import PackedModel


@pytest.fixture
def without_bfloat16(monkeypatch):
    monkeypatch.setattr(precision, "has_bfloat16", lambda device: False)
    precision._warn.cache_clear()
    yield
    precision._warn.cache_clear()


def test_asked_for_often_it_is_told_once(without_bfloat16, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            precision.check_bfloat16(torch.bfloat16, torch.device("cpu"))
    assert [record.message.count("train.precision=float32") for record in caplog.records] == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, None])
def test_other_types_are_not_spoken_of(without_bfloat16, caplog, dtype):
    with caplog.at_level(logging.WARNING):
        precision.check_bfloat16(dtype, torch.device("cpu"))
    assert not caplog.records


def test_a_gpu_is_taken_to_have_it():
    assert precision.has_bfloat16(torch.device("cuda"))


@pytest.mark.parametrize("weights, computed", [(torch.bfloat16, "float32"), (torch.float32, "bf16")])
def test_a_model_that_computes_in_it_tells(without_bfloat16, caplog, weights, computed):
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    with caplog.at_level(logging.WARNING):
        PackedModel(LlamaForCausalLM(config).to(weights), precision=computed)
    assert "no bfloat16 instructions" in caplog.text
