"""From rows to examples: split, cut, counted, cached."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accord.data import dataset
from accord.data.dataset import corpus, held_out, load_examples
from accord.data.records import Demonstration, Preference, Prompt
from accord.data.template import ConversationEncoder
from accord.data.token_store import StoreWriter
from accord.errors import ConfigError, DataError

from .conftest import talk


def pairs(count: int, prompts: int | None = None) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i % (prompts or count)}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(count)]


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(data: Any, encoder: ConversationEncoder, need: Any = "preference", **options: Any) -> Any:
    return load_examples(data, encoder, need, **{"seed": 1, "max_length": 200, **options})


def test_a_pair_is_its_prompt_and_both_answers_and_its_margin(encoder: ConversationEncoder, loose_settings: Any) -> None:
    rows = [{"prompt": "q", "chosen": "yes", "rejected": "no", "margin": 2}, {"prompt": "q", "chosen": "yes", "rejected": "nay"}]
    first, second = load(loose_settings(), encoder, train_dataset=rows).train
    want = encoder.encode_responses(talk("q"), ["yes", "no"])
    assert [s.tokens.tolist() for s in first.tree.segments] == [s.tokens.tolist() for s in want.segments]
    assert first.tree.num_tokens == sum(len(s) for s in want.segments)
    assert (first.labels, second.labels) == ((2.0,), None)
    assert first.record == Preference(talk("q"), "yes", "no", 2.0) and first.origin == "train_dataset[0]"


@pytest.mark.parametrize("need", ["preference", "demonstration", "prompt", "text"])
def test_one_file_of_pairs_serves_every_need(encoder: ConversationEncoder, settings: Any, tmp_path: Path, need: str) -> None:
    examples = load(settings(write(tmp_path / "a.jsonl", pairs(10)), holdout=0.2), encoder, need)
    assert (len(examples.train), len(examples.valid)) == (8, 2)
    for example in examples.train:
        number = (
            example.record.messages[0].content.split()[1] if need != "preference" else example.record.prompt[0].content.split()[1]
        )
        if need == "prompt":
            assert example.tree.segments[0].tokens.tolist() == encoder.encode_prompt(talk(f"question {number}"))
            assert example.record == Prompt(talk(f"question {number}"), f"good {number}")
        elif need != "preference":
            assert example.record == Demonstration(talk(f"question {number}", f"good {number}"))


def test_records_may_be_given_in_code(encoder: ConversationEncoder, loose_settings: Any) -> None:
    (example,) = load(loose_settings(), encoder, "demonstration", train_dataset=[Demonstration(talk("q", "a"))]).train
    assert example.record == Demonstration(talk("q", "a"))


def test_what_a_prompt_brings_along_is_kept(encoder: ConversationEncoder, loose_settings: Any) -> None:
    import datetime

    rows = [{"prompt": "q", "reference": 3, "level": 2, "meta": {"language": "zh", "day": datetime.date(2024, 5, 1)}}]
    (example,) = load(loose_settings(), encoder, "prompt", train_dataset=rows).train
    assert example.record.reference == "3"
    assert example.record.meta == {"level": 2, "language": "zh", "day": "2024-05-01"}


def test_scores_and_plain_text(encoder: ConversationEncoder, loose_settings: Any) -> None:
    rows = [{"user_input": "q", "completion": "a", "score": 0}]
    assert load(loose_settings(), encoder, "scored", train_dataset=rows).train[0].labels == (0.0,)
    (example,) = load(loose_settings(), encoder, "demonstration", train_dataset=[{"text": "a document"}]).train
    assert (
        example.record is None
        and example.tree.segments[0].tokens.tolist() == encoder.encode_text("a document").segments[0].tokens.tolist()
    )


# --- split ---


@settings(max_examples=200, deadline=None)
@given(groups=st.lists(st.integers(0, 12), max_size=60), share=st.floats(0, 0.9), seed=st.integers(0, 5))
def test_a_prompt_is_on_one_side_and_neither_side_is_empty(groups: list[int], share: float, seed: int) -> None:
    numbers = np.asarray(groups, dtype=np.uint64)
    held = held_out(numbers, share, seed)
    assert not set(numbers[held].tolist()) & set(numbers[~held].tolist())
    if share > 0 and len(set(groups)) > 1:
        assert held.any() and not held.all()
    else:
        assert not held.any()


@settings(max_examples=100, deadline=None)
@given(count=st.integers(2, 300), share=st.floats(0.01, 0.5), seed=st.integers(0, 5))
def test_the_share_is_exact_where_prompts_differ(count: int, share: float, seed: int) -> None:
    held = held_out(np.arange(count, dtype=np.uint64), share, seed)
    assert held.sum() == min(max(1, round(share * count)), count - 1)


def test_the_split_depends_on_the_seed_and_not_on_the_order() -> None:
    groups = np.arange(100, dtype=np.uint64)
    one = set(groups[held_out(groups, 0.2, 1)].tolist())
    assert one == set(groups[::-1][held_out(groups[::-1], 0.2, 1)].tolist())
    assert one != set(groups[held_out(groups, 0.2, 2)].tolist())


def test_stages_that_read_the_same_pairs_hold_the_same_prompts_out(
    encoder: ConversationEncoder, settings: Any, tmp_path: Path
) -> None:
    data = settings(write(tmp_path / "a.jsonl", pairs(40, prompts=20)), holdout=0.25)
    sides = [
        {e.record.as_prompt().messages if need != "prompt" else e.record.messages for e in load(data, encoder, need).valid}
        for need in ("demonstration", "preference", "prompt")
    ]
    assert len(sides[0]) == 5 and sides[0] == sides[1] == sides[2]


def test_validation_data_of_its_own(encoder: ConversationEncoder, settings: Any, tmp_path: Path) -> None:
    data = settings(write(tmp_path / "a.jsonl", pairs(10)), valid=write(tmp_path / "b.jsonl", pairs(4)))
    examples = load(data, encoder)
    assert (len(examples.train), len(examples.valid)) == (10, 4)
    assert examples.valid[0].origin == "b.jsonl:1"


# --- length ---


def long_rows() -> list[dict]:
    history = [{"role": role, "content": f"{role} turn {i} " + "word " * 6} for i in range(3) for role in ("user", "assistant")]
    return [
        {
            "prompt": [*history, {"role": "user", "content": "the last question"}],
            "chosen": "a good answer",
            "rejected": "a bad one",
        },
        *pairs(1),
    ]


def test_too_long_is_dropped_and_counted(encoder: ConversationEncoder, loose_settings: Any) -> None:
    examples = load(loose_settings(), encoder, train_dataset=long_rows(), max_length=60)
    assert len(examples.train) == 1
    assert examples.report.train[0].dropped == {"too long": 1} and examples.report.train[0].origins == {
        "too long": ["train_dataset[0]"]
    }
    assert "1 too long (train_dataset[0])" in examples.report.summary()


@pytest.mark.parametrize("limit", [25, 40, 60, 100, 150])
@pytest.mark.parametrize("need", ["preference", "demonstration", "prompt"])
def test_left_drops_the_oldest_turns_and_keeps_the_answers_whole(
    encoder: ConversationEncoder, loose_settings: Any, need: str, limit: int
) -> None:
    examples = load(loose_settings(truncate="left"), encoder, need, train_dataset=long_rows()[:1], max_length=limit)
    (example,) = examples.train
    assert example.tree.longest <= limit and examples.report.train[0].cut == 1
    text = encoder.tokenizer.decode(example.tree.sequence(example.tree.leaves[0]))
    assert text.startswith("<|im_start|>user\n")  # still a conversation that the template could have written
    assert "tion<|im_end|>" in text  # the end of the last question
    if need != "prompt":
        assert text.endswith("a good answer<|im_end|>")
        assert example.tree.sequence_trained(example.tree.leaves[0])[-1]


def test_left_keeps_the_system_turn(encoder: ConversationEncoder, loose_settings: Any) -> None:
    row = {
        "messages": [{"role": "system", "content": "be kind"}, *long_rows()[0]["prompt"], {"role": "assistant", "content": "yes"}]
    }
    (example,) = load(loose_settings(truncate="left"), encoder, "demonstration", train_dataset=[row], max_length=70).train
    assert example.record.messages[0].content == "be kind" and example.record.messages[1].role == "user"


def test_left_cannot_save_an_answer_that_is_too_long_alone(encoder: ConversationEncoder, loose_settings: Any) -> None:
    rows = [{"prompt": "q", "completion": "word " * 100}, {"prompt": "q", "completion": "a"}]
    examples = load(loose_settings(truncate="left"), encoder, "demonstration", train_dataset=rows, max_length=50)
    assert len(examples.train) == 1 and examples.report.train[0].dropped == {"too long": 1}


def test_right_cuts_answers_and_plants_no_end_token(encoder: ConversationEncoder, loose_settings: Any) -> None:
    rows = [{"prompt": "q", "chosen": "one two three four " * 5, "rejected": "no"}]
    (example,) = load(loose_settings(truncate="right"), encoder, train_dataset=rows, max_length=30).train
    chosen, rejected = example.tree.leaves
    assert len(example.tree.sequence(chosen)) == 30
    assert (
        example.tree.sequence(chosen)[-1] != encoder.end_token_id and example.tree.sequence(rejected)[-1] == encoder.end_token_id
    )


def test_answers_that_are_the_same_after_cutting_are_dropped(encoder: ConversationEncoder, loose_settings: Any) -> None:
    rows = [{"prompt": "q", "chosen": "word " * 50 + "a", "rejected": "word " * 50 + "b"}, *pairs(1)]
    examples = load(loose_settings(truncate="right"), encoder, train_dataset=rows, max_length=60)
    assert examples.report.train[0].dropped == {"identical answers": 1}


@pytest.mark.parametrize("truncate", ["left", "right"])
def test_a_long_document_is_cut(encoder: ConversationEncoder, loose_settings: Any, truncate: str) -> None:
    text = " ".join(f"word{i}" for i in range(60))
    (example,) = load(loose_settings(truncate=truncate), encoder, "text", train_dataset=[{"text": text}], max_length=20).train
    tokens, whole = example.tree.segments[0].tokens.tolist(), encoder.encode_text(text).segments[0].tokens.tolist()
    assert tokens == (whole[-20:] if truncate == "left" else whole[:20])
    assert not example.tree.segments[0].trained[0]


# --- cache ---


def test_the_second_time_nothing_is_tokenised(
    encoder: ConversationEncoder, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = settings(write(tmp_path / "a.jsonl", [*pairs(8), {"prompt": "q", "chosen": "", "rejected": "x"}]))
    first = load(data, encoder)
    monkeypatch.setattr(dataset, "fit", None)
    second = load(data, encoder)
    assert first.report == second.report and second.report.train[0].dropped == {"empty answer": 1}
    assert [e.origin for e in first.train] == [e.origin for e in second.train]
    assert all(
        np.array_equal(a.tree.sequence(leaf), b.tree.sequence(leaf))
        for a, b in zip(first.train, second.train, strict=True)
        for leaf in a.tree.leaves
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda data, encoder, path: write(path, pairs(7)),
        lambda data, encoder, path: {"max_length": 199},
        lambda data, encoder, path: {"need": "prompt"},
        lambda data, encoder, path: setattr(
            encoder.tokenizer, "chat_template", encoder.tokenizer.chat_template.replace("assistant", "model")
        ),
    ],
    ids=["file", "max_length", "need", "template"],
)
def test_a_changed_file_option_or_template_is_seen(
    encoder: ConversationEncoder, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    path = tmp_path / "a.jsonl"
    data = settings(write(path, pairs(8)))
    load(data, encoder)
    changed = change(data, encoder, path)
    tokenised = []
    monkeypatch.setattr(dataset, "fit", lambda *a, **k: tokenised.append(a) or fit(*a, **k))
    load(data, ConversationEncoder(encoder.tokenizer), **{"need": "preference", **(changed if isinstance(changed, dict) else {})})
    assert tokenised


fit = dataset.fit


def test_a_damaged_cache_entry_is_made_again(
    encoder: ConversationEncoder, settings: Any, tmp_path: Path, own_cache: Path
) -> None:
    data = settings(write(tmp_path / "a.jsonl", pairs(8)))
    first = [e.tree.segments[0].tokens.tolist() for e in load(data, encoder).train]
    (tokens,) = own_cache.glob("tokens/*/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-4])
    assert [e.tree.segments[0].tokens.tolist() for e in load(data, encoder).train] == first
    assert len(list(own_cache.glob("tokens/*"))) == 1 and not list(own_cache.glob("tokens/.*"))


def test_without_a_writable_cache_it_works_and_says_so(
    encoder: ConversationEncoder, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ACCORD_CACHE", str(tmp_path / "file" / "cache"))
    assert load(settings(write(tmp_path / "a.jsonl", pairs(8))), encoder).train
    assert "can't be written" in caplog.text


def test_cache_false_leaves_nothing(encoder: ConversationEncoder, settings: Any, tmp_path: Path, own_cache: Path) -> None:
    assert load(settings(write(tmp_path / "a.jsonl", pairs(8)), cache=False), encoder).train
    assert not list(own_cache.iterdir())


def test_a_failed_load_leaves_nothing(encoder: ConversationEncoder, settings: Any, tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(DataError):
        load(settings(write(tmp_path / "a.jsonl", [*pairs(8), {"prompt": "q"}])), encoder)
    assert not [path for path in own_cache.rglob("*") if path.is_file()]


def test_a_temporary_store_goes_with_its_examples(encoder: ConversationEncoder, loose_settings: Any) -> None:
    import gc

    examples = load(loose_settings(), encoder, train_dataset=pairs(4))
    folder = examples.train.store.folder
    assert folder.is_dir()
    del examples
    gc.collect()
    assert not folder.exists()


# --- sources ---


def test_several_sources_with_their_own_formats_columns_and_rows(
    encoder: ConversationEncoder, settings: Any, tmp_path: Path
) -> None:
    alpaca = write(tmp_path / "a.jsonl", [{"instruction": f"i{i}", "output": "o"} for i in range(5)])
    faq = write(tmp_path / "b.jsonl", [{"frage": f"f{i}", "antwort": "a"} for i in range(5)])
    data = settings(
        [{"path": alpaca, "max_rows": 3}, {"path": faq, "columns": {"prompt": "frage", "completion": "antwort"}}], holdout=0.0
    )
    examples = load(data, encoder, "demonstration")
    assert [e.origin for e in examples.train] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", *(f"b.jsonl:{i}" for i in range(1, 6))]
    assert [(r.read, r.used, list(r.formats)) for r in examples.report.train] == [(3, 3, ["alpaca"]), (5, 5, ["messages"])]


def test_demo_data_by_name(encoder: ConversationEncoder, settings: Any) -> None:
    examples = load(settings([{"path": "demo:preferences", "max_rows": 20}], holdout=0.1), encoder, max_length=400)
    assert len(examples.train) + len(examples.valid) == 20
    with pytest.raises(DataError, match="demo:nothing"):
        load(settings("demo:nothing"), encoder)


def test_slices_and_sizes(encoder: ConversationEncoder, loose_settings: Any) -> None:
    train = load(loose_settings(), encoder, train_dataset=pairs(6)).train
    assert [e.origin for e in train[1:3]] == ["train_dataset[1]", "train_dataset[2]"]
    assert train[-1].origin == "train_dataset[5]"
    assert train.num_tokens().tolist() == [e.tree.num_tokens for e in train]
    with pytest.raises(IndexError):
        train[6]


def test_the_corpus_is_every_text(settings: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"messages": [{"role": "user", "content": "r"}, {"role": "assistant", "content": "c"}]},
    ]
    assert list(corpus(settings(write(tmp_path / "a.jsonl", rows)))) == ["q", "a", "b", "r", "c"]


# --- bad input: what ends the run, and what is counted ---


BAD_ROWS: list[tuple[str, str]] = [
    ('{"prompt": "q", "chosen": }', "is not JSON"),
    ('{"prompt": "q", "chosen": "a"}', "rejected: expected text, found nothing"),
    ('{"prompt": "q", "chosen": "a", "rejected": "b", "margin": NaN}', "finite number, found nan"),
    ('{"prompt": [{"role": "assistant", "content": "q"}], "chosen": "a", "rejected": "b"}', "roles out of order"),
    ('{"prompt": "q", "completion": "a"}', r"holds a demonstration.* but here preference pairs"),
    ('["a"]', "expected an object"),
    ('{"prompt": "q \\ud83d", "chosen": "a", "rejected": "b"}', "half of a character"),
]


@pytest.mark.parametrize(("line", "message"), BAD_ROWS)
def test_an_unreadable_row_ends_the_run_with_file_and_line(
    encoder: ConversationEncoder, settings: Any, tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs(8)) + line + "\n")
    with pytest.raises(DataError, match=rf"^a\.jsonl:9  .*{message}.*data\.on_bad_row=drop"):
        load(settings(str(path)), encoder)


@pytest.mark.parametrize(("line", "message"), BAD_ROWS)
def test_or_is_left_out_and_counted(encoder: ConversationEncoder, settings: Any, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n" + "".join(json.dumps(row) + "\n" for row in pairs(8)))
    examples = load(settings(str(path), on_bad_row="drop"), encoder)
    assert examples.report.train[0].dropped == {"unreadable": 1} and len(examples.train) + len(examples.valid) == 8
    with pytest.raises(DataError, match=message):  # what was cached leniently does not hide it
        load(settings(str(path)), encoder)


def test_empty_and_identical_answers_are_left_out_counted_and_told(
    encoder: ConversationEncoder, loose_settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*pairs(2), {"prompt": "q", "chosen": " ", "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": "a"}]
    examples = load(loose_settings(), encoder, train_dataset=rows)
    assert examples.report.train[0].dropped == {"empty answer": 1, "identical answers": 1}
    assert "2 of 4 rows are used" in caplog.text


def test_no_data_named(encoder: ConversationEncoder, settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.train: no training data is named"):
        load(settings(), encoder)


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", ""), ("a.json", "[]"), ("a.json", " \n"), ("a.csv", "prompt,chosen\n"), ("a.txt", "\n\n")]
)
def test_an_empty_file(encoder: ConversationEncoder, settings: Any, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name}: is empty"):
        load(settings(str(tmp_path / name)), encoder)


def test_everything_longer_than_the_limit(encoder: ConversationEncoder, loose_settings: Any) -> None:
    with pytest.raises(DataError, match=r"nothing is left of 8 rows.*8 too long.*Raise data\.max_length"):
        load(loose_settings(), encoder, train_dataset=pairs(8), max_length=5)


def test_all_rows_unreadable_says_why(encoder: ConversationEncoder, loose_settings: Any) -> None:
    with pytest.raises(DataError, match=r"(?s)nothing is left of 2 rows.*2 unreadable.*train_dataset\[0\]  holds a prompt"):
        load(loose_settings(on_bad_row="drop"), encoder, train_dataset=[{"prompt": "q"}, {"prompt": "r"}])


def test_a_template_that_refuses_a_row_names_it(tokenizer: Any, loose_settings: Any) -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + tokenizer.chat_template
    )
    rows = [
        *pairs(1),
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "chosen": "a", "rejected": "b"},
    ]
    with pytest.raises(DataError, match=r"^train_dataset\[1\]  .*no system turns"):
        load(loose_settings(), ConversationEncoder(tokenizer, template), train_dataset=rows)


COLUMNS = [
    "prompt",
    "chosen",
    "rejected",
    "completion",
    "messages",
    "score",
    "instruction",
    "conversations",
    "text",
    "label",
    "responses",
    "ranks",
    "scores",
    "output",
    "completions",
    "kto_tag",
    "history",
    "labels",
    "info",
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.one_of(
            st.dictionaries(
                st.sampled_from(COLUMNS),
                st.one_of(
                    st.none(),
                    st.text(max_size=8),
                    st.integers(),
                    st.floats(),
                    st.booleans(),
                    st.lists(st.one_of(st.text(max_size=3), st.integers(-1, 1)), max_size=3),
                    st.lists(st.dictionaries(st.sampled_from(["role", "content", "from"]), st.text(max_size=5)), max_size=2),
                ),
                max_size=4,
            ),
            st.integers(),
            st.none(),
        ),
        max_size=5,
    ),
    need=st.sampled_from(["demonstration", "preference", "ranking", "labelled", "scored", "prompt", "text"]),
)
def test_rows_of_any_nonsense_are_counted_or_refused_never_a_crash(encoder: ConversationEncoder, rows: list, need: Any) -> None:
    from types import SimpleNamespace

    data = SimpleNamespace(
        train=None, valid=None, holdout=0.0, format="auto", columns={}, truncate="left", on_bad_row="drop", cache=False
    )
    try:
        report = load(data, encoder, need, train_dataset=rows, max_length=30).report.train[0]
    except DataError:
        return
    assert report.read == len(rows) == report.used + sum(report.dropped.values())


def test_what_a_killed_process_left_in_the_cache_goes_after_a_day(tmp_path):
    old, fresh, under_way = (StoreWriter(tmp_path / "whole").folder for _ in range(3))
    yesterday = time.time() - 25 * 3600
    for path in (old, *old.iterdir(), under_way):
        os.utime(path, (yesterday, yesterday))
    StoreWriter(tmp_path / "whole").discard()
    assert {*tmp_path.iterdir()} == {fresh, under_way}
