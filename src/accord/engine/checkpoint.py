"""Checkpoints that are complete or absent: written beside, checksummed, synced, renamed. Tensors as safetensors, the rest as JSON; no pickle.

    ROOT/step-00000120/<name>/shard-….safetensors   a group of tensors (model, optimizer …), a file a rank (engine/shards.py)
                       state.json                   what isn't a tensor
                       manifest.json                every file's size and checksum, which tensors share memory, whose run it is

A checkpoint is whole when its manifest is there and everything in it fits. An older one goes only after the new one is whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from accord.engine.shards import SavedTensors, once, write_tensors
from accord.errors import AccordError
from accord.models.save import sync

log = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_VERSION = 2

Groups = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    step: int
    state: dict[str, Any]
    _aliases: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)
    passed_over: tuple[int, ...] = ()  # later ones that can't be used

    @property
    def names(self) -> tuple[str, ...]:
        """The groups of tensors that were saved."""
        return tuple(self._aliases)

    def tensors(self, name: str) -> SavedTensors:
        """The tensors of one group, read when they are asked for. Raises AccordError when the checkpoint has no such group."""
        if name not in self._aliases:
            raise AccordError(f"the checkpoint {self.folder} has no {name!r} (it has {', '.join(self._aliases) or 'no tensors'})")
        return SavedTensors(self.folder / name, self._aliases[name])


class Checkpoints:
    """The checkpoints of one run, saved and looked for by all its ranks together; `with` it, so that the last save ends with the run.

    `run` says whose they are ({"id", "stage" …}): what another run has left in the folder is not used. With `asynchronous` a save copies the
    tensors to CPU memory and returns; they are written in the background, one checkpoint at a time.
    """

    def __init__(self, root: Path, run: Mapping[str, Any], *, keep_last: int, asynchronous: bool = False) -> None:
        self.root, self.run, self.keep_last = Path(root), dict(run), keep_last
        self.ranks = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if asynchronous and self.ranks is not None:
            # What is written in the background must not come between the exchanges of training.
            dist.barrier()  # a process that is gone is noticed here; making a group would wait for it
            self.ranks = dist.new_group(backend="gloo")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._saving: Future[Path] | None = None
        self._unusable: tuple[int, ...] = ()

    def latest(self) -> Checkpoint | None:
        """See `latest_checkpoint`. One rank looks, for all."""
        found = _on_main(self.ranks, lambda: latest_checkpoint(self.root, self.run))
        self._unusable = found.passed_over if found else ()
        return found

    def save(self, step: int, tensors: Groups, state: dict[str, Any]) -> None:
        """Save `step`, see `save_checkpoint`. In the background: raises here what went wrong with the save before this one."""
        self.wait()
        options: dict[str, Any] = {"keep_last": self.keep_last, "unusable": self._unusable, "run": self.run, "ranks": self.ranks}
        if self._background is None:
            save_checkpoint(self.root, step, tensors, state, **options)
            return
        copies = {name: copied(group) for name, group in tensors.items()}
        state = json.loads(json.dumps(state))  # as it is at this step
        self._saving = self._background.submit(save_checkpoint, self.root, step, copies, state, **options)

    @property
    def failed(self) -> bool:
        """Whether a save in the background is known to have failed on this rank; `wait` says how."""
        return self._saving is not None and self._saving.done() and self._saving.exception() is not None

    def wait(self) -> None:
        """Return when nothing is being saved any more. Raises what went wrong with it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None:
                self.wait()
        finally:
            if self._background is not None:
                self._background.shutdown(wait=True)  # also after an error: what is being written is a whole checkpoint soon


def copied(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in CPU memory; names that share a tensor share the copy, a sharded tensor's copy holds this rank's part."""
    distinct, aliases = once(group)
    copies = {name: tensor.to("cpu", copy=True) for name, tensor in distinct.items()}
    return copies | {alias: copies[name] for alias, name in aliases.items()}


def save_checkpoint(
    root: Path,
    step: int,
    tensors: Groups,
    state: dict[str, Any],
    keep_last: int,
    keep: Iterable[int] = (),
    unusable: Iterable[int] = (),
    run: Mapping[str, Any] | None = None,
    ranks: dist.ProcessGroup | None = None,
) -> Path:
    """Write the checkpoint of `step` under `root` and return its folder. All of `ranks` call it; `state` is that of the main rank.

    Tensors that share memory (tied weights) are written once. Afterwards only the `keep_last` newest and those of the steps in `keep` stay;
    earlier ones that are `unusable` take no one's place and go.
    Raises AccordError, on every rank, when it can't be written; what was there before is untouched then.
    """
    root = Path(root)
    final, beside = root / f"step-{step:08d}", root / f".step-{step:08d}.tmp"
    text = json.dumps(state)
    if bad := [name for name in tensors if not _NAME.fullmatch(name)]:
        raise ValueError(f"{bad[0]!r} can't be the name of a folder")

    def begin() -> None:
        root.mkdir(parents=True, exist_ok=True)
        _tidy(root)
        beside.mkdir()

    def finish() -> None:
        (beside / "state.json").write_text(text, encoding="utf-8")
        files["state.json"] = _seen(beside / "state.json")
        manifest = {"version": _VERSION, "step": step, "run": dict(run or {}), "files": files, "aliases": aliases}
        sealed = {"manifest": manifest, "blake2b": _seal(manifest)}
        (beside / "manifest.json").write_text(json.dumps(sealed, indent=1), encoding="utf-8")
        for path in [
            beside / "state.json",
            beside / "manifest.json",
            *(beside / name for name in groups if groups[name]),
            beside,
        ]:
            sync(path)
        if final.exists():  # the same step once more: damaged before, or written and then come to again
            os.replace(final, beside.with_suffix(".old"))
        os.replace(beside, final)
        sync(root)
        _remove_old(root, step, keep_last, set(keep), set(unusable))

    groups, aliases = {}, {}
    for name, group in tensors.items():
        groups[name], aliases[name] = once(group)
    try:
        _on_main(ranks, begin)
        for name, distinct in groups.items():
            write_tensors(beside / name, distinct, ranks)
        files = _own_files(beside, ranks)
        _on_main(ranks, finish)
    except OSError as error:
        raise AccordError(
            f"could not write the checkpoint {final}: {error.strerror or error}. Earlier checkpoints are untouched. "
            "Free some space and start the same command again."
        ) from error
    finally:
        if _is_main(ranks):
            shutil.rmtree(beside, ignore_errors=True)
    return final


def latest_checkpoint(root: Path, run: Mapping[str, Any] | None = None) -> Checkpoint | None:
    """The newest whole checkpoint under `root` (of `run`, if given), or None where there never was one.

    A damaged or foreign one is named in a warning and the one before it is used. Raises AccordError when there are some but none can be used.
    """
    root = Path(root)
    _tidy(root)
    unusable: dict[int, str] = {}
    for step, folder in reversed(_steps(root)):
        try:
            return replace(_open(folder, step, run), passed_over=tuple(unusable))
        except _Unusable as error:
            unusable[step] = f"{folder} {error}"
            log.warning("the checkpoint %s %s; looking for the one before it", folder, error)
    if unusable:
        raise AccordError(
            "no checkpoint can be used, so the run can't go on from where it was:\n  "
            + "\n  ".join(unusable.values())
            + "\nRestore one from a backup, or start afresh with run.overwrite=true."
        )
    return None


def checkpoint_steps(root: Path) -> list[int]:
    """The steps of the checkpoints under `root`, oldest first, whole or damaged; changes nothing."""
    return [step for step, _ in _steps(Path(root))]


def read_checkpoint(root: Path, step: int) -> Checkpoint:
    """The checkpoint of `step` under `root`; changes nothing there. Raises AccordError when it is damaged or absent."""
    folder = dict(_steps(Path(root))).get(step, Path(root) / f"step-{step:08d}")
    try:
        return _open(folder, step)
    except _Unusable as error:
        raise AccordError(f"the checkpoint {folder} {error}") from error


class _Unusable(Exception):
    """Why a checkpoint can't be used: a sentence that begins with a verb."""


def _open(folder: Path, step: int, run: Mapping[str, Any] | None = None) -> Checkpoint:
    try:
        sealed = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        manifest = sealed["manifest"]
        if _seal(manifest) != sealed["blake2b"]:
            raise _Unusable("is damaged (manifest.json does not fit its checksum)")
        if manifest["version"] != _VERSION:
            raise _Unusable(
                f"has format {manifest['version']}, this version of accord reads format {_VERSION}: go on with the version that saved it"
            )
        if manifest["step"] != step:
            raise _Unusable(f"is damaged (manifest.json belongs to step {manifest['step']})")
        theirs = manifest["run"]
        if run is not None and theirs != dict(run):
            keys = [key for key in {**theirs, **run} if theirs.get(key) != run.get(key)]
            differing = ", ".join(f"{key} {theirs.get(key)} instead of {run.get(key)}" for key in keys)
            raise _Unusable(f"belongs to another run ({differing})")
        for name, (size, checksum) in manifest["files"].items():
            found = (folder / name).stat().st_size
            if found != size:
                raise _Unusable(f"is damaged ({name} has {found} bytes, not {size})")
            if _checksum(folder / name) != checksum:
                raise _Unusable(f"is damaged ({name} does not fit its checksum)")
        there = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
        if more := there - {"manifest.json", *manifest["files"]}:
            raise _Unusable(f"is damaged ({min(more)} does not belong to it)")
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return Checkpoint(folder, step, state, manifest["aliases"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        missing = getattr(error, "filename", None)
        what = f"{os.path.relpath(missing, folder)} can't be read" if missing else f"manifest.json can't be understood: {error}"
        raise _Unusable(f"is damaged ({what})") from error


# -------------------------------------------------------------------------------------------------------------------------- ranks


def _is_main(ranks: dist.ProcessGroup | None) -> bool:
    return ranks is None or dist.get_rank(ranks) == 0


def _on_main(ranks: dist.ProcessGroup | None, work: Callable[[], Any]) -> Any:
    """What `work` gives on the main rank, on every rank; what it raises there is raised on every rank."""
    if ranks is None:
        return work()
    outcome: list[Any] = [None, None]
    if _is_main(ranks):
        try:
            outcome = [work(), None]
        except Exception as error:
            outcome = [None, error]
    dist.broadcast_object_list(outcome, group=ranks, group_src=0)
    result, raised = outcome
    if raised is not None:
        raise raised
    return result


def _own_files(folder: Path, ranks: dist.ProcessGroup | None) -> dict[str, tuple[int, str]]:
    """Size and checksum of every shard in `folder`, each worked out by the rank that wrote it."""
    number = 0 if ranks is None else dist.get_rank(ranks)
    found: dict[str, tuple[int, str]] | OSError
    try:
        found = {file.relative_to(folder).as_posix(): _seen(file) for file in folder.glob(f"*/shard-{number + 1:05d}-*")}
    except OSError as error:
        found = error
    if ranks is None:
        parts: list[Any] = [found]
    else:
        parts = [None] * dist.get_world_size(ranks)
        dist.all_gather_object(parts, found, group=ranks)
    together: dict[str, tuple[int, str]] = {}
    for part in parts:
        if isinstance(part, OSError):
            raise part
        together |= part
    return dict(sorted(together.items()))


# -------------------------------------------------------------------------------------------------------------------------- files


def _steps(root: Path) -> list[tuple[int, Path]]:
    """Checkpoint folders by step, oldest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), folder) for folder in root.iterdir() if (match := _STEP.fullmatch(folder.name)) and folder.is_dir()]
    return sorted(found)


def _remove_old(root: Path, newest: int, keep_last: int, keep: set[int], unusable: set[int]) -> None:
    # A later step than the one just written is damaged, else it would have been resumed from: it takes no one's place.
    upto = [(step, folder) for step, folder in _steps(root) if step <= newest]
    good = [step for step, _ in upto if step == newest or step not in unusable]
    staying = {*good[-max(keep_last, 1) :], *keep}
    for step, folder in upto:
        if step in staying:
            continue
        gone = folder.with_name(f".{folder.name}.gone")
        try:  # the name first, so that one that is half deleted is never taken for a damaged one
            os.replace(folder, gone)
        except OSError as error:
            log.warning("could not remove the old checkpoint %s: %s", folder, error)
    _tidy(root)


def _tidy(root: Path) -> None:
    """Clear away what a killed process left half done; bring back a checkpoint that was about to be replaced."""
    if not root.is_dir():
        return
    for left in root.glob(".step-*"):
        final = root / left.name.split(".")[1]
        if left.suffix == ".old" and not final.exists():
            os.replace(left, final)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _seen(file: Path) -> tuple[int, str]:
    return file.stat().st_size, _checksum(file)


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
