"""The model of cost against two real processes: what each holds to the byte, what the collectives move, what the network carries."""

from __future__ import annotations

from typing import Any

import pytest

from accord.engine.cost import Lengths, cost, models_of, weight_part
from tests.distributed.quiet_network import quiet_answers
from tests.trainers.runs import config

pytestmark = pytest.mark.slow
ROWS = 16
CASES = [  # of SFT one pack a process, then several; DPO with its reference; whole copies; recomputed activations
    ("sft", {"train": {"max_tokens": 400}}),
    ("sft", {"train": {"max_tokens": 60}}),
    ("dpo", {"train": {"max_tokens": 90}}),
    ("sft", {"train": {"max_tokens": 60, "shard": "never"}}),
    ("sft", {"train": {"max_tokens": 60}, "model": {"gradient_checkpointing": True}}),
]


def changes_of(changes: dict[str, Any]) -> dict[str, Any]:
    train = {"batch_size": ROWS, "shard": "always", "ema_decay": 0.9, **changes["train"]}
    return {**changes, "train": train, "data": {"max_length": 60}}


@pytest.fixture(scope="module")
def found(tiny_folder, tmp_path_factory) -> list[list[dict[str, Any]]]:
    """[case][process]"""
    folder = tmp_path_factory.mktemp("cost")
    jobs = [
        {
            "do": "costs",
            "kind": kind,
            "model": str(tiny_folder("llama")),
            "run": f"{folder}/runs/{i}",
            "changes": changes_of(changes),
            "rows": ROWS,
        }
        for i, (kind, changes) in enumerate(CASES)
    ]
    return [list(case) for case in zip(*quiet_answers(2, jobs, folder / "group"), strict=True)]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_two_processes_hold_and_send_what_the_model_says(case, found, tiny_folder, tmp_path):
    from transformers import AutoConfig

    kind, changes = CASES[case]
    settings = config(tiny_folder("llama"), tmp_path, changes_of(changes)).for_stage(kind)
    models = models_of(settings, AutoConfig.from_pretrained(tiny_folder("llama")))
    carried = 0
    for rank, seen in enumerate(found[case]):
        prompt, answer = seen["lengths"]
        wanted = cost(settings, models, Lengths(prompt, answer), 2, gpu=False, rank=rank)
        memory, traffic = wanted.training, wanted.traffic
        assert seen["packs"] == 2 * wanted.turns
        assert (seen["weights"], seen["moments"], seen["average"]) == (memory.weights, memory.moments, memory.average)
        # A frozen root stays whole: its part is there, and all of it.
        root = [] if models.reference is None else models.reference.root
        assert seen["frozen"] == memory.frozen + sum(weight.bytes - 4 * weight_part(weight, 2, rank) for weight in root)
        assert seen["gradients"] == memory.moments // 2
        whole = 4 * sum(weight.numbers for weight in models.policy.trained)
        sharded = settings.train.shard == "always"
        assert seen["added_up"] == (whole if sharded and wanted.turns > 1 else 0)
        assert seen["gathers"] == traffic.gathers
        assert seen["reductions"] == traffic.reductions
        carried += traffic.total
    # Headers of packets, the norm, what is agreed on: 66 bytes a packet, and a few messages of some bytes.
    assert carried < found[case][0]["carried"] < 1.1 * carried + 20_000
