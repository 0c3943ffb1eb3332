"""Whole runs in groups of real processes: one folder, agreed stops, another number of processes after a resume, errors that hang nobody."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from accord.errors import PeerLost
from tests.distributed.group import Job, alone, answers, finish, said, start

KINDS = ["sft", "reward", "dpo", "ppo"]


def job(kind: str, model: Any, run: Any, shard: str = "never", stop_at: int | None = None) -> Job:
    train = {"batch_size": 3, "max_tokens": 90, "lr": 1e-3, "ema_decay": 0.9, "max_steps": 5, "shard": shard}
    changes = {"train": train, "data": {"max_length": 60}, "checkpoint": {"every_steps": 2}, "eval": {"every_steps": 2}}
    return {"do": "train", "kind": kind, "model": str(model), "run": f"{run}-{kind}", "changes": changes, "stop_at": stop_at}


def lines(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(run: str, wanted: str, kind: str) -> None:
    """The models, and one line a step."""
    for part in ("model", "ema", *(["critic"] if kind == "ppo" else [])):
        a, b = (load_file(Path(folder) / part / "model.safetensors") for folder in (run, wanted))
        assert a.keys() == b.keys() and all((a[name] - b[name]).abs().max() < 2e-5 for name in a), part
    assert [(x["split"], x["step"]) for x in lines(run)] == [(x["split"], x["step"]) for x in lines(wanted)]
    for one, other in zip(lines(run), lines(wanted), strict=True):
        name = f"{kind}/{'score' if kind == 'ppo' else 'loss'}"
        assert one[name] == pytest.approx(other[name], abs=1e-5)
    assert {path.name for path in Path(run).iterdir()} == {path.name for path in Path(wanted).iterdir()}


@pytest.mark.slow
def test_a_run_cut_off_in_two_sharded_processes_goes_on_in_one_and_in_four(tiny_folder, tmp_path):
    """The signal reaches one of two processes; both stop after the step, with a checkpoint."""
    model = tiny_folder("llama")
    alone([job(kind, model, tmp_path / "whole") for kind in KINDS])
    for found in answers(2, [job(kind, model, tmp_path / "cut", "always", 3) for kind in KINDS], tmp_path / "two"):
        assert all("after step 3 of 5" in result["interrupted"] for result in found)
    for kind in KINDS:
        shutil.copytree(f"{tmp_path}/cut-{kind}", f"{tmp_path}/four-{kind}")
    alone([job(kind, model, tmp_path / "cut") for kind in KINDS])
    answers(4, [job(kind, model, tmp_path / "four", "always") for kind in KINDS], tmp_path / "group of four")
    for kind in KINDS:
        assert_same_run(f"{tmp_path}/cut-{kind}", f"{tmp_path}/whole-{kind}", kind)
        assert_same_run(f"{tmp_path}/four-{kind}", f"{tmp_path}/whole-{kind}", kind)


@pytest.mark.slow
def test_two_processes_with_a_base_in_4_bits_each_train_the_adapter_of_one(tiny_folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    one, two = (job("dpo", tiny_folder("llama"), tmp_path / name) for name in ("one", "two"))
    for each in (one, two):
        each["changes"]["model"] = {"lora": {"rank": 4}, "quantization": "nf4"}
    alone([one])
    answers(2, [two], tmp_path / "group")
    assert_same_run(f"{tmp_path}/two-dpo", f"{tmp_path}/one-dpo", "dpo")


def test_the_command_in_a_group_writes_one_run_and_speaks_once(tiny_folder, tmp_path):
    from tests.trainers.runs import demonstrations

    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in demonstrations(9)))
    command = [
        "-m", "accord.cli", "sft", f"model.path={tiny_folder('llama')}", f"data.train={data}", f"run.dir={tmp_path}/run", "data.max_length=128",
        "train.batch_size=3", "train.max_steps=2", "train.shard=always", "data.holdout=0.3", "track.tensorboard=false",
    ]  # fmt: skip
    assert finish(start(2, command, tmp_path / "group"), tmp_path / "group") == [0, 0], said(tmp_path / "group")
    spoken = [(tmp_path / "group" / f"{rank}.log").read_text() for rank in (0, 1)]
    assert "model:" in spoken[0] and "sft 2/2" in spoken[0] and "sft" not in spoken[1]
    assert [(x["split"], x["step"]) for x in lines(tmp_path / "run")] == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]
    assert (tmp_path / "run" / "model" / "config.json").exists() and (tmp_path / "run" / "summary.json").exists()
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


FAILS = """
import sys, json
from accord.engine.ranks import join, together
from accord.errors import AccordError, DataError
from accord.cli import guarded

def main():
    with together() as ranks:
        if sys.argv[1] == "main":
            ranks.ask_main(lambda: refuse("rows.jsonl:3  no such column"))
        if sys.argv[1] == "outside":
            ranks.ask_main(lambda: 1 / 0)
        if sys.argv[1] == "agreeing":
            with ranks.agreeing():
                if ranks.rank == 1:
                    refuse("the prompt is empty")
        if sys.argv[1] == "one":
            if ranks.rank == 1:
                refuse("only here")
            ranks.barrier()
        if sys.argv[1] == "killed":
            print("here", flush=True)
            ranks.barrier()
            if ranks.rank == 0:
                ranks.barrier()
            import time
            time.sleep(600)
    return 0

def refuse(text):
    raise DataError(text)

if __name__ == "__main__":
    sys.exit(guarded(main))
"""


@pytest.mark.parametrize(
    ("where", "codes", "texts"),
    [
        ("main", [2, 2], ["rows.jsonl:3  no such column"] * 2),
        ("outside", [1, PeerLost.exit_code], ["ZeroDivisionError", "the main process has failed: ZeroDivisionError"]),
        ("agreeing", [2, 2], ["the prompt is empty"] * 2),
        ("one", [PeerLost.exit_code, 2], ["another process of this run has stopped", "only here"]),
    ],
)
def test_an_error_in_one_process_ends_all_with_its_reason(where, codes, texts, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    assert finish(start(2, [str(script), where], tmp_path), tmp_path, timeout=300) == codes, said(tmp_path)
    for rank, text in enumerate(texts):
        assert text in (tmp_path / f"{rank}.log").read_text()


def test_a_killed_process_hangs_nobody(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    processes = start(2, [str(script), "killed"], tmp_path)
    end = time.monotonic() + 300
    while "here" not in (tmp_path / "1.log").read_text() and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(1)
    processes[1].send_signal(signal.SIGKILL)
    assert processes[0].wait(300) == PeerLost.exit_code
    finish(processes, tmp_path)
    assert "another process of this run has stopped" in (tmp_path / "0.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_waits_for_the_others_hears_a_signal(number, tmp_path):
    """Joining takes place outside Python, for up to half an hour."""
    (process, other) = start(2, ["-m", "accord", "sft", "quickstart", f"run.dir={tmp_path}/run"], tmp_path)
    other.kill()
    end = time.monotonic() + 120
    while "tcpstore" not in threads(process.pid) and time.monotonic() < end:  # it listens for the others
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(60) == 130
    assert (tmp_path / "0.log").read_text().strip() == "interrupted"


def threads(pid: int) -> str:
    """The names of a process's threads."""
    return " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm"))
