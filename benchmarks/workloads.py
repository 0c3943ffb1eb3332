"""What the generation benchmark asks for: seeded requests, the same for every engine, and how fast Accord means to be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

ModelName = Literal["smollm2", "tiny"]
Dtype = Literal["float32", "bfloat16"]

_FIRST_TOKEN = 10  # below it vocabularies keep their special tokens


class Request(NamedTuple):
    """A prompt and exactly how many tokens are to follow it."""

    prompt: list[int]
    answer: int
    seed: int


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    make: Callable[[random.Random, int], list[Request]]  # from a generator and the size of the vocabulary
    model: ModelName = "smollm2"
    slots: int = 32  # sequences that an engine computes together, at most
    shared_prompt: bool = False  # what a prefix cache is for
    targets: dict[tuple[Dtype, str], float] = field(default_factory=dict)  # (dtype, rival) → tokens/s of Accord over the rival's

    def requests(self, vocabulary: int) -> list[Request]:
        return self.make(random.Random(0), vocabulary)


def ragged(count: int, prompt: tuple[int, int], answer: tuple[int, int]) -> Callable[[random.Random, int], list[Request]]:
    """Lengths drawn evenly between the two ends, both included."""

    def make(rng: random.Random, vocabulary: int) -> list[Request]:
        return [Request(_tokens(rng, vocabulary, rng.randint(*prompt)), rng.randint(*answer), seed) for seed in range(count)]

    return make


def samples(count: int, prompt: int, answer: int) -> Callable[[random.Random, int], list[Request]]:
    """Several answers to one prompt."""

    def make(rng: random.Random, vocabulary: int) -> list[Request]:
        tokens = _tokens(rng, vocabulary, prompt)
        return [Request(tokens, answer, seed) for seed in range(count)]

    return make


def _tokens(rng: random.Random, vocabulary: int, count: int) -> list[int]:
    return [rng.randrange(_FIRST_TOKEN, vocabulary) for _ in range(count)]


def shortened(requests: Sequence[Request], answer: int) -> list[Request]:
    return [request._replace(answer=min(request.answer, answer)) for request in requests]


CASES = (
    Case(
        "ragged",
        ragged(96, (16, 256), (16, 127)),
        targets={("float32", "transformers"): 3.5, ("float32", "vllm"): 1.0, ("bfloat16", "vllm"): 1.0},
    ),
    Case(
        "uniform32",
        ragged(32, (64, 64), (64, 64)),
        targets={("float32", "transformers"): 1.7, ("bfloat16", "transformers"): 2.5},
    ),
    Case("uniform8", ragged(8, (64, 64), (64, 64)), targets={("float32", "transformers"): 2.0}),
    Case("uniform1", ragged(1, (64, 64), (64, 64)), targets={("float32", "transformers"): 1.7}),
    Case("samples8", samples(8, 256, 64), shared_prompt=True, targets={("float32", "transformers"): 3.0}),
    # All 64 at once: at this size a step costs the same for 32 rows as for 64, and transformers would only lose by two batches.
    Case("tiny", ragged(64, (16, 64), (16, 127)), model="tiny", slots=64, targets={("float32", "transformers"): 4.0}),
)
