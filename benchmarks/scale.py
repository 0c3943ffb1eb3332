"""The tables of docs/scale.md: what three models would need on 1 to 1,000 GPUs, by the model of cost (accord.engine.cost). Nothing is run.

python benchmarks/scale.py
python benchmarks/scale.py --memory 7B ppo 8      where the memory of one of them goes
"""

from __future__ import annotations

import argparse
import time
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoConfig

from accord.config import Config
from accord.data.packing import pack_trees
from accord.data.trees import single
from accord.engine import ranks as ranks_module
from accord.engine.cost import Cost, Lengths, Models, cost, models_of
from accord.engine.generate import Rollout

GIB, GB = 2**30, 1e9
RANKS = (1, 8, 64, 1000)
STAGES = ("sft", "reward", "dpo", "ppo")
LENGTHS = Lengths(prompt=512, answer=512)
PER_RANK = {"sft": 8, "reward": 4, "dpo": 4, "ppo": 8}  # examples, so that each rank has one pack of at most 8,192 tokens

# Assumed, not measured: one H100 SXM and what connects eight of them to others.
MEMORY = 80 * GB
PEAK, SHARE = 989e12, 0.4  # dense bf16 operations a second, and how much of it is reached
MEMORY_RATE = 3.35e12  # bytes a second
INSIDE, BETWEEN = 400 * GB, 50 * GB  # bytes a second within a machine of 8, and from one machine to the next
HOP = 5e-6  # seconds from a rank to the next
DISK = 2 * GB  # bytes a second of a machine


class Example(NamedTuple):
    family: str
    sizes: dict[str, Any]
    checkpointing: bool


EXAMPLES = {
    "135M": Example("llama", {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}, False),
    "7B": Example("qwen2", {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}, True),
    "70B": Example("llama", {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}, True),
}  # fmt: skip
NAMES = {"135M": "SmolLM2", "7B": "Qwen2.5", "70B": "Llama 3"}


def config_of(example: Example, stage: str, ranks: int) -> Config:
    return Config(
        model={"path": "MODEL", "dtype": "bfloat16", "gradient_checkpointing": example.checkpointing},
        reward_model={"path": "REWARD"},
        data={"train": "ROWS", "max_length": 512 if stage == "ppo" else 1024},
        generate={"max_new_tokens": 512},
        train={"precision": "bf16", "max_tokens": 8192, "batch_size": PER_RANK[stage] * ranks},
    ).for_stage(stage)


@cache
def models_by_stage(name: str) -> dict[str, Models]:
    example = EXAMPLES[name]
    architecture = AutoConfig.for_model(example.family, **example.sizes)
    return {stage: models_of(config_of(example, stage, 1), architecture) for stage in STAGES}


def cost_of(example: Example, models: Models, stage: str, ranks: int) -> Cost:
    return cost(config_of(example, stage, ranks), models, LENGTHS, ranks)


def seconds(found: Cost, ranks: int) -> tuple[float, float]:
    """(sending, as one ring whose slowest link decides; computing and decoding). Neither hides behind the other."""
    rate = INSIDE if ranks <= 8 else BETWEEN
    computing = (found.work.sample + found.work.read + found.work.train) / (PEAK * SHARE)
    return found.traffic.total / rate + found.traffic.hops * HOP, computing + found.work.decoding_reads / MEMORY_RATE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", nargs=3, metavar=("MODEL", "STAGE", "RANKS"), help="where the memory goes, e.g. 7B ppo 8")
    parser.add_argument("--control", action="store_true", help="processor time of what is not divided over processes, measured")
    arguments = parser.parse_args()
    if arguments.control:
        print_control()
        return
    if arguments.memory:
        name, stage, ranks = arguments.memory
        print_memory(name, stage, [int(ranks)])
        return
    for name in EXAMPLES:
        print_table(name)
    for name, stage in (("7B", "ppo"), ("70B", "sft")):
        print_memory(name, stage, list(RANKS))


def print_table(name: str) -> None:
    example = EXAMPLES[name]
    print(f"\n**{NAMES[name]} {name}**\n")
    print("| | " + " | ".join(f"{ranks:,} GPU{'s' * (ranks > 1)}" for ranks in RANKS) + " |")
    print("| --- |" + " --- |" * len(RANKS))
    for stage, models in models_by_stage(name).items():
        cells = [cell(cost_of(example, models, stage, ranks), ranks) for ranks in RANKS]
        print(f"| {stage} | " + " | ".join(cells) + " |")
    models = models_by_stage(name)["ppo"]
    written = [cost_of(example, models, "ppo", ranks).checkpoint * min(8, ranks) / DISK for ranks in RANKS]
    print("| a PPO checkpoint | " + " | ".join(f"{number(value)} s" for value in written) + " |")


def cell(found: Cost, ranks: int) -> str:
    sending, working = seconds(found, ranks)
    fits = f"{found.peak / GIB:,.0f}" if found.peak >= 10 * GIB else f"{found.peak / GIB:.1f}"
    fits = f"**{fits}** GiB" if found.peak > MEMORY else f"{fits} GiB"
    if ranks == 1:
        return f"{fits} · – · {number(working)} s"
    return f"{fits} · {number(found.traffic.total / GB)} GB · {number(sending)} + {number(working)} s"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def print_memory(name: str, stage: str, some: list[int]) -> None:
    example = EXAMPLES[name]
    models = models_by_stage(name)[stage]
    found = [cost_of(example, models, stage, ranks) for ranks in some]
    print(f"\n**Where it goes: {stage}, {name}** (GiB a rank)\n")
    print("| | " + " | ".join(f"{ranks:,}" for ranks in some) + " |\n| --- |" + " --- |" * len(some))
    rows = {"loading: whole models": [one.loading for one in found]}
    rows |= {f"training: {field}": [getattr(one.training, field) for one in found] for field in vars(found[0].training)}
    rows["training, together"] = [one.training.total for one in found]
    if stage == "ppo":
        rows["sampling: whole weights"] = [one.sampling.gathered for one in found]
        rows["sampling, together"] = [one.sampling.total for one in found]
    for title, values in rows.items():
        if any(values):
            print(f"| {title} | " + " | ".join(f"{value / GIB:,.1f}" for value in values) + " |")


def print_control() -> None:
    """What every process does for the whole step, on one core: making the packs, and reading the answers of all (docs/scale.md)."""
    draw = np.random.default_rng(0)
    print("| | " + " | ".join(f"{ranks:,} ranks" for ranks in RANKS[1:]) + " |\n| --- |" + " --- |" * len(RANKS[1:]))
    packing, reading = [], []
    for ranks in RANKS[1:]:
        lengths = draw.integers(200, 1849, 8 * ranks)
        trees = [single(np.ones(n, dtype=np.int64), np.ones(n, dtype=bool)) for n in lengths]
        began = time.process_time()
        pack_trees(trees, 8192, ranks)
        packing.append(time.process_time() - began)
        answer = Rollout(draw.integers(0, 150_000, LENGTHS.answer).tolist(), draw.normal(size=LENGTHS.answer).tolist(), "stop")
        message = ranks_module._encode({str(number): answer for number in range(8)})
        began = time.process_time()
        for _ in range(ranks):
            decode(message, Rollout([], [], "stop"))
        reading.append(time.process_time() - began)
    for title, values in (("packs of 8 sequences a rank", packing), ("answers of 8 × 512 tokens a rank, read", reading)):
        print(f"| {title} | " + " | ".join(f"{number(value)} s" for value in values) + " |")


def decode(message: bytes, like: Any) -> dict[int, Any]:
    header, tensors = ranks_module._decode(message)
    return {int(key): ranks_module._like(like, shape, tensors) for key, shape in header.items()}


if __name__ == "__main__":
    main()
