"""ShareGPT: {"conversations": [{"from": "human|gpt|system|function_call|observation", "value"}, …]}, optional "system" and "tools".

A pair has `chosen` and `rejected` turns beside the conversation. With `kto_tag` true or false the last answer is a labelled one. `tools` (a JSON description) is put into the system turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from accord.data.formats.base import (
    RowError,
    check_roles,
    message,
    message_list,
    optional_label,
    optional_number,
    optional_text,
    register,
    with_system,
)
from accord.data.records import Demonstration, Labelled, Messages, Preference, Prompt


@register("sharegpt", ("conversations",))
def read(row: Mapping[str, Any]) -> Prompt | Demonstration | Preference | Labelled:
    turns = _with_system(row, message_list(row["conversations"], "conversations"))
    if row.get("chosen") is not None or row.get("rejected") is not None:
        chosen, rejected = message(row.get("chosen"), "chosen"), message(row.get("rejected"), "rejected")
        for turn, column in ((chosen, "chosen"), (rejected, "rejected")):
            if turn.role != "assistant":
                raise RowError(f"{column}: roles out of order: it is a {turn.role} turn, expected gpt")
        check_roles(turns, "prompt")
        return Preference(turns, chosen.content, rejected.content, optional_number(row, "margin"))
    if turns and turns[-1].role == "assistant":
        desirable = optional_label(row, "kto_tag")
        return Demonstration(turns) if desirable is None else Labelled(turns[:-1], turns[-1].content, desirable)
    return Prompt(turns)


def _with_system(row: Mapping[str, Any], turns: Messages) -> Messages:
    system = optional_text(row, "system")
    if turns and turns[0].role == "system":
        system = "\n\n".join(filter(None, (system, turns[0].content)))
        turns = turns[1:]
    tools = row.get("tools")
    if tools:
        described = tools if isinstance(tools, str) else json.dumps(tools, ensure_ascii=False, default=str)
        if described.strip() not in ("", "[]"):
            system = "\n\n".join(filter(None, (system, f"Tools:\n{described}")))
    return with_system(system, turns)
