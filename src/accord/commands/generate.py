"""`accord generate MODEL --prompts FILE --out FILE`: a file of prompts to a file of answers."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.commands.inference import MODEL_KEYS, Speaker, load_speaker, quiet, sampling_seed, settings
from accord.config import Config
from accord.errors import ConfigError, DataError, Interrupted
from accord.track.files import json_line, sync_folder, write_atomically

if TYPE_CHECKING:
    from accord.data.reading import SourceReport
    from accord.data.records import Prompt

READS = ("generate.", "engine.", *MODEL_KEYS, "data.format", "data.columns", "data.on_bad_row", "data.truncate")
_SECONDS_PER_WRITE = 10.0  # about what a kill may cost
_MOST_ROWS = 1024


def generate(model: str, prompts: str, out: str, overrides: list[str]) -> None:
    """Answer every prompt. Writes one JSON object a line, in the order of the input:

        {"prompt", "response", "token_ids", "logprobs", "finish_reason"}

    `prompt` is the user's text, or the list of messages where there is more than that. Every row is read and measured before the
    first answer. Lines go to OUT.partial, which is renamed to OUT when it is whole; the same command started again goes on after the
    last whole line and ends with the same file. OUT.settings.json says what the answers were made with.

    Raises ConfigError for an unusable model, key or output file, DataError for unusable prompts, Interrupted for Ctrl-C.
    """
    config = settings("generate", overrides, READS)
    quiet()
    output = _Output(Path(out))
    output.check_writable()
    rows = _Rows(prompts, config)
    rows.check_readable()
    speaker = load_speaker(model, config)
    count, report = rows.measure(speaker)
    done = output.open(_made_with(model, speaker, rows, config))
    if report.dropped:
        print(f"{prompts}: {count:,} of {report.read:,} rows; left out: {report.drops()}")
    if done is None:
        print(f"finished already: {out} ({count:,} answers)")
        return
    if done:
        print(f"going on after {done:,} of {count:,} answers")
    try:
        _answer(speaker, rows, count, done, sampling_seed(config), output)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; {output.partial} keeps the answers so far. Start the same command again to go on."
        ) from None
    output.finish()
    print(f"{count:,} answers: {out}")


def _answer(speaker: Speaker, rows: _Rows, count: int, done: int, seed: int, output: _Output) -> None:
    """Windows of rows, as many as take about `_SECONDS_PER_WRITE`; each is on disk before the next begins."""
    from accord.engine.generate.sampling import row_seeds

    seeds = row_seeds(seed, count)  # one a row of the input, so that a resumed run samples what an undisturbed one would
    waiting = islice(rows.prompts(speaker), done, None)
    window = 32
    with _Progress(count, done) as progress:
        while batch := list(islice(waiting, window)):
            started = time.monotonic()
            numbers = range(done, done + len(batch))
            rollouts = speaker.generator.generate(
                [ids for _, ids in batch], speaker.params, seeds=[int(seeds[i]) for i in numbers]
            )
            lines = [
                {
                    "prompt": _prompt_value(prompt),
                    "response": speaker.text(rollout.token_ids),
                    "token_ids": rollout.token_ids,
                    "logprobs": [round(value, 6) for value in rollout.logprobs],
                    "finish_reason": rollout.finish_reason,
                }
                for (prompt, _), rollout in zip(batch, rollouts, strict=True)
            ]
            output.write(lines)
            done += len(batch)
            progress.advance(len(batch), sum(len(rollout.token_ids) for rollout in rollouts))
            if time.monotonic() - started < _SECONDS_PER_WRITE / 2:
                window = min(2 * window, _MOST_ROWS)


def _prompt_value(prompt: Prompt) -> Any:
    """Readable again as a prompt: text for a single user turn, else the messages."""
    if len(prompt.messages) == 1 and prompt.messages[0].role == "user":
        return prompt.messages[0].content
    return [message.as_dict() for message in prompt.messages]


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


def _made_with(model: str, speaker: Speaker, rows: _Rows, config: Config) -> dict[str, Any]:
    """Everything that decides the answers, as plain data."""
    return {
        "model": model,
        "weights": _weights_state(Path(speaker.path)),
        "dtype": config.model.dtype,
        "engine": {"enabled": config.engine.enabled, "dtype": config.engine.dtype},
        "chat_template": hashlib.blake2b(str(speaker.encoder.tokenizer.chat_template).encode(), digest_size=8).hexdigest(),
        "stop_token_ids": list(speaker.params.stop_token_ids),
        "prompts": rows.source.name,
        "rows": rows.fingerprint(),
        "truncate": config.data.truncate,
        "generate": {**config.generate.model_dump(mode="json"), "seed": sampling_seed(config)},
    }


def _weights_state(path: Path) -> str:
    """Changes when the model at that place was written anew: names, sizes and times of its weight files."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) + sorted(path.glob("*.bin"))
    state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()


class _Output:
    """OUT, and beside it OUT.partial (the lines so far) and OUT.settings.json (what they were made with)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.settings = path.with_name(path.name + ".settings.json")

    def check_writable(self) -> None:
        """Raises ConfigError if no file can be made there; leaves nothing behind."""
        if self.path.is_dir():
            raise ConfigError(f"--out {self.path}: is a folder. Name a file, such as {self.path / 'answers.jsonl'}.")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            probe = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"--out {self.path}: can't be written: {error.strerror or error}.") from error

    def open(self, made_with: dict[str, Any]) -> int | None:
        """How many answers are there already; None: all of them, OUT is finished.

        Raises ConfigError if OUT or OUT.partial was made with other settings: nothing of the user's is overwritten.
        """
        present = self.path if self.path.exists() else self.partial if self.partial.exists() else None
        if present is not None:
            self._compare(present, made_with)
            if present is self.path:
                return None
        else:
            write_atomically(self.settings, (json.dumps(made_with, ensure_ascii=False, indent=1) + "\n").encode())
        self.stream = self.partial.open("ab")
        self._lock()
        return self._cut_to_whole_lines()

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows: nothing guards against a second process
            return
        try:
            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the file is closed, by a kill as well
        except OSError:
            raise ConfigError(
                f"--out {self.path}: another accord generate is writing it. Wait for it, or give another --out."
            ) from None

    def _compare(self, present: Path, made_with: dict[str, Any]) -> None:
        cure = f"Remove {present}, or give another --out."
        try:
            before = json.loads(self.settings.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ConfigError(f"--out {present}: is there already, and it is not known what it was made with. {cure}") from None
        plain = json.loads(json.dumps(made_with))
        differing = [key for key in plain if before.get(key) != plain[key]]
        if "generate" in differing:
            old, new = before.get("generate") or {}, plain["generate"]
            differing = [key for key in differing if key != "generate"] + [f"generate.{k}" for k in new if old.get(k) != new[k]]
        if differing:
            raise ConfigError(f"--out {present}: was made with another {', '.join(differing)} (see {self.settings.name}). {cure}")

    def _cut_to_whole_lines(self) -> int:
        """Forgets a line that was being written when the program was killed."""
        whole, lines = 0, 0
        with self.partial.open("rb+") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                whole, lines = whole + len(line), lines + 1
            stream.truncate(whole)
        return lines

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        self.stream.write(b"".join(map(json_line, lines)))
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def finish(self) -> None:
        self.partial.replace(self.path)
        sync_folder(self.path.parent)
        self.stream.close()


class _Progress:
    """A bar with what is left to wait on a terminal, a line every 30 seconds elsewhere; both on stderr."""

    def __init__(self, total: int, done: int) -> None:
        from rich.console import Console

        self.total, self.done, self.tokens = total, done, 0
        self.console = Console(stderr=True)
        self.started = self.told = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> _Progress:
        if self.console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("generate"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
            self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True)
            self.task = self.bar.add_task("generate", total=self.total, completed=self.done, rate="")
            self.bar.start()
        return self

    def advance(self, rows: int, tokens: int) -> None:
        self.done, self.tokens = self.done + rows, self.tokens + tokens
        now = time.monotonic()
        rate = f"{self.tokens / max(now - self.started, 1e-9):,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, rate=rate)
        elif now - self.told > 30:
            self.told = now
            self.console.print(f"generate: {self.done:,} of {self.total:,}, {rate}")

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()
