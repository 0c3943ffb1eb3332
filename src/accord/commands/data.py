"""`accord data check`: look at the data before training on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accord.config import Config
    from accord.data.check import Check
    from accord.data.needs import Need
    from accord.data.template import ConversationEncoder


def check(config: Config, strict: bool = False, examples: int = 3) -> int:
    """Print what each stage's data becomes. Returns 2 if it would end a run (`strict`: also for warnings), else 0.

    A configuration for one stage is checked as that stage reads it; one whose stages read different data, stage by stage; otherwise
    every source for the most that its rows can be used for. Raises DataError for a source that can't be read at all.
    """
    from rich.console import Console

    from accord.data.check import print_check

    console = Console()
    encoder = _encoder(config)
    results = [_check_stage(config, config.stage, encoder)] if config.stage else _check_all(config, encoder)
    if (too_long := _beyond_context(config)) is not None:
        for result in results:
            if result.need != "prompt":  # PPO compares what its prompts really have
                result.errors.append(too_long)
    for result in results:
        print_check(result, console, encoder, examples)
    return 2 if any(result.errors or (strict and result.warnings) for result in results) else 0


def _beyond_context(config: Config) -> str | None:
    """What training would refuse: sequences that may be longer than the model reads."""
    if config.model.path is None:
        return None
    from accord.models.load import context_of

    context, longest = context_of(config.model), config.data.max_length
    if context is None or longest <= context:
        return None
    return f"data.max_length is {longest:,}, but the model reads at most {context:,} tokens. Set data.max_length to {context:,} or less."


def _encoder(config: Config) -> ConversationEncoder | None:
    """None where no tokenizer exists yet."""
    model = config.model
    if model.path is None:
        return None
    from accord.data.template import ConversationEncoder
    from accord.models.load import load_tokenizer

    tokenizer = load_tokenizer(
        model.path, model.chat_template, revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    return ConversationEncoder(tokenizer, model.chat_template)


def _check_all(config: Config, encoder: ConversationEncoder | None) -> list[Check]:
    from accord.data.check import kind_of_source
    from accord.data.reading import sources_of

    tied = any(source.stages for part in (config.data.train, config.data.valid) for source in part or ())
    if config.data.train is None or tied or any("data" in override for override in config.stages.values()):
        staged = [config.for_stage(stage) for stage in config.pipeline.stages]
        return [_check_stage(one, str(one.stage), encoder) for one in staged if one.data.train is not None] or [_none(config)]
    valid = sources_of(config.data, "valid")
    results = []
    for source in sources_of(config.data, "train"):
        need = kind_of_source(source)
        results.append(_run(config, source.name, need, [source], valid, encoder))
    return results


def _none(config: Config) -> Check:
    from accord.data.reading import sources_of

    sources_of(config.data, "train")  # raises: no training data is named
    raise AssertionError


def _check_stage(config: Config, stage: str, encoder: ConversationEncoder | None) -> Check:
    from accord.data.needs import need_of
    from accord.data.reading import sources_of

    return _run(
        config, stage, need_of(config, stage), sources_of(config.data, "train"), sources_of(config.data, "valid"), encoder
    )


def _run(config: Config, title: str, need: Need, train: list, valid: list, encoder: ConversationEncoder | None) -> Check:
    from accord.data.check import Limits, check_data
    from accord.data.dataset import Options

    data = config.data
    options = Options(
        need, data.max_length, data.truncate, data.on_bad_row, config.sft.train_on if need == "demonstration" else "assistant"
    )
    limits = Limits(config.train.batch_size, config.train.max_tokens, data.holdout, config.run.seed)
    return check_data(title, train, valid, encoder, options, limits, cache=data.cache)
