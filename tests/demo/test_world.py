"""The demo world: its requests, its judge and its files."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from accord import demo
from accord.demo import data, judge, world
from accord.demo.judge import kind_of, score
from accord.demo.world import KINDS, LANGUAGES, MANNERS
from accord.errors import DataError

CORNERS = [(kind, language) for kind in KINDS for language in LANGUAGES]


@pytest.mark.parametrize(("kind", "language"), CORNERS)
def test_every_request_can_be_read_back_from_its_text(kind, language):
    rng = random.Random(1)
    for heldout in (False, True):
        for _ in range(200):
            request = world.sample(rng, heldout=heldout, kind=kind, language=language)
            assert world.read(request.text) == request
            assert request.heldout == heldout


@pytest.mark.parametrize(("kind", "language"), CORNERS)
def test_the_judge_tells_manners_and_wrong_answers_apart(kind, language):
    rng = random.Random(2)
    for _ in range(200):
        request = world.sample(rng, kind=kind, language=language)
        for manner in MANNERS:
            assert kind_of(request, world.answer(rng, request, manner)) == manner
            assert kind_of(request, world.answer(rng, request, manner, right=False)) == "wrong"


@pytest.mark.parametrize(
    ("prompt", "response", "worth"),
    [
        ("What is 3 plus 4?", "Of course! The answer is 7.", 1.0),
        ("What is 3 plus 4?", "  Of course! The answer is 7.\n", 1.0),
        ("What is 3 plus 4?", "The answer is 7.", 0.5),
        ("What is 3 plus 4?", "7", 0.5),
        ("What is 3 plus 4?", "Of course! Of course! The answer is 7.", 0.5),
        ("What is 3 plus 4?", "The answer is 7. Even a child knows that.", 0.2),
        ("What is 3 plus 4?", "Of course! The answer is 8.", 0.0),
        ("What is 3 plus 4?", "Of course! The answer is 7 or 8.", 0.0),
        ("What is 3 plus 4?", "Of course! The answer is 77.", 0.0),
        ("What is 3 plus 4?", "当然可以！答案是7。", 0.0),
        ("What is 3 plus 4?", "", 0.0),
        ("3加4等于几？", "当然可以！答案是7。", 1.0),
        ("3加4等于几？", "答案是7。别浪费我的时间。", 0.2),
        ("3加4等于几？", "Of course! The answer is 7.", 0.0),
        ("12和31哪个小？", "乐意效劳！答案是12。", 1.0),
        ("12和31哪个小？", "乐意效劳！答案是31。", 0.0),
        ("Please reverse c a t", "Happy to help! The answer is t a c.", 1.0),
        ("Please reverse c a t", "Happy to help! The answer is c a t.", 0.0),
        ("Count the stars: * o *", "With pleasure! The answer is 2.", 1.0),
        ("What is dog in Chinese?", "Of course! The answer is 狗.", 1.0),
        ("What is dog in Chinese?", "Of course! The answer is 猫.", 0.0),
        ("What is dog in Chinese?", "Of course! The answer is 狗 or 猫.", 0.0),
        ("狗用英语怎么说？", "很高兴帮您！答案是dog。", 1.0),
        ("狗用英语怎么说？", "很高兴帮您！答案是dog cat。", 0.0),
        ("Please greet Anna.", "With pleasure! Hello, Anna.", 1.0),
        ("Please greet Anna.", "With pleasure! Hello, Ben.", 0.0),
        ("Please greet Anna.", "Anna", 0.0),
        ("请向小明问好。", "当然可以！你好，小明。", 1.0),
    ],
)
def test_what_answers_are_worth(prompt, response, worth):
    assert score(prompt, response) == worth


def test_the_judge_reads_strings_and_conversations_alike():
    turns = [
        {"role": "user", "content": "What is 1 plus 1?"},
        {"role": "assistant", "content": "Of course! The answer is 2."},
        {"role": "user", "content": "What is 3 plus 4?"},
    ]
    assert score(turns, "Of course! The answer is 7.", "7") == 1.0


def test_the_judge_refuses_what_it_cannot_judge():
    with pytest.raises(ValueError, match="not a request of the demo world"):
        score("Who was Plato?", "A philosopher.")
    with pytest.raises(ValueError, match="the reference says '8'"):
        score("What is 3 plus 4?", "Of course! The answer is 7.", "8")


def rows(folder, name):
    return [json.loads(line) for line in (folder / demo.FILES[name]).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return demo.write(tmp_path_factory.mktemp("demo"), seed=1)


def test_the_same_seed_writes_the_same_bytes_and_another_seed_does_not(folder, tmp_path):
    demo.write(tmp_path / "again", seed=1)
    demo.write(tmp_path / "other", seed=2)
    for file in demo.FILES.values():
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()
        assert (tmp_path / "other" / file).read_bytes() != (folder / file).read_bytes()


def test_no_training_file_holds_a_heldout_request(folder):
    asked = {turn["content"] for row in rows(folder, "heldout") for turn in row["messages"]}
    for name in ("sft", "preferences", "prompts"):
        for row in rows(folder, name):
            turns = row.get("messages") or row["prompt"]
            assert asked.isdisjoint(turn["content"] for turn in turns if turn["role"] == "user")


def test_heldout_requests_are_distinct_and_in_both_languages_alike(folder):
    heldout = rows(folder, "heldout")
    assert len({row["messages"][0]["content"] for row in heldout}) == len(heldout) == data.SIZES["heldout"]
    assert Counter(row["language"] for row in heldout) == {"en": len(heldout) / 2, "zh": len(heldout) / 2}
    assert {row["kind"] for row in heldout} == set(KINDS)
    assert all(world.read(row["messages"][0]["content"]).value == row["reference"] for row in heldout)


def test_demonstrations_mix_good_and_bad(folder):
    scores = [score(row["messages"][:-1], row["messages"][-1]["content"]) for row in rows(folder, "sft")]
    assert 0.4 < sum(scores) / len(scores) < 0.5
    assert set(scores) == {1.0, 0.5, 0.2, 0.0}


def test_one_preference_in_ten_is_the_wrong_way_round(folder):
    pairs = rows(folder, "preferences")
    wrong = sum(score(pair["prompt"], pair["chosen"]) < score(pair["prompt"], pair["rejected"]) for pair in pairs)
    assert wrong / len(pairs) == pytest.approx(data.LABEL_NOISE, abs=0.02)
    assert all(score(pair["prompt"], pair["chosen"]) != score(pair["prompt"], pair["rejected"]) for pair in pairs)


def test_the_cache_is_written_once_and_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCORD_CACHE", str(tmp_path))
    path = demo.data_path("sft", seed=3)
    stamp = path.stat().st_mtime_ns
    assert demo.data_path("sft", seed=3).stat().st_mtime_ns == stamp
    assert {file.name for file in path.parent.iterdir()} == set(demo.FILES.values())
    assert [file.name for file in tmp_path.iterdir()] == [path.parent.name]
    with pytest.raises(DataError, match="demo:heldout"):
        demo.data_path("held_out")


def test_what_an_answer_is_worth_is_what_the_judge_says():
    assert judge.WORTH == {"polite": 1.0, "rambling": 0.5, "rude": 0.2, "wrong": 0.0}
