"""Writing a run's files so that a reader never sees half of one."""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accord.errors import AccordError, UserError

LARGEST_DRAWN = 1e100  # what is computed in float32 is far below; above, sums, squares and axes leave the range of a float


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numbers of numpy and torch become Python's, what is not finite becomes None."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # a numpy or torch number or array
        return plain(value.tolist())
    return str(value)


def json_line(value: Any) -> bytes:
    """One line of UTF-8 JSON, always valid: no NaN, no Infinity, and lone surrogates are escaped."""
    value = plain(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for separator in "\x85\u2028\u2029":  # JSON allows them raw, but many readers of lines would break there
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=True, allow_nan=False).encode("utf-8") + b"\n"


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside, fsync, rename: `path` holds the old bytes or the new ones, never a part.

    Raises AccordError with the file and the reason when the disk refuses (full, read-only).
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise AccordError(
            f"{path}: cannot write it ({error.strerror or error}). Free some space or choose another run.dir."
        ) from error


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut, where the system can (a folder cannot be opened on Windows)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file of a run; a missing file is empty, a torn last line (a killed writer) is left out.

    Raises UserError with the file and the reason where it cannot be read: a folder has its name, permission is missing.
    """
    if not path.exists():
        return []
    rows = []
    try:
        with open(path, "rb") as file:
            for line in file:
                row = parse_line(line)
                if row is not None:
                    rows.append(row)
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror or error}). Restore it, or move it away.") from error
    return rows


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object on a whole line, or None for a torn or foreign one."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the latter for brackets thousands deep
        return None
    return row if isinstance(row, dict) else None


def step_of(row: Mapping[str, Any]) -> int | None:
    """The step that a row is of; None where it has none, as after an edit by hand."""
    step = row.get("step")
    return step if type(step) is int and 0 <= step <= sys.maxsize else None


def number_of(row: Mapping[str, Any], name: str) -> float | None:
    """The number that a row has under `name`; None for what is none, is not finite, or is too large to be drawn (1e100)."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= LARGEST_DRAWN else None
