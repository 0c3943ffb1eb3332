"""A refusal names the place, the key, what was expected, what was given and the nearest valid name."""

from __future__ import annotations

from pathlib import Path

import pytest

from accord.config import ConfigError, load_config


def refused(path: Path, text: str, name: str = "mine.yaml") -> list[str]:
    file = path / name
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return [line.removeprefix(f"{file}:") for line in str(caught.value).splitlines()]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dpo.betta=0.1", "dpo.betta: no such key. Did you mean dpo.beta?"),
        ("dop.beta=0.1", "dop: no such key. Did you mean dpo?"),
        ("beta=0.1", "beta: no such key. Did you mean dpo.beta?"),
        ("train.learning_rate=1e-5", "train.learning_rate: no such key. Did you mean train.lr?"),
        ("max_seq_length=512", "max_seq_length: no such key. Did you mean data.max_length?"),
        ("ppo.kl.estimater=k1", "ppo.kl.estimater: no such key. Did you mean ppo.kl.estimator?"),
        ("dpo.beta=0", "dpo.beta: expected a number greater than 0, got 0."),
        ("dpo.beta=-0.1", "dpo.beta: expected a number greater than 0, got -0.1."),
        ("dpo.beta=true", "dpo.beta: expected a number greater than 0, got true."),
        ("dpo.beta=.inf", "dpo.beta: expected a number greater than 0, got inf."),
        ("dpo.beta=.nan", "dpo.beta: expected a number greater than 0, got nan."),
        ("dpo.beta=null", "dpo.beta: expected a number greater than 0, got null."),
        ("dpo.beta='0.1'", "dpo.beta: expected a number greater than 0, got '0.1'."),
        ("run.seed=1.5", "run.seed: expected a whole number of at least 0, got 1.5."),
        ("run.seed=true", "run.seed: expected a whole number of at least 0, got true."),
        ("data.shuffle=1", "data.shuffle: expected true or false, got 1."),
        ("data.shuffle=yes", "data.shuffle: expected true or false, got 'yes'."),
        ("dpo.loss_type=sigmoidal", "dpo.loss_type: expected one of sigmoid, ipo, hinge, robust, simpo, orpo, kto, got 'sigmoidal'. Did you mean sigmoid?"),
        ("model.path=3", 'model.path: expected text or null, got 3. For text write it in quotes: "3".'),
        ("data.holdout=1", "data.holdout: expected a number of at least 0 and less than 1, got 1."),
        ("train.betas=[0.9]", "train.betas.1: is needed."),
        ("train.betas=0.9", "train.betas: expected a list of 2, each a number of at least 0 and less than 1, got 0.9."),
        ("pipeline.stages=[sft, ppp]", "pipeline.stages.1: expected one of sft, reward, dpo, ppo, got 'ppp'. Did you mean ppo?"),
        ("pipeline.stages=[]", "pipeline.stages: expected a list of one of sft, reward, dpo, ppo, got []."),
        ("ppo.rewards=[{type: funtion}]", "ppo.rewards.0.type: expected one of model, classifier, function, remote, judge, length, repetition, format, human, got 'funtion'. Did you mean function?"),
        ("ppo.rewards=[{weight: 1}]", "ppo.rewards.0.type: expected one of model, classifier, function, remote, judge, length, repetition, format, human, got null."),
        ("ppo.rewards=[{type: function, path: my_module}]", "ppo.rewards.0.path: expected module:function, got 'my_module'."),
        ("ppo.rewards=[{type: remote, ulr: x}]", "ppo.rewards.0.url: is needed. Where samples are sent with POST."),
        ("ppo.rewards=[{type: remote, url: x, ulr: x}]", "ppo.rewards.0.ulr: no such key. Did you mean ppo.rewards.0.url?"),
        ("ppo.rewards=[{type: repetition, path: x}]", "ppo.rewards.0.path: no such key. Did you mean model.path?"),
        ("ppo.rewards=[{type: length, max_tokens: 0}]", "ppo.rewards.0.max_tokens: expected a whole number of at least 1 or null, got 0."),
        ("ppo.rewards=[{type: judge, base_url: 'http://x', model: m, max_tokens: null}]", "ppo.rewards.0.max_tokens: expected a whole number of at least 1, got null."),
        ("ppo.rewards=[{type: judge, base_url: 'http://x', model: m, api_key_env: sk-1234}]", "ppo.rewards.0.api_key_env: expected the name of an environment variable, in capitals or null; the secret itself does not belong into a configuration."),
        ("ppo.rewards=[{type: remote, url: 'http://x', headers_env: {Authorization: Bearer 1234}}]", "ppo.rewards.0.headers_env.Authorization: expected the name of an environment variable, in capitals; the secret itself does not belong into a configuration."),
        ("ppo.rewards=[{type: model, name: a/b}]", "ppo.rewards.0.name: expected a name of letters, digits, '.', '-' and '_' or null, got 'a/b'."),
        ("ppo.rewards=[{type: function}]", "ppo.rewards.0.path: is needed. module:function"),
        ("data.train=[{pth: x}]", "data.train.0.path: is needed. File, folder, hub id, '-' (standard input) or demo:NAME."),
        ("data.columns=[a]", "data.columns: expected a mapping, got ['a']."),
        ("data.format=alpacca", "data.format: expected one of messages, hh, alpaca, sharegpt, chatllama, rm-static, ultrafeedback, shp, webgpt, summarize, text or auto, got 'alpacca'. Did you mean alpaca?"),
        ("stages={sfft: {}}", "stages.sfft: no such stage. The stages are sft, reward, dpo, ppo."),
        ("dpo.loss_weights={kto: 0.8, ipo: 0.2}", "dpo.loss_weights.kto: dpo.loss_weights has no such entry: expected sigmoid, ipo, hinge or robust."),
        ("stages.sft.train.lrr=1", "stages.sft.train.lrr: no such key. Did you mean train.lr?"),
        ("stages.sft.train.lr=fast", "stages.sft.train.lr: expected a number greater than 0 or null, got 'fast'."),
        ("stages.sft.trian={lr: 1}", "stages.sft.trian: no such key. Did you mean train?"),
        ("critic=true", "critic: expected a section {path, lr, share_trunk, trunk_gradient, warmup_steps}, got true."),
        ("critic.²=1", "critic.²: no such key. critic has: path, lr, share_trunk, trunk_gradient, warmup_steps."),
        ("data.holdout=" + "9" * 5000, "data.holdout: expected a number of at least 0 and less than 1, got '" + "9" * 5000 + "'."),
        ("launch.type=rays", "launch.type: expected one of local, ray, got 'rays'. Did you mean ray?"),
        ("launch.processes=0", "launch.processes: expected auto or a whole number of at least 1, got 0."),
        ("launch.ray.env_vars={OMP_NUM_THREADS: 4}", 'launch.ray.env_vars.OMP_NUM_THREADS: expected text, got 4. For text write it in quotes: "4".'),
        ("launch.ray.env_vars={A B: x}", "launch.ray.env_vars.A B: expected a name of letters, digits and '_'."),
        ("launch.ray.resources={GPU: -1}", "launch.ray.resources.GPU: expected a number greater than 0, got -1."),
        ("launch.worker=2", "launch.worker: no such key. launch has: type, processes, mesh, ray."),
        ("stages=3", "pipeline.stages: expected a list of one of sft, reward, dpo, ppo, got 3."),
    ],
)  # fmt: skip
def test_the_message_of_an_override(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert str(caught.value).splitlines()[0] == f"command line  {message}"


def test_keys_of_what_is_not_built_are_unknown():
    for key in ("data.workers",):
        with pytest.raises(ConfigError, match="no such key"):
            load_config(None, [f"{key}=1"])


def test_file_and_line_of_every_refusal(tmp_path):
    lines = refused(tmp_path, "# my recipe\ndpo:\n  beta: 0\n  betta: 1\ntrain: {lr: fast,\n  epochs: -1}\n")
    assert sorted(lines) == [
        "3  dpo.beta: expected a number greater than 0, got 0.",
        "4  dpo.betta: no such key. Did you mean dpo.beta?",
        "5  train.lr: expected a number greater than 0 or null, got 'fast'.",
        "6  train.epochs: expected a number greater than 0, got -1.",
    ]


def test_the_line_of_a_list_item_and_of_a_section(tmp_path):
    assert refused(tmp_path, "data:\n  train:\n    - a.jsonl\n    - {path: b, rows: 3}")[0].startswith(
        "4  data.train.1.rows: no such key."
    )
    assert refused(tmp_path, "model:\n  from_scratch:\n    hidden_size: 64")[0].startswith(
        "2  model.from_scratch.num_layers: is needed."
    )
    assert refused(tmp_path, "model: {path: a}\ntrain: 3")[0].startswith("2  train: expected a section {batch_size,")


def test_a_refused_override_in_a_stage_of_a_file(tmp_path):
    lines = refused(tmp_path, "stages:\n  dpo:\n    dpo:\n      beta: 0\n")
    assert lines == ["4  stages.dpo.dpo.beta: expected a number greater than 0, got 0."]


def test_dots_in_a_file_are_explained(tmp_path):
    assert refused(tmp_path, "dpo.beta: 0.1") == ["1  dpo.beta: no such key. In a file, dots are levels: write dpo: {beta: …}."]


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("a: [1", "1  not readable as YAML:"),
        ("run: {seed: 1}\ntrain: {lr: 1}\nrun: {seed: 2}", "3  run: written twice in this section."),
        ("run:\n\tseed: 1", "2  not readable as YAML:"),
        ("run: &a {seed: 1, x: *a}", "1  an alias refers to the mapping or list it stands in."),
        ("run: !!python/object:os.system {}", "1  "),
        ("run: {seed: !!timestamp 2020-01-01}", "1  the tag"),
        ("run: {dir: \0}", ""),
        ("run: {seed: " + "[" * 5000, ""),
        (f"run: {{seed: {'9' * 5000}}}", "1  a number of 5000 digits is too long."),
        ("{[1]: 2}", "1  a key must be a word."),
    ],
)
def test_what_is_no_plain_yaml_is_refused(tmp_path, text, start):
    assert refused(tmp_path, text)[0].startswith(start)


def test_a_list_and_a_wrong_encoding_are_refused(tmp_path):
    assert "expected sections" in refused(tmp_path, "- 1")[0]
    (tmp_path / "latin.yaml").write_bytes("run: {dir: \xe9}".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(tmp_path / "latin.yaml")


def test_yaml_numbers_and_words_mean_what_they_say(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "\ufefftrain: {lr: 1e-5, eps: 1E-8, betas: [.9, 0.95]}\nmodel: {path: no, revision: '1_0'}\nrun: {seed: 010, dir: 1:30}"
    )
    config = load_config(file)
    assert (config.train.lr, config.train.eps, config.train.betas) == (1e-5, 1e-8, (0.9, 0.95))
    assert (config.model.path, config.model.revision, config.run.seed, config.run.dir) == ("no", "1_0", 10, "1:30")


def test_anchors_and_merges_work(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("stages:\n  sft: &fast {train: {lr: 1e-4}}\n  dpo: {<<: *fast, dpo: {beta: 0.5}}")
    config = load_config(file)
    assert config.for_stage("dpo").train.lr == 1e-4 and config.for_stage("dpo").dpo.beta == 0.5
