"""`accord generate MODEL --prompts FILE --out FILE`: a file of prompts to a file of answers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.commands.inference import MODEL_KEYS, Speaker, load_speaker, quiet, sampling_seed, settings
from accord.commands.judge import Judge
from accord.commands.output import Output, Progress, prompt_value, weights_state
from accord.config import Config
from accord.errors import ConfigError, DataError, Interrupted

if TYPE_CHECKING:
    from accord.data.reading import SourceReport
    from accord.data.records import Prompt
    from accord.engine.generate import Rollout

READS = ("generate.", "engine.", *MODEL_KEYS, "data.format", "data.columns", "data.on_bad_row", "data.truncate")
_SECONDS_PER_WRITE = 10.0  # about what a kill may cost
_FIRST_ROWS, _MOST_ROWS = 32, 1024


def generate(
    model: str, prompts: str, out: str, overrides: list[str], best_of: int | None = None, judge: str | None = None
) -> None:
    """Answer every prompt. Writes one JSON object a line, in the order of the input:

        {"prompt", "response", "token_ids", "logprobs", "finish_reason"}

    With `best_of` n each prompt is answered n times and the answer that `judge` scores highest is written, with "score" and all
    "scores"; of equal ones the first.

    `prompt` is the user's text, or the list of messages where there is more than that. Every row is read and measured before the
    first answer. Lines go to OUT.partial, which is renamed to OUT when it is whole; the same command started again goes on after the
    last whole line and ends with the same file. OUT.settings.json says what the answers were made with.

    Raises ConfigError for an unusable model, judge, key or output file, DataError for unusable prompts, Interrupted for Ctrl-C.
    """
    config = settings("generate", overrides, READS)
    _check_best_of(best_of, judge, config)
    quiet()
    output = Output(Path(out), "generate", "answers")
    output.check_writable()
    rows = _Rows(prompts, config)
    rows.check_readable()
    judging = Judging(best_of, judge, Judge(judge, config)) if best_of is not None and judge is not None else None
    speaker = load_speaker(model, config)
    count, report = rows.measure(speaker)
    done = output.open(_made_with(model, speaker, rows, config, judging))
    if report.dropped:
        print(f"{prompts}: {count:,} of {report.read:,} rows; left out: {report.drops()}")
    if done is None:
        print(f"finished already: {out} ({count:,} answers)")
        return
    if done:
        print(f"going on after {done:,} of {count:,} answers")
    try:
        _answer(speaker, rows, count, done, sampling_seed(config), output, judging)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; {output.partial} keeps the answers so far. Start the same command again to go on."
        ) from None
    output.finish()
    print(f"{count:,} answers: {out}")


@dataclass(frozen=True)
class Judging:
    """Best of n: who is asked."""

    best_of: int
    name: str
    judge: Judge

    def best(self, speaker: Speaker, prompt: Prompt, ids: list[int], rollouts: Sequence[Rollout]) -> tuple[int, list[float]]:
        """The number of the best answer, and what each was given."""
        from accord.rewards.base import Sample

        samples = [Sample(prompt, ids, r.token_ids, speaker.text(r.token_ids), r.truncated) for r in rollouts]
        scores = self.judge.score(samples, speaker.encoder)
        return max(range(len(scores)), key=scores.__getitem__), scores


def _check_best_of(best_of: int | None, judge: str | None, config: Config) -> None:
    if (best_of is None) != (judge is None):
        given, missing = ("--best-of", "--judge") if judge is None else ("--judge", "--best-of")
        raise ConfigError(f"{given} needs {missing}: give both, such as --best-of 8 --judge runs/rm, or neither.")
    if best_of is not None and best_of < 2:
        raise ConfigError(f"--best-of {best_of}: expected 2 or more. Leave it out for one answer a prompt.")
    if best_of is not None and config.generate.temperature == 0:
        raise ConfigError(
            "generate.temperature=0 gives the same answer every time: nothing to choose from. Use 1.0, or leave --best-of out."
        )


def _answer(speaker: Speaker, rows: _Rows, count: int, done: int, seed: int, output: Output, judging: Judging | None) -> None:
    """Windows of rows, as many as take about `_SECONDS_PER_WRITE`; each is on disk before the next begins."""
    from accord.engine.generate.sampling import row_seeds

    each = judging.best_of if judging is not None else 1
    seeds = row_seeds(
        seed, count * each
    )  # `each` a row of the input, so that a resumed run samples what an undisturbed one would
    waiting = islice(rows.prompts(speaker), done, None)
    window = _FIRST_ROWS
    with Progress("generate", count, done) as progress:
        while batch := list(islice(waiting, window)):
            started = time.monotonic()
            numbers = range(done * each, (done + len(batch)) * each)
            rollouts = speaker.generator.generate(
                [ids for _, ids in batch for _ in range(each)], speaker.params, seeds=[int(seeds[i]) for i in numbers]
            )
            lines = []
            for i, (prompt, ids) in enumerate(batch):
                answers = rollouts[i * each : (i + 1) * each]
                best, scores = judging.best(speaker, prompt, ids, answers) if judging is not None else (0, [])
                line = {
                    "prompt": prompt_value(prompt.messages),
                    "response": speaker.text(answers[best].token_ids),
                    "token_ids": answers[best].token_ids,
                    "logprobs": [round(value, 6) for value in answers[best].logprobs],
                    "finish_reason": answers[best].finish_reason,
                }
                lines.append(line if judging is None else line | {"score": scores[best], "scores": scores})
            output.write(lines)
            done += len(batch)
            progress.advance(len(batch), sum(len(rollout.token_ids) for rollout in rollouts))
            if time.monotonic() - started < _SECONDS_PER_WRITE / 2:
                window = min(2 * window, _MOST_ROWS)


class _Rows:
    """The prompts of a source, read anew each time they are asked for."""

    def __init__(self, path: str, config: Config) -> None:
        from accord.data.reading import SourceSpec

        self.source = SourceSpec(path, path, format=config.data.format, columns=dict(config.data.columns))
        self.config = config

    def fingerprint(self) -> str:
        return hashlib.blake2b(str(self.source.fingerprint()).encode(), digest_size=16).hexdigest()

    def records(self, report: SourceReport) -> Iterator[Prompt]:
        """Raises DataError for the first row that can't be read, unless data.on_bad_row is drop."""
        from accord.data.reading import read_records
        from accord.data.records import Message, PlainText, Prompt

        for record in read_records(self.source, None, on_bad_row=self.config.data.on_bad_row, report=report):
            if isinstance(record, PlainText):  # a line of a text file is what the user says
                yield Prompt((Message("user", record.text),), origin=record.origin)
            else:
                yield record if isinstance(record, Prompt) else record.as_prompt()

    def check_readable(self) -> None:
        """Raises DataError before a model is loaded for nothing."""
        report = self._report()
        if next(self.records(report), None) is None:
            self._nothing(report)

    def measure(self, speaker: Speaker) -> tuple[int, SourceReport]:
        """Reads all rows once: how many there are, and that each leaves room for its answer."""
        report = self._report()
        count = sum(1 for _ in self._encoded(speaker, report))
        if not count:
            self._nothing(report)
        return count, report

    def prompts(self, speaker: Speaker) -> Iterator[tuple[Prompt, list[int]]]:
        return self._encoded(speaker, self._report())

    def _report(self) -> SourceReport:
        from accord.data.reading import SourceReport

        return SourceReport(self.source.name)

    def _nothing(self, report: SourceReport) -> None:
        raise DataError(f"{self.source.name}: no prompt is left of {report.read:,} rows. {report.drops()}")

    def _encoded(self, speaker: Speaker, report: SourceReport) -> Iterator[tuple[Prompt, list[int]]]:
        from accord.data.fitting import fit
        from accord.data.formats import UnusableError

        room = None if speaker.context_length is None else speaker.context_length - speaker.params.max_new_tokens
        for record in self.records(report):
            ids = speaker.encoder.encode_prompt(record.messages)
            if room is None or len(ids) <= room:
                yield record, ids
                continue
            if room > 0 and self.config.data.truncate == "left":
                try:
                    tree, _, _ = fit(speaker.encoder, record, room, "left")
                except UnusableError as error:
                    report.drop(str(error), record.origin)
                    continue
                yield record, tree.segments[0].tokens.tolist()
                continue
            left = speaker.context_length - len(ids)  # type: ignore[operator]
            lower = f"Lower generate.max_new_tokens to {left:,}" if left > 0 else "Shorten the prompt"
            if self.config.engine.max_out_tokens == speaker.context_length:
                has, lower = "engine.max_out_tokens allows", f"{lower}, or raise engine.max_out_tokens"
            else:
                has = "the model reads"
            raise DataError(
                f"{record.origin}  the prompt has {len(ids):,} tokens; with generate.max_new_tokens="
                f"{speaker.params.max_new_tokens:,} that is more than the {speaker.context_length:,} that {has}. "
                f"{lower}, or set data.truncate=left to leave out the oldest turns."
            )


def _made_with(model: str, speaker: Speaker, rows: _Rows, config: Config, judging: Judging | None) -> dict[str, Any]:
    """Everything that decides the answers, as plain data."""
    made_with: dict[str, Any] = {
        "model": model,
        "weights": weights_state(Path(speaker.path)),
        "dtype": config.model.dtype,
        "engine": {"enabled": config.engine.enabled, "dtype": config.engine.dtype},
        "chat_template": hashlib.blake2b(str(speaker.encoder.tokenizer.chat_template).encode(), digest_size=8).hexdigest(),
        "stop_token_ids": list(speaker.params.stop_token_ids),
        "prompts": rows.source.name,
        "rows": rows.fingerprint(),
        "truncate": config.data.truncate,
        "generate": {**config.generate.model_dump(mode="json"), "seed": sampling_seed(config)},
    }
    if judging is not None:
        made_with |= {"best_of": judging.best_of, "judge": judging.name, "judge_weights": judging.judge.state()}
    return made_with
