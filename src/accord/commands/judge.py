"""Who scores answers on the command line: a Python function or a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accord.commands.output import weights_state
from accord.config import Config

if TYPE_CHECKING:
    from accord.data.template import ConversationEncoder
    from accord.rewards.base import Sample


class Judge:
    """module:function, or a reward model that reads each model's answers in its own tokens where they differ.

    Raises ConfigError when there is no such function or reward model.
    """

    def __init__(self, judge: str, config: Config) -> None:
        from accord.rewards.function import FunctionReward

        self.config = config
        self.function = FunctionReward(judge, key="--judge") if is_function(judge) else None
        if self.function is None:
            from accord.models.forward import FrozenModel
            from accord.models.load import load_scalar

            self.loaded = load_scalar(judge, config.model, seed=config.run.seed, trainable=False, fresh_head=False)
            self.frozen = FrozenModel(self.loaded.module)

    def state(self) -> str:
        """Changes when the reward model was written anew; "" for a function."""
        return "" if self.function is not None else weights_state(Path(self.loaded.path))

    def score(self, samples: Sequence[Sample], encoder: ConversationEncoder) -> list[float]:
        """One number a sample; `encoder` is that of the model that answered."""
        if self.function is not None:
            return self.function.score(samples)
        from accord.data.template import ConversationEncoder
        from accord.models.heads import context_length
        from accord.rewards.model import ModelReward, same_tokens

        own = ConversationEncoder(self.loaded.tokenizer, self.config.model.chat_template)
        reward = ModelReward(
            self.frozen,
            max_tokens=self.config.train.max_tokens,
            max_length=context_length(self.loaded.module),
            encoder=None if same_tokens(own.tokenizer, encoder.tokenizer) else own,
        )
        return reward.score(samples)


def is_function(judge: str) -> bool:
    return ":" in judge and not judge.startswith("demo:") and not Path(judge).exists()
