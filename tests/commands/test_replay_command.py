"""`accord replay RUN --step N`: a step computed again from a checkpoint and the journal, the folder left as it is."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from accord.cli import main
from accord.commands.replay import worst_samples
from accord.config.root import merge
from accord.errors import ConfigError, Interrupted
from accord.trainers.ppo import PPOTrainer
from accord.trainers.ppo_replay import compare, in_one_process, lowered_rates
from tests.trainers import ppo_scores
from tests.trainers.ppo_setup import PROMPTS, SCORES, function, settings
from tests.trainers.test_ppo_run import digest
from tests.trainers.test_ppo_watch import fooled


def run(model: Path, folder: Path, changes: dict | None = None, stop_at: int | None = None) -> Path:
    """Six steps with checkpoints after 2 and 4; `stop_at`: the step in which it is cut off."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prompts = folder.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    base = {
        "data": {"train": str(prompts), "holdout": 0.25},
        "train": {"batch_size": 2, "max_steps": 6, "epochs": 4},
        "checkpoint": {"every_steps": 2, "keep_last": 2},
        "ppo": {"rewards": [function("moody")], "judge": f"{SCORES}:moody", "normalize_score": True, "mini_batches": 2,
                "kl": {"controller": "adaptive", "horizon": 50}},
    }  # fmt: skip
    step = PPOTrainer.step

    def dies(self, number):
        if number == stop_at:
            raise Interrupted("killed")
        return step(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPOTrainer, "step", dies)
        with PPOTrainer(settings(model, folder, merge(base, changes or {}))) as trainer:
            try:
                trainer.train()
            except Interrupted:
                assert stop_at
    return folder


def accord(*arguments) -> int:
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    return int(exit.value.code or 0)


def state(folder: Path) -> dict:
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(autouse=True)
def calm():
    ppo_scores.ASKED.clear()
    yield
    ppo_scores.ASKED.clear()
    ppo_scores.PATIENCE["left"] = None


@pytest.mark.parametrize("step", [3, 4, 6])
def test_a_step_comes_out_as_it_was_logged_and_the_folder_is_left_as_it_is(tiny_folder, tmp_path, capsys, step):
    """From the checkpoint of the step before it, and from one two steps before; the scores would be others now."""
    folder = run(tiny_folder("llama"), tmp_path / "run")
    before = state(folder)
    ppo_scores.PATIENCE["left"] = Counter()
    capsys.readouterr()
    assert accord("replay", folder, "--step", step, "--json", "--tolerance", 0, "--worst", 1) == 0
    out = capsys.readouterr()
    result = json.loads(out.out)
    assert result["equal"] and result["step"] == step and result["from"] == {3: 2, 4: 2, 6: 4}[step] and result["notes"] == []
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in logged if row["split"] == "train" and row["step"] == step]
    for name in (
        "ppo/score",
        "ppo/policy_loss",
        "ppo/value_loss",
        "ppo/kl",
        "ppo/kl_coef",
        "train/grad_norm",
        "train/lr",
        "ppo/updates",
    ):
        assert result["metrics"][name] == {"logged": row[name], "replayed": row[name], "equal": True}
    assert not [
        name for name in result["metrics"] if name.startswith(("time/", "throughput/", "memory/")) or name in ("step", "wall_s")
    ]
    assert 1 <= len(result["samples"]) <= 2 and {"advantage", "kl", "score", "prompt", "response", "origin"} <= set(
        result["samples"][0]
    )
    assert f"computing step {'3' if step == 3 else '3 to 4' if step == 4 else '5 to 6'} again" in out.err
    assert state(folder) == before


@pytest.mark.parametrize(
    "ppo", [{"objective": "dpo", "kl": {"coef": 0.05}, "clip_reward": 5.0}, {"advantage": "grpo", "replay_buffer": 2}]
)
def test_other_objectives_and_a_replay_buffer(tiny_folder, tmp_path, ppo):
    changes = {
        "critic": {"lr": 5e-6},
        "ppo": {"samples_per_prompt": 2, "generation_batches": 2, "normalize_score": False, **ppo},
    }
    changes["ppo"]["kl"] = {"controller": "fixed", "horizon": 10000, **ppo.get("kl", {})}
    folder = run(tiny_folder("llama"), tmp_path / "run", changes)
    assert accord("replay", folder, "--step", 6, "--tolerance", 0) == 0


def test_a_step_of_which_one_pack_is_read_once_resumes_and_replays_to_the_bit(tiny_folder, tmp_path, monkeypatch):
    packs, update = [], PPOTrainer.update

    def noting(self, experience):
        packs.append(len(experience.whole.packs))
        return update(self, experience)

    monkeypatch.setattr(PPOTrainer, "update", noting)
    changes = {"data": {"max_length": 24}, "train": {"max_tokens": 36}, "ppo": {"mini_batches": 1}}
    whole = run(tiny_folder("llama"), tmp_path / "whole", changes)
    assert set(packs) == {2}
    run(tiny_folder("llama"), tmp_path / "cut", changes, stop_at=4)
    cut = run(tiny_folder("llama"), tmp_path / "cut", changes)
    for part in ("model", "critic"):
        assert digest(whole / part) == digest(cut / part) != {}, part
    assert accord("replay", whole, "--step", 6, "--tolerance", 0) == 0


def test_an_unfinished_run_a_pipelines_and_one_from_the_start(tiny_folder, tmp_path, capsys):
    folder = run(tiny_folder("llama"), tmp_path / "pipeline" / "ppo", {"checkpoint": {"every_steps": None}}, stop_at=4)
    assert not (folder / "summary.json").exists() and not (folder / "checkpoints").exists()
    assert accord("replay", folder, "--step", 3, "--tolerance", 0) == 0
    out = capsys.readouterr()
    assert "from the start of the run" in out.err and "equal: all" in out.out
    (tmp_path / "pipeline/config.yaml").write_text('# accord: {"stage": "pipeline"}\nrun: {}\n')
    assert accord("replay", tmp_path / "pipeline", "--step", 1) == 0


def test_a_difference_is_shown_and_is_exit_code_1(tiny_folder, tmp_path, capsys, monkeypatch):
    folder = run(tiny_folder("llama"), tmp_path / "run")
    text = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    for i, line in enumerate(text):
        row = json.loads(line)
        if row["step"] == 5 and row["split"] == "train":
            row["ppo/policy_loss"] += 0.125
            text[i] = json.dumps(row) + "\n"
    (folder / "metrics.jsonl").write_text("".join(text))
    monkeypatch.setenv("COLUMNS", "160")
    capsys.readouterr()
    assert accord("replay", folder, "--step", 5) == 1
    out = capsys.readouterr().out
    assert "ppo/policy_loss" in out and "-0.125" in out and "differing: 1 of" in out and "largest advantage and KL" in out
    assert accord("replay", folder, "--step", 5, "--tolerance", 100) == 0


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(tiny_folder, tmp_path, capsys):
    folder = run(tiny_folder("llama"), tmp_path / "run", {"checkpoint": {"keep_last": 3}, "ppo": {"journal": "all"}})
    for file in (folder / "checkpoints/step-00000004").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    before = state(folder)
    capsys.readouterr()
    assert accord("replay", folder, "--step", 5, "--json", "--tolerance", 0) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["from"] == 2 and "step-00000004" in result["notes"][0] and state(folder) == before


def test_an_alarm_that_lowered_the_learning_rates_is_repeated(tiny_folder, tmp_path, capsys):
    """The steps between: the rate is what it was then."""
    folder = run(tiny_folder("llama"), tmp_path / "run", {"ppo": {"on_alarm": "lower_lr"}})  # no answer ends by itself
    rows = [json.loads(line) for line in (folder / "alarms.jsonl").read_text().splitlines()]
    assert any("lr_factor" in row and row["step"] in (3, 5) for row in rows), rows
    for step in (4, 6):
        capsys.readouterr()
        assert accord("replay", folder, "--step", step, "--tolerance", 0) == 0


@pytest.mark.parametrize(
    "changes", [{"lr_factor": "x"}, {"lr_factor": None}, {"lr_factor": 10**400}, {"lr_factor": -1}, {"step": "x"}]
)
def test_an_alarm_changed_by_hand_is_named(tmp_path, changes):
    (tmp_path / "alarms.jsonl").write_text(
        "".join(json.dumps({"step": 2, "alarm": "kl", "lr_factor": 0.5} | more) + "\n" for more in ({}, changes))
    )
    with pytest.raises(ConfigError, match=r"alarms.jsonl: a row has step .* it was changed by hand"):
        lowered_rates(tmp_path / "alarms.jsonl")


def test_what_cannot_be_replayed_is_exit_code_2_with_the_reason(tiny_folder, tmp_path, capsys):
    folder = run(tiny_folder("llama"), tmp_path / "run")

    def refused(*arguments) -> str:
        capsys.readouterr()
        assert accord("replay", *arguments) == 2
        return capsys.readouterr().err

    assert "no run's folder" in refused(tmp_path, "--step", 1)
    assert "no such step; it has steps 1 to 6" in refused(folder, "--step", 7)
    said = refused(folder, "--step", 2)  # keep_last=2 keeps 2 and 4, and what was recorded since
    assert "those of steps 2, 4" in said and "has steps 3 to 6; step 1 is missing" in said
    assert "checkpoint.keep_last=" in said and "ppo.journal=all" in said
    refused(folder, "--step", 0)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Other {i}"}) + "\n" for i in range(8)))
    assert "is of other prompts" in refused(folder, "--step", 3)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace('"stage": "ppo"', '"stage": "sft"', 1))
    assert "a run of `sft`" in refused(folder, "--step", 3)


def test_prompts_from_python_cannot_be_read_again(tiny_folder, tmp_path, capsys):
    with fooled(tiny_folder("llama"), tmp_path / "run") as trainer:
        trainer.train()
    assert accord("replay", tmp_path / "run", "--step", 1) == 2
    assert "handed over in Python" in capsys.readouterr().err


def test_what_counts_as_equal():
    logged = {"step": 1, "stage": "ppo", "a": 1.0, "b": 1e-9, "c": None, "d": 2.0, "time/step": 1.0}
    result = {
        c.name: c.equal
        for c in compare(logged, {"a": 1.0 + 9e-6, "b": 5e-8, "c": float("nan"), "e": 1.0, "time/step": 9.0}, 1e-5)
    }
    assert result == {"a": True, "b": True, "c": True, "d": False, "e": False}
    assert not compare({"a": 1.0}, {"a": 1.00002}, 1e-5)[0].equal


@pytest.mark.parametrize("logged", [float("nan"), float("inf"), "x", [1], True, 10**400])
def test_a_logged_value_that_is_no_number_differs(logged):
    (metric,) = compare({"a": logged}, {"a": 1.0}, 1e-5)
    assert not metric.equal and metric.logged is None


@pytest.mark.parametrize("tolerance", ["nan", "inf", "1e400", "-1"])
def test_a_tolerance_is_a_finite_number(tmp_path, tolerance):
    assert accord("replay", tmp_path, "--step", 1, f"--tolerance={tolerance}") == 2


def test_the_worst_are_those_with_the_largest_advantage_and_the_largest_kl():
    samples = [{"advantage": a, "kl": k} for a, k in ((1.0, 0.0), (-3.0, 1.0), (0.5, 9.0), (2.0, 3.0))]
    assert [(row["why"], row["advantage"]) for row in worst_samples(samples, 1)] == [(["advantage"], -3.0), (["kl"], 0.5)]
    assert worst_samples(samples[1:2], 3)[0]["why"] == ["advantage", "kl"]


def test_what_divides_a_run_over_processes_is_left_out():
    saved = {
        "launch": {"processes": 4, "mesh": {"tensor": 2}},
        "model": {"path": "m", "lora": {"rank": 4}},
        "train": {"shard": "always", "offload": "params", "lr": 1e-4},
        "engine": {"inference_tp_size": 2, "pin_parameters": False, "tp_gather_partition_size": 2, "dtype": "float32"},
    }
    before = json.dumps(saved)
    assert in_one_process(saved) == {
        "model": {"path": "m", "lora": {"rank": 4, "share_base": False}}, "train": {"lr": 1e-4}, "engine": {"dtype": "float32"}
    }  # fmt: skip
    assert json.dumps(saved) == before
    assert in_one_process({"launch": None, "model": {"lora": {}}}) == {"model": {"lora": {}}}


@pytest.mark.parametrize("engine", [{"inference_tp_size": 2}, {"pin_parameters": False}])
def test_a_run_of_several_processes_is_replayed_in_one(tiny_folder, tmp_path, capsys, engine):
    """The folder of one process, made to say that it was one of two: the numbers are the same, so the step comes out."""
    folder = run(tiny_folder("llama"), tmp_path / "run")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["launch"] |= {"processes": 2}
    config["engine"] |= engine
    if "inference_tp_size" in engine:
        config["launch"]["mesh"]["tensor"] = 2
    head = "".join(line for line in (folder / "config.yaml").read_text().splitlines(True) if line.startswith("#"))
    (folder / "config.yaml").write_text(head + yaml.safe_dump(config))
    assert accord("replay", folder, "--step", 4) == 0
