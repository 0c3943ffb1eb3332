"""SFT, reward model and DPO: the invariants of ALGORITHMS §0–§3 on tiny models."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from torch import nn

from accord.errors import DataError, NonFiniteError
from accord.trainers import loop
from tests.trainers.runs import STAGES, demonstrations, pairs, trainer, weights


@pytest.mark.parametrize("kind", STAGES)
def test_micro_batches_change_nothing_but_rounding(kind, tiny_folder, tmp_path):
    """One pack of the whole batch = a pack an example: 8 × 1 = 1 × 8."""
    results = {}
    for name, budget in (("whole", 4096), ("single", None)):
        t = trainer(kind, tiny_folder("llama"), tmp_path / name, {"train": {"batch_size": 8, "max_steps": 3}})
        budget = budget or max(e.tree.num_tokens for part in (t.examples.train, t.examples.valid) for e in part)
        longest = min(200, budget)
        if kind == "dpo-kto":  # a prompt with another example's answer is longer, and cut at data.max_length
            budget, longest = max(budget, 60), 60
        limits = {"data": {"max_length": longest}, "train": {"batch_size": 8, "max_steps": 3, "max_tokens": budget}}
        t = trainer(kind, tiny_folder("llama"), tmp_path / name, limits)
        results[name] = [t.step(step) for step in (1, 2, 3)], {n: p.detach().clone() for n, p in t.model.parameters.items()}
    (whole, a), (single, b) = results["whole"], results["single"]
    for one, other in zip(whole, single, strict=True):
        for name in one:
            if not name.startswith(("train/pack_fill", "time", "train/tokens_per")):
                assert one[name] == pytest.approx(other[name], rel=2e-4, abs=2e-5), name
    for name in a:
        assert torch.allclose(a[name], b[name], atol=3e-5), name


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
@pytest.mark.parametrize("family", ["bloom"])
def test_the_padded_fallback_trains_to_the_same_numbers_as_separate_rows(kind, family, tiny_folder, tmp_path):
    whole = trainer(kind, tiny_folder(family), tmp_path / "a", {"train": {"batch_size": 8}})
    single = trainer(
        kind, tiny_folder(family), tmp_path / "b", {"train": {"batch_size": 8, "max_tokens": 100}, "data": {"max_length": 100}}
    )
    assert not whole.model.packed
    for step in (1, 2):
        one, other = whole.step(step), single.step(step)
        assert one[f"{whole.stage}/loss"] == pytest.approx(other[f"{whole.stage}/loss"], rel=1e-5)


def test_sft_loss_is_the_mean_over_trained_tokens(tiny_folder, tmp_path):
    t = trainer("sft", tiny_folder("gpt2"), tmp_path)
    indices = t.order.batch(1)
    total, count = 0.0, 0
    t.model.module.eval()
    for i in indices:
        tree = t.examples.train[i].tree
        ids = torch.from_numpy(tree.sequence(0).astype("int64"))[None]
        labels = torch.where(torch.from_numpy(tree.sequence_trained(0)), ids[0], -100)
        logits = t.model.module(input_ids=ids, use_cache=False).logits[0].double()
        total += float(nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum"))
        count += int((labels[1:] != -100).sum())
    assert t.step(1)["sft/loss"] == pytest.approx(total / count, abs=1e-6)


def test_reward_loss_and_scores_are_those_of_a_plain_classifier(tiny_folder, tmp_path):
    t = trainer("reward", tiny_folder("llama"), tmp_path)
    losses, margins = [], []
    for i in t.order.batch(1):
        tree = t.examples.train[i].tree
        chosen, rejected = (
            float(t.model.module(input_ids=torch.from_numpy(tree.sequence(leaf).astype("int64"))[None]).logits[0, 0])
            for leaf in tree.leaves
        )
        margins.append(chosen - rejected)
        losses.append(math.log1p(math.exp(-(chosen - rejected))))
    metrics = t.step(1)
    assert metrics["reward/loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert metrics["reward/margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-5)
    assert metrics["reward/margin/max"] == pytest.approx(max(margins), abs=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_dpo_starts_at_ln_2_exactly(precision, lora, tiny_folder, tmp_path):
    t = trainer("dpo", tiny_folder("llama"), tmp_path, {"train": {"precision": precision}, "model": {"lora": lora}})
    assert (t.reference.frozen is None) == (lora is not None)  # LoRA needs no second copy
    metrics = t.step(1)
    assert metrics["dpo/loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert metrics["dpo/loss/min"] == pytest.approx(math.log(2), abs=1e-12)
    assert metrics["dpo/reward_margin"] == 0 and metrics["dpo/reward_accuracy"] == 0
    assert metrics["train/grad_norm"] > 0
    assert t.step(2)["dpo/reward_margin"] != 0


def test_ipo_starts_at_its_closed_form(tiny_folder, tmp_path):
    metrics = trainer("dpo-ipo", tiny_folder("llama"), tmp_path).step(1)
    assert metrics["dpo/loss"] == pytest.approx((1 / (2 * 0.5)) ** 2, abs=1e-12)


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
def test_it_learns(kind, tiny_folder, tmp_path):
    t = trainer(kind, tiny_folder("llama"), tmp_path, {"train": {"max_steps": 40, "batch_size": 8, "lr": 3e-3}})
    losses = [t.step(step)[f"{t.stage}/loss"] for step in range(1, 41)]
    assert losses[-1] < 0.75 * losses[0]


CHECKPOINT_EVERY_2 = {"checkpoint": {"every_steps": 2}, "train": {"max_steps": 5, "ema_decay": 0.9}, "eval": {"every_steps": 2}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"lora": {"rank": 4, "dropout": 0.1}}},
        {"model": {"lora": {"rank": 4}, "quantization": "nf4"}},
        {"train": {"precision": "bf16"}},
    ],
    ids=["full", "lora", "nf4", "bf16"],
)
@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
def test_interrupted_and_resumed_is_the_undisturbed_run_bit_for_bit(kind, changes, tiny_folder, tmp_path, monkeypatch):
    if kind == "sft" and not changes:
        changes = {"sft": {"neftune_alpha": 5.0, "label_smoothing": 0.1}}
    both = {**CHECKPOINT_EVERY_2, **changes, "train": {**CHECKPOINT_EVERY_2["train"], **changes.get("train", {})}}
    trainer(kind, tiny_folder("llama"), tmp_path / "whole", both).train()

    broken = trainer(kind, tiny_folder("llama"), tmp_path / "cut", both)
    step = broken.step

    def dies_at_4(number):
        if number == 4:
            raise KeyboardInterrupt
        return step(number)

    monkeypatch.setattr(broken, "step", dies_at_4)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    assert not (tmp_path / "cut" / "model").exists()
    trainer(kind, tiny_folder("llama"), tmp_path / "cut", both).train()

    for part in ("model", "ema"):
        a, b = weights(tmp_path / "whole" / part), weights(tmp_path / "cut" / part)
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    lines = [[json.loads(line) for line in (tmp_path / r / "metrics.jsonl").open()] for r in ("whole", "cut")]
    for line in [*lines[0], *lines[1]]:
        for name in [n for n in line if n in ("wall_s", "train/tokens_per_s", "memory/peak_gib") or n.startswith("time/")]:
            del line[name]
    assert lines[0] == lines[1]


def test_a_signal_finishes_the_step_saves_and_says_so(tiny_folder, tmp_path):
    import os
    import signal

    from accord.errors import Interrupted

    trainer("sft", tiny_folder("llama"), tmp_path / "whole").train()
    t = trainer("sft", tiny_folder("llama"), tmp_path / "cut")
    step = t.step

    def terminated(number):
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(number)

    t.step = terminated
    with pytest.raises(Interrupted, match="SIGTERM after step 3 of 5") as stopped:
        t.train()
    assert stopped.value.exit_code == 130
    trainer("sft", tiny_folder("llama"), tmp_path / "cut").train()
    a, b = weights(tmp_path / "whole" / "model"), weights(tmp_path / "cut" / "model")
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_final_folder_loads_in_plain_transformers_and_gives_the_same_logits(kind, family, tiny_folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    t = trainer(kind, tiny_folder(family), tmp_path, {"model": {"lora": {"rank": 4}}})
    t.train()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template
    ids = tokenizer("the quick brown fox", return_tensors="pt").input_ids
    t.model.module.eval()
    assert torch.allclose(plain(ids).logits, t.model.module(input_ids=ids).logits, atol=1e-5)
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_eos_is_learned_when_pad_is_eos(tiny_folder, tiny_tokenizer, tmp_path):
    """A model whose pad token is its end token still learns to end its answers."""
    import copy
    import shutil

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "start"
    shutil.copytree(tiny_folder("llama"), folder)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": "hello", "completion": "good"}] * 8
    t = trainer(
        "sft",
        folder,
        tmp_path / "run",
        {"train": {"max_steps": 120, "batch_size": 6, "lr": 1e-2}, "data": {"holdout": 0.0}},
        rows,
    )
    t.train()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    prompt = t.encoder.encode_prompt(t_messages("hello"))
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=20, do_sample=False
    )
    assert saved.decode(out[0, len(prompt) :], skip_special_tokens=True) == "good"
    assert int(out[0, -1]) in t.encoder.stop_token_ids and out.shape[1] < len(prompt) + 20


def t_messages(text):
    from accord.data.records import Message

    return [Message("user", text)]


def test_best_is_kept_by_the_named_metric_and_every_export_loads(tiny_folder, tmp_path):
    changes = {"eval": {"every_steps": 1, "best_metric": "dpo/reward_margin"}, "export": {"every_steps": 2}}
    summary = trainer("dpo", tiny_folder("llama"), tmp_path, changes).train()
    margins = {
        r["step"]: r["dpo/reward_margin"]
        for r in map(json.loads, (tmp_path / "metrics.jsonl").open())
        if r["split"] == "eval" and r["step"]
    }
    best = max(margins, key=margins.get)
    assert summary["best"] == {"metric": "dpo/reward_margin", "value": margins[best], "step": best}
    assert weights(tmp_path / "best") and weights(tmp_path / "exports" / "step-2") and weights(tmp_path / "exports" / "step-4")
    if best != 5:
        assert any(not torch.equal(weights(tmp_path / "best")[n], w) for n, w in weights(tmp_path / "model").items())


def test_fewer_rows_than_a_batch_is_refused(tiny_folder, tmp_path):
    with pytest.raises(DataError, match=r"fewer than one batch of train\.batch_size=64"):
        trainer("sft", tiny_folder("llama"), tmp_path, {"train": {"batch_size": 64}})


def test_a_pair_longer_than_the_token_budget_is_refused_before_it_starts(tiny_folder, tmp_path):
    fits = trainer("dpo", tiny_folder("llama"), tmp_path / "run")
    longest = max(
        e.tree.longest for part in (fits.examples.train, fits.examples.valid) for e in part
    )  # every sequence fits, not every pair
    with pytest.raises(
        DataError, match=rf"needs up to \d+ tokens but train\.max_tokens is {longest}\. Raise train\.max_tokens to \d+"
    ):
        trainer(
            "dpo", tiny_folder("llama"), tmp_path / "run", {"train": {"max_tokens": longest}, "data": {"max_length": longest}}
        )
    assert not (tmp_path / "run").exists()


def spoil_loss(t, at):
    """A NaN in one weight of the model for one step: every number of that step is NaN."""
    step = t.step
    parameter = next(iter(t.model.parameters.values()))

    def spoiled(number):
        if number in at:
            kept = parameter.detach().clone()
            with torch.no_grad():
                parameter.view(-1)[:].fill_(float("nan"))
            try:
                return step(number)
            finally:
                with torch.no_grad():
                    parameter.copy_(kept)
        return step(number)

    t.step = spoiled


def test_a_loss_that_is_not_finite_ends_the_run_with_the_batch(tiny_folder, tmp_path):
    t = trainer("sft", tiny_folder("llama"), tmp_path)
    spoil_loss(t, {2})
    with pytest.raises(NonFiniteError, match=r"sft step 2: .* no weight was changed by it.*nonfinite-step-2\.json"):
        t.train()
    batch = json.loads((tmp_path / "nonfinite-step-2.json").read_text())
    assert batch["step"] == 2 and batch["batch"][0]["input_ids"]


def test_a_skipped_step_changes_neither_weights_nor_schedule_and_five_in_a_row_end_the_run(tiny_folder, tmp_path):
    t = trainer("sft", tiny_folder("llama"), tmp_path, {"train": {"on_nonfinite": "skip", "max_steps": 12}})
    before = {n: p.detach().clone() for n, p in t.model.parameters.items()}
    spoil_loss(t, {1, 4, 5, 6, 7, 8})
    metrics = t.step(1)
    assert metrics["train/skipped"] == 1 and t.model.schedule_step == 0
    assert all(torch.equal(before[n], p) for n, p in t.model.parameters.items())
    assert t.step(2)["train/lr"] == t.model.lr(1)
    for step in (3, 4, 5, 6, 7):
        t.step(step)
    with pytest.raises(NonFiniteError, match="5 times in a row"):
        t.step(8)


def test_the_schedule_warms_up_and_ends_at_its_minimum():
    from accord.engine.trained import scheduled_lr

    lrs = [scheduled_lr(s, 100, 1.0, "cosine", 0.1, 0.1) for s in range(1, 101)]
    assert lrs[0] == pytest.approx(0.1) and lrs[9] == pytest.approx(1.0) and lrs[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(lrs[9:]))
    assert lrs[54] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert scheduled_lr(55, 100, 1.0, "linear", 0.1, 0.1) == pytest.approx(0.1 + 0.9 * 0.5)
    assert scheduled_lr(1, 1, 1.0, "cosine", 0.1, 0.1) == pytest.approx(0.1)


def test_ema_follows_its_formula(tiny_folder, tmp_path):
    t = trainer("sft", tiny_folder("llama"), tmp_path, {"train": {"ema_decay": 0.7}})
    expected = {n: p.detach().double().clone() for n, p in t.model.parameters.items()}
    for step in (1, 2, 3):
        t.step(step)
        expected = {n: 0.7 * e + 0.3 * t.model.parameters[n].detach().double() for n, e in expected.items()}
    assert all(torch.allclose(t.model.ema[n].double(), e, atol=1e-6) for n, e in expected.items())


def test_every_step_has_its_own_random_numbers_and_a_resume_needs_no_state():
    loop.seed_everything(1, "sft", 3)
    a = torch.rand(3)
    loop.seed_everything(1, "sft", 4)
    b = torch.rand(3)
    loop.seed_everything(1, "sft", 3)
    assert torch.equal(a, torch.rand(3)) and not torch.equal(a, b)


def test_data_with_its_own_validation_set(tiny_folder, tmp_path):
    t = trainer("dpo", tiny_folder("llama"), tmp_path, train=pairs(12), valid=pairs(20)[12:])
    assert len(t.examples.train) == 12 and len(t.examples.valid) == 8
    assert "dpo/loss" in t.evaluate(0)
    assert trainer("sft", tiny_folder("llama"), tmp_path, {"data": {"holdout": 0.0}}, train=demonstrations()).evaluate(0) == {}
