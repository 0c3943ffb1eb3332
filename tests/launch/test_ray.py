"""Ray: the same command on two workers; one that is killed is replaced and the weights are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from accord.config import Config
from accord.errors import ConfigError
from accord.launch import ray_cluster
from tests.launch.test_local import gone

pytest.importorskip("ray", reason="Ray is not installed (pip install 'accord[ray]')")
pytestmark = pytest.mark.slow

SHORT = [
    "train.max_steps=4", "train.batch_size=8", "checkpoint.every_steps=1", "data.holdout=0.01", "eval.every_epochs=null", "eval.max_examples=16",
    "track.tensorboard=false", "generate.max_new_tokens=24", "pipeline.judge=null", "pipeline.judge_prompts=null", "stages=[reward,dpo,ppo]",
]  # fmt: skip
RAY = ["launch.type=ray", "launch.ray.workers=2"]
LIMIT_S = 900


def start(*arguments: str, before: Sequence[str] = (), **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | variables
    return subprocess.Popen(
        [*before, sys.executable, "-m", "accord", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err.replace("Token authentication is enabled", "")


def rank_of(pid: int) -> tuple[str, str]:
    """(RANK, arguments) of a process, as the system tells them."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "", ""
    return next((v[5:].decode() for v in variables if v.startswith(b"RANK=")), ""), arguments


def worker(run: Path, rank: int) -> int:
    """The process of this rank that trains in `run`."""
    for path in Path("/proc").glob("[0-9]*"):
        found, arguments = rank_of(int(path.name))
        if found == str(rank) and f"run.dir={run}" in arguments:
            return int(path.name)
    raise AssertionError(f"there is no rank {rank} in {run}")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def steps(stage: Path) -> list[int]:
    """The training steps in metrics.jsonl."""
    if not (stage / "metrics.jsonl").exists():
        return []
    lines = (stage / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if row["split"] == "train"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("local") / "run"
    code, _, err = ended(start("run", "quickstart", f"run.dir={run}", *SHORT, "launch.processes=2"))
    assert code == 0, err
    return run


def test_a_killed_worker_is_replaced_and_the_weights_are_the_same_bytes(undisturbed, tmp_path):
    run = tmp_path / "run"
    process = start("run", "quickstart", f"run.dir={run}", *SHORT, *RAY)
    wait(lambda: len(steps(run / "dpo")) >= 2, process)
    os.kill(worker(run, 1), signal.SIGKILL)  # the process that trains
    wait(lambda: len(steps(run / "ppo")) >= 2, process)
    os.kill(parent(worker(run, 0)), signal.SIGKILL)  # Ray's own worker; what it has started ends with it
    code, out, err = ended(process)
    assert code == 0, err
    assert "rank 1 was ended by SIGKILL" in err and "(2 of at most 3 times)" in err
    assert "going on from step" in out and "ppo 4/4" in out
    for stage in ("reward", "dpo", "ppo"):
        assert steps(run / stage) == [1, 2, 3, 4]
        weights = [(folder / stage / "model" / "model.safetensors").read_bytes() for folder in (run, undisturbed)]
        assert weights[0] == weights[1], stage
    assert not list(run.glob(".launch-*"))


def test_what_is_wrong_with_the_data_is_said_first_and_not_tried_again(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    code, _, err = ended(
        start("sft", "quickstart", f"data.train={tmp_path}/rows.jsonl", f"run.dir={tmp_path}/run", *SHORT[:-1], *RAY)
    )
    assert code == 2 and "rows.jsonl:1" in err and "Starting again" not in err
    assert not (tmp_path / "run").exists()


def test_lost_workers_are_replaced_only_so_often(tmp_path):
    run = tmp_path / "run"
    process = start(
        "sft", "quickstart", f"run.dir={run}", *SHORT[:-1], *RAY, "train.max_steps=10000", "launch.ray.max_restarts=1"
    )
    killed: list[int] = []

    def kill_another() -> bool:
        try:
            pid = worker(run, 1)
        except AssertionError:
            return False
        if pid not in killed:  # at its start, before it has joined the others
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        return len(killed) == 2

    wait(kill_another, process)
    code, _, err = ended(process)
    assert code == 1 and "rank 1 was ended by SIGKILL" in err and "launch.ray.max_restarts is 1" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_finish_and_save(tmp_path, number):
    run = tmp_path / "run"
    process = start("sft", "quickstart", f"run.dir={run}", *SHORT[:-1], *RAY, "train.max_steps=10000")
    wait(lambda: len(steps(run)) >= 2, process)
    process.send_signal(number)
    code, _, err = ended(process)
    assert code == 130 and re.search(rf"stopped by {number.name} after step \d+ of 10000", err)
    assert any((run / "checkpoints").iterdir())


def test_nothing_is_left_running_when_the_command_is_killed(tmp_path):
    run = tmp_path / "run"
    process = start("sft", "quickstart", f"run.dir={run}", *SHORT[:-1], *RAY, "train.max_steps=10000")
    wait(lambda: len(steps(run)) >= 1, process)
    left = [worker(run, 0), worker(run, 1), parent(worker(run, 0)), parent(worker(run, 1))]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while not all(gone(pid) for pid in left) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(gone(pid) for pid in left)


def test_more_workers_than_the_cluster_holds_are_refused(tmp_path):
    code, _, err = ended(
        start("sft", "quickstart", f"run.dir={tmp_path}/run", *SHORT[:-1], *RAY, "launch.ray.resources={GPU: 64}")
    )
    assert code == 2 and "launch.ray.workers: 2 workers with GPU 64 each need 128" in err
    assert not (tmp_path / "run").exists()


def test_a_cluster_that_is_not_there_is_named(tmp_path):
    code, _, err = ended(
        start("sft", "quickstart", f"run.dir={tmp_path}/run", *SHORT[:-1], *RAY, "launch.ray.address=127.0.0.1:1")
    )
    assert code == 2 and "launch.ray.address: can't reach 127.0.0.1:1" in err


def test_no_cluster_is_said_in_our_words(monkeypatch):
    def init(*_, **__):
        raise ConnectionError(
            "Could not find any running Ray instance. Please specify the one to connect to by setting `--address` flag."
        )

    monkeypatch.setattr("ray.init", init)
    words = r"launch\.ray\.address: can't reach auto: no Ray cluster runs on this machine\. Start one with `ray start --head`\.$"
    with (
        pytest.raises(ConfigError, match=words),
        ray_cluster._cluster(Config(launch={"type": "ray", "ray": {"address": "auto"}}).launch),
    ):
        pass
