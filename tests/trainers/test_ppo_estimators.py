"""Every way to estimate advantages in a whole trainer: what is learned, what is loaded, how a step's prompts are gathered."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch

import accord.trainers.ppo as module
from accord.errors import ConfigError, DataError, Interrupted
from accord.trainers.ppo import PPOTrainer
from tests.trainers.ppo_setup import PROMPTS, GivenAnswers, function, largest_difference, settings, trainer, weights
from tests.trainers.test_ppo_run import digest

GRPO = {"advantage": "grpo", "samples_per_prompt": 4}
NO_CRITIC = {"critic": {"lr": 5e-6}}  # its default


@pytest.fixture
def make(tiny_folder, tmp_path):
    def build(changes=None, family="llama", **options):
        changes = copy.deepcopy(changes or {})
        if changes.get("ppo", {}).get("advantage", "gae") != "gae":
            changes |= NO_CRITIC
        return trainer(tiny_folder(family), tmp_path / "run", changes, **options)

    return build


class LowTokens:
    """A bandit's arm: the share of an answer's tokens in the lower half of the vocabulary."""

    name, weight = "low", 1.0

    def score(self, samples):
        return [sum(token < 256 for token in sample.response_ids) / len(sample.response_ids) for sample in samples]


# -- learning --------------------------------------------------------------------------------------------------------------

ESTIMATORS = {
    "gae": {"samples_per_prompt": 4},
    "grpo": GRPO,
    "Dr. GRPO": {**GRPO, "group_std": False, "aggregation": "constant"},
    "GSPO": {**GRPO, "ratio": "sequence", "aggregation": "sequence"},
    "rloo": {**GRPO, "advantage": "rloo"},
    "reinforce_pp": {"advantage": "reinforce_pp", "samples_per_prompt": 4},
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_bandit_is_learned_and_unlearned_when_the_sign_is_wrong(make, monkeypatch, name):
    def gained() -> float:
        changes = {
            "train": {"batch_size": 8, "max_steps": 7, "lr": 3e-2},
            "generate": {"max_new_tokens": 2},
            "ppo": {"kl": {"coef": 0.0}, "ppo_epochs": 2, "ratio_threshold": None, **ESTIMATORS[name]},
        }
        ppo = make(changes)
        ppo.sources = [LowTokens()]
        scores = [ppo.step(step)["ppo/score"] for step in range(1, 8)]
        return scores[-1] - scores[0]

    assert gained() > 0.25
    right = module.estimate_advantages

    def wrong(*args):
        advantages, returns = right(*args)
        return -advantages, returns

    monkeypatch.setattr(module, "estimate_advantages", wrong)
    assert gained() < -0.2


def test_equal_scores_move_nothing(make):
    """No advantage, no gradient: exactly."""
    ppo = make({"ppo": {**GRPO, "rewards": [function("constant")], "kl": {"coef": 0.0}}})
    before = weights(ppo.policy)
    stats = ppo.step(1)
    assert stats["ppo/policy_loss"] == 0 == stats["train/grad_norm"]
    assert largest_difference(before, weights(ppo.policy)) == 0


def test_answers_are_compared_with_those_to_the_same_prompt(make):
    ppo = make({"ppo": {**GRPO, "samples_per_prompt": 2, "kl": {"coef": 0.0}, "group_std": False}})
    ppo.engine.generator = GivenAnswers([([7], "length"), ([300, 2], "stop"), ([8, 300], "length"), ([301, 2], "stop")])
    ppo.sources = [LowTokens()]  # scores 1, ½, ½, ½
    experience = ppo.make_experience([ppo.examples.train[i] for i in range(2)])
    assert experience.advantages.tolist() == [0.25, -0.25, -0.25, 0, 0, 0, 0]


# -- without a critic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce_pp"])
def test_without_a_critic_none_is_loaded_saved_or_spoken_of(make, monkeypatch, tmp_path, advantage):
    def never(*args, **kwargs):
        raise AssertionError("a critic was loaded")

    monkeypatch.setattr(module, "make_critic", never)
    with make({"ppo": {**GRPO, "advantage": advantage}, "train": {"max_steps": 2}}) as ppo:
        ppo.train()
        tensors, state = ppo.state()
    assert ppo.critic is None and not [name for name in (*tensors, *state) if "critic" in name]
    assert (tmp_path / "run" / "model").is_dir() and not (tmp_path / "run" / "critic").exists()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row}
    assert not [name for name in names if "value" in name or "critic" in name or "explained" in name]
    wanted = (
        "ppo/policy_loss ppo/kl ppo/approx_kl ppo/ratio_mean ppo/clip_fraction ppo/entropy train/grad_norm train/skipped train/lr"
    )
    assert all(math.isfinite(row[name]) for row in rows if row["split"] == "train" for name in wanted.split())


def test_a_run_without_a_critic_that_was_interrupted_ends_in_the_same_bytes(tiny_folder, tmp_path, monkeypatch):
    changes = {
        **NO_CRITIC,
        "train": {"batch_size": 2, "max_steps": 4, "ema_decay": 0.9, "lr_schedule": "cosine"},
        "checkpoint": {"every_steps": 1},
        "ppo": {**GRPO, "generation_batches": 2, "mini_batches": 2, "kl": {"place": "loss", "estimator": "full", "controller": "adaptive"}},
    }  # fmt: skip

    def run(name):
        with PPOTrainer(settings(tiny_folder("llama"), tmp_path / name, changes), train_dataset=list(PROMPTS)) as ppo:
            ppo.train()

    run("whole")
    plain_step = PPOTrainer.step

    def dies_at_step_3(self, step):
        if step == 3:
            raise Interrupted("killed")
        return plain_step(self, step)

    monkeypatch.setattr(PPOTrainer, "step", dies_at_step_3)
    with pytest.raises(Interrupted):
        run("cut")
    monkeypatch.setattr(PPOTrainer, "step", plain_step)
    run("cut")
    for part in ("model", "ema"):
        whole, cut = digest(tmp_path / "whole" / part), digest(tmp_path / "cut" / part)
        assert whole and whole == cut


# -- rounds of generation --------------------------------------------------------------------------------------------------


def counting(generate, asked):
    """`generate`, noting how many requests each call has."""

    def counted(prompts, *args, **options):
        asked.append(len(prompts))
        return generate(prompts, *args, **options)

    return counted


def test_rounds_of_generation_make_the_experience_of_one_large_batch(make):
    """2 rounds of 4 prompts = 1 of 8, in prompts, answers, advantages and weights; the sampler is asked twice."""
    results = []
    for rounds in (1, 2):
        ppo = make(
            {
                "train": {"batch_size": 8 // rounds},
                "ppo": {"generation_batches": rounds, "samples_per_prompt": 2, "mini_batches": 2},
            }
        )
        asked: list[int] = []
        ppo.engine.generate = counting(ppo.engine.generate, asked)
        experience = ppo.make_experience([ppo.examples.train[i] for i in ppo.order.batch(1)])
        ppo.update(experience)
        results.append(([s.response_ids for s in experience.rollouts.samples], experience.advantages, weights(ppo.policy)))
        assert asked == [16 // rounds] * rounds
        assert ppo.order.steps_per_epoch == 1 and ppo.order.epoch(1) == 1
    assert results[0][0] == results[1][0]
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6)
    assert largest_difference(results[0][2], results[1][2]) < 1e-6


def test_the_last_experience_of_an_epoch_may_be_partial(make):
    ppo = make({"train": {"batch_size": 2, "max_steps": None, "epochs": 1}, "ppo": {"generation_batches": 3}})
    assert ppo.total_steps == 2  # 8 prompts: 6 and 2
    assert [len(ppo.order.batch(step)) for step in (1, 2)] == [6, 2]
    assert ppo.step(2)["ppo/updates"] == 1


def test_fewer_prompts_than_one_experience_are_refused(make):
    with pytest.raises(DataError, match=r"8 prompts are fewer.*generation_batches=3 × train.batch_size=4"):
        make({"ppo": {"generation_batches": 3}})


# -- a loop of one's own ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", ["gae", "rloo"])
def test_learning_from_given_answers_is_the_step_that_sampled_them(make, advantage):
    changes = {"ppo": {"advantage": advantage, "samples_per_prompt": 2, "missing_eos_penalty": 0.5}}
    first, second = make(changes), make(changes)
    prompts = [first.examples.train[i] for i in first.order.batch(1)]
    expected = first.step(1)
    samples = second.answers.sample(second.answers.request(prompts, 2, 1)).samples
    queries = [torch.tensor(s.prompt_ids) if i % 2 else list(s.prompt_ids) for i, s in enumerate(samples)]
    responses = [torch.tensor(s.response_ids) for s in samples]
    scores = [sum(c in "ea" for c in s.response) / max(1, len(s.response)) for s in samples]
    metrics = second.learn(queries, responses, scores)
    assert largest_difference(weights(first.policy), weights(second.policy)) < 1e-6
    for name, value in expected.items():
        if name.startswith("ppo/") and "sampler" not in name and "letters" not in name:
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert not [name for name in metrics if "sampler" in name or "generate_tflops" in name]
    assert second.learn([s.prompt for s in samples], responses, scores)["ppo/updates"] == 1  # prompts in any form; the next step


def test_what_cannot_be_learned_from_is_refused(make):
    ppo = make({"ppo": {**GRPO}})
    ids = [5, 6, 2]
    for queries, responses, scores, message in (
        (["a", "a"], [ids], [1.0, 2.0], "2 queries and 1 responses"),
        ([], [], [], "at least one"),
        (["a", "a"], [ids, ids], [1.0], "as many finite scores"),
        (["a", "a"], [ids, ids], [1.0, math.nan], "as many finite scores"),
        (["a", "a"], [ids, []], [1.0, 2.0], "a response is at least one token id from 0 to 511"),
        (["a", "a"], [ids, [512]], [1.0, 2.0], "token id from 0 to 511"),
        (["a", "a"], [ids, "text"], [1.0, 2.0], "token id"),
        (["a", "a"], [ids, 5], [1.0, 2.0], "token id"),
        (["a", None], [ids, ids], [1.0, 2.0], "a query is"),
        (["a", [7.5]], [ids, ids], [1.0, 2.0], "a query is at least one token id"),
        (["a", "b", "b"], [ids] * 3, [1.0, 2.0, 3.0], "'a' has only one"),
        (["a", "a"], [ids, [5] * 300], [1.0, 2.0], "the model takes 256"),
    ):
        with pytest.raises(DataError, match=message):
            ppo.learn(queries, responses, scores)
    assert ppo.experiences == 0
    with pytest.raises(DataError, match="sampler's log-probabilities"):
        make({"ppo": {"old_logprobs": "sampler"}}).learn(["a"], [ids], [1.0])


def test_exact_kl_needs_the_same_outputs_in_the_reference(make, tiny_folder):
    other = str(tiny_folder("llama", vocab_size=520))
    with pytest.raises(ConfigError, match="512 outputs with the reference's 520"):
        make({"reference": {"path": other}, "ppo": {"kl": {"estimator": "full"}}})


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_exact_kl_with_lora_takes_the_start_for_its_reference(make, place):
    """Beside the frozen copy of a run without LoRA, the same numbers and a gradient for the adapter."""
    kl = {"estimator": "full", "place": place, "coef": 0.5}
    ppo = make({"model": {"lora": {"rank": 4, "alpha": 8.0}}, "train": {"lr": 1e-2}, "ppo": {"kl": kl}})
    ppo.step(1)
    experience = ppo.make_experience([ppo.examples.train[i] for i in range(4)])
    exact = ppo._read_policy(experience.rollouts, ppo._minibatch(experience.rollouts), exact_kl=True)[3]
    assert (exact > 0).all()
    stats = ppo.update(experience)
    if place == "loss":
        assert stats["ppo/kl_loss"] == pytest.approx(exact.mean().item(), rel=1e-4)
    else:
        assert experience.metrics["ppo/non_score_reward"] == pytest.approx(-0.5 * exact.sum().item() / 4, rel=1e-4)
