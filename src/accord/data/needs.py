"""What a stage needs of the data, and how a record serves it: a richer record serves a poorer need (docs/data.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from accord.data.formats import RowError, UnusableError
from accord.data.records import Demonstration, Labelled, PlainText, Preference, Prompt, Ranking, Record, Scored

Need = Literal["demonstration", "preference", "ranking", "labelled", "scored", "prompt", "text"]
EMPTY_ANSWER = "empty answer"
IDENTICAL = "identical answers"
_KINDS: dict[type, str] = {
    Demonstration: "a demonstration",
    Preference: "a preference pair",
    Ranking: "a ranking",
    Labelled: "a labelled answer",
    Scored: "a scored answer",
    Prompt: "a prompt without an answer",
    PlainText: "plain text",
}
_NEEDED: dict[Need, str] = {
    "demonstration": "demonstrations (messages that end with an assistant turn, or a prompt with a completion)",
    "preference": "preference pairs (prompt, chosen, rejected)",
    "ranking": "rankings (prompt, responses, ranks or scores) or preference pairs (prompt, chosen, rejected)",
    "labelled": "labelled answers (prompt, response, label) or preference pairs (prompt, chosen, rejected)",
    "scored": "scored answers (prompt, response, score)",
    "prompt": "prompts",
    "text": "plain text or demonstrations",
}


def need_of(config: Any, stage: str) -> Need:
    """What `stage` learns from: `config.reward.loss_type` and `config.dpo.loss_type` decide where there is a choice."""
    if stage == "sft":
        return "demonstration"
    if stage == "ppo":
        return "prompt"
    if stage == "reward":
        if config.reward.loss_type == "mse":
            return "scored"
        return "ranking" if config.reward.loss_type == "ranking" else "preference"
    assert stage == "dpo", stage
    return "labelled" if config.dpo.loss_type == "kto" else "preference"


def serve(record: Record, need: Need, row: Mapping[str, Any] | None = None) -> tuple[Record, ...]:
    """`record` as what is needed: one record, or a ranking's pairs. `row` may hold a prompt's `reference` and `meta`.

    Raises RowError if the record is too poor, UnusableError if this one of its kind can't serve.
    """
    if need == "prompt" and not isinstance(record, PlainText):
        record = distinct_answers(record) if isinstance(record, Ranking) else record
        return (_with_extras(record if isinstance(record, Prompt) else record.as_prompt(), row or {}),)
    if need in ("demonstration", "text") and not isinstance(record, Prompt):
        return (record if isinstance(record, Demonstration | PlainText) else _demonstration(record),)
    if need in ("ranking", "preference") and isinstance(record, Ranking):
        ranking = _ordered(record)
        return (ranking,) if need == "ranking" else ranking.pairs()
    if isinstance(record, Preference) and need in ("preference", "labelled", "ranking"):
        if need == "ranking" and record.margin is not None:
            raise RowError(
                "has a margin, which a ranking does not read: use reward.loss_type=pairwise, or remove the column margin"
            )
        return (_ordered(record.ranking()) if need == "ranking" else record,)
    if (need == "labelled" and isinstance(record, Labelled)) or (need == "scored" and isinstance(record, Scored)):
        return (record,)
    columns = f" (its columns: {', '.join(map(str, row))}; data.columns says which is which)" if row else ""
    raise RowError(f"holds {_KINDS[type(record)]}{columns}, but here {_NEEDED[need]} are needed")


def _demonstration(record: Preference | Ranking | Labelled | Scored) -> Demonstration:
    """The answer to imitate: the chosen one, the first of the best, a desirable one."""
    if isinstance(record, Labelled) and not record.desirable:
        raise UnusableError("undesirable answer")
    if isinstance(record, Ranking):
        record = distinct_answers(record)
        if not record.responses:
            raise UnusableError(EMPTY_ANSWER)
    return record.demonstration()


def distinct_answers(record: Ranking) -> Ranking:
    """The ranking without its empty answers and without those that repeat an earlier one (but for white space at the ends)."""
    seen = {""}
    kept = []
    for i, response in enumerate(record.responses):
        if response.strip() not in seen:
            seen.add(response.strip())
            kept.append(i)
    return record if len(kept) == len(record.responses) else record.only(kept)


def _ordered(record: Ranking) -> Ranking:
    """`distinct_answers`; raises UnusableError if none of them is better than another, with the reason for which that is so."""
    if not record.ordered:
        raise UnusableError("no answer is better than another")
    thinner = distinct_answers(record)
    if not thinner.ordered:
        filled = record.only(i for i, response in enumerate(record.responses) if response.strip())
        raise UnusableError(IDENTICAL if filled.ordered else EMPTY_ANSWER)
    return thinner


_FORMAT_COLUMNS = frozenset(
    [
        "messages",
        "prompt",
        "chosen",
        "rejected",
        "completion",
        "response",
        "conversations",
        "instruction",
        "input",
        "output",
        "history",
        "system",
        "tools",
        "user_input",
        "text",
        "score",
        "margin",
        "reference",
        "meta",
    ]
)


def _with_extras(prompt: Prompt, row: Mapping[str, Any]) -> Prompt:
    """A prompt's right answer and everything else the row says about it, for rule rewards."""
    reference = row.get("reference")
    if isinstance(reference, int | float) and not isinstance(reference, bool):
        reference = str(reference)
    if reference is not None and not isinstance(reference, str):
        raise RowError(f"reference: expected text, found {type(reference).__name__}")
    extras = {str(key): value for key, value in row.items() if key not in _FORMAT_COLUMNS and _plain(value)}
    meta = row.get("meta")
    if isinstance(meta, Mapping):
        extras |= meta
    return replace(prompt, reference=prompt.reference if reference is None else reference, meta={**prompt.meta, **extras})


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)
