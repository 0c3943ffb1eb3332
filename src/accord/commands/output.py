"""What generate and score share: a file of lines that a killed command goes on with, and how far it is."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.errors import ConfigError
from accord.track.files import json_line, sync_folder, write_atomically

if TYPE_CHECKING:
    from accord.data.records import Messages


def prompt_value(messages: Messages) -> Any:
    """Readable again as a prompt: text for a single user turn, else the messages."""
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    return [message.as_dict() for message in messages]


def weights_state(path: Path) -> str:
    """Changes when the model at that place was written anew: names, sizes and times of its weight files."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) + sorted(path.glob("*.bin"))
    state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()


class Output:
    """OUT, and beside it OUT.partial (the lines so far) and OUT.settings.json (what they were made with)."""

    def __init__(self, path: Path, command: str, what: str) -> None:
        """`command` writes it, and `what` is what its lines hold (for messages)."""
        self.path, self.command, self.what = path, command, what
        self.partial = path.with_name(path.name + ".partial")
        self.settings = path.with_name(path.name + ".settings.json")

    def check_writable(self) -> None:
        """Raises ConfigError if no file can be made there; leaves nothing behind."""
        if self.path.is_dir():
            raise ConfigError(f"--out {self.path}: is a folder. Name a file, such as {self.path / f'{self.what}.jsonl'}.")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            probe = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"--out {self.path}: can't be written: {error.strerror or error}.") from error

    def open(self, made_with: dict[str, Any]) -> int | None:
        """How many lines are there already; None: all of them, OUT is finished.

        Raises ConfigError if OUT or OUT.partial was made with other settings: nothing of the user's is overwritten.
        """
        present = self.path if self.path.exists() else self.partial if self.partial.exists() else None
        if present is not None:
            self._compare(present, made_with)
            if present is self.path:
                return None
        else:
            write_atomically(self.settings, (json.dumps(made_with, ensure_ascii=False, indent=1) + "\n").encode())
        self.stream = self.partial.open("ab")
        self._lock()
        return self._cut_to_whole_lines()

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows: nothing guards against a second process
            return
        try:
            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the file is closed, by a kill as well
        except OSError:
            raise ConfigError(
                f"--out {self.path}: another accord {self.command} is writing it. Wait for it, or give another --out."
            ) from None

    def _compare(self, present: Path, made_with: dict[str, Any]) -> None:
        cure = f"Remove {present}, or give another --out."
        try:
            before = json.loads(self.settings.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ConfigError(f"--out {present}: is there already, and it is not known what it was made with. {cure}") from None
        differing = list(_differing(before, json.loads(json.dumps(made_with))))
        if differing:
            raise ConfigError(f"--out {present}: was made with another {', '.join(differing)} (see {self.settings.name}). {cure}")

    def _cut_to_whole_lines(self) -> int:
        """Forgets a line that was being written when the program was killed."""
        whole, lines = 0, 0
        with self.partial.open("rb+") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                whole, lines = whole + len(line), lines + 1
            stream.truncate(whole)
        return lines

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        self.stream.write(b"".join(map(json_line, lines)))
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def finish(self) -> None:
        self.partial.replace(self.path)
        sync_folder(self.path.parent)
        self.stream.close()


def _differing(before: Any, now: dict[str, Any], within: str = "") -> Iterator[str]:
    """The dotted names of what `now` says otherwise."""
    for key, value in now.items():
        old = before.get(key) if isinstance(before, dict) else None
        if isinstance(value, dict):
            yield from _differing(old, value, f"{within}{key}.")
        elif old != value:
            yield f"{within}{key}"


class Progress:
    """A bar with what is left to wait on a terminal, a line every 30 seconds elsewhere; both on stderr."""

    def __init__(self, what: str, total: int, done: int) -> None:
        from rich.console import Console

        self.what, self.total, self.done, self.tokens = what, total, done, 0
        self.console = Console(stderr=True)
        self.started = self.told = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn(self.what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
            self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True)
            self.task = self.bar.add_task(self.what, total=self.total, completed=self.done, rate="")
            self.bar.start()
        return self

    def advance(self, rows: int, tokens: int) -> None:
        self.done, self.tokens = self.done + rows, self.tokens + tokens
        now = time.monotonic()
        rate = f"{self.tokens / max(now - self.started, 1e-9):,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, rate=rate)
        elif now - self.told > 30:
            self.told = now
            self.console.print(f"{self.what}: {self.done:,} of {self.total:,}, {rate}")

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()
