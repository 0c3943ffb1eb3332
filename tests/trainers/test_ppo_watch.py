"""A run whose reward is being fooled: the alarm is told, recorded, stops the run or lowers its learning rates, and resumes exactly."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from accord.config.root import merge
from accord.engine.trained import TrainedModel
from accord.errors import ConfigError, Interrupted, StoppedByAlarm
from accord.rewards import Sample
from accord.track.report import write_report
from accord.trainers.ppo import PPOTrainer
from accord.trainers.ppo_judge import HeldOutJudge
from tests.trainers.ppo_setup import SCORES, function, trainer

# Longer is better, nothing pulls back, and the steps are large: KL leaves 0 at once.
FOOLED = {
    "train": {"batch_size": 4, "max_steps": 5, "lr": 1e-2},
    "critic": {"lr": 1e-2},
    "ppo": {
        "rewards": [function("length")],
        "kl": {"coef": 0.0},
        "alarms": dict.fromkeys(("kl_growth", "negative_kl", "entropy", "length", "eos_rate", "repetition"))
        | {"kl": 0.02, "patience": 1},
    },
    "eval": {"at_start": False, "every_epochs": None},
    "checkpoint": {"every_seconds": None},
}


def fooled(model: Path, run: Path, **changes) -> PPOTrainer:
    return trainer(model, run, merge(FOOLED, changes))


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def rates(run: Path) -> list[float]:
    return [row["train/lr"] for row in lines(run / "metrics.jsonl") if row["split"] == "train"]


def digest(run: Path) -> dict[str, str]:
    return {
        f"{part}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for part in ("model", "critic")
        for file in (run / part).glob("*.safetensors")
    }


def test_a_fooled_reward_is_told_recorded_and_shown(tiny_folder, tmp_path, capsys):
    run = tmp_path / "run"
    changes = {"ppo": {"judge": f"{SCORES}:ended", "on_alarm": "warn"}, "eval": {"at_start": True, "every_steps": 2}}
    with fooled(tiny_folder("llama"), run, **changes) as ppo:
        summary = ppo.train()
    train = [row for row in lines(run / "metrics.jsonl") if row["split"] == "train"]
    over = [row["step"] for row in train if row["ppo/kl"] > 0.02]
    assert over and over[0] < 5, "the setting no longer fools anybody"
    (alarm,) = [row for row in lines(run / "alarms.jsonl") if row["alarm"] == "kl"]
    assert (alarm["step"], alarm["since"], alarm["limit"], alarm["action"]) == (over[0], over[0], 0.02, "warn")
    assert alarm["value"] == train[over[0] - 1]["ppo/kl"]
    assert capsys.readouterr().out.count(f"ppo alarm at step {over[0]}: {alarm['text']}") == 1
    assert summary["alarms"]["kl"] == [over[0]] and len(set(rates(run))) == 1
    judged = [row for row in lines(run / "metrics.jsonl") if row["split"] == "eval"]
    assert [row["step"] for row in judged] == [0, 2, 4, 5]
    assert all(
        row["ppo/judge"] == pytest.approx(row["ppo/eos_rate"]) for row in judged
    )  # the judge gives 1 to an answer that ended
    page = write_report(run).read_text()
    for part in (
        "KL against reward",
        "held-out judge",
        "Crosses are alarms",
        f"<b>step {over[0]}</b> kl: KL to the reference is",
    ):
        assert part in page, part


def test_stop_ends_the_run_after_a_checkpoint_and_goes_on_when_the_user_says_otherwise(tiny_folder, tmp_path):
    model, run = tiny_folder("llama"), tmp_path / "run"
    with (
        pytest.raises(
            StoppedByAlarm, match=r"stopped at step (\d).*\n  kl: KL to the reference.*\n.*ppo.on_alarm=warn"
        ) as stopped,
        fooled(model, run, ppo={"on_alarm": "stop"}) as ppo,
    ):
        ppo.train()
    assert stopped.value.exit_code == 1
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    step = int(checkpoint.name.removeprefix("step-"))
    assert step == lines(run / "alarms.jsonl")[-1]["step"] == len(rates(run)) < 5 and not (run / "summary.json").exists()

    with pytest.raises(StoppedByAlarm, match=f"stopped at step {step}"), fooled(model, run, ppo={"on_alarm": "stop"}) as ppo:
        ppo.train()  # nothing was changed about it
    assert len(rates(run)) == step

    passed_too = {"on_alarm": "stop", "alarms": {"kl": 0.001}}
    with pytest.raises(StoppedByAlarm, match=f"stopped at step {step + 1}"), fooled(model, run, ppo=passed_too) as ppo:
        ppo.train()

    with fooled(model, run, ppo={"on_alarm": "warn"}) as ppo:
        ppo.train()
    with fooled(model, tmp_path / "warned", ppo={"on_alarm": "warn"}) as ppo:
        ppo.train()
    assert digest(run) == digest(tmp_path / "warned")  # stopping and going on changed nothing


def test_the_held_out_judge_stops_a_run_whose_score_rises_against_it(tiny_folder, tmp_path):
    run = tmp_path / "run"
    changes = {
        "train": {"max_steps": 8},
        "ppo": {"on_alarm": "stop", "judge": f"{SCORES}:brevity", "alarms": {"kl": None, "judge": 0.01}},
        "eval": {"every_steps": 1},
    }
    said = r"judge: since step .* the score has risen .*held-out judge has fallen"
    with pytest.raises(StoppedByAlarm, match=said), fooled(tiny_folder("llama"), run, **changes) as ppo:
        ppo.train()
    judged = [row for row in lines(run / "metrics.jsonl") if row["split"] == "eval"]
    *before, last = judged
    assert last["ppo/judge"] < max(row["ppo/judge"] for row in before) and lines(run / "alarms.jsonl")[-1]["step"] == last["step"]
    assert (run / "checkpoints" / f"step-{last['step']:08d}").is_dir()
    assert "judge" in lines(run / "samples.jsonl")[-1]


def test_an_alarm_in_the_last_step_stops_nothing(tiny_folder, tmp_path):
    with fooled(tiny_folder("llama"), tmp_path / "run", ppo={"on_alarm": "stop"}) as ppo:
        plain_step = ppo.step
        ppo.step = lambda step: plain_step(step) | {"ppo/kl": 9.0 if step == 5 else 0.0}
        summary = ppo.train()
    assert summary["alarms"]["kl"] == [5] and (tmp_path / "run" / "model").is_dir()


def test_lower_lr_halves_the_rates_of_policy_and_critic_down_to_a_floor(tiny_folder, tmp_path):
    run = tmp_path / "run"
    alarms = {"kl": 0.001, "quiet": 1, "lr_floor": 0.4, "equal_scores": None, "explained_variance": None}
    with fooled(tiny_folder("llama"), run, ppo={"on_alarm": "lower_lr", "alarms": alarms}) as ppo:
        ppo.train()
    (first, *_) = lines(run / "alarms.jsonl")
    step = first["step"]
    assert first["lr_factor"] == 0.5
    critic = [row["ppo/critic_lr"] for row in lines(run / "metrics.jsonl") if row["split"] == "train"]
    for seen in (rates(run), critic):
        assert seen[:step] == [pytest.approx(1e-2)] * step and seen[step] == pytest.approx(0.5e-2)
    assert min(rates(run)) >= 0.4e-2 * (1 - 1e-9)


def test_a_run_with_a_lowered_rate_that_was_cut_off_ends_in_the_same_bytes(tiny_folder, tmp_path, monkeypatch):
    model = tiny_folder("llama")
    changes = {"ppo": {"on_alarm": "lower_lr"}, "checkpoint": {"every_steps": 1}}
    with fooled(model, tmp_path / "whole", **changes) as ppo:
        ppo.train()
    whole = [row for row in lines(tmp_path / "whole" / "alarms.jsonl") if row["alarm"] == "kl"]
    assert whole and whole[0]["step"] < 4

    plain_step = PPOTrainer.step

    def dies_after_the_alarm(self, step):
        if step == 5:
            raise Interrupted("killed")
        return plain_step(self, step)

    monkeypatch.setattr(PPOTrainer, "step", dies_after_the_alarm)
    with pytest.raises(Interrupted), fooled(model, tmp_path / "cut", **changes) as ppo:
        ppo.train()
    monkeypatch.setattr(PPOTrainer, "step", plain_step)
    with fooled(model, tmp_path / "cut", **changes) as ppo:
        ppo.train()
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole") != {}
    assert rates(tmp_path / "cut") == rates(tmp_path / "whole") and len(set(rates(tmp_path / "cut"))) > 1
    assert (tmp_path / "cut" / "alarms.jsonl").read_text() == (tmp_path / "whole" / "alarms.jsonl").read_text()


def test_the_factor_of_the_rate_is_part_of_a_models_state(tiny_folder, tmp_path):
    ppo = trainer(tiny_folder("llama"), tmp_path / "run")
    model: TrainedModel = ppo.policy
    for expected in (0.5, 0.25, 0.2, 0.2):
        model.lower_lr(0.5, 0.2)
        assert model.lr_factor == expected and model.lr(1) == pytest.approx(1e-3 * expected)
    other = trainer(tiny_folder("llama"), tmp_path / "other").policy
    other.load_state(model.state_tensors(), json.loads(json.dumps(model.state())))
    assert other.lr_factor == 0.2 and other.lr(1) == model.lr(1)


# -- the held-out judge ----------------------------------------------------------------------------------------------------


def test_the_judge_gives_its_mean_and_standard_error_and_marks_the_samples(tiny_folder, tmp_path):
    ppo = trainer(tiny_folder("llama"), tmp_path / "run")
    prompt = ppo.examples.train[0].record
    samples = [Sample(prompt, [5], [6], text) for text in ("a", "abc", "abcde")]
    shown = [{"response": "a"}, {"response": "abc"}]
    judge = HeldOutJudge(f"{SCORES}:length", 3)
    metrics = judge.metrics(judge.scores(samples), shown)
    assert metrics == {"ppo/judge": 3.0, "ppo/judge_error": pytest.approx(2.0 / 3**0.5)}  # 1, 3, 5: s = 2
    assert [row["judge"] for row in shown] == [1.0, 3.0]
    assert judge.metrics([1.0]) == {"ppo/judge": 1.0, "ppo/judge_error": 0.0}
    nobody = HeldOutJudge(None, 0)
    assert nobody.scores(samples) is None and nobody.metrics(None) == {}


def test_a_judge_that_is_not_there_or_has_nothing_to_judge_is_refused():
    with pytest.raises(ConfigError, match=r"ppo.judge: .*has no function 'nobody'"):
        HeldOutJudge(f"{SCORES}:nobody", 3)
    with pytest.raises(ConfigError, match=r"ppo.judge: no prompt is held out.*data.valid or data.holdout"):
        HeldOutJudge(f"{SCORES}:length", 0)


def test_the_best_model_may_be_the_judges_choice(tiny_folder, tmp_path):
    """Larger is better; the policy that is kept is the one of that evaluation."""
    run = tmp_path / "run"
    changes = {"ppo": {"judge": f"{SCORES}:length"}, "eval": {"every_steps": 1, "best_metric": "ppo/judge"}}
    with fooled(tiny_folder("llama"), run, **changes) as ppo:
        summary = ppo.train()
    judged = {row["step"]: row["ppo/judge"] for row in lines(run / "metrics.jsonl") if row["split"] == "eval"}
    assert summary["best"]["value"] == max(judged.values()) == judged[summary["best"]["step"]]
    assert load_file(run / "best" / "model.safetensors")
