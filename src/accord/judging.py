"""Answers of several models to the same prompts, judged by one function: the table at the end of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accord.data.dataset import Example, load_examples
from accord.data.packing import pack_trees
from accord.data.records import Prompt
from accord.data.template import ConversationEncoder
from accord.data.trees import branching
from accord.engine.generate import SamplingParams, before_stop, make_generator
from accord.errors import DataError
from accord.models.forward import FrozenModel
from accord.models.load import LoadedModel, load_causal
from accord.rewards.base import Sample
from accord.rewards.function import FunctionReward

if TYPE_CHECKING:
    from accord.config import Config


@dataclass(frozen=True)
class Judged:
    """What one model's answers are worth."""

    name: str
    score: float  # mean over all prompts
    by_language: dict[str, float]  # mean over the prompts whose meta names the language; empty where none does
    kl: float  # mean over answers of Σ_t log π - log π_of the first model listed; 0 for that model itself
    length: float  # mean tokens of an answer, the end token included
    answers: list[dict[str, Any]]  # {"prompt", "response", "score"}, in the order of the prompts

    def as_dict(self) -> dict[str, Any]:
        return {"score": self.score, "by_language": self.by_language, "kl": self.kl, "length": self.length}


def judge_models(config: Config, models: Mapping[str, Path]) -> list[Judged]:
    """Sample one answer a prompt of `pipeline.judge_prompts` from every model, at the `generate` settings, and judge it.

    Every model is asked with the same seeds. The KL is measured against the first model listed (the SFT model in a pipeline that
    has one). Raises DataError when there is no prompt, and AccordError when the judge fails on an answer.
    """
    judge = FunctionReward(str(config.pipeline.judge), key="pipeline.judge")
    base: tuple[LoadedModel, FrozenModel] | None = None
    results = []
    for name, path in models.items():
        loaded = load_causal(config.model, seed=config.run.seed, trainable=False, path=str(path), dtype="float32")
        model = FrozenModel(loaded.module)
        if base is None:
            base = (loaded, model)
        results.append(_judge(config, name, loaded, model, base[1], judge))
    return results


def _judge(
    config: Config, name: str, loaded: LoadedModel, model: FrozenModel, base: FrozenModel, judge: FunctionReward
) -> Judged:
    encoder = ConversationEncoder(loaded.tokenizer, config.model.chat_template)
    examples = _prompts(config, encoder)
    params = SamplingParams.from_settings(config.generate, encoder.stop_token_ids)
    prompt_ids = [example.tree.segments[0].tokens.tolist() for example in examples]
    seed = config.generate.seed if config.generate.seed is not None else config.run.seed
    rollouts = make_generator(loaded.module, loaded.tokenizer, config.engine).generate(
        prompt_ids, params, seeds=[seed * 1_000_003 + i for i in range(len(prompt_ids))]
    )
    samples = []
    for example, ids, rollout in zip(examples, prompt_ids, rollouts, strict=True):
        assert isinstance(example.record, Prompt)  # what load_examples gives for the need "prompt"
        text = before_stop(encoder.decode(rollout.token_ids), params.stop)
        samples.append(Sample(example.record, ids, rollout.token_ids, text, rollout.truncated))
    scores = judge.score(samples)
    languages: dict[str, list[float]] = {}
    for sample, score in zip(samples, scores, strict=True):
        if "language" in sample.prompt.meta:
            languages.setdefault(str(sample.prompt.meta["language"]), []).append(score)
    return Judged(
        name,
        float(np.mean(scores)),
        {language: float(np.mean(own)) for language, own in sorted(languages.items())},
        0.0
        if model is base
        else _kl(model, base, prompt_ids, [r.token_ids for r in rollouts], config.train.max_tokens, params.temperature or 1.0),
        float(np.mean([len(rollout.token_ids) for rollout in rollouts])),
        [
            {"prompt": [message.as_dict() for message in sample.prompt.messages], "response": sample.response, "score": score}
            for sample, score in zip(samples, scores, strict=True)
        ],
    )


def _prompts(config: Config, encoder: ConversationEncoder) -> Sequence[Example]:
    data = config.data.model_copy(update={"train": config.pipeline.judge_prompts, "valid": None, "holdout": 0.0})
    examples = load_examples(data, encoder, "prompt", seed=config.run.seed, max_length=config.data.max_length).train
    if not examples:
        raise DataError("pipeline.judge_prompts: no prompt to judge on.")
    return examples


@torch.no_grad()
def _kl(
    model: FrozenModel,
    base: FrozenModel,
    prompts: list[list[int]],
    responses: list[list[int]],
    max_tokens: int,
    temperature: float,
) -> float:
    trees = [branching(prompt, [response]) for prompt, response in zip(prompts, responses, strict=True)]
    total = 0.0
    for pack in pack_trees(trees, max_tokens):
        difference = (
            model.token_logprobs(pack, temperature=temperature).logprobs
            - base.token_logprobs(pack, temperature=temperature).logprobs
        )
        total += float(difference.double().sum())
    return total / len(trees)
