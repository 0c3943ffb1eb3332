"""Sources → records: every row read, found fit for what is needed, and what is not counted with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from accord.data.formats import RowError, UnusableError, check_roles, read_row
from accord.data.records import Demonstration, Messages, PlainText, Preference, Prompt, Record, Scored
from accord.data.sources import TRAIN_SPLITS, VALID_SPLITS, fingerprint, read_rows
from accord.errors import ConfigError, DataError

Need = Literal["demonstration", "preference", "scored", "prompt", "text"]
UNREADABLE = "unreadable"  # the reason for which a row is dropped only if data.on_bad_row says so
_FIRST_ORIGINS = 3  # how many origins a report names for each reason
_FIRST_ERRORS = 10
_KINDS: dict[type, str] = {
    Demonstration: "a demonstration",
    Preference: "a preference pair",
    Scored: "a scored answer",
    Prompt: "a prompt without an answer",
    PlainText: "plain text",
}
_NEEDED = {
    "demonstration": "demonstrations (messages that end with an assistant turn, or a prompt with a completion)",
    "preference": "preference pairs (prompt, chosen, rejected)",
    "scored": "scored answers (prompt, response, score)",
    "prompt": "prompts",
    "text": "plain text or demonstrations",
}


@dataclass
class SourceReport:
    """What became of one source's rows. `dropped` and `origins` by reason."""

    name: str
    read: int = 0
    used: int = 0
    cut: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    origins: dict[str, list[str]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)  # what is wrong with the first unreadable rows

    def drop(self, reason: str, origin: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        named = self.origins.setdefault(reason, [])
        if len(named) < _FIRST_ORIGINS:
            named.append(origin)

    def drops(self) -> str:
        """`3 empty answer (a.jsonl:4, a.jsonl:9, …), 1 too long (a.jsonl:2)`"""
        parts = []
        for reason, count in sorted(self.dropped.items(), key=lambda item: -item[1]):
            named = ", ".join(self.origins[reason]) + (", …" if count > len(self.origins[reason]) else "")
            parts.append(f"{count:,} {reason} ({named})")
        return ", ".join(parts)


@dataclass(frozen=True)
class SourceSpec:
    """One place to read from, with everything that decides what comes out of it."""

    path: Any  # path, hub id, "-", demo:NAME, or rows in memory
    name: str
    split: str | None = None
    max_rows: int | None = None
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    default_splits: Sequence[str] = TRAIN_SPLITS

    def fingerprint(self) -> str | None:
        """Of the content and of how it is read; None for rows in memory."""
        content = fingerprint(self.path, split=self.split, default_splits=self.default_splits)
        if content is None:
            return None
        return repr((content, self.name, self.split, self.max_rows, self.format, sorted(self.columns.items())))


def sources_of(data: Any, part: Literal["train", "valid"], dataset: Any = None) -> list[SourceSpec]:
    """The sources of `data.train` or `data.valid`; `dataset` (rows or a path given in code) takes their place.

    Raises ConfigError if there is no training data at all.
    """
    splits = TRAIN_SPLITS if part == "train" else VALID_SPLITS
    if dataset is not None:
        name = str(dataset) if isinstance(dataset, str | Path) else f"{part}_dataset"
        return [SourceSpec(dataset, name, None, None, data.format, dict(data.columns), splits)]
    given = getattr(data, part)
    if given is None:
        if part == "train":
            raise ConfigError("data.train: no training data is named. Set data.train to a file, a folder or a hub id.")
        return []
    specs = []
    for source in [given] if isinstance(given, str | Path | Mapping) or hasattr(given, "path") else given:
        if isinstance(source, str | Path):
            source = {"path": source}
        get = source.get if isinstance(source, Mapping) else lambda key, source=source: getattr(source, key, None)
        columns = get("columns")
        specs.append(
            SourceSpec(
                get("path"),
                str(get("path")),
                get("split"),
                get("max_rows"),
                get("format") or data.format,
                dict(data.columns if columns is None else columns),
                splits,
            )
        )
    return specs


def read_records(
    source: SourceSpec | str | Path | Iterable[Any],
    need: Need | None,
    *,
    on_bad_row: str = "fail",
    report: SourceReport | None = None,
    train_on: str = "assistant",
) -> Iterator[Record]:
    """The usable records of a source in its order, turned into what is needed (`need` None: as they come).

    Counts into `report`. Raises DataError for a source that can't be read or holds no row, and, unless `on_bad_row` is "drop", for
    the first row that can't be read.
    """
    if not isinstance(source, SourceSpec):
        source = SourceSpec(source, str(source) if isinstance(source, str | Path) else "rows")
    report = report if report is not None else SourceReport(source.name)
    rows = read_rows(source.path, split=source.split, default_splits=source.default_splits, name=source.name)
    for row in islice(rows, source.max_rows):
        report.read += 1
        try:
            if row.error is not None:
                raise RowError(row.error)
            record = _record(row.value, row.origin, source, report, need)
            reason = unusable(record, train_on)
            if reason:
                raise UnusableError(reason)
        except UnusableError as error:
            report.drop(str(error), row.origin)
        except RowError as error:
            reject(row.origin, str(error), on_bad_row, report)
        else:
            yield record
    if not report.read:
        raise DataError(f"{source.name}: is empty: there is no row in it.")


def reject(origin: str, message: str, on_bad_row: str, report: SourceReport) -> None:
    """A row that can't be read: count it, or raise DataError (ALGORITHMS §0.6)."""
    if on_bad_row != "drop":
        message = message if message.endswith((".", "!", "?")) else f"{message}."
        raise DataError(f"{origin}  {message} Fix the row, or set data.on_bad_row=drop to leave such rows out.")
    report.drop(UNREADABLE, origin)
    if len(report.errors) < _FIRST_ERRORS:
        report.errors.append(f"{origin}  {message}")


def _record(value: Any, origin: str, source: SourceSpec, report: SourceReport, need: Need | None) -> Record:
    record: Record
    row: Mapping[str, Any]
    if isinstance(value, Demonstration | Preference | Scored | Prompt | PlainText):
        record, name, row = value, "record", {}
    else:
        record, name, row = read_row(value, source.format, source.columns)
    report.formats[name] = report.formats.get(name, 0) + 1
    if not record.origin:
        record = replace(record, origin=origin)
    _check(record)
    return serve(record, need, row) if need is not None else record


def _check(record: Record) -> None:
    """Raises RowError for roles out of order and for text that is none."""
    for text in texts_of(record):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(f"holds half of a character (a lone surrogate) at position {error.start} of {text[:40]!a}") from None
    if isinstance(record, Demonstration):
        check_roles(record.messages, "assistant")
    elif isinstance(record, Prompt):
        check_roles(record.messages, "prompt")
    elif isinstance(record, Preference | Scored):
        check_roles(record.prompt, "prompt")


def texts_of(record: Record) -> Iterator[str]:
    """Every message, answer and document of a record."""
    if isinstance(record, PlainText):
        yield record.text
        return
    yield from (turn.content for turn in (record.messages if isinstance(record, Demonstration | Prompt) else record.prompt))
    if isinstance(record, Preference):
        yield from (record.chosen, record.rejected)
    elif isinstance(record, Scored):
        yield record.response


def serve(record: Record, need: Need, row: Mapping[str, Any] | None = None) -> Record:
    """`record` as what is needed; a richer record serves a poorer need. `row` may hold a prompt's `reference` and `meta`.

    Raises RowError if the record is too poor.
    """
    if need == "prompt" and not isinstance(record, PlainText):
        prompt = record if isinstance(record, Prompt) else record.as_prompt()
        return _with_extras(prompt, row or {})
    if need in ("demonstration", "text"):
        if isinstance(record, Demonstration | PlainText):
            return record
        if isinstance(record, Preference | Scored):
            return record.demonstration()
    if (need == "preference" and isinstance(record, Preference)) or (need == "scored" and isinstance(record, Scored)):
        return record
    columns = f" (its columns: {', '.join(map(str, row))}; data.columns says which is which)" if row else ""
    raise RowError(f"holds {_KINDS[type(record)]}{columns}, but here {_NEEDED[need]} are needed")


_FORMAT_COLUMNS = frozenset(
    [
        "messages",
        "prompt",
        "chosen",
        "rejected",
        "completion",
        "response",
        "conversations",
        "instruction",
        "input",
        "output",
        "history",
        "system",
        "tools",
        "user_input",
        "text",
        "score",
        "margin",
        "reference",
        "meta",
    ]
)


def _with_extras(prompt: Prompt, row: Mapping[str, Any]) -> Prompt:
    """A prompt's right answer and everything else the row says about it, for rule rewards."""
    reference = row.get("reference")
    if isinstance(reference, int | float) and not isinstance(reference, bool):
        reference = str(reference)
    if reference is not None and not isinstance(reference, str):
        raise RowError(f"reference: expected text, found {type(reference).__name__}")
    extras = {str(key): value for key, value in row.items() if key not in _FORMAT_COLUMNS and _plain(value)}
    meta = row.get("meta")
    if isinstance(meta, Mapping):
        extras |= meta
    return replace(prompt, reference=prompt.reference if reference is None else reference, meta={**prompt.meta, **extras})


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def unusable(record: Record, train_on: str = "assistant") -> str | None:
    """Why a readable record can't be trained on, or None."""
    if isinstance(record, PlainText):
        return None if record.text.strip() else "empty text"
    if isinstance(record, Prompt):
        return "empty prompt" if _blank(record.messages) else None
    if isinstance(record, Demonstration):
        answers = [turn.content for turn in record.messages if turn.role == "assistant"]
        prompt = record.messages[:-1]
        if not all(answer.strip() for answer in (answers[-1:] if train_on == "last" else answers)):
            return "empty answer"
    elif isinstance(record, Preference):
        prompt = record.prompt
        if not record.chosen.strip() or not record.rejected.strip():
            return "empty answer"
        if record.chosen.strip() == record.rejected.strip():
            return "identical answers"
    else:
        prompt = record.prompt
        if not record.response.strip():
            return "empty answer"
    return "empty prompt" if _blank(prompt) else None


def _blank(prompt: Messages) -> bool:
    return not any(turn.content.strip() for turn in prompt if turn.role != "system")
