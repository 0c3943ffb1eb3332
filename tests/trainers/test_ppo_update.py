"""A whole update of the trainer against the one of ppo_oracle.py: every metric, and the gradient of every parameter."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from accord.config.root import merge
from tests.trainers.ppo_oracle import Answer, ppo_update
from tests.trainers.ppo_setup import GivenAnswers, function, trainer

ANSWERS = [
    ([7, 8, 2], "stop"),
    ([9, 10, 11, 30, 12, 40, 5, 6], "length"),
    ([2], "stop"),
    ([30, 31, 31, 32, 2], "stop"),
    ([8, 8], "length"),
]
GROUPED = {"advantage": "grpo", "samples_per_prompt": 4}

CASES = {
    "gae": {"entropy_coef": 0.02, "value_coef": 0.5, "missing_eos_penalty": 0.3, "clip_reward": 0.6},
    "gae, nothing clipped or whitened": {"whiten_advantages": False, "value_clip": None, "clip": 0.9, "gamma": 0.9, "lam": 0.5},
    "gae, per answer": {"aggregation": "sequence", "clip_high": 0.4, "kl": {"estimator": "k3", "place": "loss"}},
    "gae, full KL in the reward": {"kl": {"estimator": "full"}, "normalize_score": True, "old_kl_coef": 0.7},
    "gae, ratio of the answer": {"ratio": "sequence", "clip": 0.02, "clip_high": 0.03, "kl": {"estimator": "abs"}},
    "gae, sampler": {"old_logprobs": "sampler", "is_clip": 1.1, "aggregation": "constant"},
    "grpo": {**GROUPED, "aggregation": "sequence", "kl": {"estimator": "k3", "place": "loss"}, "dual_clip": 1.05},
    "grpo, full KL in the loss": {**GROUPED, "entropy_coef": 0.1, "kl": {"estimator": "full", "place": "loss", "coef": 0.5}},
    "Dr. GRPO": {**GROUPED, "group_std": False, "aggregation": "constant", "kl": {"estimator": "k2", "place": "loss"}},
    "GSPO": {**GROUPED, "ratio": "sequence", "clip": 0.03, "aggregation": "sequence", "dual_clip": 1.02, "old_kl_coef": 0.3},
    "GSPO, sampler": {**GROUPED, "ratio": "sequence", "clip": 0.03, "old_logprobs": "sampler", "is_clip": 1.02, "whiten_advantages": True},
    "rloo": {**GROUPED, "advantage": "rloo", "kl": {"estimator": "k2"}, "clip_high": 0.28},
    "reinforce_pp": {"advantage": "reinforce_pp", "gamma": 0.9, "whiten_rewards": True, "kl": {"estimator": "k1"}},
    "reinforce, plain": {"advantage": "reinforce_pp", "whiten_advantages": False, "aggregation": "sequence"},
}  # fmt: skip


def rows_of(ppo, experience, compute) -> list[np.ndarray]:
    """What `compute` gives at each response's tokens, one response a time."""
    found = []
    for i in range(len(experience)):
        ((pack, _),) = experience.rollouts.packs([i], 1024)
        with torch.no_grad():
            found.append(compute(pack))
    return found


def raw_logits(model):
    """[T, V] in double precision: the float32 hidden states times the head."""

    def of(pack) -> np.ndarray:
        distribution = model.distribution(pack)
        return (distribution.hidden.double() @ distribution.weight.double().T).numpy()

    return of


def shake(model, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(("name", "budget"), [*((name, 80) for name in CASES), ("gae", 1024), ("GSPO", 1024)])
def test_a_whole_update_against_numpy(tiny_folder, tmp_path, name, budget):
    changes = {
        "train": {"max_tokens": budget, "max_grad_norm": 1e9},
        "data": {"max_length": 48},
        "generate": {"temperature": 0.8},
        "ppo": merge({"rewards": [function("length", weight=0.3)], "ratio_threshold": None, "kl": {"coef": 0.3}}, CASES[name]),
    }
    grouped = "samples_per_prompt" in CASES[name]
    if "advantage" in CASES[name]:
        changes["critic"] = {"lr": 5e-6}
    ppo = trainer(tiny_folder("llama"), tmp_path / "run", changes)
    shake(ppo.policy, 0.02, 1)  # away from the reference
    ppo.engine.generator = GivenAnswers(ANSWERS)
    experience = ppo.make_experience([ppo.examples.train[i] for i in range(2 if grouped else 8)])
    experience.rollouts.sampler_logprobs = experience.old_logprobs + 0.2 * torch.sin(torch.arange(len(experience.old_logprobs)))
    if experience.importance is not None:
        from accord.trainers.ppo_experience import importance_weights

        experience.importance = importance_weights(ppo.settings, experience.old_logprobs, experience.rollouts)
        experience.metrics["ppo/importance_weight"] = float(experience.importance.double().mean())
    old_logits, ref_logits = (rows_of(ppo, experience, raw_logits(m)) for m in (ppo.policy, ppo.reference.frozen))
    read_values = None if ppo.critic is None else lambda pack: ppo.critic.values(pack).double().numpy()
    old_values = rows_of(ppo, experience, read_values) if read_values else [None] * len(experience)
    shake(ppo.policy, 0.03, 2)  # as other mini-batches would have moved it
    if ppo.critic is not None:
        shake(ppo.critic, 0.02, 3)
    new_logits = rows_of(ppo, experience, raw_logits(ppo.policy))
    new_values = rows_of(ppo, experience, read_values) if read_values else [None] * len(experience)
    offsets = experience.rollouts.offsets
    answers = [
        Answer(
            list(sample.response_ids), i // 4 if grouped else i, experience.board.total[i], sample.truncated,
            old_logits[i], ref_logits[i], new_logits[i], old_values[i], new_values[i],
            experience.rollouts.sampler_logprobs[offsets[i] : offsets[i + 1]].double().numpy(),
        )
        for i, sample in enumerate(experience.rollouts.samples)
    ]  # fmt: skip
    settings = ppo.settings.model_dump()
    settings |= {f"kl_{key}": value for key, value in settings.pop("kl").items()}
    settings |= {"temperature": 0.8, "max_new_tokens": 8, "whiten_advantages": ppo.settings.whitens_advantages}
    expected = ppo_update(answers, settings)

    gradients = {}
    for key, model, step in (("policy", ppo.policy, ppo.engine.step), ("critic", ppo.critic, ppo.critic and ppo.critic.step)):
        if model is not None:

            def capture(key=key, model=model, step=step):
                gradients[key] = {n: p.grad.clone() for n, p in model.parameters.items() if p.grad is not None}
                return step()

            owner = ppo.engine if key == "policy" else model
            owner.step = capture
    plain = {"policy": copy.deepcopy(ppo.policy.module), "critic": copy.deepcopy(ppo.critic and ppo.critic.module)}
    metrics = experience.metrics | ppo.update(experience)

    assert experience.advantages.tolist() == pytest.approx(np.concatenate(expected.advantages).tolist(), abs=5e-6)
    optional = {"kl_loss": settings["kl_place"] == "loss", "old_kl_loss": settings["old_kl_coef"] > 0}
    optional |= dict.fromkeys(("value_loss", "value_clip_fraction", "explained_variance"), ppo.critic is not None)
    optional |= {"importance_weight": settings["old_logprobs"] == "sampler"}
    for metric, value in expected.metrics.items():
        if optional.get(metric.removeprefix("ppo/"), True):
            assert metrics[metric] == pytest.approx(value, rel=1e-6, abs=1e-6), metric
        else:
            assert metric not in metrics
    if name != "gae, nothing clipped or whitened":
        assert 0 < metrics["ppo/clip_fraction"] < 1

    # the oracle's slopes at the logits and values, carried to the parameters by a plain forward of each response alone
    for key, slopes in (("policy", expected.logit_gradients), ("critic", expected.value_gradients)):
        module = plain[key]
        if module is None:
            continue
        for i, sample in enumerate(experience.rollouts.samples):
            ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
            at = slice(len(sample.prompt_ids) - 1, -1)
            if key == "policy":
                out = module(input_ids=ids).logits[0, at]
            else:
                out = module.score(module.model(input_ids=ids).last_hidden_state)[0, at, 0]
            (out * torch.from_numpy(slopes[i]).float()).sum().backward()
        theirs = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        scale = max(float(g.abs().max()) for g in theirs.values())
        assert set(theirs) == set(gradients[key])
        for parameter, ours in gradients[key].items():
            assert torch.allclose(ours, theirs[parameter], atol=1e-5 * scale), (key, parameter)
