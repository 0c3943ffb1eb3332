"""One process of a test's group: does the jobs of FOLDER/jobs.json and leaves what they gave in FOLDER/<rank>.json."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from accord.engine.ranks import join
from accord.errors import Interrupted
from accord.models import sharded
from accord.models.sharded import whole


def do(job: dict[str, Any]) -> Any:
    """job["do"] names a function below; the rest are its arguments."""
    arguments = dict(job)
    return globals()[arguments.pop("do")](**arguments)


def offline(
    kind: str, model: str, run: str, changes: dict[str, Any], steps: int, train: int = 7, valid: int = 3
) -> dict[str, Any]:
    """Steps of SFT, reward or DPO on `train` rows, and the evaluations before and after."""
    from tests.trainers.runs import STAGES, trainer

    rows = STAGES[kind][1](train + valid)
    with trainer(kind, Path(model), Path(run), changes, rows[:train], rows[train:]) as t:
        before = t.evaluate(0)
        curve = [t.step(step) for step in range(1, steps + 1)]
        return {"before": before, "steps": curve, "after": t.evaluate(steps), "weights": summary(t.model)}


def held(model: str, run: str, changes: dict[str, Any]) -> dict[str, float]:
    """Of each parameter, its gradient, moments and average: the share of its numbers that this process holds."""
    from tests.trainers.runs import demonstrations, trainer

    with trainer("sft", Path(model), Path(run), changes, demonstrations(8), demonstrations(2)) as t:
        gradients: dict[str, Any] = {}
        step = t.model.optimizer.step

        def kept(*arguments: Any) -> Any:
            gradients.update({name: p.grad for name, p in t.model.parameters.items()})
            return step(*arguments)

        t.model.optimizer.step = kept
        t.step(1)
        states = t.model.optimizer.state
        of = {
            name: [p, gradients[name], states[p]["exp_avg"], states[p]["exp_avg_sq"], t.model.ema[name]]
            for name, p in t.model.parameters.items()
        }
        return {name: sum(sharded.local(x).numel() for x in tensors) / (5 * tensors[0].numel()) for name, tensors in of.items()}


def sums(model: str, run: str, changes: dict[str, Any]) -> dict[str, int]:
    """Of a step of SFT: sums of hidden states over the processes, packs, layers."""
    from torch import distributed

    from tests.trainers.runs import demonstrations, trainer

    with trainer("sft", Path(model), Path(run), changes, demonstrations(4), demonstrations(2)) as t:
        packs, found, plain = t.model.pack([t.examples.train[i].tree for i in range(4)]), [], distributed.all_reduce

        def counted(tensor: Any, *arguments: Any, **options: Any) -> Any:
            if tensor.dim() == 3:
                found.append(tuple(tensor.shape))
            return plain(tensor, *arguments, **options)

        with patch.object(distributed, "all_reduce", counted):
            t.step(1)
        return {"sums": len(found), "packs": len(packs), "layers": len(sharded.blocks_of(t.model.inner))}


def spoilt(model: str, run: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Three steps of SFT; in the second one the last process meets a loss that is no number."""
    from tests.trainers.runs import demonstrations, trainer

    with trainer("sft", Path(model), Path(run), changes, demonstrations(8), demonstrations(2)) as t:
        found = [t.step(1)]
        before, read = summary(t.model), t.model.token_logprobs

        def nothing(pack: Any, **options: Any) -> Any:
            out = read(pack, **options)
            return replace(out, logprobs=out.logprobs * math.nan) if join().rank == join().world - 1 else out

        t.model.token_logprobs = nothing
        found.append(t.step(2))
        assert summary(t.model) == before
        t.model.token_logprobs = read
        found.append(t.step(3))
        return {"skipped": [m["train/skipped"] for m in found], "norms": [m["train/grad_norm"] for m in found]}


def ppo(model: str, run: str, changes: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """Iterations of PPO on answers that it samples, with the evaluations before and after."""
    from tests.trainers.ppo_setup import PROMPTS, trainer

    with trainer(Path(model), Path(run), changes, PROMPTS[:7]) as t:
        before = t.evaluate(0)
        curve = [t.step(step) for step in range(1, steps + 1)]
        sums = summary(t.policy) | ({} if t.critic is None else {f"critic {n}": p for n, p in summary(t.critic).items()})
        return {"before": before, "steps": curve, "after": t.evaluate(steps), "weights": sums}


def uneven_answers(model: str, run: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A step of PPO where the answers to the prompts of even number, those of the first process, have one token, the others 40."""
    from tests.trainers.ppo_setup import trainer

    with trainer(Path(model), Path(run), {**changes, "generate": {"max_new_tokens": 40}}) as t:
        generate, long = t.engine.generate, replace(t.params, stop_token_ids=())
        short = replace(long, max_new_tokens=1)

        def uneven(prompts: Any, params: Any, *, seeds: Any = None) -> Any:
            return generate(prompts, [long if number % 2 else short for number in range(len(prompts))], seeds=seeds)

        t.engine.generate = uneven
        experience = t.make_experience([t.examples.train[i] for i in range(4)])
        losses = t.update(experience)
        return {"lengths": experience.rollouts.lengths, "finite": all(map(math.isfinite, losses.values()))}


def train(kind: str, model: str, run: str, changes: dict[str, Any], stop_at: int | None = None) -> dict[str, Any]:
    """A whole run, or one that the last process of the group is told to stop in step `stop_at`."""
    from tests.trainers import ppo_setup, runs

    make = ppo_setup.trainer if kind == "ppo" else functools.partial(runs.trainer, kind)
    with make(Path(model), Path(run), changes) as t:
        step = t.step

        def told(number: int) -> dict[str, float]:
            if number == stop_at and join().rank == join().world - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(number)

        t.step = told
        try:
            return {"summary": t.train()}
        except Interrupted as error:
            return {"interrupted": str(error)}


def costs(kind: str, model: str, run: str, changes: dict[str, Any], rows: int) -> dict[str, Any]:
    """What the second step on `rows` equal examples takes: bytes of tensors here, bytes that the collectives are to send, and those carried."""
    from torch import distributed

    from tests.distributed.quiet_network import sent
    from tests.trainers.runs import STAGES, trainer

    found: dict[str, Any] = {"gathers": 0, "reductions": 0, "added_up": 0}

    def here(tensors: Any) -> int:
        return sum(sharded.local(tensor).numel() * tensor.element_size() for tensor in tensors)

    def counted(name: str, kind: str, amount: Any) -> None:
        plain = getattr(distributed, name)

        def call(*arguments: Any, **named: Any) -> Any:
            found[kind] += amount(*arguments, **named)
            return plain(*arguments, **named)

        patches.enter_context(patch.object(distributed, name, call))

    def last_turn(module: Any, now: bool) -> None:
        if now:
            groups = [group for unit in sharded._units(module) for group in unit._get_fsdp_state()._fsdp_param_groups]
            whole = [getattr(parameter, "_unsharded_param", None) for group in groups for parameter in group.fsdp_params]
            gradients = [p.grad for p in whole if p is not None and p.grad is not None]
            found["added_up"] = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
        reduce_gradients(module, now)

    def update(*arguments: Any) -> Any:
        found["gradients"] = here(p.grad for p in t.model.parameters.values())
        return step(*arguments)

    data = STAGES[kind][1]
    with trainer(kind, Path(model), Path(run), changes, data(1) * rows, data(1)) as t, ExitStack() as patches:
        t.step(1)  # makes the moments
        counted("all_gather_single", "gathers", lambda out, own, **_: own.numel() * own.element_size())
        counted("reduce_scatter_single", "reductions", lambda output, **_: 2 * output.numel() * output.element_size())
        counted(
            "all_reduce", "reductions", lambda tensor, *_, **__: tensor.numel() * tensor.element_size() * (tensor.numel() > 1000)
        )
        reduce_gradients, step = sharded.reduce_gradients, t.model.optimizer.step
        patches.enter_context(patch.object(sharded, "reduce_gradients", last_turn))
        patches.enter_context(patch.object(t.model.optimizer, "step", update))
        packs = t.model.pack([t.examples.train[i].tree for i in range(rows)])
        t.model.ranks.barrier()
        before = sent()
        t.step(2)
        t.model.ranks.barrier()
        reference = getattr(t, "reference", None)
        frozen = reference.frozen.module.parameters() if reference is not None else ()
        of_pair = packs[0].num_targets // len(packs[0].trees)
        answer = of_pair // len(packs[0].trees[0].leaves)
        return found | {
            "carried": sent() - before,
            "packs": len(packs),
            "lengths": [packs[0].trees[0].num_tokens - of_pair, answer],
            "weights": here(t.model.parameters.values()),
            "moments": here(v for state in t.model.optimizer.state.values() for name, v in state.items() if name != "step"),
            "average": here(t.model.ema.values()),
            "frozen": here(frozen),
        }


def summary(model: Any) -> dict[str, list[float]]:
    """Of every trained parameter, and its average: the sum, and a weighted sum that no permutation leaves alone."""
    found = {}
    for name, tensor in [*model.parameters.items(), *((f"ema {n}", p) for n, p in (model.ema or {}).items())]:
        numbers = whole(tensor.detach()).double().flatten()
        found[name] = [float(numbers.sum()), float((numbers * torch.linspace(-1, 1, len(numbers), dtype=torch.float64)).sum())]
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = [do(job) for job in json.loads((folder / "jobs.json").read_text())]
    (folder / f"{join().rank}.json").write_text(json.dumps(found))
