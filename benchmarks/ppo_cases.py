"""What the PPO benchmark asks for, how fast Accord means to be, and how two systems' steps are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, Literal

from workloads import ModelName

Precision = Literal["float32", "bf16"]
SystemName = Literal["accord", "trl"]
PARTS = ("generate", "score", "logprob", "train", "other")  # of a step, for every system
_WARM_UP = 1  # steps of every turn that are not counted: buffers, kernels, Adam's moments


class TooFewPromptsError(ValueError):
    """The data holds fewer prompts of the wanted length than a case needs."""


# -- prompts: from tokenised ones, in their order, each once -----------------------------------------------------------


def exactly(prompts: Iterable[Sequence[int]], count: int, length: int) -> list[list[int]]:
    """The last `length` tokens of the first `count` prompts that are long enough. Raises TooFewPromptsError."""
    return _first((list(prompt[-length:]) for prompt in prompts if len(prompt) >= length), count, f"{length} tokens or more")


def between(prompts: Iterable[Sequence[int]], count: int, shortest: int, longest: int) -> list[list[int]]:
    """The first `count` prompts of `shortest` to `longest` tokens, whole. Raises TooFewPromptsError."""
    fitting = (list(prompt) for prompt in prompts if shortest <= len(prompt) <= longest)
    return _first(fitting, count, f"{shortest} to {longest} tokens")


def faithful(
    prompts: Iterable[list[int]], decode: Callable[[list[int]], str], encode: Callable[[str], list[int]]
) -> Iterable[list[int]]:
    """Those that are the same tokens again after a way through text, for a system that takes only text."""
    return (prompt for prompt in prompts if encode(decode(prompt)) == prompt)


def _first(prompts: Iterable[list[int]], count: int, wanted: str) -> list[list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}  # equal prompts would be computed once by one system and twice by another
    for prompt in prompts:
        found.setdefault(tuple(prompt), prompt)
        if len(found) == count:
            return list(found.values())
    raise TooFewPromptsError(f"{count} different prompts of {wanted} are needed, and --data has {len(found)}.")


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One line of the table: a step is `prompts` × `samples` answers and `epochs` passes over them, in one mini-batch."""

    name: str
    prompts: int
    prompt_tokens: tuple[int, int]  # shortest and longest; the same number twice: cut to exactly that
    new_tokens: int
    full_length: bool  # every answer has `new_tokens` tokens; else it ends by itself, or there
    samples: int = 1
    epochs: int = 1
    model: ModelName = "smollm2"
    method: Literal["ppo", "grpo"] = "ppo"
    speed: Mapping[Precision, float] = field(default_factory=dict)  # TRL's seconds a step in float32 over Accord's, aimed at
    memory: float | None = None  # Accord's peak over TRL's in float32, aimed at

    @property
    def answers(self) -> int:
        return self.prompts * self.samples


CASES = (
    Case("fixed", 32, (64, 64), 32, True, speed={"float32": 1.2, "bf16": 2.0}, memory=0.6),
    Case("ragged", 32, (16, 256), 128, False, speed={"float32": 2.4, "bf16": 4.0}, memory=0.4),
    Case("samples", 8, (16, 256), 128, False, samples=4, speed={"float32": 4.0}),
    Case("tiny", 32, (64, 64), 32, True, epochs=4, model="tiny", speed={"float32": 2.0}),
    Case("grpo", 4, (64, 64), 32, True, samples=8, method="grpo", speed={"float32": 3.0}),
)


@dataclass(frozen=True)
class System:
    """Who takes a turn, and in which precision it trains."""

    name: SystemName
    precision: Precision

    def __str__(self) -> str:
        return f"{self.name} {self.precision}"


BASELINE = System("trl", "float32")  # what both of Accord's precisions are aimed against


def systems(precisions: Sequence[Precision], rivals: bool) -> list[System]:
    """Those that take turns, Accord's and TRL's alternating. TRL runs in float32 whatever is asked: it is the measure."""
    ours = [System("accord", precision) for precision in precisions]
    if not rivals:
        return ours
    theirs = [BASELINE] + [System("trl", precision) for precision in precisions if precision != BASELINE.precision]
    longest = max(len(ours), len(theirs))
    return [row[i] for i in range(longest) for row in (ours, theirs) if i < len(row)]


# -- what was measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step of one system. `parts` add up to `seconds`."""

    seconds: float
    parts: Mapping[str, float]
    tokens: int  # of all answers, their end tokens included


@dataclass(frozen=True)
class Turn:
    """What one child process did, its warm-up steps left out."""

    steps: tuple[Step, ...]
    peak_gib: float  # resident memory of the whole process, loading included

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> Turn:
        """From what a worker answers. Raises ValueError when it did nothing but warm up."""
        steps = tuple(Step(step["seconds"], step["parts"], step["tokens"]) for step in answer["steps"][_WARM_UP:])
        if not steps:
            raise ValueError("a turn needs a step besides the warm-up")
        return cls(steps, answer["peak_gib"])


@dataclass
class Result:
    """One case: the turns of each system."""

    case: Case
    turns: dict[System, list[Turn]] = field(default_factory=dict)

    def add(self, system: System, turn: Turn) -> None:
        """Raises RuntimeError when the answers do not have the length that was asked for."""
        wanted = self.case.answers * self.case.new_tokens
        for step in turn.steps:
            if step.tokens > wanted or (self.case.full_length and step.tokens < wanted):
                raise RuntimeError(f"{system} answered {self.case.name} with {step.tokens:,} tokens; {wanted:,} were asked for")
        self.turns.setdefault(system, []).append(turn)

    def steps(self, system: System) -> list[Step]:
        return [step for turn in self.turns[system] for step in turn.steps]

    def seconds(self, system: System) -> float:
        """The median step."""
        return median(step.seconds for step in self.steps(system))

    def parts(self, system: System) -> dict[str, float]:
        """Seconds of each part, medians as well: they need not add up to the median step."""
        return {part: median(step.parts[part] for step in self.steps(system)) for part in PARTS}

    def tokens(self, system: System) -> float:
        """Tokens of the answers of a step, on average."""
        return mean(step.tokens for step in self.steps(system))

    def tokens_per_second(self, system: System) -> float:
        """Tokens of the answers over the time of all steps: what a longer sample costs is counted with what it gives."""
        steps = self.steps(system)
        return sum(step.tokens for step in steps) / sum(step.seconds for step in steps)

    def peak_gib(self, system: System) -> float:
        return max(turn.peak_gib for turn in self.turns[system])

    def comparisons(self) -> list[Comparison]:
        """Accord in each precision against TRL in float32, and against TRL in the same one."""
        pairs = []
        for ours in [system for system in self.turns if system.name == "accord"]:
            for theirs in dict.fromkeys([BASELINE, System("trl", ours.precision)]):
                if theirs in self.turns:
                    pairs.append(self._compare(ours, theirs))
        return pairs

    def _compare(self, ours: System, theirs: System) -> Comparison:
        return Comparison(
            ours,
            theirs,
            by_step=self.seconds(theirs) / self.seconds(ours),
            by_token=self.tokens_per_second(ours) / self.tokens_per_second(theirs),
            memory=self.peak_gib(ours) / self.peak_gib(theirs),
            speed_target=self.case.speed.get(ours.precision) if theirs == BASELINE else None,
            memory_target=self.case.memory if theirs == BASELINE else None,
        )

    def record(self) -> dict[str, Any]:
        """Plain data, every step in it."""
        return {
            "case": self.case.name,
            "systems": {
                str(system): {
                    "seconds": self.seconds(system),
                    "parts": self.parts(system),
                    "tokens": self.tokens(system),
                    "tokens_per_second": self.tokens_per_second(system),
                    "peak_gib": self.peak_gib(system),
                    "turns": [{"peak_gib": turn.peak_gib, "steps": [vars(step) for step in turn.steps]} for turn in turns],
                }
                for system, turns in self.turns.items()
            },
            "comparisons": [vars(pair) | {"ours": str(pair.ours), "theirs": str(pair.theirs)} for pair in self.comparisons()],
        }


@dataclass(frozen=True)
class Comparison:
    """Two systems at one case."""

    ours: System
    theirs: System
    by_step: float  # their median seconds a step over ours: above 1 we are faster
    by_token: float  # our answer tokens a second over theirs, which allows for samples that came out longer or shorter
    memory: float  # our peak over theirs: below 1 we need less
    speed_target: float | None
    memory_target: float | None
