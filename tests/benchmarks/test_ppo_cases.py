"""The PPO benchmark's own arithmetic: which prompts, which systems, which ratios."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ppo_cases import BASELINE, CASES, Case, Result, Step, System, TooFewPromptsError, Turn, between, exactly, faithful, systems

OURS, OURS_BF16, THEIRS_BF16 = System("accord", "float32"), System("accord", "bf16"), System("trl", "bf16")
CASE = Case("some", 2, (4, 4), 8, False, speed={"float32": 2.0, "bf16": 3.0}, memory=0.5)
PROMPTS = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12)


def step(seconds: float, tokens: int = 8) -> Step:
    return Step(seconds, {"generate": seconds / 2, "score": 0.0, "logprob": 0.0, "train": seconds / 2, "other": 0.0}, tokens)


# -- prompts -----------------------------------------------------------------------------------------------------------


@given(PROMPTS, st.integers(1, 4), st.integers(1, 5))
def test_prompts_of_an_exact_length_are_the_ends_of_long_ones_in_order_and_each_once(prompts, count, length):
    expected = []
    for prompt in prompts:
        if len(prompt) >= length and prompt[-length:] not in expected:
            expected.append(prompt[-length:])
    if len(expected) < count:
        with pytest.raises(TooFewPromptsError, match=f"{count} different prompts .* has {len(expected)}"):
            exactly(prompts, count, length)
    else:
        assert exactly(prompts, count, length) == expected[:count]


@given(PROMPTS, st.integers(1, 4), st.integers(0, 3), st.integers(3, 6))
def test_prompts_between_two_lengths_are_whole_in_order_and_each_once(prompts, count, shortest, longest):
    expected = []
    for prompt in prompts:
        if shortest <= len(prompt) <= longest and prompt not in expected:
            expected.append(prompt)
    if len(expected) < count:
        with pytest.raises(TooFewPromptsError):
            between(prompts, count, shortest, longest)
    else:
        assert between(prompts, count, shortest, longest) == expected[:count]


def test_prompts_that_text_does_not_bring_back_are_left_out():
    words = {1: "a", 2: "b", 3: "ab"}

    def encode(text: str) -> list[int]:  # takes the longest word, as a tokenizer does
        return [3] if text == "ab" else [{"a": 1, "b": 2}[letter] for letter in text]

    kept = faithful([[1, 2], [3], [2, 1]], lambda ids: "".join(words[i] for i in ids), encode)
    assert list(kept) == [[3], [2, 1]]  # [1, 2] comes back as [3]


# -- systems -----------------------------------------------------------------------------------------------------------


def test_systems_take_turns_and_the_baseline_is_always_among_them():
    assert systems(["float32", "bf16"], rivals=True) == [OURS, BASELINE, OURS_BF16, THEIRS_BF16]
    assert systems(["bf16"], rivals=True) == [OURS_BF16, BASELINE, THEIRS_BF16]
    assert systems(["float32"], rivals=True) == [OURS, BASELINE]
    assert systems(["float32", "bf16"], rivals=False) == [OURS, OURS_BF16]


def test_every_case_can_be_divided_into_the_micro_batches_of_the_rival():
    from ppo import _MICRO_BATCH

    for case in CASES:
        assert case.answers % min(_MICRO_BATCH, case.answers) == 0, case.name


# -- measurements ------------------------------------------------------------------------------------------------------


def test_the_warm_up_step_is_not_counted():
    answer = {"steps": [vars(step(99.0)), vars(step(1.0)), vars(step(2.0))], "peak_gib": 3.0, "reads": []}
    assert Turn.read(answer) == Turn((step(1.0), step(2.0)), 3.0)
    with pytest.raises(ValueError, match="besides the warm-up"):
        Turn.read({**answer, "steps": answer["steps"][:1]})


def test_ratios_are_medians_of_steps_rates_of_tokens_and_the_highest_peaks():
    result = Result(CASE)
    result.add(OURS, Turn((step(1.0, 8), step(3.0, 16)), 2.0))
    result.add(OURS, Turn((step(2.0, 12),), 4.0))
    result.add(BASELINE, Turn((step(8.0, 16), step(10.0, 16)), 5.0))
    result.add(BASELINE, Turn((step(6.0, 16),), 10.0))
    (pair,) = result.comparisons()
    assert pair.by_step == 8.0 / 2.0
    assert pair.by_token == pytest.approx((36 / 6.0) / (48 / 24.0))  # (8 + 16 + 12) tokens in 6 s against 48 in 24 s
    assert pair.memory == 4.0 / 10.0
    assert (pair.speed_target, pair.memory_target) == (2.0, 0.5)
    assert result.parts(OURS)["train"] == 1.0


def test_bf16_is_aimed_against_the_rivals_float32_and_its_bf16_is_only_told():
    result = Result(CASE)
    for system, seconds in ((OURS_BF16, 1.0), (BASELINE, 4.0), (THEIRS_BF16, 3.0)):
        result.add(system, Turn((step(seconds),), 1.0))
    against_float32, against_bf16 = result.comparisons()
    assert (against_float32.theirs, against_float32.by_step, against_float32.speed_target) == (BASELINE, 4.0, 3.0)
    assert (against_bf16.theirs, against_bf16.by_step, against_bf16.speed_target) == (THEIRS_BF16, 3.0, None)


def test_without_a_rival_nothing_is_compared():
    result = Result(CASE)
    result.add(OURS, Turn((step(1.0),), 1.0))
    assert result.comparisons() == []


def test_answers_of_another_length_than_asked_for_are_refused():
    full = Result(Case("full", 2, (4, 4), 8, True))
    full.add(OURS, Turn((step(1.0, 16),), 1.0))
    for tokens in (15, 17):
        with pytest.raises(RuntimeError, match=f"{tokens} tokens; 16 were asked for"):
            full.add(OURS, Turn((step(1.0, tokens),), 1.0))
    ragged = Result(CASE)
    ragged.add(OURS, Turn((step(1.0, 15),), 1.0))
    with pytest.raises(RuntimeError, match="17 tokens"):
        ragged.add(OURS, Turn((step(1.0, 17),), 1.0))


def test_what_is_written_is_plain_and_holds_every_step():
    import json

    result = Result(CASE)
    result.add(OURS, Turn((step(1.0), step(2.0)), 1.0))
    result.add(BASELINE, Turn((step(4.0),), 2.0))
    record = json.loads(json.dumps(result.record()))
    assert [s["seconds"] for s in record["systems"]["accord float32"]["turns"][0]["steps"]] == [1.0, 2.0]
    assert record["comparisons"][0]["theirs"] == "trl float32"
    assert record["comparisons"][0]["memory"] == 0.5
