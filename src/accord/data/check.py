"""What will be trained on, before it is: counts, drops, lengths, duplicates, overlaps, and examples with the loss mask in colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from accord.data.dataset import (
    Example,
    ExampleList,
    Options,
    held_out,
    labels_for,
    prompt_hash,
    record_hash,
    source_reports,
    store_of,
)
from accord.data.needs import Need
from accord.data.reading import UNREADABLE, SourceReport, SourceSpec, read_records, read_served, texts_of
from accord.data.records import Demonstration, Labelled, PlainText, Preference, Prompt, Ranking, Record, Scored
from accord.data.template import ConversationEncoder
from accord.data.trees import Segment
from accord.errors import DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_BINS = 10
_LABELS_SAID = ("ranking", "labelled")  # needs whose labels are counted
_NEED_OF: dict[type, Need] = {
    Demonstration: "demonstration",
    Preference: "preference",
    Ranking: "ranking",
    Labelled: "labelled",
    Scored: "scored",
    Prompt: "prompt",
    PlainText: "text",
}


@dataclass(frozen=True)
class Part:
    """One side (training or validation) as it would be used. Lengths are tokens, or characters where there is no tokenizer."""

    reports: tuple[SourceReport, ...]
    groups: np.ndarray  # [n] hash of the prompt
    keys: np.ndarray  # [n] hash of the whole example
    lengths: np.ndarray  # [n] of the longest sequence
    sizes: np.ndarray  # [n] tokens that the example computes
    labels: tuple[tuple[float, ...], ...] = ()  # of rankings and labelled answers, by example
    trained: int = 0
    examples: ExampleList | None = None


@dataclass
class Check:
    """The result. `errors` would end a run; `warnings` would not."""

    title: str
    need: Need
    train: Part
    valid: Part | None
    limit: int
    unit: str
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    held: int = 0


@dataclass(frozen=True)
class Limits:
    """What the training loop asks of the data."""

    batch_size: int
    max_tokens: int
    holdout: float
    seed: int


def kind_of_source(source: SourceSpec) -> Need:
    """What the source's first readable row can be used for at most. Raises DataError if no row can be read."""
    report = SourceReport(source.name)
    for record in read_records(source, None, on_bad_row="drop", report=report):
        return _NEED_OF[type(record)]
    if report.errors:
        raise DataError("\n".join(report.errors))
    raise DataError(f"{source.name}: no usable row among {report.read:,}: {report.drops()}.")


def check_data(
    title: str,
    train: Sequence[SourceSpec],
    valid: Sequence[SourceSpec],
    encoder: ConversationEncoder | None,
    options: Options,
    limits: Limits,
    *,
    cache: bool = True,
) -> Check:
    """Read everything as training would, going on after rows that would end it. Without an encoder only the text is looked at.

    Raises DataError for a source that can't be read at all.
    """
    lenient = Options(options.need, options.max_length, options.truncate, "drop", options.train_on)
    parts = [_part(sources, encoder, lenient, cache) if sources else None for sources in (train, valid)]
    assert parts[0] is not None
    result = Check(title, options.need, parts[0], parts[1], options.max_length, "tokens" if encoder else "characters")
    for part in filter(None, parts):
        for report in part.reports:
            _judge_source(report, options, result)
    _judge_duplicates(result)
    _judge_labels(result)
    if result.valid is not None:
        _judge_overlap(result)
    else:
        result.held = int(held_out(result.train.groups, limits.holdout, limits.seed).sum())
    _judge_sizes(result, limits)
    return result


def _part(sources: Sequence[SourceSpec], encoder: ConversationEncoder | None, options: Options, cache: bool) -> Part:
    if encoder is None:
        return _part_without_tokens(sources, options)
    store = store_of(sources, encoder, options, cache)
    examples = ExampleList(store, np.arange(len(store)))
    labels = tuple(store.labels(i) or () for i in range(len(store))) if options.need in _LABELS_SAID else ()
    return Part(
        source_reports(store),
        store.groups,
        store.keys,
        store.longest(),
        store.num_tokens(),
        labels,
        store.num_trained(),
        examples,
    )


def _part_without_tokens(sources: Sequence[SourceSpec], options: Options) -> Part:
    reports, groups, keys, lengths, labels = [], [], [], [], []
    for source in sources:
        report = SourceReport(source.name)
        reports.append(report)
        for served in read_served(source, options.need, on_bad_row="drop", report=report, train_on=options.train_on):
            report.used += 1
            report.examples += len(served.records)
            report.partly += served.partly
            for record in served.records:
                groups.append(prompt_hash(record))
                keys.append(record_hash(record))
                lengths.append(_characters(record))
                if options.need in _LABELS_SAID:
                    labels.append(labels_for(record, options.need) or ())
    sizes = np.asarray(lengths, dtype=np.int64)
    return Part(
        tuple(reports), np.asarray(groups, dtype=np.uint64), np.asarray(keys, dtype=np.uint64), sizes, sizes, tuple(labels)
    )


def _characters(record: Record) -> int:
    """Of the longest sequence."""
    total = sum(map(len, texts_of(record)))
    if not isinstance(record, Preference | Ranking):
        return total
    answers = [
        len(answer) for answer in ((record.chosen, record.rejected) if isinstance(record, Preference) else record.responses)
    ]
    return total - sum(answers) + max(answers)


# --- what is wrong ---


def _judge_source(report: SourceReport, options: Options, result: Check) -> None:
    unreadable = report.dropped.get(UNREADABLE, 0)
    if unreadable:
        shown = "\n".join(f"    {line}" for line in report.errors)
        more = f"\n    … and {unreadable - len(report.errors):,} more" if unreadable > len(report.errors) else ""
        found = result.warnings if options.on_bad_row == "drop" else result.errors
        found.append(f"{report.name}: {unreadable:,} of {report.read:,} rows can't be read:\n{shown}{more}")
    other = {reason: count for reason, count in report.dropped.items() if reason != UNREADABLE}
    if other:
        shown = SourceReport(report.name, dropped=other, origins=report.origins).drops()
        result.warnings.append(f"{report.name}: {sum(other.values()):,} of {report.read:,} rows are left out: {shown}")
    if report.partly:
        result.warnings.append(
            f"{report.name}: {report.partly:,} of {report.read:,} rows are used without some of their answers (empty, repeated, too long)"
        )
    if report.cut:
        result.warnings.append(
            f"{report.name}: {report.cut:,} rows are cut to {options.max_length:,} tokens (data.truncate={options.truncate})"
        )
    if not report.used:
        result.errors.append(f"{report.name}: nothing in it can be used")


def _judge_duplicates(result: Check) -> None:
    for name, part in (("training", result.train), ("validation", result.valid)):
        if part is not None:
            repeated = len(part.keys) - len(np.unique(part.keys))
            if repeated:
                result.warnings.append(f"{repeated:,} of {len(part.keys):,} {name} examples repeat an earlier one")


def _judge_labels(result: Check) -> None:
    labels = [label for example in result.train.labels for label in example]
    if result.need == "labelled" and labels and len(set(labels)) == 1:
        result.warnings.append(
            f"every answer is labelled {'desirable' if labels[0] else 'undesirable'}: there is nothing to tell apart"
        )


def _judge_overlap(result: Check) -> None:
    assert result.valid is not None
    shared = int(np.isin(result.valid.groups, result.train.groups).sum())
    if shared:
        result.warnings.append(f"{shared:,} of {len(result.valid.groups):,} validation examples have a prompt that is trained on")


def _judge_sizes(result: Check, limits: Limits) -> None:
    remaining = len(result.train.keys) - result.held
    if remaining < limits.batch_size:
        result.errors.append(
            f"{remaining:,} training examples are fewer than one batch (train.batch_size={limits.batch_size:,}). "
            f"Add data or set train.batch_size to {max(remaining, 1):,} or less."
        )
    if result.unit == "tokens" and result.need != "prompt":
        parts = [part.sizes for part in (result.train, result.valid) if part is not None]
        largest = max((int(sizes.max()) for sizes in parts if len(sizes)), default=0)
        if largest > limits.max_tokens:
            count = sum(int((sizes > limits.max_tokens).sum()) for sizes in parts)
            result.errors.append(
                f"{count:,} examples need more tokens (up to {largest:,}) than train.max_tokens={limits.max_tokens:,}. "
                f"Raise train.max_tokens to {largest:,} or lower data.max_length."
            )


# --- printing ---


def print_check(result: Check, console: Console, encoder: ConversationEncoder | None, examples: int) -> None:
    """Tables, a histogram, a few examples, then warnings and errors."""
    from rich.markup import escape
    from rich.table import Table

    console.rule(escape(f"{result.title}: {result.need}"))
    table = Table("source", "format", "rows", "used", "left out", "cut", "examples")
    for part, suffix in ((result.train, ""), (result.valid, " (validation)")):
        for report in part.reports if part else ():
            table.add_row(
                escape(report.name + suffix), ", ".join(report.formats), f"{report.read:,}", f"{report.used:,}",
                f"{sum(report.dropped.values()):,}", f"{report.cut:,}",
                f"{report.examples:,}",
            )  # fmt: skip
    console.print(table)
    if result.held:
        console.print(f"{result.held:,} of these are held out for validation (data.holdout)")
    if result.train.labels:
        console.print(_label_counts(result), highlight=False)
    if len(result.train.lengths):
        console.print(_histogram(result), highlight=False)
    if result.unit == "tokens":
        total = sum(int(part.sizes.sum()) for part in (result.train, result.valid) if part is not None)
        trained = sum(part.trained for part in (result.train, result.valid) if part is not None)
        console.print(f"{total:,} tokens, {trained / max(total, 1):.1%} of them trained on", highlight=False)
    else:
        console.print("No tokenizer is named (model.path), so lengths are in characters and no loss mask is shown.")
    if encoder is not None and result.train.examples is not None:
        for example in result.train.examples[:examples]:
            console.print()
            console.print(f"[bold]{escape(example.origin)}[/bold]" + (_labels(example, result.need)))
            for line in _rendered(
                example.tree.segments, encoder, _names(example, result.need), marks=console.color_system is None
            ):
                console.print(line)
    console.print()
    for text in result.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(text)}", highlight=False)
    for text in result.errors:
        console.print(f"[red]error:[/red] {escape(text)}", highlight=False)
    if not result.warnings and not result.errors:
        console.print("[green]nothing to object to[/green]")


def _labels(example: Example, need: Need) -> str:
    """A margin or a score; ranks and desirability stand at their answers."""
    return f"  label {example.labels[0]:g}" if example.labels and need in ("preference", "scored") else ""


def _label_counts(result: Check) -> str:
    """How many answers and pairs there are, or how many answers of each label."""
    labels = result.train.labels
    answers = sum(map(len, labels))
    if result.need == "labelled":
        desirable = int(sum(map(sum, labels)))
        return f"{desirable:,} desirable and {answers - desirable:,} undesirable answers"
    pairs = sum(a != b for ranks in labels for a, b in combinations(ranks, 2))
    return f"{answers:,} answers in {len(labels):,} rankings: {pairs:,} pairs of a better and a worse one"


def _names(example: Example, need: Need) -> list[str]:
    """What each answer is called."""
    if need == "preference":
        return ["chosen", "rejected"]
    if need == "ranking":
        return [f"rank {rank:g}" for rank in example.labels or ()]
    if need == "labelled":
        return ["desirable" if label else "undesirable" for label in example.labels or ()]
    return ["answer"] if need == "scored" else []


def _histogram(result: Check) -> str:
    """Lengths of the longest sequences against the limit, and how many are over it."""
    lengths = result.train.lengths
    top = result.limit if result.unit == "tokens" else max(int(lengths.max()), 1)
    edges = np.unique(np.linspace(0, top, _BINS + 1).astype(np.int64))
    counts, _ = np.histogram(lengths, bins=edges)
    width = len(f"{top:,}")
    lines = [f"length in {result.unit}: mean {lengths.mean():,.0f}, longest {lengths.max():,}"]
    if result.unit == "tokens":
        lines[0] += f", limit {top:,} (data.max_length)"
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "█" * int(np.ceil(40 * count / max(counts.max(), 1)))
        lines.append(f"  {low:>{width},} – {high:>{width},}  {count:>8,}  {bar}")
    over = sum(
        count for report in result.train.reports for reason, count in report.dropped.items() if reason.startswith("too long")
    )
    if over:
        lines.append(f"  {'over the limit':>{2 * width + 3}}  {over:>8,}  left out")
    return "\n".join(lines)


def _rendered(segments: Sequence[Segment], encoder: ConversationEncoder, names: Sequence[str], marks: bool) -> Iterator[Text]:
    """The example's text: trained tokens green, special tokens reversed; between ⟦ ⟧ where there is no colour."""
    from rich.text import Text

    parents = {segment.parent for segment in segments}
    left = list(names)
    for number, segment in enumerate(segments):
        line = Text()
        if left and number not in parents:  # an answer
            line.append(f"{left.pop(0)}: ", style="bold")
        for text, trained, special in _runs(segment, encoder):
            style = " ".join(filter(None, ("green" if trained else "dim", "reverse" if special else "")))
            line.append(f"⟦{text}⟧" if marks and trained else text, style=style)
        yield line


def _runs(segment: Segment, encoder: ConversationEncoder) -> Iterator[tuple[str, bool, bool]]:
    """(text, trained, special) of neighbouring tokens that are alike."""
    special_ids = {number for number, token in encoder.tokenizer.added_tokens_decoder.items() if token.special}
    kinds = [(bool(trained), int(token) in special_ids) for token, trained in zip(segment.tokens, segment.trained, strict=True)]
    start = 0
    for end in range(1, len(kinds) + 1):
        if end == len(kinds) or kinds[end] != kinds[start]:
            ids: list[Any] = [int(token) for token in segment.tokens[start:end]]
            text = encoder.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            yield str(text), *kinds[start]
            start = end
