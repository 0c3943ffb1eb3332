"""The one training loop: steps, evaluation, checkpoints, best model, signals. Trainers say what a step is."""

from __future__ import annotations

import json
import math
import random
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from accord.engine.checkpoint import Checkpoints
from accord.engine.ranks import Ranks, join, together
from accord.errors import ConfigError, Interrupted, NonFiniteError
from accord.track.environment import changed, conditions
from accord.track.files import plain, write_atomically
from accord.track.run import FollowedRun, RunFolder, open_run
from accord.track.tracker import NoTracker, Tracker
from accord.trainers.watch import Watch

if TYPE_CHECKING:
    from accord.config import Config

# Where a larger number is better; of everything else (losses, perplexity, kl) a smaller one is.
LARGER_IS_BETTER = ("accuracy", "score", "margin", "win_rate", "judge")


class Trainer(Protocol):
    """What the loop needs of a stage."""

    stage: str
    config: Config
    headline: tuple[str, ...]  # the numbers that the progress bar shows, where there are such
    best_metric: str | None  # by which RUN/best is chosen unless eval.best_metric names another
    total_steps: int
    samples: list[dict[str, Any]]  # what the last step or evaluation has to show

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step, 1-based (PPO: one experience and its updates): metric names → numbers."""
        ...

    def evaluate(self, step: int) -> dict[str, float]:
        """The held-out numbers; {} when there is nothing held out."""
        ...

    def epoch(self, step: int) -> float:
        """Passes over the data done after `step` steps."""
        ...

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Everything that resuming needs: tensors by file, and JSON."""
        ...

    def load_state(self, tensors: dict[str, Mapping[str, Tensor]], state: dict[str, Any]) -> None: ...

    def save(self, folder: Path) -> None:
        """A loadable model as it is now, LoRA merged."""
        ...

    def export(self, run: Path) -> None:
        """What a finished run leaves: run/model, and run/adapter and run/ema where there are any."""
        ...


def seed_everything(seed: int, stage: str, step: int) -> None:
    """Make torch, numpy and random pure functions of (seed, stage, step), so that a resume needs no generator's state.

    In a group also of the process: dropout is not the same noise everywhere, but in those that divide the products of one pack it is.
    """
    rank = join().rank // join().tensor
    word = np.random.SeedSequence([seed, *stage.encode(), step, *([rank] if rank else [])]).generate_state(2)
    torch.manual_seed(int(word[0]))
    np.random.seed(int(word[1]))
    random.seed(int(word[0]) << 32 | int(word[1]))


def run_loop(trainer: Trainer, run: RunFolder | None = None) -> dict[str, Any]:
    """Train from where `run` (by default that of `run.dir`) stands to the end, and return the summary that was written.

    A run that was cut off goes on from its last whole checkpoint, bit for bit as if it had not been (ARCHITECTURE §6).
    Raises Interrupted after a checkpoint on SIGINT or SIGTERM, StoppedByAlarm after one with `ppo.on_alarm: stop`, NonFiniteError as
    ALGORITHMS §0.7 says.
    """
    with together() as ranks, run or open_together(trainer.config, trainer.stage, Path(trainer.config.run.dir)) as run:
        if run.state == "finished":
            return ranks.ask_main(run.summary) or {}
        return _run(trainer, run, ranks)


def open_together(config: Config, stage: str, folder: Path) -> RunFolder:
    """`open_run` of the main process, and what the others see of it."""
    ranks = join()
    opened: list[RunFolder] = []

    def state() -> Any:
        opened.append(open_run(config, stage, folder))
        return opened[0].state

    found = ranks.ask_main(state)
    return opened[0] if opened else FollowedRun(folder, stage, config, found)


def _run(trainer: Trainer, run: RunFolder, ranks: Ranks) -> dict[str, Any]:
    config = trainer.config
    ranks.ask_main(run.begin)
    saving = config.checkpoint
    with (
        Checkpoints(run.checkpoints, run.identity, keep_last=saving.keep_last, asynchronous=saving.asynchronous) as checkpoints,
        _Signals() as signals,
    ):
        summary = _train(trainer, run, checkpoints, signals, ranks)
        checkpoints.wait()
        trainer.export(run.folder)
        ranks.ask_main(lambda: run.finish(summary))
        if ranks.any(bool(signals.received)):  # in the last step or since: a pipeline must not begin its next stage
            raise Interrupted(
                f"{signals.name or 'a signal'} came as {trainer.stage} ended; it is finished. Start the same command again to go on."
            )
    return summary


def _train(trainer: Trainer, run: RunFolder, checkpoints: Checkpoints, signals: _Signals, ranks: Ranks) -> dict[str, Any]:
    """All steps from the last checkpoint on; the summary."""
    config = trainer.config
    start, notes, watch = 0, _Notes(), Watch(trainer)
    told: list[str] = []
    if run.state == "resumable":
        if (checkpoint := checkpoints.latest()) is None:
            told.append("this run has no checkpoint yet: it begins again at step 1")
        else:
            start, state = checkpoint.step, checkpoint.state
            trainer.load_state({name: checkpoint.tensors(name) for name in checkpoint.names}, state["trainer"])
            notes = _Notes(**state["notes"])
            watch.load_state(state["alarms"])
            told.append(f"going on from step {start} of {trainer.total_steps}")
            if differing := changed(state["conditions"], ranks.tensor):
                told.append(f"not exact to the bit from here on, since this has changed: {', '.join(differing)}")
    with _tracker(trainer, run, start) if ranks.is_main else NoTracker() as tracker:
        for line in told:
            tracker.note(line)
        triggers = _Triggers(trainer, ranks)
        if start == 0 and config.eval.at_start:
            _evaluate(trainer, run, tracker, notes, watch, 0)
        for step in range(start + 1, trainer.total_steps + 1):
            seed_everything(config.run.seed, trainer.stage, step)
            began = time.perf_counter()
            try:
                metrics = trainer.step(step)
            except NonFiniteError as error:
                raise _explain_nonfinite(error, run, trainer.stage, step, ranks.is_main) from error
            seconds = time.perf_counter() - began
            metrics.setdefault("time/step", seconds)
            if "train/tokens" in metrics:
                metrics.setdefault("train/tokens_per_s", metrics["train/tokens"] / seconds)
            metrics["memory/peak_gib"] = peak_memory_gib()
            tracker.log(metrics, split="train", step=step, epoch=trainer.epoch(step))
            watch.look(metrics, "train", step, tracker)
            if trainer.samples and (step == 1 or step % config.track.samples_every == 0 or step == trainer.total_steps):
                tracker.log_samples(step, trainer.samples)
            last = step == trainer.total_steps
            if triggers.evaluation(step) or last:
                _evaluate(trainer, run, tracker, notes, watch, step)
            if triggers.export(step):
                trainer.save(run.exports / f"step-{step}")
            due, interrupted = triggers.checkpoint(step), ranks.any(bool(signals.received))
            if ranks.any(checkpoints.failed):
                checkpoints.wait()  # raises what went wrong in the background
            if last:  # nothing is left to be saved or stopped
                break
            if due or interrupted or watch.stopping:
                _save(trainer, checkpoints, tracker, notes, watch, step)
            if interrupted or watch.stopping:
                checkpoints.wait()
            if watch.stopping:
                raise watch.stopped()
            if interrupted:
                raise Interrupted(
                    f"stopped by {signals.name or 'a signal'} after step {step} of {trainer.total_steps}. Start the same command again to go on."
                )
        return _summary(trainer, tracker, notes, watch)


def _tracker(trainer: Trainer, run: RunFolder, start: int) -> Tracker:
    return Tracker(run, trainer.config.track, trainer.stage, trainer.total_steps, trainer.headline, start)


class _Notes:
    """What the loop itself must not forget over a resume."""

    def __init__(
        self,
        best: float | None = None,
        best_step: int | None = None,
        final: dict[str, float] | None = None,
        first: dict[str, float] | None = None,
    ) -> None:
        self.best, self.best_step = best, best_step
        self.first = first or {}  # evaluation before training
        self.final = final or {}  # the newest evaluation

    def as_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "first": self.first, "final": self.final}


def _evaluate(trainer: Trainer, run: RunFolder, tracker: Tracker | NoTracker, notes: _Notes, watch: Watch, step: int) -> None:
    seed_everything(trainer.config.run.seed, trainer.stage + "/eval", step)
    metrics = trainer.evaluate(step)
    if not metrics:
        return
    tracker.log(metrics, split="eval", step=step, epoch=trainer.epoch(step))
    watch.look(metrics, "eval", step, tracker)
    if trainer.samples:
        tracker.log_samples(step, trainer.samples)
        trainer.samples = []
    notes.final = plain(metrics)
    if step == 0:
        notes.first = plain(metrics)
    name = trainer.config.eval.best_metric or trainer.best_metric
    if name is None or step == 0:
        return
    if name not in metrics:
        raise ConfigError(f"eval.best_metric: {name} is not measured at evaluation. There is: {', '.join(sorted(metrics))}.")
    value = metrics[name]
    better = notes.best is None or (value > notes.best if any(w in name for w in LARGER_IS_BETTER) else value < notes.best)
    if math.isfinite(value) and better:
        notes.best, notes.best_step = float(value), step
        trainer.save(run.best)


def _save(
    trainer: Trainer, checkpoints: Checkpoints, tracker: Tracker | NoTracker, notes: _Notes, watch: Watch, step: int
) -> None:
    tracker.sync()  # what is logged up to here must not be younger on the disk than the checkpoint
    tensors, state = trainer.state()
    loop = {"notes": notes.as_dict(), "alarms": watch.state(), "conditions": conditions(join().tensor)}
    checkpoints.save(step, tensors, {"trainer": state, **loop})
    tracker.pause()


def _summary(trainer: Trainer, tracker: Tracker | NoTracker, notes: _Notes, watch: Watch) -> dict[str, Any]:
    name = trainer.config.eval.best_metric or trainer.best_metric
    summary: dict[str, Any] = {
        "stage": trainer.stage,
        "steps": trainer.total_steps,
        "wall_s": round(tracker.wall_s, 1),
        "final": notes.final,
        "before": notes.first,
    }
    if notes.best is not None:
        summary["best"] = {"metric": name, "value": notes.best, "step": notes.best_step}
    if watch.told:
        summary["alarms"] = watch.told
    summary["peak_memory_gib"] = round(peak_memory_gib(), 3)
    return summary


def _explain_nonfinite(error: NonFiniteError, run: RunFolder, stage: str, step: int, is_main: bool) -> NonFiniteError:
    if not hasattr(error, "batch"):  # met while sampling: no row and no learning rate is to blame
        return NonFiniteError(f"{stage} step {step}: {error}")
    path = run.folder / f"nonfinite-step-{step}.json"
    if is_main:
        write_atomically(path, json.dumps({"stage": stage, "step": step, "batch": error.batch}).encode())
    return NonFiniteError(
        f"{stage} step {step}: {error}. The batch is in {path}. Lower train.lr, look at the rows of this batch, "
        "or set train.on_nonfinite=skip to leave such steps out."
    )


class _Triggers:
    """When to evaluate, export and save: by steps, epochs or seconds, whichever are set. The clock is the main process's."""

    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        self.trainer, self.ranks = trainer, ranks
        self._since = {"eval": time.monotonic(), "checkpoint": time.monotonic()}

    def _epochs(self, step: int, every: float | None) -> bool:
        """True on the step that completes another `every` epochs."""
        if not every:
            return False
        return math.floor(self.trainer.epoch(step) / every + 1e-9) > math.floor(self.trainer.epoch(step - 1) / every + 1e-9)

    def _seconds(self, name: str, every: float | None) -> bool:
        if not every:
            return False
        if not self.ranks.any(self.ranks.is_main and time.monotonic() - self._since[name] >= every):
            return False
        self._since[name] = time.monotonic()
        return True

    def evaluation(self, step: int) -> bool:
        e = self.trainer.config.eval
        return (
            bool(e.every_steps and step % e.every_steps == 0)
            or self._epochs(step, e.every_epochs)
            or self._seconds("eval", e.every_seconds)
        )

    def export(self, step: int) -> bool:
        e = self.trainer.config.export
        return bool(e.every_steps and step % e.every_steps == 0) or self._epochs(step, e.every_epochs)

    def checkpoint(self, step: int) -> bool:
        c = self.trainer.config.checkpoint
        return (
            bool(c.every_steps and step % c.every_steps == 0)
            or self._epochs(step, c.every_epochs)
            or self._seconds("checkpoint", c.every_seconds)
        )


class _Signals:
    """The first SIGINT or SIGTERM lets the step finish; a second one ends the program at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def name(self) -> str:
        return signal.Signals(self.received).name if self.received else ""

    def _handle(self, number: int, frame: Any) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = number

    def __enter__(self) -> _Signals:
        with suppress(ValueError):  # only the main thread may set handlers; in another, signals stay with whoever owns it
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def peak_memory_gib() -> float:
    """The most memory this process has held: on the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
