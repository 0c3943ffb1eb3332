"""Published sets of compared answers, each as its files are: UltraFeedback, SHP, WebGPT comparisons, summarize from feedback."""

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
    ranks_of_scores,
    register,
    text,
)
from accord.data.records import Message, Messages, Preference, Ranking

TIE = "tie"


@register(
    "ultrafeedback",
    ("instruction", "completions"),
    ("prompt", "chosen", "rejected", "score_chosen", "score_rejected"),
    looks_like=lambda row: row.get("completions") is not None or isinstance(row.get("chosen"), list | tuple),
)
def read_ultrafeedback(row: Mapping[str, Any]) -> Ranking | Preference:
    """Full: {"instruction", "completions": [{"response", "overall_score"}, …]}, ranked by overall_score.

    Binarized: {"prompt", "chosen", "rejected"}, the last two whole conversations. Their scores are a judge's and no margin.
    """
    if row.get("completions") is None:
        chosen, rejected = (message_list(row.get(column), column) for column in ("chosen", "rejected"))
        for turns in (chosen, rejected):
            check_roles(turns, "assistant")
        if chosen[:-1] != rejected[:-1]:
            raise UnusableError("chosen and rejected have different prompts")
        return Preference(chosen[:-1], chosen[-1].content, rejected[-1].content)
    scores = [number(*field) for field in _fields(row, "completions", "overall_score")]
    responses = tuple(text({name: value}, name) for value, name in _fields(row, "completions", "response"))
    return Ranking(_user(text(row, "instruction")), responses, ranks_of_scores(scores))


@register("shp", ("history", "human_ref_A", "human_ref_B", "labels"))
def read_shp(row: Mapping[str, Any]) -> Preference:
    """Stanford Human Preferences: {"history", "human_ref_A", "human_ref_B", "labels"}; labels 1: A is the better one, 0: B."""
    if (first_is_better := optional_label(row, "labels")) is None:
        raise RowError("labels: expected 1 or 0, found nothing")
    return _pair(_user(text(row, "history")), text(row, "human_ref_A"), text(row, "human_ref_B"), first_is_better)


@register("webgpt", ("question", "answer_0", "answer_1", "score_0", "score_1"))
def read_webgpt(row: Mapping[str, Any]) -> Preference:
    """WebGPT comparisons: {"question": {"full_text"}, "answer_0", "answer_1", "score_0", "score_1"}; equal scores are a tie."""
    question = row["question"]
    if not isinstance(question, Mapping):
        raise RowError("question: expected an object with full_text")
    scores = [number(row[column], column) for column in ("score_0", "score_1")]
    if scores[0] == scores[1]:
        raise UnusableError(TIE)
    return _pair(_user(text(question, "full_text")), text(row, "answer_0"), text(row, "answer_1"), scores[0] > scores[1])


@register("summarize", ("info", "summaries", "choice"))
def read_summarize(row: Mapping[str, Any]) -> Preference:
    """Summarize from feedback: {"info": {"post" or "article"}, "summaries": [{"text"}, {"text"}], "choice": 0 or 1}.

    The prompt is the post or article and, under it, `TL;DR:`, which is what asks for a summary (Stiennon et al. 2020).
    """
    info = row["info"]
    column = next((name for name in ("post", "article") if isinstance(info, Mapping) and info.get(name) is not None), None)
    if column is None:
        raise RowError("info: expected an object with post or article")
    summaries = [text({name: value}, name).strip() for value, name in _fields(row, "summaries", "text")]
    choice = number(row["choice"], "choice")
    if len(summaries) != 2 or choice not in (0, 1):
        raise RowError(f"expected two summaries and choice 0 or 1, found {len(summaries)} and choice {choice:g}")
    return _pair(_user(f"{text(info, column)}\n\nTL;DR:"), summaries[0], summaries[1], choice == 0)


def _user(content: str) -> Messages:
    return (Message("user", content),)


def _pair(prompt: Messages, first: str, second: str, first_is_better: bool) -> Preference:
    return Preference(prompt, first, second) if first_is_better else Preference(prompt, second, first)


def _fields(row: Mapping[str, Any], column: str, key: str) -> list[tuple[Any, str]]:
    """(value, its name in messages) of one key of every object in a list."""
    value = row[column]
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
        raise RowError(f"{column}: expected a list of objects")
    return [(item.get(key), f"{column}[{i}].{key}") for i, item in enumerate(value)]
