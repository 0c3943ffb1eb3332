"""The OpenAI / `transformers` way: {"messages": [{"role", "content"}, …]}, and prompts with completions or pairs.

Pairs: {"prompt", "chosen", "rejected"}, each text or a list of turns; chosen and rejected may also be whole conversations that share
their beginning. {"prompt", "completion"} (or "response") is a demonstration, with "score" a scored answer, with "label" true or false a
labelled one; {"prompt"} alone a prompt. A ranking: {"prompt", "responses"} with "ranks" (lower is better) or "scores" (higher is better).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accord.data.formats.base import (
    RowError,
    UnusableError,
    check_roles,
    message_list,
    number,
    optional_label,
    optional_number,
    ranks_of_scores,
    register,
    text,
)
from accord.data.records import Demonstration, Labelled, Message, Messages, Preference, Prompt, Ranking, Record, Scored

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
    ("prompt", "responses"),
    ("prompt",),
    ("chosen", "rejected"),
    looks_like=_fits,
)
def read(row: Mapping[str, Any]) -> Record:
    prompt = _prompt(row)
    if row.get("chosen") is not None or row.get("rejected") is not None:
        return _pair(row, prompt)
    if row.get("responses") is not None:
        return _ranking(row, prompt)
    for column in _COMPLETIONS:
        if row.get(column) is not None:
            return _answered(row, (*prompt, *_completion(row[column], column)))
    if prompt and prompt[-1].role == "assistant":
        return _answered(row, prompt)
    return Prompt(prompt)


def _prompt(row: Mapping[str, Any]) -> Messages:
    for column in ("messages", "prompt"):
        value = row.get(column)
        if isinstance(value, str) and column == "prompt":
            return (Message("user", value),)
        if value is not None:
            return message_list(value, column)
    return ()


def _completion(value: Any, column: str) -> Messages:
    if isinstance(value, list | tuple):
        return message_list(value, column)
    return (Message("assistant", text({column: value}, column)),)


def _answered(row: Mapping[str, Any], messages: Messages) -> Demonstration | Scored | Labelled:
    check_roles(messages, "assistant")
    score, desirable = optional_number(row, "score"), optional_label(row, "label")
    if score is not None and desirable is not None:
        raise RowError("label and score: an answer has a label or a score here, not both; remove or rename one of the columns")
    if desirable is not None:
        return Labelled(messages[:-1], messages[-1].content, desirable)
    return Demonstration(messages) if score is None else Scored(messages[:-1], messages[-1].content, score)


def _ranking(row: Mapping[str, Any], prompt: Messages) -> Ranking:
    responses = row["responses"]
    if not isinstance(responses, list | tuple):
        raise RowError("responses: expected a list of answers")
    given = [column for column in ("ranks", "scores") if row.get(column) is not None]
    if len(given) != 1:
        found = "both" if given else "neither"
        raise RowError(f"responses: expected beside them ranks (lower is better) or scores (higher is better), found {found}")
    values = row[given[0]]
    if not isinstance(values, list | tuple):
        raise RowError(f"{given[0]}: expected a list of numbers")
    numbers = [number(value, f"{given[0]}[{i}]") for i, value in enumerate(values)]
    sides = [_side(prompt, response, f"responses[{i}]") for i, response in enumerate(responses)]
    if any(side[:-1] != sides[0][:-1] for side in sides):
        raise UnusableError("the answers have different prompts")
    ranks = ranks_of_scores(numbers) if given == ["scores"] else tuple(numbers)
    return Ranking(sides[0][:-1] if sides else prompt, tuple(side[-1].content for side in sides), ranks)


def _side(prompt: Messages, value: Any, column: str) -> Messages:
    """The whole conversation; `value` may begin with the prompt or go on after it."""
    turns = _completion(value, column)
    whole = turns if prompt and turns[: len(prompt)] == prompt else (*prompt, *turns)
    check_roles(whole, "assistant")
    return whole


def _pair(row: Mapping[str, Any], prompt: Messages) -> Preference:
    chosen, rejected = (_side(prompt, row.get(column), column) for column in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise UnusableError("chosen and rejected have different prompts")
    return Preference(chosen[:-1], chosen[-1].content, rejected[-1].content, optional_number(row, "margin"))
