"""PPO in groups of real processes (gloo): prompts, scores and packs are divided, and the numbers are those of one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from accord.data.template import ConversationEncoder
from accord.models.scratch import train_tokenizer
from tests.conftest import TEXTS, build_tiny
from tests.distributed.group import Job, alone, answers, assert_alike, set_shard
from tests.trainers.runs import demonstrations, trainer

BASE = {
    "train": {"max_tokens": 90, "lr": 1e-3, "batch_size": 3},
    "ppo": {"mini_batches": 2, "ppo_epochs": 2, "samples_per_prompt": 2},
}
NO_CRITIC = {"critic": {"lr": 5.0e-6}}
BEST = {**NO_CRITIC, "ppo": {"clip_reward": 5.0, "kl": {"coef": 0.05}}}


def job(start: Any, run: Any, changes: dict[str, Any]) -> Job:
    from accord.config.root import merge

    return {"do": "ppo", "model": str(start), "run": str(run), "changes": merge(BASE, changes)}


def compare(jobs: list[Job], folder: Any, also: list[Job] | None = None) -> list[list[Any]]:
    """In one group every job with whole models, then every job sharded; what it gives for the jobs in `also`."""
    wanted, both = alone(jobs), [set_shard(job, shard) for shard in ("never", "always") for job in jobs]
    others = []
    for found in answers(2, [*both, *(also or [])], folder):
        for one, other in zip(found, [*wanted, *wanted], strict=False):
            assert_alike(one, other)
        others.append(found[len(both) :])
    return others


def test_two_processes_improve_as_one_does_and_wait_for_each_other(tiny_folder, tmp_path):
    """The last jobs: the first process's answers have one token each, the other's as many as are allowed."""
    model = tiny_folder("llama")
    jobs = [job(model, tmp_path, {}), job(model, tmp_path, {"critic": {"share_trunk": True}, "train": {"ema_decay": 0.9}})]
    uneven = {"do": "uneven_answers", "model": str(model), "run": str(tmp_path), "changes": {}}
    found = compare(jobs, tmp_path / "group", [set_shard(uneven, "never"), set_shard(uneven, "always")])
    assert found[0] == found[1]
    assert all(answer == {"lengths": [1, 40, 1, 40], "finite": True} for answer in found[0])


@pytest.mark.slow
def test_every_objective_and_every_critic_is_divided_alike(tiny_folder, reward_run, other_tokenizer, tmp_path):
    scored = {"ppo": {"rewards": [{"type": "model"}]}, "reward_model": {"path": str(reward_run)}}
    two_sources = {"ppo": {"rewards": [{"type": "model"}, {"type": "length", "min_tokens": 3, "max_tokens": 9, "weight": 0.1}]}}
    ptx = tmp_path / "ptx.jsonl"
    ptx.write_text("".join(json.dumps(row) + "\n" for row in demonstrations(20)))
    which = [
        {**NO_CRITIC, "ppo": {"advantage": "grpo", "kl": {"place": "loss", "estimator": "full"}}},
        {"critic": {"share_trunk": True, "warmup_steps": 1}},
        {"model": {"lora": {"rank": 4}}},  # the critic is an adapter too, the reference the base
        {**BEST, "ppo": {**BEST["ppo"], "objective": "dpo"}},
        {**BEST, "ppo": {**BEST["ppo"], "objective": "sft"}},
        {"engine": {"enabled": False}},
        {**scored, **two_sources},
        {**scored, "model": {"lora": {"rank": 4}}},
        {"ppo": {"ptx_coef": 0.5, "ptx_data": str(ptx)}},
        {"critic": {"path": str(other_tokenizer)}},  # stays whole
    ]
    compare([job(tiny_folder("llama"), tmp_path, changes) for changes in which], tmp_path / "group")


@pytest.mark.slow
def test_a_step_is_the_same_however_answers_are_sampled(tiny_folder, tmp_path):
    ways = [
        {"pin_parameters": False, "tp_gather_partition_size": 1},
        {"inference_tp_size": 2},
        {"inference_tp_size": 2, "release_inference_cache": True},
    ]
    plain = job(tiny_folder("llama"), tmp_path, {})
    wanted = alone([plain])[0]
    jobs = [set_shard({**plain, "changes": {**plain["changes"], "engine": way}}, "always") for way in ways]
    for found in answers(2, jobs, tmp_path / "group"):
        for one in found:
            assert_alike(one, wanted)


@pytest.fixture(scope="module")
def reward_run(tiny_folder, tmp_path_factory) -> Any:
    run = tmp_path_factory.mktemp("reward") / "run"
    with trainer("reward", tiny_folder("llama"), run, {"train": {"max_steps": 2}}) as t:
        t.train()
    return run


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory) -> Any:
    """A model that reads other tokens, and writes conversations in another template."""
    folder = tmp_path_factory.mktemp("other")
    tokenizer = train_tokenizer(TEXTS[:2], 300)
    ConversationEncoder(tokenizer, "human-assistant")
    build_tiny("gpt2", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
