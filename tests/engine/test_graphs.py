"""Recorded decoding steps without a GPU: a recorder that only runs again shows the rounding of steps, and when they are recorded anew."""

from __future__ import annotations

import pytest
import torch

from accord.engine.generate import DecoderGenerator, PlainGenerator, SamplingParams
from accord.engine.generate.decoder import Decoder
from accord.engine.generate.graphs import GraphedDecoder
from tests.conftest import build_tiny

GREEDY = SamplingParams(max_new_tokens=30, temperature=0)
PROMPTS = [[5 + i, *range(40, 42 + 7 * i)] for i in range(11)]


def graphed(module, placement="shared", slots=8):
    """A generator whose steps are "recorded", and the list of what was."""
    recorded = []
    generator = DecoderGenerator(module, None, max_slots=slots)
    generator.decoder = Decoder(generator.decoder.spec, module, placement=placement)
    generator.cache = generator.decoder.cache()

    def record(function):
        recorded.append(function)
        return function

    generator.forward = GraphedDecoder(generator.decoder, record).forward
    return generator, recorded


def tokens(generator, prompts=PROMPTS):
    return [rollout.token_ids for rollout in generator.generate(prompts, GREEDY)]


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "gpt_neox"])
def test_rounded_steps_give_the_same_answers(family, native, monkeypatch):
    monkeypatch.setenv("ACCORD_NATIVE", native)
    module = build_tiny(family)
    generator, recorded = graphed(module)
    assert tokens(generator) == tokens(PlainGenerator(module, None))
    assert 0 < len(recorded) < 20  # a few sizes, not every step
    before = len(recorded)
    assert tokens(generator) == tokens(PlainGenerator(module, None)) and len(recorded) == before


def test_steps_are_recorded_anew_when_what_they_point_to_has_moved():
    module = build_tiny("llama")
    generator, recorded = graphed(module)
    tokens(generator)
    counts = [len(recorded)]
    generator.release()
    tokens(generator)
    counts.append(len(recorded))
    module.model.layers[0].mlp.down_proj.weight.data = module.model.layers[0].mlp.down_proj.weight.data.clone().neg()
    assert tokens(generator) == tokens(PlainGenerator(module, None))
    counts.append(len(recorded))
    with torch.no_grad():
        module.lm_head.weight.neg_()  # written in place: the same addresses
    assert tokens(generator) == tokens(PlainGenerator(module, None))
    counts.append(len(recorded))
    assert counts[0] < counts[1] < counts[2] == counts[3]


def test_what_cannot_be_recorded_is_computed_with_one_warning(caplog):
    module = build_tiny("llama")
    generator, _ = graphed(module)

    def broken(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    generator.forward = GraphedDecoder(generator.decoder, broken).forward
    assert tokens(generator) == tokens(PlainGenerator(module, None))
    assert caplog.text.count("could not be recorded") == 1
