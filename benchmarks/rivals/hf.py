"""`transformers.generate`: batches padded on the left, in the order the requests come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from workloads import Request

from rivals import Turn


class Transformers:
    """A batch is over when its longest answer is; rows that have theirs are computed on, and only what was asked for counts."""

    name = "transformers"

    def __init__(self, module: Any, batch: int) -> None:
        self.module, self.batch = module.eval(), batch
        # generate() fills what a call leaves open from the model's own configuration: a sampled end token would end an answer early.
        module.generation_config = GenerationConfig()

    def run(self, requests: Sequence[Request]) -> Turn:
        started = time.perf_counter()
        tokens: list[int] = []
        for start in range(0, len(requests), self.batch):
            tokens += self._answer(requests[start : start + self.batch])
        return Turn(time.perf_counter() - started, tokens)

    def close(self) -> None:
        del self.module

    def _answer(self, requests: Sequence[Request]) -> list[int]:
        ids, mask = _left_pad([request.prompt for request in requests])
        width, lengths = ids.shape[1], torch.tensor([request.answer for request in requests])
        config = GenerationConfig(
            max_new_tokens=int(lengths.max()), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
        )
        torch.manual_seed(requests[0].seed)
        with torch.inference_mode():
            out = self.module.generate(
                ids,
                attention_mask=mask,
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([_Lengths(width, lengths)]),
            )
        return torch.minimum(lengths, torch.tensor(out.shape[1] - width)).tolist()


class _Lengths(StoppingCriteria):
    def __init__(self, width: int, lengths: Tensor) -> None:
        self.width, self.lengths = width, lengths

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] - self.width >= self.lengths


def _left_pad(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask
