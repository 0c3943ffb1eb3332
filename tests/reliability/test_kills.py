"""Runs that are killed and go on end in the same bytes: two kills a stage here, as many as you like with scripts/torture.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
def test_a_stage_that_is_killed_twice_ends_in_the_same_bytes(
    stage: str, torture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCORD_CACHE", os.environ.get("ACCORD_CACHE", ""))  # set anew inside; this puts it back
    said: list[str] = []
    torture.torture(stage, tmp_path, kills=2, steps=4, seed=0, say=said.append)
    assert said[0].startswith(f"{stage}: 2 kills")
