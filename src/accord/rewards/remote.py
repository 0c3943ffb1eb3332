"""A reward that is an HTTP service: `{type: remote, url: …}`.

POST url   {"samples": [{"prompt": [{"role", "content"} …], "response": text, "reference": text or null, "meta": {…},
                             "truncated": bool} …]}
200        {"scores": [number …]}                                              one a sample, in order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accord.errors import AccordError
from accord.rewards.base import Fallback, MayFail, Sample, as_number, short
from accord.rewards.http import Endpoint, RequestFailed, jsonable, secret
from accord.rewards.waiting import Background


class RemoteReward(MayFail):
    """Scores that a service gives, asked in batches, several at once.

    No answer, 408, 429 and 5xx are tried again at growing distances. What remains, any other status, and an answer that is not one
    finite number a sample raise AccordError naming the address and the sample, or count as the `fallback` of those samples.
    Raises ConfigError at construction when an environment variable of `headers_env` (header → variable) is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        headers_env: Mapping[str, str] | None = None,
        batch_size: int = 16,
        concurrency: int = 4,
        timeout: float = 60.0,
        retries: int = 3,
        fallback: float | None = None,
        weight: float = 1.0,
        name: str = "remote",
        key: str = "ppo.rewards",
    ) -> None:
        headers = {header: secret(variable, f"{key}.headers_env") for header, variable in (headers_env or {}).items()}
        self.endpoint = Endpoint(url, headers, timeout, retries)
        self.batch_size, self.concurrency = batch_size, concurrency
        self.weight, self.name, self.key = weight, name, key
        self._background = Background()
        self._fallback = Fallback(fallback)

    def score(self, samples: Sequence[Sample]) -> list[float]:
        batches = [samples[i : i + self.batch_size] for i in range(0, len(samples), self.batch_size)]
        calls = [lambda batch=batch: self.endpoint.post({"samples": [_as_json(sample) for sample in batch]}) for batch in batches]
        answers = self._background.run(calls, self.concurrency, stop_at_error=self.fallback is None)
        results: dict[int, list[float]] = {}
        # Those that failed come first: where there is no fallback, the requests after them were not made.
        for i in sorted(range(len(batches)), key=lambda i: not isinstance(answers[i], BaseException)):
            try:
                results[i] = self._read(batches[i], answers[i])
            except AccordError as error:
                results[i] = [self._fallback.use(error, len(batches[i]))] * len(batches[i])
        return [score for i in range(len(batches)) for score in results[i]]

    def _read(self, batch: Sequence[Sample], answer: Any) -> list[float]:
        """The scores of one batch. Raises AccordError for an answer that is of no use at all."""
        others = f" and {len(batch) - 1} more" if len(batch) > 1 else ""
        where = f"{self.key}: {self.endpoint.name}"
        asked = f"Asked about the sample {batch[0].name}{others}."
        if isinstance(answer, RequestFailed):
            raise AccordError(f"{where} {answer}. {asked}")
        if isinstance(answer, BaseException):
            raise AccordError(f"{where}: {type(answer).__name__}: {answer}. {asked}") from answer
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise AccordError(
                f'{where} answered {self.endpoint.clean(short(answer))}; expected {{"scores": [number …]}}. {asked}'
            )
        if len(scores) != len(batch):
            raise AccordError(f"{where} gave {len(scores)} scores for {len(batch)} samples. {asked}")
        return [self._number(sample, score) for sample, score in zip(batch, scores, strict=True)]

    def _number(self, sample: Sample, score: Any) -> float:
        try:
            if isinstance(score, bool):
                raise ValueError(f"{score}; expected a number")
            return as_number(score)
        except ValueError as error:
            message = f"{self.key}: {self.endpoint.name} gave {error} for the sample {sample.name}."
            return self._fallback.use(AccordError(message))


def _as_json(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": [message.as_dict() for message in sample.prompt.messages],
        "response": sample.response,
        "reference": sample.prompt.reference,
        "meta": jsonable(sample.prompt.meta),
        "truncated": sample.truncated,
    }
