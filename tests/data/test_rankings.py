"""Rankings and labelled answers: what they serve, what is left out of them, and that the labels stay at their answers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accord.data.dataset import labels_for
from accord.data.formats import RowError, UnusableError
from accord.data.needs import need_of, serve
from accord.data.records import Demonstration, Labelled, Preference, Prompt, Ranking, Record
from accord.data.template import ConversationEncoder
from accord.errors import DataError

from .conftest import talk
from .test_dataset import load, write

Q = talk("q")

# Few different texts and ranks, so that empty, repeated and equal ones are common.
answers = st.sampled_from(["", " ", "a", " a", "b", "b\n", "c", "one two three four five six"])
rankings = st.integers(2, 6).flatmap(
    lambda k: st.builds(
        lambda responses, ranks: Ranking(Q, tuple(responses), tuple(map(float, ranks))),
        st.lists(answers, min_size=k, max_size=k),
        st.lists(st.integers(0, 2), min_size=k, max_size=k),
    )
)


def useful(ranking: Ranking) -> list[tuple[str, float]]:
    """By hand: (answer, rank) of those that say something and say it first."""
    out: list[tuple[str, float]] = []
    for response, rank in zip(ranking.responses, ranking.ranks, strict=True):
        if response.strip() and response.strip() not in [known.strip() for known, _ in out]:
            out.append((response, rank))
    return out


def test_a_ranking_serves_rankings_pairs_demonstrations_and_prompts() -> None:
    record = Ranking(Q, ("b", "a", "c", "d"), (1.0, 0.0, 1.0, 2.0), "f:1")
    assert serve(record, "ranking") == (record,)
    pairs = serve(record, "preference")
    assert pairs == tuple(Preference(Q, *sides) for sides in ["ab", "bd", "ac", "ad", "cd"])
    assert {pair.origin for pair in pairs} == {"f:1"}  # b and c are equally good: no pair
    assert serve(record, "demonstration") == (Demonstration(talk("q", "a")),)
    assert serve(record, "prompt") == (Prompt(Q, "a"),)


def test_a_pair_serves_rankings_and_labelled_answers() -> None:
    pair = Preference(Q, "a", "b", 2.0)
    assert serve(replace(pair, margin=None), "ranking") == (Ranking(Q, ("a", "b"), (0.0, 1.0)),)
    with pytest.raises(RowError, match="has a margin, which a ranking does not read"):
        serve(pair, "ranking")
    assert serve(pair, "labelled") == (pair,)
    assert labels_for(pair, "labelled") == (1.0, 0.0) and labels_for(pair, "preference") == (2.0,)


def test_a_labelled_answer_serves_demonstrations_only_if_it_is_desirable() -> None:
    good, bad = Labelled(Q, "a", True), Labelled(Q, "b", False)
    assert serve(good, "labelled") == (good,) and serve(bad, "labelled") == (bad,)
    assert serve(good, "demonstration") == (Demonstration(talk("q", "a")),)
    assert serve(good, "prompt") == (Prompt(Q, "a"),) and serve(bad, "prompt") == (Prompt(Q),)
    with pytest.raises(UnusableError, match="undesirable answer"):
        serve(bad, "demonstration")


@pytest.mark.parametrize(
    ("record", "need"),
    [
        (Ranking(Q, ("a", "b"), (0.0, 1.0)), "labelled"),
        (Ranking(Q, ("a", "b"), (0.0, 1.0)), "scored"),
        (Labelled(Q, "a", True), "preference"),
        (Labelled(Q, "a", True), "ranking"),
        (Demonstration(talk("q", "a")), "ranking"),
        (Prompt(Q), "labelled"),
    ],
)
def test_what_cannot_be_known_from_a_record_is_refused(record: Record, need: Any) -> None:
    with pytest.raises(RowError, match="are needed"):
        serve(record, need)


@settings(deadline=None)
@given(rankings)
def test_pairs_are_every_two_answers_of_different_ranks(record: Ranking) -> None:
    kept = useful(record)
    want = [
        Preference(Q, *((a, b) if rank_a < rank_b else (b, a)))
        for i, (a, rank_a) in enumerate(kept)
        for b, rank_b in kept[i + 1 :]
        if rank_a != rank_b
    ]
    try:
        assert list(serve(record, "preference")) == want
    except UnusableError:
        assert not want


@settings(deadline=None)
@given(rankings)
def test_the_reason_for_leaving_a_ranking_out_is_the_first_that_holds(record: Ranking) -> None:
    filled = {rank for response, rank in zip(record.responses, record.ranks, strict=True) if response.strip()}
    if len(set(record.ranks)) < 2:
        want = "no answer is better than another"
    elif len(filled) < 2:
        want = "empty answer"
    elif len({rank for _, rank in useful(record)}) < 2:
        want = "identical answers"
    else:
        want = None
    try:
        (served,) = serve(record, "ranking")
    except UnusableError as error:
        assert str(error) == want
    else:
        assert want is None and list(zip(served.responses, served.ranks, strict=True)) == useful(record)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(rankings, min_size=1, max_size=5), need=st.sampled_from(["ranking", "preference"]))
def test_through_the_store_every_answer_keeps_its_rank_and_every_row_is_counted(
    encoder: ConversationEncoder, records: list[Ranking], need: Any
) -> None:
    from types import SimpleNamespace

    data = SimpleNamespace(
        train=None, valid=None, holdout=0.0, format="auto", columns={}, truncate="drop", on_bad_row="fail", cache=False
    )
    want = [Ranking(Q, *zip(*useful(record), strict=True)) if useful(record) else None for record in records]
    kept = [record for record in want if record is not None and record.ordered]
    try:
        examples = load(data, encoder, need, train_dataset=records)
    except DataError:
        assert not kept
        return
    (report,) = examples.report.train
    assert report.read == len(records) == report.used + sum(report.dropped.values()) and report.used == len(kept)
    assert report.examples == len(examples.train)
    assert report.partly == sum(
        w is not None and w.ordered and len(w.responses) < len(r.responses) for w, r in zip(want, records, strict=True)
    )
    if need == "preference":
        assert [example.record for example in examples.train] == [pair for record in kept for pair in record.pairs()]
        return
    for example, record in zip(examples.train, kept, strict=True):
        assert example.record == record and example.labels == record.ranks
        for leaf, response in zip(example.tree.leaves, record.responses, strict=True):
            (alone,) = encoder.encode_responses(Q, [response]).leaves
            assert np.array_equal(example.tree.sequence(leaf), encoder.encode_responses(Q, [response]).sequence(alone))


def test_labels_of_every_need_come_back_from_the_store(encoder: ConversationEncoder, loose_settings: Any) -> None:
    pair = Preference(Q, "yes", "no", 2.0)
    (example,) = load(loose_settings(), encoder, "labelled", train_dataset=[pair]).train
    assert example.labels == (1.0, 0.0) and example.record == pair and len(example.tree.leaves) == 2
    (example,) = load(loose_settings(), encoder, "ranking", train_dataset=[replace(pair, margin=None)]).train
    assert example.labels == (0.0, 1.0)
    rows: list[Record] = [Labelled(Q, "a", True), pair, Labelled(Q, "b", False), Preference(Q, "x", "y")]
    train = load(loose_settings(), encoder, "labelled", train_dataset=rows).train
    assert [example.labels for example in train] == [(1.0,), (1.0, 0.0), (0.0,), (1.0, 0.0)]
    assert [example.record for example in train] == rows
    train = load(loose_settings(), encoder, "demonstration", train_dataset=rows)
    assert [example.labels for example in train.train] == [None] * 3
    assert train.report.train[0].dropped == {"undesirable answer": 1}


def test_the_cache_knows_what_the_labels_were_for(encoder: ConversationEncoder, settings: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b", "margin": 3} for i in range(2)]
    data = settings(write(tmp_path / "a.jsonl", rows), holdout=0.0)
    for _ in range(2):  # the second time from the cache
        assert [load(data, encoder, need).train[0].labels for need in ("preference", "labelled")] == [(3.0,), (1.0, 0.0)]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Ranking(Q, ("a",), (0.0,)), "two or more answers to rank, found 1"),
        (Ranking(Q, ("a", "b"), (0.0,)), "one rank or score for each of the 2 answers, found 1"),
        (Ranking(Q, ("a", "b"), (0.0, float("nan"))), "expected finite numbers"),
    ],
)
def test_what_is_no_ranking_is_an_unreadable_row(
    encoder: ConversationEncoder, loose_settings: Any, record: Ranking, message: str
) -> None:
    with pytest.raises(DataError, match=rf"train_dataset\[0\]  .*{message}"):
        load(loose_settings(), encoder, "ranking", train_dataset=[record])


# --- rows of files ---


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scores=st.lists(st.lists(st.integers(-2, 2), min_size=2, max_size=5), min_size=1, max_size=4),
    column=st.sampled_from(["scores", "ranks"]),
)
def test_ranked_rows_of_a_file_come_back_best_first_in_the_same_way(
    encoder: ConversationEncoder, settings: Any, tmp_path: Path, scores: list[list[int]], column: str
) -> None:
    rows = [
        {"prompt": f"q{i}", "responses": [f"answer {j}" for j in range(len(row))], column: row} for i, row in enumerate(scores)
    ]
    ordered = [row for row in scores if len(set(row)) > 1]
    data = settings(write(tmp_path / "a.jsonl", rows), holdout=0.0, cache=False)
    if not ordered:
        with pytest.raises(DataError, match="no answer is better than another"):
            load(data, encoder, "ranking")
        return
    examples = load(data, encoder, "ranking")
    assert sum(examples.report.train[0].dropped.values()) == len(scores) - len(ordered)
    for example, row in zip(examples.train, ordered, strict=True):
        sign = -1 if column == "scores" else 1
        for (a, rank_a), (b, rank_b) in itertools.combinations(zip(row, example.labels, strict=True), 2):
            assert np.sign(rank_a - rank_b) == sign * np.sign(a - b)


def test_labels_in_a_csv_file_are_text(encoder: ConversationEncoder, settings: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion,label\nq,a,true\nr,b,False\ns,c,1\nt,d,0\n")
    train = load(settings(str(tmp_path / "a.csv"), holdout=0.0), encoder, "labelled").train
    assert [example.labels for example in train] == [(1.0,), (0.0,), (1.0,), (0.0,)]
    (tmp_path / "b.csv").write_text("prompt,completion,label\nq,a,true\nr,b,perhaps\n")
    with pytest.raises(DataError, match=r"^b\.csv:3  label: expected true or false .*found 'perhaps'"):
        load(settings(str(tmp_path / "b.csv")), encoder, "labelled")


def test_ties_of_webgpt_are_left_out_and_counted(encoder: ConversationEncoder, loose_settings: Any) -> None:
    row = {"question": {"full_text": "q"}, "answer_0": "a", "answer_1": "b", "score_0": 0.0, "score_1": 0.0}
    examples = load(loose_settings(), encoder, train_dataset=[row, {**row, "score_1": 1.0}])
    assert examples.report.train[0].dropped == {"tie": 1} and examples.train[0].record == Preference(Q, "b", "a")


def test_a_ranking_with_one_completion_is_an_unreadable_row(encoder: ConversationEncoder, loose_settings: Any) -> None:
    row = {"instruction": "q", "completions": [{"response": "a", "overall_score": 1}]}
    with pytest.raises(DataError, match="expected two or more answers to rank, found 1"):
        load(loose_settings(), encoder, train_dataset=[row])
    with pytest.raises(DataError, match="one rank or score for each of the 3 answers, found 2"):
        load(loose_settings(), encoder, train_dataset=[{"prompt": "q", "responses": ["a", "b", "c"], "scores": [1, 2]}])


# --- length ---


def test_cut_at_the_end_answers_that_become_the_same_leave_the_later_one_out(
    encoder: ConversationEncoder, loose_settings: Any
) -> None:
    long = "word " * 50
    record = Ranking(Q, (long + "a", "short", long + "b"), (0.0, 1.0, 2.0))
    examples = load(loose_settings(truncate="right"), encoder, "ranking", train_dataset=[record], max_length=60)
    (example,) = examples.train
    assert example.labels == (0.0, 1.0) and example.record.responses == record.responses[:2]
    assert [len(example.tree.sequence(leaf)) == 60 for leaf in example.tree.leaves] == [True, False]
    assert (examples.report.train[0].partly, examples.report.train[0].cut) == (1, 1)
    only = Ranking(Q, (long + "a", long + "b"), (0.0, 1.0))
    with pytest.raises(DataError, match="1 identical answers"):
        load(loose_settings(truncate="right"), encoder, "ranking", train_dataset=[only], max_length=60)


def test_pairs_of_a_ranking_that_are_too_long_are_left_out_one_by_one(encoder: ConversationEncoder, loose_settings: Any) -> None:
    record = Ranking(Q, ("a", "word " * 50, "b"), (0.0, 1.0, 2.0))
    examples = load(loose_settings(), encoder, "preference", train_dataset=[record], max_length=60)
    (report,) = examples.report.train
    assert [example.record for example in examples.train] == [Preference(Q, "a", "b")]
    assert (report.used, report.examples, report.partly, report.dropped) == (1, 1, 1, {})
    with pytest.raises(DataError, match="1 too long"):  # a ranking is one example
        load(loose_settings(), encoder, "ranking", train_dataset=[record], max_length=60)


@pytest.mark.parametrize(
    "record",
    [
        Ranking(talk("old " * 30, "reply", "the question"), ("a", "b", "c"), (0.0, 1.0, 2.0)),
        Labelled(talk("old " * 30, "reply", "the question"), "a", True),
    ],
)
def test_left_cuts_the_prompt_of_new_records(encoder: ConversationEncoder, loose_settings: Any, record: Any) -> None:
    need: Any = "ranking" if isinstance(record, Ranking) else "labelled"
    examples = load(loose_settings(truncate="left"), encoder, need, train_dataset=[record], max_length=40)
    (example,) = examples.train
    assert example.record.prompt == talk("the question") and example.tree.longest <= 40
    assert example.labels == labels_for(record, need) and examples.report.train[0].cut == 1


def test_the_need_follows_the_stage_and_its_loss() -> None:
    from types import SimpleNamespace

    def need(stage: str, reward: str = "pairwise", dpo: str = "sigmoid") -> str:
        return need_of(SimpleNamespace(reward=SimpleNamespace(loss_type=reward), dpo=SimpleNamespace(loss_type=dpo)), stage)

    assert [need(stage) for stage in ("sft", "reward", "dpo", "ppo")] == ["demonstration", "preference", "preference", "prompt"]
    assert [need("reward", loss) for loss in ("mse", "ranking", "token_pairwise", "log_exp")] == [
        "scored",
        "ranking",
        "preference",
        "preference",
    ]
    assert need("dpo", dpo="kto") == "labelled"
