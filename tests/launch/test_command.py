"""The command line on several processes: what is trained, what is refused, and by whom it may be started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accord.config import Config
from accord.errors import ConfigError
from accord.launch import launch
from accord.launch.environment import check_mesh, worker_environment
from accord.track.run import differing_keys

TRAIN = [
    "sft", "quickstart", "train.max_steps=3", "train.batch_size=7", "data.holdout=0.01", "eval.max_examples=3", "eval.every_epochs=null",
    "track.tensorboard=false",
]  # fmt: skip


def accord(*arguments: str, program: tuple[str, ...] = (sys.executable, "-m", "accord")) -> tuple[int, str, str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr


def losses(run: Path) -> list[float]:
    return [row["sft/loss"] for row in map(json.loads, (run / "metrics.jsonl").open())]


@pytest.mark.slow
def test_one_process_two_and_torchruns_two_train_the_same(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "accord")
    assert accord(*TRAIN, f"run.dir={tmp_path}/one")[0] == 0
    code, out, err = accord(*TRAIN, f"run.dir={tmp_path}/two", "launch.processes=2")
    assert code == 0 and err == "" and out.count("sft 3/3") == 1
    code, out, _ = accord(*TRAIN, f"run.dir={tmp_path}/torchrun", program=torchrun)
    assert code == 0 and out.count("sft 3/3") == 1
    assert losses(tmp_path / "two") == losses(tmp_path / "torchrun")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


def test_a_refusal_is_said_once_and_leaves_nothing(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    code, _, err = accord(*TRAIN, f"data.train={tmp_path}/rows.jsonl", f"run.dir={tmp_path}/run", "launch.processes=2")
    assert code == 2 and err.count("rows.jsonl:1") == 1 and err.startswith("error: ")
    assert not (tmp_path / "run").exists()


def test_a_worker_only_works(monkeypatch):
    for name, value in worker_environment(1, 4, 1, 4, "127.0.0.1", 29500, 1).items():
        monkeypatch.setenv(name, value)
    worked = []
    assert launch(Config(launch={"processes": 4}), ["sft"], lambda: worked.append(True)) == 0
    assert worked == [True]
    with pytest.raises(ConfigError, match="2 × tensor 1 are 2 processes, but there are 4"):
        launch(Config(launch={"type": "ray", "mesh": {"data": 2}}), ["sft"], lambda: worked.append(True))


def test_the_mesh_holds_the_processes_there_are():
    check_mesh(Config(launch={"processes": "auto"}).launch, 3)
    with pytest.raises(ConfigError, match="but there are 3"):
        check_mesh(Config(launch={"processes": "auto", "mesh": {"data": 2}}).launch, 3)
    check_mesh(Config(launch={"processes": "auto", "mesh": {"tensor": 2}}).launch, 4)
    with pytest.raises(
        ConfigError, match=r"3 processes can't be put into groups of 2\. Set launch\.processes to 2 or a multiple"
    ):
        check_mesh(Config(launch={"processes": "auto", "mesh": {"tensor": 2}}).launch, 3)
    with pytest.raises(ConfigError, match=r"1 process can't be put into groups of 2\. Set launch\.ray\.workers to 2"):
        check_mesh(Config(launch={"type": "ray", "mesh": {"tensor": 2}}).launch, 1)


def test_processes_of_another_launcher_are_counted_by_that_launcher(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"Have the launcher start \(torchrun: --nproc-per-node\) 2 or a multiple of it"):
        check_mesh(Config(launch={"mesh": {"tensor": 2}}).launch, 3)


def test_how_a_run_is_launched_is_no_reason_to_refuse_a_resume():
    one, other = Config(), Config(launch={"type": "ray", "ray": {"workers": 8, "env_vars": {"A": "b"}}})
    for stage in ("sft", "reward", "dpo", "ppo", "pipeline"):
        assert differing_keys(one.to_dict(), other.to_dict(), stage) == []


def test_ray_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=r"pip install 'accord\[ray\]'"):
        launch(Config(run={"dir": str(tmp_path / "run")}, launch={"type": "ray"}), ["sft"], lambda: None)
    # a cluster of this machine alone is told so, the next one must not be: no second machine could join it
    assert dict(os.environ) == before
    assert not (tmp_path / "run").exists()
