"""The reward model's losses through its trainer (ALGORITHMS §2), what it saves of its scores, and what its evaluation says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from accord.config import Model
from accord.errors import ConfigError
from accord.models.load import load_scalar
from accord.models.normalization import KEY, Normalization, load_normalization
from accord.models.save import save_model
from accord.trainers.reward import RewardTrainer
from tests.trainers.runs import config, pairs, rankings, sentence, trainer

FAMILY = ["reward", "reward-ranking", "reward-token_pairwise", "reward-log_exp"]


def alike(n: int = 12) -> list[dict[str, Any]]:
    """Pairs whose answers open with the same words, and now and then end with them; a margin on every second one."""
    rows = []
    for i, row in enumerate(pairs(n)):
        opening = sentence(i + 20, 2 + i % 3)
        row = {**row, "chosen": f"{opening} {row['chosen']} dog", "rejected": f"{opening} {row['rejected']} dog"}
        rows.append({**row, "margin": 0.1 * i} if i % 2 else row)
    return rows


def position_scores(module: Any, tree: Any, leaf: int) -> torch.Tensor:
    """[L] the score at every position of one text, read alone by a plain transformers classifier."""
    ids = torch.from_numpy(tree.sequence(leaf).astype("int64"))[None]
    return module.score(module.model(input_ids=ids).last_hidden_state)[0, :, 0].double()


def plain_loss(kind: str, module: Any, example: Any, center: float) -> torch.Tensor:
    """One example's loss, written straight from ALGORITHMS §2."""
    tree = example.tree
    texts = [position_scores(module, tree, leaf) for leaf in tree.leaves]
    last = [text[-1] for text in texts]
    if kind == "reward-ranking":
        ranks = example.labels
        each = [
            -F.logsigmoid(last[w] - last[loser]) + center * (last[w] + last[loser]) ** 2
            for w in range(len(last))
            for loser in range(len(last))
            if ranks[w] < ranks[loser]
        ]
        return torch.stack(each).mean()
    margin = example.labels[0] if example.labels else 0.0
    if kind == "reward-token_pairwise":
        chosen, rejected = (tree.sequence(leaf).tolist() for leaf in tree.leaves)
        start = next(t for t, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
        end = max(len(chosen), len(rejected))
        held = [F.pad(text[None], (0, end - len(text)), mode="replicate")[0, start:] for text in texts]
        return (-F.logsigmoid(held[0] - held[1] - margin) + center * (held[0] + held[1]) ** 2).mean()
    if kind == "reward-log_exp":
        return torch.log(1 + torch.exp(last[1] - last[0]))
    return -F.logsigmoid(last[0] - last[1] - margin) + center * (last[0] + last[1]) ** 2


@pytest.mark.parametrize("kind", FAMILY)
def test_packed_and_shared_is_separate_plain_forwards_in_loss_and_gradient(kind, tiny_folder, tmp_path, monkeypatch):
    """The second step against a plain classifier with the same weights that reads every text alone."""
    changes = {"train": {"batch_size": 8, "max_tokens": 200}, "reward": {"center_coefficient": 0.02}}
    if kind == "reward-log_exp":
        changes["reward"]["center_coefficient"] = 0.0
    rows = {"reward-ranking": rankings, "reward-log_exp": pairs}.get(kind, alike)()
    t = trainer(kind, tiny_folder("llama"), tmp_path, changes, rows)
    assert t.model.packed
    t.step(1)
    save_model(t.model.loaded, tmp_path / "plain")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    examples = [t.examples.train[i] for i in t.order.batch(2)]
    center = t.config.reward.center_coefficient
    expected = torch.stack([plain_loss(kind, plain, example, center) for example in examples]).mean()
    expected.backward()

    found: dict[str, torch.Tensor] = {}
    step = t.model.step

    def keeps_gradients():
        found.update({name: p.grad.clone() for name, p in t.model.parameters.items()})
        return step()

    monkeypatch.setattr(t.model, "step", keeps_gradients)
    metrics = t.step(2)
    assert metrics["reward/loss"] == pytest.approx(expected.item(), abs=1e-5)
    for name, parameter in plain.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-3, atol=1e-5), name
    assert 0 <= metrics["reward/accuracy"] <= 1 and metrics["reward/margin/min"] <= metrics["reward/margin/max"]


def test_the_score_at_every_position_is_the_same_packed_padded_and_alone(tiny_folder, tmp_path):
    for family in ("llama", "bloom"):  # bloom is read in padded rows
        t = trainer("reward-token_pairwise", tiny_folder(family), tmp_path / family, {}, alike())
        from accord.data.packing import make_pack
        from accord.data.trees import branching

        trees = [example.tree for example in t.examples.train][:3]
        trees += [branching([5, 6, 7], [[8, 9], [10], [11, 12, 13]]), branching([], [[5, 6], [7]])]
        pack = make_pack(trees, range(len(trees)))
        with t.model.evaluating():
            found, last = t.model.position_scores(pack), t.model.scores(pack)
            assert len(found) == pack.num_sequences and torch.allclose(torch.stack([f[-1] for f in found]), last, atol=1e-6)
            rows = [tree.sequence(leaf).astype("int64") for tree in trees for leaf in tree.leaves]
            for row, scores in zip(rows, found, strict=True):
                ends = [t.model.module(input_ids=torch.from_numpy(row[: k + 1])[None]).logits[0, 0] for k in range(len(row))]
                assert torch.allclose(scores, torch.stack(ends), atol=1e-5)


def test_log_exp_trains_to_the_weights_of_pairwise(tiny_folder, tmp_path):
    ends = []
    for kind in ("reward", "reward-log_exp"):
        t = trainer(kind, tiny_folder("llama"), tmp_path / kind)
        ends.append(([t.step(step)["reward/loss"] for step in (1, 2, 3)], dict(t.model.parameters)))
    assert ends[0][0] == pytest.approx(ends[1][0], abs=1e-6)
    assert all(torch.allclose(p, ends[1][1][name], atol=1e-5) for name, p in ends[0][1].items())


def test_a_margin_that_log_exp_would_not_read_is_refused(tiny_folder, tmp_path):
    rows = pairs()
    rows[7]["margin"] = 0.0
    with pytest.raises(ConfigError, match=r"1 pairs have one \(the first is .*7.*Use reward.loss_type=pairwise"):
        trainer("reward-log_exp", tiny_folder("llama"), tmp_path, train=rows)
    with pytest.raises(ConfigError, match="log_exp has no margin"):
        trainer("reward-log_exp", tiny_folder("llama"), tmp_path, train=pairs(), valid=rows)
    with_margin = [{**row, "margin": 1.0} for row in pairs()]
    losses = [
        trainer("reward-token_pairwise", tiny_folder("llama"), tmp_path, train=rows).step(1)["reward/loss"]
        for rows in (pairs(), with_margin)
    ]
    assert losses[1] > losses[0]


@pytest.mark.parametrize("kind", FAMILY[1:])
def test_two_steps_on_the_same_examples_lower_the_loss(kind, tiny_folder, tmp_path):
    t = trainer(kind, tiny_folder("llama"), tmp_path, {"train": {"batch_size": 8, "max_steps": 2, "warmup_ratio": 0.0}})
    first = t.order.batch(1)
    t.order.batch = lambda step: first
    one, two = t.step(1), t.step(2)
    assert two["reward/loss"] < one["reward/loss"] and two["reward/margin"] > one["reward/margin"]
    assert one.keys() >= t.evaluate(2).keys() - {"reward/ece"} >= {"reward/loss", "reward/accuracy", "reward/chosen/min"}


# -- how scores lie ----------------------------------------------------------------------------------------------------


def plain_scores(folder: Path, examples: Any) -> torch.Tensor:
    """[S] in float64, by a plain transformers classifier that reads every text alone."""
    module = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.cat([position_scores(module, e.tree, leaf)[-1:] for e in examples for leaf in e.tree.leaves])


def check_normalization(folder: Path, examples: Any, data: str) -> None:
    scores = plain_scores(folder, examples)
    found = load_normalization(folder)
    assert (found.texts, found.data) == (len(scores), data)
    assert found.mean == pytest.approx(float(scores.mean()), abs=1e-5)
    assert found.std == pytest.approx(float(scores.std(correction=0)), abs=1e-5)
    assert getattr(AutoConfig.from_pretrained(folder), KEY)["mean"] == found.mean  # plain transformers carries it along
    normalized = [found.apply(score) for score in scores.tolist()]
    assert sum(normalized) / len(normalized) == pytest.approx(0, abs=1e-4)
    assert sum(n**2 for n in normalized) / len(normalized) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("kind", ["reward", "reward-mse", "reward-token_pairwise"])
def test_every_saved_model_says_how_its_own_scores_lie_on_held_out_answers(kind, tiny_folder, tmp_path):
    changes = {
        "train": {"ema_decay": 0.8, "lr": 3e-3},
        "eval": {"every_steps": 1, "best_metric": "reward/loss"},
        "export": {"every_steps": 2},
        "model": {"lora": {"rank": 4}},
    }
    t = trainer(kind, tiny_folder("llama"), tmp_path, changes)
    t.train()
    means = []
    for folder in ("model", "ema", "best", "exports/step-2"):
        check_normalization(tmp_path / folder, t.examples.valid, "held-out")
        means.append(load_normalization(tmp_path / folder).mean)
    assert len({round(mean, 7) for mean in means[:2]}) == 2
    assert load_normalization(tmp_path) == load_normalization(tmp_path / "model")  # the run stands for its model


def test_where_nothing_is_held_out_scores_of_training_answers_are_measured_and_that_is_said(
    tiny_folder, tmp_path, monkeypatch, caplog
):
    from accord.trainers import reward

    monkeypatch.setattr(reward, "NORMALIZATION_SAMPLE", 4)
    t = trainer("reward", tiny_folder("llama"), tmp_path, {"data": {"holdout": 0.0}})
    t.train()
    assert "Nothing is held out" in caplog.text and not (tmp_path / "reward_evaluation.json").exists()
    check_normalization(tmp_path / "model", [t.examples.train[i] for i in (0, 3, 6, 9)], "training")


def test_what_another_model_has_left_in_the_configuration_is_not_kept(tiny_folder, tmp_path):
    """A critic or a reward model that starts from a reward model has scores of its own."""
    trainer("reward", tiny_folder("llama"), tmp_path / "first").train()
    first = load_normalization(tmp_path / "first")
    critic = load_scalar(str(tmp_path / "first"), Model(), seed=0, trainable=True)
    assert load_normalization(critic.module) == first
    save_model(critic, tmp_path / "critic")
    assert load_normalization(critic.module) == first  # saving does not change the module
    with pytest.raises(ConfigError, match=r"does not say how its scores lie.*Train it with accord reward"):
        load_normalization(tmp_path / "critic")
    t = trainer("reward", tmp_path / "first" / "model", tmp_path / "second")
    t.train()
    check_normalization(tmp_path / "second" / "model", t.examples.valid, "held-out")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (None, "does not say how its scores lie"),
        ({"mean": 0.5, "std": 0.0, "texts": 3, "data": "training"}, "all 3 texts the same score"),
        ({"mean": float("nan"), "std": 1.0, "texts": 3, "data": "training"}, "Expected mean, std, texts and data"),
        ({"mean": 0.5}, "Expected mean, std, texts and data"),
        ("odd", "Expected mean, std, texts and data"),
    ],
)
def test_a_model_whose_scores_cannot_be_normalised_is_refused(entry, message, tiny_folder, tmp_path):
    config = json.loads((tiny_folder("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config if entry is None else {**config, KEY: entry}))
    with pytest.raises(ConfigError, match=message):
        load_normalization(tmp_path)


def test_a_resumed_run_leaves_the_same_normalisation_and_evaluation(tiny_folder, tmp_path, monkeypatch):
    changes = {"checkpoint": {"every_steps": 2}, "eval": {"every_steps": 2}, "train": {"ema_decay": 0.9}}
    trainer("reward-token_pairwise", tiny_folder("llama"), tmp_path / "whole", changes).train()
    broken = trainer("reward-token_pairwise", tiny_folder("llama"), tmp_path / "cut", changes)
    step = broken.step
    monkeypatch.setattr(broken, "step", lambda number: step(number) if number < 4 else pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        broken.train()
    assert evaluation(tmp_path / "cut")["step"] == 2
    trainer("reward-token_pairwise", tiny_folder("llama"), tmp_path / "cut", changes).train()
    assert evaluation(tmp_path / "cut") == evaluation(tmp_path / "whole") and evaluation(tmp_path / "cut")["step"] == 5
    for part in ("model", "ema"):
        assert load_normalization(tmp_path / "cut" / part) == load_normalization(tmp_path / "whole" / part)


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluation(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "reward_evaluation.json").read_text(encoding="utf-8"))


def from_files(tmp_path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two sources of different size."""
    for name, part in (("many.jsonl", rows[: len(rows) * 2 // 3]), ("few.jsonl", rows[len(rows) * 2 // 3 :])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    return [{"path": str(tmp_path / "many.jsonl")}, {"path": str(tmp_path / "few.jsonl")}]


def long_pairs(n: int) -> list[dict[str, Any]]:
    return [
        {"prompt": sentence(i, 3), "chosen": sentence(i + 50, 1 + 3 * i % 17), "rejected": sentence(i + 90, 1 + 7 * i % 19)}
        for i in range(n)
    ]


@pytest.mark.parametrize("kind", ["reward", "reward-ranking"])
def test_the_evaluation_against_loops_over_pairs(kind, tiny_folder, tmp_path):
    changes = {
        "data": {"train": from_files(tmp_path, long_pairs(30) if kind == "reward" else rankings(30)), "holdout": 0.6},
        "eval": {"every_steps": 2},
        "train": {"max_steps": 2},
    }
    changes["reward"] = {"loss_type": kind.partition("-")[2] or "pairwise"}
    t = RewardTrainer(config(tiny_folder("llama"), tmp_path / "run", changes))
    assert len(t.evaluate(0)) and not (tmp_path / "run").exists()  # asked for in code, it leaves no file
    t.train()
    found = evaluation(tmp_path / "run")
    scores = iter(plain_scores(tmp_path / "run" / "model", t.examples.valid).tolist())
    items = []
    for example in t.examples.valid:
        own = [next(scores) for _ in example.tree.leaves]
        sizes = [int(example.tree.sequence_trained(leaf).sum()) for leaf in example.tree.leaves]
        ranks = example.labels if kind == "reward-ranking" else (0, 1)
        for w in range(len(own)):
            for loser in range(len(own)):
                if ranks[w] < ranks[loser]:
                    items.append((own[w] - own[loser], sizes[w], sizes[loser], Path(example.origin.rpartition(":")[0]).name))
    assert (found["step"], found["kind"], found["count"], found["ties"]) == (2, "pairs", len(items), 0)

    def accuracy(chosen: list) -> Any:
        return pytest.approx(sum(d > 0 for d, *_ in chosen) / len(chosen))

    assert found["accuracy"] == accuracy(items)
    error = 0.0
    for b in found["calibration"]:
        inside = [i for i in items if b["low"] <= 1 / (1 + math.exp(-abs(i[0]))) < b["high"]]
        sure = sum(1 / (1 + math.exp(-abs(d))) for d, *_ in inside) / len(inside)
        assert b["count"] == len(inside) and b["observed"] == accuracy(inside)
        assert b["predicted"] == pytest.approx(sure, abs=1e-5)
        error += len(inside) / len(items) * abs(sure - b["observed"])
    assert found["ece"] == pytest.approx(error, abs=1e-5)
    assert sum(b["count"] for b in found["by_length"]) == len(items) and found["by_length"][0]["low"] in (1, 16)
    for bucket in found["by_length"]:
        inside = [i for i in items if bucket["low"] <= max(i[1], i[2]) <= bucket["high"]]
        assert (bucket["count"], bucket["accuracy"]) == (len(inside), accuracy(inside))
    for side in found["by_longer"]:
        inside = [i for i in items if side["longer"] == ("chosen" if i[1] > i[2] else "rejected" if i[1] < i[2] else "neither")]
        assert (side["count"], side["accuracy"]) == (len(inside), accuracy(inside))
    assert {side["longer"] for side in found["by_longer"]} >= {"chosen", "rejected"}
    unequal = [i for i in items if i[1] != i[2]]
    assert found["prefers_longer"] == pytest.approx(sum((d > 0) == (c > r) for d, c, r, _ in unequal) / len(unequal))
    assert {Path(source["source"]).name for source in found["by_source"]} == {"many.jsonl", "few.jsonl"}
    for source in found["by_source"]:
        inside = [i for i in items if i[3] == Path(source["source"]).name]
        assert (source["count"], source["accuracy"]) == (len(inside), accuracy(inside))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    last = [row for row in rows if row["split"] == "eval"][-1]
    assert last["reward/ece"] == found["ece"] and last["reward/accuracy"] == found["accuracy"]


def test_the_evaluation_of_given_scores_against_a_loop(tiny_folder, tmp_path):
    rows = [{"user_input": sentence(i, 3), "completion": sentence(i + 50, 1 + i % 9), "score": float(i % 6)} for i in range(24)]
    changes = {"data": {"train": from_files(tmp_path, rows), "holdout": 0.5}, "train": {"max_steps": 2}}
    t = RewardTrainer(config(tiny_folder("llama"), tmp_path / "run", {**changes, "reward": {"loss_type": "mse"}}))
    t.train()
    found = evaluation(tmp_path / "run")
    scores = plain_scores(tmp_path / "run" / "model", t.examples.valid).tolist()
    targets = [e.labels[0] for e in t.examples.valid]
    sources = [Path(e.origin.rpartition(":")[0]).name for e in t.examples.valid]
    errors = [s - target for s, target in zip(scores, targets, strict=True)]
    assert (found["kind"], found["count"]) == ("scores", len(scores))
    assert found["mse"] == pytest.approx(sum(e**2 for e in errors) / len(errors), rel=1e-4)
    assert found["bias"] == pytest.approx(sum(errors) / len(errors), rel=1e-4)
    for source in found["by_source"]:
        inside = [e for e, name in zip(errors, sources, strict=True) if name == Path(source["source"]).name]
        assert source["count"] == len(inside) and source["bias"] == pytest.approx(sum(inside) / len(inside), rel=1e-4)
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    start = 0
    for b in found["calibration"]:
        inside = order[start : start + b["count"]]
        start += b["count"]
        assert b["observed"] == pytest.approx(sum(targets[i] for i in inside) / len(inside))
        assert b["predicted"] == pytest.approx(sum(scores[i] for i in inside) / len(inside), abs=1e-5)
    assert start == len(scores)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["reward/calibration_error"] == found["calibration_error"] and last["reward/loss"] == pytest.approx(found["mse"])


def test_a_tokenizer_is_saved_with_the_classifier(tiny_folder, tmp_path):
    trainer("reward-token_pairwise", tiny_folder("llama"), tmp_path).train()
    module = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert module.config.num_labels == 1 and tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert isinstance(load_normalization(module), Normalization)
