"""`accord evaluate MODEL --data FILE --metric perplexity|reward_accuracy|win_rate`: a table, and JSON with --out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accord.commands.inference import MODEL_KEYS, Speaker, load_speaker, quiet, sampling_seed, settings
from accord.commands.judge import Judge
from accord.config import Config
from accord.config.messages import nearest
from accord.errors import ConfigError, DataError

if TYPE_CHECKING:
    from accord.data.dataset import Examples
    from accord.data.template import ConversationEncoder
    from accord.rewards.base import Sample

DATA_KEYS = (
    "data.format",
    "data.columns",
    "data.on_bad_row",
    "data.truncate",
    "data.max_length",
    "data.cache",
    "train.max_tokens",
)
READS = {
    "perplexity": (*MODEL_KEYS, *DATA_KEYS, "sft.train_on"),
    "reward_accuracy": (*MODEL_KEYS, *DATA_KEYS),
    "win_rate": ("generate.", "engine.", *MODEL_KEYS, *DATA_KEYS),
}
METRICS = tuple(READS)


def evaluate(
    model: str, data: str, metric: str, against: str | None, judge: str | None, out: str | None, overrides: list[str]
) -> None:
    """Measure a model, print a table, and write the numbers to `out`.

    Raises ConfigError for an unknown metric, options that the metric does not read, or an unusable model; DataError for unusable data.
    """
    if metric not in METRICS:
        near = nearest(metric, METRICS)
        raise ConfigError(
            f"--metric {metric}: expected one of {', '.join(METRICS)}." + (f" Did you mean {near}?" if near else "")
        )
    if metric == "win_rate":
        for option, value, example in (
            ("--against", against, "another model"),
            ("--judge", judge, "module:function or a reward model"),
        ):
            if value is None:
                raise ConfigError(f"--metric win_rate needs {option}: {example}.")
    elif against is not None or judge is not None:
        raise ConfigError(
            f"--metric {metric} compares with nothing: leave out --{'against' if against is not None else 'judge'}."
        )
    config = settings("evaluate", overrides, READS[metric])
    if out is not None and Path(out).is_dir():
        raise ConfigError(f"--out {out}: is a folder. Name a file, such as {Path(out) / 'evaluation.json'}.")
    quiet()
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"train": _source(data), "valid": None, "holdout": 0.0})}
    )
    result: dict[str, Any] = {"metric": metric, "model": model, "data": data}
    if metric == "win_rate":
        assert against is not None and judge is not None
        result |= {"against": against, "judge": judge, **win_rate(model, against, judge, config)}
    else:
        result |= {"perplexity": perplexity, "reward_accuracy": reward_accuracy}[metric](model, config)
    _print_table(result)
    if out is not None:
        _write(Path(out), result)


def _source(path: str) -> Any:
    from accord.config import Source

    return (Source(path=path),)


# -- the metrics -------------------------------------------------------------------------------------------------------


def perplexity(model: str, config: Config) -> dict[str, Any]:
    """exp of the mean negative log-likelihood over all trained tokens (assistant turns; every token of plain text)."""
    import torch

    from accord.data.packing import pack_trees
    from accord.models.forward import FrozenModel
    from accord.models.load import load_causal

    loaded = load_causal(config.model, seed=config.run.seed, trainable=False, path=model)
    _, examples = _examples(config, loaded, "text")
    frozen = FrozenModel(loaded.module)
    total, tokens = 0.0, 0
    trees = [example.tree for example in examples.train]
    with _progress("perplexity", len(trees)) as advance:
        for pack in pack_trees(trees, _budget(config, examples)):
            logprobs = frozen.token_logprobs(pack).logprobs
            total -= float(logprobs.to(torch.float64).sum())
            tokens += len(logprobs)
            advance(len(pack.trees))
    if not tokens:
        raise DataError("the data holds no token to predict.")
    loss = total / tokens
    return {"perplexity": _exp(loss), "loss": loss, "tokens": tokens, **_counts(examples)}


def reward_accuracy(model: str, config: Config) -> dict[str, Any]:
    """Share of pairs whose chosen answer scores strictly higher, and how the scores lie."""
    import numpy as np

    from accord.data.packing import pack_trees
    from accord.models.forward import FrozenModel
    from accord.models.load import load_scalar

    loaded = load_scalar(model, config.model, seed=config.run.seed, trainable=False, fresh_head=False)
    _, examples = _examples(config, loaded, "preference")
    frozen = FrozenModel(loaded.module)
    scores: list[float] = []
    trees = [example.tree for example in examples.train]
    with _progress("reward_accuracy", len(trees)) as advance:
        for pack in pack_trees(trees, _budget(config, examples)):
            scores += frozen.scores(pack).tolist()  # chosen, rejected, chosen, rejected …
            advance(len(pack.trees))
    chosen, rejected = np.asarray(scores[0::2]), np.asarray(scores[1::2])
    accuracy = float((chosen > rejected).mean())
    return {
        "accuracy": accuracy,
        "standard_error": _standard_error(accuracy, len(chosen)),
        "margin": float((chosen - rejected).mean()),
        "chosen": float(chosen.mean()),
        "rejected": float(rejected.mean()),
        "ties": int((chosen == rejected).sum()),
        **_counts(examples),
    }


def win_rate(model: str, against: str, judge: str, config: Config) -> dict[str, Any]:
    """How often the judge scores `model`'s answer above `against`'s; a tie counts half. Both answer with the same seeds."""
    judged = Judge(judge, config)  # one that can't be used is said before anything is generated
    sides = []
    for name in (model, against):
        speaker = load_speaker(name, config)
        examples, samples = _answers(speaker, config)
        sides.append((samples, judged.score(samples, speaker.encoder), examples))
        del speaker
    (own, own_scores, examples), (other, other_scores, _) = sides
    if [sample.prompt for sample in own] != [sample.prompt for sample in other]:
        raise DataError(
            f"{len(own):,} prompts fit {model} and {len(other):,} fit {against}, and they are not the same ones. "
            "Lower data.max_length, or leave out the longest prompts."
        )
    wins = sum(a > b for a, b in zip(own_scores, other_scores, strict=True))
    ties = sum(a == b for a, b in zip(own_scores, other_scores, strict=True))
    count = len(own_scores)
    outcomes = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(own_scores, other_scores, strict=True)]
    rate = sum(outcomes) / count
    return {
        "win_rate": rate,
        "standard_error": math.sqrt(sum((outcome - rate) ** 2 for outcome in outcomes) / count / max(count - 1, 1)),
        "wins": wins,
        "ties": ties,
        "losses": count - wins - ties,
        "score": _mean(own_scores),
        "score_against": _mean(other_scores),
        "tokens": _mean([len(sample.response_ids) for sample in own]),
        "tokens_against": _mean([len(sample.response_ids) for sample in other]),
        **_counts(examples),
    }


def _answers(speaker: Speaker, config: Config) -> tuple[Examples, list[Sample]]:
    from accord.data.records import Prompt
    from accord.engine.generate.sampling import row_seeds
    from accord.rewards.base import Sample

    room = speaker.context_length and speaker.context_length - speaker.params.max_new_tokens
    if room is not None and room < 1:
        raise ConfigError(
            f"generate.max_new_tokens is {speaker.params.max_new_tokens:,} but {speaker.name} reads {speaker.context_length:,} tokens "
            f"in all. Lower generate.max_new_tokens, for example to {(speaker.context_length or 0) // 2:,}."
        )
    examples = _load(config, speaker.encoder, "prompt", room)
    prompts = [example.tree.segments[0].tokens.tolist() for example in examples.train]
    seeds = [int(seed) for seed in row_seeds(sampling_seed(config), len(prompts))]
    samples = []
    with _progress(speaker.name, len(prompts)) as advance:
        rollouts = []
        for start in range(0, len(prompts), 256):
            part = slice(start, start + 256)
            rollouts += speaker.generator.generate(prompts[part], speaker.params, seeds=seeds[part])
            advance(len(prompts[part]))
    for example, ids, rollout in zip(examples.train, prompts, rollouts, strict=True):
        assert isinstance(example.record, Prompt)
        samples.append(Sample(example.record, ids, rollout.token_ids, speaker.text(rollout.token_ids), rollout.truncated))
    return examples, samples


# -- data --------------------------------------------------------------------------------------------------------------


def _examples(config: Config, loaded: Any, need: Any) -> tuple[ConversationEncoder, Examples]:
    from accord.data.template import ConversationEncoder
    from accord.models.heads import context_length

    encoder = ConversationEncoder(loaded.tokenizer, config.model.chat_template)
    return encoder, _load(config, encoder, need, context_length(loaded.module))


def _load(config: Config, encoder: ConversationEncoder, need: Any, room: int | None) -> Examples:
    """All rows; longer ones than data.max_length or than the model reads are treated as data.truncate says."""
    from accord.data.dataset import load_examples

    limit = config.data.max_length if room is None else min(config.data.max_length, room)
    return load_examples(config.data, encoder, need, seed=config.run.seed, max_length=limit, train_on=config.sft.train_on)


def _budget(config: Config, examples: Examples) -> int:
    """Tokens of one pack: an example larger than train.max_tokens has one to itself."""
    return max([config.train.max_tokens, *(int(size) for size in examples.train.num_tokens())])


# -- numbers -----------------------------------------------------------------------------------------------------------


def _counts(examples: Examples) -> dict[str, Any]:
    dropped: dict[str, int] = {}
    for report in examples.report.train:
        for reason, count in report.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    return {"examples": len(examples.train), "dropped": dropped}


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _standard_error(share: float, count: int) -> float:
    return math.sqrt(share * (1 - share) / count)


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for key, value in result.items():
        if key == "dropped":
            value = ", ".join(f"{count:,} {reason}" for reason, count in value.items()) or "none"
        elif isinstance(value, float):
            value = f"{value:.4f}"
        elif isinstance(value, int):
            value = f"{value:,}"
        table.add_row(key.replace("_", " "), value)
    Console().print(table)


def _write(path: Path, result: dict[str, Any]) -> None:
    """The file is there whole or not at all."""
    plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in result.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.writing")
        beside.write_text(json.dumps(plain, ensure_ascii=False, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"--out {path}: can't be written: {error.strerror or error}.") from error


class _progress:
    """`with _progress("what", total) as advance: advance(n)`: a bar on a terminal, nothing elsewhere."""

    def __init__(self, what: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task(what, total=total)

    def __enter__(self) -> Callable[[int], None]:
        self.bar.start()
        return lambda count: self.bar.advance(self.task, count)

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()
