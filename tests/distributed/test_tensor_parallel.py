"""Products divided over processes (`launch.mesh.tensor`): what is learnt, saved and sampled is what one process learns, saves and samples."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from accord.errors import ConfigError
from accord.models.tensor_parallel import divide_products
from tests.conftest import FAMILIES, build_tiny
from tests.distributed import test_offline, test_ppo, test_runs
from tests.distributed.group import Job, alone, answers, assert_alike
from tests.distributed.test_ppo import other_tokenizer, reward_run  # noqa: F401  (fixtures)

LORA = {"model": {"lora": {"rank": 4}}}


def divided(job: Job, tensor: int = 2) -> Job:
    return {**job, "changes": {**job["changes"], "launch": {"mesh": {"tensor": tensor}}}}


def compare(jobs: list[Job], world: int, folder: Any, tensor: int = 2) -> None:
    wanted = alone(jobs)
    for found in answers(world, [divided(job, tensor) for job in jobs], folder):
        for one, other in zip(found, wanted, strict=True):
            assert_alike(one, other)


def test_two_processes_that_divide_products_learn_what_one_learns(tiny_folder, tmp_path):
    model = tiny_folder("llama")
    jobs = [test_offline.job(kind, model, tmp_path, valid=valid) for valid, kind in enumerate(("sft", "reward", "dpo"), 1)]
    compare(jobs, 2, tmp_path / "group")


@pytest.mark.slow
def test_four_processes_of_which_two_divide_products(tiny_folder, tmp_path):
    """Packs are divided over two pairs: with 1, 2 and 3 held-out rows."""
    model = tiny_folder("llama")
    jobs = [test_offline.job(kind, model, tmp_path, valid=valid) for valid, kind in enumerate(("sft", "reward", "dpo"), 1)]
    compare(jobs, 4, tmp_path / "group")


@pytest.mark.slow
def test_four_processes_hold_a_quarter_of_each_matrix_and_half_of_what_stays_whole(tiny_folder, tmp_path):
    model = tiny_folder("llama")
    job = {
        "do": "held",
        "model": str(model),
        "run": str(tmp_path / "run"),
        "changes": test_offline.job("sft", model, "")["changes"],
    }
    recomputed = {**job, "changes": {**job["changes"], "model": {"gradient_checkpointing": True}}}
    jobs = [divided(job), *(divided({**each, "do": "sums"}) for each in (job, recomputed))]
    for shares, once, twice in answers(4, jobs, tmp_path / "group"):
        for name, share in shares.items():
            assert share == (0.25 if "_proj" in name else 0.5), name
        # where attention and MLP end, and of the gradients where they begin; computed again, once more where attention ends
        assert once["sums"] == 4 * once["layers"] * once["packs"] // 2
        assert twice["sums"] == 5 * twice["layers"] * twice["packs"] // 2


@pytest.mark.slow
def test_every_kind_of_model_that_says_how_it_is_divided(tiny_folder, tmp_path):
    llama = tiny_folder("llama")
    jobs = [
        *(test_offline.job("sft", tiny_folder(family), tmp_path, valid=1) for family in ("qwen2", "qwen3", "gemma2", "gpt_neox")),
        test_offline.job("sft", tiny_folder("llama", tie_word_embeddings=True), tmp_path),
        test_offline.job("sft", llama, tmp_path, model={"gradient_checkpointing": True}),
        test_offline.job("dpo", tiny_folder("qwen3"), tmp_path, **LORA),
        test_offline.job("reward", llama, tmp_path, valid=1, **LORA),
        test_offline.job("dpo", llama, tmp_path, reference={"precompute": True}),
    ]
    compare(jobs, 2, tmp_path / "group")


@pytest.mark.slow
def test_noise_on_the_embeddings_and_dropout_are_those_of_one_process(tiny_folder, tmp_path):
    """Whole runs, which seed the noise of every step. The embedding learns from what it gave before noise came to it."""
    ways = [
        {"sft": {"neftune_alpha": 5.0}},
        {"model": {"lora": {"rank": 4, "dropout": 0.3, "target_modules": ["q_proj", "up_proj"]}}},
    ]
    one, two = (
        [test_runs.job("sft", tiny_folder("llama"), tmp_path / f"{name}-{way}") for way in range(len(ways))]
        for name in ("one", "two")
    )
    for job in (one, two):
        for each, changes in zip(job, ways, strict=True):
            each["changes"] |= changes
    alone(one)
    answers(
        2,
        [divided({**job, "changes": {**job["changes"], "train": {**job["changes"]["train"], "shard": "auto"}}}) for job in two],
        tmp_path / "group",
    )
    for a, b in zip(two, one, strict=True):
        test_runs.assert_same_run(a["run"], b["run"], "sft")


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("gpt2", {}, "does not say how it is divided"),
        ("olmo2", {}, "divided in a way that is not built"),
        ("phi", {"qk_layernorm": True}, "does not say how layers.0.self_attn.q_layernorm.weight is divided"),
        ("apertus", {}, "does not say how layers.0.mlp.act_fn.alpha_p is divided"),
        ("llama", {"num_key_value_heads": 1}, "1 key-value heads, which 2 processes can't share evenly"),
    ],
)
def test_a_model_that_can_not_be_divided_is_refused_before_anything_is_cut(family, changes, what, monkeypatch):
    monkeypatch.setitem(FAMILIES, family, FAMILIES.get(family, FAMILIES["qwen2"]))
    with pytest.raises(ConfigError, match=what):
        divide_products(build_tiny(family, **changes), SimpleNamespace(size=lambda: 2))


def test_improving_is_the_same_where_products_are_divided(tiny_folder, tmp_path):
    model = tiny_folder("llama")
    compare(
        [test_ppo.job(model, tmp_path, {}), test_ppo.job(model, tmp_path, {"critic": {"share_trunk": True}})],
        2,
        tmp_path / "group",
    )


@pytest.mark.slow
def test_every_kind_of_improving_where_products_are_divided(tiny_folder, reward_run, other_tokenizer, tmp_path):  # noqa: F811
    scored = {"ppo": {"rewards": [{"type": "model"}]}, "reward_model": {"path": str(reward_run)}}
    which = [
        {},
        {**test_ppo.NO_CRITIC, "ppo": {"advantage": "grpo"}},
        {"model": {"lora": {"rank": 4, "share_base": False}}},
        {**scored, "model": {"lora": {"rank": 4, "share_base": False}}},
        {"critic": {"share_trunk": True, "warmup_steps": 1}},
        {"critic": {"path": str(other_tokenizer)}},  # stays whole
    ]
    compare([test_ppo.job(tiny_folder("llama"), tmp_path, changes) for changes in which], 4, tmp_path / "group")


@pytest.mark.slow
def test_a_run_cut_off_where_products_are_divided_goes_on_otherwise(tiny_folder, tmp_path):
    """From pairs of pairs to one process, to two with whole models, and from one process to pairs of pairs."""
    model, kinds = tiny_folder("llama"), test_runs.KINDS
    alone([test_runs.job(kind, model, tmp_path / "whole") for kind in kinds])
    cut = [divided(test_runs.job(kind, model, tmp_path / "cut", "always", 3)) for kind in kinds]
    for found in answers(4, cut, tmp_path / "four"):
        assert all("after step 3 of 5" in result["interrupted"] for result in found)
    for kind in kinds:
        shutil.copytree(f"{tmp_path}/cut-{kind}", f"{tmp_path}/two-{kind}")
        shutil.copytree(f"{tmp_path}/cut-{kind}", f"{tmp_path}/again-{kind}")
    alone([test_runs.job(kind, model, tmp_path / "cut") for kind in kinds])
    answers(2, [test_runs.job(kind, model, tmp_path / "two", "never") for kind in kinds], tmp_path / "group of two")
    again = [divided(test_runs.job(kind, model, tmp_path / "again", "always")) for kind in kinds]
    answers(4, again, tmp_path / "group of four")
    for kind in kinds:
        for way in ("cut", "two", "again"):
            test_runs.assert_same_run(f"{tmp_path}/{way}-{kind}", f"{tmp_path}/whole-{kind}", kind)
