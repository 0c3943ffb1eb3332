"""`Ranks` without a group, what its environment must say, and results as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from accord.data.packing import pack_trees
from accord.data.trees import single
from accord.engine import ranks
from accord.engine.ranks import Ranks, together
from accord.errors import AccordError, ConfigError, DataError


def test_a_process_alone_does_everything_itself():
    alone = Ranks()
    assert alone.turns(3) == [(0, True), (1, True), (2, True)] and alone.turns(0) == []
    assert alone.each([1, 2], lambda i: i * i) == [1, 4] and alone.ask_main(lambda: (1, 2)) == (1, 2)
    tensor = torch.ones(2)
    assert alone.sum_(tensor) is tensor and alone.any(True) and not alone.any(False)
    with pytest.raises(DataError, match="row"), alone.agreeing():
        raise DataError("a bad row")


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_every_item_has_one_process_and_in_lockstep_all_have_as_many_turns(world, count):
    group = [Ranks(rank, world) for rank in range(world)]
    turns = [member.turns(count) for member in group]
    assert sorted(number for own in turns for number, counts in own if counts) == list(range(count))
    assert len({len(own) for own in turns}) == 1
    free = [member.turns(count, lockstep=False) for member in group]
    assert all(own for own in free) and sum(counts for own in free for _, counts in own) == count
    assert all(len(own) == 1 for own in free if not own[0][1])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_those_that_divide_products_have_the_same_items(count):
    group = [Ranks(rank, 4).divide(2) for rank in range(4)]
    turns = [member.turns(count) for member in group]
    assert turns[0] == turns[1] and turns[2] == turns[3]
    assert sorted(number for own in (turns[0], turns[2]) for number, counts in own if counts) == list(range(count))
    free = [member.turns(count, lockstep=False) for member in group]
    assert sorted(number for own in free for number, counts in own if counts) == list(range(count))
    with pytest.raises(ConfigError, match="does not divide the number of processes, 4"):
        group[0].divide(3)


class Named(NamedTuple):
    losses: torch.Tensor
    note: str | None


@dataclass(frozen=True)
class Held:
    scores: torch.Tensor
    inner: Named
    flag: bool


def test_results_travel_as_bytes_to_the_bit():
    strided = torch.arange(8, dtype=torch.float64).view(2, 4)[:, 1]
    one: Any = {
        "held": Held(torch.tensor([1.5, float("nan")]), Named(strided, None), True),
        "pair": (torch.tensor(True), torch.zeros(0, 3, dtype=torch.int64), torch.tensor([1.0], dtype=torch.bfloat16)[::2]),
        "numbers": [0.1, 2, float("inf")],
    }
    header, tensors = ranks._decode(ranks._encode({"0": one}))
    like = {"held": Held(torch.zeros(5), Named(torch.zeros(1), "x"), False), "pair": (torch.zeros(()),) * 3, "numbers": []}
    back = ranks._like(like, header["0"], tensors)
    assert type(back["held"]) is Held and type(back["held"].inner) is Named and back["held"].flag is True
    assert torch.equal(back["held"].scores, one["held"].scores) or back["held"].scores.isnan()[1]
    assert torch.equal(back["held"].inner.losses, strided) and back["held"].inner.note is None
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(back["pair"], one["pair"], strict=True))
    assert back["numbers"] == one["numbers"]


GROUP = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"RANK": ""}, r"WORLD_SIZE is 2, but RANK is not set.*torchrun"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR, MASTER_PORT is not set"),
        ({"RANK": "2"}, r"RANK=2 is not one of 0 … 1"),
        ({"RANK": "first"}, "are numbers"),
        ({"WORLD_SIZE": "many"}, "are numbers"),
    ],
)
def test_an_environment_that_is_no_group_is_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        ranks._from_environment({**GROUP, **changes})


def test_no_environment_and_a_world_of_one_are_a_process_alone():
    assert ranks._from_environment({}).world == ranks._from_environment({"WORLD_SIZE": "1", "RANK": "0"}).world == 1


def test_a_process_alone_keeps_its_errors_as_they_are():
    with pytest.raises(RuntimeError, match="gloo"), together():
        raise RuntimeError("something with gloo in it")


def test_packs_are_a_multiple_of_the_processes_where_there_are_trees_enough():
    trees = [single(list(range(3 + i % 5)), [True] * (3 + i % 5)) for i in range(9)]
    for multiple in (1, 2, 3, 4):
        packs = pack_trees(trees, 20, multiple)
        assert len(packs) % multiple == 0 and all(len(pack) <= 20 for pack in packs)
        assert sorted(number for pack in packs for number in pack.tree_index) == list(range(9))
    assert len(pack_trees(trees[:2], 100, 4)) == 2


def test_offload_of_what_is_not_sharded_is_refused(tiny_folder, tmp_path):
    from tests.trainers.runs import trainer

    with pytest.raises(ConfigError, match=r"train\.offload=params.*train\.shard=always"):
        trainer("sft", tiny_folder("llama"), tmp_path, {"train": {"offload": "params"}})


def test_errors_of_another_process_keep_their_kind():
    assert isinstance(ranks._error("DataError", "x"), DataError) and type(ranks._error("Unknown", "x")) is AccordError
