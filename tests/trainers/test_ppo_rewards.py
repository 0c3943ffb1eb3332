"""PPO with several sources of scores at once, from the configuration to the metrics."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from accord.config import ConfigError
from accord.pipeline import _check_functions
from accord.trainers.ppo import PPOTrainer
from accord.trainers.ppo_rewards import source_names
from tests.rewards.services import serving
from tests.rewards.tiny_bert import save_tiny_bert
from tests.trainers.ppo_setup import PROMPTS, SCORES, function, settings, trainer


def judged(request):
    return {"choices": [{"message": {"content": f"Well.\nScore: {len(request['messages'][0]['content']) % 6}"}}]}


def test_a_run_with_many_sources_logs_each_and_their_weighted_sum(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("SERVICE_TOKEN", "Bearer hush-hush")
    people = tmp_path / "people.jsonl"
    people.write_text(json.dumps({"prompt": "Why?", "response": "Because.", "score": 1}))

    def answer(request, number):
        if "messages" in request:
            return 200, judged(request)
        return 200, {"scores": [len(row["response"]) / 10 for row in request["samples"]]}

    with serving(answer) as service:
        rewards = [
            function("letters", weight=0.5),
            function("later") | {"name": "async"},
            function("each_token", weight=0.25, per_token=True),
            {"type": "remote", "url": f"{service.url}/score", "headers_env": {"Authorization": "SERVICE_TOKEN"}, "batch_size": 3},
            {"type": "judge", "base_url": service.url, "model": "m", "weight": 0.2},
            {"type": "classifier", "path": str(save_tiny_bert(tmp_path / "bert")), "label": "good", "weight": 0.1},
            {"type": "length", "max_tokens": 4},
            {"type": "repetition", "weight": 2},
            {"type": "format", "pattern": "(?s).*e.*"},
            {"type": "format", "valid": "json"},
            {"type": "human", "path": str(people), "fallback": 0.5},
        ]
        changes = {"train": {"max_steps": 2}, "ppo": {"rewards": rewards, "samples_per_prompt": 2}}
        with PPOTrainer(settings(tiny_folder("llama"), tmp_path / "run", changes), train_dataset=PROMPTS) as ppo:
            ppo.train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["split"] == "train"]
    names = [
        "letters",
        "async",
        "each_token",
        "remote",
        "judge",
        "classifier",
        "length",
        "repetition",
        "format",
        "format-2",
        "human",
    ]
    weights = [source.get("weight", 1.0) for source in rewards]
    assert len(rows) == 2
    for row in rows:
        assert [name.removeprefix("ppo/score/") for name in row if name.startswith("ppo/score/")] == names
        assert row["ppo/score"] == pytest.approx(
            sum(w * row[f"ppo/score/{name}"] for w, name in zip(weights, names, strict=True))
        )
        assert row["ppo/reward_fallbacks"] == 8 and row["ppo/score/human"] == 0.5
        assert np.isfinite(row["ppo/policy_loss"])
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file() and file.suffix in (".yaml", ".json", ".jsonl"):
            assert "hush" not in file.read_text(), file
    assert "SERVICE_TOKEN" in (tmp_path / "run" / "config.yaml").read_text()


def test_per_token_rewards_go_to_their_tokens_and_scores_to_the_last_one(tiny_folder, tmp_path):
    """R_t = Σ_source weight · r_t for every t, and R_T += s; without a KL penalty nothing else."""
    rewards = [function("each_token", weight=0.25, per_token=True), function("length", weight=2)]
    ppo = trainer(tiny_folder("llama"), tmp_path / "run", {"ppo": {"rewards": rewards, "kl": {"coef": 0.0}, "clip_reward": None}})
    experience = ppo.make_experience([ppo.examples.train[i] for i in range(4)])
    expected = []
    for drawn in experience.rollouts.samples:
        own = [0.25 * (t + 1) for t in range(len(drawn.response_ids))]
        own[-1] += 2 * len(drawn.response)
        expected += own
    assert torch.allclose(experience.rewards.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5)
    n = np.array(experience.rollouts.lengths)
    assert experience.metrics["ppo/score/each_token"] == pytest.approx(float((n * (n + 1) / 2).mean()))


def test_tokens_given_to_a_function_are_those_of_the_response(tiny_folder, tmp_path):
    ppo = trainer(tiny_folder("llama"), tmp_path / "run", {"ppo": {"rewards": [function("remember", per_token=True)]}})
    experience = ppo.make_experience([ppo.examples.train[i] for i in range(4)])
    from tests.trainers import ppo_scores

    tokenizer = ppo.policy.tokenizer
    for drawn in experience.rollouts.samples:
        tokens = ppo_scores.SEEN[drawn.response]
        assert len(tokens) == len(drawn.response_ids) and "".join(tokens) == tokenizer.decode(drawn.response_ids)


def test_names_are_unique_and_given_ones_win(tiny_folder, tmp_path):
    path = f"{SCORES}:length"
    rewards = [
        {"type": "function", "path": path}, {"type": "length", "max_tokens": 3}, {"type": "model", "name": "length-2"},
        {"type": "model"}, {"type": "model"}, {"type": "function", "path": path, "name": "model-2"},
    ]  # fmt: skip
    config = settings(tiny_folder("llama"), tmp_path / "run", {"ppo": {"rewards": rewards}})
    assert source_names(config.ppo.rewards) == ["length", "length-3", "length-2", "model", "model-3", "model-2"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (function("nothing_here"), "ppo.rewards.0.path: .* has no function 'nothing_here'"),
        (function("length", concurrency=3), "ppo.rewards.0.path: .* is no async function"),
        ({"type": "human", "path": "nowhere.jsonl"}, "ppo.rewards.0.path: nowhere.jsonl cannot be read"),
        ({"type": "judge", "base_url": "http://h", "model": "m", "api_key_env": "NOT_SET_AT_ALL"}, "ppo.rewards.0.api_key_env: .* is not set"),
        ({"type": "judge", "base_url": "http://h", "model": "m", "template": "nowhere.txt"}, r"ppo.rewards.0.template: 'nowhere.txt'"),
        ({"type": "remote", "url": "http://h", "headers_env": {"A": "NOT_SET_AT_ALL"}}, "ppo.rewards.0.headers_env: .* is not set"),
    ],
)  # fmt: skip
def test_what_a_source_lacks_is_told_before_a_pipeline_begins(tiny_folder, tmp_path, source, message):
    config = settings(tiny_folder("llama"), tmp_path / "run", {"ppo": {"rewards": [source]}})
    with pytest.raises(ConfigError, match=message):
        _check_functions(config, ["sft", "ppo"])
    _check_functions(config, ["sft"])
