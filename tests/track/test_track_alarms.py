"""Alarms from histories of metrics: each sounds at the right step, once, not on noise, and over a resume as without one."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accord.config import Alarms
from accord.track.alarms import METRIC, NOTES, Monitor

GOOD = {
    "ppo/kl": 1.0,
    "ppo/entropy": 2.0,
    "ppo/response_length": 20.0,
    "ppo/eos_rate": 0.9,
    "ppo/score": 0.5,
    "ppo/score_std": 0.3,
    "ppo/repetition": 0.05,
    "ppo/explained_variance": 0.2,
}


def history(changes: dict[int, dict[str, float]], steps: int) -> list[dict[str, float]]:
    """`steps` good steps, from 1; each entry of `changes` holds from its step on."""
    rows, now = [], dict(GOOD)
    for step in range(1, steps + 1):
        now = now | changes.get(step, {})
        rows.append(now)
    return rows


def sounded(rows, **settings) -> list[tuple[str, int, int]]:
    """(name, step, since) of every alarm, in order."""
    monitor = Monitor(Alarms(**settings))
    return [(a.name, a.step, a.since) for step, row in enumerate(rows, 1) for a in monitor.train(step, row)]


@pytest.mark.parametrize(
    ("name", "bad", "just_not"),
    [
        ("kl", {"ppo/kl": 30.1}, {"ppo/kl": 29.9}),
        ("negative_kl", {"ppo/kl": -1.1}, {"ppo/kl": -0.9}),
        ("entropy", {"ppo/entropy": 0.19}, {"ppo/entropy": 0.21}),
        ("length", {"ppo/response_length": 61.0}, {"ppo/response_length": 59.0}),
        ("length", {"ppo/response_length": 6.6}, {"ppo/response_length": 6.7}),
        ("eos_rate", {"ppo/eos_rate": 0.04}, {"ppo/eos_rate": 0.06}),
        ("equal_scores", {"ppo/score_std": 0.0}, {"ppo/score_std": 0.001}),
        ("repetition", {"ppo/repetition": 0.26}, {"ppo/repetition": 0.24}),
    ],
)
def test_an_alarm_sounds_once_when_its_condition_has_held_for_three_steps(name, bad, just_not):
    settings = {"kl_growth": None}
    found = sounded(history({5: bad}, 40), **settings)
    assert found == [(name, 7, 5)]
    assert sounded(history({5: just_not}, 40), **settings) == []
    assert sounded(history({5: bad}, 40), **settings, **{name: None}) == []


def test_an_alarm_is_one_line_that_says_what_the_limit_since_when_and_what_to_try():
    monitor = Monitor(Alarms())
    (alarm,) = [
        a for step, row in enumerate(history({5: {"ppo/kl": 34.2}}, 7), 1) for a in monitor.train(step, row) if a.name == "kl"
    ]
    assert alarm.text == (
        "kl, since step 5: KL to the reference is 34.2 nats a response (limit 30). Raise ppo.kl.coef or lower train.lr, and read the samples."
    )
    assert (alarm.value, alarm.limit) == (34.2, 30.0)


def test_kl_that_runs_away_is_told_and_slower_growth_is_not():
    def growth(steps_to_double):
        return [GOOD | {"ppo/kl": 0.1 * 2 ** (step / steps_to_double)} for step in range(1, 60)]

    # the median of the ten steps before is the value of 5.5 steps ago (nearly): threefold is a doubling in 3.5 steps
    assert [(name, since) for name, _, since in sounded(growth(3), kl=None)] == [("kl_growth", 17)]  # 0.1 · 2^(17/3) = 5.08
    assert sounded(growth(4), kl=None) == []
    assert [name for name, *_ in sounded(growth(4), kl=None, kl_growth=2.5)] == ["kl_growth"]
    assert sounded(growth(4), kl=None, kl_growth=2.5, kl_growth_window=8) == []


def test_the_way_up_from_nothing_is_no_runaway():
    assert sounded([GOOD | {"ppo/kl": min(0.01 * step**3, 4.9)} for step in range(1, 40)]) == []


def test_scores_of_single_responses_have_no_spread_but_are_not_equal():
    rows = [GOOD | {"ppo/score_std": 0.0, "ppo/score": float(step % 3)} for step in range(20)]
    assert sounded(rows) == []
    constant = [GOOD | {"ppo/score_std": 0.0, "ppo/score": 1.0}] * 5
    assert sounded(constant) == [("equal_scores", 3, 1)]
    assert sounded(constant, equal_scores=5) == [("equal_scores", 5, 1)]


def test_a_critic_that_explains_less_than_nothing_is_only_noted():
    monitor = Monitor(Alarms())
    rows = history({1: {"ppo/explained_variance": -0.1}}, 30)
    found = [alarm for step, row in enumerate(rows, 1) for alarm in monitor.train(step, row)]
    assert [(alarm.name, alarm.step, alarm.is_note) for alarm in found] == [("explained_variance", 20, True)]


def test_it_is_told_again_only_after_quiet_steps():
    bad, good = {"ppo/kl": 40.0}, {"ppo/kl": 25.0}
    off = {"kl_growth": None}
    # an outage of 9 steps is no end of the alarm, one of 10 is
    assert [step for _, step, _ in sounded(history({5: bad, 10: good, 19: bad}, 40), **off)] == [7]
    assert [step for _, step, _ in sounded(history({5: bad, 10: good, 20: bad}, 40), **off)] == [7, 22]
    assert [step for _, step, _ in sounded(history({5: bad, 10: good, 12: bad}, 40), quiet=2, **off)] == [7, 14]


def test_a_single_wild_step_is_no_alarm():
    wild = {"ppo/kl": 90.0, "ppo/entropy": 0.0, "ppo/response_length": 200.0, "ppo/eos_rate": 0.0, "ppo/repetition": 0.9}
    assert sounded(history({8: wild, 9: GOOD, 12: wild, 14: GOOD}, 30)) == []
    assert {name for name, *_ in sounded(history({8: wild}, 8), patience=1)} == {
        "kl", "kl_growth", "entropy", "length", "eos_rate", "repetition",
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_alarm(seed):
    """Batches of sixteen short answers: every number moves by a third from step to step, and nothing is wrong."""
    draw = random.Random(seed)
    rows = [
        {name: value * (1 + draw.uniform(-0.35, 0.35)) for name, value in GOOD.items()} | {"ppo/kl": draw.uniform(0.5, 6.0)}
        for _ in range(300)
    ]
    assert sounded(rows) == []


def test_the_quickstarts_extremes_are_no_alarm():
    """The first step and the furthest values of its PPO stage against the exact judge (docs/log.md)."""
    first = {"ppo/kl": 0.0, "ppo/entropy": 0.162, "ppo/response_length": 19.8, "ppo/score_std": 0.39, "ppo/repetition": 0.0}
    furthest = {
        "ppo/kl": 1.07,
        "ppo/entropy": 0.139,
        "ppo/response_length": 11.5,
        "ppo/score_std": 0.255,
        "ppo/repetition": 0.002,
    }
    assert sounded(history({1: first, 2: furthest}, 45)) == []


def test_what_is_missing_or_not_finite_is_not_looked_at():
    for value in (None, math.nan, math.inf, "x", True):
        assert sounded([dict.fromkeys(GOOD, value)] * 5) == []
    assert sounded([{}] * 5) == []


# -- the held-out judge ----------------------------------------------------------------------------------------------------


def judged(points, **settings) -> list[int]:
    """Steps at which the judge's alarm sounds over evaluations (score, judge), ten steps apart."""
    monitor = Monitor(Alarms(**settings))
    steps = []
    for i, (score, judge) in enumerate(points):
        metrics = {"ppo/score": score, "ppo/judge": judge, "ppo/judge_error": 0.02}
        steps += [alarm.step for alarm in monitor.evaluate(10 * i, metrics)]
    return steps


def test_the_score_up_and_the_judge_down_is_a_fooled_reward():
    # three errors of a difference: 3 · √2 · 0.02 = 0.085
    assert judged([(0.0, 0.4), (0.5, 0.6), (0.9, 0.55), (1.2, 0.51), (1.5, 0.3)]) == [30]
    assert judged([(0.0, 0.4), (0.5, 0.6), (0.9, 0.55), (1.2, 0.52)]) == []
    assert judged([(0.0, 0.4), (0.5, 0.6), (0.4, 0.3)]) == []  # both fall: it learns nothing, but nobody is fooled
    assert judged([(0.0, 0.4), (0.5, 0.5), (1.0, 0.6)]) == []
    assert judged([(0.0, 0.6), (0.5, 0.3)], judge=None) == []


def test_a_judge_that_recovers_and_falls_again_is_told_again():
    assert judged([(0.0, 0.6), (0.5, 0.3), (0.6, 0.3), (0.7, 0.58), (0.8, 0.3)]) == [10, 40]


def test_a_noisy_judge_is_no_alarm():
    draw, false = random.Random(1), 0
    for _ in range(200):
        false += bool(judged([(0.1 * i, draw.gauss(0.5, 0.02)) for i in range(10)]))
    assert false <= 10


# -- resume ----------------------------------------------------------------------------------------------------------------

NUMBER = st.floats(-5, 60) | st.just(0.0)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.fixed_dictionaries({name: NUMBER for name in (*GOOD, "ppo/judge", "ppo/judge_error")}), min_size=2, max_size=14),
    st.integers(1, 13),
    st.sampled_from([{}, {"patience": 1, "quiet": 2, "kl_growth_from": 0.5, "equal_scores": 1, "explained_variance": 2}]),
)
def test_a_resumed_history_gives_the_alarms_of_an_undisturbed_one(rows, cut, limits):
    def go(monitor, numbered):
        return [alarm for step, row in numbered for alarm in (*monitor.train(step, row), *monitor.evaluate(step, row))]

    numbered = list(enumerate(rows, 1))
    whole = Monitor(Alarms(**limits))
    expected = go(whole, numbered)
    first = Monitor(Alarms(**limits))
    found = go(first, numbered[:cut])
    second = Monitor(Alarms(**limits))
    second.load_state(json.loads(json.dumps(first.state(), allow_nan=False)))
    found += go(second, numbered[cut:])
    assert found == expected and second.state() == whole.state()


def test_rearmed_alarms_sound_again_if_they_still_hold():
    monitor = Monitor(Alarms(kl_growth=None))
    rows = history({1: {"ppo/kl": 40.0}}, 20)
    steps = []
    for step, row in enumerate(rows, 1):
        if step == 11:
            monitor.rearm()
        steps += [alarm.step for alarm in monitor.train(step, row)]
    assert steps == [3, 13]


def test_every_alarm_has_a_limit_and_a_curve():
    limits = set(Alarms.model_fields) - {"patience", "quiet", "lr_floor", "kl_growth_window", "kl_growth_from"}
    assert limits == set(METRIC) and set(NOTES) <= limits
