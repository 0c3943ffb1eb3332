"""Rewards that people gave: `{type: human, path: judgements.jsonl}`, looked up by the texts of prompt and response.

    {"prompt": "a question" or [{"role", "content"} …], "response": "an answer", "score": 4}

It serves where answers repeat (short ones, a small task) or are scored after they were sampled; nobody is asked while a run goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accord.errors import AccordError, ConfigError
from accord.rewards.base import Fallback, MayFail, Sample, as_number, short

Key = tuple[tuple[tuple[str, str], ...], str]  # ((role, text) of each message, response), white space around texts removed


class HumanReward(MayFail):
    """The mean of the scores that people gave to the response; what nobody judged raises AccordError, or counts as the `fallback`.

    The file is read once. Raises ConfigError at construction when it cannot be read, naming the line.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fallback: float | None = None,
        weight: float = 1.0,
        name: str = "human",
        key: str = "ppo.rewards",
    ) -> None:
        self.path, self.weight, self.name, self.key = Path(path).expanduser(), weight, name, key
        self.judgements = read_judgements(self.path, f"{key}.path")
        self._fallback = Fallback(fallback)

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> float:
        messages = tuple((message.role, message.content.strip()) for message in sample.prompt.messages)
        scores = self.judgements.get((messages, sample.response.strip()))
        if scores is None:
            message = (
                f"{self.key}: nobody has judged the response {short(sample.response)} to the sample {sample.name} in {self.path}."
            )
            return self._fallback.use(AccordError(message))
        return math.fsum(scores) / len(scores)


def read_judgements(path: Path, key: str) -> dict[Key, list[float]]:
    """Every score of every (prompt, response). Raises ConfigError naming `key`, the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}.") from error
    found: dict[Key, list[float]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
                found.setdefault(_key(row), []).append(as_number(row["score"]))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise ConfigError(
                    f'{key}: {path}:{number}: expected {{"prompt", "response", "score"}}, got {short(line)} '
                    f"({type(error).__name__}: {error})."
                ) from None
    if not found:
        raise ConfigError(f"{key}: {path} holds no judgement.")
    return found


def _key(row: Any) -> Key:
    prompt, response = row["prompt"], row["response"]
    if not isinstance(response, str):
        raise TypeError("response is no text")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return tuple((str(message["role"]), message["content"].strip()) for message in messages), response.strip()
