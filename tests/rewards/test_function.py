"""Function rewards: what they are given, and how each way to fail is reported (PEERS §2.13)."""

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from accord.data.records import Message, Prompt
from accord.errors import AccordError, ConfigError
from accord.rewards import FunctionReward, Sample, combine, load_function, waiting
from accord.rewards.function import token_texts


def sample(response: str = "four", question: str = "2+2?", reference: str | None = "4", **meta) -> Sample:
    messages = (Message("user", "hi"), Message("assistant", "hello"), Message("user", question))
    return Sample(Prompt(messages, reference, meta, origin="prompts.jsonl:7"), [1, 2], [3], response)


def test_a_function_gets_the_arguments_it_names():
    seen = {}

    def score(prompt, response, reference, meta, messages, truncated):
        seen.update(locals())
        return 1

    assert FunctionReward(score).score([sample(difficulty=3)]) == [1.0]
    assert seen["prompt"] == "2+2?" and seen["response"] == "four" and seen["reference"] == "4"
    assert seen["meta"] == {"difficulty": 3} and seen["messages"][0] == {"role": "user", "content": "hi"}
    assert seen["truncated"] is False


def test_a_function_may_name_only_some_or_take_everything():
    assert FunctionReward(lambda response: len(response)).score([sample()]) == [4.0]
    assert FunctionReward(lambda **all_of_it: len(all_of_it)).score([sample()]) == [6.0]
    assert FunctionReward(lambda response, scale=0.5: scale).score([sample()]) == [0.5]


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor(0.5), 0.5])
def test_numbers_of_other_libraries_are_numbers(value):
    assert FunctionReward(lambda response: value).score([sample()]) == [0.5]


def test_an_exception_names_the_function_the_sample_and_the_response():
    def broken(response):
        raise KeyError("gold")

    with pytest.raises(
        AccordError, match=r"broken raised KeyError: 'gold' on the sample prompts.jsonl:7: '2\+2\?' with the response 'four'"
    ):
        FunctionReward(broken).score([sample()])


def test_a_function_that_ends_the_program_ends_the_run_as_failed():
    def leave(response):
        raise SystemExit(0)  # would be exit code 0: done

    with pytest.raises(AccordError, match=r"leave raised SystemExit: 0 on the sample prompts.jsonl:7"):
        FunctionReward(leave).score([sample()])
    assert FunctionReward(leave, fallback=0.5).score([sample()]) == [0.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400])
def test_a_score_that_is_not_finite_ends_the_run(value):
    with pytest.raises(AccordError, match=r"finite.*prompts.jsonl:7"):
        combine([FunctionReward(lambda response: value, name="f")], [sample()])


@pytest.mark.parametrize("value", [None, "0.5", [0.5], 1j])
def test_what_is_no_number_is_refused_with_its_type(value):
    with pytest.raises(AccordError, match=f"{type(value).__name__}.*expected a number"):
        FunctionReward(lambda response: value).score([sample()])


def test_the_wrong_count_is_refused():
    class Short:
        name, weight = "short", 1.0

        def score(self, samples):
            return [0.0]

    with pytest.raises(AccordError, match="1 scores for 2 samples"):
        combine([Short()], [sample(), sample()])


@pytest.mark.parametrize("per_token", [False, True])
def test_a_score_that_float32_cannot_hold_is_refused(per_token):
    """It would be an infinite reward (or, of a list, a sum that overflows), and the error would speak of the learning rate."""
    value, limit = ([1e308, 1e308], 1.7e38) if per_token else (1e38, 3e37)
    source = FunctionReward(lambda response, value=value: value, name="f", weight=10.0, per_token=per_token)
    with pytest.raises(AccordError, match=r"reward f gave 1e\+(38|308) for the sample .* weight 10 .* float32"):
        combine([source], [tokens_of("ab")])
    held = FunctionReward(lambda response: [limit, -limit] if per_token else limit, weight=2.0, per_token=per_token)
    assert combine([held], [tokens_of("ab")]).sums == [0.0 if per_token else 2 * limit]


def test_sources_are_added_by_weight_and_reported_one_by_one():
    sources = [
        FunctionReward(lambda response: len(response), weight=0.5, name="length"),
        FunctionReward(lambda reference: 3.0, weight=-2.0, name="three"),
    ]
    board = combine(sources, [sample("ab"), sample("abcd")])
    assert board.total == [0.5 * 2 - 6, 0.5 * 4 - 6]
    assert board.by_source == {"length": [2.0, 4.0], "three": [3.0, 3.0]}


def test_functions_are_found_by_path_also_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_reward_module.py").write_text("def score(response):\n    return 0.25\nclass A:\n    x = 3\n")
    monkeypatch.chdir(tmp_path)
    assert FunctionReward("my_reward_module:score").score([sample()]) == [0.25]
    with pytest.raises(ConfigError, match=r"no function 'scor'. It has: A, score"):
        load_function("my_reward_module:scor")
    with pytest.raises(ConfigError, match="not a function"):
        load_function("my_reward_module:A.x")


@pytest.mark.parametrize(
    ("path", "message"),
    [("no_colon", "module:function"), ("nowhere_at_all:f", "no module 'nowhere_at_all'"), ("json.nope:f", "json.nope")],
)
def test_a_path_that_leads_nowhere_is_a_configuration_error(path, message):
    with pytest.raises(ConfigError, match=message):
        load_function(path)


def test_a_module_that_fails_to_import_says_why(tmp_path, monkeypatch):
    (tmp_path / "half_reward_module.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "bad_reward_module.py").write_text("1 / 0\n")
    (tmp_path / "script_reward_module.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="needs the module 'not_installed_anywhere'"):
        load_function("half_reward_module:f")
    with pytest.raises(ConfigError, match="SystemExit: 0"):
        load_function("script_reward_module:f")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_function("bad_reward_module:f")


def test_functions_that_cannot_be_called_are_refused_before_the_run():
    with pytest.raises(ConfigError, match="no async function, so its calls come one by one"):
        FunctionReward(lambda response: 1.0, concurrency=2)
    with pytest.raises(ConfigError, match="wants tokens"):
        FunctionReward(lambda tokens: 1.0)  # nothing decodes here
    with pytest.raises(ConfigError, match="wants gold"):
        FunctionReward(lambda response, gold: 1.0)
    with pytest.raises(ConfigError, match="wants response"):
        FunctionReward(eval("lambda response, /: 1.0"))
    with pytest.raises(ConfigError, match="takes none"):
        FunctionReward(lambda: 1.0)


def test_a_fallback_is_used_counted_and_told_once(caplog):
    def sometimes(response):
        if response == "bad":
            raise ValueError("no")
        return float("nan") if response == "worse" else 1.0

    reward = FunctionReward(sometimes, fallback=-1.0)
    assert reward.score([sample("good"), sample("bad"), sample("worse")]) == [1.0, -1.0, -1.0]
    assert reward.failures == 2
    assert combine([reward], [sample("bad"), sample("good")]).failures == 1
    assert len(caplog.records) == 1 and "prompts.jsonl:7" in caplog.text


# -- async ---------------------------------------------------------------------------------------------------------------------


def test_async_calls_run_at_once_up_to_the_limit_and_come_back_in_order():
    running = most = 0

    async def score(response):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01 * (10 - float(response)))  # the later ones end first
        running -= 1
        return float(response)

    samples = [sample(str(i)) for i in range(10)]
    assert FunctionReward(score, concurrency=3).score(samples) == [float(i) for i in range(10)]
    assert most == 3
    assert asyncio.run(_inside_a_loop(score, samples)) == [float(i) for i in range(10)]


async def _inside_a_loop(score, samples):
    """As in a notebook, where a loop runs already."""
    return FunctionReward(score).score(samples)


def test_what_an_async_function_keeps_stays_with_one_loop():
    loops = set()

    async def score(response):
        loops.add(asyncio.get_running_loop())
        return 1.0

    reward = FunctionReward(score)
    assert reward.score([sample(), sample()]) == reward.score([sample(), sample()]) == [1.0, 1.0]
    assert len(loops) == 1


def test_an_async_failure_names_its_sample_and_cancels_the_others():
    async def score(response):
        if response == "bad":
            raise ValueError("no")
        await asyncio.sleep(60)

    began = time.monotonic()
    with pytest.raises(AccordError, match=r"score raised ValueError: no on the sample prompts.jsonl:7.*'bad'"):
        FunctionReward(score).score([sample("slow"), sample("bad"), sample("slow")])
    assert time.monotonic() - began < 30


def test_an_async_fallback_is_for_the_failing_sample_alone():
    async def score(response):
        if response == "leave":
            raise SystemExit(0)
        if response == "cancel":
            raise asyncio.CancelledError
        return None if response == "none" else 1.0

    reward = FunctionReward(score, fallback=-2.0)
    assert reward.score([sample(text) for text in ("good", "leave", "none", "cancel", "good")]) == [1.0, -2.0, -2.0, -2.0, 1.0]
    assert reward.failures == 3


# -- time ----------------------------------------------------------------------------------------------------------------------


def test_a_call_that_stalls_is_an_error_or_the_fallback():
    free = threading.Event()

    def stuck(response):
        if response == "slow":
            free.wait(60)
        return 1.0

    async def waits(response):
        await asyncio.sleep(60 if response == "slow" else 0)
        return 1.0

    for function in (stuck, waits):
        with pytest.raises(
            AccordError, match=r"took longer than its timeout of 0.2 seconds on the sample prompts.jsonl:7.*'slow'"
        ):
            FunctionReward(function, timeout=0.2).score([sample(), sample("slow")])
        reward = FunctionReward(function, timeout=0.2, fallback=0.25)
        assert reward.score([sample(), sample("slow"), sample()]) == [1.0, 0.25, 1.0] and reward.failures == 1
    free.set()


def test_an_async_function_that_blocks_its_loop_does_not_hold_up_the_run(monkeypatch):
    monkeypatch.setattr(waiting, "GRACE_SECONDS", 0.2)
    free = threading.Event()

    async def blocks(response):
        if response == "slow":
            free.wait(60)  # no await: nothing else can run
        return 1.0

    reward = FunctionReward(blocks, timeout=0.2, fallback=0.25)
    assert reward.score([sample(), sample("slow"), sample(), sample("slow")]) == [1.0, 0.25, 1.0, 0.25]
    with pytest.raises(AccordError, match="took longer than its timeout"):
        FunctionReward(blocks, timeout=0.2).score([sample("slow"), sample()])
    free.set()
    assert reward.score([sample()]) == [1.0]


# -- per token -----------------------------------------------------------------------------------------------------------------


def decode(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def tokens_of(text: str) -> Sample:
    return Sample(Prompt((Message("user", "q"),), origin="prompts.jsonl:7"), [1], list(text.encode()), text)


@pytest.mark.parametrize("text", ["plain words", "你好，世界", "a 🙂 b", ""])
def test_token_texts_add_up_to_the_text(text):
    ids = list(text.encode())
    texts = token_texts(ids, decode)
    assert len(texts) == len(ids) and "".join(texts) == text
    assert [t for t in texts if t] == list(text)


def test_per_token_rewards_are_weighted_summed_and_kept_apart_from_the_total():
    vowels = FunctionReward(
        lambda tokens: [float(t in "aeiou") for t in tokens], weight=2.0, name="vowels", per_token=True, decode=decode
    )
    last = FunctionReward(lambda tokens: np.eye(len(tokens))[-1], weight=-1.0, name="last", per_token=True, decode=decode)
    whole = FunctionReward(lambda response: len(response), weight=0.5, name="length")
    board = combine([vowels, whole, last], [tokens_of("abe"), tokens_of("xy")])
    assert board.per_token == [[2.0, 0.0, 2.0 - 1.0], [0.0, -1.0]]
    assert board.total == [1.5, 1.0]
    assert board.sums == [4.5, 0.0]
    assert board.by_source == {"vowels": [2.0, 0.0], "length": [3.0, 2.0], "last": [1.0, 1.0]}
    assert vowels.score([tokens_of("abe")]) == [2.0]
    assert combine([whole], [tokens_of("abe")]).per_token is None


@pytest.mark.parametrize(
    ("value", "message"),
    [([1.0], "list of 1 for the 3 response tokens"), (1.0, "gave a float.*list of 3 numbers"), ([1.0, None, 1.0], "NoneType"), ([1.0, float("nan"), 0.0], "nan.*finite")],
)  # fmt: skip
def test_a_per_token_list_must_fit_its_response(value, message):
    with pytest.raises(AccordError, match=message):
        FunctionReward(lambda response: value, per_token=True).token_scores([tokens_of("abc")])
    reward = FunctionReward(lambda response: value, per_token=True, fallback=-1.0)
    assert reward.token_scores([tokens_of("abc")]) == [[0.0, 0.0, -1.0]] and reward.failures == 1


def test_a_list_without_per_token_names_the_key():
    with pytest.raises(AccordError, match="needs per_token: true"):
        FunctionReward(lambda response: [1.0, 2.0]).score([sample()])


def test_a_function_that_forgot_its_async_is_told():
    async def later():
        return 1.0

    with pytest.raises(AccordError, match="gave a coroutine"):
        FunctionReward(lambda response: later()).score([sample()])


def test_two_sources_of_one_name_are_refused():
    same = [FunctionReward(lambda response: 1.0, name="a"), FunctionReward(lambda response: 2.0, name="a")]
    with pytest.raises(AccordError, match="called alike"):
        combine(same, [sample()])
