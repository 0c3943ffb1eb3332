"""SFT, reward model and DPO in groups of real processes (gloo): the numbers of one process, with whole and with sharded models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.group import Job, alone, answers, assert_alike

# Fewer tokens at once than a batch has: several packs a process, and a last turn that not all have.
TRAIN = {"batch_size": 4, "max_tokens": 66, "lr": 1e-3, "ema_decay": 0.9}
LORA = {"model": {"lora": {"rank": 4}}}


def job(kind: str, model: Any, run: Any, steps: int = 4, valid: int = 3, **changes: Any) -> Job:
    """On 7 rows in batches of 4: the last batch of an epoch has 3."""
    changes = {"data": {"max_length": 60}, **changes, "train": {**TRAIN, **changes.get("train", {})}}
    return {
        "do": "offline",
        "kind": kind,
        "model": str(model),
        "run": str(run),
        "changes": changes,
        "steps": steps,
        "valid": valid,
    }


def compared(jobs: list[Job], wanted: list[Any], world: int, shard: str, folder: Any) -> None:
    sharded = [{**job, "changes": {**job["changes"], "train": {**job["changes"]["train"], "shard": shard}}} for job in jobs]
    for found in answers(world, sharded, folder):
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other)


@pytest.fixture(scope="module")
def three(tiny_folder, tmp_path_factory) -> tuple[list[Job], list[Any]]:
    run = tmp_path_factory.mktemp("alone")
    jobs = [job(kind, tiny_folder("llama"), run, valid=valid) for valid, kind in enumerate(("sft", "reward", "dpo"), 1)]
    return jobs, alone(jobs)


@pytest.mark.parametrize("shard", ["never", "always"])
def test_two_processes_learn_what_one_learns(shard, three, tmp_path):
    compared(*three, 2, shard, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["never", "always"])
def test_four_processes_learn_what_one_learns(shard, three, tmp_path):
    compared(*three, 4, shard, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["never", "always"])
def test_every_loss_and_every_kind_of_model_is_divided_alike(shard, tiny_folder, tmp_path):
    llama, gpt2, gemma = tiny_folder("llama"), tiny_folder("gpt2"), tiny_folder("gemma2")
    jobs = [
        job("sft", tiny_folder("llama", tie_word_embeddings=True), tmp_path),
        job("sft", tiny_folder("qwen3_moe"), tmp_path),
        job("sft", gemma, tmp_path, valid=1),  # logits of its own making
        job("dpo", tiny_folder("bloom"), tmp_path),  # padded batches
        job("reward", gpt2, tmp_path, valid=1, **LORA),
        job("dpo", llama, tmp_path, valid=2, **LORA),
        job("dpo", llama, tmp_path, reference={"precompute": True}),
        job("sft", llama, tmp_path, model={"gradient_checkpointing": True}),
        job("dpo-kto", llama, tmp_path, valid=2),
        job("dpo-simpo", llama, tmp_path, valid=1),
        job("reward-ranking", llama, tmp_path, valid=2, train={"max_tokens": 80}),
        job("reward-token_pairwise", llama, tmp_path),
        job("reward-mse", llama, tmp_path, valid=1),
    ]
    compared(jobs, alone(jobs), 2, shard, tmp_path / "group")
