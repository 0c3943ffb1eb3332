"""A run's folder: is it new, to be gone on with, or finished; who works in it; what it was started with (ARCHITECTURE §5)."""

import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from accord.errors import AccordError, ConfigError
from accord.track.environment import describe
from accord.track.files import plain, write_atomically

try:
    import fcntl
except ImportError:  # Windows has no flock; then nothing guards against a second process
    fcntl = None  # type: ignore[assignment]

State = Literal["new", "resumable", "finished"]

# What a run writes into its folder. Overwriting removes these and nothing else.
FILES = (
    "summary.json",
    "report.html",
    "metrics.jsonl",
    "samples.jsonl",
    "alarms.jsonl",
    "journal.jsonl",
    "reward_evaluation.json",
)
FOLDERS = ("checkpoints", "model", "critic", "adapter", "best", "ema", "exports", "tensorboard")
STAGES = ("sft", "reward", "dpo", "ppo")

# Keys that change where, whether, when or how visibly things happen, but no weight: they may differ on resume. So may what an alarm
# does (a run that it has stopped goes on when the user says otherwise), and the number of processes and what they divide: sums are then rounded
# otherwise.
NEUTRAL = (
    "run.dir", "run.resume", "run.overwrite", "launch", "track", "checkpoint", "export", "eval.at_start", "eval.every_steps",
    "eval.every_epochs", "eval.every_seconds", "data.cache", "data.workers", "extends", "train.shard", "train.offload", "ppo.alarms",
    "ppo.on_alarm", "ppo.journal", "engine.inference_tp_size", "engine.pin_parameters", "engine.tp_gather_partition_size",
)  # fmt: skip
# Sections that a stage does not read: a changed PPO setting is no other configuration for a finished SFT.
UNREAD = {
    "sft": ("reference", "reward_model", "critic", "reward", "dpo", "ppo", "generate", "pipeline", "stages"),
    "reward": ("reference", "critic", "sft", "dpo", "ppo", "generate", "pipeline", "stages"),
    "dpo": ("reward_model", "critic", "sft", "reward", "ppo", "generate", "pipeline", "stages"),
    "ppo": ("sft", "reward", "dpo", "pipeline", "stages"),
    "pipeline": ("pipeline.stages",),  # the same run may be asked for more stages; finished ones are not redone
}
HEAD = "# accord: "
_STAGE_OVERRIDE = re.compile(rf"^stages\.({'|'.join(STAGES)})\.")
_BESIDE = re.compile(r"\..+\.\d+\.tmp")


class RunFolder:
    """One stage's (or pipeline's) folder. Made by `open_run`; nothing is written before `begin()`.

    `state` is "new", "resumable" (same configuration, no summary.json yet) or "finished". Use it as a context manager, or call
    `close()`, to give the lock back.
    """

    def __init__(self, folder: Path, stage: str, config: Any, state: State, *, overwrite: bool) -> None:
        self.folder = folder
        self.stage = stage
        self.config = config
        self.state: State = state
        self.identity: dict[str, str] = {}  # after `begin()`: what tells this run from others
        self._overwrite = overwrite
        self._lock: int | None = None

    # Where things are -------------------------------------------------------------------------------------------------

    @property
    def config_path(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def samples_path(self) -> Path:
        return self.folder / "samples.jsonl"

    @property
    def alarms_path(self) -> Path:
        return self.folder / "alarms.jsonl"

    @property
    def journal_path(self) -> Path:
        return self.folder / "journal.jsonl"

    @property
    def summary_path(self) -> Path:
        return self.folder / "summary.json"

    @property
    def report_path(self) -> Path:
        return self.folder / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    @property
    def best(self) -> Path:
        return self.folder / "best"

    @property
    def ema(self) -> Path:
        return self.folder / "ema"

    @property
    def exports(self) -> Path:
        return self.folder / "exports"

    @property
    def tensorboard(self) -> Path:
        return self.folder / "tensorboard"

    # What happens -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take the folder: create it, lock it, write config.yaml. Called when the stage has loaded everything and really starts.

        Raises ConfigError when the folder cannot be written, or when another process works in it or has changed it since `open_run`.
        """
        if self._lock is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(_unwritable(self.folder, error.strerror or str(error))) from error
        self._lock = _take_lock(self.folder)
        try:
            state, about = _inspect(self.folder, self.stage, plain_config(self.config), self._overwrite)
            if state != self.state:
                raise ConfigError(
                    f"{self.folder}: another process has used this folder meanwhile (it was {self.state}, it is {state}). Start again."
                )
            if self.state == "new" and self._overwrite:
                self._clear()
            self._sweep()
            self.summary_path.unlink(missing_ok=True)  # a finished pipeline that gets more stages is not finished meanwhile
            before = about if self.state == "resumable" else {}
            started = before.get("started") or datetime.now().astimezone().isoformat(timespec="seconds")
            self.identity = {"stage": self.stage, "started": started, "id": before.get("id") or secrets.token_hex(8)}
            self._write_config()
        except BaseException:
            self.close()
            raise

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json at once and whole: from here on the run counts as finished. Gives the lock back."""
        text = json.dumps(plain(summary), ensure_ascii=False, indent=2, allow_nan=False)
        write_atomically(self.summary_path, text.encode("utf-8", "backslashreplace") + b"\n")
        self.state = "finished"
        self.close()

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, else None."""
        return read_summary(self.folder)

    def close(self) -> None:
        """Give the lock back. Safe to call twice."""
        if self._lock is not None:
            os.close(self._lock)  # closing releases the flock; the file itself stays, so that nobody locks a removed one
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunFolder({str(self.folder)!r}, stage={self.stage!r}, state={self.state!r})"

    # ------------------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Remove what an earlier run left. summary.json first (no longer finished), config.yaml last (still known as a run)."""
        for name in FILES:
            (self.folder / name).unlink(missing_ok=True)
        for name in FOLDERS:
            _remove_tree(self.folder / name)
        if self.stage == "pipeline":
            for name in STAGES:
                if _is_run(self.folder / name):
                    _remove_tree(self.folder / name)
        self.config_path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what a killed process was writing beside its final name (`.name.<process>.tmp`); nobody else works here now."""
        for path in self.folder.glob(".*.tmp"):
            if _BESIDE.fullmatch(path.name):
                _remove_tree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def _write_config(self) -> None:
        """The resolved configuration as YAML that `accord` can read again; versions and commit as a comment above it."""
        head = HEAD + json.dumps(describe(self.identity), ensure_ascii=False)
        body = yaml.safe_dump(plain_config(self.config), sort_keys=False, allow_unicode=True, width=120)
        write_atomically(self.config_path, f"{head}\n{body}".encode("utf-8", "backslashreplace"))


class FollowedRun(RunFolder):
    """The folder as a process sees it that is not the main one of its group: the same paths and state; the main one writes."""

    def __init__(self, folder: Path, stage: str, config: Any, state: State) -> None:
        super().__init__(folder, stage, config, state, overwrite=False)

    def begin(self) -> None:
        """Nothing: the main process has taken it."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Count it as finished here too."""
        self.state = "finished"


def open_run(config: Any, stage: str, folder: Path | str) -> RunFolder:
    """Look at `folder` and decide what running `stage` with `config` would mean there; writes nothing.

    | the folder holds               | resume: auto | never  | must      | overwrite: true |
    | ------------------------------ | ------------ | ------ | --------- | --------------- |
    | nothing                        | new          | new    | refused   | new             |
    | same configuration, unfinished | resumable    | refused| resumable | new             |
    | same configuration, finished   | finished     | refused| finished  | new             |
    | another configuration or stage | refused      | refused| refused   | new             |
    | no run, but files of that name | refused      | refused| refused   | refused         |

    Raises ConfigError (exit 2) for "refused" with the keys that differ, for a folder that cannot be written, and for one in
    which another process works.
    """
    folder = Path(folder)
    settings = plain_config(config)
    run = settings.get("run") or {}
    resume, overwrite = run.get("resume", "auto"), bool(run.get("overwrite", False))
    check_writable(folder)
    if (folder / ".lock").exists():
        os.close(_take_lock(folder))
    state, _ = _inspect(folder, stage, settings, overwrite)
    if not overwrite:
        if resume == "must" and state == "new":
            raise ConfigError(
                f"{folder}: run.resume is must, but there is no run to go on with. Check run.dir, or set run.resume=auto."
            )
        if resume == "never" and state != "new":
            raise ConfigError(
                f"{folder}: it holds {'a finished' if state == 'finished' else 'an unfinished'} run and run.resume is never. "
                "Choose another run.dir, set run.resume=auto to go on with it, or run.overwrite=true to replace it."
            )
    return RunFolder(folder, stage, config, state, overwrite=overwrite)


def plain_config(config: Any) -> dict[str, Any]:
    """The configuration as plain data: what config.yaml will hold and what is compared."""
    if not isinstance(config, Mapping):
        config = config.to_dict() if hasattr(config, "to_dict") else config.model_dump(mode="json")
    return {str(key): plain(value) for key, value in config.items()}


def read_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(configuration, about) of RUN/config.yaml; `about` is its head: stage, started, versions, git, machine.

    Raises ConfigError when the file is not what `begin` wrote.
    """
    path = folder / "config.yaml"
    try:
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text) or {}
        first = text.split("\n", 1)[0]
        about = json.loads(first[len(HEAD) :]) if first.startswith(HEAD) else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{path}: cannot read it ({reason}). Restore it, choose another run.dir, or set run.overwrite=true."
        ) from error
    if not isinstance(config, dict) or not isinstance(about, dict):
        raise ConfigError(f"{path}: it is not the configuration of a run. Choose another run.dir, or set run.overwrite=true.")
    return config, about


def read_summary(folder: Path) -> dict[str, Any] | None:
    """RUN/summary.json, or None while the run is not finished. Raises AccordError if it is damaged."""
    path = folder / "summary.json"
    if not path.exists():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AccordError(f"{path}: it is damaged ({reason}). Remove it to have the run finished again.") from error
    if not isinstance(summary, dict):
        raise AccordError(f"{path}: it is damaged (it is no JSON object). Remove it to have the run finished again.")
    return summary


def differing_keys(
    saved: Mapping[str, Any], new: Mapping[str, Any], stage: str, *, in_pipeline: bool = False
) -> list[tuple[str, Any, Any]]:
    """(dotted key, saved value, new value) of every setting that `stage` reads and that is not the same in both.

    `in_pipeline`: the folder is a stage's within a pipeline's run, which may have been moved as a whole.
    """
    ignored = NEUTRAL + UNREAD.get(stage, ())
    old_values, new_values = dict(_flatten(saved)), dict(_flatten(new))
    moved_from, moved_to = str(old_values.get("run.dir", "")), str(new_values.get("run.dir", ""))
    if in_pipeline:  # the models of earlier stages lie beside this one's folder
        moved_from, moved_to = os.path.dirname(moved_from), os.path.dirname(moved_to)
    found = []
    for key in [*new_values, *(key for key in old_values if key not in new_values)]:
        bare = _STAGE_OVERRIDE.sub("", key)  # in a pipeline a neutral key may be given to one stage
        if _is_below(key, ignored) or _is_below(bare, NEUTRAL):
            continue
        old, now = old_values.get(key, _ABSENT), new_values.get(key, _ABSENT)
        if _opened(key, old, new_values) or _opened(key, now, old_values):
            continue
        if old != now and _without_folder(old, moved_from) != _without_folder(now, moved_to):
            found.append((key, old, now))
    return found


def check_writable(folder: Path) -> None:
    """Raise ConfigError unless `folder` exists or can be made, and files can be made in it. Leaves nothing behind."""
    there = folder.absolute()
    while not os.path.lexists(there):
        if there == there.parent:
            break
        there = there.parent
    if not there.is_dir():
        raise ConfigError(_unwritable(folder, f"{there} is not a folder"))
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(_unwritable(folder, f"no permission to write in {there}"))
    try:
        with tempfile.TemporaryFile(dir=there):  # also finds read-only mounts and full quotas
            pass
    except OSError as error:
        raise ConfigError(_unwritable(folder, f"{error.strerror or error} in {there}")) from error


# ----------------------------------------------------------------------------------------------------------------------


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _inspect(folder: Path, stage: str, config: dict[str, Any], overwrite: bool) -> tuple[State, dict[str, Any]]:
    """(state, head of the saved configuration) of the folder as it is now. Raises ConfigError for another configuration."""
    if not _is_run(folder):
        left = [name for name in ("config.yaml", *FILES, *FOLDERS) if (folder / name).exists()]
        if left:  # overwriting removes whole folders: never in one that is not known to be a run
            raise ConfigError(
                f"{folder}: it is not the folder of a run but has {', '.join(left)} in it. Choose another run.dir, or move these away."
            )
        return "new", {}
    if overwrite:
        return "new", {}
    saved, about = read_config(folder)
    if about.get("stage") not in (None, stage):
        raise ConfigError(
            f"{folder}: it holds a run of `{about['stage']}`, this is `{stage}`. Choose another run.dir (say {folder}-{stage}), "
            "or set run.overwrite=true to replace it."
        )
    differing = differing_keys(saved, config, stage, in_pipeline=_is_pipeline(folder.parent))
    if differing:
        shown = "\n".join(f"  {key} is {_short(old)} there and {_short(now)} here" for key, old, now in differing)
        raise ConfigError(
            f"{folder}: it holds a run of another configuration:\n{shown}\nUse the same values to go on with it, choose another run.dir, "
            f"or set run.overwrite=true to replace it. What may differ: {', '.join(NEUTRAL)}."
        )
    if (folder / "summary.json").exists():
        return "finished", about
    return "resumable", about


def _is_run(folder: Path) -> bool:
    """Whether config.yaml there was written by `begin`: seen from its first bytes, so that a damaged one still counts."""
    try:
        with open(folder / "config.yaml", "rb") as file:
            return file.read(len(HEAD)) == HEAD.encode()
    except OSError:
        return False


def _is_pipeline(folder: Path) -> bool:
    return _is_run(folder) and read_config(folder)[1].get("stage") == "pipeline"


def _is_below(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


def _opened(key: str, value: Any, others: Mapping[str, Any]) -> bool:
    """Whether an empty section here has content there: the keys of that content are compared themselves."""
    return value in ({}, []) and any(other.startswith(key + ".") for other in others)


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves under their dotted keys; list items by number. An empty mapping or list is a leaf."""
    items: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    if not items:
        yield prefix, value
    for key, item in items:
        yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))


def _without_folder(value: Any, folder: str) -> Any:
    """A path inside the run's own folder, relative to it: moving the whole run elsewhere is no other configuration."""
    if isinstance(value, str) and folder and value.startswith(folder.rstrip("/") + "/"):
        return "RUN/" + value[len(folder.rstrip("/")) + 1 :]
    return value


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, _Absent) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def _unwritable(folder: Path, reason: str) -> str:
    return f"{folder}: cannot write a run there ({reason}). Choose another run.dir."


def _remove_tree(path: Path) -> None:
    if path.is_symlink():
        path.unlink()  # the link is ours, what it points to may not be
    elif path.exists():
        shutil.rmtree(path)


def _take_lock(folder: Path) -> int:
    """Lock RUN/.lock for this process and return its descriptor. The system lets go of it however the process ends."""
    path = folder / ".lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
    except OSError as error:
        raise ConfigError(_unwritable(folder, error.strerror or str(error))) from error
    if fcntl is None:
        return lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 200).decode("utf-8", "replace").strip()
        os.close(lock)
        if owner == _me():
            raise ConfigError(
                f"{folder}: this process is already working there. Close the other trainer first (`with …`)."
            ) from None
        raise ConfigError(
            f"{folder}: another process ({owner or 'unknown'}) is working there. Wait for it, or choose another run.dir."
        ) from None
    except OSError:
        return lock  # a file system without locks: go on unguarded rather than not at all
    with suppress(OSError):  # a full disk: the lock holds without a name in it, and what is to be written next says so
        os.ftruncate(lock, 0)
        os.pwrite(lock, _me().encode(), 0)
    return lock


def _me() -> str:
    import socket

    return f"process {os.getpid()} on {socket.gethostname()}"
