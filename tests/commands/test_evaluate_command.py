"""`accord evaluate`: perplexity, reward accuracy, win rate."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from accord.commands.evaluate import evaluate
from accord.errors import ConfigError, DataError

SHORT = ["generate.max_new_tokens=10", "data.cache=false"]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"What is {i} plus 3?", "chosen": f"It is {i + 3}, thank you.", "rejected": f"{i}"} for i in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def reward_folder(tiny_folder, tiny_tokenizer, tmp_path_factory) -> Path:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("rm")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny_folder(), num_labels=1, initializer_range=0.06)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_judges.py").write_text(
        "def length(response):\n    return len(response)\n"
        "def same(response):\n    return 1.0\n"
        "def broken(response):\n    raise ValueError('no')\n"
    )


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_perplexity_is_exp_of_the_mean_loss_of_the_answers_tokens(tiny_folder, pairs, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "result.json"
    evaluate(str(tiny_folder()), str(pairs), "perplexity", None, None, str(out), ["data.cache=false"])
    module, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder()).eval(), AutoTokenizer.from_pretrained(tiny_folder())
    total, count = 0.0, 0
    for line in pairs.read_text().splitlines():
        row = json.loads(line)
        prompt = [{"role": "user", "content": row["prompt"]}]
        start = len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"])
        ids = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": row["chosen"]}])["input_ids"][
            :-1
        ]  # its last "\n"
        with torch.no_grad():
            logprobs = torch.log_softmax(module(torch.tensor([ids])).logits[0].double(), -1)
        total -= sum(float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids)))
        count += len(ids) - start
    result = read(out)
    assert result["tokens"] == count and result["examples"] == 12
    assert result["loss"] == pytest.approx(total / count, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert "perplexity" in capsys.readouterr().out


def test_reward_accuracy_is_the_share_of_pairs_that_plain_transformers_orders_so(reward_folder, pairs, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    out = tmp_path / "result.json"
    evaluate(str(reward_folder), str(pairs), "reward_accuracy", None, None, str(out), ["data.cache=false"])
    module = AutoModelForSequenceClassification.from_pretrained(reward_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(reward_folder)

    def score(prompt: str, answer: str) -> float:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(messages)["input_ids"][:-1]
        with torch.no_grad():
            return float(module(torch.tensor([ids])).logits)

    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    scores = [(score(row["prompt"], row["chosen"]), score(row["prompt"], row["rejected"])) for row in rows]
    result = read(out)
    assert result["accuracy"] == pytest.approx(sum(c > r for c, r in scores) / len(rows))
    assert result["margin"] == pytest.approx(sum(c - r for c, r in scores) / len(rows), abs=1e-5)
    assert result["examples"] == 12


def test_a_model_against_itself_wins_half(tiny_folder, pairs, tmp_path, judges):
    out = tmp_path / "result.json"
    evaluate(str(tiny_folder()), str(pairs), "win_rate", str(tiny_folder()), "my_judges:length", str(out), SHORT)
    result = read(out)
    assert result["win_rate"] == 0.5 and result["ties"] == 12 and result["score"] == result["score_against"]


def test_wins_and_losses_are_counted_and_ties_count_half(tiny_folder, pairs, tmp_path, judges):
    one, other = str(tiny_folder()), str(tiny_folder(seed=7))
    forth, back, even = tmp_path / "forth.json", tmp_path / "back.json", tmp_path / "even.json"
    evaluate(one, str(pairs), "win_rate", other, "my_judges:length", str(forth), SHORT)
    evaluate(other, str(pairs), "win_rate", one, "my_judges:length", str(back), SHORT)
    evaluate(one, str(pairs), "win_rate", other, "my_judges:same", str(even), SHORT)
    result, reverse = read(forth), read(back)
    assert result["wins"] + result["ties"] + result["losses"] == 12
    assert result["win_rate"] == pytest.approx((result["wins"] + result["ties"] / 2) / 12)
    assert result["win_rate"] + reverse["win_rate"] == pytest.approx(1)
    assert read(even)["win_rate"] == 0.5 and read(even)["standard_error"] == 0


def test_a_reward_model_judges(tiny_folder, reward_folder, pairs, tmp_path):
    out = tmp_path / "result.json"
    evaluate(str(tiny_folder()), str(pairs), "win_rate", str(tiny_folder(seed=7)), str(reward_folder), str(out), SHORT)
    result = read(out)
    assert result["wins"] + result["losses"] == 12 and result["score"] != result["score_against"]


def test_misuse_is_refused_with_the_cure(tiny_folder, reward_folder, pairs, tmp_path, judges):
    model, data = str(tiny_folder()), str(pairs)
    absent = str(tmp_path / "absent.jsonl")
    for arguments, error, message in (
        ((model, data, "perplexitty", None, None, None, []), ConfigError, "Did you mean perplexity"),
        ((model, data, "win_rate", None, "my_judges:same", None, []), ConfigError, "needs --against"),
        ((model, data, "win_rate", model, None, None, []), ConfigError, "needs --judge"),
        ((model, data, "perplexity", model, None, None, []), ConfigError, "leave out --against"),
        ((model, data, "perplexity", None, None, None, ["generate.temperature=0"]), ConfigError, "does not read this key"),
        ((model, data, "reward_accuracy", None, None, None, []), ConfigError, "not a reward model"),
        ((str(reward_folder), data, "perplexity", None, None, None, []), ConfigError, "reward model"),
        ((model, data, "win_rate", model, "my_judges:absent", None, SHORT), ConfigError, "length"),
        ((model, data, "win_rate", model, model, None, SHORT), ConfigError, "not a reward model"),
        ((model, data, "win_rate", model, "my_judges:same", None, ["generate.max_new_tokens=999"]), ConfigError, "Lower generate.max_new_tokens"),
        ((model, absent, "perplexity", None, None, None, []), DataError, "absent.jsonl"),
        ((model, data, "perplexity", None, None, str(tmp_path), []), ConfigError, "is a folder"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            evaluate(*arguments)


def test_a_failing_judge_names_the_sample(tiny_folder, pairs, judges):
    from accord.errors import AccordError

    with pytest.raises(AccordError, match=r"my_judges:broken raised ValueError.*pairs.jsonl:1"):
        evaluate(str(tiny_folder()), str(pairs), "win_rate", str(tiny_folder()), "my_judges:broken", None, SHORT)
