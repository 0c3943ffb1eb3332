"""One process of a group that saves and loads checkpoints: does the jobs of FOLDER/jobs.json like worker.py."""

from __future__ import annotations

import errno
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accord.config import Model, Train
from accord.engine.checkpoint import Checkpoints
from accord.engine.ranks import join
from accord.engine.trained import TrainedModel
from accord.errors import AccordError
from accord.models.load import load_causal
from accord.models.sharded import whole


def model_of(folder: str, shard: str) -> TrainedModel:
    loaded = load_causal(Model(path=folder), seed=0, trainable=True)
    return TrainedModel(loaded, Train(lr=1e-2, ema_decay=0.9, shard=shard), total_steps=9)


def train(model: TrainedModel, steps: int) -> None:
    """Steps whose gradients depend on the weights alone, with one parameter that never gets any."""
    for _ in range(steps):
        for name, p in model.parameters.items():
            p.grad = None if name == "model.norm.weight" else torch.sin(p.detach() * 7)
        model.step()


def state_of(model: TrainedModel) -> dict[str, str]:
    """A checksum of every whole tensor of the model's state."""
    return {
        f"{group}/{name}": hashlib.sha256(whole(tensor).numpy().tobytes()).hexdigest()
        for group, tensors in model.state_tensors().items()
        for name, tensor in tensors.items()
    }


def save(model: str, root: str, shard: str, asynchronous: bool) -> dict[str, str]:
    """Save before the first step and after the second; the state of the second."""
    rank, trained = join().rank, model_of(model, shard)
    with Checkpoints(Path(root), {"id": "a"}, keep_last=2, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(0, trained.state_tensors(), {"model": trained.state(), "rank": rank})
        train(trained, 2)
        plain = {"plain": {"replicated": torch.arange(5)}}
        checkpoints.save(2, trained.state_tensors() | plain, {"model": trained.state(), "rank": rank})
        saved = state_of(trained)
        train(trained, 2)  # perhaps while that is written
    return saved


def load(model: str, root: str, shard: str) -> dict[str, str]:
    trained = model_of(model, shard)
    with Checkpoints(Path(root), {"id": "a"}, keep_last=2) as checkpoints:
        found = checkpoints.latest()
        assert found is not None and found.step == 2 and found.state["rank"] == 0
        assert found.tensors("plain")["replicated"].tolist() == [0, 1, 2, 3, 4]
        trained.load_state({name: found.tensors(name) for name in found.names if name != "plain"}, found.state["model"])
    loaded = state_of(trained)
    train(trained, 1)
    return loaded


def full_disk(root: str, asynchronous: bool) -> str:
    """Rank 1 can't write; what every rank hears."""
    import safetensors.torch

    def full(*_: Any, **__: Any) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    write = safetensors.torch.save
    if join().rank == 1:
        safetensors.torch.save = full
    tensors = {"model": {f"w{number}": torch.ones(5) for number in range(4)}}
    with pytest.raises(AccordError) as raised, Checkpoints(Path(root), {}, keep_last=1, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(1, tensors, {})
    safetensors.torch.save = write
    return str(raised.value)


def look(root: str) -> str:
    with pytest.raises(AccordError) as raised, Checkpoints(Path(root), {}, keep_last=1) as checkpoints:
        checkpoints.latest()
    return str(raised.value)


def do(job: dict[str, Any]) -> Any:
    arguments = dict(job)
    return globals()[arguments.pop("do")](**arguments)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    join()
    answers = [do(job) for job in json.loads((folder / "jobs.json").read_text())]
    (folder / f"{join().rank}.json").write_text(json.dumps(answers))
