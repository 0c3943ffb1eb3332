"""What a run's metrics mean to a reader: which matter for a stage, which belong into one chart, one sentence for each.

And reading them back: `read_series` turns metrics.jsonl into one curve a metric and split.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accord.track.files import number_of, read_lines, step_of
from accord.track.tracker import RESERVED

# The numbers that say whether the stage worked, best first. A report opens with these.
MAIN: dict[str, tuple[str, ...]] = {
    "sft": ("sft/loss", "sft/perplexity"),
    "reward": ("reward/accuracy", "reward/margin", "reward/loss", "reward/std"),
    "dpo": ("dpo/reward_accuracy", "dpo/reward_margin", "dpo/loss", "dpo/chosen_logp"),
    "ppo": ("ppo/score", "ppo/judge", "ppo/kl", "ppo/response_length", "ppo/eos_rate"),
}

# What is looked at next, in this order.
NEXT: dict[str, tuple[str, ...]] = {"ppo": ("ppo/repetition", "ppo/entropy", "ppo/explained_variance", "ppo/value_loss")}

# Metrics that are read together, in one chart.
TOGETHER: tuple[tuple[str, ...], ...] = (
    ("reward/chosen", "reward/rejected"),
    ("dpo/chosen_reward", "dpo/rejected_reward"),
    ("dpo/chosen_logp", "dpo/rejected_logp"),
)

# Whether a change is good news when the number goes up (+1) or down (-1); others have no direction.
BETTER: dict[str, int] = {
    "sft/loss": -1,
    "sft/perplexity": -1,
    "reward/loss": -1,
    "reward/accuracy": 1,
    "reward/margin": 1,
    "reward/ece": -1,
    "reward/calibration_error": -1,
    "dpo/loss": -1,
    "dpo/reward_accuracy": 1,
    "dpo/reward_margin": 1,
    "ppo/score": 1,
    "ppo/judge": 1,
    "ppo/eos_rate": 1,
    "ppo/explained_variance": 1,
}

MEANING: dict[str, str] = {
    "sft/loss": "Mean negative log-likelihood of the trained tokens (nats per token).",
    "sft/perplexity": "exp(loss): among how many tokens the model hesitates.",
    "reward/loss": "Bradley–Terry loss, where ln 2 ≈ 0.693 is guessing (mse: mean squared error).",
    "reward/ece": "Expected calibration error: how far the model is from being as often right as it is sure.",
    "reward/calibration_error": "How far the mean prediction of a tenth of the answers is from their mean given score.",
    "reward/accuracy": "Share of pairs whose chosen answer scores higher; 0.5 is guessing.",
    "reward/margin": "Score of the chosen minus score of the rejected answer.",
    "reward/std": "Spread of the scores.",
    "reward/chosen": "Mean scores of the chosen and the rejected answers.",
    "dpo/loss": "ln 2 ≈ 0.693 at the start, where policy and reference are the same (sigmoid loss).",
    "dpo/reward_accuracy": "Share of pairs whose chosen answer gained more than the rejected one (simpo, orpo: is the likelier one per token).",
    "dpo/reward_margin": "Reward of the chosen minus reward of the rejected answer.",
    "dpo/chosen_reward": "β times the change of log-probability against the reference (simpo: β times the mean per token; orpo: log odds).",
    "dpo/chosen_logp": "Log-probability of the whole answer. Both falling far is a warning sign.",
    "ppo/score": "Mean raw score of the responses, before clipping and KL.",
    "ppo/judge": "What ppo.judge gives the answers to held-out prompts; nothing is trained on it.",
    "ppo/judge_error": "Standard error of ppo/judge.",
    "ppo/score_std": "Spread of the scores within a step.",
    "ppo/kl": "Distance to the reference: nats per response, mean of Σ log π − log π_ref.",
    "ppo/kl_per_token": "The same per token.",
    "ppo/kl_coef": "β, what a nat of KL costs.",
    "ppo/non_score_reward": "What KL took from the reward.",
    "ppo/policy_loss": "Clipped surrogate loss.",
    "ppo/value_loss": "Error of the critic.",
    "ppo/explained_variance": "How much of the returns the critic predicts; 1 is all.",
    "ppo/entropy": "Mean entropy of the policy at the response tokens (nats). A collapse to 0 ends exploration.",
    "ppo/approx_kl": "How far the update moved the policy from the one that sampled.",
    "ppo/ratio_mean": "Mean of new / old probability; far from 1 is too large a step.",
    "ppo/clip_fraction": "Share of tokens where clipping was active.",
    "ppo/replayed": "Responses of earlier experiences that were learned from again (ppo.replay_buffer).",
    "ppo/response_length": "Tokens per response.",
    "ppo/eos_rate": "Share of responses that the model ended itself.",
    "ppo/repetition": "Share of repeated 4-grams; a rise is a sign of reward hacking.",
    "train/lr": "Learning rate.",
    "train/grad_norm": "Norm of the gradient before clipping.",
    "train/pack_fill": "Share of the token budget that is filled.",
    "train/skipped": "Optimizer steps left out because of numbers that are not finite.",
    "train/tokens_per_s": "Tokens of training per second.",
    "memory/peak_gib": "Highest memory use so far.",
}

GROUPS: dict[str, str] = {
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "dpo": "Direct preference optimisation",
    "ppo": "PPO",
    "train": "Optimisation",
    "throughput": "Throughput",
    "memory": "Memory",
}


@dataclass
class Series:
    """One metric of one split over the steps, with its min and max where the run logged them. Missing numbers are NaN."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    @property
    def finite(self) -> list[tuple[int, float]]:
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]

    @property
    def first(self) -> float | None:
        return self.finite[0][1] if self.finite else None

    @property
    def last(self) -> float | None:
        return self.finite[-1][1] if self.finite else None

    def tail(self, share: float = 0.1) -> float | None:
        """Mean of the last tenth: a training curve's end without its noise."""
        found = self.finite
        end = found[-max(1, math.ceil(len(found) * share)) :]
        return sum(value for _, value in end) / len(end) if end else None

    def head(self, share: float = 0.1) -> float | None:
        """Mean of the first tenth."""
        found = self.finite
        start = found[: max(1, math.ceil(len(found) * share))]
        return sum(value for _, value in start) / len(start) if start else None

    @property
    def has_band(self) -> bool:
        return any(math.isfinite(value) for value in self.low) and any(math.isfinite(value) for value in self.high)


Curves = dict[str, dict[str, Series]]  # metric → split → series


def read_series(path: Path) -> Curves:
    """metrics.jsonl as curves, in the order in which the metrics first appear. `<name>/min` and `/max` become the name's band.

    A row without a step (it was changed by hand) is left out.
    """
    rows = [row for row in read_lines(path) if step_of(row) is not None]
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(name for name in row if name not in RESERVED))
    spread = {name for name in names if name.endswith(("/min", "/max")) and name.rsplit("/", 1)[0] in names}
    curves: Curves = {}
    for row in rows:
        for name in names:
            if name in row and name not in spread:
                series = curves.setdefault(name, {}).setdefault(str(row.get("split", "train")), Series())
                series.steps.append(row["step"])
                series.values.append(_value(row, name))
                series.low.append(_value(row, f"{name}/min"))
                series.high.append(_value(row, f"{name}/max"))
    return curves


def charts_of(stage: str, curves: Curves) -> list[tuple[str, tuple[str, ...]]]:
    """(group, metrics) of every chart of a stage: what belongs together in one, the stage's own and most important first."""
    used: set[str] = set()
    charts: list[tuple[str, tuple[str, ...]]] = []
    for name in _ordered(stage, curves):
        if name in used or name.startswith("time/"):  # the time split has its own place
            continue
        metrics = next((tuple(m for m in together if m in curves) for together in TOGETHER if name in together), (name,))
        if name == "ppo/score":
            sources = tuple(other for other in curves if other.startswith("ppo/score/"))
            metrics = (name, *sources) if len(sources) > 1 else (name,)  # one source is the score itself
            used.update(sources)
        used.update(metrics)
        charts.append((name.split("/", 1)[0], metrics))
    order = [stage, *GROUPS]
    return sorted(charts, key=lambda chart: order.index(chart[0]) if chart[0] in order else len(order))


def is_constant(splits: Mapping[str, Series]) -> bool:
    """Whether every finite value of the metric is the same, and there is one."""
    values = {value for series in splits.values() for _, value in series.finite}
    spread = any(series.has_band for series in splits.values())
    return len(values) <= 1 and not spread


def _ordered(stage: str, curves: Mapping[str, Any]) -> Sequence[str]:
    main = [name for name in (*MAIN.get(stage, ()), *NEXT.get(stage, ())) if name in curves]
    return [*main, *(name for name in curves if name not in main)]


def _value(row: Mapping[str, Any], name: str) -> float:
    value = number_of(row, name)
    return math.nan if value is None else value
