"""Alpaca: {"instruction", "input", "output"}, optional "system" and "history": [[question, answer], …].

A pair is `output: [better, worse]` or `chosen` and `rejected`; more outputs are a ranking, the best one first. With `kto_tag` true
or false the answer is a labelled one. Without an output the row is a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accord.data.formats.base import (
    RowError,
    optional_label,
    optional_number,
    optional_text,
    register,
    text,
    with_system,
)
from accord.data.records import Demonstration, Labelled, Message, Messages, Preference, Prompt, Ranking


@register("alpaca", ("instruction", "output"), ("instruction", "chosen", "rejected"), ("instruction",))
def read(row: Mapping[str, Any]) -> Prompt | Demonstration | Preference | Ranking | Labelled:
    prompt = _prompt(row)
    output = row.get("output")
    if row.get("chosen") is not None or row.get("rejected") is not None:
        return Preference(prompt, text(row, "chosen"), text(row, "rejected"), optional_number(row, "margin"))
    if isinstance(output, list | tuple):
        if len(output) < 2 or not all(isinstance(answer, str) for answer in output):
            raise RowError(f"output: expected text or a list of answers, the best one first; found a list of {len(output)}")
        if len(output) > 2:
            return Ranking(prompt, tuple(output), tuple(float(place) for place in range(len(output))))
        return Preference(prompt, output[0], output[1], optional_number(row, "margin"))
    if output is None:
        return Prompt(prompt)
    answer = text(row, "output")
    if (desirable := optional_label(row, "kto_tag")) is not None:
        return Labelled(prompt, answer, desirable)
    return Demonstration((*prompt, Message("assistant", answer)))


def _prompt(row: Mapping[str, Any]) -> Messages:
    turns: list[Message] = []
    history = row.get("history") or ()
    if not isinstance(history, list | tuple):
        raise RowError("history: expected a list of [question, answer]")
    for i, exchange in enumerate(history):
        if not isinstance(exchange, list | tuple) or len(exchange) != 2 or not all(isinstance(side, str) for side in exchange):
            raise RowError(f"history[{i}]: expected [question, answer]")
        turns += [Message("user", exchange[0]), Message("assistant", exchange[1])]
    instruction, extra = text(row, "instruction"), optional_text(row, "input")
    turns.append(Message("user", f"{instruction}\n{extra}" if extra else instruction))
    return with_system(optional_text(row, "system"), tuple(turns))
