"""PPO with each kind of critic: a run leaves it, resumes it to the byte, and one forward serves two where trunk or base is one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accord.config import Model
from accord.config.root import merge
from accord.errors import Interrupted
from accord.models.load import load_scalar
from accord.models.save import save_adapter, save_model
from accord.models.shared import AdapterScorer, find_adapter
from accord.trainers.critic import AdapterCritic, HeadCritic, TextCritic
from accord.trainers.ppo import PPOTrainer
from tests.conftest import TEXTS, build_tiny
from tests.trainers.ppo_setup import PROMPTS, largest_difference, settings, weights
from tests.trainers.test_ppo_run import digest


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with another tokenizer."""
    from accord.models.scratch import train_tokenizer

    folder = tmp_path_factory.mktemp("other")
    build_tiny("llama", seed=5, vocab_size=300).save_pretrained(folder)
    train_tokenizer(TEXTS[:2], 300).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reward_run(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reward run with LoRA leaves."""
    run = tmp_path_factory.mktemp("reward")
    model = Model(path=str(tiny_folder("llama")), lora={"rank": 2})  # type: ignore[arg-type]
    loaded = load_scalar(str(tiny_folder("llama")), model, seed=6, trainable=True)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            parameter.add_(0.05 * parameter.requires_grad)
    save_adapter(loaded.module, run / "adapter")
    save_model(loaded, run / "model")
    return run


@pytest.fixture
def variant(other_folder: Path, reward_run: Path) -> Callable[[str], dict[str, Any]]:
    def changes(name: str) -> dict[str, Any]:
        return {
            "text": {"critic": {"path": str(other_folder)}},
            "trunk": {"critic": {"share_trunk": True}},
            "trunk-lora": {"critic": {"share_trunk": True}, "model": {"lora": {"rank": 2}}},
            "base": {
                "model": {"lora": {"rank": 2, "share_base": True}},
                "reward_model": {"path": str(reward_run)},
                "ppo": {"rewards": [{"type": "model"}]},
            },
        }[name]

    return changes


VARIANTS = ["text", "trunk", "trunk-lora", "base"]


@pytest.mark.parametrize("name", VARIANTS)
def test_an_interrupted_run_ends_in_the_same_bytes_whatever_the_critic(name: str, tiny_folder, variant, tmp_path, monkeypatch):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    changes = {
        "data": {"train": str(file), "holdout": 0.25},
        "train": {"batch_size": 2},
        "critic": {"warmup_steps": 1},
        "checkpoint": {"every_steps": 1},
        "ppo": {"mini_batches": 2, "ppo_epochs": 2},
    }
    changes = merge(changes, variant(name))
    with PPOTrainer(settings(tiny_folder("llama"), tmp_path / "whole", changes)) as trainer:
        trainer.train()
    plain_step = PPOTrainer.step

    def dies_at_step_3(self, step):
        if step == 3:
            raise Interrupted("killed")
        return plain_step(self, step)

    config = settings(tiny_folder("llama"), tmp_path / "cut", changes)
    monkeypatch.setattr(PPOTrainer, "step", dies_at_step_3)
    with pytest.raises(Interrupted), PPOTrainer(config) as trainer:
        trainer.train()
    monkeypatch.setattr(PPOTrainer, "step", plain_step)
    with PPOTrainer(config) as trainer:
        trainer.train()
    for part in ("model", "critic"):
        whole, cut = digest(tmp_path / "whole" / part), digest(tmp_path / "cut" / part)
        assert whole and whole == cut, part
    if name == "base":
        assert find_adapter(str(tmp_path / "cut" / "critic")) == tmp_path / "cut" / "critic"


@pytest.mark.parametrize("name", VARIANTS)
def test_in_warm_up_the_critic_learns_and_the_policy_does_not(name: str, tiny_folder, variant, tmp_path):
    changes = merge({"critic": {"warmup_steps": 1}, "ppo": {"ppo_epochs": 2}}, variant(name))
    trainer = PPOTrainer(settings(tiny_folder("llama"), tmp_path / "run", changes), train_dataset=PROMPTS)
    assert isinstance(trainer.critic, {"text": TextCritic, "base": AdapterCritic}.get(name, HeadCritic))
    before = weights(trainer.policy), weights(trainer.critic)
    trainer.step(1)
    assert largest_difference(before[0], weights(trainer.policy)) == 0 < largest_difference(before[1], weights(trainer.critic))
    assert all(p.grad is None for p in trainer.policy.parameters.values())
    metrics = trainer.step(2)
    assert largest_difference(before[0], weights(trainer.policy)) > 0
    assert metrics["ppo/updates"] == 2 and metrics["ppo/critic_grad_norm"] > 0 and metrics["ppo/value_loss"] > 0


def test_a_shared_trunk_takes_the_steps_of_both_losses_in_one(tiny_folder, tmp_path):
    """Against the two gradients computed apart; with value_coef 0 the trunk's are the policy's alone."""
    found = {}
    for coef in (0.0, 0.5):
        changes = {"critic": {"share_trunk": True}, "ppo": {"value_coef": coef, "value_clip": None}}
        trainer = PPOTrainer(settings(tiny_folder("llama"), tmp_path / "run", changes), train_dataset=PROMPTS)
        experience = trainer.make_experience([trainer.examples.train[i] for i in range(4)])
        batch = experience.rollouts.minibatch(range(4), 256)
        trainer.updater.policy_gradient(experience, batch, 0.0)
        found[coef] = {name: p.grad.clone() for name, p in trainer.policy.parameters.items()}
    trainer.updater.discard()
    assert trainer.critic is not None and trainer.critic.head.weight.grad is None
    for pack, rows in batch.packs:
        hidden, predict, _ = trainer.policy.hidden(pack)
        values = (hidden[predict] @ trainer.critic.head.weight.T)[:, 0]
        (0.5 * 0.5 * (values - experience.returns[rows]).square().sum() / batch.tokens).backward()
    for name, parameter in trainer.policy.parameters.items():
        expected = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        assert torch.allclose(found[0.5][name] - found[0.0][name], expected, rtol=1e-3, atol=1e-5), name


def test_an_update_on_a_shared_trunk_reads_the_trunk_once(tiny_folder, tmp_path):
    trainer = PPOTrainer(
        settings(tiny_folder("llama"), tmp_path / "run", {"critic": {"share_trunk": True}}), train_dataset=PROMPTS
    )
    forwards: list[int] = []
    trainer.policy.inner.model.register_forward_hook(lambda *_: forwards.append(1))
    experience = trainer.make_experience([trainer.examples.train[i] for i in range(4)])
    assert len(forwards) == len(experience.rollouts.minibatch(range(4), 256).packs), "the experience too"
    forwards.clear()
    trainer.step(1)
    assert len(forwards) == 1, "an experience that is one optimizer step"
    forwards.clear()
    trainer.update(experience)
    assert len(forwards) == len(experience.rollouts.minibatch(range(4), 256).packs)


def test_ppo_on_one_base_holds_one_model_and_steps_as_with_separate_ones(tiny_folder, reward_run, tmp_path):
    runs = {}
    for share in ("auto", False):
        changes = {
            "model": {"lora": {"rank": 2, "share_base": share}},
            "reward_model": {"path": str(reward_run / "model")},
            "critic": {"path": str(tiny_folder("llama"))},
            "ppo": {"rewards": [{"type": "model"}]},
        }
        config = settings(tiny_folder("llama"), tmp_path / f"run-{share}", changes)
        trainer = runs[share] = PPOTrainer(config, train_dataset=PROMPTS)
        trainer.metrics = [trainer.step(step) for step in (1, 2)]
    one, separate = runs["auto"], runs[False]
    assert one.critic.module is one.policy.module is one.sources[0].model.module and isinstance(
        one.sources[0].model, AdapterScorer
    )
    assert separate.critic.module is not separate.policy.module
    for a, b in zip(one.metrics, separate.metrics, strict=True):
        for name in ("ppo/score", "ppo/kl", "ppo/value_loss", "ppo/policy_loss", "ppo/explained_variance"):
            assert a[name] == pytest.approx(b[name], abs=1e-4), name
    assert largest_difference(weights(one.policy), weights(separate.policy)) < 1e-5
