"""Rollouts laid end to end and read back through packs."""

import numpy as np
import pytest
import torch

from accord.data.records import Message, Prompt
from accord.rewards.base import Sample
from accord.trainers.ppo_experience import Averages, Rollouts, repeated_ngrams


def rollouts(seed: int = 0, prompts: int = 4, responses: int = 13) -> Rollouts:
    rng = np.random.default_rng(seed)
    asked = [rng.integers(1, 50, size=rng.integers(1, 6)).tolist() for _ in range(prompts)]
    samples = [
        Sample(
            Prompt((Message("user", "q"),)),
            asked[i % prompts],
            rng.integers(1, 50, size=rng.integers(1, 7)).tolist(),
            "",
            i % 3 == 0,
        )
        for i in range(responses)
    ]
    return Rollouts(samples, [i % prompts for i in range(responses)], torch.zeros(sum(len(s.response_ids) for s in samples)))


@pytest.mark.parametrize("budget", [12, 30, 1000])
def test_rows_of_a_pack_are_its_targets_whatever_the_layout(budget):
    made = rollouts()
    tokens = torch.tensor([t for s in made.samples for t in s.response_ids])
    seen = []
    for pack, rows in made.packs([11, 2, 3, 7, 0], budget):
        assert torch.equal(pack.targets, tokens[rows])
        seen += rows.tolist()
    expected = [row for i in (11, 2, 3, 7, 0) for row in range(made.offsets[i], made.offsets[i + 1])]
    assert sorted(seen) == sorted(expected)


def test_reading_puts_numbers_back_in_the_order_of_the_responses():
    made = rollouts()
    tokens = torch.tensor([float(t) for s in made.samples for t in s.response_ids])
    assert torch.equal(made.read(list(made.packs(range(len(made)), 15)), lambda pack: pack.targets), tokens)
    sums = made.sum_by_response(tokens)
    assert sums.tolist() == [sum(s.response_ids) for s in made.samples]
    assert tokens[made.last].tolist() == [s.response_ids[-1] for s in made.samples]


def test_repetition():
    assert repeated_ngrams([1, 2, 3]) == 0 and repeated_ngrams(list(range(20))) == 0
    assert repeated_ngrams([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_ngrams([7] * 104) == pytest.approx(100 / 101)


def test_averages_count_by_weight():
    averages = Averages()
    averages.add({"a": 1.0, "b": 5.0}, 1)
    averages.add({"a": 4.0}, 3)
    assert averages.means() == {"a": 13 / 4, "b": 5.0}
