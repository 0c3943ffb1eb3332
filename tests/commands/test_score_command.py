"""`accord score`: a file of answers to a file of a reward model's scores."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from accord.cli import main
from accord.commands import score as command
from accord.commands.output import Output
from accord.errors import AccordError, ConfigError, DataError, Interrupted

TOGETHER = "train.max_tokens=1024"
WORDS = [
    "the",
    "answer",
    "is",
    "forty",
    "two,",
    "谢谢你",
    "and",
    "please",
    "do",
    "not",
    "worry",
    "about",
    "it",
    "🙂",
    "nothing",
    "lost",
]


@pytest.fixture(scope="module")
def reward_folder(tiny_folder, tiny_tokenizer, tmp_path_factory) -> Path:
    """A random reward model in which every text has a score of its own, as plain transformers saves it."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("rm")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(tiny_folder(), num_labels=1, initializer_range=0.06)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def words(seed: int) -> str:
    chosen = random.Random(seed)
    return f"{seed} " + " ".join(chosen.choices(WORDS, k=chosen.randrange(1, 20)))


def write(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """30 answers, some of them to the same prompt, the fourth after a longer conversation."""
    rows: list[dict] = [{"prompt": f"What is {i // 3} plus 7?", "response": words(i)} for i in range(30)]
    rows[3]["prompt"] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "你好 👋"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Well?"},
    ]
    return write(tmp_path / "answers.jsonl", rows)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [{"prompt": f"What is {i} plus 7?", "chosen": words(i), "rejected": words(i + 100)} for i in range(12)]
    return write(tmp_path / "pairs.jsonl", rows)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def score(model: Path, data: Path, *overrides: str) -> list[dict]:
    out = data.with_suffix(f".{len(list(data.parent.iterdir()))}.scores")
    command.score(str(model), str(data), str(out), list(overrides))
    assert not out.with_name(out.name + ".partial").exists()
    return lines(out)


def of_text(scored: list[dict]) -> dict[tuple[str, str], float]:
    return {(json.dumps(line["prompt"]), line["response"]): line["score"] for line in scored}


def plain_scores(folder: Path, scored: list[dict]) -> list[float]:
    """What `AutoModelForSequenceClassification` says of the conversations as their template renders them."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    module, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    scores = []
    for line in scored:
        prompt = line["prompt"] if isinstance(line["prompt"], list) else [{"role": "user", "content": line["prompt"]}]
        ids = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": line["response"]}])["input_ids"]
        ids = ids[:-1]  # the line feed after <|im_end|>, which no answer holds
        with torch.no_grad():
            scores.append(float(module(torch.tensor([ids])).logits[0, 0]))
    return scores


def test_scores_come_in_the_order_of_the_rows_and_are_what_transformers_says(reward_folder, answers):
    scored = score(reward_folder, answers)
    assert [{k: line[k] for k in ("prompt", "response")} for line in scored] == lines(answers)
    assert all(list(line) == ["prompt", "response", "score"] for line in scored)
    assert [line["score"] for line in scored] == pytest.approx(plain_scores(reward_folder, scored), abs=1e-5)
    assert len({line["score"] for line in scored}) == 30


def test_a_pair_gives_two_lines_the_chosen_answer_first(reward_folder, pairs):
    scored = score(reward_folder, pairs)
    expected = [(row["prompt"], row[role], role) for row in lines(pairs) for role in ("chosen", "rejected")]
    assert [(line["prompt"], line["response"], line["role"]) for line in scored] == expected
    assert [line["score"] for line in scored] == pytest.approx(plain_scores(reward_folder, scored), abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "bloom"])  # bloom is read in padded rows
def test_other_families_are_scored_as_transformers_does(tiny_folder, answers, tmp_path, family):
    from accord.config import Model
    from accord.models.load import load_scalar
    from accord.models.save import save_model

    save_model(load_scalar(str(tiny_folder(family)), Model(), seed=1, trainable=False), tmp_path / "rm")
    alone, together = score(tmp_path / "rm", answers), score(tmp_path / "rm", answers, TOGETHER)
    expected = pytest.approx(plain_scores(tmp_path / "rm", alone), abs=1e-5)
    assert [line["score"] for line in alone] == expected and [line["score"] for line in together] == expected


def test_a_score_is_the_same_to_the_last_bit_whatever_is_scored_beside_the_text(reward_folder, answers, tmp_path):
    rows = lines(answers)
    whole = of_text(score(reward_folder, answers))
    shuffled = random.Random(1).sample(rows, len(rows))
    assert of_text(score(reward_folder, write(tmp_path / "shuffled.jsonl", shuffled))) == whole
    for i, row in enumerate(rows[:5]):
        [(text, value)] = of_text(score(reward_folder, write(tmp_path / f"alone{i}.jsonl", [row]))).items()
        assert whole[text] == value
    demonstrations = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]}
        for row in rows[6:9]
    ]
    paired = {"prompt": rows[6]["prompt"], "chosen": rows[6]["response"], "rejected": rows[7]["response"]}
    rated = [{**row, "score": 3} for row in rows[9:12]]
    for name, same in (("messages", demonstrations), ("pair", [paired]), ("rated", rated)):
        for text, value in of_text(score(reward_folder, write(tmp_path / f"{name}.jsonl", same))).items():
            assert whole[text] == value


def test_texts_read_together_have_the_same_scores_but_for_rounding(reward_folder, answers, pairs, monkeypatch):
    from accord.models.forward import FrozenModel

    sizes: list[tuple[int, int]] = []
    scores_of = FrozenModel.scores
    monkeypatch.setattr(
        FrozenModel, "scores", lambda self, pack: (sizes.append((pack.num_sequences, len(pack))), scores_of(self, pack))[1]
    )
    for data in (answers, pairs):
        alone = score(reward_folder, data)
        computed = sum(size for _, size in sizes)
        assert {count for count, _ in sizes} == {1}
        for budget in (1024, 1500, 100_000):
            sizes.clear()
            together = score(reward_folder, data, f"train.max_tokens={budget}")
            assert max(count for count, _ in sizes) > 4 and max(size for _, size in sizes) <= budget
            assert sum(size for _, size in sizes) < computed  # a prompt that neighbours share is computed once
            assert [{**line, "score": 0} for line in together] == [{**line, "score": 0} for line in alone]
            assert [line["score"] for line in together] == pytest.approx([line["score"] for line in alone], abs=1e-5)
        sizes.clear()


@pytest.mark.parametrize("overrides", [[], [TOGETHER]])
def test_an_interrupted_run_goes_on_and_ends_with_the_same_file(reward_folder, answers, tmp_path, monkeypatch, overrides):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    command.score(str(reward_folder), str(answers), str(whole), overrides)
    monkeypatch.setattr(command, "_SECONDS_PER_WRITE", -1.0)
    write, count = Output.write, 0

    def stopping(self, rows):
        nonlocal count
        if count == 1:
            raise KeyboardInterrupt
        count += 1
        write(self, rows)

    monkeypatch.setattr(Output, "write", stopping)
    with pytest.raises(Interrupted, match="Start the same command again"):
        command.score(str(reward_folder), str(answers), str(broken), overrides)
    monkeypatch.undo()
    partial = tmp_path / "broken.jsonl.partial"
    kept = partial.read_bytes()
    assert not broken.exists() and 0 < len(lines(partial)) < 30
    for content in (
        kept,
        kept + b'{"prompt": "torn',
        kept[:-10],
        b"".join(kept.splitlines(keepends=True)[:-1]),
        b"",
    ):  # killed there
        partial.write_bytes(content)
        command.score(str(reward_folder), str(answers), str(broken), overrides)
        assert broken.read_bytes() == whole.read_bytes()
        broken.unlink()


def test_a_killed_process_goes_on_and_ends_with_the_same_file(reward_folder, tmp_path):
    data = write(tmp_path / "many.jsonl", [{"prompt": f"What is {i} plus 7?", "response": words(i)} for i in range(400)])
    slow = (  # each text takes a while, and every line is written at once
        "import sys, time; from accord.commands import score; from accord.models.forward import FrozenModel as M; old = M.scores\n"
        "M.scores = lambda self, pack: (time.sleep(0.02), old(self, pack))[1]\n"
        "score._SECONDS_PER_WRITE = -1.0\n"
        "score.score(*sys.argv[1:], [])"
    )
    out, partial = tmp_path / "killed.jsonl", tmp_path / "killed.jsonl.partial"
    process = subprocess.Popen([sys.executable, "-c", slow, str(reward_folder), str(data), str(out)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.stat().st_size > 1000) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not out.exists() and 0 < len(partial.read_bytes().splitlines()) < 400
    command.score(str(reward_folder), str(data), str(out), [])
    command.score(str(reward_folder), str(data), str(tmp_path / "whole.jsonl"), [])
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_finished_file_is_left_alone_and_another_setting_is_refused(reward_folder, answers, tmp_path, capsys):
    out = tmp_path / "scores.jsonl"
    command.score(str(reward_folder), str(answers), str(out), [])
    before = out.stat()
    command.score(str(reward_folder), str(answers), str(out), [])
    assert "finished already" in capsys.readouterr().out
    for override in (TOGETHER, "reward_model.max_length=128", "model.dtype=bfloat16", "data.truncate=left"):
        with pytest.raises(ConfigError, match=rf"another {override.partition('=')[0]} .*give another --out"):
            command.score(str(reward_folder), str(answers), str(out), [override])
    with pytest.raises(ConfigError, match="another rows"):
        answers.write_text(answers.read_text() + '{"prompt": "One more?", "response": "Yes."}\n')
        command.score(str(reward_folder), str(answers), str(out), [])
    assert out.stat().st_mtime_ns == before.st_mtime_ns
    first, second = (Output(tmp_path / "locked.jsonl", "score", "scores") for _ in range(2))
    first.open({})
    with pytest.raises(ConfigError, match="another accord score"):
        second.open({})


def test_a_text_that_is_too_long_is_refused_or_cut_as_data_truncate_says(reward_folder, tmp_path, capsys):
    rows = [
        {"prompt": "Short?", "chosen": "Yes.", "rejected": "No."},
        {"prompt": "Long? " * 80, "chosen": "Yes.", "rejected": "Not at all, I say."},
        {"prompt": "Again?", "chosen": "Yes!", "rejected": "No!"},
    ]
    data = write(tmp_path / "long.jsonl", rows)
    with pytest.raises(DataError, match=r"long.jsonl:2  .* tokens; the model's context is 256\. Set data.truncate=left"):
        score(reward_folder, data)
    with pytest.raises(DataError, match=r"long.jsonl:2  .*reward_model.max_length is 64"):
        score(reward_folder, data, "reward_model.max_length=64")
    capsys.readouterr()
    dropped = score(reward_folder, data, "data.truncate=drop")
    assert [line["response"] for line in dropped] == ["Yes.", "No.", "Yes!", "No!"]
    assert "2 of 3 rows; left out: 1 too long (long.jsonl:2)" in capsys.readouterr().out
    left = score(reward_folder, data, "data.truncate=left")
    assert "2 answers were too long" in capsys.readouterr().out
    assert [line["prompt"] for line in left] == [row["prompt"] for row in rows for _ in range(2)]
    assert [left[i]["score"] for i in (0, 1, 4, 5)] == [line["score"] for line in dropped]
    # Each answer is cut by itself: the shorter one's score is not that of a text cut for the longer one.
    alone = write(tmp_path / "single.jsonl", [{"prompt": rows[1]["prompt"], "response": "Yes."}])
    assert score(reward_folder, alone, "data.truncate=left")[0]["score"] == left[2]["score"]


def test_rows_without_an_answer_are_named_with_what_was_expected(reward_folder, tmp_path, capsys):
    data = write(tmp_path / "mixed.jsonl", [{"prompt": "a?", "response": "b"}, {"prompt": "c?"}, {"prompt": "d?", "answer": "e"}])
    with pytest.raises(
        DataError, match=r"mixed.jsonl:2  holds no answer to score. Expected prompt and response.*on_bad_row=drop"
    ):
        score(reward_folder, data)
    assert [line["response"] for line in score(reward_folder, data, "data.on_bad_row=drop")] == ["b"]
    assert "1 of 3 rows; left out: 2 unreadable (mixed.jsonl:2, mixed.jsonl:3)" in capsys.readouterr().out
    mapped = write(tmp_path / "mapped.jsonl", [{"question": "d?", "answer": "e"}])
    assert score(reward_folder, mapped, "data.columns={prompt: question, response: answer}")[0]["response"] == "e"
    (tmp_path / "text.txt").write_text("Some words.\n")
    with pytest.raises(DataError, match=r"text.txt:1  holds no answer"):
        score(reward_folder, tmp_path / "text.txt")


def test_bad_input_is_refused_before_anything_is_written(reward_folder, tiny_folder, answers, tmp_path):
    out = tmp_path / "new" / "scores.jsonl"
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a", "response": "b"}\n{"prompt": \n')
    model = str(reward_folder)
    for source, rows, overrides, error, message in (
        (str(tiny_folder()), answers, [], ConfigError, r"is a language model, not a reward model \(LlamaForCausalLM\)"),
        (str(tmp_path / "nowhere"), answers, [], ConfigError, "nowhere"),
        (model, tmp_path / "absent.jsonl", [], DataError, "absent.jsonl"),
        (model, broken, [], DataError, "broken.jsonl:2"),
        (model, answers, ["reward_model.max_length=300"], ConfigError, "reads at most 256 tokens"),
        (model, answers, ["reward_model.max_lenght=30"], ConfigError, "Did you mean reward_model.max_length"),
        (model, answers, ["generate.temperature=0"], ConfigError, "accord score does not read this key"),
        (model, answers, ["data.max_length=64"], ConfigError, "accord score does not read this key"),
        (model, answers, ["run.seed=1"], ConfigError, "accord score does not read this key"),
    ):
        with pytest.raises(error, match=message):
            command.score(source, str(rows), str(out), overrides)
        assert not out.parent.exists() or not list(out.parent.iterdir())
    with pytest.raises(ConfigError, match="is a folder"):
        command.score(model, str(answers), str(tmp_path), [])


def test_a_score_that_is_no_number_ends_the_run(reward_folder, answers, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    module = AutoModelForSequenceClassification.from_pretrained(reward_folder)
    with torch.no_grad():
        module.score.weight[0, 0] = float("nan")
    module.save_pretrained(tmp_path / "damaged")
    AutoTokenizer.from_pretrained(reward_folder).save_pretrained(tmp_path / "damaged")
    with pytest.raises(AccordError, match=r"answers.jsonl:1  the model's score is nan"):
        score(tmp_path / "damaged", answers)


def test_the_command_line_scores_with_a_run(reward_folder, pairs, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "scores.jsonl"
    run.mkdir()
    (run / "model").symlink_to(reward_folder)
    for extra, code, words in (
        ([], 0, "24 scores"),
        ([], 0, "finished already"),
        (["model.dtype=bfloat16"], 2, "another model.dtype"),
        (["ppo.clip=0.1"], 2, "does not read this key"),
        (["more"], 2, "expected key=value"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["score", str(run), "--data", str(pairs), "--out", str(out), *extra])
        captured = capsys.readouterr()
        assert ended.value.code == code and words in captured.out + captured.err
    assert [line["role"] for line in lines(out)] == ["chosen", "rejected"] * 12


@pytest.fixture
def normalized_folder(reward_folder, tmp_path) -> Path:
    """The same reward model, which says how its scores lie."""
    from accord.models.normalization import KEY

    folder = tmp_path / "rm"
    shutil.copytree(reward_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config[KEY] = {"mean": 0.25, "std": 0.5, "texts": 40, "data": "held-out"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_normalized_scores_are_the_same_ones_shifted_and_scaled(normalized_folder, reward_folder, answers, tmp_path, capsys):
    raw = score(reward_folder, answers)
    assert score(normalized_folder, answers) == raw
    out = tmp_path / "normalized.jsonl"
    command.score(str(normalized_folder), str(answers), str(out), [], normalized=True)
    assert [line["score"] for line in lines(out)] == pytest.approx([(line["score"] - 0.25) / 0.5 for line in raw])
    with pytest.raises(ConfigError, match="made with another --normalized"):
        command.score(str(normalized_folder), str(answers), str(out), [])
    with pytest.raises(ConfigError, match=r"does not say how its scores lie.*Train it with accord reward"):
        command.score(str(reward_folder), str(answers), str(tmp_path / "none.jsonl"), [], normalized=True)
    assert not list(tmp_path.glob("none*"))
    with pytest.raises(SystemExit) as ended:
        main(["score", str(normalized_folder), "--data", str(answers), "--out", str(out), "--normalized"])
    assert ended.value.code == 0 and "finished already" in capsys.readouterr().out


@pytest.mark.parametrize("overrides", [[], [TOGETHER]])
def test_a_ranking_gives_a_line_for_every_answer_with_its_rank(reward_folder, tmp_path, overrides):
    rows = [
        {"prompt": f"What is {i}?", "responses": [words(i + 10 * k) for k in range(4)], "ranks": [1, 3, 1, 0]} for i in range(5)
    ]
    scored = score(reward_folder, write(tmp_path / "rankings.jsonl", rows), *overrides)
    expected = [(row["prompt"], *pair) for row in rows for pair in zip(row["responses"], row["ranks"], strict=True)]
    assert [(line["prompt"], line["response"], line["rank"]) for line in scored] == expected
    assert [line["score"] for line in scored] == pytest.approx(plain_scores(reward_folder, scored), abs=1e-5)
    single = [{"prompt": row["prompt"], "response": response} for row in rows for response in row["responses"]]
    if not overrides:  # the same to the last bit beside other answers of its row or alone
        alone = score(reward_folder, write(tmp_path / "single.jsonl", single))
        assert [line["score"] for line in alone] == [line["score"] for line in scored]
