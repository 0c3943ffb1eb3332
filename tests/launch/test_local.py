"""Several processes of one machine: output, threads, the first failure on top, signals, no orphans."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent


class Launched:
    """A parent of workers, its standard output read as it comes."""

    def __init__(self, run: Path, *arguments: str, threads: str | None = "1") -> None:
        self.run = run
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        environment.pop("OMP_NUM_THREADS", None)
        if threads:
            environment["OMP_NUM_THREADS"] = threads
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "parent.py"), str(run), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.seen = ""

    def until(self, text: str) -> re.Match:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen += line
            if match := re.search(text, line):
                return match
        raise AssertionError(f"{text!r} was never said: {self.seen}")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, self.seen + out, err


@pytest.fixture
def launched(tmp_path):
    (tmp_path / "config.yaml").touch()  # the run has begun: logs are kept
    started = []

    def launch(*arguments: str, threads: str | None = "1") -> Launched:
        started.append(Launched(tmp_path, *arguments, threads=threads))
        return started[-1]

    yield launch
    for one in started:
        one.process.kill()
        one.process.communicate()


def pids(log: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"has pid (\d+)", log)]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_two_ranks_share_a_group_and_the_main_one_has_the_terminal(launched, tmp_path):
    code, out, err = launched("2", "ok", threads=None).end()
    assert (code, err) == (0, "")
    assert "step 3: 3" in out and "rank 1 of 2" not in out
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"and {threads} threads" in out
    assert "rank 1 of 2" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_threads_are_as_the_user_says(launched):
    assert "and 3 threads" in launched("1", "ok", threads="3").end()[1]


@pytest.mark.parametrize(
    ("what", "code", "first"),
    [
        ("user-error", 2, "error: rows.jsonl:7  the answer is empty."),
        ("bug", 1, "error: RuntimeError: no such thing"),
        ("kill", 1, "error: rank 1 was ended by SIGKILL"),
        ("exit", 1, "error: rank 1 ended with exit code 3"),
    ],
)
def test_the_rank_that_fails_ends_the_run_with_its_error_on_top(launched, what, code, first):
    result, _, err = launched("2", what, "1").end()
    assert result == code
    err = err.removeprefix("terminate called without an active exception\n")  # what C++ may say in the one that is ended
    assert err.startswith(first), err
    assert "rank 1 of 2 failed first" in err and "logs/rank-1.log" in err
    if what != "exit":
        assert "Connection" not in err  # what the others say of it
    if what in ("kill", "exit"):
        assert "  | rank 1 of 2 has pid" in err  # its last lines


def test_nothing_is_left_where_no_run_has_begun(launched, tmp_path):
    (tmp_path / "config.yaml").unlink()
    assert launched("2", "ok").end()[0] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_reaches_all_and_the_run_is_interrupted(launched, number):
    run = launched("2", "on")
    run.until("step 3")
    run.process.send_signal(number)
    code, _, err = run.end()
    assert code == 130 and re.fullmatch(r"stopped after step \d+\n", err), err


def test_a_second_signal_ends_those_that_do_not_answer(launched, tmp_path):
    run = launched("2", "deaf")
    run.until("step 3")
    run.process.send_signal(signal.SIGTERM)
    run.until("step ")
    run.until("step ")
    time.sleep(0.2)  # a signal that is still pending is not seen twice
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.end()
    assert (code, err) == (130, "interrupted\n")
    assert all(gone(pid) for pid in pids(out + (tmp_path / "logs" / "rank-1.log").read_text()))


def test_workers_end_when_their_parent_is_killed(launched, tmp_path):
    run = launched("2", "on")
    run.until("step 3")
    workers = pids(run.seen + (tmp_path / "logs" / "rank-1.log").read_text())
    assert len(workers) == 2 and not any(gone(pid) for pid in workers)
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 60
    while not all(gone(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(gone(pid) for pid in workers)
