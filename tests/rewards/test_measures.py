"""Length, repetition, form and judgements of people."""

from __future__ import annotations

import json

import pytest

from accord.data.records import Message, Prompt
from accord.errors import AccordError, ConfigError
from accord.rewards import FormatReward, HumanReward, LengthReward, RepetitionReward, Sample


def sample(response: str = "", ids=(), *messages: Message) -> Sample:
    return Sample(Prompt(messages or (Message("user", "q"),), origin="p.jsonl:2"), [1], list(ids), response)


def lengths(reward, *counts):
    return reward.score([sample(ids=[5] * n) for n in counts])


def test_length_loses_in_proportion_to_what_is_missing_or_too_much():
    assert lengths(LengthReward(4, 8), 1, 2, 4, 6, 8, 12, 16) == [-0.75, -0.5, 0.0, 0.0, 0.0, -0.5, -1.0]
    assert lengths(LengthReward(max_tokens=10), 1, 10, 15) == [0.0, 0.0, -0.5]
    assert lengths(LengthReward(min_tokens=10), 5, 10, 99) == [-0.5, 0.0, 0.0]
    assert lengths(LengthReward(4, 4), 2, 4, 6) == [-0.5, 0.0, -0.5]


def test_repetition_is_minus_the_share_of_repeated_ngrams():
    (alone, loop, pairs) = RepetitionReward().score([sample(ids=range(9)), sample(ids=[7] * 104), sample(ids=[1, 2, 3, 4] * 2)])
    assert (alone, loop, pairs) == (0.0, pytest.approx(-100 / 101), pytest.approx(-1 / 5))
    assert RepetitionReward(1).score([sample(ids=[1, 1, 2, 2])]) == [-0.5]


@pytest.mark.parametrize(
    ("pattern", "match", "text", "score"),
    [
        (r"Answer: \d+", "full", "Answer: 12", 1.0),
        (r"Answer: \d+", "full", "Answer: 12.", 0.0),
        (r"Answer: \d+", "search", "So.\nAnswer: 12.", 1.0),
        (r"<think>.*</think>.+", "full", "<think>a\nb</think>c", 0.0),
        (r"(?s)<think>.*</think>.+", "full", "<think>a\nb</think>c", 1.0),
        (r"[一-龥]+", "full", "你好", 1.0),
        (r".", "full", "🙂", 1.0),
        (r".+", "full", "", 0.0),
    ],
)
def test_a_pattern_is_met_or_not(pattern, match, text, score):
    assert FormatReward(pattern, match=match).score([sample(text)]) == [score]


@pytest.mark.parametrize(
    ("text", "score"),
    [('{"a": [1, null]}', 1.0), (" 3 ", 1.0), ('"你好"', 1.0), ("", 0.0), ("{a: 1}", 0.0), ('{"a": 1} and more', 0.0), ("NaN", 0.0), ("[" * 100_000, 0.0)],
)  # fmt: skip
def test_json_is_valid_or_not(text, score):
    assert FormatReward().score([sample(text)]) == [score]


def test_a_pattern_that_runs_away_is_stopped():
    text = "a" * 40 + "!"
    with pytest.raises(
        AccordError,
        match=r"ppo.rewards.1: matching the pattern '\(a\|a\)\+' took longer than its timeout of 0.1 seconds.*p.jsonl:2",
    ):
        FormatReward("(a|a)+", timeout=0.1, key="ppo.rewards.1").score([sample(text)])
    reward = FormatReward("(a|a)+", timeout=0.1, fallback=0.5)
    assert reward.score([sample(text), sample("aa")]) == [0.5, 1.0] and reward.failures == 1


def test_judgements_are_looked_up_by_their_texts(tmp_path, caplog):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "你好"}]
    rows = [
        {"prompt": "q", "response": "yes", "score": 4},
        {"prompt": "q", "response": "yes ", "score": 2.0},
        {"prompt": turns, "response": "🙂", "score": 0},
    ]
    file = tmp_path / "judged.jsonl"
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    messages = [Message(turn["role"], turn["content"]) for turn in turns]
    reward = HumanReward(file, key="ppo.rewards.3")
    assert reward.score([sample(" yes\n"), sample("🙂", (), *messages)]) == [3.0, 0.0]
    with pytest.raises(AccordError, match=r"ppo.rewards.3: nobody has judged the response 'no' to the sample p.jsonl:2"):
        reward.score([sample("no")])
    with pytest.raises(AccordError, match="nobody has judged"):
        reward.score([sample("🙂")])  # the same answer to another prompt
    fallback = HumanReward(file, fallback=1.0)
    assert fallback.score([sample("no"), sample("yes"), sample("no")]) == [1.0, 3.0, 1.0] and fallback.failures == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "judged.jsonl:1: expected"),
        ('{"prompt": "q", "response": "r"}', "KeyError: 'score'"),
        ('{"prompt": "q", "response": "r", "score": NaN}', "nan; expected a finite number"),
        ('{"prompt": "q", "response": "r", "score": "4"}', "str.*expected a number"),
        ('{"prompt": 3, "response": "r", "score": 1}', "TypeError"),
        ("[1]", "TypeError"),
        ("", "holds no judgement"),
    ],
)
def test_judgements_that_cannot_be_read_name_the_line(tmp_path, line, message):
    file = tmp_path / "judged.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=message):
        HumanReward(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        HumanReward(tmp_path / "missing.jsonl")
