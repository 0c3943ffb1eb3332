"""ChatLLaMA's three files: {"user_input", "completion"}, with "score" (0 to 5) for the reward model, without completion for RL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accord.data.formats.base import optional_number, register, text
from accord.data.records import Demonstration, Message, Prompt, Scored


@register("chatllama", ("user_input",))
def read(row: Mapping[str, Any]) -> Prompt | Demonstration | Scored:
    prompt = (Message("user", text(row, "user_input")),)
    if row.get("completion") is None:
        return Prompt(prompt)
    completion = text(row, "completion")
    score = optional_number(row, "score")
    if score is not None:
        return Scored(prompt, completion, score)
    return Demonstration((*prompt, Message("assistant", completion)))
