"""A reward model as a source of scores: order, sharing, hand-over as text, lengths."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from accord.data.records import Message, Prompt
from accord.data.trees import branching
from accord.errors import AccordError
from accord.models.normalization import Normalization
from accord.rewards import ModelReward, Sample
from accord.rewards.grouping import prompt_trees


class FingerprintModel:
    """Scores a sequence by all of its tokens and their positions; counts the tokens it was given."""

    def __init__(self):
        self.tokens = 0

    def scores(self, pack):
        self.tokens += len(pack)
        return torch.tensor(
            [fingerprint(tree.sequence(leaf)) for tree in pack.trees for leaf in tree.leaves], dtype=torch.float64
        )


def fingerprint(tokens) -> float:
    return float(sum((i + 1) * int(token) for i, token in enumerate(tokens)))


def sample(prompt, response, text="answer", truncated=False) -> Sample:
    return Sample(Prompt((Message("user", "question"),), origin="p.jsonl:1"), prompt, response, text, truncated)


def test_scores_come_back_in_order_each_for_its_own_tokens():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 9, size=5).tolist() for _ in range(4)]
    samples = [sample(prompts[i % 4], rng.integers(1, 9, size=rng.integers(1, 7)).tolist()) for i in range(13)]
    expected = [fingerprint([*s.prompt_ids, *s.response_ids]) for s in samples]
    for budget in (12, 20, 1000):
        assert ModelReward(FingerprintModel(), max_tokens=budget).score(samples) == expected


def test_a_prompt_is_computed_once_for_all_its_responses():
    model = FingerprintModel()
    ModelReward(model, max_tokens=100).score([sample([1, 2, 3, 4], [5]), sample([1, 2, 3, 4], [6, 7]), sample([1, 2, 3, 4], [8])])
    assert model.tokens == 4 + 1 + 2 + 1


def test_groups_never_exceed_the_budget_and_lose_nothing():
    prompts, responses = [[1] * 6] * 7, [[2] * n for n in (3, 3, 3, 4, 1, 6, 2)]
    trees, members = prompt_trees(prompts, responses, 12)
    assert all(tree.num_tokens <= 12 for tree in trees)
    assert sorted(n for group in members for n in group) == list(range(7))
    for tree, group in zip(trees, members, strict=True):
        assert [tree.sequence(leaf).tolist() for leaf in tree.leaves] == [prompts[n] + responses[n] for n in group]


def test_a_long_prompt_loses_its_oldest_tokens_and_a_long_response_is_refused():
    reward = ModelReward(FingerprintModel(), max_tokens=100, max_length=5)
    assert reward.score([sample([1, 2, 3, 4], [5, 6, 7])]) == [fingerprint([3, 4, 5, 6, 7])]
    with pytest.raises(AccordError, match=r"p.jsonl:1.*6 tokens.*max_new_tokens"):
        reward.score([sample([1], [2] * 6)])


@dataclass
class LetterEncoder:
    """Another tokenizer: one token a letter, 0 ends a turn."""

    stop_token_ids: tuple[int, ...] = (0,)

    def encode_responses(self, messages, responses):
        return branching([ord(c) for c in messages[-1].content], [[*map(ord, text), 0] for text in responses])


def test_another_tokenizer_gets_the_text_with_an_end_only_where_the_model_ended():
    reward = ModelReward(FingerprintModel(), max_tokens=100, encoder=LetterEncoder())
    whole, cut = reward.score([sample([1], [2], "yes"), sample([1], [2], "yes", truncated=True)])
    assert whole == fingerprint([*map(ord, "questionyes"), 0])
    assert cut == fingerprint([*map(ord, "questionyes")])
    # an end token weighs 0 in the fingerprint: check the tokens themselves
    assert reward._encode(sample([1], [2], "yes"))[1] == [*map(ord, "yes"), 0]
    assert reward._encode(sample([1], [2], "yes", truncated=True))[1] == [*map(ord, "yes")]


def test_normalised_scores_are_shifted_and_scaled():
    normalization = Normalization(mean=5.0, std=2.0, texts=10, data="held-out")
    plain, normalised = (
        ModelReward(FingerprintModel(), max_tokens=100, normalization=n).score([sample([1, 2], [3]), sample([1, 2], [9, 9])])
        for n in (None, normalization)
    )
    assert normalised == [(score - 5.0) / 2.0 for score in plain]
