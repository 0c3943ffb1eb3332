"""Prompts in any form, and answers to them: sampled from the policy, or given by a loop of one's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accord.data.dataset import Example
from accord.data.reading import read_records
from accord.data.records import Message, PlainText, Prompt, Record
from accord.data.template import ConversationEncoder
from accord.engine.generate import Rollout, SamplingParams, before_stop
from accord.engine.hybrid import HybridEngine
from accord.errors import DataError
from accord.models.heads import context_length
from accord.rewards import Sample
from accord.trainers.ppo_experience import Rollouts

if TYPE_CHECKING:
    from accord.config import Config

Asked = Example | Record | Mapping[str, Any] | str  # what may stand for a prompt


@dataclass(frozen=True)
class Request:
    """R answers to be sampled: what each depends on beside the policy's weights."""

    prompts: list[Prompt]  # [R]
    prompt_ids: list[list[int]]  # [R]
    seeds: list[int]  # [R] of the random numbers of each
    groups: list[int]  # [R] which prompt is meant, from 0


class Answers:
    """Rollouts from prompts."""

    def __init__(self, config: Config, encoder: ConversationEncoder, engine: HybridEngine, params: SamplingParams) -> None:
        self.config, self.settings = config, config.ppo
        self.encoder, self.engine, self.params = encoder, engine, params

    def request(self, prompts: Sequence[Asked], count: int, experience: int) -> Request:
        """`count` answers to each prompt. An answer depends on its prompt, on the number of the experience and on its place there."""
        asked = [self.ask(prompt) for prompt in prompts for _ in range(count)]
        words = self._seeds(experience).generate_state(len(asked), np.uint64).tolist()
        groups = [i for i in range(len(prompts)) for _ in range(count)]
        return Request([prompt for prompt, _ in asked], [ids for _, ids in asked], words, groups)

    def sample(self, request: Request, at_once: int | None = None) -> Rollouts:
        """The answers from the policy as it is now, sampled in rounds of `at_once`: none depends on its neighbours or its round."""
        answers: list[Rollout] = []
        for start in range(0, len(request.seeds), size := at_once or len(request.seeds)):
            part = slice(start, start + size)
            answers += self.engine.generate(request.prompt_ids[part], self.params, seeds=request.seeds[part])
        logprobs = torch.tensor([x for answer in answers for x in answer.logprobs], dtype=torch.float32)
        return self.rollouts(
            request, [answer.token_ids for answer in answers], [answer.truncated for answer in answers], logprobs
        )

    def rollouts(self, request: Request, responses: Sequence[list[int]], truncated: Sequence[bool], logprobs: Tensor) -> Rollouts:
        """Answers to `request` that were sampled, [N] with the sampler's log-probabilities."""
        samples = list(map(self._sample, request.prompts, request.prompt_ids, responses, truncated))
        return Rollouts(samples, request.groups, logprobs)

    def given(self, queries: Sequence[Asked | Tensor], responses: Sequence[Sequence[int] | Tensor]) -> Rollouts:
        """Answers that were sampled elsewhere; those to equal queries are one group. Raises DataError for what can't be one."""
        if len(queries) != len(responses) or not len(queries):
            raise DataError(f"{len(queries)} queries and {len(responses)} responses: one of each is needed, and at least one.")
        samples: list[Sample] = []
        groups: list[int] = []
        known: dict[tuple[int, ...], int] = {}
        longest = context_length(self.engine.model.module)
        for query, response in zip(queries, responses, strict=True):
            if isinstance(query, (str, Mapping, Example, Record)):
                prompt, ids = self.ask(query)
            else:
                ids = self._token_ids(query, "query")
                prompt = Prompt((Message("user", self.encoder.decode(ids)),), origin=f"query {len(samples)}")
            tokens = self._token_ids(response, "response")
            ended = tokens[-1] in self.encoder.stop_token_ids
            sample = self._sample(prompt, ids, tokens, truncated=False)
            ended = ended or sample.response != self.encoder.decode(tokens)  # by a stop string
            samples.append(replace(sample, truncated=not ended))
            groups.append(known.setdefault(tuple(ids), len(known)))
            if longest is not None and len(ids) + len(tokens) > longest:
                raise DataError(
                    f"{samples[-1].name} and its response have {len(ids) + len(tokens):,} tokens, the model takes {longest:,}."
                )
        if self.settings.compares_groups and (alone := [g for g, n in Counter(groups).items() if n < 2]):
            name = samples[groups.index(alone[0])].name
            raise DataError(f"{self.settings.method} compares the responses to a query; {name} has only one.")
        if self.settings.old_logprobs == "sampler":
            raise DataError("ppo.old_logprobs=sampler needs the sampler's log-probabilities. Use ppo.old_logprobs=recompute.")
        return Rollouts(samples, groups, None)

    @property
    def vocabulary(self) -> int:
        """How many token ids the model has."""
        return int(self.engine.model.inner.config.get_text_config().vocab_size)

    def _token_ids(self, tokens: Sequence[int] | Tensor, name: str) -> list[int]:
        if isinstance(tokens, Tensor):
            tokens = tokens.flatten().tolist()
        ids = list(tokens) if isinstance(tokens, Sequence) else []
        size = self.vocabulary
        if not ids or not all(type(token) is int and 0 <= token < size for token in ids):
            raise DataError(f"a {name} is at least one token id from 0 to {size - 1:,}, not {tokens!r:.60}.")
        return ids

    def _sample(self, prompt: Prompt, prompt_ids: list[int], response_ids: list[int], truncated: bool) -> Sample:
        text = before_stop(self.encoder.decode(response_ids), self.params.stop)
        return Sample(prompt, prompt_ids, response_ids, text, truncated)

    def ask(self, prompt: Asked) -> tuple[Prompt, list[int]]:
        """The record and its tokens. Raises DataError for what is no prompt."""
        if isinstance(prompt, str):
            prompt = Prompt((Message("user", prompt),), origin="prompt")
        elif isinstance(prompt, Mapping):
            prompt = next(read_records([prompt], "prompt"))
        if not isinstance(prompt, Example):
            if isinstance(prompt, PlainText) or not isinstance(prompt, Record):
                raise DataError(f"a prompt is a text, a row, a record or an example, not a {type(prompt).__name__}.")
            prompt = prompt if isinstance(prompt, Prompt) else prompt.as_prompt()
            return prompt, list(self.encoder.encode_prompt(prompt.messages))
        record = prompt.record if isinstance(prompt.record, Prompt) else prompt.record.as_prompt()  # type: ignore[union-attr]
        return record, prompt.tree.sequence(prompt.tree.leaves[0]).tolist()

    def _seeds(self, *words: int) -> np.random.SeedSequence:
        seed = self.config.generate.seed
        return np.random.SeedSequence([self.config.run.seed if seed is None else seed, *words])
