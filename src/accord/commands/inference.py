"""What generate, chat and evaluate share: their settings, and a model that is ready to answer."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accord.config import Config, load_config
from accord.errors import ConfigError

if TYPE_CHECKING:
    from accord.data.template import ConversationEncoder
    from accord.engine.generate import Generator, SamplingParams

MODEL_KEYS = ("model.dtype", "model.revision", "model.chat_template", "model.trust_remote_code", "run.seed")


def settings(command: str, overrides: Sequence[str], reads: Sequence[str]) -> Config:
    """The configuration that the overrides give. `reads`: keys, or sections with a dot at the end, that the command obeys.

    Raises ConfigError for a key that it would ignore.
    """
    config = load_config(None, list(overrides))
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not any(key == known or (known.endswith(".") and key.startswith(known)) for known in reads):
            raise ConfigError(
                f"command line  {key}: accord {command} does not read this key. It reads "
                + ", ".join(known + "*" if known.endswith(".") else known for known in reads)
                + "."
            )
    return config


def quiet() -> None:
    """Warnings of our own only: the libraries' progress bars and advice would bury them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@dataclass
class Speaker:
    """A model with everything it takes to answer a conversation."""

    name: str  # as the user wrote it
    path: str  # what that stands for
    module: Any
    encoder: ConversationEncoder
    generator: Generator
    params: SamplingParams

    @property
    def context_length(self) -> int | None:
        return self.generator.context_length

    def text(self, token_ids: Sequence[int]) -> str:
        """What an answer says: no special tokens, nothing from a stop string on."""
        from accord.engine.generate import before_stop

        return before_stop(self.encoder.decode(token_ids), self.params.stop)


def load_speaker(model: str, config: Config) -> Speaker:
    """MODEL is a model folder, a hub id, a GGUF file or a run. It stops at its template's end of turn and at its own end tokens.

    Raises ConfigError when there is no such model, or it is a reward model.
    """
    from accord.data.template import ConversationEncoder
    from accord.engine.generate import SamplingParams, make_generator
    from accord.models.load import load_causal

    loaded = load_causal(config.model, seed=config.run.seed, trainable=False, path=model)
    encoder = ConversationEncoder(loaded.tokenizer, config.model.chat_template)
    own: Any = getattr(getattr(loaded.module, "generation_config", None), "eos_token_id", None)
    stop = dict.fromkeys([*encoder.stop_token_ids, *(own if isinstance(own, list) else [] if own is None else [own])])
    params = SamplingParams.from_settings(config.generate, stop)
    for key in ("inference_tp_size", "pin_parameters"):
        if getattr(config.engine, key) != type(config.engine).model_fields[key].default:
            raise ConfigError(f"engine.{key}={getattr(config.engine, key)}: this command samples in one process. Leave it out.")
    generator = make_generator(loaded.module, loaded.tokenizer, config.engine)
    return Speaker(model, loaded.path, loaded.module, encoder, generator, params)


def sampling_seed(config: Config) -> int:
    """`generate.seed`, else `run.seed`."""
    return config.generate.seed if config.generate.seed is not None else config.run.seed
