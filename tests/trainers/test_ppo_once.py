"""An experience of one optimizer step: its largest pack is read once, with the same numbers and weights as reading it twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from accord.config.root import merge
from accord.models.heads import backbone
from accord.trainers.critic import TextCritic
from accord.trainers.ppo_models import count_parameters
from tests.conftest import TEXTS, build_tiny
from tests.trainers.ppo_setup import function, largest_difference, trainer, weights

# Of each: the configuration, and how many models have a forward of their own.
CASES = {
    "gae": ({"ppo": {"entropy_coef": 0.01, "samples_per_prompt": 2}}, 2),
    "rewards by token": ({"ppo": {"rewards": [function("each_token", per_token=True)], "aggregation": "sequence"}}, 2),
    "lora, KL in the loss": ({"model": {"lora": {"rank": 4}}, "ppo": {"kl": {"place": "loss", "estimator": "full"}}}, 2),
    "checkpointing": ({"model": {"gradient_checkpointing": True}}, 2),
    "lora, checkpointing": ({"model": {"lora": {"rank": 4}, "gradient_checkpointing": True}}, 2),
    "grpo": (
        {"critic": {"lr": 5e-6}, "ppo": {"advantage": "grpo", "samples_per_prompt": 4, "kl": {"estimator": "full"}}},
        1,
    ),
    "soft-capped head": ({"family": "gemma2"}, 2),
    "trunk": ({"critic": {"share_trunk": True}}, 1),
    "trunk, lora": ({"critic": {"share_trunk": True}, "model": {"lora": {"rank": 4}}}, 1),
    "another tokenizer": ({"critic": {"path": "another"}}, 2),
}
PROMPTS_OF = {1: 4, 2: 4, 3: 6}  # how many prompts make so many packs, two in each


@pytest.fixture(scope="session")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with another tokenizer."""
    from accord.models.scratch import train_tokenizer

    folder = tmp_path_factory.mktemp("another")
    build_tiny("llama", seed=5, vocab_size=300).save_pretrained(folder)
    train_tokenizer(TEXTS[:2], 300).save_pretrained(folder)
    return folder


@pytest.fixture
def make(tiny_folder, another, tmp_path):
    """`make(packs, changes)` → a trainer whose step has so many packs, each with the answers to two prompts."""

    def made(packs: int, changes: dict[str, Any] | None = None):
        changes = dict(changes or {})
        family = changes.pop("family", "llama")
        if changes.get("critic", {}).get("path") == "another":
            changes = merge(changes, {"critic": {"path": str(another)}})
        # A prompt has 14 to 23 tokens, an answer up to 8.
        budget = 512 if packs == 1 else 44 + 20 * changes.get("ppo", {}).get("samples_per_prompt", 1)
        layout = {"train": {"max_tokens": budget, "batch_size": PROMPTS_OF[packs], "epochs": 2}, "data": {"max_length": 24}}
        return trainer(tiny_folder(family), tmp_path / "run", merge(layout, changes))

    return made


def prompts_of(ppo) -> list:
    return [ppo.examples.train[i] for i in range(ppo.config.train.batch_size)]


def forwards(ppo) -> list[bool]:
    """Notes every forward of actor and critic from now on: whether it is with gradient."""
    seen: list[bool] = []
    for trunk in {backbone(model.module) for model in (ppo.policy, ppo.critic) if model is not None}:
        trunk.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    generate = ppo.engine.generate

    def unseen(*args, **options):
        before = len(seen)
        answers = generate(*args, **options)
        del seen[before:]
        return answers

    ppo.engine.generate = unseen
    return seen


@pytest.mark.parametrize("packs", PROMPTS_OF)
@pytest.mark.parametrize("name", CASES)
def test_one_forward_of_the_largest_pack_serves_both(make, name, packs):
    changes, models = CASES[name]
    results = []
    for once in (True, False):
        ppo = make(packs, changes)
        if not once:
            ppo._keep_graphs = lambda batch: batch
        seen = forwards(ppo)
        experience = ppo.make_experience(prompts_of(ppo), once=True)
        assert len(experience.rollouts.minibatch(range(len(experience)), ppo.config.train.max_tokens).packs) == packs
        if once:
            kept, rows = experience.whole.packs[0]
            assert len(kept) == max(len(pack) for pack, _ in experience.whole.packs)
            assert torch.equal(experience.whole.first.tokens.logprobs, experience.old_logprobs[rows]), "its ratio is exactly 1"
            assert not experience.old_logprobs.requires_grad
            assert experience.values is None or not experience.values.requires_grad
            assert experience.whole.first.tokens.entropy.requires_grad == (ppo.settings.entropy_coef > 0)
        metrics = [ppo.improve(experience), ppo.improve(ppo.make_experience(prompts_of(ppo), once=True))]
        assert experience.whole is None
        results.append((metrics, weights(ppo.policy), ppo.critic and weights(ppo.critic), seen))
    (ours, policy, critic, few), (theirs, policy_too, critic_too, many) = results
    assert few.count(True) == many.count(True), "every pack is read once with gradient"
    if isinstance(ppo.critic, TextCritic):  # packs of its own
        assert many.count(False) - few.count(False) >= 2 * models
    else:
        assert few.count(True) == 2 * packs * models
        assert many.count(False) - few.count(False) == 2 * models, "and but the largest of each step once without"
    for one, other in zip(ours, theirs, strict=True):
        assert one["ppo/approx_kl"] == pytest.approx(0, abs=0 if packs == 1 else 1e-9)
        assert one["ppo/clip_fraction"] == 0 and one["ppo/updates"] == 1
        for metric, value in other.items():
            if metric.startswith(("ppo/", "train/")) and "tokens_per_s" not in metric:
                assert one[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric
    assert largest_difference(policy, policy_too) < 1e-5
    assert critic is None or largest_difference(critic, critic_too) < 1e-5


def test_the_step_is_the_same_in_one_pack_and_in_several(make):
    found = []
    for budget in (512, 64, 36):
        ppo = make(2, {"train": {"max_tokens": budget}})
        experience = ppo.make_experience(prompts_of(ppo), once=True)
        stats = ppo.update(experience)
        found.append(
            (len(experience.rollouts.minibatch(range(4), budget).packs), stats, weights(ppo.policy), weights(ppo.critic))
        )
    (packs, stats, policy, critic), *others = found
    assert packs == 1 and [other[0] for other in others] == [2, 4]
    for _, stats_too, policy_too, critic_too in others:
        for metric in ("ppo/policy_loss", "ppo/value_loss", "train/grad_norm", "ppo/critic_grad_norm"):
            assert stats_too[metric] == pytest.approx(stats[metric], rel=1e-4, abs=1e-6), metric
        assert largest_difference(policy, policy_too) < 2e-5 and largest_difference(critic, critic_too) < 2e-5


class Saved:
    """A tensor that a graph keeps for its backward pass."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()  # a node's own output would keep the node


def watched(ppo) -> dict[str, WeakSet[Saved]]:
    """What the graphs of actor and critic keep from now on. A forward with gradient while there is another graph of its model fails."""
    alive: dict[str, WeakSet[Saved]] = {"policy": WeakSet(), "critic": WeakSet()}

    def watch(name, read):
        def watching(*arguments):
            if not torch.is_grad_enabled():
                return read(*arguments)
            assert not alive[name], f"there is a graph of the {name}"

            def save(tensor: torch.Tensor) -> Saved:
                saved = Saved(tensor)
                alive[name].add(saved)
                return saved

            with saved_tensors_hooks(save, lambda saved: saved.tensor):
                return read(*arguments)

        return watching

    ppo.policy.distribution = watch("policy", ppo.policy.distribution)
    ppo.critic.values = watch("critic", ppo.critic.values)
    return alive


@pytest.mark.parametrize("changes", [{}, {"family": "gemma2"}, {"model": {"lora": {"rank": 4}}}])
def test_the_graphs_of_one_pack_at_most_are_there(make, changes):
    ppo = make(3, changes)
    alive = watched(ppo)
    for _ in range(2):
        experience = ppo.make_experience(prompts_of(ppo), once=True)
        assert len(experience.whole.packs) == 3 and alive["policy"] and alive["critic"]
        ppo.update(experience)
        assert not alive["policy"] and not alive["critic"]


@pytest.mark.parametrize("why", ["stopped_early", "skipped_minibatches"])
def test_a_step_that_is_not_made_keeps_no_graph(make, why):
    ppo = make(2, {"ppo": {"target_kl": 0.5, "ratio_threshold": 5.0}})
    alive, before, gradient = watched(ppo), weights(ppo.policy), ppo.updater.policy_gradient

    def far(*arguments):
        losses, stats = gradient(*arguments)
        return losses, stats | ({"ppo/approx_kl": 1.0} if why == "stopped_early" else {"ppo/ratio_mean": 10.0})

    ppo.updater.policy_gradient = far
    experience = ppo.make_experience(prompts_of(ppo), once=True)
    stats = ppo.update(experience)
    assert stats[f"ppo/{why}"] == 1 and stats["ppo/updates"] == 0 and largest_difference(before, weights(ppo.policy)) == 0
    assert not alive["policy"] and not alive["critic"]
    assert all(p.grad is None for model in (ppo.policy, ppo.critic) for p in model.parameters.values())
    ppo.updater.policy_gradient = gradient
    assert ppo.step(2)["ppo/updates"] == 1


def test_a_loss_that_is_not_finite_keeps_no_graph(make):
    ppo = make(1, {"train": {"on_nonfinite": "skip"}})
    alive = watched(ppo)
    experience = ppo.make_experience(prompts_of(ppo), once=True)
    experience.advantages[0] = float("nan")
    assert ppo.update(experience)["ppo/updates"] == 0
    assert not alive["policy"] and not alive["critic"]


def test_an_experience_that_is_only_looked_at_takes_its_graphs_with_it(make):
    ppo = make(2)
    alive = watched(ppo)
    experience = ppo.make_experience(prompts_of(ppo), once=True)
    assert alive["policy"] and alive["critic"]
    del experience
    assert not alive["policy"] and not alive["critic"]
    assert ppo.step(1)["ppo/updates"] == 1


@pytest.mark.parametrize("packs", PROMPTS_OF)
def test_operations_are_counted_as_they_are_made(make, packs):
    """6 a token and parameter for a forward and a backward pass, 4 for the backward pass alone."""
    ppo = make(packs)
    experience = ppo.make_experience(prompts_of(ppo), once=True)
    tokens = [len(pack) for pack, _ in experience.whole.packs]
    metrics = ppo.improve(experience)
    made = (4 * max(tokens) + 6 * (sum(tokens) - max(tokens))) * (count_parameters(ppo.policy) + count_parameters(ppo.critic))
    assert metrics["train/tokens"] == sum(tokens)
    assert metrics["throughput/train_tflops"] * metrics["time/train"] * 1e12 == pytest.approx(made)


@pytest.mark.parametrize(
    "changes",
    [
        {"ppo": {"ppo_epochs": 2}},
        {"ppo": {"mini_batches": 2}},
        {"ppo": {"replay_buffer": 1}},
        {"critic": {"warmup_steps": 1}},
        {"ppo": {"objective": "sft", "samples_per_prompt": 2, "kl": {"coef": 0.05}, "clip_reward": 5.0}, "critic": {"lr": 5e-6}},
    ],
)
def test_what_is_read_again_keeps_no_graph(make, changes):
    for packs in (1, 2):
        ppo = make(packs, changes)
        assert ppo.make_experience(prompts_of(ppo), once=True).whole is None


@pytest.mark.parametrize("packs", [1, 2])
def test_only_who_promises_gets_the_graphs_and_only_for_one_update(make, packs):
    ppo = make(packs)
    assert ppo.make_experience(prompts_of(ppo)).whole is None
    experience = ppo.make_experience(prompts_of(ppo), once=True)
    assert experience.whole is not None
    ppo.update(experience)
    assert experience.whole is None
    stats = ppo.update(experience)  # again, against the promise: read anew
    assert stats["ppo/approx_kl"] > 0 and torch.isfinite(torch.tensor(stats["ppo/policy_loss"]))
