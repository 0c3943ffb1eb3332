"""`accord generate`: a file of prompts to a file of answers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from accord.cli import guarded, main
from accord.commands import generate as command
from accord.commands.output import Output
from accord.errors import AccordError, ConfigError, DataError, Interrupted

SHORT = ["generate.max_new_tokens=12"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"What is {i} plus {i * 7}? {'Please. ' * (i % 5)}"} for i in range(40)]
    rows[3] = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好 👋"}]}
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_come_in_the_order_of_the_prompts_and_are_what_transformers_says(tiny_folder, prompts, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out" / "answers.jsonl"
    command.generate(str(tiny_folder()), str(prompts), str(out), [*SHORT, "generate.temperature=0"])
    answers = lines(out)
    assert [answer["prompt"] for answer in answers] == [row["prompt"] for row in lines(prompts)]
    module, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder()).eval(), AutoTokenizer.from_pretrained(tiny_folder())
    for answer in answers[:6]:
        messages = answer["prompt"] if isinstance(answer["prompt"], list) else [{"role": "user", "content": answer["prompt"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        expected = module.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)[0, len(ids) :].tolist()
        assert answer["token_ids"] == expected
        assert answer["response"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert len(answer["logprobs"]) == len(expected) and max(answer["logprobs"]) <= 0
        assert answer["finish_reason"] == ("stop" if expected[-1] in (0, 2) else "length")
    assert not list(out.parent.glob("*.partial"))


def test_an_interrupted_run_goes_on_and_ends_with_the_same_file(tiny_folder, prompts, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    command.generate(str(tiny_folder()), str(prompts), str(whole), SHORT)
    monkeypatch.setattr(command, "_MOST_ROWS", 8)
    monkeypatch.setattr(Output, "write", stop_after(Output.write, 1))
    with pytest.raises(Interrupted, match="Start the same command again"):
        command.generate(str(tiny_folder()), str(prompts), str(broken), SHORT)
    monkeypatch.undo()
    partial = tmp_path / "broken.jsonl.partial"
    assert not broken.exists() and 0 < len(lines(partial)) < 40
    with partial.open("ab") as stream:
        stream.write(b'{"prompt": "torn')  # killed while writing
    command.generate(str(tiny_folder()), str(prompts), str(broken), SHORT)
    assert broken.read_bytes() == whole.read_bytes()


def stop_after(write, times: int):
    count = 0

    def stopping(self, rows):
        nonlocal count
        if count == times:
            raise KeyboardInterrupt
        count += 1
        write(self, rows)

    return stopping


def test_a_finished_file_is_left_alone_and_another_setting_is_refused(tiny_folder, prompts, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    command.generate(str(tiny_folder()), str(prompts), str(out), SHORT)
    before = out.stat()
    command.generate(str(tiny_folder()), str(prompts), str(out), SHORT)
    assert "finished already" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"another generate.temperature .*give another --out"):
        command.generate(str(tiny_folder()), str(prompts), str(out), [*SHORT, "generate.temperature=0.5"])
    with pytest.raises(ConfigError, match="another rows"):
        prompts.write_text(prompts.read_text() + '{"prompt": "One more?"}\n')
        command.generate(str(tiny_folder()), str(prompts), str(out), SHORT)
    assert out.stat().st_mtime_ns == before.st_mtime_ns
    (tmp_path / "foreign.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, match="not known what it was made with"):
        command.generate(str(tiny_folder()), str(prompts), str(tmp_path / "foreign.jsonl"), SHORT)
    assert (tmp_path / "foreign.jsonl").read_text() == "mine\n"


def test_two_processes_cannot_write_the_same_file(tmp_path):
    first, second = (Output(tmp_path / "a.jsonl", "generate", "answers") for _ in range(2))
    assert first.open({"model": "m"}) == 0
    with pytest.raises(ConfigError, match="another accord generate"):
        second.open({"model": "m"})


def test_a_stop_string_is_not_in_the_response(tiny_folder, prompts, tmp_path):
    free, stopped = tmp_path / "free.jsonl", tmp_path / "stopped.jsonl"
    command.generate(str(tiny_folder()), str(prompts), str(free), SHORT)
    stop = next(answer["response"][3:5] for answer in lines(free) if answer["response"][3:5].isalpha())
    command.generate(str(tiny_folder()), str(prompts), str(stopped), [*SHORT, f"generate.stop=[{stop}]"])
    cut = 0
    for before, after in zip(lines(free), lines(stopped), strict=True):
        assert stop not in after["response"]
        if stop in before["response"]:
            cut += 1
            assert after["response"] == before["response"][: before["response"].index(stop)]
            assert after["finish_reason"] == "stop"
    assert cut


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lines.txt", "What is 1 plus 1?\n\nWhat is 2 plus 2?\n"),
        ("rows.csv", "instruction,output\nWhat is 1 plus 1?,2\nWhat is 2 plus 2?,4\n"),
        ("pairs.jsonl", '{"chosen": "\\n\\nHuman: What is 1 plus 1?\\n\\nAssistant: 2", "rejected": "\\n\\nHuman: What is 1 plus 1?\\n\\nAssistant: 3"}\n'
                        '{"chosen": "\\n\\nHuman: What is 2 plus 2?\\n\\nAssistant: 4", "rejected": "\\n\\nHuman: What is 2 plus 2?\\n\\nAssistant: 5"}\n'),
    ],
)  # fmt: skip
def test_prompts_come_in_any_format(tiny_folder, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    command.generate(str(tiny_folder()), str(tmp_path / name), str(tmp_path / "out.jsonl"), SHORT)
    assert [answer["prompt"] for answer in lines(tmp_path / "out.jsonl")] == ["What is 1 plus 1?", "What is 2 plus 2?"]


def test_bad_input_is_refused_before_anything_is_written(tiny_folder, tiny_model, prompts, tmp_path):
    model, out = str(tiny_folder()), tmp_path / "new" / "answers.jsonl"
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt": \n')
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "word " * 400}) + "\n")
    blank = tmp_path / "blank.jsonl"
    blank.write_text('{"prompt": ""}\n')
    no_tokenizer = tmp_path / "bare"
    tiny_model("llama").save_pretrained(no_tokenizer)
    for arguments, error, message in (
        ((model, str(tmp_path / "absent.jsonl"), SHORT), DataError, "absent.jsonl"),
        ((model, str(broken), SHORT), DataError, r"broken.jsonl:2"),
        ((model, str(long), SHORT), DataError, r"long.jsonl:1 .*data.truncate=left"),
        ((model, str(blank), SHORT), DataError, r"no prompt is left of 1 rows\. 1 empty prompt \(blank.jsonl:1\)"),
        ((model, str(prompts), [*SHORT, "engine.max_out_tokens=5"]), DataError, r"the 5 that engine.max_out_tokens allows"),
        ((model, str(prompts), ["generate.temprature=1"]), ConfigError, "temperature"),
        ((model, str(prompts), ["ppo.clip=0.1"]), ConfigError, "does not read this key"),
        ((model, str(prompts), ["generate.temperature=-1"]), ConfigError, "temperature"),
        ((str(tmp_path / "nowhere"), str(prompts), SHORT), ConfigError, "nowhere"),
        ((str(no_tokenizer), str(prompts), SHORT), ConfigError, "tokenizer"),
    ):
        source, rows, overrides = arguments
        with pytest.raises(error, match=message):
            command.generate(source, rows, str(out), overrides)
        assert not out.parent.exists() or not list(out.parent.iterdir())
    with pytest.raises(ConfigError, match="is a folder"):
        command.generate(model, str(prompts), str(tmp_path), SHORT)
    command.generate(model, str(long), str(out), [*SHORT, "data.truncate=left"])
    assert len(lines(out)) == 1


def test_the_command_line_generates_and_chats(tiny_folder, prompts, tmp_path, monkeypatch, capsys):
    out = tmp_path / "answers.jsonl"
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(tiny_folder()), "--prompts", str(prompts), "--out", str(out), *SHORT])
    assert ended.value.code == 0 and len(lines(out)) == 40
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(tiny_folder()), "--prompts", str(prompts), "--out", str(out), "generate.top_k=5", *SHORT])
    assert ended.value.code == 2 and "generate.top_k" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n你好\n/quit\n"))
    with pytest.raises(SystemExit) as ended:
        main(["chat", str(tiny_folder()), "generate.max_new_tokens=5"])
    assert ended.value.code == 0 and capsys.readouterr().out.count("\n") >= 2


def test_a_reward_model_cannot_answer(tiny_folder, tmp_path, prompts, tiny_tokenizer):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = tmp_path / "rm"
    config = AutoConfig.from_pretrained(tiny_folder(), num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    code = guarded(lambda: command.generate(str(folder), str(prompts), str(tmp_path / "o.jsonl"), SHORT))
    assert code == 2
    with pytest.raises(AccordError, match="reward model"):
        command.generate(str(folder), str(prompts), str(tmp_path / "o.jsonl"), SHORT)
