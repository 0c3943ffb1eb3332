"""The OpenAI / `transformers` way: {"messages": [{"role", "content"}, …]}, and prompts with completions or pairs.

Pairs: {"prompt", "chosen", "rejected"}, each text or a list of turns; chosen and rejected may also be whole conversations that share
their beginning. {"prompt", "completion"} (or "response") is a demonstration, with "score" a scored answer; {"prompt"} alone a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accord.data.formats.base import RowError, UnusableError, check_roles, message_list, optional_number, register, text
from accord.data.records import Demonstration, Message, Messages, Preference, Prompt, Record, Scored

_COMPLETIONS = ("completion", "response")


def _is_turns(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(turn, Mapping) for turn in value)


def _fits(row: Mapping[str, Any]) -> bool:
    has_prompt = row.get("messages") is not None or row.get("prompt") is not None
    return has_prompt or (_is_turns(row.get("chosen")) and _is_turns(row.get("rejected")))


@register(
    "messages",
    ("messages",),
    ("prompt", "chosen", "rejected"),
    ("prompt", "completion"),
    ("prompt",),
    ("chosen", "rejected"),
    looks_like=_fits,
)
def read(row: Mapping[str, Any]) -> Record:
    if isinstance(row.get("label"), bool):
        raise RowError("label: rows with a true/false label need the KTO loss, which is not there yet")
    prompt = _prompt(row)
    if row.get("chosen") is not None or row.get("rejected") is not None:
        return _pair(row, prompt)
    score = optional_number(row, "score")
    for column in _COMPLETIONS:
        if row.get(column) is not None:
            return _answered((*prompt, *_completion(row, column)), score)
    if prompt and prompt[-1].role == "assistant":
        return _answered(prompt, score)
    return Prompt(prompt)


def _prompt(row: Mapping[str, Any]) -> Messages:
    for column in ("messages", "prompt"):
        value = row.get(column)
        if isinstance(value, str) and column == "prompt":
            return (Message("user", value),)
        if value is not None:
            return message_list(value, column)
    return ()


def _completion(row: Mapping[str, Any], column: str) -> Messages:
    value = row.get(column)
    return message_list(value, column) if isinstance(value, list | tuple) else (Message("assistant", text(row, column)),)


def _answered(messages: Messages, score: float | None) -> Demonstration | Scored:
    check_roles(messages, "assistant")
    if score is None:
        return Demonstration(messages)
    return Scored(messages[:-1], messages[-1].content, score)


def _pair(row: Mapping[str, Any], prompt: Messages) -> Preference:
    sides: list[Messages] = []
    for column in ("chosen", "rejected"):
        turns = _completion(row, column)
        whole = turns if prompt and turns[: len(prompt)] == prompt else (*prompt, *turns)
        check_roles(whole, "assistant")
        sides.append(whole)
    chosen, rejected = sides
    if chosen[:-1] != rejected[:-1]:
        raise UnusableError("chosen and rejected have different prompts")
    return Preference(chosen[:-1], chosen[-1].content, rejected[-1].content, optional_number(row, "margin"))
