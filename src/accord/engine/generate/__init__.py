"""Prompts in, answers out: `PlainGenerator` now, a lean decoder behind the same `Generator` interface later."""

from accord.engine.generate.plain import PlainGenerator
from accord.engine.generate.text import TextStream, before_stop
from accord.engine.generate.types import Generator, Rollout, SamplingParams

__all__ = ["Generator", "PlainGenerator", "Rollout", "SamplingParams", "TextStream", "before_stop"]
