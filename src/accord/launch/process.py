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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accord.errors import AccordError, Interrupted, PeerLost, UserError
from accord.launch.environment import ERROR_FILE

PROGRAM = (sys.executable, "-m", "accord")
LAST_LINES = 20
LINGER_S = 5.0  # how long the others may take to end by themselves when one has failed, or all after a second signal


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

    def outcome(self) -> Outcome:
        """How it ended, once it has."""
        at = self.ended_at
        with suppress(OSError):
            at = self._message.stat().st_mtime  # it ended when it said so: leaving takes a while
        log = str(self.log) if self.log else None
        return Outcome(self.rank, self.code or 0, self._last_words(), at, self.ended_by_us, log)

    def _last_words(self) -> str:
        with suppress(OSError):
            if text := self._message.read_text(encoding="utf-8").rstrip():
                return text
        code = self.code or 0
        if not code:
            return ""
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            hint = " (the system does that when memory runs out)" if -code == signal.SIGKILL else ""
            return f"error: rank {self.rank} was ended by {name}{hint}.{self._tail()}"
        return f"error: rank {self.rank} ended with exit code {code}.{self._tail()}"

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


@dataclass(frozen=True)
class Outcome:
    """How a worker ended."""

    rank: int
    code: int  # its exit code, or minus the signal that ended it
    message: str  # what it said when it failed, or what can be told of how it ended
    at: float  # when, in seconds since the epoch
    ended_by_us: bool = False  # only because another had failed
    log: str | None = None  # where its output is

    @property
    def is_consequence(self) -> bool:
        """Whether it may have failed only because another was gone: a lost connection, or SIGABRT, with which NCCL ends such a process."""
        return self.code in (PeerLost.exit_code, -signal.SIGABRT)

    @property
    def is_final(self) -> bool:
        """Whether it would end like this again: it is done, was interrupted, or has words for what is wrong."""
        return self.code in (0, AccordError.exit_code, UserError.exit_code, Interrupted.exit_code)


def first_failure(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The end that made the others fail, or None where all are done.

    That of a process killed from outside comes first, then of one that has words for it; what may be a consequence comes last.
    Among equals the first one.
    """

    def order(outcome: Outcome) -> tuple[int, float, int]:
        kind = 2 if outcome.is_consequence else 0 if outcome.code < 0 else 1
        return kind, outcome.at, outcome.rank

    return min((outcome for outcome in outcomes if outcome.code and not outcome.ended_by_us), key=order, default=None)


def told(outcomes: Sequence[Outcome], signals: Sequence[int]) -> int:
    """Say what happened, the first failure first, and return the exit code. Raises Interrupted where one of `signals` ended the run."""
    first = first_failure(outcomes)
    if first is None and not any(outcome.ended_by_us for outcome in outcomes):
        return 0
    if first is None or -first.code in signals:
        raise Interrupted("interrupted")  # by a second signal, or before a worker could answer the first
    if first.code == Interrupted.exit_code:
        raise Interrupted(first.message)
    print(first.message, file=sys.stderr)
    if len({outcome.message for outcome in outcomes if outcome.code}) > 1:
        log = f"; its output: {first.log}" if first.log and Path(first.log).exists() else ""
        print(f"       (rank {first.rank} of {len(outcomes)} failed first, the others were ended{log})", file=sys.stderr)
    if not first.is_final:
        print("       Start the same command again to go on from the last checkpoint.", file=sys.stderr)
    return UserError.exit_code if first.code == UserError.exit_code else 1


class PassedOn:
    """SIGINT and SIGTERM in the order they came; the parent itself does not end by them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, frame: Any) -> None:
        self.received.append(number)

    def __enter__(self) -> PassedOn:
        with suppress(ValueError):  # only the main thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
