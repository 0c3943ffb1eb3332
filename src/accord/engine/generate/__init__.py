"""Prompts in, answers out: `DecoderGenerator` (lean decoder, continuous batching) and `PlainGenerator` (the model's own forward)."""

from accord.engine.generate.decoding import DecoderGenerator, make_generator
from accord.engine.generate.plain import PlainGenerator
from accord.engine.generate.text import TextStream, before_stop
from accord.engine.generate.types import Generator, Rollout, SamplingParams

__all__ = [
    "DecoderGenerator",
    "Generator",
    "PlainGenerator",
    "Rollout",
    "SamplingParams",
    "TextStream",
    "before_stop",
    "make_generator",
]
