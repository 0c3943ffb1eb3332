"""`ppo.judge`: what answers to held-out prompts are worth by another measure than the score that is trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accord.engine.ranks import join
from accord.errors import ConfigError
from accord.rewards.function import FunctionReward

if TYPE_CHECKING:
    from accord.rewards.base import Sample


class HeldOutJudge:
    """Judges PPO's evaluations with the function of `ppo.judge`; without one it says nothing.

    Raises ConfigError when there is no such function, or nothing is held out to judge.
    """

    def __init__(self, path: str | None, held_out: int) -> None:
        self.function = None if path is None else FunctionReward(path, key="ppo.judge")
        if path is not None and not held_out:
            raise ConfigError("ppo.judge: no prompt is held out to judge the answers to. Set data.valid or data.holdout.")

    def scores(self, samples: Sequence[Sample]) -> list[float] | None:
        """[R] what the samples are worth; None without a judge. Raises AccordError naming the sample that the function fails on."""
        if self.function is None or not samples:
            return None
        return join().ask_main(partial(self.function.score, samples))

    def metrics(self, scores: Sequence[float] | None, shown: Sequence[dict[str, Any]] = ()) -> dict[str, float]:
        """`ppo/judge`, the mean of `scores`, and `ppo/judge_error`, its standard error s/√n (0 for a single sample).

        `shown` are the rows of the first samples for samples.jsonl: each gets its own `judge`.
        """
        if scores is None:
            return {}
        for row, score in zip(shown, scores, strict=False):
            row["judge"] = score
        spread = float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0
        return {"ppo/judge": float(np.mean(scores)), "ppo/judge_error": spread / math.sqrt(len(scores))}
