"""What every row of every format is turned into (docs/data.md).

A record of a richer kind serves a poorer need (accord.data.needs): `Preference.demonstration()` is its chosen side,
`Preference.as_prompt()` its prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `role` is `system`, `user`, `assistant` or `tool`."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an online method answers. `reference` is the right answer where a rule reward needs one."""

    messages: Messages
    reference: str | None = None
    meta: dict[str, Any] = field(default_factory=dict, compare=False)
    origin: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation that ends with an assistant turn, to be imitated."""

    messages: Messages
    origin: str = field(default="", compare=False)

    def as_prompt(self) -> Prompt:
        return Prompt(self.messages[:-1], self.messages[-1].content, origin=self.origin)


@dataclass(frozen=True, slots=True)
class Preference:
    """Two answers to one prompt, the better one first. `margin` is how much better, where it is known."""

    prompt: Messages
    chosen: str
    rejected: str
    margin: float | None = None
    origin: str = field(default="", compare=False)

    def ranking(self) -> Ranking:
        return Ranking(self.prompt, (self.chosen, self.rejected), (0.0, 1.0), self.origin)

    def demonstration(self) -> Demonstration:
        return Demonstration((*self.prompt, Message("assistant", self.chosen)), self.origin)

    def as_prompt(self) -> Prompt:
        return Prompt(self.prompt, self.chosen, origin=self.origin)


@dataclass(frozen=True, slots=True)
class Ranking:
    """K ≥ 2 answers to one prompt with a rank each: the lower is better, equal ranks are ties."""

    prompt: Messages
    responses: tuple[str, ...]
    ranks: tuple[float, ...]
    origin: str = field(default="", compare=False)

    @property
    def ordered(self) -> bool:
        """Whether any answer is better than another."""
        return len(set(self.ranks)) > 1

    def best(self) -> str:
        """The first of the best answers."""
        return min(zip(self.ranks, self.responses, strict=True), key=lambda item: item[0])[1]

    def only(self, numbers: Iterable[int]) -> Ranking:
        """The ranking of these of its answers."""
        kept = tuple(numbers)
        return replace(self, responses=tuple(self.responses[i] for i in kept), ranks=tuple(self.ranks[i] for i in kept))

    def pairs(self) -> tuple[Preference, ...]:
        """One pair for every two answers of different ranks, in the order of `responses`."""
        pairs = []
        for i, j in combinations(range(len(self.responses)), 2):
            if self.ranks[i] != self.ranks[j]:
                better, worse = (i, j) if self.ranks[i] < self.ranks[j] else (j, i)
                pairs.append(Preference(self.prompt, self.responses[better], self.responses[worse], origin=self.origin))
        return tuple(pairs)

    def demonstration(self) -> Demonstration:
        return Demonstration((*self.prompt, Message("assistant", self.best())), self.origin)

    def as_prompt(self) -> Prompt:
        return Prompt(self.prompt, self.best() if self.responses else None, origin=self.origin)


@dataclass(frozen=True, slots=True)
class Labelled:
    """An answer that is wanted or not."""

    prompt: Messages
    response: str
    desirable: bool
    origin: str = field(default="", compare=False)

    def demonstration(self) -> Demonstration:
        return Demonstration((*self.prompt, Message("assistant", self.response)), self.origin)

    def as_prompt(self) -> Prompt:
        return Prompt(self.prompt, self.response if self.desirable else None, origin=self.origin)


@dataclass(frozen=True, slots=True)
class Scored:
    """An answer with a number for how good it is (0 is a score)."""

    prompt: Messages
    response: str
    score: float
    origin: str = field(default="", compare=False)

    def demonstration(self) -> Demonstration:
        return Demonstration((*self.prompt, Message("assistant", self.response)), self.origin)

    def as_prompt(self) -> Prompt:
        return Prompt(self.prompt, origin=self.origin)


@dataclass(frozen=True, slots=True)
class PlainText:
    """One document, every token of which is trained on (continued pre-training, PTX)."""

    text: str
    origin: str = field(default="", compare=False)


Record = Prompt | Demonstration | Preference | Ranking | Labelled | Scored | PlainText
