"""DPO's reference: asked in the step or computed once, kept on disk by content, given back when it has said all."""

from __future__ import annotations

import gc
import logging
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from accord.config import Config
from accord.errors import ConfigError
from accord.trainers import reference as reference_module
from tests.trainers.runs import pairs, trainer

ONCE = {"reference": {"precompute": True}, "data": {"cache": True}}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCORD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "reference"


def run(start, folder, steps=4, **changes):
    t = trainer("dpo", start, folder, {**ONCE, **changes})
    return t, [t.step(step) for step in range(1, steps + 1)]


def test_training_is_the_same_up_to_rounding_and_the_difference_is_said(tiny_folder, tmp_path):
    in_step = trainer("dpo", tiny_folder("llama"), tmp_path / "a")
    plain = [in_step.step(step) for step in range(1, 5)]
    t, once = run(tiny_folder("llama"), tmp_path / "b")
    assert once[0]["dpo/reference_difference"] < 1e-4
    for a, b in zip(plain, once, strict=True):
        assert b["dpo/loss"] == pytest.approx(a["dpo/loss"], abs=1e-5)
        assert b["dpo/reward_margin"] == pytest.approx(a["dpo/reward_margin"], abs=1e-4)
        assert "dpo/reference_difference" not in a
    assert t.evaluate(4)["dpo/loss"] == pytest.approx(in_step.evaluate(4)["dpo/loss"], abs=1e-5)


def test_the_first_evaluation_is_exactly_that_of_equal_models(tiny_folder, tmp_path):
    t, _ = run(tiny_folder("llama"), tmp_path, steps=0)
    metrics = t.evaluate(0)
    assert metrics["dpo/reward_margin"] == 0 and metrics["dpo/reward_accuracy"] == 0


def test_no_second_model_is_loaded_where_the_policy_starts_as_the_reference(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(reference_module, "load_causal", lambda *a, **k: pytest.fail("loaded"))
    run(tiny_folder("llama"), tmp_path / "a", steps=1)
    run(tiny_folder("llama"), tmp_path / "b", steps=1, model={"lora": {"rank": 2}})


@pytest.mark.parametrize("own", [{"dtype": "bfloat16"}, {"path": "other"}])
def test_a_reference_of_its_own_is_given_back(own, tiny_folder, tmp_path, monkeypatch):
    if "path" in own:
        own = {"path": str(shutil.copytree(tiny_folder("llama"), tmp_path / "other"))}
    loaded, load = [], reference_module.load_causal
    monkeypatch.setattr(
        reference_module, "load_causal", lambda *a, **k: loaded.append(weakref.ref((m := load(*a, **k)).module)) or m
    )
    t, metrics = run(tiny_folder("llama"), tmp_path / "run", reference={"precompute": True, **own})
    gc.collect()
    assert len(loaded) == 1 and loaded[0]() is None and t.reference.frozen is None
    assert all(torch.isfinite(torch.tensor(m["dpo/loss"])) for m in metrics)


def test_the_values_are_those_of_plain_forwards(tiny_folder, tmp_path):
    t, _ = run(tiny_folder("llama"), tmp_path, steps=0)
    module = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    for number in range(len(t.examples.train)):
        tree = t.examples.train[number].tree
        for value, leaf in zip(t.reference.tables["train"].of([number]), tree.leaves, strict=True):
            ids, trained = torch.from_numpy(tree.sequence(leaf).astype("int64")), torch.from_numpy(tree.sequence_trained(leaf))
            logp = module(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            assert float(value) == pytest.approx(float(logp[trained[1:]].double().sum()), abs=1e-4)


def test_it_is_asked_once_and_then_read_from_disk(tiny_folder, tmp_path, cache, monkeypatch):
    _, first = run(tiny_folder("llama"), tmp_path / "a")
    kept = sorted(cache.iterdir())
    assert len(kept) == 2  # training and held-out part
    monkeypatch.setattr(reference_module, "_ask", lambda *a: pytest.fail("asked again"))
    _, second = run(tiny_folder("llama"), tmp_path / "b")
    assert [m["dpo/loss"] for m in first] == [m["dpo/loss"] for m in second]
    assert sorted(cache.iterdir()) == kept


def test_a_changed_model_row_precision_or_pack_is_seen(tiny_folder, tmp_path, cache):
    run(tiny_folder("llama"), tmp_path / "a", steps=0)
    seen = {path.name for path in cache.iterdir()}

    def new() -> int:
        now = {path.name for path in cache.iterdir()}
        fresh = len(now - seen)
        seen.update(now)
        return fresh

    changed = shutil.copytree(tiny_folder("llama"), tmp_path / "changed")
    run(changed, tmp_path / "b", steps=0)
    assert new() == 0  # the same content elsewhere
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    run(changed, tmp_path / "c", steps=0)
    assert new() == 2
    rows = pairs()
    rows[0]["chosen"] += " again"
    t = trainer("dpo", tiny_folder("llama"), tmp_path / "d", ONCE, train=rows)
    assert new() == 1 and len(t.reference.tables) == 2  # only the part with the changed row
    run(tiny_folder("llama"), tmp_path / "e", steps=0, train={"precision": "bf16"})
    assert new() == 2
    run(tiny_folder("llama"), tmp_path / "f", steps=0, reference={"precompute": True, "dtype": "bfloat16"})
    assert new() == 2


def test_a_damaged_file_is_told_and_computed_again(tiny_folder, tmp_path, cache, caplog):
    _, first = run(tiny_folder("llama"), tmp_path / "a")
    files = sorted(cache.iterdir())
    good = files[0].read_bytes()
    one_bit = good[:-1] + bytes([good[-1] ^ 1])  # of an exponent: a finite number, 10^4 times too large or more
    for damage in (b"", good[:-3], b"nonsense" * 20, one_bit):
        files[0].write_bytes(damage)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            _, again = run(tiny_folder("llama"), tmp_path / "b")
        assert "is damaged" in caplog.text and [m["dpo/loss"] for m in again] == [m["dpo/loss"] for m in first]
        assert files[0].read_bytes() == good
    save_file({"logps": torch.full((99,), 1.0, dtype=torch.float64)}, files[0])  # another number of answers
    _, again = run(tiny_folder("llama"), tmp_path / "c")
    assert [m["dpo/loss"] for m in again] == [m["dpo/loss"] for m in first]


def test_without_a_cache_nothing_is_written(tiny_folder, tmp_path, cache):
    run(tiny_folder("llama"), tmp_path, data={"cache": False})
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_costs_only_time(tiny_folder, tmp_path, cache, caplog):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING):
        run(tiny_folder("llama"), tmp_path / "a")
    assert "can't be written" in caplog.text


def test_with_lora_it_is_the_adapter_that_training_continues(tiny_folder, tmp_path):
    first = trainer("dpo", tiny_folder("llama"), tmp_path / "sft", {"model": {"lora": {"rank": 2}}})
    first.train()
    adapter = {"rank": 2, "path": str(tmp_path / "sft" / "adapter")}
    continued, metrics = run(tiny_folder("llama"), tmp_path / "a", model={"lora": adapter})
    assert continued.evaluate(0) is not None and metrics[0]["dpo/reference_difference"] < 1e-4
    base, _ = run(tiny_folder("llama"), tmp_path / "b", steps=0, model={"lora": {"rank": 2}})
    ours, other = (t.reference.tables["train"].values for t in (continued, base))
    assert float((ours - other).abs().max()) > 1e-3  # it is not the bare base


def test_a_resumed_run_has_the_same_weights(tiny_folder, tmp_path):
    from tests.trainers.runs import weights

    whole = trainer("dpo", tiny_folder("llama"), tmp_path / "whole", {**ONCE, "checkpoint": {"every_steps": 2}})
    whole.train()
    cut = trainer("dpo", tiny_folder("llama"), tmp_path / "cut", {**ONCE, "checkpoint": {"every_steps": 2}})
    plain_step = cut.step

    def dies(step):
        if step == 4:
            raise RuntimeError("power cut")
        return plain_step(step)

    cut.step = dies
    with pytest.raises(RuntimeError):
        cut.train()
    trainer("dpo", tiny_folder("llama"), tmp_path / "cut", {**ONCE, "checkpoint": {"every_steps": 2}}).train()
    ours, theirs = weights(tmp_path / "cut" / "model"), weights(tmp_path / "whole" / "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_it_is_refused_where_nothing_can_be_computed_before():
    with pytest.raises(ConfigError, match="PPO's answers are new in every step"):
        Config(model={"path": "m"}, reward_model={"path": "r"}, reference={"precompute": True}).for_stage("ppo")
    with pytest.raises(ConfigError, match=r"does nothing with dpo\.loss_type=simpo"):
        Config(model={"path": "m"}, reference={"precompute": True}, dpo={"loss_type": "simpo", "beta": 2.0}).for_stage("dpo")


def test_a_run_does_not_go_on_against_another_reference(tiny_folder, tmp_path):
    """Its second half would silently be measured against a model that has nothing to do with its start."""
    changes = {"train": {"max_steps": 4}, "checkpoint": {"every_steps": 2}, "reference": {"precompute": True}}
    changed = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), changed)
    first = trainer("dpo", changed, tmp_path / "run", changes)
    step = first.step
    first.step = lambda number: step(number) if number < 4 else pytest.fail("killed")
    with pytest.raises(pytest.fail.Exception, match="killed"):
        first.train()
    shutil.copy(tiny_folder("llama", seed=5) / "model.safetensors", changed)
    with pytest.raises(ConfigError, match="has other weights than when this run began"):
        trainer("dpo", changed, tmp_path / "run", changes).train()
    shutil.copy(tiny_folder("llama") / "model.safetensors", changed)
    trainer("dpo", changed, tmp_path / "run", changes).train()
