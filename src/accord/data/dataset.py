"""Training and validation examples: records tokenised once, kept on disk, split by prompt."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from accord.data.fitting import TOO_LONG, fit
from accord.data.formats import UnusableError
from accord.data.needs import Need
from accord.data.reading import (
    UNREADABLE,
    Served,
    SourceReport,
    SourceSpec,
    read_records,
    read_served,
    reject,
    sources_of,
    texts_of,
)
from accord.data.records import Demonstration, Labelled, Messages, PlainText, Preference, Prompt, Ranking, Record, Scored
from accord.data.template import ConversationEncoder, TrainOn
from accord.data.token_store import VERSION, StoreWriter, TokenStore
from accord.data.trees import Tree
from accord.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Example:
    """What a loss is computed on. `labels` depend on the need: see `labels_for`."""

    tree: Tree
    labels: tuple[float, ...] | None = None
    record: Record | None = None
    origin: str = ""


class ExampleList(Sequence[Example]):
    """Examples of a store, read when they are asked for."""

    def __init__(self, store: TokenStore, indices: np.ndarray):
        self.store, self.indices = store, indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> ExampleList: ...
    def __getitem__(self, index: int | slice) -> Example | ExampleList:
        if isinstance(index, slice):
            return ExampleList(self.store, self.indices[index])
        i = int(self.indices[index])
        origin, record = self.store.text(i)
        return Example(self.store.tree(i), self.store.labels(i), record, origin)

    def num_tokens(self) -> np.ndarray:
        """[n] tokens that each example computes (a shared prompt once)."""
        sizes: np.ndarray = self.store.num_tokens()[self.indices]
        return sizes


@dataclass(frozen=True)
class Report:
    """What was read, used and left out, by source, and how large it is in tokens."""

    train: tuple[SourceReport, ...]
    valid: tuple[SourceReport, ...]
    train_examples: int
    valid_examples: int
    tokens: int
    trained_tokens: int

    def summary(self) -> str:
        """A few lines to print."""
        lines = [
            f"{self.train_examples:,} training and {self.valid_examples:,} validation examples, "
            f"{self.tokens:,} tokens ({self.trained_tokens / max(self.tokens, 1):.0%} trained on)"
        ]
        for report in (*self.train, *self.valid):
            line = f"{report.name}: {report.used:,} of {report.read:,} rows ({', '.join(report.formats)})"
            if report.examples != report.used:
                line += f", {report.examples:,} examples"
            if report.partly:
                line += f", without some of their answers: {report.partly:,}"
            if report.dropped:
                line += f", left out: {report.drops()}"
            if report.cut:
                line += f", cut: {report.cut:,}"
            lines.append(line)
        return "\n".join(lines)


@dataclass(frozen=True)
class Examples:
    """`train` and `valid` are sequences of Example, read from disk when asked for."""

    train: ExampleList
    valid: ExampleList
    report: Report


def load_examples(
    data: Any,
    encoder: ConversationEncoder,
    need: Need,
    *,
    seed: int,
    max_length: int,
    train_dataset: Any = None,
    valid_dataset: Any = None,
    train_on: TrainOn | str = "assistant",
) -> Examples:
    """The examples of `data.train` and `data.valid` (or of rows given in code) for what a stage needs.

    Without `data.valid`, `data.holdout` of the prompts is kept for validation: whole prompts, chosen by `seed`, at least one and never all.
    Raises DataError for data that can't be read, unreadable rows (unless `data.on_bad_row` is "drop"), and when nothing is left;
    ConfigError when no data is named.
    """
    options = Options(need, max_length, data.truncate, data.on_bad_row, str(train_on))
    valid_sources = sources_of(data, "valid", valid_dataset)
    train_sources = sources_of(data, "train", train_dataset)
    store = store_of(train_sources, encoder, options, data.cache)
    _check_not_empty(store)
    everything = np.arange(len(store))
    if valid_sources:
        valid_store = store_of(valid_sources, encoder, options, data.cache)
        _check_not_empty(valid_store)
        train, valid = ExampleList(store, everything), ExampleList(valid_store, np.arange(len(valid_store)))
    else:
        held = held_out(store.groups, float(data.holdout or 0), seed)
        train, valid = ExampleList(store, everything[~held]), ExampleList(store, everything[held])
    stores = [store] + ([valid.store] if valid_sources else [])
    report = Report(
        train=source_reports(store),
        valid=source_reports(valid.store) if valid_sources else (),
        train_examples=len(train),
        valid_examples=len(valid),
        tokens=sum(int(s.lengths.sum()) for s in stores),
        trained_tokens=sum(s.num_trained() for s in stores),
    )
    for source in (*report.train, *report.valid):
        if source.dropped or source.cut or source.partly:
            cut = f"; {source.cut:,} cut to data.max_length" if source.cut else ""
            partly = f"; {source.partly:,} without some of their answers" if source.partly else ""
            log.warning(
                "%s: %s of %s rows are used; left out: %s%s%s",
                source.name,
                f"{source.used:,}",
                f"{source.read:,}",
                source.drops() or "none",
                partly,
                cut,
            )
    return Examples(train, valid, report)


def held_out(groups: np.ndarray, share: float, seed: int) -> np.ndarray:
    """[n] bool: which examples are kept for validation. Those of one group are on one side.

    Groups are taken in an order that depends on `seed` and the group alone, until round(share · n) examples are reached: at least one
    group if share > 0 and there are two, and never all of them.
    """
    held = np.zeros(len(groups), dtype=bool)
    unique, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    if share <= 0 or len(unique) < 2:
        return held
    ranks = [hashlib.blake2b(f"{seed}:{group}".encode(), digest_size=8).digest() for group in unique.tolist()]
    target, taken = max(1, round(share * len(groups))), 0
    chosen = np.zeros(len(unique), dtype=bool)
    for number in sorted(range(len(unique)), key=ranks.__getitem__)[: len(unique) - 1]:
        if taken >= target:
            break
        if taken and taken + counts[number] > target + max(target // 2, 1):  # a huge group would take far more than the share
            continue
        chosen[number] = True
        taken += int(counts[number])
    return chosen[inverse]


def corpus(data: Any, train_dataset: Any = None) -> Iterator[str]:
    """Every message and document of the training data as text, for training a tokenizer."""
    for source in sources_of(data, "train", train_dataset):
        for record in read_records(source, None, on_bad_row=data.on_bad_row):
            yield from texts_of(record)


# --- from sources to a store ---


@dataclass(frozen=True)
class Options:
    """What decides, beside the sources and the encoder, what an example becomes."""

    need: Need
    max_length: int
    truncate: Any
    on_bad_row: str
    train_on: str


def store_of(sources: Sequence[SourceSpec], encoder: ConversationEncoder, options: Options, cache: bool) -> TokenStore:
    """The examples of `sources`, from the cache if they are there."""
    parts = [source.fingerprint() for source in sources]
    if not cache or any(part is None for part in parts):
        return _temporary(sources, encoder, options)
    key = hashlib.blake2b(
        repr([VERSION, parts, encoder.fingerprint(), replace(options, on_bad_row="")]).encode(), digest_size=16
    ).hexdigest()
    folder = cache_folder() / "tokens" / key
    if TokenStore.is_whole(folder):
        store = TokenStore(folder)
        if options.on_bad_row == "drop" or not any(UNREADABLE in report.dropped for report in source_reports(store)):
            return store
        return _temporary(sources, encoder, options)  # ends with the first bad row's message
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        writer = StoreWriter(folder)
    except OSError as error:
        log.warning(
            "The cache %s can't be written (%s); the data is tokenised again every time.", folder.parent, error.strerror or error
        )
        return _temporary(sources, encoder, options)
    return _fill(writer, sources, encoder, options)


def _temporary(sources: Sequence[SourceSpec], encoder: ConversationEncoder, options: Options) -> TokenStore:
    """A store that goes with the object."""
    import weakref

    folder = Path(tempfile.mkdtemp(prefix="accord-tokens-"))
    try:
        store = _fill(StoreWriter(folder / "store"), sources, encoder, options)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(store, shutil.rmtree, folder, True)
    return store


def _fill(writer: StoreWriter, sources: Sequence[SourceSpec], encoder: ConversationEncoder, options: Options) -> TokenStore:
    reports = []
    try:
        for source in sources:
            report = SourceReport(source.name)
            reports.append(report)
            for served in read_served(
                source, options.need, on_bad_row=options.on_bad_row, report=report, train_on=options.train_on
            ):
                _add(writer, served, encoder, options, report)
        return writer.finish({"sources": [asdict(report) for report in reports]})
    except OSError as error:
        writer.discard()
        raise DataError(
            f"{writer.target.parent}: the tokenised data can't be written ({error.strerror or error}). Free some space and start the "
            "same command again, or set the variable ACCORD_CACHE to a folder that has more."
        ) from error
    except BaseException:
        writer.discard()
        raise


def _add(writer: StoreWriter, served: Served, encoder: ConversationEncoder, options: Options, report: SourceReport) -> None:
    """The examples of one row. It is left out only if none of its records fits."""
    fitted: list[tuple[Tree, Record, bool]] = []
    reasons = []
    partly = served.partly
    for record in served.records:
        try:
            tree, kept, cut = fit(encoder, record, options.max_length, options.truncate, options.train_on)  # type: ignore[arg-type]
        except UnusableError as error:
            reasons.append(str(error))
        except DataError as error:  # the template refuses it
            reject(served.origin, str(error), options.on_bad_row, report)
            return
        else:
            fitted.append((tree, kept, cut))
            partly |= isinstance(record, Ranking) and len(tree.leaves) < len(record.responses)
    if not fitted:
        report.drop(reasons[0], served.origin)
        return
    for tree, kept, _ in fitted:
        writer.add(tree, labels_for(kept, options.need), kept, served.origin, prompt_hash(kept), record_hash(kept))
    report.used += 1
    report.examples += len(fitted)
    report.partly += partly or bool(reasons)
    report.cut += any(cut for _, _, cut in fitted)


def labels_for(record: Record, need: Need) -> tuple[float, ...] | None:
    """What the loss is told about an example.

    preference: (margin,) where it is known. ranking: one rank for each answer, the lower is better. labelled: one for each answer,
    1 desirable, 0 not; a pair's are (1, 0). scored: (score,). Otherwise none.
    """
    if isinstance(record, Preference):
        if need == "labelled":
            return (1.0, 0.0)
        return None if record.margin is None else (record.margin,)
    if isinstance(record, Ranking):
        return record.ranks
    if isinstance(record, Labelled):
        return (float(record.desirable),)
    return (record.score,) if isinstance(record, Scored) else None


def _check_not_empty(store: TokenStore) -> None:
    """Raises DataError saying why, if every row was left out."""
    if len(store):
        return
    reports = source_reports(store)
    reasons = "; ".join(f"{report.name}: {report.drops()}" for report in reports)
    too_long = all(set(report.dropped) <= {TOO_LONG} for report in reports)
    cure = "Raise data.max_length or set data.truncate." if too_long else "Fix the rows."
    errors = [error for report in reports for error in report.errors[:1]]
    raise DataError(
        "\n  ".join([f"nothing is left of {sum(report.read for report in reports):,} rows. {reasons}. {cure}", *errors])
    )


def source_reports(store: TokenStore) -> tuple[SourceReport, ...]:
    """What became of the rows of each source when the store was made."""
    return tuple(SourceReport(**report) for report in store.report["sources"])


def cache_folder() -> Path:
    """`$ACCORD_CACHE`, or ~/.cache/accord."""
    return Path(os.environ.get("ACCORD_CACHE") or Path.home() / ".cache" / "accord")


# --- what counts as the same ---


def prompt_hash(record: Record) -> int:
    """Of the prompt: what decides the side of the split."""
    if isinstance(record, PlainText):
        return _hash(record.text)
    if isinstance(record, Demonstration):
        return _hash(_plain(record.messages[:-1]))
    return _hash(_plain(record.messages if isinstance(record, Prompt) else record.prompt))


def record_hash(record: Record) -> int:
    """Of everything that is trained on."""
    if isinstance(record, PlainText):
        return _hash(record.text)
    if isinstance(record, Demonstration | Prompt):
        return _hash(_plain(record.messages))
    answers: list[Any]
    if isinstance(record, Preference):
        answers = [record.chosen, record.rejected]
    elif isinstance(record, Ranking):
        answers = [record.responses, record.ranks]
    else:
        answers = [record.response, record.desirable if isinstance(record, Labelled) else record.score]
    return _hash([_plain(record.prompt), answers])


def _plain(messages: Messages) -> list[list[str]]:
    return [[turn.role, turn.content.strip()] for turn in messages]


def _hash(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest(), "little")
