"""The sources of `ppo.rewards`, from their settings to what scores."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from accord.config import (
    ClassifierReward,
    FormatReward,
    FunctionReward,
    HumanReward,
    JudgeReward,
    LengthReward,
    ModelReward,
    RemoteReward,
    RepetitionReward,
    RewardSource,
)
from accord.data.template import ConversationEncoder
from accord.engine.ranks import join
from accord.engine.trained import frozen_model, shards
from accord.errors import ConfigError
from accord.models.forward import FrozenModel
from accord.models.heads import context_length
from accord.models.load import load_scalar
from accord.models.normalization import Normalization, load_normalization
from accord.models.shared import AdapterScorer
from accord.rewards import Source, human, judge, measures, model, remote
from accord.rewards import classifier as classifiers
from accord.rewards import function as functions
from accord.rewards.base import unique_names
from accord.trainers.critic import reward_on_base

if TYPE_CHECKING:
    from accord.config import Config
    from accord.models.load import LoadedModel

log = logging.getLogger(__name__)


def reward_sources(config: Config, policy: LoadedModel) -> list[Source]:
    """The sources of `ppo.rewards`, ready to score. A reward model is loaded once, however many sources ask it.

    Raises ConfigError naming the source's key where one cannot work: a function, a file, a model or an environment variable is
    missing, or a classifier has no such label.
    """

    def text_of(ids: Sequence[int]) -> str:
        return str(policy.tokenizer.decode([int(i) for i in ids], clean_up_tokenization_spaces=False))

    names = source_names(config.ppo.rewards)
    light = [light_source(source, names[i], f"ppo.rewards.{i}", text_of) for i, source in enumerate(config.ppo.rewards)]
    loaded: dict[str, Any] | None = None
    sources: list[Source] = []
    for i, settings in enumerate(config.ppo.rewards):
        made = light[i]
        if isinstance(settings, ModelReward):
            loaded = loaded or _reward_model(config, policy)
            made = model.ModelReward(
                **loaded,
                max_tokens=config.train.max_tokens,
                normalization=_normalization(loaded["model"], f"ppo.rewards.{i}.normalize") if settings.normalize else None,
                weight=settings.weight,
                name=names[i],
            )
        elif isinstance(settings, ClassifierReward):
            made = _classifier(settings, names[i], f"ppo.rewards.{i}")
        assert made is not None
        sources.append(made)
    return sources


def check_sources(config: Config) -> None:
    """Make every source that loads no model, to say at once what is missing. Raises ConfigError."""
    for i, (source, name) in enumerate(zip(config.ppo.rewards, source_names(config.ppo.rewards), strict=True)):
        light_source(source, name, f"ppo.rewards.{i}", lambda ids: "")


def source_names(sources: Sequence[RewardSource]) -> list[str]:
    """What each source is called in `ppo/score/<name>`: its name, else its type or its function, with -2 … where that is taken."""
    given = [source.name for source in sources if source.name is not None]
    others = iter(
        unique_names(
            [
                source.path.rpartition(":")[2].rpartition(".")[2] if isinstance(source, FunctionReward) else source.type
                for source in sources
                if source.name is None
            ],
            taken=given,
        )
    )
    return [source.name if source.name is not None else next(others) for source in sources]


def light_source(settings: RewardSource, name: str, key: str, decode: functions.Decode) -> Source | None:
    """The source, or None for one that needs a model to be loaded."""
    weight = settings.weight
    match settings:
        case FunctionReward():
            return functions.FunctionReward(
                settings.path, weight, name, f"{key}.path", settings.fallback,
                per_token=settings.per_token, timeout=settings.timeout, concurrency=settings.concurrency, decode=decode,
            )  # fmt: skip
        case RemoteReward():
            return remote.RemoteReward(
                settings.url, headers_env=settings.headers_env, batch_size=settings.batch_size, concurrency=settings.concurrency,
                timeout=settings.timeout, retries=settings.retries, fallback=settings.fallback, weight=weight, name=name, key=key,
            )  # fmt: skip
        case JudgeReward():
            return judge.JudgeReward(
                settings.base_url, settings.model, api_key_env=settings.api_key_env, template=settings.template, scale=settings.scale,
                temperature=settings.temperature, max_tokens=settings.max_tokens, concurrency=settings.concurrency,
                timeout=settings.timeout, retries=settings.retries, fallback=settings.fallback, weight=weight, name=name, key=key,
            )  # fmt: skip
        case LengthReward():
            return measures.LengthReward(settings.min_tokens, settings.max_tokens, weight=weight, name=name)
        case RepetitionReward():
            return measures.RepetitionReward(settings.ngram, weight=weight, name=name)
        case FormatReward():
            return measures.FormatReward(
                settings.pattern, match=settings.match, timeout=settings.timeout, fallback=settings.fallback,
                weight=weight, name=name, key=key,
            )  # fmt: skip
        case HumanReward():
            return human.HumanReward(settings.path, fallback=settings.fallback, weight=weight, name=name, key=key)
    return None


def _normalization(scorer: AdapterScorer | FrozenModel, key: str) -> Normalization:
    whole = scorer.whole if isinstance(scorer, AdapterScorer) else None
    try:
        return load_normalization(whole or scorer.module)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _classifier(settings: ClassifierReward, name: str, key: str) -> classifiers.ClassifierReward:
    module, tokenizer = classifiers.load_classifier(settings.path, settings.dtype, f"{key}.path")
    return classifiers.ClassifierReward(
        module, tokenizer, label=settings.label, output=settings.output, input=settings.input, template=settings.template,
        max_length=settings.max_length, batch_size=settings.batch_size, weight=settings.weight, name=name, key=key,
    )  # fmt: skip


def _reward_model(config: Config, policy: LoadedModel) -> dict[str, Any]:
    settings = config.reward_model
    if settings.path is None:
        raise ConfigError(
            "reward_model.path is needed: ppo.rewards asks a reward model for scores. Train one with `accord reward`, or score with a "
            "function: ppo.rewards=[{type: function, path: module:function}]."
        )
    scorer: AdapterScorer | FrozenModel
    if (on_base := reward_on_base(config, policy)) is not None:
        scorer, tokenizer = on_base, on_base.tokenizer
    else:
        plain = config.model.model_copy(update={"chat_template": None, "lora": None})  # it keeps the template it was trained with
        loaded = load_scalar(settings.path, plain, seed=config.run.seed, trainable=False, dtype=settings.dtype)
        scorer, tokenizer = frozen_model(loaded.module, config.train), loaded.tokenizer
    encoder = None
    if not model.same_tokens(tokenizer, policy.tokenizer):
        log.warning("The reward model has another tokenizer or chat template: answers are handed over as text.")
        encoder = ConversationEncoder(tokenizer, None)
    limits = [limit for limit in (settings.max_length, context_length(scorer.module)) if limit is not None]
    if settings.max_length is not None and min(limits) < settings.max_length:
        raise ConfigError(
            f"reward_model.max_length={settings.max_length:,} is beyond the model's context of {min(limits):,} tokens."
        )
    ranks = join()
    each = partial(ranks.each, lockstep=shards(config.train, ranks))
    return {"model": scorer, "encoder": encoder, "max_length": min(limits, default=None), "each": each}
