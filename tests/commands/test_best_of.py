"""`accord generate --best-of N --judge JUDGE`: the best of n answers, by the judge's own word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accord.commands import generate as command
from accord.commands.output import Output
from accord.errors import ConfigError, Interrupted
from tests.commands.test_generate_command import lines, stop_after

SHORT = ["generate.max_new_tokens=8"]


def vowels(response: str) -> int:
    """A judge: the more vowels the better."""
    return sum(response.count(letter) for letter in "aeiou")


JUDGE = f"{__name__}:vowels"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {i} words."}) + "\n" for i in range(20)))
    return file


def test_the_answer_written_is_the_first_with_the_highest_score(tiny_folder, prompts, tmp_path):
    command.generate(str(tiny_folder()), str(prompts), str(tmp_path / "best.jsonl"), SHORT, 5, JUDGE)
    best = lines(tmp_path / "best.jsonl")
    assert [line["prompt"] for line in best] == [line["prompt"] for line in lines(prompts)]
    for line in best:
        assert len(line["scores"]) == 5 and line["score"] == max(line["scores"]) == vowels(line["response"])
    assert any(len(set(line["scores"])) > 1 for line in best)
    again = tmp_path / "again.jsonl"
    command.generate(str(tiny_folder()), str(prompts), str(again), SHORT, 5, JUDGE)
    assert again.read_bytes() == (tmp_path / "best.jsonl").read_bytes()


def test_more_answers_are_never_worse_on_the_whole(tiny_folder, prompts, tmp_path):
    means = []
    for n in (2, 8):
        out = tmp_path / f"{n}.jsonl"
        command.generate(str(tiny_folder()), str(prompts), str(out), SHORT, n, JUDGE)
        means.append(sum(line["score"] for line in lines(out)) / 20)
    assert means[1] > means[0]


def test_a_reward_model_judges_too(tiny_folder, prompts, tmp_path):
    from tests.trainers.runs import trainer

    trainer("reward", tiny_folder(), tmp_path / "rm", {"train": {"max_steps": 1}}).train()
    out = tmp_path / "best.jsonl"
    command.generate(str(tiny_folder()), str(prompts), str(out), SHORT, 3, str(tmp_path / "rm"))
    from accord.commands.score import score

    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps({"prompt": a["prompt"], "response": a["response"]}) + "\n" for a in lines(out)))
    score(str(tmp_path / "rm"), str(answers), str(tmp_path / "scores.jsonl"), [])
    ended = [a for a in lines(out) if a["finish_reason"] == "stop"]  # a cut answer has no end token, a row's answer always has
    scored = {(s["prompt"], s["response"]): s["score"] for s in lines(tmp_path / "scores.jsonl")}
    for line in ended:
        assert line["score"] == pytest.approx(scored[line["prompt"], line["response"]], abs=1e-5)


def test_an_interrupted_run_goes_on_and_another_judge_is_refused(tiny_folder, prompts, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    command.generate(str(tiny_folder()), str(prompts), str(whole), SHORT, 3, JUDGE)
    monkeypatch.setattr(command, "_MOST_ROWS", 4)
    monkeypatch.setattr(command, "_FIRST_ROWS", 4)
    monkeypatch.setattr(Output, "write", stop_after(Output.write, 1))
    with pytest.raises(Interrupted):
        command.generate(str(tiny_folder()), str(prompts), str(broken), SHORT, 3, JUDGE)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="best_of"):
        command.generate(str(tiny_folder()), str(prompts), str(broken), SHORT, 4, JUDGE)
    command.generate(str(tiny_folder()), str(prompts), str(broken), SHORT, 3, JUDGE)
    assert broken.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("best_of", "judge", "more", "message"),
    [
        (3, None, [], "--best-of needs --judge"),
        (None, JUDGE, [], "--judge needs --best-of"),
        (1, JUDGE, [], "--best-of 1: expected 2 or more"),
        (3, JUDGE, ["generate.temperature=0"], "the same answer every time"),
        (3, "tests.commands.test_best_of:vowel", [], "has no function 'vowel'"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_a_model_is_loaded(best_of, judge, more, message, prompts, tmp_path):
    with pytest.raises(ConfigError, match=message):
        command.generate("no-such-model", str(prompts), str(tmp_path / "out.jsonl"), [*SHORT, *more], best_of, judge)
