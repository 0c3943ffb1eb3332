"""Rows out of files, folders, hub data sets, standard input and lists: read lazily, each with the place it came from."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from accord.data.files import COMPRESSIONS, SUFFIXES, Row, kind_of, read_file, readable
from accord.errors import DataError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


TRAIN_SPLITS = ("train",)
VALID_SPLITS = ("validation", "valid", "dev", "test")


def read_rows(
    source: Any, *, split: str | None = None, default_splits: Sequence[str] = TRAIN_SPLITS, name: str = "train_dataset"
) -> Iterator[Row]:
    """Rows of a path, a hub id, "-" (standard input, JSON lines), `demo:<name>`, or rows in memory (called `name` in origins).

    Where a data set has splits and `split` is None, the first of `default_splits` that it has is read.

    Raises DataError for what is missing, empty of files, of an unknown kind or not UTF-8; a single row that can't be read comes as
    a Row with its `error`.
    """
    if not isinstance(source, str | Path):
        if hasattr(source, "keys") and not hasattr(source, "features"):
            raise DataError(f"{name}: expected a list of rows or a datasets.Dataset, found {type(source).__name__}")
        if iter(source) is source:
            raise DataError(
                f"{name}: rows are read more than once, but a {type(source).__name__} gives them only once. Make it a list."
            )
        yield from (Row(value, f"{name}[{i}]") for i, value in enumerate(source))
        return
    found = locate(source)
    if found.kind == "files":
        for file in found.files:
            yield from read_file(file, found.label(file))
    elif found.kind == "dataset":
        yield from _number(_load_folder(found.name, split, default_splits), found.name)
    else:
        yield from _number(_load_hub(found.name, split, default_splits), found.name)


def fingerprint(source: Any, *, split: str | None = None, default_splits: Sequence[str] = TRAIN_SPLITS) -> str | None:
    """A hash of the content, or None for rows in memory that have none of their own (they are not cached)."""
    if not isinstance(source, str | Path):
        own = getattr(source, "_fingerprint", None)
        return f"dataset:{own}" if own else None
    found = locate(source)
    if found.kind == "files":
        digest = hashlib.blake2b(digest_size=16)
        for file in found.files:
            digest.update(found.label(file).encode() + b"\0")
            with readable(file), open(file, "rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        return digest.hexdigest()
    load = _load_folder if found.kind == "dataset" else _load_hub
    data = load(found.name, split, default_splits)
    return f"dataset:{data._fingerprint}"


@dataclass(frozen=True)
class Located:
    """What a source's name stands for: files, a folder written by `datasets`, or a hub id."""

    kind: str  # files | dataset | hub
    name: str
    files: tuple[Path, ...] = ()
    shown: str = ""  # what origins say in place of the path ("-" is kept in a temporary file)

    def label(self, file: Path) -> str:
        if self.shown:
            return self.shown
        return file.name if len(self.files) == 1 else str(file.relative_to(self.name))


def locate(source: str | Path) -> Located:
    """Raises DataError if there is no such file or folder and the name can't be a hub id either."""
    text = str(source)
    if text == "-":
        return Located("files", text, (_standard_input(),), "<stdin>")
    if text.startswith("demo:"):
        from accord import demo

        path = demo.data_path(text.removeprefix("demo:"))
        return Located("files", text, (path,), text)
    path = Path(text).expanduser()
    try:
        if path.is_file():
            if kind_of(path) is None:
                raise DataError(
                    f"{text}: unknown kind of file. Expected one of {', '.join(SUFFIXES)}, each also {' or '.join(COMPRESSIONS)}."
                )
            return Located("files", text, (path,))
        if path.is_dir():
            return _locate_folder(path)
    except OSError as error:
        raise DataError(f"{text}: can't be read: {error.strerror or error}") from error
    if _HUB_ID.fullmatch(text) and kind_of(path) is None:
        return Located("hub", text)
    raise DataError(f"{text}: no such file or folder.{_nearest_file(path)}")


def _locate_folder(path: Path) -> Located:
    if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
        return Located("dataset", str(path))
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and kind_of(file) and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise DataError(f"{path}: the folder holds no data file ({', '.join(SUFFIXES)}, each also {' or '.join(COMPRESSIONS)}).")
    return Located("files", str(path), tuple(files))


def _nearest_file(path: Path) -> str:
    try:
        names = [file.name for file in path.parent.iterdir()]
    except OSError:
        return f" Nor is there a folder {path.parent}."
    near = get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


@cache
def _standard_input() -> Path:
    """Standard input can be read once but is needed twice (fingerprint, rows), so it is kept in a temporary file."""
    file = tempfile.NamedTemporaryFile(prefix="accord-stdin-", suffix=".jsonl")  # noqa: SIM115 (deleted when the program ends)
    shutil.copyfileobj(sys.stdin.buffer, file)
    file.flush()
    _keep_open.append(file)
    return Path(file.name)


_keep_open: list[Any] = []


# --- datasets ---


def _number(rows: Iterable[Any], name: str) -> Iterator[Row]:
    return (Row(value, f"{name}:{i}") for i, value in enumerate(rows, start=1))


def _load_folder(path: str, split: str | None, default_splits: Sequence[str]) -> Any:
    import datasets

    try:
        data = datasets.load_from_disk(path)
    except Exception as error:
        raise DataError(f"{path}: the folder written by `datasets` can't be read: {error}") from error
    if isinstance(data, datasets.DatasetDict):
        return _choose_split(data, split, default_splits, path)
    if split is not None:
        raise DataError(f"{path}: has no splits, but split {split!r} was asked for")
    return data


def _load_hub(name: str, split: str | None, default_splits: Sequence[str]) -> Any:
    import datasets

    try:
        data = datasets.load_dataset(name, split=split)
    except Exception as error:  # the library raises a dozen kinds, network errors among them
        reason = str(error).strip().splitlines()
        raise DataError(
            f"{name}: no such file or folder, and as a hub data set it can't be loaded{f' (split {split})' if split else ''}: "
            f"{reason[0] if reason else type(error).__name__}"
        ) from error
    return _choose_split(data, None, default_splits, name) if isinstance(data, datasets.DatasetDict) else data


def _choose_split(data: Any, split: str | None, default_splits: Sequence[str], name: str) -> Any:
    wanted = split or next((one for one in default_splits if one in data), None)
    if wanted is None and len(data) == 1:
        wanted = next(iter(data))
    if wanted not in data:
        raise DataError(
            f"{name}: has no split {wanted or ' or '.join(default_splits)}. It has: {', '.join(data)}. Choose with `split`."
        )
    return data[wanted]
