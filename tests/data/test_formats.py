"""Every format's rows become the record that they mean, and what can't is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accord.data.formats import FORMATS, RowError, UnusableError, check_roles, read_row
from accord.data.formats.base import ranks_of_scores
from accord.data.needs import serve
from accord.data.reading import unusable
from accord.data.records import Demonstration, Labelled, Message, PlainText, Preference, Prompt, Ranking, Record, Scored

from .conftest import talk

Q, A = Message("user", "q"), Message("assistant", "a")
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
GPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]

EXAMPLES: list[tuple[str, dict[str, Any], Record]] = [
    ("messages", {"messages": TURNS}, Demonstration((Q, A))),
    ("messages", {"messages": TURNS[:1]}, Prompt((Q,))),
    ("messages", {"prompt": "q"}, Prompt((Q,))),
    ("messages", {"prompt": "q", "completion": "a"}, Demonstration((Q, A))),
    ("messages", {"prompt": "q", "response": "a", "score": 0}, Scored((Q,), "a", 0.0)),
    ("messages", {"messages": TURNS, "score": 2.5}, Scored((Q,), "a", 2.5)),
    ("messages", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 2}, Preference((Q,), "a", "b", 2.0)),
    (
        "messages",
        {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [{"role": "assistant", "content": "b"}]},
        Preference((Q,), "a", "b"),
    ),
    (
        "messages",
        {"prompt": TURNS[:1], "chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "b"}]},
        Preference((Q,), "a", "b"),
    ),
    ("messages", {"chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "b"}]}, Preference((Q,), "a", "b")),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}, Prompt((Q,))),
    ("messages", {"prompt": "q", "completion": "a", "label": True}, Labelled((Q,), "a", True)),
    ("messages", {"prompt": TURNS[:1], "completion": TURNS[1:], "label": 0}, Labelled((Q,), "a", False)),
    ("messages", {"prompt": "q", "response": "a", "label": "False"}, Labelled((Q,), "a", False)),  # as CSV has it
    ("messages", {"messages": TURNS, "label": False}, Labelled((Q,), "a", False)),
    ("messages", {"prompt": "q", "completion": "a", "label": None}, Demonstration((Q, A))),
    ("messages", {"prompt": "classify this", "label": "science"}, Prompt((Message("user", "classify this"),))),
    (
        "messages",
        {"prompt": "q", "responses": ["a", "b", "c"], "ranks": [1, 0, 1]},
        Ranking((Q,), ("a", "b", "c"), (1.0, 0.0, 1.0)),
    ),
    (
        "messages",
        {"prompt": "q", "responses": ["a", "b", "c", "d"], "scores": [1.5, 7, 1.5, -3]},
        Ranking((Q,), ("a", "b", "c", "d"), (1.0, 0.0, 1.0, 2.0)),
    ),
    (
        "messages",
        {"messages": TURNS[:1], "responses": [TURNS[1:], [TURNS[0], {"role": "assistant", "content": "b"}]], "scores": [0, 1]},
        Ranking((Q,), ("a", "b"), (1.0, 0.0)),
    ),
    ("hh", {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}, Preference((Q,), "a", "b")),
    (
        "hh",
        {
            "chosen": "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: c",
            "rejected": "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: d",
        },
        Preference((Q, A, Message("user", "r")), "c", "d"),
    ),
    (
        "rm-static",
        {"prompt": "\n\nHuman: q\n\nAssistant:", "response": " a", "chosen": " a", "rejected": " b"},
        Preference((Q,), "a", "b"),
    ),
    ("rm-static", {"prompt": "Human: q\n\nAssistant: a\n\nHuman: r\n\nAssistant:"}, Prompt((Q, A, Message("user", "r")))),
    ("rm-static", {"prompt": "\n\nHuman: q\n\nAssistant:", "response": " a"}, Demonstration((Q, A))),
    ("alpaca", {"instruction": "q", "input": "", "output": "a"}, Demonstration((Q, A))),
    ("alpaca", {"instruction": "q", "input": "more", "output": "a"}, Demonstration((Message("user", "q\nmore"), A))),
    ("alpaca", {"instruction": "q", "output": ["a", "b"]}, Preference((Q,), "a", "b")),
    ("alpaca", {"instruction": "q", "chosen": "a", "rejected": "b"}, Preference((Q,), "a", "b")),
    ("alpaca", {"instruction": "q"}, Prompt((Q,))),
    ("alpaca", {"instruction": "q", "output": ["a", "b", "c"]}, Ranking((Q,), ("a", "b", "c"), (0.0, 1.0, 2.0))),
    ("alpaca", {"instruction": "q", "output": "a", "kto_tag": "true"}, Labelled((Q,), "a", True)),
    ("sharegpt", {"conversations": GPT, "kto_tag": False}, Labelled((Q,), "a", False)),
    (
        "ultrafeedback",
        {
            "source": "x",
            "instruction": "q",
            "completions": [{"response": r, "overall_score": s} for r, s in (("a", 6.5), ("b", 8), ("c", 6.5))],
        },
        Ranking((Q,), ("a", "b", "c"), (1.0, 0.0, 1.0)),
    ),
    (
        "ultrafeedback",
        {
            "prompt": "q",
            "messages": TURNS,
            "chosen": TURNS,
            "rejected": [TURNS[0], {"role": "assistant", "content": "b"}],
            "score_chosen": 8.5,
            "score_rejected": 8.5,
        },
        Preference((Q,), "a", "b"),
    ),
    (
        "shp",
        {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 1, "score_A": 3, "score_B": 9},
        Preference((Q,), "a", "b"),
    ),
    ("shp", {"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 0}, Preference((Q,), "b", "a")),
    (
        "webgpt",
        {"question": {"full_text": "q", "id": "1"}, "answer_0": "a", "answer_1": "b", "score_0": -1.0, "score_1": 1.0},
        Preference((Q,), "b", "a"),
    ),
    (
        "webgpt",
        {"question": {"full_text": "q"}, "answer_0": "a", "answer_1": "b", "score_0": 0.5, "score_1": -0.5},
        Preference((Q,), "a", "b"),
    ),
    (
        "summarize",
        {"info": {"post": "long", "article": None}, "summaries": [{"text": " a"}, {"text": " b"}], "choice": 1},
        Preference((Message("user", "long\n\nTL;DR:"),), "b", "a"),
    ),
    (
        "summarize",
        {"info": {"post": None, "article": "news"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 0},
        Preference((Message("user", "news\n\nTL;DR:"),), "a", "b"),
    ),
    (
        "alpaca",
        {"instruction": "r", "input": None, "output": "b", "system": "s", "history": [["q", "a"]]},
        Demonstration((Message("system", "s"), Q, A, Message("user", "r"), Message("assistant", "b"))),
    ),
    ("sharegpt", {"conversations": GPT}, Demonstration((Q, A))),
    (
        "sharegpt",
        {"conversations": GPT[:1], "chosen": GPT[1], "rejected": {"from": "gpt", "value": "b"}},
        Preference((Q,), "a", "b"),
    ),
    ("sharegpt", {"conversations": GPT, "system": "s", "tools": "[]"}, Demonstration((Message("system", "s"), Q, A))),
    (
        "sharegpt",
        {
            "conversations": [GPT[0], {"from": "function_call", "value": "f()"}, {"from": "observation", "value": "1"}, GPT[1]],
            "tools": '[{"name": "f"}]',
        },
        Demonstration((Message("system", 'Tools:\n[{"name": "f"}]'), Q, Message("assistant", "f()"), Message("tool", "1"), A)),
    ),
    ("chatllama", {"user_input": "q", "completion": "a"}, Demonstration((Q, A))),
    ("chatllama", {"user_input": "q", "completion": "a", "score": 0}, Scored((Q,), "a", 0.0)),
    ("chatllama", {"user_input": "q", "completion": "a", "score": "4.5"}, Scored((Q,), "a", 4.5)),
    ("chatllama", {"user_input": "q"}, Prompt((Q,))),
    ("text", {"text": "document"}, PlainText("document")),
]


@pytest.mark.parametrize(("name", "row", "record"), EXAMPLES)
def test_a_row_is_recognised_and_becomes_its_record(name: str, row: dict, record: Record) -> None:
    assert read_row(row, "auto", {})[:2] == (record, name)
    assert read_row(row, name, {})[:2] == (record, name)


def test_every_registered_format_is_tested() -> None:
    assert {name for name, _, _ in EXAMPLES} == set(FORMATS)


def test_the_configuration_offers_the_registered_formats() -> None:
    from typing import get_args

    from accord.config.sections import FormatName

    assert set(get_args(FormatName)) - {"auto"} == set(FORMATS)


def test_columns_are_mapped() -> None:
    row = {"question": "q", "answer": "a", "prompt": "not this"}
    assert read_row(row, "auto", {"prompt": "question", "completion": "answer"})[0] == Demonstration((Q, A))


def test_human_turns_in_a_row_are_one() -> None:
    chosen = "\n\nHuman: q\n\nHuman: more\n\nAssistant: a"
    record = read_row({"chosen": chosen, "rejected": chosen + "!"}, "auto", {})[0]
    assert record == Preference((Message("user", "q\n\nmore"),), "a", "a!")


def test_null_columns_are_absent() -> None:
    row = {"prompt": "q", "completion": None, "chosen": "a", "rejected": "b", "score": None, "margin": None}
    assert read_row(row, "auto", {})[0] == Preference((Q,), "a", "b")


# --- richer serves poorer ---


def test_richer_records_serve_poorer_needs() -> None:
    pair = Preference((Q,), "a", "b")
    assert serve(pair, "demonstration") == (Demonstration((Q, A)),)
    assert serve(pair, "prompt") == (Prompt((Q,), reference="a"),)
    assert serve(Scored((Q,), "a", 1.0), "prompt") == (Prompt((Q,)),)
    assert serve(Demonstration((Q, A)), "text") == (Demonstration((Q, A)),)


@pytest.mark.parametrize(
    ("record", "need"),
    [
        (Prompt((Q,)), "demonstration"),
        (Demonstration((Q, A)), "preference"),
        (PlainText("t"), "prompt"),
        (Preference((Q,), "a", "b"), "scored"),
    ],
)
def test_a_poorer_record_is_refused_with_what_is_needed(record: Record, need: Any) -> None:
    with pytest.raises(RowError, match="are needed"):
        serve(record, need)


def test_a_prompts_reference_and_what_else_the_row_says_are_kept() -> None:
    row = {"prompt": "q", "reference": 15, "level": 3, "meta": {"language": "zh"}, "nested": {"a": 1}}
    (prompt,) = serve(Prompt((Q,)), "prompt", row)
    assert isinstance(prompt, Prompt)
    assert prompt.reference == "15" and prompt.meta == {"level": 3, "language": "zh"}


# --- refusals ---


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": "a"}, r"no known format.*Found: question, answer"),
        ({"chosen": "a", "rejected": "b"}, r"no known format.*Nearest format: \w+, which also needs prompt"),
        ({"promt": "q", "completion": "a"}, r"Is promt meant to be prompt\?"),
        ({"instruction": 5, "output": "a"}, "instruction: expected text, found a number"),
        ({"prompt": "q", "completion": "a", "score": float("nan")}, "score: expected a finite number, found nan"),
        ({"prompt": "q", "completion": "a", "score": True}, "score: expected a number, found true/false"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("inf")}, "margin: expected a finite number"),
        ({"user_input": "q", "completion": "a", "score": "good"}, "score: expected a number, found 'good'"),
        ({"messages": [{"role": "robot", "content": "q"}]}, "unknown role 'robot'"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, r"unknown role \['user'\]"),
        ({"prompt": "q", "completion": "a", "score": 10**400}, "score: expected a finite number"),
        ({"instruction": "q", "output": "a", "history": True}, "history: expected a list"),
        ({"messages": "hello"}, "messages: expected a list of turns, found text"),
        ({"messages": [*TURNS, *TURNS[1:]]}, "turn 3 is assistant after assistant, expected user or tool"),
        ({"messages": [TURNS[1]]}, "turn 1 is assistant at the start, expected system or user"),
        (
            {"prompt": "q", "completion": "a", "label": "science"},
            "label: expected true or false .* found 'science'; rename the column",
        ),
        ({"prompt": "q", "completion": "a", "label": 2}, "label: expected true or false .* found 2"),
        ({"prompt": "q", "completion": "a", "label": [1]}, "label: expected true or false .* found a list"),
        ({"prompt": "q", "completion": "a", "label": True, "score": 1}, "label and score"),
        ({"conversations": GPT, "kto_tag": "good"}, "kto_tag: expected true or false"),
        ({"prompt": "q", "responses": ["a", "b"]}, "found neither"),
        ({"prompt": "q", "responses": ["a", "b"], "ranks": [0, 1], "scores": [1, 0]}, "found both"),
        ({"prompt": "q", "responses": ["a", "b"], "ranks": 1}, "ranks: expected a list of numbers"),
        ({"prompt": "q", "responses": ["a", "b"], "scores": [1, "good"]}, r"scores\[1\]: expected a number"),
        ({"prompt": "q", "responses": ["a", 3], "scores": [1, 0]}, r"responses\[1\]: expected text, found a number"),
        ({"prompt": "q", "responses": "a", "scores": [1]}, "responses: expected a list of answers"),
        (
            {"instruction": "q", "completions": [{"response": "a"}]},
            r"completions\[0\].overall_score: expected a number, found nothing",
        ),
        ({"instruction": "q", "completions": ["a"]}, "completions: expected a list of objects"),
        ({"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": 3}, "labels: expected true or false"),
        ({"history": "q", "human_ref_A": "a", "human_ref_B": "b", "labels": ""}, "labels: expected 1 or 0"),
        ({"question": "q", "answer_0": "a", "answer_1": "b", "score_0": 0, "score_1": 1}, "question: expected an object"),
        ({"info": {}, "summaries": [], "choice": 0}, "info: expected an object with post or article"),
        ({"info": {"post": "p"}, "summaries": [{"text": "a"}], "choice": 0}, "expected two summaries"),
        ({"info": {"post": "p"}, "summaries": [{"text": "a"}, {"text": "b"}], "choice": 2}, "choice 2"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "expected the content to be text"),
        ({"instruction": "q", "output": ["a"]}, "a list of 1"),
        ({"conversations": GPT[:1], "chosen": GPT[0], "rejected": GPT[1]}, "chosen: roles out of order"),
        ({"chosen": "Human: q\n\nAssistant: a\n\nHuman: r", "rejected": "Human: q\n\nAssistant: b"}, "ends with a Human turn"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(row: dict, message: str) -> None:
    with pytest.raises(RowError, match=message):
        record = read_row(row, "auto", {})[0]
        check_roles(record.messages, "assistant" if isinstance(record, Demonstration) else "prompt")  # type: ignore[union-attr]


def test_a_forced_format_names_the_missing_column_and_the_nearest_format() -> None:
    with pytest.raises(
        RowError, match=r"missing column conversations of the format sharegpt. Found: instruction, output.*Nearest format: alpaca"
    ):
        read_row({"instruction": "q", "output": "a"}, "sharegpt", {})


def test_a_mapped_column_that_is_missing_is_named() -> None:
    with pytest.raises(RowError, match=r"column question, which is missing\. Found: prompt"):
        read_row({"prompt": "q"}, "auto", {"prompt": "question"})


@pytest.mark.parametrize("row", ["text", 5, ["a"], None])
def test_a_row_must_be_an_object(row: Any) -> None:
    with pytest.raises(RowError, match="expected an object with columns"):
        read_row(row, "auto", {})


def test_different_prompts_are_unusable_not_unreadable() -> None:
    with pytest.raises(UnusableError, match="different prompts"):
        read_row({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: p\n\nAssistant: a"}, "auto", {})
    with pytest.raises(UnusableError, match="different prompts"):
        read_row({"chosen": TURNS, "rejected": [{"role": "user", "content": "p"}, TURNS[1]]}, "auto", {})


def test_a_tie_is_unusable_not_unreadable() -> None:
    row = {"question": {"full_text": "q"}, "answer_0": "a", "answer_1": "b", "score_0": 0.0, "score_1": 0.0}
    with pytest.raises(UnusableError, match=r"^tie$"):
        read_row(row, "auto", {})


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8))
@settings(deadline=None)
def test_scores_become_ranks_without_gaps_and_with_ties(scores: list[int]) -> None:
    ranks = ranks_of_scores([float(score) for score in scores])
    for rank, score in zip(ranks, scores, strict=True):
        assert rank == len({other for other in scores if other > score})


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (Demonstration(talk("q", " \n")), "empty answer"),
        (Demonstration(talk("q", "", "r", "a")), "empty answer"),
        (Preference((Q,), "a", ""), "empty answer"),
        (Preference((Q,), "a", " a "), "identical answers"),
        (Scored((Q,), " ", 1.0), "empty answer"),
        (Prompt(talk("  ")), "empty prompt"),
        (PlainText("\n"), "empty text"),
        (Demonstration((Q, A)), None),
    ],
)
def test_unusable_records_have_a_reason(record: Record, reason: str | None) -> None:
    assert unusable(record) == reason


def test_a_new_format_is_ten_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from accord.data.formats import register, text

    monkeypatch.setattr("accord.data.formats.base.FORMATS", dict(FORMATS))

    @register("faq", ("frage", "antwort"))
    def read(row: Any) -> Record:
        return Demonstration((Message("user", text(row, "frage")), Message("assistant", text(row, "antwort"))))

    assert read_row({"frage": "q", "antwort": "a"}, "auto", {})[:2] == (Demonstration((Q, A)), "faq")
