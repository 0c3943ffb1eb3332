"""Checkpoints of several processes: each writes what it holds, any other number of them reads it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accord.config import Model, Train
from accord.engine.checkpoint import Checkpoints, latest_checkpoint
from accord.engine.trained import TrainedModel
from accord.errors import AccordError
from accord.models.forward import PackedModel
from accord.models.load import load_causal
from tests.engine.processes import in_processes

TRAIN = Train(lr=1e-2, ema_decay=0.9)


def sharded_model(folder: Path) -> TrainedModel:
    """The model of `folder`, its layers sharded over all ranks (FSDP2). Its norms of 32 and a vocabulary of 511 do not divide by three."""
    from torch.distributed.fsdp import fully_shard

    loaded = load_causal(Model(path=str(folder)), seed=0, trainable=True)
    look = PackedModel.__init__

    def look_and_shard(self: PackedModel, module: Any, precision: str) -> None:
        look(self, module, precision)
        for layer in module.model.layers:
            fully_shard(layer)
        fully_shard(module)

    with pytest.MonkeyPatch.context() as patched:
        if dist.is_initialized():
            patched.setattr(PackedModel, "__init__", look_and_shard)
        return TrainedModel(loaded, TRAIN, total_steps=9)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(model: TrainedModel, steps: int) -> None:
    """Steps whose gradients depend on the weights alone, with one parameter that never gets any."""
    for _ in range(steps):
        for name, p in model.parameters.items():
            p.grad = None if name == "model.norm.weight" else torch.sin(p.detach() * 7)
        model.optimizer.step()
        model.schedule_step += 1
        with torch.no_grad():
            for name, p in model.parameters.items():
                model.ema[name].lerp_(p, 0.1)


def state_of(model: TrainedModel) -> dict[str, torch.Tensor]:
    return {f"{group}/{name}": whole(tensor) for group, names in model.state_tensors().items() for name, tensor in names.items()}


def save_and_go_on(rank: int, folder: Path, root: Path, asynchronous: bool) -> dict[str, torch.Tensor]:
    model = sharded_model(folder)
    with Checkpoints(root, {"id": "a"}, keep_last=2, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(0, model.state_tensors(), {"model": model.state(), "rank": rank})
        train(model, 2)
        checkpoints.save(
            2, model.state_tensors() | {"plain": {"replicated": torch.arange(5)}}, {"model": model.state(), "rank": rank}
        )
        train(model, 2)
    return state_of(model)


def load_and_go_on(rank: int, folder: Path, root: Path) -> dict[str, torch.Tensor]:
    model = sharded_model(folder)
    with Checkpoints(root, {"id": "a"}, keep_last=2) as checkpoints:
        found = checkpoints.latest()
        assert found is not None and found.step == 2 and found.state["rank"] == 0
        assert found.tensors("plain")["replicated"].tolist() == [0, 1, 2, 3, 4]
        model.load_state({name: found.tensors(name) for name in found.names if name != "plain"}, found.state["model"])
    train(model, 2)
    return state_of(model)


@pytest.fixture(scope="module")
def folder(tiny_folder: Any) -> Path:
    return tiny_folder("llama", vocab_size=511)


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What one process without a group comes to."""
    return save_and_go_on(0, folder, tmp_path_factory.mktemp("one"), False)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.slow
def test_what_some_ranks_saved_any_number_goes_on_with(asynchronous: bool, folder: Path, expected: Any, tmp_path: Path):
    root = tmp_path / "checkpoints"
    for state in in_processes(3, save_and_go_on, folder, root, asynchronous):
        assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    saved = latest_checkpoint(root)
    assert saved is not None and len(list((saved.folder / "model").iterdir())) == 3
    parts = sum(file.stat().st_size for file in (saved.folder / "model").iterdir())
    one = sum(tensor.numel() * 4 for name, tensor in expected.items() if name.startswith("model/"))
    assert parts < 1.1 * one + 3 * 8192, "each part is written once"
    for ranks in (1, 2):
        results = in_processes(ranks, load_and_go_on, folder, root) if ranks > 1 else [load_and_go_on(0, folder, root)]
        for state in results:
            assert all(torch.equal(state[name], expected[name]) for name in expected)


def fails_on_one(rank: int, root: Path, asynchronous: bool) -> str:
    import safetensors.torch

    def full(*_: Any, **__: Any) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        safetensors.torch.save = full
    tensors = {"model": {f"w{number}": torch.ones(5) for number in range(4)}}
    with pytest.raises(AccordError) as raised, Checkpoints(root, {}, keep_last=1, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(1, tensors, {})
    return str(raised.value)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.slow
def test_a_rank_that_cannot_write_stops_all_with_its_reason(asynchronous: bool, tmp_path: Path):
    for message in in_processes(2, fails_on_one, tmp_path, asynchronous):
        assert "rank 1: No space left on device" in message and "step-00000001" in message
    assert not list(tmp_path.iterdir())


def looks(rank: int, root: Path) -> str:
    with pytest.raises(AccordError) as raised, Checkpoints(root, {}, keep_last=1) as checkpoints:
        checkpoints.latest()
    return str(raised.value)


@pytest.mark.slow
def test_all_ranks_hear_that_no_checkpoint_can_be_used(tmp_path: Path):
    (tmp_path / "step-00000001").mkdir()
    for message in in_processes(2, looks, tmp_path):
        assert "no checkpoint can be used" in message and "manifest.json can't be read" in message
