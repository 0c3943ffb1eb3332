"""`ppo.replay_buffer`: earlier experiences, learned from again beside the fresh one (docs/algorithms/ppo.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accord.data.records import Message, Prompt
from accord.rewards.base import Sample, ScoreBoard
from accord.trainers.ppo_experience import Experience, Rollouts

# What an update reads of an experience, beside its rollouts; None where the method has no such.
LEARNED = ("old_logprobs", "ref_logprobs", "values", "advantages", "returns", "importance")


class ReplayBuffer:
    """The last `size` experiences, first in, first out. With size 0 it stays empty and every experience is learned from alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kept: list[Experience] = []  # oldest first

    def join(self, fresh: Experience) -> Experience:
        """The fresh experience and the kept ones as one to learn from: each token with its own π_old, V_old, A_t and R̂_t.

        `board`, `rewards`, `kl` and `metrics` stay the fresh one's. Where nothing is kept it is the fresh one itself.
        """
        earlier = [experience for experience in self.kept if experience.number != fresh.number]
        if not earlier:
            return fresh
        joined = [*earlier, fresh]
        samples: list[Sample] = []
        groups: list[int] = []
        for experience in joined:
            first = max(groups, default=-1) + 1
            samples += experience.rollouts.samples
            groups += [first + group for group in experience.rollouts.groups]
        parts = {name: [getattr(experience, name) for experience in joined] for name in LEARNED}
        tensors: dict[str, Any] = {name: None if values[-1] is None else torch.cat(values) for name, values in parts.items()}
        return replace(fresh, rollouts=Rollouts(samples, groups, None), **tensors)

    def add(self, experience: Experience) -> None:
        """Keep the experience that was just learned from, and let the oldest go."""
        rollouts = replace(experience.rollouts, sampler_logprobs=None)
        kept = replace(
            experience, rollouts=rollouts, board=ScoreBoard([]), rewards=torch.zeros(0), metrics={}, whole=None
        )  # what is not learned from is not kept
        earlier = [other for other in self.kept if other.number != experience.number]
        self.kept = [*earlier, kept][-self.size :] if self.size else []

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint: `<place>/<name>` → [N]."""
        return {
            f"{place}/{name}": value
            for place, experience in enumerate(self.kept)
            for name in LEARNED
            if (value := getattr(experience, name)) is not None
        }

    def state(self) -> list[dict[str, Any]]:
        """For a checkpoint: what is no tensor."""
        return [
            {
                "number": experience.number,
                "kl": experience.kl,
                "groups": experience.rollouts.groups,
                "samples": [_plain(sample) for sample in experience.rollouts.samples],
            }
            for experience in self.kept
        ]

    def load_state(self, tensors: Mapping[str, Tensor], state: list[dict[str, Any]]) -> None:
        """Continue from what `tensors` and `state` gave, to the bit."""
        self.kept = []
        for place, row in enumerate(state):
            rollouts = Rollouts([_sample(sample) for sample in row["samples"]], row["groups"], None)
            learned: dict[str, Any] = {name: tensors.get(f"{place}/{name}") for name in LEARNED}
            self.kept.append(
                Experience(
                    number=row["number"], rollouts=rollouts, board=ScoreBoard([]), rewards=torch.zeros(0), kl=row["kl"], **learned
                )
            )


def _plain(sample: Sample) -> dict[str, Any]:
    return {
        "messages": [message.as_dict() for message in sample.prompt.messages],
        "origin": sample.prompt.origin,
        "prompt_ids": list(sample.prompt_ids),
        "response_ids": list(sample.response_ids),
        "response": sample.response,
        "truncated": sample.truncated,
    }


def _sample(row: Mapping[str, Any]) -> Sample:
    prompt = Prompt(tuple(Message(**message) for message in row["messages"]), origin=row["origin"])
    return Sample(prompt, row["prompt_ids"], row["response_ids"], row["response"], row["truncated"])
