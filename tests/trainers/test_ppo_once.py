"""An experience of one optimizer step is read once: the same numbers and weights, with fewer forwards."""

from __future__ import annotations

import pytest
import torch

from tests.trainers.ppo_setup import largest_difference, trainer, weights

CASES = {
    "gae": {"ppo": {"entropy_coef": 0.01, "samples_per_prompt": 2}},
    "lora, KL in the loss": {"model": {"lora": {"rank": 4, "alpha": 8.0}}, "ppo": {"kl": {"place": "loss", "estimator": "full"}}},
    "checkpointing": {"model": {"gradient_checkpointing": True}},
    "grpo": {"critic": {"lr": 5e-6}, "ppo": {"advantage": "grpo", "samples_per_prompt": 4, "kl": {"estimator": "full"}}},
    "soft-capped head": {"family": "gemma2"},
}


def forwards(ppo) -> list[str]:
    """Notes every forward of actor and critic from now on."""
    seen: list[str] = []
    for name, model in (("policy", ppo.policy), ("critic", ppo.critic)):
        if model is not None:
            model.module.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
            model.inner.base_model.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    return seen


@pytest.mark.parametrize("name", CASES)
def test_one_forward_serves_both(tiny_folder, tmp_path, name):
    changes = dict(CASES[name])
    folder = tiny_folder(changes.pop("family", "llama"))
    results = []
    for once in (True, False):
        ppo = trainer(folder, tmp_path / "run", {"train": {"max_tokens": 512}, **changes})
        if not once:
            ppo._read_whole = lambda rollouts: None
        seen = forwards(ppo)
        ppo.engine.generate, calls = counting(ppo.engine.generate, seen)
        metrics = [ppo.step(step) for step in (1, 2)]
        results.append((metrics, weights(ppo.policy), ppo.critic and weights(ppo.critic), len(seen) - calls[0]))
    (ours, policy, critic, few), (theirs, policy_too, critic_too, many) = results
    assert few < many
    for one, other in zip(ours, theirs, strict=True):
        assert one["ppo/approx_kl"] == 0 and one["ppo/clip_fraction"] == 0 and one["ppo/updates"] == 1
        for metric, value in other.items():
            if metric.startswith(("ppo/", "train/")) and "tokens_per_s" not in metric:
                assert one[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric
    assert largest_difference(policy, policy_too) < 1e-5
    assert critic is None or largest_difference(critic, critic_too) < 1e-5


def counting(generate, seen):
    """`generate`, and how many of the forwards in `seen` are the sampler's."""
    calls = [0]

    def counted(*args, **options):
        before = len(seen)
        answers = generate(*args, **options)
        calls[0] += len(seen) - before
        return answers

    return counted, calls


@pytest.mark.parametrize(
    "changes",
    [
        {"ppo": {"ppo_epochs": 2}},
        {"ppo": {"mini_batches": 2}},
        {"train": {"max_tokens": 72}},
        {"critic": {"warmup_steps": 1}},
    ],
)
def test_what_is_read_again_keeps_no_graph(tiny_folder, tmp_path, changes):
    ppo = trainer(tiny_folder("llama"), tmp_path / "run", changes)
    prompts = [ppo.examples.train[i] for i in range(4)]
    assert ppo.make_experience(prompts, once=True).whole is None


def test_only_who_promises_gets_the_graph_and_only_for_one_update(tiny_folder, tmp_path):
    ppo = trainer(tiny_folder("llama"), tmp_path / "run")
    prompts = [ppo.examples.train[i] for i in range(4)]
    assert ppo.make_experience(prompts).whole is None
    experience = ppo.make_experience(prompts, once=True)
    assert experience.whole is not None and not experience.old_logprobs.requires_grad and not experience.values.requires_grad
    ppo.update(experience)
    assert experience.whole is None
    stats = ppo.update(experience)  # again, against the promise: read anew
    assert stats["ppo/approx_kl"] > 0 and torch.isfinite(torch.tensor(stats["ppo/policy_loss"]))
