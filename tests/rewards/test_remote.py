"""A service as a source of scores: what it is sent, what is tried again, and how each wrong answer is reported (PEERS §2.13)."""

from __future__ import annotations

import datetime
import socket

import pytest

from accord.data.records import Message, Prompt
from accord.errors import AccordError, ConfigError
from accord.rewards import RemoteReward, Sample, combine, http
from tests.rewards.services import serving, slowly


def sample(number: int = 0, **meta) -> Sample:
    return Sample(
        Prompt((Message("user", f"question {number} 你好"),), f"ref {number}", meta, f"p.jsonl:{number}"),
        [1],
        [2, 3],
        f"answer {number}",
    )


def right(request, number):
    return 200, {"scores": [float(row["response"].split()[-1]) for row in request["samples"]]}


def test_every_sample_gets_its_own_score_whatever_the_batches():
    samples = [sample(i) for i in range(7)]
    with serving(lambda request, number: slowly(0.02 * (number % 3), right(request, number))) as service:
        for batch_size in (1, 3, 100):
            reward = RemoteReward(service.url, batch_size=batch_size, concurrency=2, name="r")
            assert combine([reward], samples).by_source == {"r": [float(i) for i in range(7)]}
        assert sorted(len(request["samples"]) for request in service.requests) == [1] * 8 + [3, 3, 7]
        assert 1 <= service.most <= 2
    assert RemoteReward("http://127.0.0.1:9").score([]) == []


def test_what_is_sent():
    meta = {"level": 3, "when": datetime.date(2026, 1, 2), "share": float("nan"), "tags": ("a", "b")}
    with serving(right) as service:
        RemoteReward(f"{service.url}/score?top=1").score([sample(4, **meta)])
    assert service.paths == ["/score?top=1"]
    assert service.requests == [
        {
            "samples": [
                {
                    "prompt": [{"role": "user", "content": "question 4 你好"}],
                    "response": "answer 4",
                    "reference": "ref 4",
                    "meta": {"level": 3, "when": "2026-01-02", "share": None, "tags": ["a", "b"]},
                    "truncated": False,
                }
            ]
        }
    ]


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_what_may_pass_is_tried_again(status):
    with serving(
        lambda request, number: right(request, number) if number == 2 else (status, "busy", {"Retry-After": "0"})
    ) as service:
        assert RemoteReward(service.url, retries=2).score([sample(3)]) == [3.0]
    assert len(service.requests) == 3


def test_attempts_come_to_an_end_and_the_error_names_sample_address_and_key():
    with serving(lambda request, number: (503, "down for <b>now</b>")) as service:
        with pytest.raises(
            AccordError,
            match=rf"ppo.rewards.2: {service.url}/a answered 503 Service Unavailable: 'down.*attempt 3 of 3.*p.jsonl:1.*and 1 more",
        ):
            RemoteReward(f"{service.url}/a?x=1", retries=2, key="ppo.rewards.2").score([sample(1), sample(2)])
        assert len(service.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422, 302])
def test_other_statuses_are_not_tried_again(status):
    with serving(lambda request, number: (status, "no")) as service, pytest.raises(AccordError, match=f"answered {status}"):
        RemoteReward(service.url).score([sample()])
    assert len(service.requests) == 1


def test_waits_grow_and_a_service_may_ask_for_longer_ones(monkeypatch):
    waits = []

    async def remember(seconds):
        waits.append(seconds)

    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(http.asyncio, "sleep", remember)
    answers = [
        (500, ""),
        (500, ""),
        (429, "", {"Retry-After": "7"}),
        (503, "", {"Retry-After": "nan"}),
        (503, "", {"Retry-After": "1e9"}),
    ]
    with serving(lambda request, number: answers[number] if number < 5 else right(request, number)) as service:
        assert RemoteReward(service.url, retries=5).score([sample(1)]) == [1.0]
    assert waits == [0.5, 1.0, 7.0, 4.0, 30.0]


def test_nobody_there_is_tried_again_and_then_told():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(AccordError, match=r"could not be reached: ConnectError.*attempt 2 of 2.*p.jsonl:0"):
        RemoteReward(f"http://127.0.0.1:{port}", retries=1).score([sample()])


def test_a_service_that_stalls_is_given_up():
    with serving(lambda request, number: None if number == 0 else right(request, number)) as service:
        assert RemoteReward(service.url, timeout=1.0, retries=1).score([sample(5)]) == [5.0]
    with (
        serving(lambda request, number: None) as service,
        pytest.raises(AccordError, match=r"did not answer within 0.2 seconds.*p.jsonl:5"),
    ):
        RemoteReward(service.url, timeout=0.2, retries=0).score([sample(5)])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("<html>hello</html>", "answered no JSON: '<html>hello</html>'"),
        ("", "answered no JSON"),
        ({"score": [1.0, 2.0]}, 'expected {"scores"'),
        ([1.0, 2.0], 'expected {"scores"'),
        ({"scores": 1.0}, 'expected {"scores"'),
        ({"scores": [1.0]}, "gave 1 scores for 2 samples"),
        ({"scores": [1.0, 2.0, 3.0]}, "gave 3 scores for 2 samples"),
        ('{"scores": [1.0, NaN]}', "gave nan; expected a finite number for the sample p.jsonl:2"),
        ('{"scores": [1.0, 1e999]}', "gave inf; expected a finite number for the sample p.jsonl:2"),
        ({"scores": [1.0, None]}, "NoneType.*p.jsonl:2"),
        ({"scores": [1.0, "2.0"]}, "str.*p.jsonl:2"),
        ({"scores": [1.0, True]}, "True; expected a number.*p.jsonl:2"),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_one_number_a_sample_is_an_error(answer, message):
    with serving(lambda request, number: (200, answer)) as service:
        with pytest.raises(AccordError, match=message) as caught:
            RemoteReward(service.url, key="ppo.rewards.0").score([sample(1), sample(2)])
        assert str(caught.value).startswith(f"ppo.rewards.0: {service.url}") and "p.jsonl" in str(caught.value)
    assert len(service.requests) == 1


def test_the_fallback_is_for_what_failed_counted_and_told_once(caplog):
    def answer(request, number):
        first = request["samples"][0]["response"]
        if first == "answer 0":
            return 400, "no"
        return 200, '{"scores": [1.0, NaN]}' if first == "answer 2" else '{"scores": [3.0]}'

    with serving(answer) as service:
        reward = RemoteReward(service.url, batch_size=2, fallback=-1.0)
        board = combine([reward], [sample(i) for i in range(5)])
    assert board.total == [-1.0, -1.0, 1.0, -1.0, 3.0] and board.failures == reward.failures == 3
    assert len(caplog.records) == 1 and "It counts as the fallback, -1.0" in caplog.text


def test_secrets_come_from_the_environment_and_stay_out_of_messages(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "Bearer hush-hush")
    with serving(lambda request, number: (403, "Bearer hush-hush or hush-hush is not known")) as service:
        with pytest.raises(AccordError) as caught:
            RemoteReward(service.url, headers_env={"Authorization": "MY_TOKEN"}).score([sample()])
        assert service.headers[0]["Authorization"] == "Bearer hush-hush"
    assert "answered 403" in str(caught.value) and "hush" not in str(caught.value)
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(ConfigError, match=r"ppo.rewards.1.headers_env: the environment variable MY_TOKEN is not set"):
        RemoteReward("http://127.0.0.1", headers_env={"Authorization": "MY_TOKEN"}, key="ppo.rewards.1")
    monkeypatch.setenv("MY_TOKEN", "a\nb")
    with pytest.raises(ConfigError, match="no HTTP header can carry"):
        RemoteReward("http://127.0.0.1", headers_env={"Authorization": "MY_TOKEN"})
