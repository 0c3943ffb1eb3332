"""What a process holds while it samples a sharded Llama of 4 layers, in each way: `PYTHONPATH=src:. python benchmarks/sharded_sampling.py [PROCESSES]`.

Real processes (gloo). Megabytes of weights (its shard, the root, what is gathered), of the sampler's copies, and of keys and values, at their most.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.conftest import TEXTS, build_tiny
from tests.distributed.group import answers

from accord.models.scratch import train_tokenizer

WAYS = {
    "whole": {},
    "groups of 1": {"pin_parameters": False, "tp_gather_partition_size": 1},
    "groups of 2": {"pin_parameters": False, "tp_gather_partition_size": 2},
    "tensor parallel": {"tp_gather_partition_size": 1},
}


def main() -> None:
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    WAYS["tensor parallel"]["inference_tp_size"] = world
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        module = build_tiny(
            "llama", num_hidden_layers=4, hidden_size=256, intermediate_size=1024, head_dim=64, num_key_value_heads=4
        )
        module.save_pretrained(model)
        train_tokenizer(TEXTS, 512).save_pretrained(model)
        jobs = [{"do": "held", "model": str(model), "changes": {"engine": way}} for way in WAYS.values()]
        found = answers(world, jobs, Path(folder) / "group", "tests.distributed.sampling")
    print(
        f"{sum(p.numel() for p in module.parameters()) * 4 / 1e6:.1f} MB of weights, {world} processes; MB of rank 0 (the largest of all)"
    )
    print(f"{'':16}{'weights':>16}{'copies':>16}{'cache':>16}{'together':>16}")
    for number, name in enumerate(WAYS):
        row, most = found[0][number], {key: max(rank[number][key] for rank in found) for key in found[0][number]}
        cells = [*((row[key], most[key]) for key in row), (sum(row.values()), sum(most.values()))]
        print(f"{name:16}" + "".join(f"{own / 1e6:8.2f} ({top / 1e6:5.2f})" for own, top in cells))


if __name__ == "__main__":
    main()
