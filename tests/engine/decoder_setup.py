"""What the tests of the decoder share: models whose every parameter matters, and greedy answers of transformers to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from accord.engine.generate import DecoderGenerator, SamplingParams
from accord.engine.generate.decoder import Decoder
from accord.engine.generate.projection import Placement
from accord.engine.generate.spec import decoder_spec
from tests.conftest import build_tiny
from tests.engine.test_generate_plain import transformers_greedy

SPECS = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "opt", "gpt_neox", "olmo2"]
PLACEMENTS: list[Placement] = ["packed", "copied", "shared"]
NEW = 20  # tokens of the longest greedy answers


def tiny(family: str, seed: int = 0, scale: float = 10.0, **changes: Any) -> Any:
    """A tiny model that does not say the same token for ever, with random biases and norms, which a fresh one has at 0 and 1.

    Gemma 2's soft-cap needs the eager attention.
    """
    module = build_tiny(family, seed=seed, scale=scale, attn_implementation="eager" if family == "gemma2" else None, **changes)
    draw = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
    return module


def ragged(lengths: Sequence[int] = (1, 23, 5, 12, 9), seed: int = 3) -> list[list[int]]:
    """Random prompts of these lengths."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 512, (length,), generator=draw).tolist() for length in lengths]


def greedy_of(module: Any, prompts: Sequence[list[int]], new: int = NEW) -> list[list[int]]:
    """What transformers answers, prompt by prompt."""
    return [transformers_greedy(module, prompt, (), new) for prompt in prompts]


@dataclass(frozen=True)
class Known:
    """Prompts whose greedy answers are known."""

    prompts: list[list[int]]
    answers: list[list[int]]

    def params(self, stop: tuple[int, ...] = ()) -> list[SamplingParams]:
        return [SamplingParams(max_new_tokens=len(answer), temperature=0, stop_token_ids=stop) for answer in self.answers]

    def expected(self, stop: tuple[int, ...] = ()) -> list[list[int]]:
        """The answers up to and with their first end token."""
        ends = [next((i + 1 for i, token in enumerate(answer) if token in stop), len(answer)) for answer in self.answers]
        return [answer[:end] for answer, end in zip(self.answers, ends, strict=True)]


@cache
def known(family: str) -> tuple[Any, Known]:
    """A tiny model and 70 prompts, all different in length or content: a prompt that takes in the first tokens of its greedy answer
    is a prompt too, and the rest of that answer is its own."""
    module = tiny(family)
    prompts = ragged()
    whole = greedy_of(module, prompts)
    cut = [(prompt + answer[:j], answer[j:]) for j in range(14) for prompt, answer in zip(prompts, whole, strict=True)]
    return module, Known(*map(list, zip(*cut, strict=True)))


def generator_of(module: Any, placement: Placement | None = None, **options: Any) -> DecoderGenerator:
    """The decoder's generator, which must not have fallen back; with its weights where `placement` says."""
    generator = DecoderGenerator(module, options.pop("tokenizer", None), **options)
    assert generator.decoder is not None, generator.reason
    if placement is not None:
        generator.decoder = Decoder(decoder_spec(module), module, generator.dtype, placement)
        generator.forward = generator.decoder.forward
    return generator


def ids(generator: Any, prompts: Sequence[list[int]], new: int = NEW, **options: Any) -> list[list[int]]:
    """Greedy answers."""
    params = SamplingParams(max_new_tokens=new, temperature=0, **options)
    return [rollout.token_ids for rollout in generator.generate(prompts, params)]


def logprobs_of(module: Any, prompt: list[int], answer: list[int], temperature: float) -> torch.Tensor:
    """[answer] float64: the softmax of one forward over the whole sequence."""
    with torch.no_grad():
        logits = module(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
