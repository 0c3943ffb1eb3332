"""Each impossible combination is refused with a cure; the nearest possible one is not."""

from __future__ import annotations

import re

import pytest

from accord.config import Config, ConfigError

GRPO = {"advantage": "grpo", "samples_per_prompt": 4}
SCRATCH = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 512}

REMOTE = {"type": "remote", "url": "http://127.0.0.1:8000/score"}
JUDGE = {"type": "judge", "base_url": "http://127.0.0.1:8000/v1", "model": "m"}


def rewards(source, also=(), **changes):
    return {"ppo": {"rewards": [source | changes, *also]}}


def test_a_secret_is_not_repeated_by_its_refusal():
    for bad in (
        rewards(REMOTE, url="https://me:hush@h/x"),
        rewards(JUDGE, api_key_env="hush-1"),
        rewards(REMOTE, headers_env={"A": "hush 1"}),
    ):
        with pytest.raises(ConfigError) as caught:
            Config(**bad)
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("stage", "bad", "message", "good"),
    [
        (None, {"model": {"path": "a", "from_scratch": SCRATCH}}, "either loaded", {"model": {"from_scratch": SCRATCH}}),
        (None, {"model": {"from_scratch": SCRATCH, "lora": {}}}, "learn nothing", {"model": {"path": "a", "lora": {}}}),
        (None, {"model": {"from_scratch": SCRATCH, "revision": "v"}}, "no revision", {"model": {"path": "a", "revision": "v"}}),
        (None, {"model": {"from_scratch": SCRATCH | {"num_heads": 5}}}, "do not divide", {"model": {"from_scratch": SCRATCH | {"num_heads": 8}}}),
        (None, {"model": {"from_scratch": SCRATCH | {"num_kv_heads": 3}}}, "do not divide", {"model": {"from_scratch": SCRATCH | {"num_kv_heads": 2}}}),
        (None, {"model": {"quantization": "nf4"}}, r"model\.quantization: nf4 is for the frozen base.*Set model\.lora", {"model": {"quantization": "nf4", "lora": {}}}),
        (None, {"model": {"quantization": "nf4", "lora": {}}, "train": {"shard": "always"}}, r"train\.shard: a base in 4 bits", {"model": {"lora": {}}, "train": {"shard": "always"}}),
        (None, {"model": {"quantization": "int4", "lora": {}}}, "nf4", {"model": {"quantization": None}}),
        (None, {"train": {"max_tokens": 1000}}, "Raise train.max_tokens to 1024 or lower data.max_length to 1000", {"train": {"max_tokens": 1024}}),
        ("ppo", {"train": {"max_tokens": 1200}}, "Raise train.max_tokens to 1280", {"train": {"max_tokens": 1280}}),
        (None, {"generate": {"min_new_tokens": 300}}, "more than generate.max_new_tokens 256", {"generate": {"min_new_tokens": 256}}),
        ("ppo", {"generate": {"temperature": 0}}, "learns from samples", {"generate": {"temperature": 0.7}}),
        (None, {"ppo": {"kl": {"place": "loss"}}}, "Use ppo.kl.estimator=k3", {"ppo": {"kl": {"place": "loss", "estimator": "k2"}}}),
        (None, {"ppo": {"kl": {"controller": "adaptive", "coef": 0}}}, "0 stays 0", {"ppo": {"kl": {"coef": 0}}}),
        (None, {"dpo": {"loss_type": "ipo", "label_smoothing": 0.1}}, "no label smoothing", {"dpo": {"label_smoothing": 0.1}}),
        (None, {"dpo": {"loss_type": "hinge", "label_smoothing": 0.1}}, "the hinge loss has no label smoothing", {"dpo": {"loss_type": "robust", "label_smoothing": 0.1}}),
        (None, {"dpo": {"loss_type": "simpo", "label_smoothing": 0.1}}, "the simpo loss has no label smoothing", {"dpo": {"loss_type": "simpo"}}),
        (None, {"dpo": {"loss_type": "robust"}}, "at 0 robust is the sigmoid loss", {"dpo": {"loss_type": "robust", "label_smoothing": 0.1}}),
        (None, {"dpo": {"simpo_gamma": 0.5}}, "Leave it out, or use dpo.loss_type=simpo", {"dpo": {"loss_type": "simpo", "simpo_gamma": 0.5, "beta": 2}}),
        (None, {"dpo": {"loss_type": "simpo", "orpo_lambda": 0.5}}, "Leave it out, or use dpo.loss_type=orpo", {"dpo": {"loss_type": "orpo", "orpo_lambda": 0.5}}),
        (None, {"dpo": {"loss_type": "orpo", "beta": 0.5}}, "dpo.orpo_lambda weighs", {"dpo": {"loss_type": "orpo", "beta": 0.1}}),
        (None, {"dpo": {"rpo_alpha": 0}}, "expected a number greater than 0 or null", {"dpo": {"loss_type": "simpo", "rpo_alpha": 0.5}}),
        ("dpo", {"dpo": {"loss_type": "simpo"}, "reference": {"precompute": True}}, "Leave it out, or use dpo.loss_type=sigmoid", {"reference": {"precompute": True}}),
        ("dpo", {"dpo": {"loss_type": "simpo"}, "model": {"path": "a"}, "reference": {"path": "b"}}, "needs no reference", {"dpo": {"loss_type": "hinge"}, "model": {"path": "a"}, "reference": {"path": "b"}}),
        ("dpo", {"dpo": {"loss_type": "orpo"}, "reference": {"dtype": "bfloat16"}}, "stages.ppo.reference.dtype", {"dpo": {"loss_type": "orpo"}, "stages": {"ppo": {"reference": {"dtype": "bfloat16"}}}}),
        ("dpo", {"dpo": {"loss_type": "orpo"}, "reference": {"path": "b"}, "model": {"path": "a"}}, "reference.path: does nothing", {"dpo": {"loss_type": "orpo"}, "model": {"path": "a", "dtype": "bfloat16"}}),
        (None, {"dpo": {"label_smoothing": 0.5}}, "less than 0.5", {"dpo": {"label_smoothing": 0.49}}),
        (None, {"reward": {"loss_type": "mse", "center_coefficient": 0.1}}, "acts on pairs", {"reward": {"center_coefficient": 0.1}}),
        (None, {"train": {"batch_size": 2}, "ppo": {"mini_batches": 3}}, "can't be divided", {"train": {"batch_size": 2}, "ppo": {"mini_batches": 4, "samples_per_prompt": 2}}),
        (None, {"ppo": {"kl": {"controller": "adaptive", "target": 30}}}, "Raise it to 60", {"ppo": {"kl": {"controller": "adaptive", "target": 30}, "alarms": {"kl": 60}}}),
        ("ppo", {"eval": {"best_metric": "ppo/judge"}}, "Set ppo.judge", {"eval": {"best_metric": "ppo/judge"}, "ppo": {"judge": "my:judge"}}),
        (None, {"ppo": {"alarms": {"judge": 2}}}, "nothing without a judge", {"ppo": {"alarms": {"judge": 2}, "judge": "my:judge"}}),
        (None, {"ppo": {"alarms": {"lr_floor": 0.5}}}, "nothing with ppo.on_alarm=warn", {"ppo": {"alarms": {"lr_floor": 0.5}, "on_alarm": "lower_lr"}}),
        (None, {"ppo": {"alarms": {"kl_growth": None, "kl_growth_window": 5}}}, "nothing with ppo.alarms.kl_growth=null", {"ppo": {"alarms": {"kl_growth_window": 5}}}),
        (None, {"ppo": {"alarms": {"entropy": 1}}}, "less than 1", {"ppo": {"alarms": {"entropy": 0.5}}}),
        (None, {"train": {"batch_size": 2}, "ppo": {"mini_batches": 9, "generation_batches": 4}}, "can't be divided", {"train": {"batch_size": 2}, "ppo": {"mini_batches": 8, "generation_batches": 4}}),
        (None, {"ppo": {"advantage": "grpo"}}, "samples_per_prompt: grpo compares.*ppo.advantage=reinforce_pp", {"ppo": {"advantage": "grpo", "samples_per_prompt": 2}}),
        ("ppo", {"ppo": {"advantage": "rloo"}}, "samples_per_prompt: rloo compares", {"ppo": {"advantage": "reinforce_pp"}}),
        (None, {"ppo": {**GRPO, "lam": 1.0}}, "lam: does nothing with ppo.advantage=grpo, which has no critic", {"ppo": {"lam": 1.0}}),
        (None, {"ppo": {**GRPO, "value_clip": None}}, "value_clip: does nothing", {"ppo": {"value_clip": None}}),
        (None, {"ppo": {**GRPO, "value_coef": 0.5}}, r"value_coef: does nothing.*default is 1\.0", {"ppo": {"value_coef": 0.5}}),
        (None, {"ppo": GRPO, "critic": {"lr": 1e-4}}, "critic.lr: does nothing", {"critic": {"lr": 1e-4}}),
        (None, {"ppo": GRPO, "critic": {"warmup_steps": 1}}, "critic.warmup_steps: does nothing", {"critic": {"warmup_steps": 1}}),
        (None, {"ppo": GRPO, "critic": {"path": "c"}}, "critic.path: does nothing", {"ppo": GRPO, "reward_model": {"path": "c"}}),
        (None, {"ppo": {**GRPO, "gamma": 0.9}}, "gamma: does nothing.*sums of the answers' rewards", {"ppo": {"advantage": "reinforce_pp", "gamma": 0.9}}),
        (None, {"ppo": {**GRPO, "whiten_rewards": True}}, "depend on an answer's length", {"ppo": {"advantage": "reinforce_pp", "whiten_rewards": True}}),
        (None, {"ppo": {"advantage": "rloo", "samples_per_prompt": 2, "group_std": False}}, "group_std: does nothing", {"ppo": {**GRPO, "group_std": False}}),
        (None, {"ppo": {"is_clip": 3.0}}, "is_clip: does nothing with ppo.old_logprobs=recompute", {"ppo": {"is_clip": 3.0, "old_logprobs": "sampler"}}),
        (None, {"ppo": {"kl": {"target": 3.0}}}, "target: does nothing with ppo.kl.controller=fixed", {"ppo": {"kl": {"target": 3.0, "controller": "adaptive"}}}),
        (None, {"ppo": {"dual_clip": 1}}, "expected a number greater than 1 or null", {"ppo": {"dual_clip": 3}}),
        # what a stage's override completes is judged with it
        ("ppo", {"ppo": {"advantage": "grpo"}, "stages": {"ppo": {"critic": {"lr": 1}}}}, "critic.lr", {"ppo": {"advantage": "grpo"}, "stages": {"ppo": {"ppo": {"samples_per_prompt": 4}}}}),
        (None, rewards(REMOTE, name="a", also=[{"type": "model", "name": "a"}]), r"rewards.1.name: source 0 is called a too", rewards(REMOTE, name="a", also=[{"type": "model", "name": "b"}])),
        (None, rewards(REMOTE, weight=0), "nothing to learn", rewards(REMOTE, weight=0, also=[{"type": "model"}])),
        (None, rewards(REMOTE, url="localhost:80/x"), "begins with http://", rewards(REMOTE, url="https://[::1]:80/x?mode=fast")),
        (None, rewards(REMOTE, url="http://h:port/x"), "begins with http://", rewards(REMOTE, url="http://h/x")),
        (None, rewards(REMOTE, url="https://me:hush@h/x"), "holds a secret", rewards(REMOTE, headers_env={"Authorization": "TOKEN"})),
        (None, rewards(REMOTE, url="https://h/x?api_key=hush"), "holds a secret", rewards(REMOTE, url="https://h/x?top=1")),
        (None, rewards(JUDGE, base_url="http://h/v1/chat/completions"), "without /chat/completions", rewards(JUDGE, api_key_env="KEY")),
        (None, rewards(JUDGE, scale=[5, 5]), r"lowest score, then the highest one, got \[5, 5\]", rewards(JUDGE, scale=[-1, 1])),
        (None, rewards({"type": "classifier", "path": "a"}, input="pair", template="{response}"), "does nothing with input: pair", rewards({"type": "classifier", "path": "a"}, template="{response}")),
        (None, rewards({"type": "length"}), "what length is wanted", rewards({"type": "length"}, min_tokens=3)),
        (None, rewards({"type": "length"}, min_tokens=3, max_tokens=2), "3 is more than max_tokens 2", rewards({"type": "length"}, min_tokens=3, max_tokens=3)),
        (None, rewards({"type": "format"}), "either a pattern or valid: json", rewards({"type": "format"}, valid="json")),
        (None, rewards({"type": "format"}, valid="json", pattern="a"), "either a pattern", rewards({"type": "format"}, pattern="a", match="search")),
        (None, rewards({"type": "format"}, valid="json", match="search"), "does nothing with valid: json", rewards({"type": "format"}, pattern="(?s).*")),
        (None, rewards({"type": "format"}, pattern="(a"), "no regular expression", rewards({"type": "format"}, pattern="(a)", fallback=0)),
        (None, {"ppo": {"ptx_coef": 1}}, "no PTX data", {"ppo": {"ptx_coef": 1, "ptx_data": "a.jsonl"}}),
        (None, {"ppo": {"ptx_data": "a.jsonl"}}, "weighs nothing", {"ppo": {"ptx_coef": 1, "ptx_data": ["a.jsonl"]}}),
        (None, {"eval": {"best_metric": "accuracy"}}, "no metric of a stage", {"eval": {"best_metric": "dpo/loss"}}),
        ("sft", {"eval": {"best_metric": "dpo/loss"}}, "stages.dpo.eval.best_metric=dpo/loss", {"eval": {"best_metric": "sft/loss"}}),
        (None, {"pipeline": {"stages": ["sft", "sft"]}}, "names one twice", {"pipeline": {"stages": ["sft"]}}),
        (None, {"pipeline": {"stages": ["ppo", "reward"]}}, "the order is", {"pipeline": {"stages": ["sft", "reward", "ppo", "dpo"]}}),
        (None, {"pipeline": {"judge": "a:b"}}, "go together", {"pipeline": {"judge": "a:b", "judge_prompts": "demo:heldout"}}),
        (None, {"stages": {"sft": {"run": {"dir": "x"}}}}, "belongs to the whole run", {"stages": {"sft": {"run": {"seed": 2}}}}),
        (None, {"stages": {"sft": {"pipeline": {}}}}, "belongs to the whole run", {"stages": {"sft": {"data": {"train": "x"}}}}),
        (None, {"stages": {"sft": {"launch": {"processes": 2}}}}, "belongs to the whole run", {"launch": {"processes": 2}}),
        (None, {"launch": {"type": "ray", "processes": 2}}, "set launch.ray.workers", {"launch": {"type": "ray", "ray": {"workers": 2}}}),
        (None, {"launch": {"processes": 4, "mesh": {"data": 2}}}, "launch.processes is 4. Leave it at auto", {"launch": {"processes": 4, "mesh": {"data": 4}}}),
        (None, {"launch": {"processes": 4, "mesh": {"data": 4, "tensor": 2}}}, "4 × tensor 2 are 8 processes", {"launch": {"processes": 4, "mesh": {"data": 2, "tensor": 2}}}),
        (None, {"train": {"shard": "never"}, "launch": {"mesh": {"tensor": 2}}}, "weights are divided", {"train": {"shard": "always"}, "launch": {"mesh": {"tensor": 2}}}),
        (None, {"model": {"lora": {"share_base": True}}, "launch": {"mesh": {"tensor": 2}}}, "several adapters on it is not divided", {"model": {"lora": {}}, "launch": {"mesh": {"tensor": 2}}}),
        (None, {"model": {"lora": {}, "quantization": "nf4"}, "launch": {"mesh": {"tensor": 2}}}, "launch.mesh.tensor: 2: a base in 4 bits", {"model": {"lora": {}}, "launch": {"mesh": {"tensor": 2}}}),
        (None, {"engine": {"inference_tp_size": 4}, "launch": {"mesh": {"tensor": 2}}}, "divided in the same way", {"engine": {"inference_tp_size": 2, "tp_gather_partition_size": 2}, "launch": {"mesh": {"tensor": 2}}}),
        (None, {"engine": {"pin_parameters": False}, "launch": {"mesh": {"tensor": 2}}}, "its part of the layers", {"engine": {"tp_gather_partition_size": 2}, "launch": {"mesh": {"tensor": 2}}}),
        (None, {"launch": {"mesh": {"tensor": 2}}, "model": {"quantization": "nf4", "lora": {}}}, "in 4 bits is not divided", {"model": {"quantization": "nf4", "lora": {}}}),
        (None, {"launch": {"type": "ray", "ray": {"workers": 3}, "mesh": {"data": 2}}}, "launch.ray.workers is 3", {"launch": {"type": "ray", "mesh": {"data": 2}}}),
        (None, {"launch": {"processes": 2}, "data": {"train": "-"}}, "can't be read by several processes", {"launch": {"processes": 1}, "data": {"train": "-"}}),
    ],
)  # fmt: skip
def test_a_rule_refuses_and_lets_pass(stage, bad, message, good):
    def make(values):
        config = Config(**values)
        return config.for_stage(stage) if stage else config

    with pytest.raises(ConfigError, match=message):
        make(bad)
    make(good)


def test_4_bits_need_their_package(monkeypatch):
    monkeypatch.setattr("accord.config.rules.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model\.quantization: nf4 needs the package bitsandbytes.*accord\[quantization\]"):
        Config(model={"quantization": "nf4", "lora": {}})


@pytest.mark.parametrize(
    ("key", "bad", "good", "limit"),
    [
        (("ppo", "clip"), 1e39, 3.4e38, "3.40282e+38"),
        (("train", "lr"), 1e300, 1e38, "3.40282e+38"),
        (("run", "seed"), 2**63, 2**63 - 1, "9,223,372,036,854,775,807"),
        (("train", "max_steps"), 10**400, 10**9, "9,223,372,036,854,775,807"),
    ],
)
def test_a_number_that_no_tensor_holds_is_refused(key, bad, good, limit):
    def config(value):
        for part in reversed(key):
            value = {part: value}
        return Config(**value)

    config(good)
    with pytest.raises(ConfigError, match=f"{'.'.join(key)}: .*too large.* go up to {re.escape(limit)}"):
        config(bad)


def test_an_experience_is_small_enough_to_be_held():
    train = {"batch_size": 100}
    Config(train=train, ppo={"samples_per_prompt": 10_000})
    with pytest.raises(ConfigError, match=r"ppo.samples_per_prompt: one experience would be 1,000,100 responses"):
        Config(train=train, ppo={"samples_per_prompt": 10_001})
    with pytest.raises(ConfigError, match=r"ppo.generation_batches: .*at most 1,000,000"):
        Config(train=train, ppo={"generation_batches": 10_001})


def test_every_rule_is_a_sentence():
    from accord.config.rules import RULES

    assert all("_" in rule.__name__ for rule in RULES) and len(RULES) >= 14


def test_every_rule_of_ppo_is_obeyed():
    from accord.config import ppo_rules, rules

    written = {f for f in vars(ppo_rules).values() if getattr(f, "__module__", "") == ppo_rules.__name__}
    assert written - {ppo_rules.is_settled, ppo_rules.set_in_vain} == set(ppo_rules.PPO_RULES) <= set(rules.RULES)
