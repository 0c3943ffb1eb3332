"""`ppo.replay_buffer`: earlier experiences beside the fresh one, against NumPy, to the bit over a resume, and learning."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from accord.config.root import merge
from accord.errors import ConfigError, Interrupted
from accord.trainers.ppo import PPOTrainer
from tests.trainers.ppo_oracle import Answer, ppo_update
from tests.trainers.ppo_setup import PROMPTS, GivenAnswers, function, largest_difference, settings, trainer, weights
from tests.trainers.test_ppo_journal import digests, timeless
from tests.trainers.test_ppo_update import ANSWERS, raw_logits, rows_of, shake

OTHERS = [([30, 9, 2], "stop"), ([12, 5], "length"), ([6, 6, 6, 7, 2], "stop"), ([40, 41, 8], "length")]


@pytest.mark.parametrize(
    ("name", "changes"),
    {
        "gae": {"entropy_coef": 0.02, "value_coef": 0.5, "old_kl_coef": 0.3},
        "gae, per answer": {"aggregation": "sequence", "clip_high": 0.4, "kl": {"estimator": "k3", "place": "loss"}},
        "grpo": {
            "advantage": "grpo",
            "samples_per_prompt": 2,
            "aggregation": "constant",
            "kl": {"estimator": "full", "place": "loss"},
        },
    }.items(),
)
def test_an_update_on_two_experiences_against_numpy(tiny_folder, tmp_path, name, changes):
    """The mean over the tokens (or answers) of both, each with its own π_old, V_old, advantages and returns."""
    conf = {
        "train": {"max_tokens": 96, "max_grad_norm": 1e9, "lr": 1e-9},
        "critic": {"lr": 1e-9 if name.startswith("gae") else 5e-6},
        "data": {"max_length": 48},
        "ppo": merge(
            {"replay_buffer": 1, "rewards": [function("length", weight=0.3)], "ratio_threshold": None, "kl": {"coef": 0.3}},
            changes,
        ),
    }
    ppo = trainer(tiny_folder("llama"), tmp_path / "run", conf)
    count = ppo.settings.samples_per_prompt
    read_values = None if ppo.critic is None else lambda pack: ppo.critic.values(pack).double().numpy()
    shake(ppo.policy, 0.02, 1)
    experiences, read = [], []
    for number, answers in enumerate((ANSWERS, OTHERS)):
        shake(ppo.policy, 0.03, 2 + number)
        if ppo.critic is not None:
            shake(ppo.critic, 0.02, 4 + number)
        ppo.engine.generator = GivenAnswers(answers)
        experience = ppo.make_experience([ppo.examples.train[i] for i in range(4)], once=True)
        assert experience.whole is None
        logits = [rows_of(ppo, experience, raw_logits(m)) for m in (ppo.policy, ppo.reference.frozen)]
        experiences.append(experience)
        read.append((*logits, rows_of(ppo, experience, read_values) if read_values else [None] * len(experience)))
        if number == 0:
            ppo.update(experience)  # a learning rate of nearly 0: it only fills the buffer
    shake(ppo.policy, 0.03, 7)
    if ppo.critic is not None:
        shake(ppo.critic, 0.02, 8)

    raw = ppo.settings.model_dump()
    raw |= {f"kl_{key}": value for key, value in raw.pop("kl").items()}
    raw |= {"temperature": 1.0, "max_new_tokens": 8, "whiten_advantages": ppo.settings.whitens_advantages}
    expected, sizes, gradients = [], [], []
    for experience, (old, ref, values) in zip(experiences, read, strict=True):
        new = rows_of(ppo, experience, raw_logits(ppo.policy))
        if ppo.critic is not None:
            ppo.critic.see(experience.rollouts.samples)
        now = rows_of(ppo, experience, read_values) if read_values else [None] * len(experience)
        answers = [
            Answer(list(s.response_ids), i // count, experience.board.total[i], s.truncated, old[i], ref[i], new[i], values[i], now[i],
                   np.zeros(len(s.response_ids)))
            for i, s in enumerate(experience.rollouts.samples)
        ]  # fmt: skip
        expected.append(ppo_update(answers, raw))
        sizes.append((sum(len(a.tokens) for a in answers), len(answers)))
    captured = {}
    step = ppo.engine.step
    ppo.engine.step = lambda: (captured.update({n: p.grad.clone() for n, p in ppo.policy.parameters.items()}), step())[1]
    module = __import__("copy").deepcopy(ppo.policy.module)
    stats = ppo.update(experiences[1])

    by_tokens = [tokens / sum(size[0] for size in sizes) for tokens, _ in sizes]
    by_answers = [answers / sum(size[1] for size in sizes) for _, answers in sizes]
    of_loss = by_tokens if ppo.settings.aggregation == "token" else by_answers
    for metric in (
        "policy_loss",
        "value_loss",
        "kl_loss",
        "old_kl_loss",
        "approx_kl",
        "ratio_mean",
        "clip_fraction",
        "value_clip_fraction",
    ):
        if f"ppo/{metric}" in stats:
            shares = of_loss if metric.endswith("_loss") else by_tokens
            right = sum(share * one.metrics[f"ppo/{metric}"] for share, one in zip(shares, expected, strict=True))
            assert stats[f"ppo/{metric}"] == pytest.approx(right, rel=1e-6, abs=1e-6), metric
    assert stats["ppo/replayed"] == sizes[0][1] and 0 < stats["ppo/clip_fraction"] < 1

    for share, one, experience in zip(of_loss, expected, experiences, strict=True):
        for i, sample in enumerate(experience.rollouts.samples):
            ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
            out = module(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]
            (out * torch.from_numpy(share * one.logit_gradients[i]).float()).sum().backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    scale = max(float(g.abs().max()) for g in gradients.values())
    for parameter, ours in captured.items():
        assert torch.allclose(ours, gradients[parameter], atol=1e-5 * scale), parameter


def test_without_a_buffer_nothing_is_joined_or_kept(tiny_folder, tmp_path):
    ppo = trainer(tiny_folder("llama"), tmp_path / "run")
    experience = ppo.make_experience(ppo.prompts(1))
    assert ppo.buffer.join(experience) is experience
    assert "ppo/replayed" not in ppo.update(experience)
    assert ppo.buffer.kept == [] and "replay_buffer" not in ppo.state()[0]


def test_the_first_in_is_the_first_out_and_only_the_fresh_one_is_measured(tiny_folder, tmp_path):
    changes = {"ppo": {"replay_buffer": 2, "normalize_score": True, "kl": {"controller": "adaptive", "horizon": 20}}}
    ppo = trainer(tiny_folder("llama"), tmp_path / "run", changes)
    seen = []
    update = ppo.kl_controller.update
    ppo.kl_controller.update = lambda kl, episodes: (seen.append((kl, episodes)), update(kl, episodes))
    replayed, kls = [], []
    for step in range(1, 5):
        metrics = ppo.step(step)
        replayed.append(metrics["ppo/replayed"])
        kls.append(metrics["ppo/kl"])
    assert replayed == [0, 4, 8, 8] and [e.number for e in ppo.buffer.kept] == [3, 4]
    assert seen == [(kl, 4) for kl in kls] and ppo.moments.count == 16


def test_a_learned_experience_is_not_its_own_companion(tiny_folder, tmp_path):
    """A loop of one's own may update twice on one experience."""
    ppo = trainer(tiny_folder("llama"), tmp_path / "run", {"ppo": {"replay_buffer": 2}})
    experience = ppo.make_experience(ppo.prompts(1))
    assert [ppo.update(experience)["ppo/replayed"] for _ in range(2)] == [0, 0] and len(ppo.buffer.kept) == 1


@pytest.mark.parametrize("critic", ["own", "text", "trunk", "none"])
def test_a_cut_run_with_a_buffer_ends_in_the_same_bytes(tiny_folder, tiny_model, tmp_path, monkeypatch, critic):
    changes = {
        "train": {"batch_size": 2, "epochs": 4, "max_steps": 6},
        "checkpoint": {"every_steps": 1},
        "ppo": {"replay_buffer": 2, "mini_batches": 2, "kl": {"controller": "adaptive", "horizon": 50}},
    }
    if critic == "trunk":
        changes["critic"] = {"share_trunk": True, "lr": 1e-3}
    if critic == "none":
        changes |= {"critic": {"lr": 5e-6}, "ppo": {**changes["ppo"], "advantage": "rloo", "samples_per_prompt": 2}}
    if critic == "text":
        from accord.models.scratch import train_tokenizer

        tokenizer = train_tokenizer(["zyx wvu legs. 别的文字。"] * 4, 300, max_length=256)
        tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
        tiny_model("llama", seed=7, vocab_size=512).save_pretrained(tmp_path / "foreign")
        tokenizer.save_pretrained(tmp_path / "foreign")
        changes["critic"] = {"path": str(tmp_path / "foreign"), "lr": 1e-3}

    def run(name):
        with PPOTrainer(settings(tiny_folder("llama"), tmp_path / name, changes), train_dataset=list(PROMPTS)) as ppo:
            ppo.train()

    run("whole")
    plain = PPOTrainer.step

    def dies(self, step):
        if step == 5:
            raise Interrupted("killed")
        return plain(self, step)

    monkeypatch.setattr(PPOTrainer, "step", dies)
    with pytest.raises(Interrupted):
        run("cut")
    monkeypatch.setattr(PPOTrainer, "step", plain)
    run("cut")
    assert digests(tmp_path / "whole/model") == digests(tmp_path / "cut/model") != {}
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "cut")


class LowTokens:
    """Pays for token ids below 256."""

    name, weight = "low", 1.0

    def score(self, samples):
        return [sum(t < 256 for t in s.response_ids) / len(s.response_ids) for s in samples]


def test_a_policy_learns_beside_what_is_replayed(tiny_folder, tmp_path):
    """And unlearns where the advantages of the replayed alone are turned round: they do count."""

    def gained(name: str) -> float:
        changes = {
            "train": {"batch_size": 8, "max_steps": 10, "epochs": 10, "lr": 3e-2},
            "critic": {"lr": 5e-6},
            "generate": {"max_new_tokens": 2},
            "ppo": {
                "replay_buffer": 3,
                "advantage": "reinforce_pp",
                "samples_per_prompt": 4,
                "ppo_epochs": 2,
                "kl": {"coef": 0.0},
            },
        }
        ppo = trainer(tiny_folder("llama"), tmp_path / name, changes)
        ppo.sources = [LowTokens()]
        if name == "wrong":
            keep = ppo.buffer.add

            def turned(experience):
                keep(experience)
                ppo.buffer.kept[-1].advantages = -3 * experience.advantages

            ppo.buffer.add = turned
        scores = [ppo.step(step)["ppo/score"] for step in range(1, 9)]
        return scores[-1] - scores[0]

    assert gained("right") > 0.4
    assert gained("wrong") < 0


def test_best_of_objectives_have_no_buffer(tiny_folder, tmp_path):
    changes = {
        "ppo": {"objective": "dpo", "samples_per_prompt": 2, "replay_buffer": 1, "kl": {"coef": 0.05}, "clip_reward": 5.0},
        "critic": {"lr": 5e-6},
    }
    with pytest.raises(ConfigError, match=r"ppo.replay_buffer.*does nothing with ppo.objective=dpo.*default is 0"):
        settings(tiny_folder("llama"), tmp_path, changes)


def test_the_buffer_is_in_the_checkpoint_whole(tiny_folder, tmp_path):
    first, second = (trainer(tiny_folder("llama"), tmp_path / "run", {"ppo": {"replay_buffer": 2}}) for _ in range(2))
    for step in (1, 2):
        first.step(step)
    tensors, state = first.state()
    second.load_state(
        {name: {k: v.clone() for k, v in group.items()} for name, group in tensors.items()}, json.loads(json.dumps(state))
    )
    for a, b in zip(first.buffer.kept, second.buffer.kept, strict=True):
        assert a.rollouts.samples == b.rollouts.samples and a.rollouts.groups == b.rollouts.groups and a.number == b.number
        assert torch.equal(a.old_logprobs, b.old_logprobs) and torch.equal(a.returns, b.returns) and b.importance is None
    metrics = [one.step(3)["ppo/policy_loss"] for one in (first, second)]
    assert metrics[0] == metrics[1] and largest_difference(weights(first.policy), weights(second.policy)) == 0
