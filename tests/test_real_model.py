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
