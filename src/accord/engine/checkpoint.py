"""Checkpoints that are complete or absent: written beside, checksummed, synced, renamed. Tensors as safetensors, the rest as JSON; no pickle.

    ROOT/step-00000120/<name>.safetensors   one file a group of tensors (model, optimizer …)
                       state.json           what isn't a tensor
                       manifest.json        every file's size and checksum, and which tensors share memory

A checkpoint is whole when its manifest is there and everything in it fits. An older one goes only after the new one is whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from accord.errors import AccordError
from accord.models.save import sync

log = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    folder: Path
    step: int
    state: dict[str, Any]
    _aliases: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The groups of tensors that were saved."""
        return tuple(self._aliases)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one group, on the CPU. Raises AccordError when the checkpoint has no such group."""
        from safetensors.torch import load_file

        if name not in self._aliases:
            raise AccordError(f"the checkpoint {self.folder} has no {name!r} (it has {', '.join(self._aliases) or 'no tensors'})")
        tensors = load_file(self.folder / f"{name}.safetensors")
        for alias, original in self._aliases[name].items():
            tensors[alias] = tensors[original]
        return tensors


def save_checkpoint(
    root: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any], keep_last: int, keep: Iterable[int] = ()
) -> Path:
    """Write the checkpoint of `step` under `root` and return its folder.

    Tensors that share memory (tied weights) are written once. Afterwards only the `keep_last` newest and those of the steps in `keep` stay.
    Raises AccordError when it can't be written; what was there before is untouched then.
    """
    root = Path(root)
    final = root / f"step-{step:08d}"
    beside = root / f".step-{step:08d}.{os.getpid()}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _tidy(root)
        beside.mkdir()
        _write(beside, step, tensors, state)
        if final.exists():  # the same step once more: damaged before, or written and then come to again
            os.replace(final, beside.with_suffix(".old"))
        os.replace(beside, final)
        sync(root)
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.startswith("safetensors"):
            raise AccordError(
                f"could not write the checkpoint {final}: {error}. Earlier checkpoints are untouched. Free some space and start again."
            ) from error
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    _remove_old(root, step, keep_last, set(keep))
    return final


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint under `root`, or None where there never was one.

    A damaged one is named in a warning and the one before it is used. Raises AccordError when there are some but none is whole.
    """
    root = Path(root)
    _tidy(root)
    damaged: list[str] = []
    for step, folder in reversed(_steps(root)):
        try:
            return _open(folder, step)
        except _Damaged as error:
            damaged.append(f"{folder}: {error}")
            log.warning("the checkpoint %s is damaged (%s); looking for the one before it", folder, error)
    if damaged:
        raise AccordError(
            "no checkpoint is whole, so the run can't go on from where it was:\n  "
            + "\n  ".join(damaged)
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
    except _Damaged as error:
        raise AccordError(f"the checkpoint {folder} can't be used: {error}") from error


class _Damaged(Exception):
    """Why a checkpoint can't be used."""


def _open(folder: Path, step: int) -> Checkpoint:
    try:
        sealed = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        manifest = sealed["manifest"]
        if _seal(manifest) != sealed["blake2b"]:
            raise _Damaged("manifest.json does not fit its checksum")
        if manifest["version"] != _VERSION or manifest["step"] != step:
            raise _Damaged("manifest.json belongs to another step or version")
        for name, entry in manifest["files"].items():
            file = folder / name
            if file.stat().st_size != entry["bytes"]:
                raise _Damaged(f"{name} has {file.stat().st_size} bytes, not {entry['bytes']}")
            if _checksum(file) != entry["blake2b"]:
                raise _Damaged(f"{name} does not fit its checksum")
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return Checkpoint(folder, step, state, manifest["aliases"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        missing = getattr(error, "filename", None)
        raise _Damaged(
            f"{Path(missing).name} can't be read" if missing else f"manifest.json can't be understood: {error}"
        ) from error


def _once(group: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, contiguous on the CPU, and which other names stand for one of them."""
    once: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in group.items():
        tensor = tensor.detach()
        storage = tensor.untyped_storage().data_ptr()
        identity = (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in seen:
            aliases[name] = seen[identity]
            continue
        seen[identity] = name
        # safetensors refuses views into one storage and strided tensors: those are copied.
        plain = tensor.to("cpu").contiguous()
        whole = plain.numel() * plain.element_size() == plain.untyped_storage().nbytes()
        once[name] = plain if whole and storage not in storages else plain.clone()
        storages.add(storage)
    return once, aliases


def _steps(root: Path) -> list[tuple[int, Path]]:
    """Checkpoint folders by step, oldest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), folder) for folder in root.iterdir() if (match := _STEP.fullmatch(folder.name)) and folder.is_dir()]
    return sorted(found)


def _write(folder: Path, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
    """Every file of a checkpoint, the manifest last, all of it on the disk when this returns."""
    from safetensors.torch import save_file

    aliases: dict[str, dict[str, str]] = {}
    for name, group in tensors.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} can't be the name of a file")
        once, aliases[name] = _once(group)
        save_file(once, folder / f"{name}.safetensors")
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    files = {file.name: {"bytes": file.stat().st_size, "blake2b": _checksum(file)} for file in sorted(folder.iterdir())}
    manifest = {"version": _VERSION, "step": step, "files": files, "aliases": aliases}
    sealed = {"manifest": manifest, "blake2b": _seal(manifest)}
    (folder / "manifest.json").write_text(json.dumps(sealed, indent=1), encoding="utf-8")
    for file in folder.iterdir():
        sync(file)
    sync(folder)


def _remove_old(root: Path, newest: int, keep_last: int, keep: set[int]) -> None:
    # A later step than the one just written is damaged, else it would have been resumed from: it takes no one's place.
    upto = [(step, folder) for step, folder in _steps(root) if step <= newest]
    for step, folder in upto[: -max(keep_last, 1)]:
        if step in keep:
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


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
