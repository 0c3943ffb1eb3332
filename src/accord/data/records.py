"""What every row of every format is turned into (docs/data.md).

A record of a richer kind serves a poorer need: `Preference.demonstration()` is its chosen side, `Preference.as_prompt()` its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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

    def demonstration(self) -> Demonstration:
        return Demonstration((*self.prompt, Message("assistant", self.chosen)), self.origin)

    def as_prompt(self) -> Prompt:
        return Prompt(self.prompt, self.chosen, origin=self.origin)


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


Record = Prompt | Demonstration | Preference | Scored | PlainText
