"""The experience journal: a step that is done again uses the scores that were given, and only where they are of that very step."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from accord.config.root import merge
from accord.errors import AccordError, DataError, Interrupted
from accord.trainers import ppo_journal
from accord.trainers.ppo import PPOTrainer
from accord.trainers.ppo_journal import Journal, fingerprint, record_of, scored_of
from tests.rewards.services import serving
from tests.trainers import ppo_scores
from tests.trainers.ppo_setup import PROMPTS, SCORES, function, settings, trainer

GROUPS = {"samples_per_prompt": 2}
CASES = {
    "gae": {},
    "per token, normalised": {"rewards": [function("moody_tokens", per_token=True), function("length", weight=0.1)], "normalize_score": True},
    "several rounds and mini-batches": {"generation_batches": 2, "mini_batches": 2, "ppo_epochs": 2},
    "adaptive KL, replay buffer": {"replay_buffer": 1, "kl": {"controller": "adaptive", "horizon": 50}},
    "grpo": {**GROUPS, "advantage": "grpo"},
    "online DPO": {**GROUPS, "objective": "dpo", "kl": {"coef": 0.05}, "clip_reward": 5.0},
    "RAFT": {**GROUPS, "objective": "sft", "kl": {"coef": 0.05}, "clip_reward": 5.0},
}  # fmt: skip


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*.safetensors"))
    }


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def timeless(run: Path) -> list[dict]:
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/", "memory/", "wall_s", "train/tokens_per_s"))}
        for row in lines(run / "metrics.jsonl")
    ]


@pytest.fixture
def calm():
    ppo_scores.ASKED.clear()
    yield
    ppo_scores.ASKED.clear()
    ppo_scores.PATIENCE["left"] = None


def config(model: Path, run: Path, ppo: dict):
    """Six steps with a checkpoint after steps 2 and 4 and an evaluation, judged, after steps 3 and 6."""
    critic = {"lr": 1e-3} if ppo.get("advantage", "gae") == "gae" and "objective" not in ppo else {"lr": 5e-6}
    changes = {
        "train": {"batch_size": 2, "max_steps": 6, "epochs": 4},
        "critic": critic,
        "checkpoint": {"every_steps": 2, "every_seconds": None},
        "eval": {"every_steps": 3},
        "ppo": merge({"rewards": [function("moody")], "judge": f"{SCORES}:moody"}, ppo),
    }
    return settings(model, run, changes)


def train(conf) -> None:
    with PPOTrainer(conf, train_dataset=list(PROMPTS), valid_dataset=[dict(row) for row in PROMPTS[:3]]) as ppo:
        ppo.train()


def cut_after_scoring(monkeypatch, step: int):
    """The run dies where the scores of `step` are known and on the disk, and nothing is learned from them yet."""
    weigh = PPOTrainer.weigh

    def dies(self, *args, **kwargs):
        if self.experiences == step:
            raise Interrupted("killed")
        return weigh(self, *args, **kwargs)

    monkeypatch.setattr(PPOTrainer, "weigh", dies)
    return lambda: monkeypatch.setattr(PPOTrainer, "weigh", weigh)


@pytest.mark.parametrize("name", CASES)
def test_a_cut_run_ends_in_the_same_bytes_though_its_scores_would_be_others_now(tiny_folder, tmp_path, monkeypatch, calm, name):
    """Cut in step 4, after the evaluation of step 3: both are read from the journal, the rest is asked for."""
    train(config(tiny_folder("llama"), tmp_path / "whole", CASES[name]))
    ppo_scores.PATIENCE["left"] = Counter(ppo_scores.ASKED)
    ppo_scores.ASKED.clear()
    cut = config(tiny_folder("llama"), tmp_path / "cut", CASES[name])
    mend = cut_after_scoring(monkeypatch, 4)
    with pytest.raises(Interrupted):
        train(cut)
    mend()
    train(cut)
    assert ppo_scores.PATIENCE["left"] == ppo_scores.ASKED  # about each answer as often as in the whole run
    for part in ("model", "best"):
        assert digests(tmp_path / "whole" / part) == digests(tmp_path / "cut" / part) != {}, part
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "cut")
    assert lines(tmp_path / "whole/samples.jsonl") == lines(tmp_path / "cut/samples.jsonl")


def test_a_run_cut_before_its_first_checkpoint_reads_its_journal_too(tiny_folder, tmp_path, monkeypatch, calm):
    train(config(tiny_folder("llama"), tmp_path / "whole", {}))
    ppo_scores.PATIENCE["left"] = Counter(ppo_scores.ASKED)
    ppo_scores.ASKED.clear()
    mend = cut_after_scoring(monkeypatch, 2)
    with pytest.raises(Interrupted):
        train(config(tiny_folder("llama"), tmp_path / "cut", {}))
    mend()
    train(config(tiny_folder("llama"), tmp_path / "cut", {}))
    assert digests(tmp_path / "whole/model") == digests(tmp_path / "cut/model")
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "cut")


@pytest.mark.slow
def test_kill_9_after_a_remote_service_has_scored(tiny_folder, tmp_path):
    """Two real processes on one folder; the service raises its scores after the kill, and is asked about new answers only."""
    run, prompts = tmp_path / "run", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    asked: list[str] = []
    raised = [0.0]

    def answer(request, number):
        texts = [sample["response"] for sample in request["samples"]]
        scores = [len(text) % 7 + (raised[0] if text in asked else 0.0) for text in texts]
        asked.extend(texts)
        return 200, {"scores": scores}

    program = (
        "import json, os, signal, sys\n"
        "from accord.config import Config\n"
        "from accord.trainers.ppo import PPOTrainer\n"
        "weigh = PPOTrainer.weigh\n"
        "def dies(self, *a, **k):\n"
        "    if self.experiences == int(sys.argv[2]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return weigh(self, *a, **k)\n"
        "PPOTrainer.weigh = dies\n"
        "with PPOTrainer(Config(**json.load(open(sys.argv[1])))) as trainer: trainer.train()\n"
    )

    def start(folder: Path, url: str, dies_at: int) -> int:
        changes = {
            "data": {"train": str(prompts)},
            "train": {"batch_size": 2, "max_steps": 5},
            "checkpoint": {"every_steps": 2},
            "ppo": {"rewards": [{"type": "remote", "url": url}]},
        }
        file = tmp_path / "config.json"
        file.write_text(json.dumps(settings(tiny_folder("llama"), folder, changes).to_dict()))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run([sys.executable, "-c", program, str(file), str(dies_at)], env=environment, timeout=600).returncode

    with serving(answer) as service:
        assert start(tmp_path / "whole", service.url, 99) == 0
        asked.clear()
        assert start(run, service.url, 4) == -signal.SIGKILL
        before = len(asked)
        raised[0] = 50.0
        assert start(run, service.url, 99) == 0
        assert len(asked) == before + 2  # step 5 alone
    assert digests(tmp_path / "whole/model") == digests(run / "model") != {}


# -- what is a record of this step --------------------------------------------------------------------------------------------


def answered(ppo, number=1, prompts=(0, 1)):
    return ppo.answer("train", number, [ppo.examples.train[i] for i in prompts], 1)


def test_a_record_is_used_only_for_the_same_prompts_seeds_rewards_and_weights(tiny_folder, tmp_path, caplog, calm):
    def fresh(changes=None):
        ppo = trainer(tiny_folder("llama"), tmp_path / "run", merge({"ppo": {"rewards": [function("moody")]}}, changes or {}))
        ppo.journal = Journal(tmp_path / "journal.jsonl")
        return ppo

    first = fresh()
    given = answered(first)
    ppo_scores.PATIENCE["left"] = Counter()
    again = answered(fresh())
    assert again.board == given.board and again.rollouts.samples == given.rollouts.samples
    assert (
        torch.equal(again.rollouts.sampler_logprobs, given.rollouts.sampler_logprobs)
        and again.rollouts.groups == given.rollouts.groups
    )
    assert not caplog.messages

    moved = fresh()
    with torch.no_grad():
        next(iter(moved.policy.parameters.values())).mul_(1 + 1e-6)
    cases = {
        "other prompts": (fresh(), (2, 3)),
        "other random numbers or sampling settings": (fresh({"generate": {"temperature": 0.9}}), (0, 1)),
        "other reward sources": (fresh({"ppo": {"rewards": [function("moody", weight=2.0)]}}), (0, 1)),
        "other weights of the policy": (moved, (0, 1)),
    }
    for reason, (ppo, prompts) in cases.items():
        (tmp_path / "journal.jsonl").unlink()
        first.journal = Journal(tmp_path / "journal.jsonl")
        answered(first)
        caplog.clear()
        answered(ppo, prompts=prompts)
        assert len(caplog.messages) == 1 and f"its record of step 1 is of {reason}; sampled and scored again." in caplog.text
        assert "\n" not in caplog.messages[0]
        caplog.clear()
        answered(ppo, prompts=prompts)  # the new record counts now
        assert not caplog.messages


def test_the_weights_digest_sees_one_step_of_the_smallest_learning_rate(tiny_folder, tmp_path):
    ppo = trainer(tiny_folder("llama"), tmp_path / "run", {"train": {"lr": 1e-7}})
    before = fingerprint(ppo.policy.parameters.values())
    assert before == fingerprint(ppo.policy.parameters.values())
    ppo.step(1)
    assert before != fingerprint(ppo.policy.parameters.values())


def record(score: float = 0.0) -> dict:
    """Of one step with an answer of two tokens and one of one."""
    return {
        "identity": {}, "prompts": ["p.jsonl:1", "p.jsonl:2"], "responses": [[7, 2], [8]], "truncated": [False, True],
        "logprobs": base64.b64encode(np.array([-0.5, -0.25, -1.0], "<f4").tobytes()).decode(), "scores": {"a": [score, 1.0]},
        "total": [float(score), 1.0], "token_rewards": [[0.0, 1.0], [2.0]], "failures": 0, "judge": [0.5, 0.5],
    }  # fmt: skip


# -- the file ------------------------------------------------------------------------------------------------------------------


def test_every_float_comes_back_as_it_was(tiny_folder, tmp_path):
    ppo = trainer(tiny_folder("llama"), tmp_path / "run")
    request = ppo.answers.request([ppo.examples.train[i] for i in range(3)], 1, 1)
    rollouts = ppo.answers.rollouts(request, [[7], [8, 2], [9]], [True, False, True], torch.tensor([-0.1, -1e-30, -0.0, -1 / 3]))
    board = ppo_journal.ScoreBoard([0.1, 1 / 3, -(2.0**-1074)], {"mine": [0.1, 1 / 3, 1e308]}, 1, [[0.1], [1 / 3, 5e-324], [0.0]])
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write("train", 1, record_of({}, ppo_journal.Scored(rollouts, board, [1 / 7, 2.0, 3.0])))
    read = scored_of(Journal(tmp_path / "journal.jsonl").read("train", 1), request, ppo.answers)
    assert read.board == board and read.judged == [1 / 7, 2.0, 3.0] and read.rollouts.samples == rollouts.samples
    bits = [r.sampler_logprobs.numpy().view(np.uint32).tolist() for r in (rollouts, read.rollouts)]
    assert bits[0] == bits[1]


def test_a_torn_line_is_cut_off_and_a_damaged_one_is_named(tmp_path, caplog):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for step in (1, 2, 3):
        journal.write("train", step, record(step))
    path.write_bytes(path.read_bytes().replace(b'"total":[2.0,1.0]', b'"total":[7.0,1.0]') + b'{"blake2b": "torn')
    with caplog.at_level(logging.WARNING):
        again = Journal(path)
        assert [again.read("train", step) is not None for step in (1, 2, 3)] == [True, False, True]
    assert len(caplog.messages) == 1 and "journal.jsonl:2: this record is damaged" in caplog.text
    again.write("train", 4, record(4))
    assert b"torn" not in path.read_bytes()
    assert Journal(path).read("train", 4)["total"][0] == 4 and Journal(path).steps() == [1, 3, 4]
    again.write("train", 3, record(33))
    assert Journal(path).read("train", 3)["total"][0] == 33  # the newest counts


def test_a_folder_in_the_place_of_the_journal_is_named(tmp_path):
    (tmp_path / "journal.jsonl").mkdir()
    for use in (lambda journal: journal.read("train", 1), Journal.steps, lambda journal: journal.write("train", 1, record())):
        with pytest.raises(DataError, match=r"journal.jsonl: cannot read it \(Is a directory\)"):
            use(Journal(tmp_path / "journal.jsonl"))


def of_bytes(*numbers: float, cut: int = 0) -> str:
    data = np.array(numbers, "<f4").tobytes()
    return base64.b64encode(data[: len(data) - cut]).decode()


ODD = {
    "kind": ["test", ["train"], None], "step": ["1", [1], 1.5, -1, True], "identity": ["x", {"weights": 1}, None],
    "prompts": [["one"], [1, 2]], "responses": [[[7, 2]], [[7, 2], []], [[7], [8]], [[7, -2], [8]], [[7, 2.5], [8]], ["ab", "c"]],
    "truncated": [[True], ["no", "yes"]], "total": [[1.0], [1.0] * 3, ["1", "2"], [math.nan, 1.0], [1e39, 0.0], [10**400, 1], None, {}],
    "scores": [[], {"a": [1.0]}, {"a": [math.inf, 1.0]}], "token_rewards": [[[0.0], [2.0]], [[0.0, math.nan], [2.0]]],
    "logprobs": [3, "!!!", of_bytes(-1, -1), of_bytes(-1, -1, -1, cut=1), of_bytes(-1, math.nan, -1)], "failures": ["x", -1],
    "judge": [[0.5], [math.nan, 0.5]],
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_record_of_another_form_is_not_used_though_its_checksum_fits(tmp_path, caplog, name):
    """Written by hand or by another version: named, and its step sampled again."""
    for value in [*ODD[name], "absent"]:
        path = tmp_path / "journal.jsonl"
        path.unlink(missing_ok=True)
        Journal(path).write("train", 1, record())
        changed = {"kind": "train", "step": 2, **record(), name: value}
        if value == "absent":
            del changed[name]
        path.write_bytes(
            path.read_bytes() + json.dumps({"blake2b": ppo_journal._digest(changed), "record": changed}).encode() + b"\n"
        )
        caplog.clear()
        assert Journal(path).steps() == [1], value
        assert len(caplog.messages) == 1 and "journal.jsonl:2: this record is damaged" in caplog.text


@pytest.mark.parametrize("responses", [[[7, 2]], [[7, 2], [10**30]], [[7, 2], [8], [9]]])
def test_answers_that_cannot_be_those_to_the_prompts_are_refused(tiny_folder, tmp_path, responses):
    ppo = trainer(tiny_folder("llama"), tmp_path / "run")
    request = ppo.answers.request([ppo.examples.train[i] for i in range(2)], 1, 1)
    with pytest.raises(DataError, match=r"record of step 3 has no 2 responses of token ids below 512.*Remove journal.jsonl"):
        scored_of({"step": 3, **record(), "responses": responses}, request, ppo.answers)


def test_the_record_is_on_the_disk_before_it_is_used_and_a_full_disk_is_said(tmp_path, monkeypatch):
    path, synced = tmp_path / "journal.jsonl", []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), fsync(handle)))
    journal = Journal(path)
    journal.write("train", 1, record())
    assert path.stat().st_ino in synced and tmp_path.stat().st_ino in synced

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AccordError, match=r"journal.jsonl: cannot write it \(No space left on device\). Free some space"):
        journal.write("train", 2, record())
    monkeypatch.setattr(os, "fsync", fsync)
    journal.write("train", 3, record())
    assert Journal(path).steps() == [1, 3]


def test_what_no_checkpoint_comes_back_to_is_forgotten(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl", tmp_path / "checkpoints")
    whole = Journal(tmp_path / "all.jsonl")
    for step in range(1, 10):
        if step > 2:  # the checkpoints of the two steps before
            for old in (tmp_path / "checkpoints").glob("*"):
                old.rmdir()
            for kept in (step - 2, step - 1):
                (tmp_path / "checkpoints" / f"step-{kept:08d}").mkdir(parents=True)
        for kind in ("train", "eval"):
            journal.write(kind, step, record(step))
            whole.write(kind, step, record(step))
        for reader in (journal, Journal(tmp_path / "journal.jsonl")):
            assert reader.steps() == list(range(max(1, step - 1), step + 1))
            assert reader.read("eval", step)["total"][0] == step
    assert whole.steps() == list(range(1, 10))
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_run_keeps_recent_records_or_all_and_a_new_run_has_none_of_the_old(tiny_folder, tmp_path, calm):
    def run(**changes):
        with trainer(tiny_folder("llama"), tmp_path / "run", changes) as ppo:
            ppo.train()
        return Journal(tmp_path / "run/journal.jsonl").steps()

    steps = {"train": {"max_steps": 6, "epochs": 3}, "checkpoint": {"every_steps": 1, "keep_last": 2}}
    assert run(**steps) == [5, 6]
    assert run(**merge(steps, {"run": {"overwrite": True}, "ppo": {"journal": "all"}})) == [1, 2, 3, 4, 5, 6]
    assert run(**merge(steps, {"run": {"overwrite": True}, "train": {"max_steps": 1}})) == [1]
