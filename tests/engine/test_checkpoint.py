"""A checkpoint is complete or absent, to the bit, at whatever moment the process dies."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from accord.engine import checkpoint as module
from accord.engine.checkpoint import Checkpoints, latest_checkpoint, save_checkpoint
from accord.engine.shards import read_into
from accord.errors import AccordError

SHARDS = [f"{name}/shard-00001-model-00001-of-00001.safetensors" for name in ("model", "optimizer")]
STATE = {"step": 3, "kl_coef": 0.1 + 0.2, "history": [1e-300, float("inf")], "text": "你好 😀", "nothing": None}


def tensors(value: float = 0.0) -> dict[str, dict[str, torch.Tensor]]:
    weight = torch.arange(12.0).reshape(3, 4) + value
    return {
        "model": {
            "w": weight,
            "head.weight": weight,
            "t": weight.t(),
            "row": weight[1],
            "bf16": torch.full((2,), 1.1, dtype=torch.bfloat16),
        },
        "optimizer": {
            "w/step": torch.tensor(7.0),
            "w/exp_avg": torch.tensor([float("nan"), -0.0]),
            "none": torch.empty(0),
            "i": torch.tensor([2**62]),
        },
    }


def steps(root: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step-")) for folder in root.glob("step-*"))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, NaN and -0 included."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().numpy(force=True).tobytes() == b.contiguous().numpy(force=True).tobytes()
    )


def test_everything_comes_back_to_the_bit(tmp_path: Path):
    saved = tensors()
    save_checkpoint(tmp_path, 3, saved, STATE, keep_last=2)
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.step == 3 and found.state == STATE and set(found.names) == {"model", "optimizer"}
    for name, group in saved.items():
        loaded = found.tensors(name)
        assert loaded.keys() == group.keys()
        for key, tensor in group.items():
            assert same(loaded[key].view(torch.uint8) if tensor.dtype == torch.bfloat16 else loaded[key],
                        tensor.view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor), key  # fmt: skip


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
                                               lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)))  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_any_json_state_comes_back_exactly(state: dict[str, Any]):
    import tempfile

    with tempfile.TemporaryDirectory() as root:
        save_checkpoint(Path(root), 1, {}, state, keep_last=1)
        found = latest_checkpoint(Path(root))
        assert found is not None and found.state == state


def test_tied_weights_are_written_once(tmp_path: Path):
    weight = torch.randn(1000, 100)
    folder = save_checkpoint(tmp_path, 1, {"model": {"embed": weight, "head": weight}}, {}, keep_last=1)
    (shard,) = (folder / "model").iterdir()
    assert shard.stat().st_size < 1.1 * weight.numel() * 4
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert torch.equal(found.tensors("model")["head"], weight) and torch.equal(found.tensors("model")["embed"], weight)


def test_no_pickle_is_written(tmp_path: Path):
    folder = save_checkpoint(tmp_path, 1, tensors(), STATE, keep_last=1)
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    assert set(files) == {*SHARDS, "state.json", "manifest.json"}
    for name, file in files.items():
        if name in SHARDS:
            with safe_open(file, "pt") as shard:
                assert shard.keys()
        else:
            json.loads(file.read_text())


def test_old_ones_go_and_the_wanted_stay(tmp_path: Path):
    for step in range(1, 8):
        save_checkpoint(tmp_path, step, {"model": {"w": torch.zeros(2)}}, {}, keep_last=2, keep={3})
    assert steps(tmp_path) == [3, 6, 7]


def test_there_may_be_none(tmp_path: Path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None


def test_an_unknown_group_is_named(tmp_path: Path):
    save_checkpoint(tmp_path, 1, {"model": {}}, {}, keep_last=1)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    with pytest.raises(AccordError, match="has no 'ema'"):
        found.tensors("ema")


# --------------------------------------------------------------------------------------------------------------------- damage


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped": flip,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "empty": lambda file: file.write_bytes(b""),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("file", [*SHARDS, "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    damage: str, file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for step in (1, 2):
        save_checkpoint(tmp_path, step, tensors(step), {"step": step}, keep_last=2)
    DAMAGE[damage](tmp_path / "step-00000002" / file)
    with caplog.at_level(logging.WARNING):
        found = latest_checkpoint(tmp_path)
    assert found is not None and found.step == 1 and found.state == {"step": 1}
    assert "step-00000002 is damaged" in caplog.text and file in caplog.text


def test_if_none_is_whole_the_run_stops_with_the_cure(tmp_path: Path):
    for step in (1, 2):
        folder = save_checkpoint(tmp_path, step, tensors(), {}, keep_last=2)
        flip(folder / SHARDS[0])
    with pytest.raises(
        AccordError, match=r"no checkpoint can be used(?s:.*)step-00000002(?s:.*)step-00000001(?s:.*)run\.overwrite"
    ):
        latest_checkpoint(tmp_path)


def test_a_whole_folder_under_another_steps_name_is_damaged(tmp_path: Path):
    save_checkpoint(tmp_path, 1, tensors(), {}, keep_last=2)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000009")
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.step == 1


def test_a_damaged_later_step_takes_no_ones_place(tmp_path: Path):
    for step in (1, 5):
        save_checkpoint(tmp_path, step, tensors(), {}, keep_last=2)
    flip(tmp_path / "step-00000005" / "state.json")
    save_checkpoint(tmp_path, 2, tensors(), {}, keep_last=2)
    assert steps(tmp_path) == [1, 2, 5]
    save_checkpoint(tmp_path, 5, tensors(), {"again": True}, keep_last=2)
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.state == {"again": True} and steps(tmp_path) == [2, 5]


def test_a_file_too_many_is_damage(tmp_path: Path):
    """PyTorch's reader takes every safetensors file of a folder for a part of it."""
    folder = save_checkpoint(tmp_path, 1, tensors(), {}, keep_last=2)
    shutil.copy(folder / SHARDS[0], folder / "model" / "shard-00002-model-00001-of-00001.safetensors")
    with pytest.raises(AccordError, match=r"shard-00002\S+ does not belong to it"):
        latest_checkpoint(tmp_path)


def test_a_foreign_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    ours = {"stage": "sft", "id": "a"}
    save_checkpoint(tmp_path, 1, tensors(), {}, keep_last=2, run=ours)
    save_checkpoint(tmp_path / "other", 2, tensors(), {}, keep_last=2, run={"stage": "reward", "id": "a"})
    shutil.copytree(tmp_path / "other" / "step-00000002", tmp_path / "step-00000002")
    with caplog.at_level(logging.WARNING):
        found = latest_checkpoint(tmp_path, ours)
    assert found is not None and found.step == 1
    assert "step-00000002 belongs to another run (stage reward instead of sft)" in caplog.text
    with pytest.raises(AccordError, match="no checkpoint can be used"):
        latest_checkpoint(tmp_path, {"stage": "sft", "id": "b"})


def test_an_unusable_one_takes_no_good_ones_place(tmp_path: Path):
    with Checkpoints(tmp_path, {}, keep_last=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, tensors(), {})
        flip(tmp_path / "step-00000003" / "state.json")
        found = checkpoints.latest()
        assert found is not None and found.step == 2
        checkpoints.save(4, tensors(), {})
        assert steps(tmp_path) == [2, 4]


def test_a_model_that_does_not_fit_is_named(tmp_path: Path):
    save_checkpoint(tmp_path, 1, tensors(), {}, keep_last=1)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    saved = found.tensors("model")
    with pytest.raises(AccordError, match=r"row is 4 \(float32\) there and 5 \(float32\) here.*model\.path"):
        read_into({**saved, "row": torch.zeros(5)}, saved)
    with pytest.raises(AccordError, match="it has bf16, which is absent here"):
        read_into({name: tensor for name, tensor in saved.items() if name != "bf16"}, saved)


# ----------------------------------------------------------------------------------------------------------------- in the background


def test_what_is_saved_in_the_background_is_the_state_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go = threading.Event()
    write = module.write_tensors
    monkeypatch.setattr(module, "write_tensors", lambda *arguments: go.wait(60) and write(*arguments))
    weight, state = torch.ones(3), {"list": [1]}
    with Checkpoints(tmp_path, {}, keep_last=2, asynchronous=True) as checkpoints:
        checkpoints.save(1, {"model": {"w": weight, "tied": weight}}, state)
        weight.add_(1)
        state["list"].append(2)
        assert not steps(tmp_path)
        go.set()
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.state == {"list": [1]}
    assert torch.equal(found.tensors("model")["tied"], torch.ones(3))


def test_a_save_waits_for_the_one_before_it(tmp_path: Path):
    with Checkpoints(tmp_path, {}, keep_last=5, asynchronous=True) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, tensors(step), {"step": step})
            assert set(range(1, step)) <= set(steps(tmp_path))
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("at", ["the next save", "the end"])
def test_a_save_that_failed_in_the_background_is_told(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(AccordError, match=r"step-00000001.*No space left"):  # noqa: SIM117
        with Checkpoints(tmp_path, {}, keep_last=2, asynchronous=True) as checkpoints:
            with monkeypatch.context() as patched:
                patched.setattr("safetensors.torch.save", full)
                checkpoints.save(1, tensors(), {})
                while not checkpoints.failed:
                    time.sleep(0.01)
            if at == "the next save":
                checkpoints.save(2, tensors(), {})
                pytest.fail("the second save began")
    assert not steps(tmp_path)


# ------------------------------------------------------------------------------------------------------------- dying while saving


def _save_and_die(root: Path, step: int, at: int, done: Any) -> None:
    """Kill this process just before the `at`-th thing that touches the disk."""
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call

    import safetensors.torch

    Path.write_text = counted(Path.write_text)  # type: ignore[method-assign]
    safetensors.torch.save = counted(safetensors.torch.save)
    os.fsync = counted(os.fsync)
    module.sync = counted(module.sync)
    module.os.replace = counted(os.replace)  # type: ignore[assignment]
    module.shutil.rmtree = counted(shutil.rmtree)  # type: ignore[assignment]
    save_checkpoint(root, step, tensors(step), {"step": step, "by": "killed"}, keep_last=1)
    done.value = 1


@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "the same step again"])
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(step: int, tmp_path: Path):
    context = multiprocessing.get_context("fork")
    for at in range(1, 60):
        root = tmp_path / str(at)
        save_checkpoint(root, 1, tensors(1), {"step": 1, "by": "before"}, keep_last=1)
        done = context.Value("i", 0)
        process = context.Process(target=_save_and_die, args=(root, step, at, done))
        process.start()
        process.join(60)
        found = latest_checkpoint(root)
        assert found is not None and found.state["step"] == found.step
        assert same(found.tensors("model")["w"], tensors(found.step)["model"]["w"])
        assert not list(root.glob(".step-*")), "what was left half done is cleared away"
        save_checkpoint(root, 3, tensors(3), {"step": 3}, keep_last=1)
        assert steps(root) == [3]
        if done.value:
            break
    assert done.value and at > 10, "the loop must have come to the end of a save"


def test_a_full_disk_leaves_earlier_checkpoints_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_checkpoint(tmp_path, 1, tensors(), {}, keep_last=1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for where in ("safetensors.torch.save", "os.fsync", "pathlib.Path.write_text", "accord.engine.checkpoint.sync"):
        with monkeypatch.context() as patched, pytest.raises(AccordError, match=r"step-00000002.*No space left(?s:.*)untouched"):
            patched.setattr(where, full)
            save_checkpoint(tmp_path, 2, tensors(), {}, keep_last=1)
        assert steps(tmp_path) == [1] and not list(tmp_path.glob(".step-*")), where
    assert latest_checkpoint(tmp_path) is not None


def test_a_state_that_is_no_json_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 1, {}, {"bad": object()}, keep_last=1)
    assert not list(tmp_path.iterdir())


def test_the_manifest_is_readable(tmp_path: Path):
    folder = save_checkpoint(tmp_path, 12, tensors(), STATE, keep_last=1)
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert manifest["step"] == 12 and set(manifest["files"]) == {*SHARDS, "state.json"}


def test_one_of_another_format_says_so_and_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module, "_VERSION", 1)
        save_checkpoint(tmp_path, 2, tensors(), {}, keep_last=1)
    with pytest.raises(
        AccordError, match="has format 1, this version of accord reads format 2: go on with the version"
    ) as raised:
        latest_checkpoint(tmp_path)
    assert "damaged" not in str(raised.value)
