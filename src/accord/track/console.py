"""What a person sees of a run: a bar with ETA and the numbers that matter in a terminal, plain lines anywhere else."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class Console:
    """Shows the steps of one stage.

    `headline` are the metric names that matter for the stage (about four). In a terminal they stand beside the bar; elsewhere
    (a file, a pipe, CI) every `every`-th step is one line.
    """

    def __init__(
        self,
        stage: str,
        total_steps: int,
        headline: Sequence[str],
        start_step: int,
        every: int = 1,
        console: RichConsole | None = None,
    ) -> None:
        self.stage, self.total, self.headline, self.every = stage, max(total_steps, 1), tuple(headline), max(every, 1)
        # Plain lines belong to a log that somebody reads or searches: they are not folded to 80 columns.
        self.out = console or RichConsole(highlight=False)
        self._clock = Eta(start_step)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if self.out.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("[cyan]{task.fields[numbers]}"),
                TextColumn("[dim]{task.fields[eta]}"),
                console=self.out,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task(stage, total=self.total, completed=start_step, numbers="", eta="")
            self._progress.start()

    def train(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A training step is done."""
        self._clock.tick(step)
        if step % self.every and step != self.total:
            return
        numbers, eta = self._numbers(metrics), self._clock.left(self.total)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, numbers=numbers, eta=eta)
        else:
            self.note(f"{self.stage} {step}/{self.total}  {numbers}  {eta}".rstrip())

    def eval(self, step: int, metrics: Mapping[str, Any]) -> None:
        """An evaluation is done: one line that stays, above the bar."""
        numbers = self._numbers(metrics) or "  ".join(f"{name} {number(value)}" for name, value in list(metrics.items())[:4])
        self.note(f"{self.stage} eval at step {step}  {numbers}")

    def note(self, text: str) -> None:
        """Print a line, above the bar if there is one. Text is text: brackets in it are no markup."""
        self.out.print(text, markup=False, soft_wrap=True)

    def pause(self) -> None:
        """Time until the next step is no training time (evaluation, a checkpoint): leave it out of the ETA."""
        self._clock.restart()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _numbers(self, metrics: Mapping[str, Any]) -> str:
        parts = [f"{label(name)} {number(metrics[name])}" for name in self.headline if metrics.get(name) is not None]
        return "  ".join([*parts, split] if (split := time_split(metrics)) else parts)


class Eta:
    """Time left, from the pace of the last steps."""

    def __init__(self, start_step: int, window: int = 32) -> None:
        self.step, self.last = start_step, time.monotonic()
        self.paces: deque[float] = deque(maxlen=window)

    def tick(self, step: int) -> None:
        now = time.monotonic()
        if step > self.step:
            self.paces.append((now - self.last) / (step - self.step))
        self.step, self.last = step, now

    def restart(self) -> None:
        self.last = time.monotonic()

    def left(self, total: int) -> str:
        if not self.paces or self.step >= total:
            return ""
        return f"{duration((total - self.step) * sum(self.paces) / len(self.paces))} left"


def time_split(metrics: Mapping[str, Any]) -> str:
    """Where an iteration's time went: `12.3 s: generate 41 %, score 5 %, …, 2.6 samples/s (2.5 on average)`. "" for stages of one part."""
    step = metrics.get("time/step")
    parts = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    if not step or "generate" not in parts:
        return ""
    shares = [f"{name} {value / step:.0%}" for name, value in parts.items() if name != "step" and value >= 0.005 * step]
    pace = [metrics.get("throughput/samples_per_s"), metrics.get("throughput/samples_per_s_average")]
    tail = [f"{number(pace[0])} samples/s ({number(pace[1])} on average)"] if None not in pace else []
    return f"{number(step)} s: " + ", ".join(shares + tail)


def label(name: str) -> str:
    """What a metric is called beside the bar: without its group (`dpo/reward_margin` → `reward margin`)."""
    return name.split("/", 1)[-1].replace("_", " ")


def number(value: Any) -> str:
    """A metric for people: four significant digits, thousands grouped, tiny and huge ones with an exponent."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{int(value):,}"  # of any size: as a float it may be too large
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e7:
        return f"{value:.4g}"
    return f"{value:.2e}"


def duration(seconds: float) -> str:
    """0:42, 12:05, 3:20:07 or 2d 04:10."""
    seconds = max(round(seconds), 0)
    days, rest = divmod(seconds, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
