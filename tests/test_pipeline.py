"""The quickstart's road in small: every stage through the command line, then chat and report."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from accord import cli
from accord.errors import ConfigError
from accord.pipeline import stage_config

SHORT = [
    "train.max_steps=3", "train.batch_size=8", "data.holdout=0.01", "eval.every_epochs=null", "eval.max_examples=16", "track.tensorboard=false",
    "generate.max_new_tokens=24", "pipeline.judge_prompts=[{path: demo:heldout, max_rows: 12}]",
]  # fmt: skip


def accord(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "run"
    assert accord("run", "quickstart", f"run.dir={folder}", *SHORT) == 0
    return folder


def test_every_stage_leaves_its_model_and_the_judge_its_numbers(run):
    for stage in ("sft", "reward", "dpo", "ppo"):
        assert (run / stage / "model" / "model.safetensors").exists()
        steps = [json.loads(line) for line in (run / stage / "metrics.jsonl").open()]
        assert [row["step"] for row in steps if row["split"] == "train"] == [1, 2, 3]
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["judge"]) == {"sft", "dpo", "ppo"}
    assert all(0 <= score <= 1 for score in summary["judge"].values())
    assert set(summary["stages"]) == {"sft", "reward", "dpo", "ppo"}
    assert set(summary["judge_details"]["ppo"]["by_language"]) == {"en", "zh"}
    assert (run / "report.html").stat().st_size > 10_000


def test_what_is_handed_on_is_what_was_trained(run):
    import yaml

    configs = {stage: yaml.safe_load((run / stage / "config.yaml").read_text()) for stage in ("sft", "reward", "dpo", "ppo")}
    sft, reward = str(run / "sft" / "model"), str(run / "reward" / "model")
    assert configs["reward"]["model"]["path"] == configs["dpo"]["model"]["path"] == configs["ppo"]["model"]["path"] == sft
    assert configs["dpo"]["reference"]["path"] == configs["ppo"]["reference"]["path"] == sft
    assert configs["ppo"]["reward_model"]["path"] == configs["ppo"]["critic"]["path"] == reward


def test_finished_stages_are_not_done_again(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.glob("*/model/model.safetensors")}
    assert accord("run", "quickstart", f"run.dir={run}", *SHORT) == 0
    assert "finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_subset_first_and_the_rest_later(tmp_path):
    folder = tmp_path / "run"
    common = ["run", "quickstart", f"run.dir={folder}", *SHORT, "pipeline.judge=null", "pipeline.judge_prompts=null"]
    assert accord(*common, "stages=[sft]") == 0
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["sft"]
    assert accord(*common, "stages=[dpo]") == 0
    first = json.loads((folder / "dpo" / "metrics.jsonl").read_text().splitlines()[1])
    assert first["dpo/reward_margin"] == 0  # it started from its own reference: the SFT model
    assert set(json.loads((folder / "summary.json").read_text())["stages"]) == {"sft", "dpo"}


def test_ppo_without_a_reward_model_is_refused_before_the_first_stage(tmp_path, capsys):
    folder = tmp_path / "run"
    assert accord("run", "quickstart", f"run.dir={folder}", *SHORT, "stages=[sft,ppo]") == 2
    assert "reward_model.path" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("pipeline.judge=no_such_module:score", "pipeline.judge"),
        ('ppo.rewards=[{type: function, path: "json:no_such_function"}]', "ppo.rewards.0.path"),
    ],
)
def test_a_function_that_scores_at_the_end_is_looked_for_before_the_first_stage(tmp_path, capsys, override, key):
    folder = tmp_path / "run"
    assert accord("run", "quickstart", f"run.dir={folder}", *SHORT, override) == 2
    assert f"error: {key}:" in capsys.readouterr().err
    assert not folder.exists()


def test_an_adapter_to_continue_is_for_the_first_stage_alone(tmp_path):
    from accord.config import Config

    config = Config(model={"path": "base", "lora": {"path": "adapter"}}, data={"train": "x.jsonl"})
    planned = ["sft", "dpo"]
    assert stage_config(config, "sft", tmp_path, planned).model.lora.path == "adapter"
    later = stage_config(config, "dpo", tmp_path, planned)
    assert later.model.lora.path is None and later.model.path == str(tmp_path / "sft" / "model")


def test_a_chat_of_several_turns_in_both_languages(run, monkeypatch, capsys):
    said = "What is 3 + 4?\n你好，请问 2 加 5 等于几？\n/clear\nReverse abc\n/quit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    assert accord("chat", str(run / "ppo"), "generate.max_new_tokens=16", "generate.seed=1") == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.strip()]) >= 3


def test_a_single_stage_knows_what_it_lacks():
    from accord.config import Config
    from accord.trainers.sft import SFTTrainer

    with pytest.raises(ConfigError, match=r"model\.path"):
        SFTTrainer(Config(), [{"prompt": "a", "completion": "b"}])
