"""KTO through its trainer (ALGORITHMS §3): its reference point is that of the whole step, its loss that of a loop."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from accord.config import Config
from accord.data.trees import branching
from accord.errors import ConfigError
from accord.trainers.preference_loss import mismatched
from tests.trainers.runs import labelled, pairs, trainer


def logp(module, tokens: list[int], start: int) -> torch.Tensor:
    """log π(tokens[start:] | tokens[:start]), one sequence at a time in plain transformers, summed in float64."""
    ids = torch.tensor(tokens)
    out = module(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return out.gather(-1, ids[1:, None])[start - 1 :, 0].double().sum()


def by_loop(policy, reference, trees, labels, beta, weight_bad) -> tuple[torch.Tensor, float]:
    """(mean loss, z0) written straight from the paper, answer by answer."""
    answers = []
    for tree, own in zip(trees, labels, strict=True):
        prompt_length = int(tree.sequence_trained(tree.leaves[0]).argmax())
        prompt = tree.sequence(tree.leaves[0])[:prompt_length].tolist()
        answers.append(
            (
                prompt,
                [(tree.sequence(leaf)[prompt_length:].tolist(), good > 0) for leaf, good in zip(tree.leaves, own, strict=True)],
            )
        )
    drifts = []
    for i, (prompt, _) in enumerate(answers):
        for answer, _ in answers[(i + 1) % len(answers)][1]:
            with torch.no_grad():
                drifts.append(float(logp(policy, prompt + answer, len(prompt)) - logp(reference, prompt + answer, len(prompt))))
    z0 = max(0.0, sum(drifts) / len(drifts))
    losses = []
    for prompt, own in answers:
        for answer, good in own:
            with torch.no_grad():
                ref = logp(reference, prompt + answer, len(prompt))
            x = beta * (logp(policy, prompt + answer, len(prompt)) - ref - z0)
            losses.append(1 - torch.sigmoid(x) if good else weight_bad * (1 - torch.sigmoid(-x)))
    return torch.stack(losses).mean(), z0


@pytest.mark.parametrize("rows", [labelled, pairs])
@pytest.mark.parametrize("max_tokens", [512, 60])
def test_packs_give_the_loss_z0_and_gradient_of_a_loop(rows, max_tokens, tiny_folder, tmp_path, monkeypatch):
    """The second step, when the policy has left its reference; with small packs the step has many micro-batches and one z0."""
    changes = {"train": {"batch_size": 7, "max_tokens": max_tokens}, "data": {"max_length": 60}}
    t = trainer("dpo-kto", tiny_folder("llama"), tmp_path, changes, train=rows())
    t.step(1)
    examples = [t.examples.train[i] for i in t.order.batch(2)]
    policy = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    policy.load_state_dict({name: p.detach() for name, p in t.model.module.state_dict().items()})
    expected, z0 = by_loop(policy, reference, [e.tree for e in examples], [e.labels for e in examples], 0.5, 1.5)
    expected.backward()
    gradients = {}
    monkeypatch.setattr(
        t.model, "step", lambda: gradients.update({n: p.grad.clone() for n, p in t.model.parameters.items()}) or _info()
    )
    metrics = t.step(2)
    assert metrics["dpo/loss"] == pytest.approx(float(expected), abs=1e-6)
    assert metrics["dpo/kto_z0"] == pytest.approx(z0, abs=1e-5)
    for name, parameter in policy.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=2e-6), name


def _info():
    from accord.engine.trained import StepInfo

    return StepInfo(1.0, 1e-3, False)


def test_it_starts_at_half_with_nothing_learnt(tiny_folder, tmp_path):
    t = trainer("dpo-kto", tiny_folder("llama"), tmp_path, {"train": {"batch_size": 6}, "dpo": {"undesirable_weight": 1.0}})
    metrics = t.step(1)
    assert metrics["dpo/loss"] == 0.5 and metrics["dpo/loss/min"] == 0.5
    assert metrics["dpo/kto_z0"] == 0 and metrics["dpo/reward_accuracy"] == 0 and metrics["train/grad_norm"] > 0


def test_it_learns_which_answers_are_wanted(tiny_folder, tmp_path):
    changes = {"train": {"max_steps": 24, "batch_size": 8, "lr": 3e-3}}
    for rows in (labelled, pairs):
        t = trainer("dpo-kto", tiny_folder("llama"), tmp_path / rows.__name__, changes, train=rows())
        metrics = [t.step(step) for step in range(1, 25)]
        both = [m for m in metrics if "dpo/reward_margin" in m]  # a small batch may hold answers of one kind only
        assert both[-1]["dpo/reward_margin"] > 3 and both[-1]["dpo/reward_accuracy"] == 1
        assert both[-1]["dpo/loss"] < 0.3 * metrics[0]["dpo/loss"]


def test_pairs_are_judged_as_pairs_and_marked_answers_by_their_side(tiny_folder, tmp_path):
    paired = trainer("dpo-kto", tiny_folder("llama"), tmp_path / "a", train=pairs())
    paired.step(1)
    assert "dpo/reward_margin/min" in paired.evaluate(1)
    single = trainer("dpo-kto", tiny_folder("llama"), tmp_path / "b")
    single.step(1)
    metrics = single.evaluate(1)
    assert "dpo/reward_margin/min" not in metrics and 0 <= metrics["dpo/reward_accuracy"] <= 1


def test_a_step_of_one_kind_reports_what_it_has(tiny_folder, tmp_path):
    rows = [row | {"label": True} for row in labelled()]
    metrics = trainer("dpo-kto", tiny_folder("llama"), tmp_path, train=rows).step(1)
    assert "dpo/chosen_reward" in metrics and "dpo/rejected_reward" not in metrics and "dpo/reward_margin" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_every_prompt_meets_the_answers_of_the_next_example():
    trees = [branching([1, 2], [[3], [4, 5]]), branching([6], [[7, 8, 9]]), branching([10] * 4, [[11, 12], [13]])]
    mixed = mismatched(trees, max_length=6, max_tokens=6)
    sequences = [tree.sequence(leaf).tolist() for tree in mixed for leaf in tree.leaves]
    assert sequences == [[1, 2, 7, 8, 9], [6, 11, 12], [6, 13], [10, 10, 10, 10, 3], [10, 10, 10, 10, 4, 5]]
    assert [len(tree.leaves) for tree in mixed] == [1, 2, 1, 1]  # the last would not fit a pack together
    assert mismatched(trees[:1], 6, 6) == []
    cut = mismatched(trees, max_length=3, max_tokens=9)
    assert cut[0].sequence(cut[0].leaves[0]).tolist() == [1, 2, 7]
    assert all(np.array_equal(t.sequence_trained(t.leaves[0]), [False, False, True]) for t in cut[:1])


def test_a_lone_answer_in_the_last_batch_has_a_reference_point_of_zero(tiny_folder, tmp_path):
    t = trainer(
        "dpo-kto", tiny_folder("llama"), tmp_path, {"train": {"batch_size": 4}, "data": {"holdout": 0.0}}, train=labelled(9)
    )
    t.step(1), t.step(2)
    assert len(t.order.batch(3)) == 1
    assert t.step(3)["dpo/kto_z0"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"batch_size": 1}}, "train.batch_size: kto measures its reference point on other examples"),
        ({"reference": {"precompute": True}}, "reference.precompute: kto asks the reference about answers of other examples"),
        ({"dpo": {"loss_type": "kto", "rpo_alpha": 1.0}}, "dpo.rpo_alpha: is for pairs"),
        ({"dpo": {"loss_type": "kto", "label_smoothing": 0.1}}, "dpo.label_smoothing: the kto loss has no label smoothing"),
        (
            {"dpo": {"loss_type": "sigmoid", "desirable_weight": 2.0}},
            "dpo.desirable_weight: does nothing with dpo.loss_type=sigmoid",
        ),
    ],
)
def test_what_does_not_go_with_kto_is_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config(**({"model": {"path": "m"}, "dpo": {"loss_type": "kto"}} | changes)).for_stage("dpo")
