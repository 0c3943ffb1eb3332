"""The README's Python runs as it stands there, on the shipped model and a few rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the README takes for granted: pairs, prompts, a reward function; the model is the demo's."""
    pairs = [{"prompt": f"What is {n} plus 2?", "chosen": f"The answer is {n + 2}.", "rejected": "No."} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in pairs))
    (tmp_path / "my_rewards.py").write_text("def score(prompt, response, reference):\n    return len(response) / 10\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_python_of_the_readme_runs(folder):
    blocks = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Trainer" in block]
    assert len(blocks) == 2
    names: dict = {}
    for block in blocks:
        assert "runs/sft" in block
        exec(block.replace("runs/sft", "demo:base").replace("range(10)", "range(2)"), names)
    assert (folder / "runs/dpo/model/model.safetensors").is_file()
    assert names["stats"]["ppo/updates"] == 1 and len(names["experience"]) == 2


def test_shell_lines_quote_what_the_shell_would_take_apart():
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        for line in block.splitlines():
            unquoted = re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", line)
            assert not re.search(r"[\[\]{}]", unquoted), line
