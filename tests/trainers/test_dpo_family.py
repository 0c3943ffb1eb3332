"""The DPO family through its trainer (ALGORITHMS §3): every loss in packs with shared prompts, and no reference where none is needed."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from accord.config.sections import DPO
from accord.data.packing import pack_trees
from accord.data.trees import branching
from accord.trainers import preference, reference
from accord.trainers.preference_loss import Answers, pair_loss
from tests.trainers.runs import trainer

FAMILY = ["dpo", "dpo-ipo", "dpo-hinge", "dpo-robust", "dpo-simpo", "dpo-orpo", "dpo-rpo", "dpo-mix"]
WITHOUT_REFERENCE = ["dpo-simpo", "dpo-orpo"]


def padded_logps(module, trees) -> tuple[torch.Tensor, torch.Tensor]:
    """[2P] log π of each answer and its length, from one padded batch in plain transformers: chosen, rejected, chosen, …"""
    rows = [
        (torch.from_numpy(tree.sequence(leaf).astype("int64")), torch.from_numpy(tree.sequence_trained(leaf)))
        for tree in trees
        for leaf in tree.leaves
    ]
    ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in rows], batch_first=True)
    seen = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids, _ in rows], batch_first=True)
    trained = torch.nn.utils.rnn.pad_sequence([mask for _, mask in rows], batch_first=True)
    logp = module(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1].log_softmax(-1)
    logp = logp.gather(-1, ids[:, 1:, None])[..., 0].double()
    return torch.where(trained[:, 1:], logp, 0.0).sum(1), trained[:, 1:].sum(1)


def plain_loss(kind: str, logps: torch.Tensor, lengths: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The mean loss with the settings of `runs.STAGES`, written straight from ALGORITHMS §3."""
    h = logps - reference
    z = 0.5 * (h[0::2] - h[1::2])
    p = logps / lengths
    odds = torch.log(p.exp() / (1 - p.exp()))
    losses = {
        "dpo": -F.logsigmoid(z),
        "dpo-ipo": (h[0::2] / lengths[0::2] - h[1::2] / lengths[1::2] - 1).square(),
        "dpo-hinge": (1 - z).clamp(min=0),
        "dpo-robust": (-0.9 * F.logsigmoid(z) + 0.1 * F.logsigmoid(-z)) / 0.8,
        "dpo-simpo": -F.logsigmoid(2 * p[0::2] - 2 * p[1::2] - 0.5),
        "dpo-orpo": -p[0::2] - 0.3 * F.logsigmoid(odds[0::2] - odds[1::2]),
        "dpo-rpo": -F.logsigmoid(z) - 1.5 * p[0::2],
        "dpo-mix": -0.75 * (0.9 * F.logsigmoid(z) + 0.1 * F.logsigmoid(-z)) + 0.5 * (1 - z).clamp(min=0),
    }
    return losses[kind].mean()


@pytest.mark.parametrize("kind", FAMILY)
def test_packed_and_shared_is_padded_in_loss_and_gradient(kind, tiny_folder, tmp_path, monkeypatch):
    """The second step, when the policy has left its reference, against a padded batch of a plain model with the same weights."""
    t = trainer(kind, tiny_folder("llama"), tmp_path, {"train": {"batch_size": 8, "max_tokens": 200}})
    assert t.model.packed
    t.step(1)
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    trees = [t.examples.train[i].tree for i in t.order.batch(2)]
    with torch.no_grad():
        reference, _ = padded_logps(plain, trees)
        for name, parameter in plain.named_parameters():
            parameter.copy_(t.model.parameters[name])
    expected = plain_loss(kind, *padded_logps(plain, trees), reference)
    expected.backward()

    found: dict[str, torch.Tensor] = {}
    step = t.model.step

    def keeps_gradients():
        found.update({name: p.grad.clone() for name, p in t.model.parameters.items()})
        return step()

    monkeypatch.setattr(t.model, "step", keeps_gradients)
    assert t.step(2)["dpo/loss"] == pytest.approx(expected.item(), abs=1e-5)
    for name, parameter in plain.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("kind", FAMILY)
def test_two_steps_on_the_same_pairs_lower_the_loss(kind, tiny_folder, tmp_path):
    t = trainer(kind, tiny_folder("llama"), tmp_path, {"train": {"batch_size": 8, "max_steps": 2, "warmup_ratio": 0.0}})
    first = t.order.batch(1)
    t.order.batch = lambda step: first
    before = {name: p.detach().clone() for name, p in t.model.parameters.items()}
    one, two = t.step(1), t.step(2)
    assert two["dpo/loss"] < one["dpo/loss"] and two["dpo/reward_margin"] > one["dpo/reward_margin"]
    assert all(torch.isfinite(p).all() and not torch.equal(p, before[name]) for name, p in t.model.parameters.items())
    assert one.keys() == two.keys() >= t.evaluate(2).keys() >= {"dpo/loss", "dpo/reward_accuracy/max", "dpo/chosen_reward/min"}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
@pytest.mark.parametrize(("kind", "loss"), [("dpo-hinge", 1.0), ("dpo-robust", math.log(2))])
def test_the_first_step_has_the_known_loss_and_no_margin(kind, loss, lora, precision, tiny_folder, tmp_path):
    changes = {"train": {"precision": precision}, "model": {"lora": lora}}
    metrics = trainer(kind, tiny_folder("llama"), tmp_path, changes).step(1)
    assert metrics["dpo/loss"] == pytest.approx(loss, abs=1e-12) and metrics["dpo/loss/max"] == pytest.approx(loss, abs=1e-12)
    assert metrics["dpo/reward_margin"] == 0 and metrics["dpo/reward_accuracy"] == 0 and metrics["train/grad_norm"] > 0


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
@pytest.mark.parametrize("kind", WITHOUT_REFERENCE)
def test_a_loss_without_a_reference_loads_and_asks_none(kind, lora, tiny_folder, tmp_path, monkeypatch):
    loads, load = [], preference.load_causal
    monkeypatch.setattr(reference, "load_causal", lambda *args, **kwargs: pytest.fail("loaded a reference"))
    monkeypatch.setattr(preference, "load_causal", lambda *args, **kwargs: loads.append(args) or load(*args, **kwargs))
    t = trainer(kind, tiny_folder("llama"), tmp_path, {"model": {"lora": lora}})
    asked, read = [], t.model.token_logprobs
    monkeypatch.setattr(t.model, "token_logprobs", lambda pack, **options: asked.append(pack) or read(pack, **options))
    monkeypatch.setattr(t.model, "as_reference", lambda: pytest.fail("asked for the reference"))
    assert t.reference is None and len(loads) == 1
    packs = len(preference.batch_packs(t.model, t.examples.train, t.order.batch(1)))
    t.step(1)
    assert len(asked) == packs  # the policy, once
    assert "dpo/loss" in t.evaluate(1)


@pytest.mark.parametrize("kind", WITHOUT_REFERENCE)
def test_a_new_model_is_not_copied_for_a_loss_without_a_reference(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "reference_for", lambda config, model: pytest.fail("copied"))
    scratch = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 300}
    t = trainer(kind, None, tmp_path, {"model": {"path": None, "from_scratch": scratch}})
    assert math.isfinite(t.step(1)["dpo/loss"])


def test_rpo_alpha_adds_its_term_to_the_loss_and_changes_no_reward(tiny_folder, tmp_path):
    for kind in ("dpo", *WITHOUT_REFERENCE):
        plain = trainer(kind, tiny_folder("llama"), tmp_path / kind).step(1)
        t = trainer(kind, tiny_folder("llama"), tmp_path / kind, {"dpo": {"rpo_alpha": 0.7}})
        trees = [t.examples.train[i].tree for i in t.order.batch(1)]
        with t.model.evaluating():
            logps, lengths = padded_logps(t.model.module, trees)
        term = 0.7 * float((-logps / lengths)[0::2].mean())
        both = t.step(1)
        assert both["dpo/loss"] == pytest.approx(plain["dpo/loss"] + term, abs=1e-5)
        for name in ("dpo/chosen_reward", "dpo/rejected_reward", "dpo/reward_margin", "dpo/reward_accuracy"):
            assert both[name] == plain[name]


def test_a_small_beta_with_simpo_is_warned_of(tiny_folder, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    trainer("dpo-simpo", tiny_folder("llama"), tmp_path)
    trainer("dpo", tiny_folder("llama"), tmp_path, {"dpo": {"beta": 0.1}})
    assert "dpo.beta" not in caplog.text
    trainer("dpo-simpo", tiny_folder("llama"), tmp_path, {"dpo": {"beta": 0.1}})
    assert "dpo.beta=0.1" in caplog.text and "Near 2 is usual" in caplog.text


def test_a_run_without_a_reference_goes_to_its_end_and_keeps_its_best(tiny_folder, tmp_path):
    for kind in WITHOUT_REFERENCE:
        changes = {"checkpoint": {"every_steps": 2}, "eval": {"every_steps": 2, "best_metric": "dpo/reward_accuracy"}}
        summary = trainer(kind, tiny_folder("llama"), tmp_path / kind, changes).train()
        assert summary["best"]["metric"] == "dpo/reward_accuracy" and (tmp_path / kind / "model").is_dir()


def test_on_a_pair_of_2000_tokens_float32_sums_prefer_the_wrong_answer():
    """Sums near -6,000 nats have steps of 5e-4 in float32; a policy that has just left its reference differs by less than that."""
    wrong = 0
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        trees = [branching([1, 2], [[3] * 2000, [4] * 2000])]
        (pack,) = pack_trees(trees, 5000)
        logps = -torch.rand(4000, generator=generator) * 6
        reference = logps + torch.randn(4000, generator=generator) * 2e-6
        exact = [
            math.fsum((logps[rows].double() - reference[rows].double()).tolist())
            for rows in (pack.sequence == 0, pack.sequence == 1)
        ]
        answers = Answers(pack.sum_by_sequence(logps), pack.sum_by_sequence(reference), pack.target_counts)
        _, stats = pair_loss(DPO(beta=0.1), answers, 0.1, 1)
        margin = 0.1 * (exact[0] - exact[1])
        assert float(stats.margins) == pytest.approx(margin, rel=1e-6) and bool(stats.accuracies) == (margin > 0)
        single = torch.zeros(2).index_add(0, pack.sequence, logps) - torch.zeros(2).index_add(0, pack.sequence, reference)
        wrong += bool(single[0] > single[1]) != (margin > 0)
    assert wrong >= 5
