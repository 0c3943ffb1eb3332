"""A run's alarms: looked for after every step and evaluation, told, recorded in RUN/alarms.jsonl, and acted upon (`ppo.on_alarm`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accord.errors import StoppedByAlarm
from accord.track.alarms import Alarm, Monitor

if TYPE_CHECKING:
    from accord.track.tracker import NoTracker, Tracker

LOWERED = 0.5  # by what lower_lr multiplies the learning rates


class Watch:
    """Does for the loop what `ppo.alarms` and `ppo.on_alarm` say. Only PPO has alarms; for other stages nothing happens.

    After an alarm with `on_alarm: stop`, `stopping` is true: the loop saves and raises `stopped()`. A run that was stopped does not
    go on before the user has changed `ppo.on_alarm` or `ppo.alarms` (`load_state` raises the same error again).
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.stage = trainer, trainer.stage
        self.settings = trainer.config.ppo
        self.monitor = Monitor(self.settings.alarms) if self.stage == "ppo" else None
        self.told: dict[str, list[int]] = {}  # alarm → the steps at which it began to sound
        self.stopped_by: dict[str, Any] | None = None  # {"step", "texts", "alarms": the limits it was judged by}

    @property
    def stopping(self) -> bool:
        return self.stopped_by is not None

    def look(self, metrics: Mapping[str, Any], split: str, step: int, tracker: Tracker | NoTracker) -> None:
        """Look at the metrics of a step ("train") or an evaluation ("eval"), and do what is to be done."""
        if self.monitor is None:
            return
        begun = self.monitor.train(step, metrics) if split == "train" else self.monitor.evaluate(step, metrics)
        if not begun:
            return
        done = self._act(step, [alarm for alarm in begun if not alarm.is_note])
        for alarm in begun:
            self.told.setdefault(alarm.name, []).append(step)
            row = {"alarm": alarm.name, "since": alarm.since, "value": alarm.value, "limit": alarm.limit, "text": alarm.text}
            if alarm.is_note:
                tracker.note(f"{self.stage} note at step {step}: {alarm.text}")
            else:
                row |= done
                lowered = f" Learning rates are now {done['lr_factor']:g} of the schedule's." if "lr_factor" in done else ""
                tracker.note(f"{self.stage} alarm at step {step}: {alarm.text}{lowered}")
            tracker.log_alarm(step, row)

    def _act(self, step: int, alarms: Sequence[Alarm]) -> dict[str, Any]:
        """What `ppo.on_alarm` asks for, once however many alarms begin together; what is recorded of it."""
        if not alarms:
            return {}
        action = self.settings.on_alarm
        if action == "stop":
            self.stopped_by = {
                "step": step,
                "texts": [*(self.stopped_by or {}).get("texts", []), *(alarm.text for alarm in alarms)],
                "alarms": self.settings.alarms.model_dump(mode="json"),
            }
        if action != "lower_lr":
            return {"action": action}
        models = [model for model in (self.trainer.policy, self.trainer.critic) if model is not None]
        for model in models:
            model.lower_lr(LOWERED, self.settings.alarms.lr_floor)
        return {"action": action, "lr_factor": models[0].lr_factor}

    def stopped(self) -> StoppedByAlarm:
        """What the run ends with."""
        assert self.stopped_by is not None
        return StoppedByAlarm(
            f"{self.stage} was stopped at step {self.stopped_by['step']} by an alarm (ppo.on_alarm=stop).\n  "
            + "\n  ".join(self.stopped_by["texts"])
            + "\nA checkpoint was written. To go on from it all the same, start the same command with ppo.on_alarm=warn or lower_lr, or with "
            "another limit in ppo.alarms. To try again with other settings, use another run.dir."
        )

    def state(self) -> dict[str, Any] | None:
        if self.monitor is None:
            return None
        return {"monitor": self.monitor.state(), "told": self.told, "stopped_by": self.stopped_by}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Go on as the checkpoint says. Raises StoppedByAlarm when an alarm ended that run and the user has changed nothing about it."""
        if self.monitor is None or state is None:
            return
        self.monitor.load_state(state["monitor"])
        self.told, self.stopped_by = state["told"], state["stopped_by"]
        if self.stopped_by is None:
            return
        if self.settings.on_alarm == "stop":
            if self.stopped_by["alarms"] == self.settings.alarms.model_dump(mode="json"):
                raise self.stopped()
            self.monitor.rearm()  # under the new limits it may sound, and stop the run, again
        self.stopped_by = None
