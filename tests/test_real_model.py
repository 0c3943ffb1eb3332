"""One real model on real data through the command line: SmolLM2-135M learns from HH pairs, within the memory that is promised."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real_model, pytest.mark.real_data]


def test_dpo_on_smollm2_starts_at_ln_2_moves_and_fits_in_8_gb(smol_path, real_data, tmp_path):
    run = tmp_path / "run"
    done = subprocess.run(
        [
            sys.executable, "-m", "accord.cli", "dpo", "hh_dpo", f"model.path={smol_path}", f"run.dir={run}",
            f"data.train=[{{path: {real_data}/hh_harmless_base.jsonl.gz, max_rows: 60}}]", "data.max_length=512", "data.cache=false",
            "train.batch_size=11", "train.max_tokens=2048", "train.max_steps=2", "eval.at_start=false", "eval.max_examples=2",
        ],
        capture_output=True, text=True, timeout=1200, check=False, env={**os.environ, "OMP_NUM_THREADS": "2"}, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    train = [row for row in rows if row["split"] == "train"]
    assert train[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-9) and train[0]["dpo/reward_margin"] == 0
    assert train[1]["dpo/reward_margin"] != 0
    assert max(row["train/tokens"] / 2048 for row in train) > 0.9  # the packs were full ones
    peak = json.loads((run / "summary.json").read_text())["peak_memory_gib"]
    print(f"peak resident memory {peak:.2f} GiB")
    assert peak < 8 * 1e9 / 2**30


def test_fifty_real_prompts_are_answered_as_transformers_answers_them(smol_path, smol_tokenizer, real_data):
    """Greedy, in English and Chinese, fifty slots of very different lengths against padded batches of `generate`.

    Two programs that sum in different orders may part where two tokens are equally likely up to rounding; such a place is looked at.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from accord.engine.generate import DecoderGenerator, SamplingParams

    module = AutoModelForCausalLM.from_pretrained(smol_path, dtype=torch.float32).eval()
    prompts = []
    for name in ("alpaca_en.json", "alpaca_zh.json"):
        for row in json.loads((real_data / name).read_text(encoding="utf-8"))[:25]:
            turn = [{"role": "user", "content": "\n".join(filter(None, (row["instruction"], row.get("input"))))}]
            prompts.append(smol_tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)[:160])
    end, new = smol_tokenizer.convert_tokens_to_ids("<|im_end|>"), 16
    generator = DecoderGenerator(module, smol_tokenizer)
    assert generator.decoder is not None
    answers = generator.generate(prompts, SamplingParams(max_new_tokens=new, temperature=0, stop_token_ids=(end,)))

    expected: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for rows in (order[i : i + 10] for i in range(0, 50, 10)):
        width = max(len(prompts[i]) for i in rows)
        ids = torch.tensor([[end] * (width - len(prompts[i])) + prompts[i] for i in rows])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in rows])
        with torch.no_grad():
            out = module.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=new, eos_token_id=end, pad_token_id=end
            )
        for i, row in zip(rows, out[:, width:].tolist(), strict=True):
            expected[i] = row[: row.index(end) + 1] if end in row else row
    parted = [i for i in range(50) if answers[i].token_ids != expected[i]]
    for i in parted:
        ours, theirs = answers[i].token_ids, expected[i]
        at = next(t for t in range(new) if ours[t] != theirs[t])
        with torch.no_grad():
            logits = module(torch.tensor([prompts[i] + ours[:at]])).logits[0, -1]
        assert abs(float(logits[ours[at]] - logits[theirs[at]])) < 1e-3
    assert len(parted) <= 2
    assert sum(len(answer.token_ids) for answer in answers) > 400
