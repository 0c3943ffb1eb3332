"""Every key has a description; the schema and `explain` tell what the types check."""

from __future__ import annotations

import json

import pytest

from accord.config import Config, keys
from accord.config.messages import nearest


def test_every_key_has_a_description_and_a_type_in_words():
    for key in keys.all_keys():
        path = tuple(key.split("."))
        assert keys.description(path), key
        assert keys.expected(path), key


def test_the_keys_of_the_design_are_there():
    written = (
        "run.dir run.resume model.lora.target_modules model.from_scratch.vocab_size reference.path reward_model.max_length critic.warmup_steps "
        "data.on_bad_row data.holdout train.min_lr_ratio train.on_nonfinite eval.best_metric checkpoint.keep_last export.every_steps "
        "sft.train_on reward.center_coefficient dpo.label_smoothing dpo.rpo_alpha dpo.simpo_gamma dpo.orpo_lambda ppo.whiten_rewards ppo.kl.controller ppo.missing_eos_penalty "
        "ppo.ratio_threshold ppo.ptx_data generate.repetition_penalty pipeline.stages stages track.samples_every extends"
    )
    assert set(written.split()) <= set(keys.all_keys())


def test_defaults_are_valid_by_their_own_types():
    values = Config().to_dict()
    assert Config(**values).to_dict() == values


def test_the_schema_is_json_and_names_the_shorthands():
    schema = json.loads(json.dumps(keys.schema()))
    train = schema["$defs"]["Data"]["properties"]["train"]["anyOf"]
    assert {"type": "string"} in train and {"$ref": "#/$defs/Source"} in train
    assert schema["additionalProperties"] is False and "extends" in schema["properties"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("dpo.beta", ["Strength of the pull", "a number greater than 0", "0.1"]),
        ("ppo.kl", ["coef", "estimator", "one of k1, k2, k3, abs", '"k1"']),
        ("data.train.0.max_rows", ["first ones", "a whole number of at least 1 or null"]),
        ("ppo.rewards", ["judge", "a list of", "ppo.rewards.TYPE"]),
        ("ppo.rewards.0", ["function", "weight", "ppo.rewards.TYPE"]),
        ("ppo.rewards.function", ["module:function", "must be given", "A Python function"]),
        ("ppo.rewards.judge.max_tokens", ["Longest reply", "512"]),
        ("model.from_scratch.vocab_size", ["must be given"]),
        ("", ["dpo", "Direct preference optimisation", "extends"]),
    ],
)
def test_explanations(key, words):
    path = tuple(int(part) if part.isdigit() else part for part in key.split(".")) if key else ()
    text = "\n".join(keys.explanation(path))
    assert all(word in text for word in words), text


def test_the_nearest_name_is_none_where_nothing_is_near():
    assert nearest("zzz", keys.all_keys()) is None
    assert nearest("trian", ["train", "eval"]) == "train"
