"""`ppo.objective: dpo` and `sft`: learning from the best of each prompt's answers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from accord.config import Config
from accord.errors import ConfigError
from accord.trainers.ppo_best import best_and_worst, ranking_scores
from tests.trainers.ppo_setup import PROMPTS, function, largest_difference, merge, trainer, weights

BEST = {
    "critic": {"lr": 5.0e-6},
    "ppo": {"clip_reward": 5.0, "kl": {"coef": 0.05}, "samples_per_prompt": 4},
    "dpo": {"beta": 0.5},
}


def best(objective: str, model, run, changes=None, **options):
    return trainer(model, run, merge(merge(BEST, {"ppo": {"objective": objective}}), changes or {}), **options)


def sequence_logps(module, samples) -> list[torch.Tensor]:
    """[tokens] log π of each response, one at a time in plain transformers."""
    result = []
    for sample in samples:
        ids = torch.tensor([*sample.prompt_ids, *sample.response_ids])
        logp = module(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        result.append(logp[len(sample.prompt_ids) - 1 :].double())
    return result


def test_the_first_of_the_best_and_of_the_worst():
    assert best_and_worst([1.0, 3.0, 3.0, 0.0, 5.0, 5.0], [0, 0, 0, 1, 2, 2]) == [(1, 0), (3, 3), (4, 4)]


def test_an_answer_without_an_end_is_ranked_lower(tiny_folder, tmp_path):
    t = best("dpo", tiny_folder(), tmp_path, {"ppo": {"missing_eos_penalty": 0.7}})
    experience = t.make_experience(["Why?", "Dogs"])
    ranked = ranking_scores(experience.board, experience.rollouts, 0.7)
    for score, raw, sample in zip(ranked, experience.board.total, experience.rollouts.samples, strict=True):
        assert score == pytest.approx(raw - 0.7 * sample.truncated)


@pytest.mark.parametrize("max_tokens", [256, 80])
def test_the_dpo_update_is_that_of_a_loop(max_tokens, tiny_folder, tmp_path, monkeypatch):
    """The second experience, when the policy has left its reference, against separate forwards of plain models."""
    t = best("dpo", tiny_folder(), tmp_path, {"train": {"max_tokens": max_tokens}})
    t.step(1)
    policy, reference = (AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32) for _ in range(2))
    policy.load_state_dict({name: p.detach() for name, p in t.policy.module.state_dict().items()})
    experience = t.make_experience([t.examples.train[i] for i in t.order.batch(2)])
    samples, scores = experience.rollouts.samples, experience.board.total
    losses, margins = [], []
    logps = sequence_logps(policy, samples)
    with torch.no_grad():
        ref = sequence_logps(reference, samples)
    for first in range(0, len(samples), 4):
        group = range(first, first + 4)
        high, low = max(group, key=lambda i: scores[i]), min(group, key=lambda i: scores[i])
        if scores[high] > scores[low]:
            margin = 0.5 * ((logps[high] - ref[high]).sum() - (logps[low] - ref[low]).sum())
            margins.append(float(margin))
            losses.append(-F.logsigmoid(margin))
    expected = torch.stack(losses).mean()
    expected.backward()
    found = {}
    monkeypatch.setattr(
        t.engine, "step", lambda: found.update({n: p.grad.clone() for n, p in t.policy.parameters.items()}) or t.policy.step()
    )
    stats = t.update(experience)
    assert stats["ppo/pairs"] == len(losses) and stats["ppo/policy_loss"] == pytest.approx(float(expected), abs=1e-6)
    assert stats["ppo/pair_margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-5)
    assert stats["ppo/pair_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    for name, parameter in policy.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=2e-6), name


def test_the_first_online_dpo_step_has_the_loss_ln_2(tiny_folder, tmp_path):
    metrics = best("dpo", tiny_folder(), tmp_path).step(1)
    assert metrics["ppo/policy_loss"] == pytest.approx(math.log(2), abs=1e-6) and metrics["ppo/kl"] == pytest.approx(0, abs=1e-4)
    assert "ppo/value_loss" not in metrics and "ppo/kl_coef" not in metrics


def test_the_sft_update_imitates_the_best(tiny_folder, tmp_path):
    t = best("sft", tiny_folder(), tmp_path)
    experience = t.make_experience([t.examples.train[i] for i in t.order.batch(1)])
    module = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    scores, samples = experience.board.total, experience.rollouts.samples
    chosen = [max(range(first, first + 4), key=lambda i: scores[i]) for first in range(0, len(samples), 4)]
    with torch.no_grad():
        logps = torch.cat(sequence_logps(module, [samples[i] for i in chosen]))
    stats = t.update(experience)
    assert stats["ppo/policy_loss"] == pytest.approx(float(-logps.mean()), abs=1e-5)
    assert stats["ppo/best_score"] == pytest.approx(sum(scores[i] for i in chosen) / len(chosen))


@pytest.mark.parametrize("objective", ["dpo", "sft"])
def test_it_learns_what_is_scored_and_the_opposite_from_opposite_scores(objective, tiny_folder, tmp_path):
    changes = {"train": {"max_steps": 25, "lr": 3e-3, "batch_size": 8}, "ppo": {"samples_per_prompt": 8}}
    ends = {}
    for sign in (1.0, -1.0):
        more = merge(changes, {"ppo": {"rewards": [function("letters", weight=sign)]}})
        t = best(objective, tiny_folder(), tmp_path / f"{sign}", more)
        history = [t.step(step)["ppo/score/letters"] for step in range(1, 26)]
        ends[sign] = sum(history[-5:]) / 5, sum(history[:3]) / 3
    assert ends[1.0][0] > ends[1.0][1] + 0.04
    assert ends[-1.0][0] < ends[1.0][0] - 0.06


def test_equal_scores_change_nothing_in_online_dpo(tiny_folder, tmp_path):
    t = best("dpo", tiny_folder(), tmp_path, {"ppo": {"rewards": [function("constant")]}})
    before = weights(t.policy)
    metrics = t.step(1)
    assert metrics["ppo/pairs"] == metrics["ppo/updates"] == 0 and largest_difference(before, weights(t.policy)) == 0


@pytest.mark.parametrize("objective", ["dpo", "sft"])
def test_a_run_goes_to_its_end_and_a_resumed_one_has_the_same_weights(objective, tiny_folder, tmp_path, monkeypatch):
    from tests.trainers.runs import weights as saved

    changes = {"train": {"max_steps": 4}, "checkpoint": {"every_steps": 2}, "ppo": {"ppo_epochs": 2, "mini_batches": 2}}
    best(objective, tiny_folder(), tmp_path / "whole", changes).train()
    cut = best(objective, tiny_folder(), tmp_path / "cut", changes)
    step = cut.step
    cut.step = lambda number: step(number) if number < 4 else (_ for _ in ()).throw(RuntimeError("power cut"))
    with pytest.raises(RuntimeError):
        cut.train()
    best(objective, tiny_folder(), tmp_path / "cut", changes).train()
    ours, theirs = saved(tmp_path / "cut" / "model"), saved(tmp_path / "whole" / "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not (tmp_path / "whole" / "critic").exists()


def test_lora_and_a_moving_beta(tiny_folder, tmp_path):
    t = best(
        "dpo", tiny_folder(), tmp_path, {"model": {"lora": {"rank": 2}}, "dpo": {"beta_end": 1.0}, "train": {"max_steps": 3}}
    )
    assert all(math.isfinite(t.step(step)["ppo/policy_loss"]) for step in (1, 2, 3))
    assert len(PROMPTS) == len(t.examples.train)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ppo": {"objective": "dpo"}}, "compares the answers to one prompt and needs at least 2"),
        ({"ppo": {"objective": "dpo", "samples_per_prompt": 2, "clip": 0.1}}, r"ppo\.clip: does nothing with ppo\.objective=dpo"),
        ({"ppo": {"objective": "sft", "samples_per_prompt": 2, "kl": {"coef": 0.5}}}, r"ppo\.kl\.coef: does nothing"),
        ({"ppo": {"objective": "sft", "samples_per_prompt": 2, "lam": 0.5}}, r"ppo\.lam: does nothing with ppo\.objective=sft"),
        ({"ppo": {"objective": "sft", "samples_per_prompt": 2, "advantage": "grpo"}}, r"ppo\.advantage: does nothing"),
        ({"ppo": {"objective": "dpo", "samples_per_prompt": 9, "mini_batches": 33}}, "learns once from each of 32 prompts"),
        ({"ppo": {"objective": "dpo", "samples_per_prompt": 2}, "dpo": {"loss_type": "kto"}}, "kto learns from single answers"),
    ],
)  # fmt: skip
def test_what_the_best_answer_has_no_use_for_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Config(**({"model": {"path": "m"}, "reward_model": {"path": "r"}} | changes)).for_stage("ppo")
