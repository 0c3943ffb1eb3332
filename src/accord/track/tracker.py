"""The numbers of a run: metrics.jsonl, samples.jsonl, alarms.jsonl, TensorBoard and the console, never doubled by a resume."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console as RichConsole

from accord.errors import AccordError
from accord.track.console import Console
from accord.track.files import json_line, number_of, parse_line, plain, step_of, sync_folder
from accord.track.run import RunFolder

RESERVED = ("stage", "split", "step", "epoch", "wall_s")


class Tracker:
    """Writes what happened in one stage's run, a line a call, as it happens.

    Starting at `start_step` (the step of the checkpoint the run goes on from, 0 for a new run) cuts metrics.jsonl, samples.jsonl
    and alarms.jsonl back to that step: what was logged after the checkpoint will be computed, and logged, again. From step 0
    nothing is kept. A (split, step) that was kept is not written a second time, so the loop may evaluate again at the step it resumes from.

    `settings` has `tensorboard: bool` and `console_every: int` (the Track section, or a mapping with these keys).
    Raises AccordError when a file cannot be written (disk full).
    """

    def __init__(
        self,
        run: RunFolder,
        settings: Any,
        stage: str,
        total_steps: int,
        headline: Sequence[str],
        start_step: int = 0,
        *,
        console: RichConsole | None = None,
    ) -> None:
        self.run, self.stage, self.start_step = run, stage, start_step
        self._kept: set[tuple[str, int]] = set()
        self._wall = 0.0  # seconds of the sessions before this one
        _cut_back(run.metrics_path, start_step, self._remember)
        _cut_back(run.samples_path, start_step, lambda row: self._kept.add(("samples", int(row["step"]))))
        _cut_back(run.alarms_path, start_step)
        self._metrics: IO[bytes] | None = _append(run.metrics_path)
        self._samples: IO[bytes] | None = None  # made when there is something to write: not every stage has samples
        self._alarms: IO[bytes] | None = None
        self._board = _Board(run.tensorboard, start_step) if _get(settings, "tensorboard", True) else None
        self._console = Console(stage, total_steps, headline, start_step, _get(settings, "console_every", 1), console)
        self._since = time.monotonic()
        self._closed = False
        if self._board is not None and self._board.broken:
            self.note(self._board.broken)

    @property
    def wall_s(self) -> float:
        """Seconds this stage has run, over all its sessions."""
        return self._wall + time.monotonic() - self._since

    def log(self, metrics: Mapping[str, Any], *, split: str, step: int, epoch: float) -> None:
        """Write one line `{"stage","split","step","epoch","wall_s", metric…}`; a number that is not finite is written as null.

        `split` is "train" or "eval". Raises ValueError for a metric that has the name of one of the line's own keys.
        """
        taken = [name for name in metrics if name in RESERVED]
        if taken:
            raise ValueError(f"metric names {taken} belong to the line itself")
        values = {name: _scalar(name, value) for name, value in metrics.items()}
        if (split, step) not in self._kept:
            row = {
                "stage": self.stage,
                "split": split,
                "step": step,
                "epoch": round(float(epoch), 6),
                "wall_s": round(self.wall_s, 3),
            }
            self._write(self._metrics, self.run.metrics_path, {**row, **values})
            if self._board is not None:
                was_broken = self._board.broken
                self._board.add(values, split, step)
                if self._board.broken and not was_broken:
                    self.note(self._board.broken)
        if split == "train":
            self._console.train(step, values)
        else:
            self._console.eval(step, values)
            self._console.pause()

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write prompts, responses, scores … of this step to samples.jsonl, a line a sample. What was kept is not written again."""
        if not samples or ("samples", step) in self._kept:
            return
        if self._samples is None:
            self._samples = _append(self.run.samples_path)
        for sample in samples:
            self._write(self._samples, self.run.samples_path, {"stage": self.stage, "step": step, **sample})

    def log_alarm(self, step: int, alarm: Mapping[str, Any]) -> None:
        """Write one line `{"stage","step", …}` to alarms.jsonl."""
        if self._alarms is None:
            self._alarms = _append(self.run.alarms_path)
        self._write(self._alarms, self.run.alarms_path, {"stage": self.stage, "step": step, **alarm})

    def note(self, text: str) -> None:
        """Tell the user something, above the bar."""
        self._console.note(text)

    def pause(self) -> None:
        """What happened since the last step was no training (a checkpoint, an export): leave it out of the time left."""
        self._console.pause()

    def sync(self) -> None:
        """Have everything logged so far survive a power cut. The loop calls it before it writes a checkpoint."""
        for file in (self._metrics, self._samples, self._alarms):
            if file is not None:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Finish the bar and the files. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._console.close()
        if self._board is not None:
            self._board.close()
        for file in (self._metrics, self._samples, self._alarms):
            if file is not None:
                file.close()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _remember(self, row: Mapping[str, Any]) -> None:
        """Called for every line kept from earlier sessions."""
        self._kept.add((str(row.get("split")), int(row["step"])))
        self._wall = max(self._wall, number_of(row, "wall_s") or 0.0)

    def _write(self, file: IO[bytes] | None, path: Path, row: Mapping[str, Any]) -> None:
        if file is None or file.closed:
            raise AccordError(f"{path}: the tracker is closed.")
        try:
            file.write(json_line(row))  # unbuffered: one system call, so kill -9 leaves whole lines
        except OSError as error:
            raise AccordError(
                f"{path}: cannot write it ({error.strerror or error}). Free some space and start the same command again."
            ) from error


class NoTracker:
    """The tracker of a process that is not the main one of its group: it writes nothing and says nothing."""

    wall_s = 0.0

    def _nothing(self, *arguments: Any, **options: Any) -> None:
        pass

    log = log_samples = log_alarm = note = pause = sync = close = _nothing

    def __enter__(self) -> "NoTracker":
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class _Board:
    """TensorBoard, one writer a split so that train and eval share a chart. What a resume will log again is purged.

    A chart must not end a training run: what goes wrong is put into `broken`, a sentence for the user, and nothing is written any more.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        self.folder, self.start_step = folder, start_step
        self.writers: dict[str, Any] = {}
        self.broken = ""
        try:
            from torch.utils.tensorboard import SummaryWriter  # here: it is slow to import

            self.make = SummaryWriter
            if start_step == 0 and folder.exists():
                shutil.rmtree(folder)
        except Exception as error:
            self._break(error)

    def add(self, values: Mapping[str, float | int | None], split: str, step: int) -> None:
        """Add the finite numbers."""
        if self.broken:
            return
        try:
            if split not in self.writers:
                purge = self.start_step + 1 if self.start_step else None
                self.writers[split] = self.make(str(self.folder / split), purge_step=purge, flush_secs=30)
            for name, value in values.items():
                if value is not None:
                    self.writers[split].add_scalar(name, value, step)
        except Exception as error:
            self._break(error)

    def close(self) -> None:
        for writer in self.writers.values():
            try:
                writer.close()
            except Exception as error:
                self._break(error)

    def _break(self, error: Exception) -> None:
        self.broken = (
            f"warning: TensorBoard is off for this run ({type(error).__name__}: {error}). metrics.jsonl has all numbers."
        )


def _cut_back(path: Path, step: int, keep: Callable[[Mapping[str, Any]], None] | None = None) -> None:
    """Rewrite a JSON-lines file with the lines of steps ≤ `step` only (none for step 0); torn lines go. Atomic; one line in memory."""
    if not path.exists():
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if step == 0:
            path.unlink()
            return
        with open(path, "rb") as old, open(beside, "wb") as new:
            for line in old:
                row = parse_line(line)
                if row is None or (at := step_of(row)) is None or at > step:
                    continue
                new.write(line)
                if keep is not None:
                    keep(row)
            new.flush()
            os.fsync(new.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise AccordError(f"{path}: cannot write it ({error.strerror or error}). {_cure(error)}") from error


def _cure(error: OSError) -> str:
    """What to do about a file that cannot be written."""
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EPERM, errno.EACCES):
        return "Move away what has its name, or make it writable, and start the same command again."
    return "Free some space and start the same command again."


def _append(path: Path) -> IO[bytes]:
    try:
        return open(path, "ab", buffering=0)
    except OSError as error:
        raise AccordError(f"{path}: cannot write it ({error.strerror or error}). {_cure(error)}") from error


def _scalar(name: str, value: Any) -> float | int | None:
    """A number as JSON has it. Raises ValueError for what is none: a metric is a number, not a text or a list."""
    number = plain(value)
    if isinstance(number, bool):
        return int(number)
    if number is None or isinstance(number, int | float):
        return number
    raise ValueError(f"metric {name} is not a number: {value!r}")


def _get(settings: Any, name: str, default: Any) -> Any:
    if isinstance(settings, Mapping):
        return settings.get(name, default)
    return getattr(settings, name, default)
