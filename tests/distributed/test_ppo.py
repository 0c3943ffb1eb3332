"""PPO in groups of real processes (gloo): prompts, scores and packs are divided, and the numbers are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.group import Job, alone, answers, assert_alike

BASE = {
    "train": {"max_tokens": 90, "lr": 1e-3, "batch_size": 3},
    "ppo": {"mini_batches": 2, "ppo_epochs": 2, "samples_per_prompt": 2},
}
NO_CRITIC = {"critic": {"lr": 5.0e-6}}
BEST = {**NO_CRITIC, "ppo": {"clip_reward": 5.0, "kl": {"coef": 0.05}}}


def job(model: Any, run: Any, shard: str, changes: dict[str, Any]) -> Job:
    from accord.config.root import merge

    changes = merge(merge(BASE, changes), {"train": {"shard": shard}})
    return {"do": "ppo", "model": str(model), "run": str(run), "changes": changes}


def variants(model: Any, run: Any, shard: str, which: list[dict[str, Any]]) -> list[Job]:
    return [job(model, run, shard, changes) for changes in which]


def compared(model: Any, folder: Any, shard: str, which: list[dict[str, Any]]) -> None:
    wanted = alone(variants(model, folder, "never", which))
    for found in answers(2, variants(model, folder, shard, which), folder / "group"):
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other)


@pytest.mark.parametrize("shard", ["never", "always"])
def test_two_processes_improve_as_one_does(shard, tiny_folder, tmp_path):
    compared(tiny_folder("llama"), tmp_path, shard, [{}, {"critic": {"share_trunk": True}, "train": {"ema_decay": 0.9}}])


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["never", "always"])
def test_every_objective_and_every_critic_is_divided_alike(shard, tiny_folder, reward_run, tmp_path):
    which = [
        {**NO_CRITIC, "ppo": {"advantage": "grpo", "kl": {"place": "loss", "estimator": "full"}}},
        {"critic": {"share_trunk": True, "warmup_steps": 1}},
        {"model": {"lora": {"rank": 4}}},  # the critic is an adapter too, the reference the base
        {**BEST, "ppo": {**BEST["ppo"], "objective": "dpo"}},
        {**BEST, "ppo": {**BEST["ppo"], "objective": "sft"}},
        {"engine": {"enabled": False}},
        {"ppo": {"rewards": [{"type": "model"}, {"type": "length", "min_tokens": 3, "weight": 0.1}]}, "reward_model": {"path": str(reward_run)}},
        {"model": {"lora": {"rank": 4}}, "ppo": {"rewards": [{"type": "model"}]}, "reward_model": {"path": str(reward_run)}},
    ]  # fmt: skip
    compared(tiny_folder("llama"), tmp_path, shard, which)


@pytest.fixture(scope="module")
def reward_run(tiny_folder, tmp_path_factory) -> Any:
    from tests.trainers.runs import trainer

    run = tmp_path_factory.mktemp("reward") / "run"
    with trainer("reward", tiny_folder("llama"), run, {"train": {"max_steps": 2}}) as t:
        t.train()
    return run


@pytest.mark.parametrize("shard", ["never", "always"])
def test_a_process_whose_answers_end_early_waits_for_the_others(shard, tiny_folder, tmp_path):
    """The first process's answers have one token each, the other's as many as are allowed."""
    found = answers(
        2,
        [{"do": "uneven_answers", "model": str(tiny_folder("llama")), "run": str(tmp_path), "shard": shard}],
        tmp_path / "group",
    )
    assert found[0] == found[1]
    assert found[0][0]["lengths"] == [1, 40, 1, 40] and found[0][0]["finite"]
