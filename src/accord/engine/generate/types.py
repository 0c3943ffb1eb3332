"""What goes into a generator and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from accord.errors import ConfigError

FinishReason = Literal["stop", "length"]
_LEAST = 1e-6  # a float32 logit divided by it is still a number
OnToken = Callable[[int, int], None]  # (number of the prompt in the call, token id), called as each token is sampled


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 truncate nothing.

    The order is that of transformers: repetition penalty, temperature, top-k, top-p of what is left, min-p of what is left.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0  # no end token and no stop string counts before this many tokens
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None  # None: drawn from torch's generator, which the training loop seeds at every step
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError on a value outside its range."""
        for name, ok, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "between 0 and max_new_tokens"),
            ("temperature", self.temperature == 0 or self.temperature >= _LEAST, f"0 (greedy), or {_LEAST:g} or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            (
                "repetition_penalty",
                _LEAST <= self.repetition_penalty <= 1 / _LEAST,
                f"between {_LEAST:g} and {1 / _LEAST:g} (1 is off)",
            ),
            ("stop", all(self.stop), "a list of strings that are not empty"),
        ):
            if not ok:
                raise ConfigError(f"generate.{name}={getattr(self, name)!r}: expected {expected}.")

    @classmethod
    def from_settings(cls, generate: Any, stop_token_ids: Iterable[int]) -> SamplingParams:
        """The `generate` section of the configuration, with the ids that end an answer of this model."""
        return cls(
            max_new_tokens=generate.max_new_tokens,
            min_new_tokens=generate.min_new_tokens,
            temperature=generate.temperature,
            top_p=generate.top_p,
            top_k=generate.top_k,
            min_p=generate.min_p,
            repetition_penalty=generate.repetition_penalty,
            stop=tuple(generate.stop),
            seed=generate.seed,
            stop_token_ids=tuple(stop_token_ids),
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """The sampled distribution is not the tempered one that `Rollout.logprobs` speaks of."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1


@dataclass
class Rollout:
    """One answer.

    `token_ids` ends with the end token when the model itself ended; an answer cut by the length limit has none.
    `logprobs[t] = log_softmax(logits_t / temperature)[token_t]`: tempered, not truncated, without penalty (greedy: temperature 1).
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


class Generator(Protocol):
    """Takes prompts and gives answers, in the order of the prompts."""

    dtype: Any  # the torch.dtype it computes in; None: the weights' own

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        seeds: Sequence[int] | None = None,
        on_token: OnToken | None = None,
    ) -> list[Rollout]:
        """`params`: for all prompts, or one each. `seeds`: one a prompt; the answer is a function of (prompt, seed), whatever its
        neighbours are."""
        ...

    @property
    def context_length(self) -> int | None:
        """The most tokens that prompt and answer may have together; None if there is no limit."""
        ...

    def prepare(self) -> None:
        """Renew copies of weights that have changed."""
        ...

    def refresh(self) -> None:
        """The weights have changed."""
        ...

    def release(self) -> None:
        """Give back what is held beside the weights."""
        ...
