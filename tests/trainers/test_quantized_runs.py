"""Training on a base in 4 bits: where it starts, that the sampler is the trainer, and what a run keeps and leaves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from accord.data.packing import make_pack
from accord.data.trees import single
from accord.models.forward import PackedModel
from accord.models.quantized import QuantizedLinear
from accord.trainers.ppo import PPOTrainer
from tests.trainers import ppo_setup
from tests.trainers.runs import trainer

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install 'accord[quantization]')")

NF4: dict[str, Any] = {"model": {"lora": {"rank": 4}, "quantization": "nf4"}}


class Interrupted(Exception):
    pass


def ppo(model: Path, run: Path, reward: Path, changes: dict[str, Any] | None = None) -> PPOTrainer:
    """Actor, critic, reward model and reference on one base in 4 bits."""
    own = {
        "model": {"lora": {"rank": 4, "share_base": True}, "quantization": "nf4"},
        "reward_model": {"path": str(reward)},
        "ppo": {"rewards": [{"type": "model"}]},
    }
    return ppo_setup.trainer(model, run, ppo_setup.merge(own, changes or {}))


@pytest.fixture
def reward_adapter(tiny_folder, tmp_path) -> Path:
    """What `accord reward` leaves on a base in 4 bits."""
    trainer("reward", tiny_folder("llama"), tmp_path / "reward", NF4 | {"train": {"max_steps": 2}}).train()
    return tmp_path / "reward" / "adapter"


@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_dpo_starts_at_ln_2(precision, precompute, tiny_folder, tmp_path):
    changes = {**NF4, "train": {"precision": precision}, "reference": {"precompute": precompute}}
    t = trainer("dpo", tiny_folder("llama"), tmp_path, changes)
    assert t.reference.frozen is None
    metrics = t.step(1)
    assert metrics["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6 if precision == "float32" or not precompute else 1e-2)
    assert t.step(2)["dpo/loss"] != pytest.approx(math.log(2), abs=1e-9)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("engine", [{}, {"release_inference_cache": True}, {"enabled": False}], ids=str)
def test_ppo_on_one_base_samples_with_what_it_trains(engine, precision, tiny_folder, reward_adapter, tmp_path):
    t = ppo(tiny_folder("llama"), tmp_path / "ppo", reward_adapter, {"engine": engine, "train": {"precision": precision}})
    assert t.critic.module is t.policy.module is t.sources[0].model.module
    assert sum(isinstance(part, QuantizedLinear) for part in t.policy.module.modules()) == 7 * 2
    difference = 1e-3 if precision == "float32" else 0.3
    first = t.step(1)
    assert first["ppo/sampler_logp_diff_max"] < difference
    assert abs(first["ppo/kl"]) < 1e-6, "the reference is the base that the policy starts from"
    assert first["ppo/ratio_mean"] == pytest.approx(1, abs=1e-5)
    later = t.step(2)
    assert later["ppo/sampler_logp_diff_max"] < difference and abs(later["ppo/kl"]) > 1e-6


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])
def test_the_sampler_is_the_trainer_of_other_families_too(family, tiny_folder, tmp_path):
    t = ppo_setup.trainer(tiny_folder(family), tmp_path, {**NF4, "generate": {"max_new_tokens": 16}})
    assert t.engine.generator.decoder is not None
    for step in (1, 2):
        assert t.step(step)["ppo/sampler_logp_diff_max"] < 1e-3


def test_ppo_that_was_killed_ends_in_the_same_bytes_and_its_checkpoints_hold_no_base(
    tiny_folder, reward_adapter, tmp_path, monkeypatch
):
    changes = {"checkpoint": {"every_steps": 1, "every_seconds": None}}
    plain_step = PPOTrainer.step

    def dies_at_step_3(self, step):
        if step == 3:
            raise Interrupted
        return plain_step(self, step)

    with ppo(tiny_folder("llama"), tmp_path / "whole", reward_adapter, changes) as t:
        t.train()
    monkeypatch.setattr(PPOTrainer, "step", dies_at_step_3)
    with pytest.raises(Interrupted), ppo(tiny_folder("llama"), tmp_path / "cut", reward_adapter, changes) as t:
        t.train()
    monkeypatch.setattr(PPOTrainer, "step", plain_step)
    with ppo(tiny_folder("llama"), tmp_path / "cut", reward_adapter, changes) as t:
        t.train()
    for part in ("model", "adapter", "critic"):
        (whole,), (cut,) = (list((tmp_path / run / part).glob("*.safetensors")) for run in ("whole", "cut"))
        assert whole.read_bytes() == cut.read_bytes(), part
    kept = set()
    for file in (tmp_path / "cut" / "checkpoints").rglob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            kept |= set(tensors.keys())
    assert kept and all("lora_" in name or "score" in name for name in kept), kept


def test_the_model_that_a_run_leaves_is_the_one_it_evaluated(tiny_folder, tmp_path):
    t = trainer("sft", tiny_folder("llama"), tmp_path, NF4)
    t.train()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert plain.dtype == torch.float32
    pack = make_pack([single(range(5, 25), [True] * 20)], [0])
    with t.model.evaluating():
        expected = t.model.token_logprobs(pack).logprobs
    assert torch.allclose(PackedModel(plain).token_logprobs(pack).logprobs, expected, atol=1e-5)
