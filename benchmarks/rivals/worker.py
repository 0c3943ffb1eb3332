"""What workers have in common. Nothing but the standard library: each runs under another Python.

argv[1]: settings as JSON  →  one line of JSON on standard output; everything else that is printed goes to standard error.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any


def answer(work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Do the work of this process: settings in, answer out, with the most memory that it took."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to the log and not between the answers
    result = work(json.loads(sys.argv[1]))
    print(json.dumps({**result, "peak_gib": peak_gib()}), file=out, flush=True)


def peak_gib() -> float:
    """The most resident memory of this process so far.

    Linux counts it anew for the program that a process becomes; `ru_maxrss` still holds the peak of the one that started it.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


class Clock:
    """Seconds by part of a step, for a system that does not say them itself: functions are wrapped and timed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    def start(self) -> None:
        """A step begins."""
        self.seconds, self.began = {}, time.perf_counter()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts as `part`."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

        return call

    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.began


def step_of(seconds: float, parts: dict[str, float], tokens: int) -> dict[str, Any]:
    """One step of an answer. What no part claims is `other`."""
    known = {part: parts.get(part, 0.0) for part in ("generate", "score", "logprob", "train")}
    return {"seconds": seconds, "parts": {**known, "other": seconds - sum(known.values())}, "tokens": tokens}
