"""A step of a PPO run computed again, from a checkpoint before it and the journal (`accord replay`). The run's folder is only read."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accord.config.root import build
from accord.engine.checkpoint import Checkpoint, checkpoint_steps, read_checkpoint
from accord.errors import AccordError, ConfigError
from accord.track.environment import changed
from accord.track.files import number_of, plain, read_lines, step_of
from accord.track.run import read_config
from accord.track.tracker import RESERVED
from accord.trainers.loop import seed_everything
from accord.trainers.ppo import PPOTrainer
from accord.trainers.ppo_experience import Experience
from accord.trainers.ppo_journal import JOURNAL, Identity, Journal, Kind, misfits

ABSOLUTE = 1e-7  # differences below it are rounding, whatever the tolerance
MEASURED = ("time/", "throughput/", "memory/", "train/tokens_per_s")  # seconds and bytes, no result of the computation


@dataclass(frozen=True)
class Compared:
    """A metric of the step; None where one side has none, or none that is finite."""

    name: str
    logged: float | None
    replayed: float | None
    equal: bool


@dataclass
class Replay:
    """What came out."""

    step: int
    start: int  # the step of the checkpoint it began from; 0: the start of the run
    metrics: list[Compared] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)  # of every response: prompt, response, score, advantage, kl …
    notes: list[str] = field(default_factory=list)  # why it can't be exact

    @property
    def differing(self) -> list[Compared]:
        return [metric for metric in self.metrics if not metric.equal]


class Recorded(Journal):
    """A journal from which steps are computed again: read only, and without a record there is nothing to go on from."""

    def __init__(self, path: Path, notes: list[str]) -> None:
        super().__init__(path)
        self.notes = notes

    def recall(self, kind: Kind, step: int, identity: Identity) -> dict[str, Any]:
        record = self.read(kind, step)
        if record is None:
            raise ConfigError(f"{self.path}: it has no whole record of step {step}.")
        others = misfits(record, identity)
        if "other weights of the policy" in others:
            self.notes.append(f"step {step}: the weights are not to the bit those that sampled it.")
            others.remove("other weights of the policy")
        if others:
            raise ConfigError(
                f"{self.path}: the record of step {step} is of {' and '.join(others)} than the run's config.yaml and data give now. "
                "Restore the data (data.train) that the run was started with."
            )
        return record


def replay_step(folder: Path, step: int, tolerance: float, say: Callable[[str], None] = lambda text: None) -> Replay:
    """Compute `step` of the run again, with those between a checkpoint and it, and compare it with metrics.jsonl.

    Two numbers are equal when they differ by at most `tolerance` of the larger one, or by 1e-7. Raises ConfigError for what is no PPO
    run, a step that it has not logged, or one that no checkpoint and the journal lead to.
    """
    folder, saved, about = ppo_run(folder)
    rows = read_lines(folder / "metrics.jsonl")
    logged = {row["step"]: row for row in rows if row.get("split") == "train" and step_of(row) is not None}
    if step not in logged:
        has = f"it has steps {min(logged)} to {max(logged)}" if logged else "it has none"
        raise ConfigError(f"--step {step}: {folder / 'metrics.jsonl'} has no such step; {has}.")
    notes: list[str] = []
    journal = Recorded(folder / JOURNAL, notes)
    checkpoint = _checkpoint_before(folder, step, journal, notes)
    start = 0 if checkpoint is None else checkpoint.step
    before = about.get("versions") or {} if checkpoint is None else checkpoint.state["conditions"]
    if differing := changed(before):
        notes.append(f"small differences are to be expected, since this has changed: {', '.join(differing)}.")
    from_where = "the start of the run" if checkpoint is None else f"the checkpoint of step {start}"
    say(f"computing step {start + 1 if start + 1 == step else f'{start + 1} to {step}'} again from {from_where}")
    lowered = lowered_rates(folder / "alarms.jsonl")
    result = Replay(step, start, notes=notes)
    with PPOTrainer(build(in_one_process(saved), name=folder.name, stage="ppo")) as trainer:
        if checkpoint is not None:
            trainer.load_state({name: checkpoint.tensors(name) for name in checkpoint.names}, checkpoint.state["trainer"])
        trainer.journal = journal
        metrics: dict[str, float] = {}
        for number in range(start + 1, step + 1):
            seed_everything(trainer.config.run.seed, trainer.stage, number)
            trainer.experiences = number - 1
            experience = trainer.make_experience(trainer.prompts(number), once=True)
            if number == step:
                result.samples = _samples(experience)
            metrics = trainer.improve(experience)
            if number in lowered:  # an alarm lowered the rates for the steps after it
                for model in (trainer.policy, trainer.critic):
                    if model is not None:
                        model.lr_factor = lowered[number]
    result.metrics = compare(logged[step], metrics, tolerance)
    return result


def in_one_process(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without what divides a run over several processes, none of which changes a result. A replay has one process."""
    alone = {name: dict(section) if isinstance(section, Mapping) else section for name, section in saved.items()}
    tensor = ((alone.pop("launch", None) or {}).get("mesh") or {}).get("tensor", 1)
    for section, keys in (
        ("train", ("shard", "offload")),
        ("engine", ("inference_tp_size", "pin_parameters", "tp_gather_partition_size")),
    ):
        for key in keys:
            (alone.get(section) or {}).pop(key, None)
    model = alone.get("model") or {}
    if tensor > 1 and model.get("lora") is not None:  # such a run had no base in common
        model["lora"] = {**model["lora"], "share_base": False}
    return alone


def ppo_run(folder: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The folder of the PPO run that `folder` is, or has in it as a pipeline's; its configuration and the head of that file."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder}: it is no run's folder (there is no config.yaml in it).")
    saved, about = read_config(folder)
    if about.get("stage") == "pipeline" and (folder / "ppo" / "config.yaml").is_file():
        return ppo_run(folder / "ppo")
    if about.get("stage") != "ppo":
        raise ConfigError(f"{folder}: it holds a run of `{about.get('stage')}`; only steps of PPO are recorded to be replayed.")
    if (saved.get("data") or {}).get("train") is None:
        raise ConfigError(
            f"{folder}: its prompts were handed over in Python. Only a run whose data.train names them can be replayed."
        )
    return folder, saved, about


def compare(logged: Mapping[str, Any], replayed: Mapping[str, Any], tolerance: float) -> list[Compared]:
    """Every metric of either side that is no measurement of time or memory, in the order of the log."""
    names = [name for name in dict.fromkeys((*logged, *replayed)) if name not in RESERVED and not name.startswith(MEASURED)]
    compared = []
    for name in names:
        a, b = _finite(logged.get(name)), _finite(replayed.get(name))
        near = a is not None and b is not None and math.isclose(a, b, rel_tol=tolerance, abs_tol=ABSOLUTE)
        compared.append(Compared(name, a, b, near or (a is None and b is None and (name in logged) == (name in replayed))))
    return compared


def lowered_rates(path: Path) -> dict[int, float]:
    """Step → what an alarm then made of the learning rates. Raises ConfigError for a row that no alarm has written."""
    factors: dict[int, float] = {}
    for row in read_lines(path):
        if "lr_factor" not in row:
            continue
        step, factor = step_of(row), number_of(row, "lr_factor")
        if step is None or factor is None or not 0 < factor <= 1:
            raise ConfigError(
                f"{path}: a row has step {row.get('step')!r} and lr_factor {row['lr_factor']!r}, expected a whole number and one above 0 "
                "and up to 1: it was changed by hand. Restore it."
            )
        factors[step] = factor
    return factors


def _finite(value: Any) -> float | None:
    """The number that a log can hold; None for anything else (a line changed by hand may have a text, or more digits than a float)."""
    value = plain(value)
    return float(value) if type(value) in (int, float) and abs(value) <= sys.float_info.max else None


def _checkpoint_before(folder: Path, step: int, journal: Journal, notes: list[str]) -> Checkpoint | None:
    """The newest whole checkpoint before the step, None for the start of the run. Raises ConfigError where the journal does not lead on."""
    found, recorded = None, journal.steps()
    present = checkpoint_steps(folder / "checkpoints")
    for earlier in reversed([number for number in present if number < step]):
        try:
            found = read_checkpoint(folder / "checkpoints", earlier)
            break
        except AccordError as error:
            notes.append(f"{error}; the one before it is used.")
    start = 0 if found is None else found.step
    missing = sorted(set(range(start + 1, step + 1)) - set(recorded))
    if missing:
        unusable = "".join(f"\n{note}" for note in notes)
        records = f"steps {recorded[0]} to {recorded[-1]}" if recorded else "no step"
        raise ConfigError(
            f"--step {step}: it takes a checkpoint before it and the record of every step from there on. {folder / 'checkpoints'} has "
            f"{_listed(present)}, {journal.path} has {records}; step {missing[0]} is missing. A run keeps more with checkpoint.keep_last=10 "
            "and checkpoint.every_steps (checkpoints), and ppo.journal=all (records); all may be set for the rest of an unfinished run."
            f"{unusable}"
        )
    return found


def _listed(steps: list[int]) -> str:
    return f"those of steps {', '.join(map(str, steps))}" if steps else "none"


def _samples(experience: Experience) -> list[dict[str, Any]]:
    """Every response of the experience: its texts, score, KL to the reference, and the advantage that is largest in size."""
    rollouts = experience.rollouts
    kl = rollouts.sum_by_response(experience.old_logprobs - experience.ref_logprobs).tolist()
    rows = []
    for i, sample in enumerate(rollouts.samples):
        own = experience.advantages[rollouts.offsets[i] : rollouts.offsets[i + 1]].tolist()
        rows.append(
            {
                "origin": sample.prompt.origin,
                "prompt": sample.question,
                "response": sample.response,
                "score": experience.board.sums[i],
                "advantage": max(own, key=abs),
                "kl": kl[i],
                "tokens": len(own),
                "truncated": sample.truncated,
            }
        )
    return rows
