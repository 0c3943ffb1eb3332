"""A LoRA base in 4 bits: the paper's levels, products and gradients of the matrix that they stand for, and what is saved of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from accord.config import Lora, Model, Train
from accord.data.packing import make_pack
from accord.data.trees import branching
from accord.engine import trained
from accord.engine.trained import TrainedModel
from accord.errors import ConfigError
from accord.models import shared
from accord.models.forward import PackedModel
from accord.models.heads import backbone, unwrap
from accord.models.load import LoadedModel, load_causal, load_scalar
from accord.models.lora import as_reference
from accord.models.quantized import BYTES, QuantizedLinear
from accord.models.save import save_adapter, save_model
from accord.models.shared import CRITIC, REWARD, AdapterScorer
from tests.models.test_shared import AdapterModel, nudge

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install 'accord[quantization]')")

CPU = torch.device("cpu")
PACK = make_pack([branching([5, 9, 200, 31], [[7, 44, 300], [12, 8]]), branching([60, 61], [[70, 71, 72, 73]])], [0, 1])

# Dettmers et al. 2023, appendix E.
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def dynamic_codes() -> np.ndarray:
    """The 256 values of dynamic tree quantization (Dettmers et al. 2022, arXiv:2110.02861, §1.3): a decimal exponent, then a linear fraction."""
    values = [0.0, 1.0]
    for exponent in range(7):
        ends = np.linspace(0.1, 1, 2**exponent + 1)
        middles = 10.0 ** (exponent - 6) * (ends[:-1] + ends[1:]) / 2
        values += [*middles, *-middles]
    return np.sort(values)


def levels(layer: QuantizedLinear) -> np.ndarray:
    """[out · in] which level each number is; the first of two is in the upper half of a byte."""
    packed = layer.packed.numpy().reshape(-1)
    return np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[: layer.in_features * layer.out_features]


def largest(layer: QuantizedLinear) -> np.ndarray:
    """[blocks] c of each block, from its 8 bits."""
    scales = np.repeat(layer.absmax_scale.double().numpy(), 256)[: len(layer.absmax)]
    return dynamic_codes()[layer.absmax.numpy()] * scales + float(layer.absmax_mean)


def linear(outputs: int, inputs: int, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


# Blocks across rows, a short one, more than 256, and one a row.
SIZES = [(48, 80), (48, 32), (7, 10), (7, 9), (256, 128), (3, 64)]


# ------------------------------------------------------------------------------------------------------------------- a layer


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_the_matrix_is_the_papers_levels_times_each_blocks_largest(outputs: int, inputs: int):
    layer = QuantizedLinear(linear(outputs, inputs), CPU)
    expected = NF4[levels(layer)] * np.repeat(largest(layer), 64)[: outputs * inputs]
    found = layer.weight
    assert found.shape == (outputs, inputs) and found.dtype == torch.float32
    assert np.allclose(found.numpy().reshape(-1), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_each_number_has_the_nearest_level_and_each_block_its_largest_in_8_bits(outputs: int, inputs: int):
    plain = linear(outputs, inputs)
    layer = QuantizedLinear(plain, CPU)
    numbers = plain.weight.double().numpy().reshape(-1)
    blocks = [numbers[start : start + 64] for start in range(0, len(numbers), 64)]
    exact = np.array([np.abs(block).max() for block in blocks])
    coarsest = 0.9 / 64 / 2  # half of the widest step between two codes
    assert np.all(np.abs(largest(layer) - exact) <= coarsest * np.repeat(layer.absmax_scale.numpy(), 256)[: len(exact)] + 1e-7)
    share = numbers / np.repeat(exact, 64)[: len(numbers)]
    distance = np.abs(share[:, None] - NF4)
    assert np.all(distance[np.arange(len(share)), levels(layer)] <= distance.min(axis=1) + 1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_its_product_is_that_of_the_dequantised_matrix(bias: bool):
    plain = linear(48, 80, bias)
    layer = QuantizedLinear(plain, CPU)
    x = torch.randn(2, 5, 80, generator=torch.Generator().manual_seed(1))
    matrix = torch.from_numpy(NF4[levels(layer)] * np.repeat(largest(layer), 64)).view(48, 80)
    expected = x.double() @ matrix.T + (plain.bias.double() if bias else 0.0)
    for found in (layer(x), layer(x.requires_grad_())):
        assert found.dtype == torch.float32
        assert float((found.detach().double() - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    layer(x).square().sum().backward()
    assert x.grad is not None and torch.allclose(x.grad.double(), 2 * expected @ matrix, rtol=1e-4, atol=1e-5)


def test_it_takes_the_bytes_that_are_said():
    layer = QuantizedLinear(linear(512, 128), CPU)
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*layer.parameters(), *layer.buffers()))
    assert held == BYTES * 512 * 128 + 4  # the mean of all
    assert pytest.approx(0.5159, abs=1e-4) == BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_matrix_is_rounded_once(dtype: torch.dtype):
    layer = QuantizedLinear(linear(48, 80, True, dtype), CPU)
    exact = NF4[levels(layer)] * np.repeat(largest(layer), 64)
    assert layer.weight.dtype == dtype
    assert torch.allclose(layer.weight.double().view(-1), torch.from_numpy(exact), rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert layer(torch.ones(80, dtype=dtype)).dtype == dtype


def test_autocast_rounds_the_product_as_that_of_a_plain_layer():
    layer = QuantizedLinear(linear(48, 80, True), CPU)
    plain = linear(48, 80, True)
    plain.weight.copy_(layer.weight)
    results = []
    for part in (layer, plain):
        x = torch.randn(5, 80, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = part(x)
        y.float().square().sum().backward()
        results.append((y, x.grad))
    (found, gradient), (expected, expected_gradient) = results
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected) and torch.equal(gradient, expected_gradient)


# -------------------------------------------------------------------------------------------------------------------- a model


def options(
    folder: Path, quantization: str | None = "nf4", checkpointing: bool = False, dtype: str = "float32", **lora: Any
) -> Model:
    return Model(
        path=str(folder), dtype=dtype, quantization=quantization, gradient_checkpointing=checkpointing, lora=Lora(rank=2, **lora)
    )  # type: ignore[arg-type]


def on_a_plain_base(quantized: Any, plain: Any) -> None:
    """Give `plain`, of the same shape, the matrices that `quantized` computes with."""
    parts = dict(unwrap(plain).named_modules())
    for name, part in unwrap(quantized).named_modules():
        if isinstance(part, QuantizedLinear):
            parts[name].weight.data.copy_(part.weight)


def both(folder: Path, load: Callable[..., LoadedModel] = load_causal, **changes: Any) -> tuple[LoadedModel, LoadedModel]:
    """The same adapter, not at its start, on a base in 4 bits and on the dequantised one."""
    path = () if load is load_causal else (str(folder),)
    found = load(*path, options(folder, **changes), seed=1, trainable=True)
    expected = load(*path, options(folder, None, **changes), seed=1, trainable=True)
    on_a_plain_base(found.module, expected.module)
    for loaded in (found, expected):
        nudge(loaded.module.parameters(), 3)
    return found, expected


def test_only_the_linear_layers_of_the_blocks_are_kept_in_4_bits(tiny_folder: Callable[..., Path]):
    module = load_causal(options(tiny_folder()), seed=1, trainable=True).module
    base = unwrap(module)
    assert sum(isinstance(part, QuantizedLinear) for part in module.modules()) == 7 * 2
    assert not any(isinstance(part, QuantizedLinear) for part in base.lm_head.modules())
    assert base.model.embed_tokens.weight.dtype == base.lm_head.weight.dtype == torch.float32
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    plain = load_causal(options(tiny_folder(), None), seed=1, trainable=True).module
    assert trained == {name for name, parameter in plain.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "opt"])
def test_log_probabilities_and_gradients_are_those_of_the_dequantised_base(
    family: str, checkpointing: bool, precision: str, tiny_folder: Callable[..., Path]
):
    results = []
    for loaded in both(tiny_folder(family), checkpointing=checkpointing):
        logprobs = PackedModel(loaded.module, precision=precision).token_logprobs(PACK).logprobs
        logprobs.sum().backward()
        gradients = {name: p.grad for name, p in loaded.module.named_parameters() if p.requires_grad}
        results.append((logprobs, gradients))
    (found, ours), (expected, theirs) = results
    assert torch.allclose(found, expected, atol=1e-6)
    assert ours.keys() == theirs.keys() and all(gradient is not None for gradient in ours.values())
    for name, gradient in theirs.items():
        assert torch.allclose(ours[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())), name


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_reference_is_the_base_in_4_bits_to_the_bit(precision: str, tiny_folder: Callable[..., Path]):
    """Policy in training mode with a gradient, reference in evaluation without: the same products."""
    loaded = load_causal(options(tiny_folder()), seed=1, trainable=True)
    model = PackedModel(loaded.module, precision=precision)
    before = model.token_logprobs(PACK).logprobs
    with torch.no_grad(), as_reference(loaded.module.eval()):
        assert torch.equal(model.token_logprobs(PACK).logprobs, before)
    loaded.module.train()
    nudge(loaded.module.parameters(), 3)
    with torch.no_grad(), as_reference(loaded.module):
        assert torch.equal(model.token_logprobs(PACK).logprobs, before)
    assert model.token_logprobs(PACK).logprobs.requires_grad


def test_reward_model_critic_and_actor_stand_on_one_base_in_4_bits(tiny_folder: Callable[..., Path], tmp_path: Path):
    folder = tiny_folder()
    reward, _ = both(folder, load_scalar)
    save_adapter(reward.module, tmp_path / "adapter")
    expected = PackedModel(reward.module)
    policy = load_causal(options(folder), seed=1, trainable=True)
    head = shared.load_adapter(policy.module, REWARD, tmp_path / "adapter", seed=None, trainable=False)
    assert torch.allclose(AdapterScorer(policy.module, REWARD, head, None).scores(PACK), expected.scores(PACK), atol=1e-6)
    critic = AdapterModel(
        policy.module, CRITIC, shared.load_adapter(policy.module, CRITIC, tmp_path / "adapter", seed=1, trainable=True)
    )
    assert torch.allclose(critic.values(PACK), expected.values(PACK), atol=1e-6)
    matrices = [part for part in policy.module.modules() if isinstance(part, QuantizedLinear)]
    assert len(matrices) == 7 * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_model_loads_in_plain_transformers_with_the_same_numbers(
    dtype: str, tiny_folder: Callable[..., Path], tmp_path: Path
):
    loaded, _ = both(tiny_folder("qwen2"), dtype=dtype)
    before = {name: tensor.clone() for name, tensor in loaded.module.state_dict().items()}
    save_model(loaded, tmp_path / "model")
    save_adapter(loaded.module, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert plain.dtype == getattr(torch, dtype) and not hasattr(plain.config, "quantization_config")
    found, expected = (PackedModel(module).token_logprobs(PACK).logprobs for module in (plain.eval(), loaded.module))
    assert torch.allclose(found, expected, atol=1e-5 if dtype == "float32" else 0.1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.module.state_dict().items())

    from peft import PeftModel

    wrapped: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_folder("qwen2")), str(tmp_path / "adapter")
    )
    ours = {name: p for name, p in loaded.module.named_parameters() if "lora_" in name}
    assert ours and all(torch.equal(dict(wrapped.named_parameters())[name], p) for name, p in ours.items())


def test_a_merged_reward_model_scores_as_the_trained_one(tiny_folder: Callable[..., Path], tmp_path: Path):
    loaded, _ = both(tiny_folder(), load_scalar, target_modules=("q_proj", "up_proj"))
    save_model(loaded, tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.allclose(PackedModel(plain).scores(PACK), PackedModel(loaded.module).scores(PACK), atol=1e-5)


def test_a_continued_adapter_is_its_own_reference(tiny_folder: Callable[..., Path], tmp_path: Path):
    first, _ = both(tiny_folder())
    save_adapter(first.module, tmp_path / "adapter")
    expected = PackedModel(first.module).token_logprobs(PACK).logprobs
    loaded = load_causal(options(tiny_folder(), path=str(tmp_path / "adapter")), seed=2, trainable=True)
    model = PackedModel(loaded.module)
    assert torch.equal(model.token_logprobs(PACK).logprobs, expected)
    nudge(loaded.module.parameters(), 5)
    with as_reference(loaded.module):
        assert torch.equal(model.token_logprobs(PACK).logprobs, expected)


# ------------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("family", "kind"), [("gpt2", "Conv1D"), ("qwen3_moe", "Qwen3MoeExperts")])
def test_matrices_of_another_kind_are_refused(family: str, kind: str, tiny_folder: Callable[..., Path]):
    with pytest.raises(ConfigError, match=rf"model\.quantization: .*{kind}.*Set model\.quantization=null"):
        load_causal(options(tiny_folder(family)), seed=1, trainable=True)


def test_without_the_package_the_cure_is_said(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install 'accord\[quantization\]'"):
        load_causal(options(tiny_folder()), seed=1, trainable=True)


def test_it_is_not_divided_over_processes(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trained, "shards", lambda *_: True)
    loaded = load_causal(options(tiny_folder()), seed=1, trainable=True)
    with pytest.raises(ConfigError, match=r"Set train\.shard=never"):
        TrainedModel(loaded, Train(lr=1e-3), total_steps=1)


def test_a_frozen_model_beside_it_keeps_its_own_type(tiny_folder: Callable[..., Path]):
    module = load_causal(options(tiny_folder()), seed=1, trainable=False).module
    assert not any(isinstance(part, QuantizedLinear) for part in backbone(module).modules())
