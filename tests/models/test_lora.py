"""LoRA: the start is the base, the reference is the start, merging drifts nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accord.config import Lora, Model
from accord.errors import ConfigError
from accord.models.load import LoadedModel, load_causal, load_scalar
from accord.models.lora import REFERENCE, as_reference, merged_state
from accord.models.save import save_adapter, save_model

IDS = torch.tensor([[5, 9, 200, 31, 7, 44, 300, 12]])


def load(folder: Path, dtype: str = "float32", **lora: Any) -> LoadedModel:
    return load_causal(Model(path=str(folder), dtype=dtype, lora=Lora(rank=2, **lora)), seed=1, trainable=True)  # type: ignore[arg-type]


def nudge(loaded: LoadedModel, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(IDS).logits


def test_a_new_adapter_changes_nothing_and_comes_from_the_seed(tiny_folder: Callable[..., Path]):
    base = load_causal(Model(path=str(tiny_folder())), seed=1, trainable=False)
    one, same = load(tiny_folder()), load(tiny_folder())
    assert torch.equal(logits(one.module), logits(base.module))
    assert all(
        torch.equal(a, b) for a, b in zip(one.module.state_dict().values(), same.module.state_dict().values(), strict=True)
    )


def test_the_output_head_and_embeddings_are_left_alone_by_all_linear(tiny_folder: Callable[..., Path]):
    adapted = {name.split(".lora_")[0] for name, p in load(tiny_folder()).module.named_parameters() if p.requires_grad}
    assert len(adapted) == 2 * 7 and not any("lm_head" in name or "embed" in name for name in adapted)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_the_reference_of_a_new_adapter_is_the_base_to_the_bit(family: str, tiny_folder: Callable[..., Path]):
    base = load_causal(Model(path=str(tiny_folder(family))), seed=1, trainable=False)
    loaded = load(tiny_folder(family))
    loaded.module.eval()
    nudge(loaded)
    with as_reference(loaded.module):
        assert torch.equal(logits(loaded.module), logits(base.module))
    assert not torch.equal(logits(loaded.module), logits(base.module))


def test_the_reference_of_a_continued_adapter_is_that_adapter_as_it_was(tiny_folder: Callable[..., Path], tmp_path: Path):
    first = load(tiny_folder())
    nudge(first)
    save_adapter(first.module, tmp_path / "adapter")
    start = logits(first.module.eval())

    loaded = load(tiny_folder(), path=str(tmp_path / "adapter"))
    loaded.module.eval()
    assert torch.equal(logits(loaded.module), start), "training goes on from the adapter"
    trained = {name for name, p in loaded.module.named_parameters() if p.requires_grad}
    assert trained and not any(REFERENCE in name for name in trained)
    nudge(loaded, seed=1)
    assert not torch.equal(logits(loaded.module), start)
    with as_reference(loaded.module):
        assert torch.equal(logits(loaded.module), start)

    save_adapter(loaded.module, tmp_path / "second")
    assert torch.equal(logits(load(tiny_folder(), path=str(tmp_path / "second")).module.eval()), logits(loaded.module))


def test_looking_at_the_reference_between_forward_and_backward_leaves_the_gradient_alone(tiny_folder: Callable[..., Path]):
    def gradient(look: bool) -> list[torch.Tensor]:
        loaded = load(tiny_folder())
        nudge(loaded)
        loss = loaded.module(IDS).logits.square().mean()
        if look:
            with as_reference(loaded.module):
                logits(loaded.module)
        loss.backward()
        return [p.grad for p in loaded.module.parameters() if p.grad is not None]

    plain, looked = gradient(False), gradient(True)
    assert plain and all(torch.equal(a, b) for a, b in zip(plain, looked, strict=True))


def test_an_error_inside_the_reference_switches_the_adapter_on_again(tiny_folder: Callable[..., Path]):
    loaded = load(tiny_folder())
    nudge(loaded)
    expected = logits(loaded.module)
    with pytest.raises(RuntimeError), as_reference(loaded.module):
        raise RuntimeError
    assert torch.equal(logits(loaded.module), expected)


def test_merged_weights_are_the_base_plus_alpha_over_rank_times_b_a(tiny_folder: Callable[..., Path]):
    loaded = load(tiny_folder(), alpha=8)
    nudge(loaded)
    part: Any = loaded.module.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    a, b = part.lora_A["default"].weight.double(), part.lora_B["default"].weight.double()
    expected = part.base_layer.weight.double() + 8 / 2 * b @ a
    merged = merged_state(loaded.module)["model.layers.0.mlp.up_proj.weight"]
    torch.testing.assert_close(merged.double(), expected, rtol=1e-6, atol=1e-7)


def test_merging_a_hundred_times_leaves_the_training_weights_to_the_bit(tiny_folder: Callable[..., Path]):
    loaded = load(tiny_folder(), dtype="bfloat16")
    nudge(loaded)
    before = {name: tensor.clone() for name, tensor in loaded.module.state_dict().items()}
    first = merged_state(loaded.module)
    for _ in range(100):
        last = merged_state(loaded.module)
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.module.state_dict().items())


def test_a_bf16_base_is_exported_in_bf16_rounded_once(tiny_folder: Callable[..., Path], tmp_path: Path):
    loaded = load(tiny_folder(), dtype="bfloat16")
    nudge(loaded)
    save_model(loaded, tmp_path / "model")
    again = load_causal(Model(path=str(tmp_path / "model")), seed=1, trainable=False, dtype="bfloat16")
    expected = merged_state(loaded.module)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.module.state_dict().items())
    config = (tmp_path / "model" / "config.json").read_text()
    assert '"dtype": "bfloat16"' in config


def test_a_reward_models_head_is_trained_whole_beside_the_adapter(tiny_folder: Callable[..., Path]):
    loaded = load_scalar(str(tiny_folder()), Model(dtype="bfloat16", lora=Lora(rank=2)), seed=1, trainable=True)
    trained = {name: p for name, p in loaded.module.named_parameters() if p.requires_grad}
    assert [name for name in trained if "score" in name] and {p.dtype for p in trained.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("targets", "said"), [(("nothing_like_it",), "Its linear layers are .*q_proj"), ("bad(", "target_modules")]
)
def test_targets_that_fit_nothing_are_refused(targets: Any, said: str, tiny_folder: Callable[..., Path]):
    with pytest.raises(ConfigError, match=said):
        load(tiny_folder(), target_modules=targets)


def test_an_adapter_of_another_model_or_none_is_refused(tiny_folder: Callable[..., Path], tmp_path: Path):
    with pytest.raises(ConfigError, match="no such folder"):
        load(tiny_folder(), path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="holds no adapter"):
        load(tiny_folder(), path=str(tiny_folder()))
    save_adapter(load(tiny_folder("llama", hidden_size=64)).module, tmp_path / "other")
    with pytest.raises(ConfigError, match="does not fit this model"):
        load(tiny_folder(), path=str(tmp_path / "other"))
