"""Jobs of a group's processes: answers sampled in every way that weights can lie in, and what a process then holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from accord.config.root import merge
from accord.engine.generate import SamplingParams
from accord.engine.generate import decoder as decoders
from accord.engine.hybrid import HybridEngine
from accord.engine.ranks import join
from accord.engine.trained import TrainedModel
from accord.errors import AccordError
from accord.models.load import load_causal
from accord.models.sharded import local
from tests.trainers.ppo_setup import settings

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19], [20], [9, 10], [30, 31, 32]]


def engine(model: str, changes: dict[str, Any]) -> HybridEngine:
    config = settings(Path(model), Path("unused"), merge({"train": {"lr": 0.05, "shard": "always"}}, changes))
    trained = TrainedModel(load_causal(config.model, seed=0, trainable=True), config.train, total_steps=9)
    return HybridEngine(trained, config.engine)


def sample(model: str, changes: dict[str, Any], prompts: int = len(PROMPTS), longest: int = 12) -> dict[str, Any]:
    """Greedy and sampled answers, before and after an optimizer step; the answer to prompt n has at most longest - 2 n tokens."""
    sampler = engine(model, changes)
    lengths = [max(1, longest - 2 * number) for number in range(prompts)]
    found: dict[str, Any] = {"greedy": [], "sampled": [], "logprobs": []}
    for _ in range(2):
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            params = [SamplingParams(max_new_tokens=length, temperature=temperature, stop_token_ids=(2,)) for length in lengths]
            rollouts = sampler.generate(PROMPTS[:prompts], params, seeds=list(range(prompts)))
            found[name].append([rollout.token_ids for rollout in rollouts])
            found["logprobs"].append([rollout.logprobs for rollout in rollouts])
        ids = torch.tensor([PROMPTS[2]])
        sampler.model.module.train()
        sampler.model.module(input_ids=ids, labels=ids).loss.backward()
        sampler.step()
    return found


def held(model: str, changes: dict[str, Any]) -> dict[str, int]:
    """Bytes of this process while it samples, at their most: weights here (shards, root, what is gathered), the sampler's copies, its cache."""
    sampler = engine(model, changes)
    module = sampler.model.module
    most = {"weights": 0, "copies": 0, "cache": 0}

    def note() -> None:
        decoder, cache = sampler.generator.decoder, sampler.generator.cache
        most["weights"] = max(most["weights"], weights_here(module))
        most["copies"] = max(most["copies"], decoder.copied_bytes)
        most["cache"] = max(most["cache"], cache.nbytes)

    plain = decoders._Layer.__call__

    def layer(*arguments: Any) -> Any:
        note()
        return plain(*arguments)

    decoders._Layer.__call__ = layer
    try:
        sampler.generate(PROMPTS, SamplingParams(max_new_tokens=4, temperature=0.0), seeds=list(range(len(PROMPTS))))
    finally:
        decoders._Layer.__call__ = plain
    return most


def weights_here(module: torch.nn.Module) -> int:
    """Bytes of shards, and of whole weights while they have memory."""
    groups = [
        group
        for part in module.modules()
        if hasattr(part, "_get_fsdp_state")
        for group in part._get_fsdp_state()._fsdp_param_groups
    ]
    if not groups:
        return sum(p.numel() * p.element_size() for p in module.parameters())
    found = 0
    for parameter in (parameter for group in groups for parameter in group.fsdp_params):
        found += local(parameter.sharded_param).numel() * parameter.sharded_param.element_size()
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None and whole.untyped_storage().size():
            found += whole.numel() * whole.element_size()
    return found


def failing(model: str, changes: dict[str, Any]) -> str:
    """The last process meets an error in its third step: what is raised here."""
    sampler = engine(model, changes)
    cache, reserve = sampler.generator.cache, sampler.generator.cache.reserve
    calls = iter(range(10**6))

    def full(*arguments: Any) -> None:
        if next(calls) >= 3 and join().rank == join().world - 1:
            raise AccordError("no room here")
        reserve(*arguments)

    cache.reserve = full
    try:
        sampler.generate(PROMPTS, SamplingParams(max_new_tokens=9, temperature=0.0), seeds=list(range(len(PROMPTS))))
    except AccordError as error:
        return str(error)
    return "nothing"


def refused(model: str, changes: dict[str, Any]) -> str:
    try:
        engine(model, changes)
    except AccordError as error:
        return str(error)
    return "nothing"


def do(job: dict[str, Any]) -> Any:
    arguments = dict(job)
    return globals()[arguments.pop("do")](**arguments)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = [do(job) for job in json.loads((folder / "jobs.json").read_text())]
    (folder / f"{join().rank}.json").write_text(json.dumps(found))
