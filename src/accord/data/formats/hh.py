"""Anthropic's HH text and rm-static: conversations as one string with `Human:` and `Assistant:` at the turns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from accord.data.formats.base import RowError, UnusableError, optional_number, register, text
from accord.data.records import Demonstration, Message, Messages, Preference, Prompt

_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ANSWER = "\n\nAssistant:"
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_dialogue(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("Human:")


def turns(dialogue: str, column: str) -> Messages:
    """The turns of a text. Several of one side in a row (the data has some) are one turn. Raises RowError without a Human turn first."""
    pieces = _TURN.split("\n\n" + dialogue.strip())
    merged: list[Message] = []
    for name, content in zip(pieces[1::2], pieces[2::2], strict=True):
        role, content = _ROLES[name], content.strip()
        if merged and merged[-1].role == role:
            merged[-1] = Message(role, f"{merged[-1].content}\n\n{content}")
        else:
            merged.append(Message(role, content))
    if not merged or merged[0].role != "user" or pieces[0].strip():
        raise RowError(f"{column}: expected a text that begins with 'Human:'")
    return tuple(merged)


@register("hh", ("chosen", "rejected"), looks_like=lambda row: row.get("prompt") is None and is_dialogue(row["chosen"]))
def read_hh(row: Mapping[str, Any]) -> Preference:
    """{"chosen", "rejected"}: the prompt is what both share up to the last assistant turn."""
    prompt, chosen = _split(text(row, "chosen"), "chosen")
    other, rejected = _split(text(row, "rejected"), "rejected")
    if prompt != other:
        raise UnusableError("chosen and rejected have different prompts")
    return Preference(_prompt(prompt, "chosen"), chosen, rejected, optional_number(row, "margin"))


@register("rm-static", ("prompt",), looks_like=lambda row: is_dialogue(row["prompt"]))
def read_rm_static(row: Mapping[str, Any]) -> Preference | Demonstration | Prompt:
    """{"prompt", "response", "chosen", "rejected"}; without a pair the response (or completion) is a demonstration."""
    prompt = _prompt(text(row, "prompt").strip().removesuffix("Assistant:"), "prompt")
    if row.get("chosen") is not None or row.get("rejected") is not None:
        return Preference(prompt, text(row, "chosen").strip(), text(row, "rejected").strip(), optional_number(row, "margin"))
    for column in ("response", "completion"):
        if row.get(column) is not None:
            return Demonstration((*prompt, Message("assistant", text(row, column).strip())))
    return Prompt(prompt)


def _split(dialogue: str, column: str) -> tuple[str, str]:
    prompt, mark, answer = dialogue.rpartition(_ANSWER)
    if not mark:
        raise RowError(f"{column}: has no 'Assistant:' turn")
    if _TURN.search(answer):
        raise RowError(f"{column}: roles out of order: it ends with a Human turn, expected an Assistant turn")
    return prompt, answer.strip()


def _prompt(dialogue: str, column: str) -> Messages:
    messages = turns(dialogue, column)
    if messages[-1].role != "user":
        raise UnusableError("the answer does not follow a human turn")
    return messages
