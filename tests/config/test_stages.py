"""What `for_stage` and `updated` make of a configuration."""

from __future__ import annotations

import pytest

from accord.config import STAGES, Config, ConfigError, load_config
from accord.config.root import merge, plain


@pytest.mark.parametrize(("stage", "lr"), [("sft", 1e-5), ("reward", 5e-6), ("dpo", 1e-6), ("ppo", 1e-6)])
def test_the_learning_rate_is_the_stages_own_and_ten_times_it_with_lora(stage, lr):
    assert Config().for_stage(stage).train.lr == pytest.approx(lr)
    assert Config(model={"lora": {}}).for_stage(stage).train.lr == pytest.approx(10 * lr)
    assert Config(train={"lr": 3e-4}, model={"lora": {}}).for_stage(stage).train.lr == 3e-4


def test_a_stage_takes_its_overrides_and_no_others():
    config = Config(
        train={"batch_size": 8},
        stages={"sft": {"train": {"lr": 2e-5}}, "ppo": {"model": {"lora": None}}},
        model={"lora": {"rank": 4}},
    )
    sft, ppo, dpo = (config.for_stage(stage) for stage in ("sft", "ppo", "dpo"))
    assert (sft.train.lr, sft.train.batch_size, sft.model.lora.rank) == (2e-5, 8, 4)
    assert (ppo.train.lr, ppo.model.lora) == (1e-6, None)
    assert dpo.train.lr == pytest.approx(1e-5) and dpo.stages == {}
    assert config.train.lr is None and config.stage is None and sft.stage == "sft"


def test_what_interpolates_follows_a_stages_override():
    config = Config(model={"path": "a", "dtype": "bfloat16"}, stages={"dpo": {"model": {"path": "b"}}})
    assert (config.reference.path, config.for_stage("dpo").reference.path, config.for_stage("dpo").reference.dtype) == (
        "a",
        "b",
        "bfloat16",
    )


def test_a_changed_copy_follows_interpolation_and_keeps_its_name():
    config = load_config("hh_dpo", ["stages.dpo.dpo.beta=0.3"])
    changed = config.updated({"model": {"path": "b"}, "run": {"dir": "x"}}).for_stage("dpo")
    assert (changed.model.path, changed.reference.path, changed.dpo.beta, changed.run.dir) == ("b", "b", 0.3, "x")
    assert changed.source_name == "hh_dpo" and config.model.path != "b"
    assert changed.updated({"dpo": {"beta": 0.4}}).dpo.beta == 0.4
    assert changed.updated({"train": {"max_steps": 1}}).stage == "dpo"


def test_sources_tied_to_other_stages_are_left_out():
    config = Config(data={"train": [{"path": "a", "stages": ["sft"]}, {"path": "b", "stages": ["reward", "ppo"]}, "c"]})
    assert [s.path for s in config.for_stage("sft").data.train] == ["a", "c"]
    assert [s.path for s in config.for_stage("ppo").data.train] == ["b", "c"]
    assert Config(data={"train": [{"path": "a", "stages": ["sft"]}]}).for_stage("dpo").data.train is None


def test_a_stage_configuration_is_its_own_and_no_other():
    config = Config().for_stage("sft")
    assert config.for_stage("sft") is config
    with pytest.raises(ValueError, match="already that of stage sft"):
        config.for_stage("dpo")
    with pytest.raises(ValueError, match="no such stage"):
        Config().for_stage("rlhf")


def test_a_mistake_in_a_stage_is_found_before_any_stage_starts():
    with pytest.raises(ConfigError, match=r"stages\.ppo\.ppo\.kl\.estimator"):
        load_config(None, ["stages.ppo.ppo.kl={place: loss, estimator: k1}"])


def test_nothing_can_be_changed_after_loading():
    config = Config()
    with pytest.raises(Exception, match="frozen"):
        config.dpo.beta = 3  # type: ignore[misc]


def test_sections_can_be_handed_over_as_objects():
    from accord.config import DPO, FunctionReward, Model

    config = Config(model=Model(path="a"), dpo=DPO(beta=0.3), ppo={"rewards": [FunctionReward(path="m:f")]})
    assert (config.model.path, config.reference.path, config.dpo.beta, config.ppo.rewards[0].path) == ("a", "a", 0.3, "m:f")
    assert config.updated({"train": {"lr": 1.0}}).dpo.beta == 0.3


def test_merging_keeps_both_sides_unchanged():
    base, over = {"a": {"b": 1, "c": [1]}, "d": 1}, {"a": {"c": [2], "e": 3}, "d": None}
    merged = merge(base, over)
    assert merged == {"a": {"b": 1, "c": [2], "e": 3}, "d": None}
    merged["a"]["c"].append(9)
    assert base == {"a": {"b": 1, "c": [1]}, "d": 1} and over["a"]["c"] == [2]
    assert plain((1, [2, {"a": (3,)}])) == [1, [2, {"a": [3]}]]


def test_every_stage_has_a_section_and_a_default_rate():
    from accord.config.root import DEFAULT_LR

    assert set(STAGES) == set(DEFAULT_LR) and all(stage in Config.model_fields for stage in STAGES)


def test_the_command_line_wins_over_a_stages_own_value(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "train: {batch_size: 8}\nmodel: {path: m}\nstages: {sft: {train: {lr: 1.0e-3}, model: {lora: null}}, dpo: {train: {batch_size: 64}}}\n"
    )
    config = load_config(recipe, ["train.batch_size=16", "train.lr=1e-4", "model.lora.rank=4"])
    assert config.for_stage("dpo").train.batch_size == config.for_stage("sft").train.batch_size == 16
    assert config.for_stage("sft").train.lr == config.for_stage("dpo").train.lr == 1e-4
    assert config.for_stage("sft").model.lora.rank == 4
    one = load_config(recipe, ["stages.dpo.train.batch_size=32"])
    assert (one.for_stage("dpo").train.batch_size, one.for_stage("sft").train.batch_size) == (32, 8)
