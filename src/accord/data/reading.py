"""Sources → records: every row read, found fit for what is needed, and what is not counted with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from accord.data.formats import RowError, UnusableError, check_roles, read_row
from accord.data.needs import EMPTY_ANSWER, IDENTICAL, Need, distinct_answers, serve
from accord.data.records import Demonstration, Labelled, Messages, PlainText, Preference, Prompt, Ranking, Record, Scored
from accord.data.sources import TRAIN_SPLITS, VALID_SPLITS, fingerprint, read_rows
from accord.errors import ConfigError, DataError

UNREADABLE = "unreadable"  # the reason for which a row is dropped only if data.on_bad_row says so
_FIRST_ORIGINS = 3  # how many origins a report names for each reason
_FIRST_ERRORS = 10


@dataclass
class SourceReport:
    """What became of one source's rows: `read` = `used` + all that are `dropped` (by reason, like `origins`)."""

    name: str
    read: int = 0
    used: int = 0  # rows that gave an example or more
    examples: int = 0
    partly: int = 0  # rows used without some of their answers or pairs
    cut: int = 0  # rows with an example that was cut to the limit
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


@dataclass(frozen=True, slots=True)
class Served:
    """What one row gave. `partly`: some of its answers were left out."""

    records: tuple[Record, ...]
    origin: str
    partly: bool = False


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
    """The usable records of a source in its order, turned into what is needed (`need` None: as they come). A row may give several.

    Counts into `report`; raises what `read_served` raises.
    """
    for served in read_served(source, need, on_bad_row=on_bad_row, report=report, train_on=train_on):
        yield from served.records


def read_served(
    source: SourceSpec | str | Path | Iterable[Any],
    need: Need | None,
    *,
    on_bad_row: str = "fail",
    report: SourceReport | None = None,
    train_on: str = "assistant",
) -> Iterator[Served]:
    """What each usable row of a source gives, in its order.

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
            served = _served(row.value, row.origin, source, report, need)
            for record in served.records:
                if reason := unusable(record, train_on):
                    raise UnusableError(reason)
        except UnusableError as error:
            report.drop(str(error), row.origin)
        except RowError as error:
            reject(row.origin, str(error), on_bad_row, report)
        else:
            yield served
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


def _served(value: Any, origin: str, source: SourceSpec, report: SourceReport, need: Need | None) -> Served:
    record: Record
    row: Mapping[str, Any]
    if isinstance(value, Record):
        record, name, row = value, "record", {}
    else:
        record, name, row = read_row(value, source.format, source.columns)
    report.formats[name] = report.formats.get(name, 0) + 1
    if not record.origin:
        record = replace(record, origin=origin)
    _check(record)
    partly = False
    if isinstance(record, Ranking) and need in ("ranking", "preference", None):
        thinner = distinct_answers(record)
        partly = len(thinner.responses) < len(record.responses)
        if need is None:
            record = thinner
    return Served((record,) if need is None else serve(record, need, row), record.origin, partly)


def _check(record: Record) -> None:
    """Raises RowError for roles out of order, for text that is none and for a ranking that is none."""
    if isinstance(record, Ranking):
        if len(record.responses) != len(record.ranks):
            raise RowError(
                f"expected one rank or score for each of the {len(record.responses)} answers, found {len(record.ranks)}"
            )
        if len(record.responses) < 2:
            raise RowError(f"expected two or more answers to rank, found {len(record.responses)}")
        if not all(math.isfinite(rank) for rank in record.ranks):
            raise RowError(f"ranks: expected finite numbers, found {list(record.ranks)}")
    for text in texts_of(record):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(f"holds half of a character (a lone surrogate) at position {error.start} of {text[:40]!a}") from None
    if isinstance(record, Demonstration):
        check_roles(record.messages, "assistant")
    elif isinstance(record, Prompt):
        check_roles(record.messages, "prompt")
    elif not isinstance(record, PlainText):
        check_roles(record.prompt, "prompt")


def texts_of(record: Record) -> Iterator[str]:
    """Every message, answer and document of a record."""
    if isinstance(record, PlainText):
        yield record.text
        return
    yield from (turn.content for turn in (record.messages if isinstance(record, Demonstration | Prompt) else record.prompt))
    if isinstance(record, Preference):
        yield from (record.chosen, record.rejected)
    elif isinstance(record, Ranking):
        yield from record.responses
    elif isinstance(record, Labelled | Scored):
        yield record.response


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
            return EMPTY_ANSWER
    elif isinstance(record, Preference):
        prompt = record.prompt
        if not record.chosen.strip() or not record.rejected.strip():
            return EMPTY_ANSWER
        if record.chosen.strip() == record.rejected.strip():
            return IDENTICAL
    elif isinstance(record, Ranking):  # what its answers lack, `serve` has said
        prompt = record.prompt
        if not record.responses:
            return EMPTY_ANSWER
    else:
        prompt = record.prompt
        if not record.response.strip():
            return EMPTY_ANSWER
    return "empty prompt" if _blank(prompt) else None


def _blank(prompt: Messages) -> bool:
    return not any(turn.content.strip() for turn in prompt if turn.role != "system")
