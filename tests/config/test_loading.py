"""Files, presets, `extends`, overrides and interpolation come together as CONFIG.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from accord.config import Config, ConfigError, dump_yaml, load_config, preset_names


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refused(config: str | Path | None, *overrides: str, stage: str | None = None, pipeline: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, overrides, stage=stage, pipeline=pipeline)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_nothing_written_gives_the_defaults_of_the_design():
    config = load_config()
    assert (config.run.seed, config.data.max_length, config.train.batch_size, config.train.max_tokens) == (1, 1024, 32, 4096)
    assert (config.dpo.beta, config.ppo.kl.coef, config.ppo.kl.horizon, config.ppo.lam) == (0.1, 0.05, 10000, 0.95)
    assert config.ppo.rewards[0].type == "model" and config.pipeline.stages == ("sft", "reward", "ppo")


def test_the_run_is_named_after_the_file(tmp_path):
    assert load_config(write(tmp_path / "mine.yaml", "dpo: {beta: 0.3}")).run.dir == "runs/mine"
    assert load_config("hh_dpo").source_name == "hh_dpo"
    assert load_config(None, ["data.train=x", "model.path=y"], stage="sft").run.dir == "runs/sft"
    assert load_config("hh_dpo", ["run.dir=elsewhere"]).run.dir == "elsewhere"


def test_a_file_wins_over_a_preset_of_the_same_name(tmp_path, monkeypatch):
    write(tmp_path / "hh_dpo", "dpo: {beta: 0.77}")
    monkeypatch.chdir(tmp_path)
    assert load_config("hh_dpo").dpo.beta == 0.77


def test_extends_takes_a_preset_or_a_file_beside_it_and_is_overridden(tmp_path):
    write(tmp_path / "base.yaml", "extends: hh_dpo\ndpo: {beta: 0.3, label_smoothing: 0.1}\ndata: {train: base.jsonl}")
    config = load_config(write(tmp_path / "mine.yaml", "extends: base.yaml\ndpo: {beta: 0.4}"))
    assert (config.dpo.beta, config.dpo.label_smoothing, config.data.train[0].path) == (0.4, 0.1, "base.jsonl")
    assert config.train.lr == 5.0e-6  # from the preset
    assert config.source_name == "mine"


def test_an_error_in_what_is_extended_names_that_file(tmp_path):
    base = write(tmp_path / "base.yaml", "dpo:\n  betta: 0.3")
    mine = write(tmp_path / "mine.yaml", "extends: base.yaml")
    assert refused(mine) == f"{base}:2  dpo.betta: no such key. Did you mean dpo.beta?"


def test_extending_in_a_circle_is_refused(tmp_path):
    write(tmp_path / "a.yaml", "extends: b.yaml")
    write(tmp_path / "b.yaml", "extends: a.yaml")
    assert "extends itself (a.yaml → b.yaml → a.yaml)" in refused(tmp_path / "a.yaml")


def test_extending_what_is_not_there_names_line_and_presets(tmp_path):
    text = refused(write(tmp_path / "a.yaml", "run: {seed: 3}\nextends: hh_dop"))
    assert text.startswith(f"{tmp_path / 'a.yaml'}:2  extends: hh_dop: no such file") and "Did you mean hh_dpo?" in text


def test_extends_can_be_given_on_the_command_line():
    assert load_config(None, ["extends=hh_dpo"]).data.max_length == 512


def test_overrides_win_and_set_list_items_by_number():
    config = load_config(
        "hh_dpo", ["dpo.beta=0.2", "ppo.rewards.0.weight=2", "ppo.rewards.1={type: function, path: my.judge:score}"]
    )
    assert config.dpo.beta == 0.2
    assert [(source.type, source.weight) for source in config.ppo.rewards] == [("model", 2.0), ("function", 1.0)]


def test_a_path_becomes_a_list_of_sources_where_an_item_is_set():
    config = load_config("hh_dpo", ["data.train=a.jsonl", "data.train.0.max_rows=5", "data.train.1=b.jsonl"])
    assert [(s.path, s.max_rows) for s in config.data.train] == [("a.jsonl", 5), ("b.jsonl", None)]


def test_a_list_item_beyond_the_end_is_refused():
    assert refused(None, "ppo.rewards.3.weight=2") == "command line  ppo.rewards.3: there are 1 items, numbered from 0."


def test_a_later_override_wins_and_null_removes():
    config = load_config(None, ["model.lora={rank: 4}", "model.lora.alpha=8", "train.max_steps=3", "train.max_steps=null"])
    assert (config.model.lora.rank, config.model.lora.alpha, config.train.max_steps) == (4, 8.0, None)
    assert load_config(None, ["model.lora={}", "model.lora=null"]).model.lora is None


@pytest.mark.parametrize("text", ["stages=[sft,dpo]", "stages=sft,dpo", "pipeline.stages=[sft, dpo]"])
def test_stages_is_short_for_pipeline_stages(text):
    assert load_config(None, [text]).pipeline.stages == ("sft", "dpo")


@pytest.mark.parametrize("text", ["dpo.beta", "=3", "dpo.beta=", "dpo.beta= "])
def test_an_override_without_key_or_value_is_refused(text):
    assert "command line" in refused(None, text)


def test_an_override_below_a_number_is_refused():
    assert "run.seed is 3, not a section" in refused(None, "run.seed=3", "run.seed.x=1")


def test_a_template_is_text_though_it_is_no_yaml():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert load_config(None, [f"model.chat_template={template}"]).model.chat_template == template


def test_interpolation_follows_keys_written_or_not(tmp_path):
    config = load_config(
        write(tmp_path / "a.yaml", "model: {path: base}\nrun: {dir: 'out/${model.path}-${dpo.beta}-${run.seed}'}")
    )
    assert config.run.dir == "out/base-0.1-1"
    assert (config.reference.path, config.reference.dtype, config.critic.path) == ("base", "float32", None)
    assert load_config(None, ["train.max_steps=7", "eval.every_steps=${train.max_steps}"]).eval.every_steps == 7
    assert load_config(None, ["model.path=x", "reference.path=y"]).reference.path == "y"
    assert load_config(None, ["reward_model.path=rm"]).critic.path == "rm"


def test_an_interpolation_of_nothing_names_the_nearest_key(tmp_path):
    text = refused(write(tmp_path / "a.yaml", "model:\n  path: ${modle.path}"))
    assert (
        text == f"{tmp_path / 'a.yaml'}:2  model.path: ${{modle.path}}: there is no key modle.path. Did you mean ${{model.path}}?"
    )


def test_an_interpolation_in_a_circle_is_refused():
    assert refused(None, "model.path=${reference.path}") == "command line  model.path: ${reference.path} refers to itself."
    assert "refers to itself" in refused(None, "run.dir=x${run.dir}")


def test_an_interpolation_with_an_open_brace_is_refused(tmp_path):
    assert refused(None, "model.path=${").startswith("command line  model.path: ${ can't be resolved:")
    assert refused(write(tmp_path / "a.yaml", "model: {path: x}\nstages:\n  sft:\n    model:\n      path: 'a${b'")).startswith(
        f"{tmp_path / 'a.yaml'}:5  stages.sft.model.path: a${{b can't be resolved:"
    )


def test_what_is_printed_loads_again_and_is_the_same(tmp_path):
    config = load_config("ppo", ["generate.stop=['\\n\\n', 中文]", "model.lora={}"])
    again = load_config(write(tmp_path / "ppo.yaml", dump_yaml(config)))
    assert again.to_dict() == config.to_dict()
    assert yaml.safe_load(dump_yaml(config)) == config.to_dict()


def test_every_preset_loads_for_the_stages_it_is_for():
    stages = {"sft": ["sft"], "reward_model": ["reward"], "hh_dpo": ["dpo"]}
    for name in preset_names():
        config = load_config(name)
        for stage in stages.get(name, config.pipeline.stages):
            assert config.for_stage(stage).train.lr > 0
        load_config(name, pipeline=name not in stages)
    assert {"sft", "reward_model", "hh_dpo", "ppo", "grpo"} <= set(preset_names())


def test_a_name_that_is_neither_file_nor_preset_lists_the_presets(tmp_path):
    assert "Did you mean hh_dpo? The presets are" in refused("hh_dop")
    assert "no such file" in refused(tmp_path / "none.yaml")


def test_a_run_folder_given_as_config_points_to_its_config(tmp_path):
    write(tmp_path / "config.yaml", "run: {seed: 2}")
    assert f"Did you mean {tmp_path / 'config.yaml'}?" in refused(tmp_path)


def test_empty_files_and_empty_sections_are_fine(tmp_path):
    assert load_config(write(tmp_path / "a.yaml", "")).run.seed == 1
    assert load_config(write(tmp_path / "b.yaml", "# only words\ntrain:\n  # lr: 1e-5\ndpo:\n")).train.lr is None


def test_what_a_stage_cannot_start_without_is_refused():
    text = refused(None, stage="ppo")
    assert all(key in text for key in ("model.path: is needed", "data.train: is needed", "reward_model.path: is needed"))
    function = "ppo.rewards=[{type: function, path: m:f}]"
    assert load_config(None, ["model.path=a", "data.train=b", function], stage="ppo").stage == "ppo"
    assert load_config(None, ["reward_model.path=a", "data.train=b"], stage="reward").model.path is None


def test_a_pipeline_hands_on_what_its_stages_need(tmp_path):
    config = load_config(None, ["model.path=a", "data.train=b"], pipeline=True)
    assert config.stage is None
    where = f"run.dir={tmp_path}"
    assert "reward_model.path" in refused(None, "model.path=a", "data.train=b", "stages=[sft,ppo]", where, pipeline=True)
    (tmp_path / "reward").mkdir()
    write(tmp_path / "reward" / "summary.json", "{}")  # finished by an earlier call
    load_config(None, ["model.path=a", "data.train=b", "stages=[sft,ppo]", where], pipeline=True)


def test_in_code_nested_mappings_do(tmp_path):
    config = Config(model={"path": tmp_path}, dpo={"beta": 0.2}, data={"train": ["a", {"path": "b"}]})
    assert config.model.path == str(tmp_path) == config.reference.path
    assert [source.path for source in config.data.train] == ["a", "b"]
    assert Config.model_validate({"dpo": {"beta": 0.2}}).dpo.beta == 0.2
    with pytest.raises(ConfigError, match=r"^dpo.betta: no such key. Did you mean dpo.beta\?$"):
        Config(dpo={"betta": 1})


def test_a_dash_is_standard_input():
    assert load_config(None, ["data.train=-"]).data.train[0].path == "-"
