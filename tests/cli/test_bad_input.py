"""Through the real command line: every kind of bad input ends with exit code 2, says what to do, and leaves nothing half-written."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from accord import cli
from tests.trainers.runs import demonstrations, pairs, sentence

TRAIN = [
    "train.batch_size=4",
    "train.max_steps=2",
    "train.max_tokens=512",
    "data.max_length=200",
    "data.cache=false",
    "track.tensorboard=false",
]


def lines(rows: list[Any]) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode()) + b"\n" for row in rows)


GOOD = pairs(12)
SAME = [{**row, "rejected": row["chosen"]} for row in GOOD]
NO_ANSWER = [{**row, "chosen": ""} for row in GOOD]
LONG = [{**row, "prompt": row["prompt"] * 200} for row in GOOD]
WIDE = [
    {"prompt": "你好", "chosen": sentence(i, 12), "rejected": sentence(i + 1, 12)} for i in range(12)
]  # each answer fits, both do not
ROLES = [{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}]
SCORES = [{"user_input": "q", "completion": f"a {i}", "score": 1.0} for i in range(11)]

# stage, content of the file, overrides, what the message must hold
CASES: dict[str, tuple[str, bytes | None, list[str], list[str]]] = {
    "missing file": ("dpo", None, [], ["rows.jsonl", "no such file"]),
    "empty file": ("dpo", b"", [], ["rows.jsonl", "is empty"]),
    "wrong encoding": ("dpo", lines(GOOD[:2]) + '{"prompt": "你好"}\n'.encode("gb18030"), [], ["rows.jsonl:3", "UTF-8"]),
    "a row that is not JSON": (
        "dpo",
        lines([*GOOD[:3], b"{oops", *GOOD[3:]]),
        [],
        ["rows.jsonl:4", "JSON", "data.on_bad_row=drop"],
    ),
    "missing column": ("dpo", lines([{"prompt": "a", "better": "b", "worse": "c"}]), [], ["rows.jsonl:1", "better", "worse"]),
    "roles out of order": ("sft", lines([*demonstrations(6), *ROLES]), [], ["rows.jsonl:7", "assistant"]),
    "only empty answers": ("dpo", lines(NO_ANSWER), [], ["empty answer", "12"]),
    "only identical pairs": ("dpo", lines(SAME), [], ["identical", "12"]),
    "everything too long": ("dpo", lines(LONG), [], ["too long", "data.max_length"]),
    "fewer rows than a batch": ("dpo", lines(GOOD), ["train.batch_size=64"], ["train.batch_size", "64"]),
    "NaN in a score": (
        "reward",
        lines([*SCORES, b'{"user_input": "q", "completion": "a", "score": NaN}']),
        ["reward.loss_type=mse"],
        ["rows.jsonl:12", "score"],
    ),
    "unknown key": ("dpo", lines(GOOD), ["dpo.betta=0.2"], ["dpo.betta", "dpo.beta"]),
    "wrong type": ("dpo", lines(GOOD), ["train.batch_size=many"], ["train.batch_size", "many"]),
    "beta is 0": ("dpo", lines(GOOD), ["dpo.beta=0"], ["dpo.beta", "greater than 0"]),
    "a pair above the token budget": (
        "dpo",
        lines(WIDE),
        ["train.max_tokens=40", "data.max_length=40"],
        ["train.max_tokens is 40", "Raise train.max_tokens"],
    ),
    "no data": ("dpo", lines(GOOD), ["data.train=null"], ["data.train"]),
    "sequences beyond the context": (
        "dpo",
        lines(GOOD),
        ["data.max_length=5000", "train.max_tokens=5000"],
        ["data.max_length", "256"],
    ),
}


@pytest.fixture
def accord(capsys, caplog):
    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        return int(ended.value.code or 0), capsys.readouterr().err

    return call


def left_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_with_exit_code_2(case, accord, tiny_folder, tmp_path):
    stage, content, overrides, expected = CASES[case]
    data, run = tmp_path / "rows.jsonl", tmp_path / "run"
    if content is not None:
        data.write_bytes(content)
    code, err = accord(stage, f"data.train={data}", f"model.path={tiny_folder('llama')}", f"run.dir={run}", *TRAIN, *overrides)
    assert code == 2, err
    assert err.startswith("error: ") or "\nerror: " in err
    assert "Traceback" not in err
    for text in expected:
        assert text.lower() in err.lower(), f"{text!r} is not in: {err}"
    assert not run.exists()


def test_some_bad_rows_are_left_out_counted_and_the_rest_trains(accord, tiny_folder, tmp_path, capsys):
    rows = [*GOOD, SAME[0], NO_ANSWER[0], LONG[0]]
    (tmp_path / "rows.jsonl").write_bytes(lines([*rows, b"{oops"]))
    code, err = accord(
        "dpo",
        f"data.train={tmp_path}/rows.jsonl",
        f"model.path={tiny_folder('llama')}",
        f"run.dir={tmp_path}/run",
        *TRAIN,
        "data.on_bad_row=drop",
    )
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert math.isfinite(summary["final"]["dpo/loss"])


@pytest.mark.parametrize("under", ["a file", "read-only"])
def test_an_unwritable_output_folder(under, accord, tiny_folder, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(lines(GOOD))
    (tmp_path / "taken").write_text("a file where a folder should be")
    folder = tmp_path / "taken" / "run" if under == "a file" else Path("/proc/accord/run")
    code, err = accord(
        "dpo", f"data.train={tmp_path}/rows.jsonl", f"model.path={tiny_folder('llama')}", f"run.dir={folder}", *TRAIN
    )
    assert code == 2 and str(folder) in err and "Traceback" not in err
    assert (tmp_path / "taken").read_text() == "a file where a folder should be"


def test_a_folder_that_holds_another_configuration(accord, tiny_folder, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(lines(GOOD))
    common = ["dpo", f"data.train={tmp_path}/rows.jsonl", f"model.path={tiny_folder('llama')}", f"run.dir={tmp_path}/run", *TRAIN]
    assert accord(*common)[0] == 0
    before = {
        name: (tmp_path / "run" / name).read_bytes() for name in left_in(tmp_path / "run") if (tmp_path / "run" / name).is_file()
    }
    code, err = accord(*common, "dpo.beta=0.3")
    assert code == 2 and "dpo.beta" in err and "run.overwrite=true" in err
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before
    assert accord(*common)[0] == 0  # finished: nothing to do
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before


def test_a_model_folder_without_tokenizer(accord, tiny_folder, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(lines(GOOD))
    bare = tmp_path / "model"
    shutil.copytree(tiny_folder("llama"), bare)
    for path in bare.iterdir():
        if path.name not in ("config.json", "model.safetensors", "generation_config.json"):
            path.unlink()
    code, err = accord("dpo", f"data.train={tmp_path}/rows.jsonl", f"model.path={bare}", f"run.dir={tmp_path}/run", *TRAIN)
    assert code == 2 and str(bare) in err and "tokenizer" in err
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_not_there(accord, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(lines(GOOD))
    code, err = accord(
        "dpo", f"data.train={tmp_path}/rows.jsonl", "model.path=./no/such/model", f"run.dir={tmp_path}/run", *TRAIN
    )
    assert code == 2 and "no/such/model" in err


def test_hh_with_its_empty_answers_and_its_pair_with_two_prompts_trains(accord, tiny_folder, real_data, tmp_path):
    code, err = accord(
        "reward", f"data.train={real_data}/hh_harmless_base.jsonl.gz", f"model.path={tiny_folder('llama')}", f"run.dir={tmp_path}/run",
        "data.max_length=250", "train.max_tokens=500", "train.max_steps=2", "data.cache=false", "eval.max_examples=8", "track.tensorboard=false",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["final"]["reward/accuracy"] >= 0


def test_data_check_refuses_what_training_would_refuse_for_the_models_context(tmp_path, tiny_folder, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(lines(GOOD))
    words = [str(file), f"model.path={tiny_folder()}", "train.batch_size=4", "data.cache=false"]
    for length, code in ((1000, 2), (256, 0)):
        with pytest.raises(SystemExit) as ended:
            cli.main(["data", "check", *words, f"data.max_length={length}"])
        assert (ended.value.code or 0) == code
        assert ("reads at most 256 tokens" in " ".join(capsys.readouterr().out.split())) == (code == 2)
