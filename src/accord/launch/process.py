"""One worker as its parent sees it: started, watched, told of signals, ended; and which of several failed first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from accord.errors import PeerLost
from accord.launch.environment import ERROR_FILE

PROGRAM = (sys.executable, "-m", "accord")
LAST_LINES = 20
INTERRUPTED = 130


class Worker:
    """`python -m accord COMMAND` as one rank.

    Its output goes to the terminal (`log` None) or is appended to `log` once that run has begun; its error message is kept apart, since
    the others' follow within moments and the first one is what matters.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        scratch: Path,
        log: Path | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.rank, self.log = rank, log
        self.ended_at = float("inf")  # seconds since the epoch
        self.ended_by_us = False
        self._message = scratch / f"rank-{rank}.txt"
        self._lines: deque[bytes] = deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(
            [*PROGRAM, *command],
            env={**environment, ERROR_FILE: str(self._message)},
            stdin=subprocess.PIPE,  # never written to: that it closes tells the worker that its parent is gone
            stdout=subprocess.PIPE if log else None,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which passes it on once
            cwd=cwd,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """As `subprocess` gives it: None while it runs, the exit code, or minus the signal that ended it."""
        return self._process.returncode if self.ended_at < float("inf") else None

    @property
    def running(self) -> bool:
        return self.code is None

    def message(self) -> str:
        """What it said when it failed, or what can be told of how it ended."""
        with suppress(OSError):
            if text := self._message.read_text(encoding="utf-8").rstrip():
                return text
        code = self.code or 0
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            hint = " (the system does that when memory runs out)" if -code == signal.SIGKILL else ""
            return f"error: rank {self.rank} was ended by {name}{hint}.{self._tail()}"
        return f"error: rank {self.rank} ended with exit code {code}.{self._tail()}"

    def failed_at(self) -> float:
        """When its error was written, or else when it ended."""
        with suppress(OSError):
            return self._message.stat().st_mtime
        return self.ended_at

    def send(self, number: int) -> None:
        if self.running:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """End it and what it started, and wait for that."""
        if self.running:
            self.ended_by_us = True
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._waiter.join()
        self._reader.join(timeout=5)

    # ------------------------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        self._process.wait()
        self.ended_at = time.time()

    def _read(self) -> None:
        """Keep the last lines, and write all to the log: its folder is made when the run's own has begun, for one that is refused leaves nothing."""
        if self._process.stdout is None or self.log is None:
            return
        held: list[bytes] = []
        file = None
        for line in self._process.stdout:
            self._lines.append(line)
            held.append(line)
            with suppress(OSError):  # a full disk must not stop the worker
                if file is None and (self.log.parent.parent / "config.yaml").exists():
                    self.log.parent.mkdir(exist_ok=True)
                    file = self.log.open("ab", buffering=0)
                if file is not None:
                    file.write(b"".join(held))
                    held.clear()
        if file is not None:
            file.close()

    def _tail(self) -> str:
        if not self._lines:
            return ""
        lines = b"".join(self._lines).decode("utf-8", "replace").rstrip().splitlines()
        return " Its last lines:\n" + "\n".join(f"  | {line}" for line in lines)


def first_failure(workers: Sequence[Worker]) -> Worker | None:
    """The worker whose end made the others fail, or None where all are done.

    One that was killed from outside comes first, then one that has words for what happened: neither is the consequence of another's end.
    What is unforeseen may be (a lost connection; with SIGABRT NCCL ends a process whose peer is gone). Among equals the first to say so.
    """

    def order(worker: Worker) -> tuple[int, float, int]:
        code = worker.code or 0
        kind = 2 if code in (PeerLost.exit_code, -signal.SIGABRT) else 0 if code < 0 else 1
        return kind, worker.failed_at(), worker.rank

    failed = [worker for worker in workers if worker.code not in (None, 0) and not worker.ended_by_us]
    return min(failed, key=order, default=None)
