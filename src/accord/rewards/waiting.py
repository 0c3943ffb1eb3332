"""Calls that may take long: several async ones at once, each with its limit of time, and ordinary ones in a thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

# How long after its limit a call that does not let the event loop run is given up.
GRACE_SECONDS = 1.0
_LOOK_EVERY_SECONDS = 0.1


class Stalled(Exception):
    """A call took longer than it may."""


class _Open:
    """The outcome of a call that has none yet."""


OPEN = _Open()


class Background:
    """An event loop in a thread of its own, so that it serves callers that run a loop themselves (a notebook) as well.

    It lives as long as its source: what an async function keeps between calls, a client for instance, stays with one loop.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(
        self,
        calls: Sequence[Callable[[], Awaitable[Any]]],
        limit: int,
        timeout: float | None = None,
        stop_at_error: bool = True,
    ) -> list[Any]:
        """Await all calls, at most `limit` at once, each for at most `timeout` seconds: their values, in order.

        The outcome of a call that raised is the exception, of one that took too long `Stalled`. With `stop_at_error` the others
        are then cancelled, and the outcome of those is OPEN.
        """
        outcomes: list[Any] = [OPEN] * len(calls)
        while not self._round(calls, limit, timeout, stop_at_error, outcomes):  # its loop was blocked: go on with a new one
            if stop_at_error:
                break
        return outcomes

    def _round(
        self,
        calls: Sequence[Callable[[], Awaitable[Any]]],
        limit: int,
        timeout: float | None,
        stop_at_error: bool,
        outcomes: list[Any],
    ) -> bool:
        """Work on the calls without outcome. False: a call blocks the loop, which was given up; some may still be without."""
        began: dict[int, float] = {}
        given_up = stopping = False

        async def one(number: int, gate: asyncio.Semaphore) -> None:
            async with gate:
                if given_up:
                    return
                began[number] = time.monotonic()
                outcome: Any
                try:
                    async with asyncio.timeout(timeout) as watch:
                        outcome = await calls[number]()
                except (Exception, SystemExit) as error:  # sys.exit() in it must not end the run as if it were done
                    outcome = Stalled() if watch.expired() else error
                except asyncio.CancelledError as error:
                    if stopping or given_up:
                        raise
                    outcome = error  # the call cancelled itself
                began.pop(number, None)
                if not given_up:
                    outcomes[number] = outcome

        async def everything() -> None:
            nonlocal stopping
            gate = asyncio.Semaphore(limit)
            tasks = [asyncio.create_task(one(i, gate)) for i, outcome in enumerate(outcomes) if outcome is OPEN]
            try:
                for task in asyncio.as_completed(tasks):
                    await task
                    if stop_at_error and any(isinstance(outcome, BaseException) for outcome in outcomes):
                        break
            finally:
                stopping = True
                for task in tasks:
                    task.cancel()

        future = asyncio.run_coroutine_threadsafe(everything(), self._start())
        try:
            while not concurrent.futures.wait([future], timeout=_LOOK_EVERY_SECONDS).done:
                blocking = [] if timeout is None else _overdue(began, timeout + GRACE_SECONDS)
                if blocking or not self._alive():
                    given_up = True
                    for number in list(began):
                        outcomes[number] = Stalled() if blocking else RuntimeError("it ended the event loop it runs in")
                    self._abandon(future)
                    return False
        except BaseException:  # interrupted
            future.cancel()
            raise
        future.result()
        return True

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or not self._alive():
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="accord-rewards", daemon=True)
            self._thread.start()
        return self._loop

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _abandon(self, future: concurrent.futures.Future[None]) -> None:
        """Leave a blocked loop to itself; when what blocks it ends, it cancels the rest and stops."""
        future.cancel()
        if self._loop is not None and self._alive():
            self._loop.call_soon_threadsafe(self._loop.call_later, _LOOK_EVERY_SECONDS, self._loop.stop)
        self._loop = self._thread = None


def _overdue(began: dict[int, float], seconds: float) -> list[int]:
    now = time.monotonic()
    return [number for number, start in list(began.items()) if now - start > seconds]


def within(seconds: float | None, call: Callable[[], Any]) -> Any:
    """What an ordinary call gives. Raises Stalled when that takes longer; the call is left to itself: Python ends no thread."""
    if seconds is None:
        return call()
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.append((True, call()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=target, name="accord-reward", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise Stalled
    worked, value = outcome[0]
    if not worked:
        raise value
    return value
