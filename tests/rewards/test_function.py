"""Function rewards: what they are given, and how each way to fail is reported (PEERS §2.13)."""

import numpy as np
import pytest
import torch

from accord.data.records import Message, Prompt
from accord.errors import AccordError, ConfigError
from accord.rewards import FunctionReward, Sample, combine, load_function


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
    with pytest.raises(AccordError, match=r"prompts.jsonl:7.*finite"):
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
    async def later(response):
        return 1.0

    with pytest.raises(ConfigError, match="asynchronous"):
        FunctionReward(later)
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
