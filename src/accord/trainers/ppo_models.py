"""The models of PPO: what is loaded from where, and what does not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accord.data.packing import Pack
from accord.engine.trained import TrainedModel
from accord.errors import ConfigError
from accord.models.distribution import Distribution
from accord.models.forward import PackedModel
from accord.models.heads import context_length
from accord.models.load import LoadedModel, load_tokenizer
from accord.trainers.reference import reference_for

if TYPE_CHECKING:
    from accord.config import Config


def check_settings(config: Config) -> None:
    """What PPO cannot work with, said before anything is loaded. Raises ConfigError."""
    if config.model.path is None:
        raise ConfigError("model.path is needed: PPO improves a model that already answers, such as the run of `accord sft`.")
    lora = config.model.lora
    if not config.model.disable_dropout or (lora is not None and lora.dropout > 0):
        key = "model.lora.dropout=0" if config.model.disable_dropout else "model.disable_dropout=true"
        raise ConfigError(
            f"with dropout the ratio of new to old log-probabilities is noise from the first update on. PPO needs {key}."
        )
    if config.generate.temperature == 0:
        raise ConfigError("generate.temperature=0: PPO learns from samples, and greedy answers are none. Use 1.0.")


class Reference:
    """π_ref: a frozen model of its own, or with LoRA the policy as it was at the start, which costs no memory."""

    def __init__(self, config: Config, policy: TrainedModel) -> None:
        path = config.reference.path
        if path is not None and path != config.model.path and load_tokenizer(path).get_vocab() != policy.tokenizer.get_vocab():
            raise ConfigError(
                f"reference.path: {path} has another tokenizer than model.path; their log-probabilities cannot be compared."
            )
        self.policy, self.frozen = policy, reference_for(config, policy)
        if config.ppo.kl.estimator == "full" and self.frozen is not None:
            ours, theirs = (m.inner.config.get_text_config().vocab_size for m in (policy, self.frozen))
            if ours != theirs:
                raise ConfigError(
                    f"ppo.kl.estimator=full compares the policy's {ours:,} outputs with the reference's {theirs:,}. Use k1 or k3."
                )

    def distribution(self, pack: Pack, temperature: float) -> Distribution:
        """π_ref where the pack's targets are predicted, without gradient."""
        if self.frozen is not None:
            return self.frozen.distribution(pack, temperature)
        with self.policy.as_reference():
            return self.policy.distribution(pack, temperature)

    @torch.no_grad()
    def token_logprobs(self, pack: Pack, temperature: float) -> Tensor:
        """[N] log π_ref of the pack's targets, without gradient."""
        return self.distribution(pack, temperature).at(pack.targets.to(self.policy.device)).logprobs


def check_lengths(config: Config, longest_prompt: int, policy: LoadedModel, critic: LoadedModel | PackedModel | None) -> None:
    """A prompt and a whole answer must fit the contexts of actor and critic, and one pack. Raises ConfigError with the cure."""
    needed = longest_prompt + config.generate.max_new_tokens
    said = f"the longest prompt has {longest_prompt:,} tokens; with generate.max_new_tokens={config.generate.max_new_tokens:,} that is {needed:,}"
    for name, loaded in (("model", policy), ("critic", critic)):
        limit = None if loaded is None else context_length(loaded.module)
        if limit is not None and needed > limit:
            raise ConfigError(
                f"{said}, but the {name} takes {limit:,}. Lower data.max_length to {max(1, limit - config.generate.max_new_tokens):,} "
                "or lower generate.max_new_tokens."
            )
    most = config.engine.max_out_tokens
    if most is not None and needed > most:
        raise ConfigError(f"{said}, but engine.max_out_tokens is {most:,}. Raise it to {needed:,}, or leave it out.")
    if needed > config.train.max_tokens:
        raise ConfigError(f"{said}, but train.max_tokens is {config.train.max_tokens:,}. Raise it to {needed:,}.")


def count_parameters(model: PackedModel) -> int:
    return sum(parameter.numel() for parameter in model.module.parameters())
