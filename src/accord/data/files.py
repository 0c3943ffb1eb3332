"""Rows out of one file: JSON, JSON lines, CSV, text, Parquet and Arrow, plain or compressed, read piece by piece."""

from __future__ import annotations

import csv
import io
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from accord.errors import DataError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
COMPRESSIONS = (".gz", ".zst")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read. `error` says why it could not be (then `value` is None)."""

    value: Any
    origin: str
    error: str | None = None


def kind_of(path: Path) -> str | None:
    """The file's suffix without compression, if it is one that can be read."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES else None


def read_file(file: Path, label: str) -> Iterator[Row]:
    """The rows of a file that `kind_of` knows; `label` stands for it in origins (`label:line`).

    Raises DataError for a file that can't be read further; a single bad row comes with its `error`.
    """
    kind = kind_of(file)
    with readable(file, label):
        if kind in (".parquet", ".arrow"):
            yield from _read_columns(file, label, kind)
            return
        with _open(file) as stream:
            if kind in (".jsonl", ".ndjson"):
                yield from _read_json_lines(stream, label)
            elif kind == ".json":
                yield from _read_json(stream, label)
            elif kind == ".txt":
                yield from (Row({"text": text}, f"{label}:{number}") for number, text in _lines(stream, label) if text.strip())
            else:
                yield from _read_csv(stream, label, "\t" if kind == ".tsv" else ",")


@contextmanager
def readable(file: Path, label: str | None = None) -> Iterator[None]:
    """What goes wrong while a file is read, in words."""
    try:
        yield
    except (EOFError, zlib.error) as error:
        raise DataError(f"{label or file}: the compressed file is damaged or cut off: {error}") from error
    except OSError as error:
        raise DataError(f"{label or file}: can't be read: {error.strerror or error}") from error


@contextmanager
def _open(file: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed as they are read."""
    suffix = file.suffix.lower()
    if suffix == ".gz":
        import gzip

        with gzip.open(file) as stream:
            yield stream  # type: ignore[misc]
    elif suffix == ".zst":
        try:
            import zstandard  # noqa: F401
        except ImportError as error:
            raise DataError(f"{file}: reading .zst needs the package zstandard: pip install zstandard") from error
        with open(file, "rb") as raw:
            yield io.BufferedReader(_Zstandard(raw))
    else:
        with open(file, "rb") as stream:
            yield stream


class _Zstandard(io.RawIOBase):
    """The decompressed bytes of a .zst file of any number of frames; one that is cut off raises EOFError (zstandard's own reader just ends)."""

    def __init__(self, raw: IO[bytes]):
        self._raw = raw
        self._frame: Any = None  # the decompressor of the frame at hand
        self._ready = b""  # decompressed, not yet asked for

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        try:
            while not self._ready:
                left = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
                block = left or self._raw.read(_CHUNK)
                if not block:
                    if self._frame is not None and not self._frame.eof:
                        raise EOFError("the last frame is not complete")
                    return 0
                if self._frame is None or self._frame.eof:
                    self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._ready = self._frame.decompress(block)
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _lines(stream: IO[bytes], label: str) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends, from 1. Raises DataError where the bytes are not UTF-8."""
    for number, line in enumerate(stream, start=1):
        if number == 1:
            if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise _not_utf8(label, number, line, "UTF-16")
            line = line.removeprefix(b"\xef\xbb\xbf")
        try:
            yield number, line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise _not_utf8(label, number, line, _guess_encoding(line), error.start) from error


def _not_utf8(label: str, number: int, line: bytes, guess: str, at: int = 0) -> DataError:
    return DataError(
        f"{label}:{number}  is not UTF-8 (byte 0x{line[at]:02x} at position {at} of the line); it looks like {guess}. "
        f"Convert it first: iconv -f {guess} -t UTF-8"
    )


def _guess_encoding(line: bytes) -> str:
    """GB18030 if what it decodes to is mostly Chinese, else Windows-1252 (which decodes almost anything)."""
    try:
        text = line.decode("gb18030")
    except UnicodeDecodeError:
        return "WINDOWS-1252"
    foreign = [char for char in text if ord(char) > 127]
    return (
        "GB18030"
        if foreign and sum("\u3000" <= c <= "\u9fff" or "\uff00" <= c <= "\uffef" for c in foreign) > 0.6 * len(foreign)
        else "WINDOWS-1252"
    )


def _read_json_lines(stream: IO[bytes], label: str) -> Iterator[Row]:
    for number, line in _lines(stream, label):
        if line.strip():
            yield _json_row(line, f"{label}:{number}")


def _json_row(text: str, origin: str) -> Row:
    try:
        return Row(json.loads(text), origin)
    except json.JSONDecodeError as error:
        return Row(None, origin, f"is not JSON: {error.msg} at column {error.colno}: {_around(text, error.pos)}")
    except (RecursionError, ValueError) as error:
        return Row(None, origin, f"is not usable JSON: {_beyond_python(error)}")


def _beyond_python(error: Exception) -> str:
    """What is wrong with JSON that is written as it should be and still can't be read."""
    return "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def _around(text: str, position: int) -> str:
    shown = text[max(position - 20, 0) : position + 20]
    return repr(shown)


def _read_json(stream: IO[bytes], label: str) -> Iterator[Row]:
    """A JSON array, read element by element, or JSON lines under the name .json."""
    lines = (("\n" if number > 1 else "") + text for number, text in _lines(stream, label))
    buffer = ""
    for text in lines:
        buffer += text
        if buffer.strip():
            break
    first_line = 1 + buffer.count("\n")  # the line that the array or the first object begins on
    if buffer.lstrip().startswith("["):
        yield from _read_array(buffer, lines, label)
        return
    if not buffer.strip():
        return
    first = _json_row(buffer, f"{label}:{first_line}")
    if first.error is not None:  # one object over several lines, or no JSON at all
        whole = buffer + "".join(lines)
        try:
            yield Row(json.loads(whole), f"{label}:{first_line}")
        except json.JSONDecodeError as error:
            raise DataError(
                f"{label}:{error.lineno}  is not JSON: {error.msg} at column {error.colno}: {_around(whole, error.pos)}"
            ) from error
        except (RecursionError, ValueError) as error:
            raise DataError(f"{label}:{first_line}  is not usable JSON: {_beyond_python(error)}") from error
        return
    yield first
    for number, line in enumerate(lines, start=first_line + 1):
        if line.strip():
            yield _json_row(line, f"{label}:{number}")


def _read_array(buffer: str, lines: Iterator[str], label: str) -> Iterator[Row]:
    """The elements of an array without holding it whole. A row's line is where it begins."""
    decoder = json.JSONDecoder()
    position = buffer.index("[") + 1
    line = 1 + buffer.count("\n", 0, position)
    counted = position  # `line` is the line of this position
    ended = False
    separator = ""  # what must stand before the next element: nothing at first, then a comma

    def more() -> bool:
        """Read on by at least a chunk."""
        nonlocal buffer, position, counted, ended
        line_of_cut()
        buffer, position, counted = buffer[position:], 0, 0
        parts: list[str] = []
        size = 0
        while size < max(_CHUNK, len(buffer)):
            text = next(lines, None)
            if text is None:
                ended = True
                break
            parts.append(text)
            size += len(text)
        buffer += "".join(parts)
        return bool(parts)

    def line_of_cut() -> int:
        nonlocal line, counted
        line += buffer.count("\n", counted, position)
        counted = position
        return line

    def skip_white() -> str:
        """The next character that isn't white space ("" at the end of the file)."""
        nonlocal position
        while True:
            while position < len(buffer) and buffer[position].isspace():
                position += 1
            if position < len(buffer):
                return buffer[position]
            if ended or not more():
                return ""

    while True:
        char = skip_white()
        if char == "]":
            position += 1
            if skip_white():
                raise DataError(f"{label}:{line_of_cut()}  is not JSON: something follows the array: {_around(buffer, position)}")
            return
        if separator:
            if char != ",":
                raise DataError(
                    f"{label}:{line_of_cut()}  is not JSON: expected ',' or ']' {'but the file ends' if not char else ''}".rstrip()
                )
            position += 1
            if skip_white() == "]":
                raise DataError(f"{label}:{line_of_cut()}  is not JSON: a comma before the closing ']'")
        while True:
            try:
                value, end = decoder.raw_decode(buffer, position)
                if end == len(buffer) and not ended and more():  # a number might go on
                    continue
                break
            except json.JSONDecodeError as error:
                cut_off = len(buffer) - error.pos < 64 or error.msg.startswith("Unterminated string")
                if cut_off and not ended and more():
                    continue
                position = error.pos
                where = f"{label}:{line_of_cut()}"
                raise DataError(f"{where}  is not JSON: {error.msg}: {_around(buffer, error.pos)}") from error
            except (RecursionError, ValueError) as error:
                raise DataError(f"{label}:{line_of_cut()}  is not usable JSON: {_beyond_python(error)}") from error
        yield Row(value, f"{label}:{line_of_cut()}")
        position = end
        separator = ","


def _read_csv(stream: IO[bytes], label: str, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader((text + "\n" for _, text in _lines(stream, label)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    start = 1
    try:
        for fields in reader:
            origin, start = f"{label}:{start}", reader.line_num + 1
            if not fields:
                continue
            if header is None:
                header = [name.strip() for name in fields]
                if len(set(header)) < len(header):
                    raise DataError(f"{origin}  two columns have the same name: {', '.join(header)}")
            elif len(fields) != len(header):
                yield Row(None, origin, f"has {len(fields)} fields, the header has {len(header)}: {', '.join(header)}")
            else:
                yield Row(dict(zip(header, fields, strict=True)), origin)
    except csv.Error as error:
        raise DataError(f"{label}:{start}  is not CSV: {error}") from error


def _read_columns(file: Path, label: str, kind: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def batches() -> Iterator[Any]:
        source: Any = str(file)
        if file.suffix.lower() in COMPRESSIONS:  # these kinds are read from the end, so all of it is needed
            with _open(file) as stream:
                source = pa.BufferReader(stream.read())
        if kind == ".parquet":
            yield from pq.ParquetFile(source).iter_batches(1024)
            return
        opened = pa.memory_map(source) if isinstance(source, str) else source
        try:
            reader = pa.ipc.open_file(opened)
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pa.ArrowInvalid:  # `datasets` writes the streaming form
            opened.seek(0)
            yield from pa.ipc.open_stream(opened)

    number = 0
    try:
        for batch in batches():
            for value in batch.to_pylist():
                number += 1
                yield Row(value, f"{label}:{number}")
    except (pa.ArrowException, UnicodeDecodeError) as error:  # damaged text is only found when it is looked at
        raise DataError(f"{label}: is not a {kind} file that can be read: {error}") from error
