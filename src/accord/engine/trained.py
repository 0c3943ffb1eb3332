"""A model that is read through packs and improved step by step: optimizer, schedule, clipping, EMA, exact state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accord.data.packing import Pack
from accord.engine.shards import read_into
from accord.errors import NonFiniteError
from accord.models.distribution import Distribution
from accord.models.forward import PackedModel

if TYPE_CHECKING:
    from accord.config import Train
    from accord.models.load import LoadedModel

MAX_SKIPPED_IN_A_ROW = 5


@dataclass(frozen=True)
class StepInfo:
    """What an optimizer step did. `skipped`: nothing changed, weights and schedule alike."""

    grad_norm: float
    lr: float
    skipped: bool


def scheduled_lr(step: int, total_steps: int, peak: float, schedule: str, warmup_ratio: float, min_lr_ratio: float) -> float:
    """Learning rate of `step` (1-based): linear warm-up to `peak`, then constant, or linear or cosine down to min_lr_ratio · peak.

    The last step has the minimum; with warm-up of W = round(warmup_ratio · total) steps, step W has the peak.
    """
    warmup = round(warmup_ratio * total_steps)
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    if schedule == "constant":
        return peak
    falling = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * (min_lr_ratio + (1 - min_lr_ratio) * max(0.0, falling))


class TrainedModel(PackedModel):
    """A loaded model with its optimizer: forward through packs, `backward` as often as there are micro-batches, `step` once.

    Losses are sums whose weights add up to 1 over the whole step, so accumulation needs no factor. Trained parameters are
    float32 (master weights); `train.precision` bf16 computes in bfloat16 under autocast.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        train: Train,
        *,
        total_steps: int,
        lr: float | None = None,
        ema: bool = True,
        parameters: dict[str, torch.nn.Parameter]
        | None = None,  # what is trained; None: all of the module that requires gradient
    ) -> None:
        super().__init__(loaded.module, precision=train.precision)
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        self.train_settings = train
        self.total_steps = total_steps
        peak = lr if lr is not None else train.lr
        if peak is None:
            raise ValueError("no learning rate: pass lr or a configuration made by config.for_stage()")
        self.peak_lr = float(peak)
        if parameters is None:
            parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.parameters = parameters
        if not self.parameters:
            raise ValueError("no parameter of the model is trained")
        self.module.train()
        decayed = [p for p in self.parameters.values() if p.dim() >= 2]
        others = [p for p in self.parameters.values() if p.dim() < 2]  # biases and norms are not pulled to zero
        groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.peak_lr,
            betas=(train.betas[0], train.betas[1]),
            eps=train.eps,
            fused=True,
        )
        decay = train.ema_decay if ema else None
        self.ema_decay = decay
        self.ema = {name: p.detach().float().clone() for name, p in self.parameters.items()} if decay is not None else None
        self.holds_ema = False  # inside with_ema()
        self.schedule_step = 0  # optimizer steps done: skipped ones do not count
        self.lr_factor = 1.0  # what `lower_lr` has left of the scheduled rate
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._nonfinite = False
        self._packs: list[Pack] = []  # of the step under way, for the file that a non-finite step leaves

    # -- forward -----------------------------------------------------------------------------------------------------

    def distribution(self, pack: Pack, temperature: float = 1.0, embedding_noise: float | None = None) -> Distribution:
        self._remember(pack)
        return super().distribution(pack, temperature, embedding_noise)

    def values(self, pack: Pack) -> Tensor:
        self._remember(pack)
        return super().values(pack)

    def scores(self, pack: Pack) -> Tensor:
        self._remember(pack)
        return super().scores(pack)

    def position_scores(self, pack: Pack) -> list[Tensor]:
        self._remember(pack)
        return super().position_scores(pack)

    def _remember(self, pack: Pack) -> None:
        if torch.is_grad_enabled():
            self._packs.append(pack)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradient, no dropout."""
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train(was_training)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """The model that LoRA training started from: the adapter as it was at the start, else the base. No gradient."""
        from accord.models.lora import as_reference

        with self.evaluating(), as_reference(self.module):
            yield

    # -- one optimizer step ------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`. A loss that is not finite adds none and spoils the step (see `step`)."""
        if not torch.isfinite(loss.detach()):
            self._nonfinite = True
            return
        if not self._nonfinite:
            loss.backward()

    def step(self) -> StepInfo:
        """Clip, update, advance the schedule and the EMA; gradients are cleared.

        Without any gradient (no valid item) nothing happens. A loss or gradient that is not finite raises NonFiniteError, or
        with `on_nonfinite: skip` leaves weights and schedule alone and is counted; five in a row raise all the same.
        """
        lr = self.lr(self.schedule_step + 1)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not gradients and not self._nonfinite:
            self._packs.clear()
            return StepInfo(0.0, lr, True)
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else math.nan
        if self._nonfinite or not math.isfinite(norm):
            return self._nonfinite_step(lr)
        if self.train_settings.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(
                list(self.parameters.values()), self.train_settings.max_grad_norm, torch.tensor(norm)
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.schedule_step += 1
        self._skipped_in_a_row = 0
        self._clear()
        if self.ema is not None and self.ema_decay is not None:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.ema.values()), [p.float() for p in self.parameters.values()], 1 - self.ema_decay)
        return StepInfo(norm, lr, False)

    def lr(self, step: int) -> float:
        t = self.train_settings
        scheduled = scheduled_lr(step, self.total_steps, self.peak_lr, t.lr_schedule, t.warmup_ratio, t.min_lr_ratio)
        return scheduled * self.lr_factor

    def lower_lr(self, factor: float, floor: float) -> None:
        """Multiply the learning rate of all steps to come by `factor`, but not below `floor` times the schedule's."""
        self.lr_factor = min(self.lr_factor, max(self.lr_factor * factor, floor))

    def discard_gradients(self) -> None:
        """Forget what `backward` has added since the last step."""
        self._clear()

    def _clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self._nonfinite = False
        self._packs.clear()

    def _nonfinite_step(self, lr: float) -> StepInfo:
        batch = [{"input_ids": pack.input_ids.tolist(), "segments": [list(s) for s in pack.segments]} for pack in self._packs]
        self._clear()
        self.skipped += 1
        self._skipped_in_a_row += 1
        if self.train_settings.on_nonfinite == "stop" or self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            many = "" if self.train_settings.on_nonfinite == "stop" else f" {MAX_SKIPPED_IN_A_ROW} times in a row"
            error = NonFiniteError(f"the loss or its gradient is not finite{many}; no weight was changed by it")
            error.batch = batch  # type: ignore[attr-defined]
            raise error
        return StepInfo(math.nan, lr, True)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything that resuming needs, by file: trained parameters, Adam's moments, EMA. Tied weights once."""
        files: dict[str, dict[str, Tensor]] = {"model": {name: p.detach() for name, p in self.parameters.items()}}
        moments: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                moments[f"{name}/{key}"] = value
        files["optimizer"] = moments
        if self.ema is not None:
            files["ema"] = self.ema
        return files

    def state(self) -> dict[str, Any]:
        return {
            "schedule_step": self.schedule_step,
            "lr_factor": self.lr_factor,
            "skipped": self.skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> None:
        """Continue from what `state_tensors` and `state` gave, to the bit; of a checkpoint each rank reads what it holds."""
        read_into(self.parameters, tensors["model"])
        self.optimizer.state.clear()
        moments: dict[str, Tensor] = {}
        for key in tensors["optimizer"]:  # AdamW makes them at a parameter's first gradient: what isn't saved wasn't there
            name, moment = key.rsplit("/", 1)
            p = self.parameters[name]
            moments[key] = torch.zeros((), device=p.device) if moment == "step" else torch.zeros_like(p)
            self.optimizer.state[p][moment] = moments[key]
        read_into(moments, tensors["optimizer"])
        if self.ema is not None:
            read_into(self.ema, tensors["ema"])
        self.schedule_step, self.skipped = state["schedule_step"], state["skipped"]
        self.lr_factor = state.get("lr_factor", 1.0)  # older checkpoints know no other rate than the schedule's
        self._skipped_in_a_row = state["skipped_in_a_row"]

    @contextmanager
    def with_ema(self) -> Iterator[None]:
        """Inside, the parameters hold the EMA weights; afterwards exactly what they held before."""
        if self.ema is None:
            raise ValueError("no EMA is kept: set train.ema_decay")
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(self.ema[name])
        self.holds_ema = True
        try:
            yield
        finally:
            self.holds_ema = False
            with torch.no_grad():
                for name, p in self.parameters.items():
                    p.copy_(kept[name])


def prefixed(prefix: str, files: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """State files under another model's name: {"model": …} → {"critic-model": …}."""
    return {f"{prefix}-{name}": tensors for name, tensors in files.items()}


def unprefixed(prefix: str, files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Mapping[str, Tensor]]:
    return {name.removeprefix(f"{prefix}-"): tensors for name, tensors in files.items() if name.startswith(f"{prefix}-")}


def count_targets(packs: Sequence[Pack]) -> int:
    return sum(pack.num_targets for pack in packs)
