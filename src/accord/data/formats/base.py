"""What the formats share: the registry, detection, and readers of single fields that say what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from accord.data.records import Message, Messages, Record


class RowError(ValueError):
    """The row can't be read (ends the run unless `data.on_bad_row: drop`)."""


class UnusableError(ValueError):
    """The row can be read but not trained on (dropped and counted). The message is the reason."""


Reader = Callable[[Mapping[str, Any]], Record]


@dataclass(frozen=True)
class Format:
    """One shape of rows. `columns`: the keys that a row of this shape has; alternatives are tuples."""

    name: str
    read: Reader
    columns: tuple[tuple[str, ...], ...]
    looks_like: Callable[[Mapping[str, Any]], bool]

    def missing(self, row: Mapping[str, Any]) -> list[str]:
        """What is missing from the alternative that the row comes nearest to."""
        gaps = [[column for column in columns if row.get(column) is None] for columns in self.columns]
        return min(gaps, key=len)


FORMATS: dict[str, Format] = {}


def register(
    name: str, *alternatives: Sequence[str], looks_like: Callable[[Mapping[str, Any]], bool] = lambda row: True
) -> Callable[[Reader], Reader]:
    """Register `read` as the format `name`. Each of `alternatives` is a set of keys that makes a row one of this format."""

    def add(read: Reader) -> Reader:
        FORMATS[name] = Format(name, read, tuple(tuple(columns) for columns in alternatives), looks_like)
        return read

    return add


def detect(row: Mapping[str, Any]) -> Format:
    """The first registered format whose keys the row has. Raises RowError naming the columns found and the nearest format."""
    for form in FORMATS.values():
        if not form.missing(row) and form.looks_like(row):
            return form
    found = ", ".join(map(str, row)) or "none"
    nearest, missing = _nearest(row, lacking=True)
    raise RowError(
        f"no known format has these columns. Found: {found}. Nearest format: {nearest.name}, which also needs {', '.join(missing)}."
        f"{_rename_hint(missing, row)} Map columns with data.columns={{{missing[0]}: <your column>}} or name the format with data.format."
    )


def read_row(row: Any, format_name: str, columns: Mapping[str, str]) -> tuple[Record, str, Mapping[str, Any]]:
    """The record of a row, the name of its format ("auto": found by the keys) and the row as the format saw it. `columns` maps a format's key to the row's column.

    Raises RowError (unreadable) or UnusableError (readable, of no use).
    """
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object with columns, found {_kind(row)}")
    if columns:
        row = _mapped(row, columns)
    form = detect(row) if format_name == "auto" else named(format_name)
    missing = form.missing(row)
    if missing:
        nearest, _ = _nearest(row)
        raise RowError(
            f"missing column {', '.join(missing)} of the format {form.name}. Found: {', '.join(map(str, row)) or 'none'}."
            f"{_rename_hint(missing, row)} Nearest format: {nearest.name}. Map columns with data.columns={{{missing[0]}: <your column>}}."
        )
    return form.read(row), form.name, row


def named(name: str) -> Format:
    """Raises RowError for an unknown name."""
    if name not in FORMATS:
        near = get_close_matches(name, FORMATS, n=1)
        raise RowError(
            f"data.format: no format {name!r}."
            + (f" Did you mean {near[0]}?" if near else f" Known: auto, {', '.join(FORMATS)}.")
        )
    return FORMATS[name]


def _nearest(row: Mapping[str, Any], lacking: bool = False) -> tuple[Format, list[str]]:
    """The format of which most is there, then the one that lacks least, and what it lacks. `lacking`: not one that lacks nothing."""

    def score(form: Format, columns: tuple[str, ...]) -> tuple[int, int, bool]:
        there = sum(row.get(column) is not None for column in columns)
        return -there, len(columns) - there, form.name != "messages"

    candidates = [(score(form, columns), form, columns) for form in FORMATS.values() for columns in form.columns]
    _, form, columns = min((one for one in candidates if one[0][1] or not lacking), key=lambda item: item[0])
    return form, [column for column in columns if row.get(column) is None]


def _rename_hint(missing: Sequence[str], row: Mapping[str, Any]) -> str:
    for column in missing:
        near = get_close_matches(column, [str(key) for key in row], n=1)
        if near:
            return f" Is {near[0]} meant to be {column}?"
    return ""


def _mapped(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    absent = [column for column in columns.values() if column not in row]
    if absent:
        raise RowError(f"data.columns names the column {', '.join(absent)}, which is missing. Found: {', '.join(map(str, row))}.")
    taken = set(columns.values())
    return {key: value for key, value in row.items() if key not in taken} | {
        target: row[column] for target, column in columns.items()
    }


# --- single fields ---


def text(row: Mapping[str, Any], column: str) -> str:
    """A string, empty ones included. Raises RowError for anything else."""
    value = row.get(column)
    if not isinstance(value, str):
        raise RowError(f"{column}: expected text, found {_kind(value)}")
    return value


def optional_text(row: Mapping[str, Any], column: str) -> str:
    """A string, or "" where the column is missing or null."""
    return "" if row.get(column) is None else text(row, column)


def number(value: Any, column: str) -> float:
    """A finite number (from CSV also as text). Raises RowError for NaN, infinities, booleans and other text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise RowError(f"{column}: expected a number, found {value!r}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f"{column}: expected a number, found {_kind(value)}")
    try:
        value = float(value)
    except OverflowError:  # an integer beyond the largest float
        value = math.inf
    if not math.isfinite(value):
        raise RowError(f"{column}: expected a finite number, found {value}")
    return value


def optional_number(row: Mapping[str, Any], column: str) -> float | None:
    value = row.get(column)
    return None if value is None or value == "" else number(value, column)


_WORDS = {"true": True, "1": True, "false": False, "0": False}


def optional_label(row: Mapping[str, Any], column: str) -> bool | None:
    """true or false, 1 or 0 (from CSV also as text); None where it is missing, null or empty. Raises RowError for anything else."""
    value = row.get(column)
    if value is None or value == "":
        return None
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    shown = repr(value) if isinstance(value, str | int | float) else _kind(value)
    raise RowError(
        f"{column}: expected true or false (or 1, 0) for whether the answer is wanted, found {shown}; "
        "rename the column if it says something else"
    )


def ranks_of_scores(scores: Sequence[float]) -> tuple[float, ...]:
    """Higher is better: 0 for the highest score, 1 for the next lower one …; equal scores are ties."""
    places = {score: float(place) for place, score in enumerate(sorted(set(scores), reverse=True))}
    return tuple(places[score] for score in scores)


_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}


def message(value: Any, column: str) -> Message:
    """One turn: {"role", "content"} or {"from", "value"}."""
    if not isinstance(value, Mapping):
        raise RowError(f"{column}: expected a turn with role and content, found {_kind(value)}")
    role = value.get("role", value.get("from"))
    if not isinstance(role, str) or role not in _ROLES:
        raise RowError(f"{column}: unknown role {role!r}. Known: {', '.join(_ROLES)}.")
    if value.get("tool_calls"):
        raise RowError(f"{column}: tool calls beside the text are not supported; write them into the content")
    return Message(_ROLES[role], _content(value.get("content", value.get("value")), column))


def message_list(value: Any, column: str) -> Messages:
    """Raises RowError if it is no list of turns."""
    if not isinstance(value, list | tuple):
        raise RowError(f"{column}: expected a list of turns, found {_kind(value)}")
    return tuple(message(item, f"{column}[{i}]") for i, item in enumerate(value))


def _content(value: Any, column: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)  # the OpenAI way of writing text
    if not isinstance(value, str):
        raise RowError(f"{column}: expected the content to be text, found {_kind(value)}")
    return value


def check_roles(messages: Messages, ends_with: str) -> None:
    """An optional system turn, then user first and no two turns of one side in a row, `assistant` or `prompt` at the end.

    Tool results stand between assistant turns. Raises RowError naming the first turn out of order.
    """
    before = "start"
    allowed = {
        "start": ("system", "user"),
        "system": ("user",),
        "user": ("assistant",),
        "assistant": ("user", "tool"),
        "tool": ("assistant", "tool"),
    }
    for i, turn in enumerate(messages):
        if turn.role not in allowed[before]:
            after = "at the start" if before == "start" else f"after {before}"
            raise RowError(f"roles out of order: turn {i + 1} is {turn.role} {after}, expected {' or '.join(allowed[before])}")
        before = turn.role
    if ends_with == "assistant" and before != "assistant":
        raise RowError(f"roles out of order: the conversation ends with {before}, expected an assistant turn")
    if ends_with == "prompt" and before not in ("user", "tool"):
        raise RowError(f"roles out of order: the prompt ends with {before}, expected a user turn")


def with_system(system: str, messages: Messages) -> Messages:
    return (Message("system", system), *messages) if system else messages


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    names = {
        bool: "true/false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        tuple: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)
