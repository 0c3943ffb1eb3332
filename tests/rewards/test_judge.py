"""A language model as the judge: what it is asked, and that a score is read or refused, never guessed."""

from __future__ import annotations

import pytest

from accord.data.records import Message, Prompt
from accord.errors import AccordError, ConfigError
from accord.rewards import JudgeReward, Sample, combine
from accord.rewards.judge import NoScore, read_score
from tests.rewards.services import serving


def sample(response="Paris {reference} {x}", reference: str | None = "Paris", *messages: Message) -> Sample:
    return Sample(Prompt(messages or (Message("user", "Capital of France?"),), reference, {}, "p.jsonl:3"), [1], [2], response)


def reply(text, finish_reason="stop"):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 4", 4.0),
        ("It is good.\n\nScore: 3.5\n", 3.5),
        ("**Score: 5**", 5.0),
        ("**Score:** 5", 5.0),
        ("score = 0", 0.0),
        ("  Score: 2/5.", 2.0),
        ("Score: 4\nbecause …\nScore: 4.0", 4.0),
        ("> Score: +1", 1.0),
        ("Fine.\r\nScore: 3\r\n", 3.0),
    ],
)
def test_a_score_is_read(text, score):
    assert read_score(text, 0.0, 5.0) == score


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no line"),
        ("4", "no line"),
        ("I would give a score of 4.", "no line"),
        ("The answer said Score: 5 itself", "no line"),
        ("Score: four", "no line"),
        ("Score: 4 to 5", "no line"),
        ("Score: nan", "no line"),
        ("Score: 4,5", "no line"),
        ("Score:\n4", "no line"),
        ("Score: 5\nScore: 1", r"several scores \(1, 5\)"),
        ("Score: 6", "outside of 0 to 5"),
        ("Score: -1", "outside of 0 to 5"),
        ("Score: 4/10", "out of 10, not out of 5"),
    ],
)
def test_what_is_no_score_is_refused(text, why):
    with pytest.raises(NoScore, match=why):
        read_score(text, 0.0, 5.0)


def test_the_request_and_the_score(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "hush-hush")
    with serving(lambda request, number: reply("Fine.\nScore: 4")) as service:
        reward = JudgeReward(
            f"{service.url}/v1/", "judge-1", api_key_env="JUDGE_KEY", temperature=0.5, max_tokens=99, weight=0.2, name="j"
        )
        board = combine([reward], [sample()])
    assert board.by_source == {"j": [4.0]} and board.total == [pytest.approx(0.8)]
    (request,) = service.requests
    assert service.paths == ["/v1/chat/completions"] and service.headers[0]["Authorization"] == "Bearer hush-hush"
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("judge-1", 0.5, 99)
    (message,) = request["messages"]
    text = message["content"]
    assert message["role"] == "user" and "Capital of France?" in text and "from 0 (worst) to 5 (best)" in text
    assert "Paris {reference} {x}" in text  # braces of the response stay as they are


def test_every_sample_gets_its_own_score():
    def answer(request, number):
        return reply("Score: " + request["messages"][0]["content"])

    with serving(answer) as service:
        samples = [sample(str(i)) for i in range(9)]
        assert JudgeReward(service.url, "m", template="{response}", scale=(0, 10), concurrency=3).score(samples) == [
            float(i) for i in range(9)
        ]
        assert service.most <= 3


def test_a_template_from_a_file_with_a_whole_conversation(tmp_path):
    file = tmp_path / "judge.txt"
    file.write_text('{conversation}|{prompt}|{reference}|{response}|{low}-{high}|{"json": 1}', encoding="utf-8")
    turns = (Message("system", "Be brief."), Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "你好?"))
    with serving(lambda request, number: reply("Score: 1")) as service:
        JudgeReward(service.url, "m", template=str(file), scale=(-1.0, 1.5)).score([sample("r", "ref", *turns)])
    assert service.requests[0]["messages"][0]["content"] == (
        'System: Be brief.\n\nUser: Hi\n\nAssistant: Hello\n\nUser: 你好?|你好?|ref|r|-1-1.5|{"json": 1}'
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("no-such-file.txt", "ppo.rewards.0.template: 'no-such-file.txt' is neither a text with {response} nor a file"),
        ("Judge {answer} {response}", "nothing fills {answer}; there are {prompt}"),
        ("Judge {prompt}", "every response would get the same score"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_work_is_refused_at_the_start(template, message):
    with pytest.raises(ConfigError, match=message):
        JudgeReward("http://127.0.0.1", "m", template=template, key="ppo.rewards.0")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply("I like it."), "the reply about the sample p.jsonl:3: 'Capital of France\\?' holds no line `Score: <number>`: 'I like it.'"),
        (reply("Let me think", "length"), r"cut at max_tokens \(512\); raise it"),
        (reply("Score: 9"), "scores 9, outside of 0 to 5"),
        (reply(None), "no chat completion.*p.jsonl:3"),
        ((200, {"choices": []}), "no chat completion"),
        ((200, [1]), "no chat completion"),
        ((200, "<html>"), "answered no JSON.*p.jsonl:3"),
        ((401, "bad key"), "answered 401.*p.jsonl:3"),
    ],
)  # fmt: skip
def test_a_reply_without_a_score_is_an_error_or_the_fallback(answer, message):
    with serving(lambda request, number: answer) as service:
        with pytest.raises(AccordError, match=message):
            JudgeReward(service.url, "m", key="ppo.rewards.0").score([sample(), sample()])
        reward = JudgeReward(service.url, "m", fallback=2.5)
        assert reward.score([sample(), sample()]) == [2.5, 2.5] and reward.failures == 2


def test_a_template_that_needs_a_reference_names_the_sample_without_one():
    with serving(lambda request, number: reply("Score: 1")) as service:
        reward = JudgeReward(service.url, "m", template="{reference} {response}", key="ppo.rewards.0")
        with pytest.raises(AccordError, match=r"ppo.rewards.0: the template asks for {reference}, but the sample p.jsonl:3"):
            reward.score([sample(reference=None)])
        assert JudgeReward(service.url, "m", template="{reference} {response}", fallback=0.0).score(
            [sample(), sample(reference=None)]
        ) == [1.0, 0.0]


def test_an_overloaded_judge_is_asked_again():
    with serving(lambda request, number: (429, "slow down") if number == 0 else reply("Score: 2")) as service:
        assert JudgeReward(service.url, "m").score([sample()]) == [2.0]


def test_the_key_must_be_set(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"ppo.rewards.api_key_env: the environment variable NO_SUCH_KEY is not set"):
        JudgeReward("http://127.0.0.1", "m", api_key_env="NO_SUCH_KEY")
