"""What can go wrong around a run, with real processes: signals, full disks, damage, changed settings, a second process."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accord.demo import ensure_data
from accord.engine.checkpoint import latest_checkpoint


def logged(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_until(true: Callable[[], Any], life: Any) -> None:
    while not true() and life.is_alive():
        time.sleep(0.001)


# ------------------------------------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_signal_saves_the_step_and_the_run_goes_on(number: int, asynchronous: str, runs: Any, whole: Any, tmp_path: Path):
    run, saving = tmp_path / "run", ("checkpoint.every_steps=null", f"checkpoint.asynchronous={asynchronous}")
    life = runs.start(run, *saving)
    wait_until(lambda: logged(run) > 1, life)  # the evaluation before training, and a step
    os.kill(life.pid, number)
    assert runs.torture.wait([life], runs.log) == [130]
    (said,) = re.findall(r"stopped by (\w+) after step (\d+) of 6\. Start the same command again", runs.said)
    checkpoint = latest_checkpoint(run / "checkpoints")
    assert checkpoint is not None and said == (signal.Signals(number).name, str(checkpoint.step))
    assert runs.finish(run, *saving) == 0 and f"going on from step {checkpoint.step} of 6" in runs.said
    assert runs.left_by(run) == whole


def test_a_second_signal_ends_it_at_once_and_nothing_is_torn(runs: Any, whole: Any, tmp_path: Path):
    run = tmp_path / "run"
    life = runs.start(run)
    wait_until(lambda: logged(run) > 1, life)
    os.kill(life.pid, signal.SIGTERM)
    os.kill(life.pid, signal.SIGINT)  # of two that are the same a busy machine may make one
    assert runs.torture.wait([life], runs.log)[0] in (-signal.SIGTERM, -signal.SIGINT)
    assert runs.finish(run) == 0
    assert runs.left_by(run) == whole


def test_a_signal_in_the_last_step_finishes_the_stage_and_is_heard(runs: Any, whole: Any, tmp_path: Path):
    """A pipeline must not begin its next stage."""
    run = tmp_path / "run"
    life = runs.start(run)
    wait_until(lambda: any(run.glob(".model.*")), life)
    os.kill(life.pid, signal.SIGTERM)
    assert runs.torture.wait([life], runs.log) == [130]
    assert f"came as {runs.stage} ended; it is finished" in runs.said
    assert runs.finish(run) == 0 and "finished already" in runs.said
    assert runs.left_by(run) == whole


# --------------------------------------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`small_disk("300k")` is a file system of that size; called again, it is that much larger."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("only root may mount a small file system here")

    def resized(size: str) -> Path:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)
        return folder

    yield resized
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_told_and_with_more_room_the_run_goes_on(
    small_disk: Any, runs: Any, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It grows bit by bit, so that each of the writers meets its end: data, caches, configuration, checkpoints, exports, models."""
    disk, stopped_by = small_disk("64m"), []
    run = disk / "run"
    monkeypatch.setenv("ACCORD_CACHE", str(disk / "cache"))
    demo = ensure_data()
    used = shutil.disk_usage(disk).used // 1024
    each, most = {"sft": (431, 9_000), "ppo": (1_201, 40_000)}[runs.stage]
    for size in (16, *range(used + 16, used + 200, 24), *range(used + 200, used + most, each)):  # KiB
        if size == 16:
            shutil.rmtree(demo)
        elif not demo.exists():
            small_disk("64m")
            ensure_data()
        small_disk(f"{size}k")
        if (code := runs.finish(run)) == 0:
            break
        assert code in (1, 2), runs.said
        (line,) = [line for line in runs.said.splitlines() if line.startswith("error: ")]
        assert str(run.parent) in line and "No space left on device" in line and "Free some space" in line, runs.said
        assert "raceback" not in runs.said, runs.said
        assert not list(run.parent.rglob(".*.tmp")) and not list(run.parent.rglob(".tokens-*"))
        stopped_by.append(line)
    assert code == 0, runs.said
    assert all(any(what in line for line in stopped_by) for what in ("checkpoint", "/cache/demo", "/cache/tokens")), stopped_by
    assert unmeasured(runs.left_by(run)) == unmeasured(whole)


def unmeasured(left: dict[str, Any]) -> dict[str, Any]:
    """Without how far sampler and trainer are apart: where there was no room for the compiled kernels, PyTorch's own round otherwise."""
    rows = [{key: row[key] for key in row if not key.startswith("ppo/sampler_logp_diff")} for row in left["metrics.jsonl"]]
    last = {key: value for key, value in left["summary.json"].items() if not key.startswith("ppo/sampler_logp_diff")}
    return left | {"metrics.jsonl": rows, "summary.json": last}


def test_a_file_that_may_not_grow_is_named(runs: Any, whole: Any, tmp_path: Path):
    """The same for those who may not mount: files of at most so many bytes."""
    run, stopped_by = tmp_path / "run", []
    for size in (400, 3_000, 8_000, 60_000, 280_000, 400_000):
        code = runs.finish(run, before=lambda size=size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
        assert code in (1, 2) and "File too large" in runs.said, runs.said
        stopped_by.append(re.findall(r"error: .*", runs.said)[-1])
        assert str(tmp_path) in stopped_by[-1] and "raceback" not in runs.said, runs.said
    assert runs.finish(run) == 0
    assert runs.left_by(run) == whole


# --------------------------------------------------------------------------------------------------------------------------- damage


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def shard(checkpoint: Path) -> Path:
    return max(checkpoint.rglob("*.safetensors"), key=lambda file: (file.stat().st_size, str(file)))


DAMAGE: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "cut": (lambda last, other: os.truncate(shard(last), 1000), "has 1000 bytes, not"),
    "flipped": (lambda last, other: flip(shard(last)), "does not fit its checksum"),
    "missing": (lambda last, other: shard(last).unlink(), "can't be read"),
    "wrong manifest": (
        lambda last, other: shutil.copy(last.with_name("step-00000003") / "manifest.json", last),
        "belongs to step 3",
    ),
    "foreign": (lambda last, other: (shutil.rmtree(last), shutil.copytree(other, last)), "belongs to another run"),
}


@pytest.fixture(scope="module")
def cut_off(torture: Any, model: Path, tmp_path_factory: pytest.TempPathFactory, stage: str) -> tuple[Path, Path]:
    """A run that has saved step 3 and 4, and one with other settings that has come as far."""
    from tests.reliability.conftest import Runs

    folder = tmp_path_factory.mktemp("cut")
    runs = Runs(torture, model, folder, stage)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCORD_CACHE", str(folder / "cache"))
        for name, settings in (("run", ()), ("other", ("run.seed=2",))):
            life = runs.start(folder / name, *settings)
            wait_until(lambda name=name: (folder / name / "checkpoints" / "step-00000004").exists(), life)
            life.kill()
            life.join()
            for late in (5,):
                shutil.rmtree(folder / name / "checkpoints" / f"step-{late:08d}", ignore_errors=True)
            assert (folder / name / "checkpoints" / "step-00000003").exists()
    return folder / "run", folder / "other"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_gives_the_same_bytes(
    damage: str, cut_off: tuple[Path, Path], runs: Any, whole: Any, tmp_path: Path
):
    run, last = tmp_path / "run", "checkpoints/step-00000004"
    shutil.copytree(cut_off[0], run)
    DAMAGE[damage][0](run / last, cut_off[1] / last)
    assert runs.finish(run) == 0, runs.said
    assert re.search(rf"the checkpoint \S+step-00000004 [^;]*{DAMAGE[damage][1]}[^;]*; looking for the one before it", runs.said)
    assert "going on from step 3 of 6" in runs.said
    assert runs.left_by(run) == whole


def test_without_a_whole_checkpoint_the_run_stops(cut_off: tuple[Path, Path], runs: Any, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(cut_off[0], run)
    for checkpoint in (run / "checkpoints").glob("step-*"):
        flip(shard(checkpoint))
    before = (run / "metrics.jsonl").read_bytes()
    assert runs.finish(run) == 1 and "no checkpoint can be used" in runs.said and "run.overwrite=true" in runs.said
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_without_any_checkpoint_says_that_it_begins_again(
    cut_off: tuple[Path, Path], runs: Any, whole: Any, tmp_path: Path
):
    run = tmp_path / "run"
    shutil.copytree(cut_off[0], run)
    shutil.rmtree(run / "checkpoints")
    assert runs.finish(run) == 0 and "no checkpoint yet: it begins again at step 1" in runs.said
    assert runs.left_by(run) == whole


# --------------------------------------------------------------------------------------------------------------- changed surroundings


def test_other_settings_are_refused_key_by_key_and_the_listed_ones_are_not(
    cut_off: tuple[Path, Path], runs: Any, whole: Any, tmp_path: Path
):
    run = tmp_path / "run"
    shutil.copytree(cut_off[0], run)
    assert runs.finish(run, "train.weight_decay=0.5", "data.shuffle=false", "checkpoint.keep_last=7") == 2
    assert (
        "train.weight_decay is 0.0 there and 0.5 here\n" in runs.said
        and "data.shuffle is true there and false here\n" in runs.said
    )
    assert "keep_last" not in runs.said and "What may differ: " in runs.said
    assert runs.finish(run, "checkpoint.keep_last=7", "track.samples_every=2") == 0
    found = runs.left_by(run)
    assert {name: file for name, file in found.items() if "/" in name} == {
        name: file for name, file in whole.items() if "/" in name
    }


def test_a_resume_that_can_not_be_exact_says_why(cut_off: tuple[Path, Path], runs: Any, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(cut_off[0], run)
    threads = torch.get_num_threads()
    assert runs.finish(run, before=lambda: torch.set_num_threads(threads + 1)) == 0
    (line,) = [line for line in runs.said.splitlines() if "not exact" in line]
    assert f"threads {threads} → {threads + 1}" in line and "torch" not in line


def test_two_processes_on_one_folder(runs: Any, whole: Any, tmp_path: Path):
    """The second is refused and told who is there, be it on another host; what a killed one has left is in nobody's way."""
    run = tmp_path / "run"

    def elsewhere() -> None:
        import socket

        socket.gethostname = lambda: "far-away"

    first = runs.start(run, before=elsewhere)
    wait_until(lambda: logged(run) > 0, first)
    os.kill(first.pid, signal.SIGSTOP)
    assert runs.finish(run) == 2 and f"another process (process {first.pid} on far-away) is working there" in runs.said
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    assert runs.finish(run) == 0
    assert runs.left_by(run) == whole


def test_all_files_of_a_checkpoint_are_safetensors_and_json(cut_off: tuple[Path, Path]):
    files = [file for file in (cut_off[0] / "checkpoints").rglob("*") if file.is_file()]
    for file in files:
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            assert file.suffix == ".safetensors"
    assert files
