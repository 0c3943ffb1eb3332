"""PPO's alarms: what its numbers look like when a reward is being fooled or a policy breaks (docs/algorithms/ppo.md, "What is watched").

`Monitor` reads metrics and says which alarms sound. It touches no model and no file, so that a history gives the same alarms whenever
it is read, and a resumed run the same ones as an undisturbed run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accord.config.alarm_sections import Alarms

# The curve on which each alarm is marked.
METRIC = {
    "kl": "ppo/kl",
    "kl_growth": "ppo/kl",
    "negative_kl": "ppo/kl",
    "entropy": "ppo/entropy",
    "length": "ppo/response_length",
    "eos_rate": "ppo/eos_rate",
    "equal_scores": "ppo/score",
    "repetition": "ppo/repetition",
    "judge": "ppo/judge",
    "explained_variance": "ppo/explained_variance",
}
NOTES = ("explained_variance",)  # told, but nothing is done about them


@dataclass(frozen=True)
class Alarm:
    """An alarm that begins to sound at `step`, because its condition has held since `since`."""

    name: str
    step: int
    since: int
    value: float
    limit: float
    text: str  # one line: what, value, limit, since when, what to try

    @property
    def is_note(self) -> bool:
        return self.name in NOTES


@dataclass(frozen=True)
class Check:
    """One condition at one step."""

    name: str
    holds: bool
    value: float
    limit: float
    said: str  # "KL to the reference is 34.2 nats a response (limit 30)"
    cure: str
    patience: int  # steps in a row after which the alarm sounds


@dataclass
class Memory:
    """What an alarm remembers between steps."""

    streak: int = 0  # steps in a row in which the condition has held
    since: int = 0  # the first of them
    last: int = 0  # the newest step in which it held
    sounding: bool = False  # told already: it is told again only after `quiet` steps without


class Monitor:
    """Alarms from the metrics of one run, step by step, evaluation by evaluation.

    A number that is missing or not finite is not looked at. `state` and `load_state` carry it over a resume exactly.
    """

    def __init__(self, settings: Alarms) -> None:
        self.settings = settings
        self.memories: dict[str, Memory] = {}
        self.first: dict[str, float] = {}  # of the metrics that are compared with their first value
        self.kls: list[float] = []  # of the last `kl_growth_window` steps, oldest first
        self.last_score: float | None = None
        self.best: dict[str, float] | None = None  # the evaluation with the highest judge: step, score, judge, error

    def train(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """The alarms that begin to sound at a training step."""
        return self._sound(step, self._training_checks(_finite(metrics)))

    def evaluate(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """The alarms that begin to sound at an evaluation."""
        return self._sound(step, self._evaluation_checks(step, _finite(metrics)))

    def rearm(self) -> None:
        """Let what has been told be told again, should it still hold: its limits have been changed."""
        for memory in self.memories.values():
            memory.sounding, memory.streak = False, 0

    def state(self) -> dict[str, Any]:
        return {
            "memories": {name: asdict(memory) for name, memory in self.memories.items()},
            "first": dict(self.first),
            "kls": list(self.kls),
            "last_score": self.last_score,
            "best": None if self.best is None else dict(self.best),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.memories = {name: Memory(**memory) for name, memory in state["memories"].items()}
        self.first, self.kls = dict(state["first"]), list(state["kls"])
        self.last_score, self.best = state["last_score"], state["best"]

    # -- conditions --------------------------------------------------------------------------------------------------

    def _training_checks(self, seen: Mapping[str, float]) -> Iterator[Check]:
        limits, patience = self.settings, self.settings.patience
        for name in ("ppo/entropy", "ppo/response_length", "ppo/repetition"):
            if name in seen:
                self.first.setdefault(name, seen[name])

        if "ppo/kl" in seen:
            yield from self._kl_checks(seen["ppo/kl"])

        if limits.entropy is not None and "ppo/entropy" in seen:
            value, first = seen["ppo/entropy"], self.first["ppo/entropy"]
            yield Check(
                "entropy", value < limits.entropy * first, value, limits.entropy * first,
                f"entropy is {value:.3g} nats a token (limit {limits.entropy * first:.3g}, {limits.entropy:.0%} of the first)",
                "The policy hardly tries anything else any more: raise ppo.entropy_coef or ppo.kl.coef, or lower train.lr", patience,
            )  # fmt: skip

        if limits.length is not None and "ppo/response_length" in seen:
            value, first = seen["ppo/response_length"], self.first["ppo/response_length"]
            longer = value >= first
            limit = first * limits.length if longer else first / limits.length
            yield Check(
                "length", value > limit if longer else value < limit, value, limit,
                f"responses have {value:.4g} tokens (limit {limit:.4g}; the first had {first:.4g})",
                "Read the samples: the score may pay for length. Raise ppo.kl.coef, or score length with a source of its own", patience,
            )  # fmt: skip

        if limits.eos_rate is not None and "ppo/eos_rate" in seen:
            value = seen["ppo/eos_rate"]
            yield Check(
                "eos_rate", value < limits.eos_rate, value, limits.eos_rate,
                f"{value:.1%} of the responses end by themselves (limit {limits.eos_rate:.1%}), the others are cut",
                "Raise generate.max_new_tokens or ppo.missing_eos_penalty", patience,
            )  # fmt: skip

        if limits.equal_scores is not None and {"ppo/score", "ppo/score_std"} <= seen.keys():
            score, spread = seen["ppo/score"], seen["ppo/score_std"]
            rounding = 1e-6 * max(1.0, abs(score))
            same = (
                self.last_score is None or abs(score - self.last_score) <= rounding
            )  # a batch of one has no spread, but changes
            yield Check(
                "equal_scores", spread <= rounding and same, score, rounding,
                f"all responses score {score:.4g}: there is nothing to learn",
                "Check ppo.rewards on a few samples; give partial credit, or prompts that are sometimes answered well", limits.equal_scores,
            )  # fmt: skip
            self.last_score = score

        if limits.repetition is not None and "ppo/repetition" in seen:
            value, limit = seen["ppo/repetition"], self.first["ppo/repetition"] + limits.repetition
            yield Check(
                "repetition", value > limit, value, limit,
                f"{value:.1%} of the 4-grams are repeated (limit {limit:.1%}; {self.first['ppo/repetition']:.1%} at first)",
                "Read the samples: the score may pay for repetition. Raise ppo.kl.coef, or score repetition with a source of its own", patience,
            )  # fmt: skip

        if limits.explained_variance is not None and "ppo/explained_variance" in seen:
            value = seen["ppo/explained_variance"]
            yield Check(
                "explained_variance", value < 0, value, 0.0,
                f"the critic predicts the returns worse than their mean does (explained variance {value:.3g}, limit 0)",
                "Raise critic.lr or critic.warmup_steps", limits.explained_variance,
            )  # fmt: skip

    def _kl_checks(self, kl: float) -> Iterator[Check]:
        limits, patience = self.settings, self.settings.patience
        pull = "Raise ppo.kl.coef or lower train.lr, and read the samples"
        if limits.kl is not None:
            yield Check(
                "kl", kl > limits.kl, kl, limits.kl, f"KL to the reference is {kl:.4g} nats a response (limit {limits.kl:g})", pull, patience
            )  # fmt: skip
        if limits.negative_kl is not None:
            yield Check(
                "negative_kl", kl < -limits.negative_kl, kl, -limits.negative_kl,
                f"KL to the reference is {kl:.4g} nats a response (limit -{limits.negative_kl:g}), which no distribution has to another",
                "What is sampled is not what is trained: leave generate.top_p, top_k, min_p and min_new_tokens at their defaults", patience,
            )  # fmt: skip
        if limits.kl_growth is not None and self.kls:
            usual = max(median(self.kls), 0.0)  # of noisy numbers the least says little
            limit = max(limits.kl_growth * usual, limits.kl_growth_from)
            yield Check(
                "kl_growth", kl > limit, kl, limit,
                f"KL to the reference has grown to {kl:.4g} nats a response from {usual:.3g}, the median of {len(self.kls)} steps before (limit {limit:.4g})",
                pull, patience,
            )  # fmt: skip
        self.kls = [*self.kls, kl][-limits.kl_growth_window :]

    def _evaluation_checks(self, step: int, seen: Mapping[str, float]) -> Iterator[Check]:
        """The score that is trained on goes up while the held-out judge goes down: the reward is being fooled."""
        limits = self.settings
        if limits.judge is None or not {"ppo/judge", "ppo/judge_error", "ppo/score"} <= seen.keys():
            return
        score, judge, error = seen["ppo/score"], seen["ppo/judge"], seen["ppo/judge_error"]
        if self.best is not None:
            best = self.best
            limit = best["judge"] - limits.judge * math.hypot(error, best["error"])
            yield Check(
                "judge", judge < limit and score > best["score"], judge, limit,
                f"since step {best['step']:.0f} the score has risen from {best['score']:.4g} to {score:.4g}, but the held-out judge has fallen "
                f"from {best['judge']:.4g} to {judge:.4g} (limit {limit:.4g})",
                "The reward is being fooled: stop here or go back to RUN/best (eval.best_metric=ppo/judge), raise ppo.kl.coef, or mend the reward",
                1,
            )  # fmt: skip
        if self.best is None or judge > self.best["judge"]:
            self.best = {"step": step, "score": score, "judge": judge, "error": error}

    # ----------------------------------------------------------------------------------------------------------------

    def _sound(self, step: int, checks: Iterator[Check]) -> list[Alarm]:
        """Count on; the alarms that begin to sound."""
        begun = []
        for check in checks:
            memory = self.memories.setdefault(check.name, Memory())
            if not check.holds:
                memory.streak = 0
                if memory.sounding and step - memory.last >= self.settings.quiet:
                    memory.sounding = False
                continue
            if memory.streak == 0:
                memory.since = step
            memory.streak += 1
            memory.last = step
            if not memory.sounding and memory.streak >= check.patience:
                memory.sounding = True
                since = f", since step {memory.since}" if memory.since < step else ""
                text = f"{check.name}{since}: {check.said}. {check.cure}."
                begun.append(Alarm(check.name, step, memory.since, check.value, check.limit, text))
        return begun


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
