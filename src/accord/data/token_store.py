"""Tokenised examples on disk, memory-mapped: data larger than memory costs memory only for what is looked at."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from accord.data.records import Demonstration, Labelled, Message, PlainText, Preference, Prompt, Ranking, Record, Scored
from accord.data.trees import Segment, Tree

VERSION = 2  # raise it when the same data would be stored otherwise
_ARRAYS: dict[str, Any] = {
    "tokens": np.int32,  # all segments' tokens, one after the other
    "trained": np.bool_,
    "lengths": np.int64,  # of each segment
    "parents": np.int32,  # of each segment, within its tree
    "counts": np.int64,  # segments of each example
    "labels": np.float64,  # all examples' labels, one after the other
    "label_counts": np.int64,  # labels of each example
    "groups": np.uint64,  # hash of each example's prompt
    "keys": np.uint64,  # hash of each whole example
    "texts": np.uint8,  # JSON of origin and record, one after the other
    "text_lengths": np.int64,
}


def _remove_leftovers(cache: Path) -> None:
    """What a killed process had begun to write there: nobody has written to it for a day."""
    for folder in cache.glob(".tokens-*"):
        with suppress(OSError):  # another process may be faster
            written = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - written > 24 * 3600:
                shutil.rmtree(folder, ignore_errors=True)


class StoreWriter:
    """Writes examples one by one into a folder beside `target` and renames it when it is whole."""

    def __init__(self, target: Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.parent)
        self.target = target
        self.folder = Path(tempfile.mkdtemp(prefix=".tokens-", dir=target.parent))
        self._files = {name: open(self.folder / f"{name}.bin", "wb") for name in _ARRAYS}  # noqa: SIM115
        self.size = 0

    def add(self, tree: Tree, labels: tuple[float, ...] | None, record: Record, origin: str, group: int, key: int) -> None:
        """Append one example."""
        for segment in tree.segments:
            self._write("tokens", segment.tokens)
            self._write("trained", segment.trained)
        self._write("lengths", [len(segment) for segment in tree.segments])
        self._write("parents", [segment.parent for segment in tree.segments])
        self._write("counts", [len(tree.segments)])
        self._write("labels", labels or ())
        self._write("label_counts", [len(labels or ())])
        self._write("groups", [group])
        self._write("keys", [key])
        kept = None if isinstance(record, PlainText) else {"kind": type(record).__name__, **asdict(record)}
        text = json.dumps([origin, kept], ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")  # a date in `meta` …
        self._files["texts"].write(text)
        self._write("text_lengths", [len(text)])
        self.size += 1

    def _write(self, name: str, values: Any) -> None:
        self._files[name].write(np.asarray(values, dtype=_ARRAYS[name]).tobytes())

    def finish(self, report: dict[str, Any]) -> TokenStore:
        """Close, put in place and open. Another process may have been faster: then its copy is used."""
        for file in self._files.values():
            file.close()
        sizes = {name: (self.folder / f"{name}.bin").stat().st_size for name in _ARRAYS}
        (self.folder / "meta.json").write_text(
            json.dumps({"version": VERSION, "sizes": sizes, "report": report}), encoding="utf-8"
        )
        try:
            os.rename(self.folder, self.target)
        except OSError:
            if not TokenStore.is_whole(self.target):
                shutil.rmtree(self.target, ignore_errors=True)
                os.rename(self.folder, self.target)
            else:
                shutil.rmtree(self.folder, ignore_errors=True)
        return TokenStore(self.target)

    def discard(self) -> None:
        """Leave nothing behind."""
        for file in self._files.values():
            with suppress(OSError):  # on a full disk what is still to be flushed can't be
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class TokenStore:
    """Examples in a folder written by StoreWriter."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.report: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["report"]
        self._tokens, self._trained, self._texts = (self._map(name) for name in ("tokens", "trained", "texts"))
        self.lengths, self.parents, self._labels, self.groups, self.keys = (
            np.array(self._map(name)) for name in ("lengths", "parents", "labels", "groups", "keys")
        )
        counts = np.array(self._map("counts"))
        self.first_segment = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._segment_start = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self._label_start = np.concatenate([[0], np.cumsum(self._map("label_counts"))]).astype(np.int64)
        self._text_start = np.concatenate([[0], np.cumsum(self._map("text_lengths"))]).astype(np.int64)

    @staticmethod
    def is_whole(folder: Path) -> bool:
        """Whether the folder holds all that its meta.json promises."""
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            return meta["version"] == VERSION and all(
                (folder / f"{name}.bin").stat().st_size == meta["sizes"][name] for name in _ARRAYS
            )
        except (OSError, ValueError, KeyError):
            return False

    def _map(self, name: str) -> np.ndarray:
        path = self.folder / f"{name}.bin"
        if not path.stat().st_size:
            return np.empty(0, dtype=_ARRAYS[name])
        return np.memmap(path, dtype=_ARRAYS[name], mode="r")

    def __len__(self) -> int:
        return len(self.keys)

    def tree(self, index: int) -> Tree:
        segments = []
        for number in range(self.first_segment[index], self.first_segment[index + 1]):
            start, end = self._segment_start[number], self._segment_start[number + 1]
            segments.append(
                Segment(np.array(self._tokens[start:end]), np.array(self._trained[start:end]), int(self.parents[number]))
            )
        return Tree(tuple(segments))

    def labels(self, index: int) -> tuple[float, ...] | None:
        """None where the example has none."""
        start, end = self._label_start[index], self._label_start[index + 1]
        return tuple(self._labels[start:end].tolist()) if end > start else None

    def text(self, index: int) -> tuple[str, Record | None]:
        """Origin and record."""
        start, end = self._text_start[index], self._text_start[index + 1]
        origin, kept = json.loads(self._texts[start:end].tobytes().decode("utf-8", "surrogatepass"))
        return origin, None if kept is None else _record(kept)

    def num_tokens(self) -> np.ndarray:
        """[n] tokens that each example computes."""
        return self._segment_start[self.first_segment[1:]] - self._segment_start[self.first_segment[:-1]]

    def longest(self) -> np.ndarray:
        """[n] length of each example's longest sequence: its root and its longest leaf (trees here are at most two deep)."""
        out = np.zeros(len(self), dtype=np.int64)
        for i in range(len(self)):
            first, end = self.first_segment[i], self.first_segment[i + 1]
            lengths, parents = self.lengths[first:end], self.parents[first:end]
            out[i] = max(lengths[k] + (lengths[parents[k]] if parents[k] >= 0 else 0) for k in range(end - first))
        return out

    def num_trained(self) -> int:
        """Tokens that are targets of the loss."""
        return int(np.count_nonzero(self._trained))


_RECORDS: dict[str, Any] = {kind.__name__: kind for kind in (Demonstration, Preference, Ranking, Labelled, Scored, Prompt)}


def _record(kept: dict[str, Any]) -> Record:
    kind = _RECORDS[kept.pop("kind")]
    for name in ("messages", "prompt"):
        if name in kept:
            kept[name] = tuple(Message(**turn) for turn in kept[name])
    for name in ("responses", "ranks"):
        if name in kept:
            kept[name] = tuple(kept[name])
    record: Record = kind(**kept)
    return record
