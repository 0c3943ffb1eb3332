"""`accord data check`: what it says, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accord.commands.data import check
from accord.config import Config


def write(path: Path, rows: list) -> str:
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return str(path)


def pairs(count: int) -> list[Any]:
    return [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(count)]


@pytest.fixture
def run(tiny_folder: Any, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Check with the tiny model's tokenizer; returns the exit code and the text."""
    monkeypatch.setenv("COLUMNS", "1000")  # no line is wrapped, however long the temporary folder

    def run(
        stage: str | None = None, strict: bool = False, examples: int = 1, model: bool = True, **sections: Any
    ) -> tuple[int, str]:
        if model:
            sections = {"model": {"path": str(tiny_folder("llama"))}, **sections}
            sections["data"] = {"max_length": 256, **sections["data"]}  # what the model reads
        config = Config.model_validate({"train": {"batch_size": 4, "max_tokens": 2048}, **sections})
        code = check(config.for_stage(stage) if stage else config, strict, examples)
        return code, capsys.readouterr().out

    return run


def test_good_data_gets_zero_and_shows_the_mask(run: Any, tmp_path: Path) -> None:
    code, text = run(data={"train": write(tmp_path / "a.jsonl", pairs(10))})
    assert code == 0 and "nothing to object to" in text
    assert "preference" in text and "messages" in text and "10" in text
    assert "limit 256" in text and "trained on" in text
    assert "chosen: ⟦good 0⟧⟦<|im_end|>⟧" in text and "rejected: ⟦bad 0⟧⟦<|im_end|>⟧" in text


def test_unreadable_rows_are_listed_and_exit_2(run: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*pairs(8), "{oops\n", {"prompt": "q", "chosen": "a"}])
    code, text = run(data={"train": path})
    assert code == 2 and "a.jsonl:9  is not JSON" in text and "a.jsonl:10  rejected: expected text" in text
    code, text = run(data={"train": path, "on_bad_row": "drop"})
    assert code == 0 and "warning" in text


def test_what_is_left_out_is_a_warning_and_exit_2_only_if_strict(run: Any, tmp_path: Path) -> None:
    rows = [
        *pairs(8),
        {"prompt": "q", "chosen": "", "rejected": "x"},
        {"prompt": "q", "chosen": "x", "rejected": "x"},
        pairs(1)[0],
    ]
    data = {
        "train": write(tmp_path / "a.jsonl", [*rows, {"prompt": "q", "chosen": "long " * 100, "rejected": "x"}]),
        "max_length": 60,
    }
    code, text = run(data=data)
    assert code == 0
    for said in (
        "1 empty answer (a.jsonl:9)",
        "1 identical answers (a.jsonl:10)",
        "1 too long (a.jsonl:12)",
        "1 of 9 training examples repeat an earlier one",
    ):
        assert said in text
    assert "over the limit" in text
    assert run(data=data, strict=True)[0] == 2


def test_prompts_in_training_and_validation_are_counted(run: Any, tmp_path: Path) -> None:
    data = {"train": write(tmp_path / "a.jsonl", pairs(10)), "valid": write(tmp_path / "b.jsonl", pairs(3))}
    assert "3 of 3 validation examples have a prompt that is trained on" in run(data=data)[1]


def test_too_few_rows_and_too_small_packs_are_errors(run: Any, tmp_path: Path) -> None:
    code, text = run(data={"train": write(tmp_path / "a.jsonl", pairs(3))})
    assert (
        code == 2
        and "2 training examples are fewer than one batch (train.batch_size=4). Add data or set train.batch_size to 2" in text
    )
    rows = [{"prompt": "q", "chosen": "good " * 10, "rejected": "bad " * 10}, *pairs(9)]  # each answer fits, both together don't
    code, text = run(
        data={"train": write(tmp_path / "a.jsonl", rows), "max_length": 80}, train={"batch_size": 2, "max_tokens": 80}
    )
    assert code == 2 and "1 examples need more tokens" in text and "train.max_tokens=80" in text


def test_without_a_model_the_text_is_checked(run: Any, tmp_path: Path) -> None:
    code, text = run(
        model=False, data={"train": write(tmp_path / "a.jsonl", [*pairs(8), {"prompt": "q", "chosen": "", "rejected": "x"}])}
    )
    assert code == 0 and "length in characters" in text and "1 empty answer" in text


def test_a_stage_sees_the_data_as_it_reads_it(run: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", pairs(10))
    assert "sft: demonstration" in run("sft", data={"train": path})[1]
    code, text = run("reward", data={"train": path}, reward={"loss_type": "mse"})
    assert code == 2 and "scored answers" in text


def test_stages_with_their_own_data_are_checked_one_by_one(run: Any, tmp_path: Path) -> None:
    demos = write(tmp_path / "d.jsonl", [{"prompt": f"q{i}", "completion": "a"} for i in range(8)])
    data = {
        "train": [
            {"path": demos, "stages": ["sft"]},
            {"path": write(tmp_path / "p.jsonl", pairs(8)), "stages": ["reward", "ppo"]},
        ]
    }
    code, text = run(data=data)
    assert code == 0, text
    assert text.index("sft: demonstration") < text.index("reward: preference") < text.index("ppo: prompt")


def test_every_source_is_checked_for_what_it_holds(run: Any, tmp_path: Path) -> None:
    demos = write(tmp_path / "d.jsonl", [{"prompt": f"q{i}", "completion": "a"} for i in range(8)])
    code, text = run(data={"train": [{"path": demos}, {"path": write(tmp_path / "p.jsonl", pairs(8))}]})
    assert code == 0 and "d.jsonl: demonstration" in text and "p.jsonl: preference" in text


RANKED = [
    {"prompt": f"question {i}", "responses": [f"good {i}", f"fair {i}", f"bad {i}", f"good {i}"], "ranks": [0, 1, 2, 3]}
    for i in range(8)
]


def test_rankings_are_checked_as_rankings(run: Any, tmp_path: Path) -> None:
    rows = [
        *RANKED,
        {"prompt": "q", "responses": ["a", "b"], "scores": [1, 1]},
        {"prompt": "q", "responses": ["a", " a"], "scores": [1, 0]},
        RANKED[0],
    ]
    path = write(tmp_path / "a.jsonl", rows)
    for model in (True, False):
        code, text = run(data={"train": path}, model=model)
        assert code == 0 and "a.jsonl: ranking" in text
        assert "27 answers in 9 rankings: 27 pairs of a better and a worse one" in text
        assert "1 no answer is better than another (a.jsonl:9)" in text and "1 identical answers (a.jsonl:10)" in text
        assert "9 of 11 rows are used without some of their answers" in text
        assert "1 of 9 training examples repeat an earlier one" in text
    text = run(data={"train": path})[1]
    assert "rank 0: ⟦good 0⟧⟦<|im_end|>⟧" in text and "rank 2: ⟦bad 0⟧⟦<|im_end|>⟧" in text


def test_a_stage_that_learns_from_pairs_counts_the_pairs_of_rankings(run: Any, tmp_path: Path) -> None:
    code, text = run("dpo", data={"train": write(tmp_path / "a.jsonl", RANKED)})
    assert code == 0 and "dpo: preference" in text and "chosen: ⟦good 0⟧" in text
    (line,) = (line for line in text.splitlines() if "a.jsonl" in line and "messages" in line)
    assert [int(word) for word in line.split() if word.isdigit()] == [8, 8, 0, 0, 24]  # rows, used, left out, cut, examples


def test_labelled_answers_are_checked_as_labelled_answers(run: Any, tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": f"question {i}", "completion": f"answer {i}", "label": i % 4 == 0} for i in range(8)]
    path = write(tmp_path / "a.jsonl", [*rows, *pairs(1)])
    for model in (True, False):
        code, text = run(data={"train": path}, model=model)
        assert code == 0 and "a.jsonl: labelled" in text and "3 desirable and 7 undesirable answers" in text
    text = run(data={"train": path}, examples=2)[1]
    assert "desirable: ⟦answer 0⟧⟦<|im_end|>⟧" in text and "undesirable: ⟦answer 1⟧⟦<|im_end|>⟧" in text
    code, text = run(data={"train": write(tmp_path / "b.jsonl", [{**row, "label": True} for row in rows])})
    assert code == 0 and "every answer is labelled desirable" in text
