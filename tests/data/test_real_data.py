"""The real files (DATA.md): what is read, dropped and trained on is what counting by hand gives."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accord.data.dataset import load_examples
from accord.data.template import ConversationEncoder

pytestmark = pytest.mark.real_data


def test_hh_trains_without_its_four_empty_answers_and_its_pair_with_different_prompts(
    real_data: Path, encoder: ConversationEncoder, settings: Any
) -> None:
    data = settings(str(real_data / "hh_harmless_base.jsonl.gz"))
    examples = load_examples(data, encoder, "preference", seed=1, max_length=10**6)
    (report,) = examples.report.train
    assert (report.read, report.used) == (1600, 1595)
    assert report.dropped == {"empty answer": 4, "chosen and rejected have different prompts": 1}
    assert report.origins["chosen and rejected have different prompts"] == ["hh_harmless_base.jsonl.gz:1255"]


def test_every_hh_answer_is_trained_to_the_character(real_data: Path, encoder: ConversationEncoder, settings: Any) -> None:
    with gzip.open(real_data / "hh_harmless_base.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    examples = load_examples(
        settings([{"path": str(real_data / "hh_harmless_base.jsonl.gz"), "max_rows": 300}], holdout=0.0),
        encoder,
        "preference",
        seed=1,
        max_length=10**6,
    )
    decode = encoder.tokenizer.decode
    for example in examples.train:
        row = rows[int(example.origin.rpartition(":")[2]) - 1]
        for leaf, side in zip(example.tree.leaves, ("chosen", "rejected"), strict=True):
            trained = example.tree.sequence(leaf)[example.tree.sequence_trained(leaf)]
            assert decode(trained, skip_special_tokens=False) == row[side].rpartition("\n\nAssistant:")[2].strip() + "<|im_end|>"
        prompt = decode(example.tree.segments[0].tokens, skip_special_tokens=False)
        assert prompt.count("<|im_start|>") == 1 + example.record.prompt.__len__()


@pytest.mark.parametrize(("name", "rows", "format_name"), [("alpaca_en.json", 699, "alpaca"), ("alpaca_zh.json", 700, "alpaca")])
def test_alpaca_in_both_languages(
    real_data: Path, encoder: ConversationEncoder, settings: Any, name: str, rows: int, format_name: str
) -> None:
    raw = json.loads((real_data / name).read_text(encoding="utf-8"))
    examples = load_examples(settings(str(real_data / name), holdout=0.0), encoder, "demonstration", seed=1, max_length=10**6)
    (report,) = examples.report.train
    assert (report.read, report.used, report.formats) == (rows, rows, {format_name: rows})
    for example, row in zip(examples.train, raw, strict=True):
        (segment,) = example.tree.segments
        assert (
            encoder.tokenizer.decode(segment.tokens[segment.trained], skip_special_tokens=False) == row["output"] + "<|im_end|>"
        )


@pytest.mark.parametrize(("name", "rows"), [("dpo_en.json", 209), ("dpo_zh.json", 210)])
def test_sharegpt_pairs_share_their_prompt(
    real_data: Path, encoder: ConversationEncoder, settings: Any, name: str, rows: int
) -> None:
    examples = load_examples(settings(str(real_data / name), holdout=0.0), encoder, "preference", seed=1, max_length=10**6)
    (report,) = examples.report.train
    assert (
        report.read == rows
        and report.formats == {"sharegpt": rows}
        and set(report.dropped) <= {"identical answers", "empty answer"}
    )
    for example in examples.train:
        prompt = example.tree.segments[0].tokens
        assert prompt.tolist() == encoder.encode_prompt(example.record.prompt)
        assert example.tree.num_tokens == sum(len(example.tree.sequence(leaf)) for leaf in example.tree.leaves) - len(prompt)


@pytest.mark.parametrize("name", ["dpo_en.json", "dpo_zh.json"])
def test_sharegpt_pairs_as_rankings_and_labelled_answers_are_the_same_trees(
    real_data: Path, encoder: ConversationEncoder, settings: Any, name: str
) -> None:
    needs: tuple[Any, ...] = ("preference", "ranking", "labelled")
    data = settings([{"path": str(real_data / name), "max_rows": 60}], holdout=0.0)
    pairs, ranked, labelled = (load_examples(data, encoder, need, seed=1, max_length=10**6) for need in needs)
    assert [len(one.train) for one in (ranked, labelled)] == [len(pairs.train)] * 2
    for pair, ranking, both in zip(pairs.train, ranked.train, labelled.train, strict=True):
        assert pair.labels is None and ranking.labels == (0.0, 1.0) and both.labels == (1.0, 0.0)
        assert ranking.record.responses == (pair.record.chosen, pair.record.rejected) and both.record == pair.record
        for other in (ranking, both):
            for one, two in zip(pair.tree.segments, other.tree.segments, strict=True):
                assert np.array_equal(one.tokens, two.tokens) and np.array_equal(one.trained, two.trained)


@pytest.mark.real_model
def test_smollm2_counts_of_hh(real_data: Path, smol_tokenizer: Any, settings: Any) -> None:
    """PEERS.md §1: a prompt is 124 tokens on average, the answers 38 and 47 (without the template's own)."""
    encoder = ConversationEncoder(smol_tokenizer)
    examples = load_examples(
        settings([{"path": str(real_data / "hh_harmless_base.jsonl.gz"), "max_rows": 300}], holdout=0.0),
        encoder,
        "preference",
        seed=1,
        max_length=10**6,
    )
    prompt, chosen, rejected = np.mean(
        [[len(segment) for segment in example.tree.segments] for example in examples.train], axis=0
    )
    assert 100 < prompt < 200 and 30 < chosen < 60 and 30 < rejected < 60
    over = load_examples(
        settings(str(real_data / "dpo_zh.json"), holdout=0.0), encoder, "preference", seed=1, max_length=1024
    ).report.train[0]
    assert 95 <= over.dropped["too long"] <= 115  # DATA.md: 103 of 210, without the template's system turn


@pytest.mark.real_model
def test_smollm2_tokens_are_its_own_chat_templates(real_data: Path, smol_tokenizer: Any, settings: Any) -> None:
    encoder = ConversationEncoder(smol_tokenizer)
    for name in ("alpaca_en.json", "alpaca_zh.json"):
        examples = load_examples(settings(str(real_data / name), holdout=0.0), encoder, "demonstration", seed=1, max_length=10**6)
        for example in examples.train[:100]:
            theirs = smol_tokenizer.apply_chat_template(
                [m.as_dict() for m in example.record.messages], tokenize=True, return_dict=True
            )["input_ids"]
            ours = example.tree.segments[0].tokens.tolist()
            assert theirs[: len(ours)] == ours and smol_tokenizer.decode(theirs[len(ours) :]).strip() == ""
