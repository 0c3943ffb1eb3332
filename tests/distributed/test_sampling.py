"""Sampling in groups of real processes (gloo): whole weights, groups of layers, tensor parallel. The answers are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from accord.config.root import merge
from accord.engine.generate.decoder import Decoder
from accord.engine.generate.lockstep import Lockstep
from accord.engine.generate.spec import decoder_spec
from accord.engine.ranks import Ranks
from accord.errors import ConfigError
from accord.models.sharded import LayerGroups
from tests.conftest import build_tiny
from tests.distributed.group import Job, answers
from tests.distributed.sampling import do

GATHERED: dict[str, Any] = {}
BY_ONE = {"engine": {"pin_parameters": False, "tp_gather_partition_size": 1}}
BY_TWO = {"engine": {"pin_parameters": False, "tp_gather_partition_size": 2}}
SPLIT = {"engine": {"inference_tp_size": 2, "tp_gather_partition_size": 1}}
WHOLE = {"train": {"shard": "never"}}
WORKER = "tests.distributed.sampling"


def job(model: Any, changes: dict[str, Any], name: str = "sample", **more: Any) -> Job:
    return {"do": name, "model": str(model), "changes": changes, **more}


def assert_same_answers(found: dict[str, Any], wanted: dict[str, Any], rounding: float = 2e-4) -> None:
    assert found["greedy"] == wanted["greedy"] and found["sampled"] == wanted["sampled"]
    for one, other in zip(found["logprobs"], wanted["logprobs"], strict=True):
        assert [len(answer) for answer in one] == [len(answer) for answer in other]
        for a, b in zip(one, other, strict=True):
            assert a == pytest.approx(b, abs=rounding)


def test_every_way_gives_the_answers_of_one_process(tiny_folder, tmp_path):
    """Uneven lengths: one process's answers end early. Fewer prompts than processes: one has none."""
    model = tiny_folder("llama")
    wanted, one = do(job(model, WHOLE)), do(job(model, WHOLE, prompts=1))
    assert wanted["greedy"][0] != wanted["greedy"][1]  # the step has changed the weights
    ways = [GATHERED, BY_ONE, BY_TWO, SPLIT, {**SPLIT, **WHOLE}]
    jobs = [*(job(model, way) for way in ways), *(job(model, way, prompts=1) for way in (BY_ONE, SPLIT))]
    for found in answers(2, jobs, tmp_path, WORKER):
        for result in found[: len(ways)]:
            assert_same_answers(result, wanted)
        for result in found[len(ways) :]:
            assert_same_answers(result, one)


def test_every_way_holds_what_it_is_to_hold(tiny_folder, tmp_path):
    """Bytes: all weights are P numbers, of which R in the root and B in each of two blocks, M of these in matrices."""
    model = tiny_folder("llama")
    ways = [GATHERED, BY_ONE, BY_TWO, SPLIT]
    module = build_tiny("llama")
    blocks = [4 * sum(p.numel() for p in block.parameters()) for block in module.model.layers]
    matrices = 4 * sum(p.numel() for p in module.model.layers.parameters() if p.dim() == 2)
    head = 4 * module.lm_head.weight.numel()
    whole = 4 * sum(p.numel() for p in module.parameters())
    root = whole - sum(blocks)
    slot = 2 * 2 * 2 * 64 * 8 * 4  # keys and values · layers · key-value heads · tokens · head dimension · bytes
    for gathered, by_one, by_two, split in answers(2, [job(model, way, "held") for way in ways], tmp_path, WORKER):
        assert gathered == {"weights": whole // 2 + whole, "copies": matrices + head, "cache": 3 * slot}
        assert by_one == {"weights": whole // 2 + root + blocks[0], "copies": 0, "cache": 3 * slot}
        assert by_two == {"weights": whole // 2 + whole, "copies": 0, "cache": 3 * slot}
        assert split == {"weights": whole // 2 + root, "copies": matrices // 2, "cache": 6 * slot // 2}


def test_an_error_in_one_process_ends_the_sampling_of_all(tiny_folder, tmp_path):
    model = tiny_folder("llama")
    for found in answers(2, [job(model, way, "failing") for way in (BY_ONE, SPLIT)], tmp_path, WORKER):
        assert found == ["no room here"] * 2


def test_what_cannot_be_shared_is_refused_with_the_numbers(tiny_folder, tmp_path):
    odd = {"engine": {"inference_tp_size": 3}}
    jobs = [
        job(tiny_folder("llama"), odd, "refused"),
        job(tiny_folder("olmo2"), SPLIT, "refused"),
        job(tiny_folder("bloom"), BY_ONE, "refused"),
        job(tiny_folder("bloom"), SPLIT, "refused"),
    ]
    for uneven, olmo, groups, split in answers(2, jobs, tmp_path, WORKER):
        assert "inference_tp_size=3 does not divide the number of processes, 2. Set it to one of [1, 2]" in uneven
        assert "all heads together (OLMo 2)" in olmo
        assert "Bloom" in groups and "Set engine.pin_parameters=true" in groups
        assert "Bloom" in split and "Set engine.inference_tp_size=1" in split


@pytest.mark.parametrize(
    ("family", "changes", "size", "match"),
    [
        (
            "llama",
            {},
            3,
            r"inference_tp_size=3: this model has 4 attention heads, which 3 processes can't share evenly. Set it to 1 or 2, or",
        ),
        ("llama", {}, 4, r"has 2 key-value heads, which 4 processes.*Set it to 1 or 2, or use engine.pin_parameters=false"),
        ("llama", {"intermediate_size": 63}, 2, r"has 63 numbers in the MLP of layer 0, which 2 processes"),
    ],
)
def test_heads_and_widths_that_do_not_divide_are_refused(family, changes, size, match):
    module = build_tiny(family, **changes)
    spec = decoder_spec(module)
    with pytest.raises(ConfigError, match=match):
        Decoder(spec, module, lockstep=Lockstep(Ranks(0, size), LayerGroups(module, 8), tensor_parallel=True))


@pytest.mark.slow
def test_every_family_is_divided_and_gathered_by_groups(tiny_folder, tmp_path):
    families = ["qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "opt", "gpt_neox"]
    wanted = [do(job(tiny_folder(family), WHOLE)) for family in families]
    jobs = [job(tiny_folder(family), way) for way in (BY_ONE, SPLIT) for family in families]
    for found in answers(2, [*jobs, job(tiny_folder("olmo2"), BY_ONE)], tmp_path, WORKER):
        for result, one in zip(found, [*wanted, *wanted, do(job(tiny_folder("olmo2"), WHOLE))], strict=True):
            assert_same_answers(result, one)


@pytest.mark.slow
def test_adapters_and_another_type_are_sampled_alike(tiny_folder, tmp_path):
    """float16, because a CPU packs it in no way: copies of a group are those of the whole."""
    model = tiny_folder("llama")
    lora = {"model": {"lora": {"rank": 4}}}
    narrow = {"engine": {"dtype": "float16"}}
    wanted, rounded = do(job(model, merge(WHOLE, lora))), do(job(model, merge(WHOLE, narrow)))
    jobs = [job(model, merge(way, lora)) for way in (BY_ONE, SPLIT)]
    for one, two, three in answers(2, [*jobs, job(model, merge(BY_ONE, narrow))], tmp_path, WORKER):
        assert_same_answers(one, wanted)
        assert_same_answers(two, wanted)
        assert_same_answers(three, rounded, rounding=4e-3)  # of a float16 between 4 and 8


@pytest.mark.slow
def test_four_processes_as_two_pairs_and_as_one_group(tiny_folder, tmp_path):
    """Heads and key-value heads are four, so that four processes can share them."""
    model = tiny_folder("llama", num_key_value_heads=4)
    wanted, one = do(job(model, WHOLE)), do(job(model, WHOLE, prompts=1))
    four = {"engine": {"inference_tp_size": 4}}
    jobs = [job(model, way) for way in (GATHERED, BY_ONE, SPLIT, four)]
    jobs += [job(model, way, prompts=1) for way in (GATHERED, BY_ONE, SPLIT, four)]
    for found in answers(4, jobs, tmp_path / "group", WORKER):
        for result in found[:4]:
            assert_same_answers(result, wanted)
        for result in found[4:]:
            assert_same_answers(result, one)
