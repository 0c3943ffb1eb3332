"""`accord score MODEL --data FILE --out FILE`: a file of answers to a file of a reward model's scores."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.commands.inference import quiet, settings
from accord.commands.output import Output, Progress, prompt_value, weights_state
from accord.config import Config
from accord.errors import AccordError, ConfigError, DataError, Interrupted

if TYPE_CHECKING:
    from accord.data.packing import Pack
    from accord.data.reading import SourceReport
    from accord.data.records import Messages, Record, Scored
    from accord.data.template import ConversationEncoder
    from accord.models.forward import FrozenModel
    from accord.models.load import LoadedModel
    from accord.models.normalization import Normalization

READS = (
    "model.dtype",
    "model.revision",
    "model.chat_template",
    "model.trust_remote_code",
    "data.format",
    "data.columns",
    "data.on_bad_row",
    "data.truncate",
    "train.max_tokens",
    "reward_model.max_length",
)
_SECONDS_PER_WRITE = 2.0  # about what a kill may cost


def score(model: str, data: str, out: str, overrides: list[str], normalized: bool = False) -> None:
    """Score every answer. Writes one JSON object a line, in the order of the input; a pair gives two, its chosen answer first, a ranking
    as many as it has answers:

        {"prompt", "response", "score"}  and for a pair {…, "role": "chosen" | "rejected"}, for a ranking {…, "rank"}

    `normalized` subtracts the mean of the scores on the answers held out from the model's training and divides by their deviation, as
    the model keeps them.

    Each text is read by the model alone, so that its score depends on nothing but itself, to the last bit. With `train.max_tokens`
    set, texts go through the model together, up to that many tokens at a time and sharing prompts: faster, and equal but for rounding.

    Every row is read and measured before the first score. Lines go to OUT.partial, which is renamed to OUT when it is whole; the same
    command started again goes on after the last whole line. OUT.settings.json says what the scores were made with.

    Raises ConfigError for an unusable model, key or output file and for a model that does not say how its scores lie when `normalized`
    asks for it, DataError for unusable rows, Interrupted for Ctrl-C.
    """
    config = settings("score", overrides, READS)
    quiet()
    output = Output(Path(out), "score", "scores")
    output.check_writable()
    rows = _Rows(data, config)
    rows.check_readable()
    judge = _load_judge(model, config, normalized)
    count, report = rows.measure(judge)
    together = config.train.max_tokens if "max_tokens" in config.train.model_fields_set else None
    done = output.open(_made_with(model, judge, rows, config, together))
    if report.dropped:
        used = report.read - sum(report.dropped.values())
        print(f"{data}: {used:,} of {report.read:,} rows; left out: {report.drops()}")
    if report.cut:
        print(f"{data}: {report.cut:,} answers were too long and are scored cut (data.truncate={config.data.truncate})")
    if done is None:
        print(f"finished already: {out} ({count:,} scores)")
        return
    if done:
        print(f"going on after {done:,} of {count:,} scores")
    try:
        _score(judge, rows, count, done, together, output)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; {output.partial} keeps the scores so far. Start the same command again to go on."
        ) from None
    output.finish()
    print(f"{count:,} scores: {out}")


def _score(judge: _Judge, rows: _Rows, count: int, done: int, together: int | None, output: Output) -> None:
    """Batches from the first row on, whatever is done already: a resumed run reads a text beside the same ones as an undisturbed one."""
    waiting: list[dict[str, Any]] = []
    written, start = time.monotonic(), 0
    with Progress("score", count, done) as progress:
        for batch in _batches(rows.texts(judge), together):
            start += len(batch)
            if start <= done:
                continue
            scores = judge.scores(_pack(batch))
            lines = [text.line(value) for text, value in zip(batch, scores, strict=True)]
            new = lines[max(0, done - (start - len(batch))) :]
            waiting += new
            progress.advance(len(new), sum(text.num_tokens for text in batch))
            if time.monotonic() - written > _SECONDS_PER_WRITE:
                output.write(waiting)
                waiting, written = [], time.monotonic()
        output.write(waiting)


# -- the reward model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Judge:
    loaded: LoadedModel
    model: FrozenModel
    encoder: ConversationEncoder
    max_length: int | None  # of prompt and answer
    normalization: Normalization | None  # None: scores as they are

    def scores(self, pack: Pack) -> list[float]:
        scores: list[float] = self.model.scores(pack).tolist()
        return scores if self.normalization is None else [self.normalization.apply(score) for score in scores]

    @property
    def limit(self) -> str:
        from accord.models.heads import context_length

        return "the model's context" if self.max_length == context_length(self.loaded.module) else "reward_model.max_length"


def _load_judge(model: str, config: Config, normalized: bool) -> _Judge:
    """Raises ConfigError when there is no such reward model, reward_model.max_length is more than it reads, or it has no normalisation."""
    from accord.data.template import ConversationEncoder
    from accord.models.forward import FrozenModel
    from accord.models.heads import context_length
    from accord.models.load import load_scalar
    from accord.models.normalization import load_normalization

    loaded = load_scalar(model, config.model, seed=config.run.seed, trainable=False, fresh_head=False)
    normalization = load_normalization(loaded.module) if normalized else None
    wanted, context = config.reward_model.max_length, context_length(loaded.module)
    if wanted is not None and context is not None and wanted > context:
        raise ConfigError(
            f"reward_model.max_length is {wanted:,}, but {model} reads at most {context:,} tokens. "
            f"Set it to {context:,} or less, or leave it out."
        )
    encoder = ConversationEncoder(loaded.tokenizer, config.model.chat_template)
    return _Judge(loaded, FrozenModel(loaded.module), encoder, context if wanted is None else wanted, normalization)


def _batches(texts: Iterable[_Text], max_tokens: int | None) -> Iterator[list[_Text]]:
    """Texts that go through the model together: neighbours of at most `max_tokens` tokens, a prompt they share counted once.

    None: each alone. A text longer than `max_tokens` is alone as well.
    """
    batch: list[_Text] = []
    used = 0
    for text in texts:
        more = len(text.response_ids) if batch and batch[-1].prompt_ids == text.prompt_ids else text.num_tokens
        if batch and (max_tokens is None or used + more > max_tokens):
            yield batch
            batch, used, more = [], 0, text.num_tokens
        batch.append(text)
        used += more
    if batch:
        yield batch


def _pack(batch: Sequence[_Text]) -> Pack:
    """One pack; its sequences are the texts, in order."""
    from accord.data.packing import make_pack
    from accord.data.trees import branching, single

    trees = []
    for _, group in groupby(batch, key=lambda text: text.prompt_ids):
        same = list(group)
        if len(same) == 1:
            ids = [*same[0].prompt_ids, *same[0].response_ids]
            trees.append(single(ids, [False] * len(ids)))
        else:
            trees.append(branching(same[0].prompt_ids, [text.response_ids for text in same]))
    return make_pack(trees, range(len(trees)))


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    """One answer to be scored, which gives one line."""

    prompt: Messages
    response: str
    place: dict[str, Any]  # its side of a pair (role) or its rank, as the line says it
    prompt_ids: list[int]
    response_ids: list[int]
    origin: str

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def line(self, score: float) -> dict[str, Any]:
        if not math.isfinite(score):
            raise AccordError(
                f"{self.origin}  the model's score is {score}: its weights are damaged, or too large for model.dtype. "
                "Try model.dtype=float32."
            )
        return {"prompt": prompt_value(self.prompt), "response": self.response, "score": score, **self.place}


class _Rows:
    """The answers of a source, read anew each time they are asked for."""

    def __init__(self, path: str, config: Config) -> None:
        from accord.data.reading import SourceSpec

        self.source = SourceSpec(path, path, format=config.data.format, columns=dict(config.data.columns))
        self.data = config.data

    def fingerprint(self) -> str:
        return hashlib.blake2b(str(self.source.fingerprint()).encode(), digest_size=16).hexdigest()

    def check_readable(self) -> None:
        """Raises DataError before a model is loaded for nothing."""
        report = self._report()
        if next(self._records(report), None) is None:
            self._nothing(report)

    def measure(self, judge: _Judge) -> tuple[int, SourceReport]:
        """Reads all rows once: how many texts there are, and that each is one that the model can read."""
        report = self._report()
        count = sum(1 for _ in self._encoded(judge, report))
        if not count:
            self._nothing(report)
        return count, report

    def texts(self, judge: _Judge) -> Iterator[_Text]:
        return self._encoded(judge, self._report())

    def _report(self) -> SourceReport:
        from accord.data.reading import SourceReport

        return SourceReport(self.source.name)

    def _nothing(self, report: SourceReport) -> None:
        raise DataError(f"{self.source.name}: no answer is left of {report.read:,} rows. {report.drops()}")

    def _records(self, report: SourceReport) -> Iterator[tuple[Record, list[tuple[Scored, dict[str, Any]]]]]:
        """Each row and its answers with their places. Raises DataError for a row without one, unless data.on_bad_row is drop."""
        from accord.data.reading import read_records, reject

        for record in read_records(self.source, None, on_bad_row=self.data.on_bad_row, report=report, train_on="last"):
            if answers := _answers(record):
                yield record, answers
            else:
                reject(
                    record.origin,
                    "holds no answer to score. Expected prompt and response, messages that end with an assistant turn, or prompt, "
                    "chosen and rejected (data.columns says which of your columns is which)",
                    self.data.on_bad_row,
                    report,
                )

    def _encoded(self, judge: _Judge, report: SourceReport) -> Iterator[_Text]:
        """The texts of every row that the model can read."""
        from accord.data.formats import RowError, UnusableError
        from accord.data.reading import reject

        for record, answers in self._records(report):
            try:
                fitted = [self._encode(judge, answer) for answer, _ in answers]
            except UnusableError as error:
                report.drop(str(error), record.origin)
                continue
            except RowError as error:
                reject(record.origin, str(error), self.data.on_bad_row, report)
                continue
            report.cut += sum(cut for _, _, cut in fitted)
            for (answer, place), (prompt, response, _) in zip(answers, fitted, strict=True):
                yield _Text(answer.prompt, answer.response, place, prompt, response, answer.origin)

    def _encode(self, judge: _Judge, answer: Scored) -> tuple[list[int], list[int], bool]:
        """Tokens of prompt and answer, and whether they were cut. Each answer of a pair is fitted by itself: its score does not depend
        on the other's length.

        Raises RowError if the template refuses it, UnusableError if it is to be left out, DataError if it is too long and
        data.truncate was not set.
        """
        from accord.data.fitting import TOO_LONG, encode_record, fit
        from accord.data.formats import RowError, UnusableError

        try:
            tree = encode_record(judge.encoder, answer)
        except DataError as error:
            raise RowError(str(error)) from error
        cut = judge.max_length is not None and tree.longest > judge.max_length
        if judge.max_length is not None and cut:
            if "truncate" not in self.data.model_fields_set:
                raise DataError(
                    f"{answer.origin}  prompt and answer have {tree.longest:,} tokens; {judge.limit} is {judge.max_length:,}. Set "
                    "data.truncate=left to leave out the oldest turns, right to cut the answer, or drop to leave such rows out."
                )
            if self.data.truncate == "drop":
                raise UnusableError(TOO_LONG)
            tree, _, _ = fit(judge.encoder, answer, judge.max_length, self.data.truncate)
        (leaf,) = tree.leaves
        response = tree.segments[leaf].tokens.tolist()
        return tree.sequence(leaf).tolist()[: -len(response)], response, cut


def _answers(record: Record) -> list[tuple[Scored, dict[str, Any]]]:
    """Every answer of a record, each by itself, with its role in a pair or its rank; none if it has no answer."""
    from accord.data.records import Demonstration, Labelled, Preference, Ranking, Scored

    def answer(prompt: Messages, response: str) -> Scored:
        return Scored(prompt, response, 0.0, record.origin)

    if isinstance(record, Preference):
        return [(answer(record.prompt, getattr(record, role)), {"role": role}) for role in ("chosen", "rejected")]
    if isinstance(record, Ranking):
        ranked = zip(record.responses, record.ranks, strict=True)
        return [(answer(record.prompt, response), {"rank": rank}) for response, rank in ranked]
    if isinstance(record, Demonstration):
        return [(answer(record.messages[:-1], record.messages[-1].content), {})]
    if isinstance(record, Labelled):
        return [(answer(record.prompt, record.response), {})]
    if isinstance(record, Scored):
        return [(record, {})]
    return []


def _made_with(model: str, judge: _Judge, rows: _Rows, config: Config, together: int | None) -> dict[str, Any]:
    """Everything that decides the scores, as plain data."""
    return {
        "model": model,
        "weights": weights_state(Path(judge.loaded.path)),
        "model.dtype": config.model.dtype,
        "model.revision": config.model.revision,
        "chat_template": hashlib.blake2b(str(judge.encoder.tokenizer.chat_template).encode(), digest_size=8).hexdigest(),
        "data": rows.source.name,
        "rows": rows.fingerprint(),
        "data.truncate": config.data.truncate,
        "train.max_tokens": together,
        "reward_model.max_length": judge.max_length,
        "--normalized": None if judge.normalization is None else [judge.normalization.mean, judge.normalization.std],
    }
