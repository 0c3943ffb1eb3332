"""The experience journal in a group: the main process keeps it, and a run that was killed asks nobody twice."""

from __future__ import annotations

import json
import signal
from collections import Counter

import pytest

from accord.trainers.ppo_replay import replay_step
from tests.distributed.group import finish, said, start
from tests.rewards.services import serving
from tests.trainers.ppo_setup import PROMPTS, settings
from tests.trainers.test_ppo_journal import digests, timeless

PROGRAM = """
import json, os, signal, sys
import torch
from accord.config import Config
from accord.trainers.ppo import PPOTrainer
torch.set_num_threads(1)
weigh = PPOTrainer.weigh
def dies(self, *arguments, **options):
    if self.experiences == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return weigh(self, *arguments, **options)
PPOTrainer.weigh = dies
with PPOTrainer(Config(**json.load(open(sys.argv[1])))) as trainer:
    trainer.train()
"""


def settings_file(tiny_folder, run, data, **changes):
    data.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    changes |= {"data": {"train": str(data)}, "checkpoint": {"every_steps": 2}}
    file = run.with_suffix(".json")
    file.write_text(json.dumps(settings(tiny_folder("llama"), run, changes).to_dict()))
    return file


@pytest.mark.parametrize(
    "way",
    [
        {"launch": {"mesh": {"tensor": 2}}},
        pytest.param({"train": {"shard": "always"}, "engine": {"pin_parameters": False}}, marks=pytest.mark.slow),
        pytest.param({"engine": {"inference_tp_size": 2}}, marks=pytest.mark.slow),
    ],
)
def test_one_process_computes_a_step_of_two_again(tiny_folder, tmp_path, way):
    way = {**way, "train": {"batch_size": 2, "max_steps": 3, **way.get("train", {})}}
    config = settings_file(tiny_folder, tmp_path / "run", tmp_path / "prompts.jsonl", **way)
    assert finish(start(2, ["-c", PROGRAM, str(config), "99"], tmp_path / "logs"), tmp_path / "logs") == [0, 0], said(
        tmp_path / "logs"
    )
    found = replay_step(tmp_path / "run", 3, tolerance=1e-5)
    far = {m.name for m in found.differing if m.logged is None or m.replayed is None or abs(m.logged - m.replayed) > 1e-5}
    assert far <= {"train/pack_fill", "train/tokens", "ppo/clip_fraction"}  # two processes have a pack each where one has one
    assert any("ranks " in note and "→ 1" in note for note in found.notes)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["never", "always"])
def test_two_processes_that_are_killed_after_scoring_use_the_scores_again(tiny_folder, tmp_path, shard):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    asked: Counter[str] = Counter()

    def answer(request, number):
        texts = [sample["response"] for sample in request["samples"]]
        asked.update(texts)
        return 200, {"scores": [len(text) % 7 for text in texts]}

    def run(name: str, url: str, dies_at: int) -> list[int]:
        changes = {
            "data": {"train": str(prompts)},
            "train": {"batch_size": 2, "max_steps": 5, "shard": shard},
            "checkpoint": {"every_steps": 2},
            "ppo": {"rewards": [{"type": "remote", "url": url}], "replay_buffer": 1},
        }
        config = tmp_path / f"{name}.json"
        config.write_text(json.dumps(settings(tiny_folder("llama"), tmp_path / name, changes).to_dict()))
        logs = tmp_path / f"logs-{name}-{dies_at}"
        codes = finish(start(2, ["-c", PROGRAM, str(config), str(dies_at)], logs), logs)
        assert (0 in codes) == (dies_at == 99), said(logs)
        return codes

    with serving(answer) as service:
        run("whole", service.url, 99)
        whole = Counter(asked)
        asked.clear()
        assert -signal.SIGKILL in run("cut", service.url, 4)
        run("cut", service.url, 99)
    assert asked == whole
    assert digests(tmp_path / "whole/model") == digests(tmp_path / "cut/model") != {}
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "cut")
