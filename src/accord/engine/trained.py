"""A model that is read through packs and improved step by step: optimizer, schedule, clipping, EMA, exact state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from accord.data.packing import Pack, pack_trees
from accord.data.trees import Tree
from accord.engine.memory import keep_freed_memory
from accord.engine.ranks import Ranks, join
from accord.engine.shards import read_into
from accord.errors import ConfigError, NonFiniteError
from accord.models import sharded
from accord.models.distribution import Distribution
from accord.models.forward import FrozenModel, PackedModel
from accord.models.quantized import is_quantized

if TYPE_CHECKING:
    from accord.config import Train
    from accord.models.load import LoadedModel

T = TypeVar("T")
MAX_SKIPPED_IN_A_ROW = 5
_SUMMED_AT_ONCE = 2**24  # numbers of gradients that travel together


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

    In a group of processes each computes its share of the packs (`learn`, `each`), and gradients are summed before the step. Every
    process holds the whole model, or its part of it (`train.shard`); a sharded model is read in lockstep.
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
        shard: bool = True,  # where `train.shard` says so
    ) -> None:
        super().__init__(loaded.module, precision=train.precision)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.ranks = join()
        self._partial: list[torch.nn.Parameter] = []  # whose gradients are parts of a sum over `ranks.tensor` processes
        if shard and parameters is None and shards(train, self.ranks):
            if is_quantized(self.module):
                raise ConfigError(
                    f"train.shard={train.shard}: a base in 4 bits (model.quantization) is not divided, every process holds it whole. "
                    "Set train.shard=never, or model.quantization=null."
                )
            of_own_heads = sharded.shard(self.module, self.ranks.mesh, offload=train.offload == "params")
            self._partial = [p for part in of_own_heads for p in part.parameters() if p.requires_grad]
        self.lockstep = sharded.is_sharded(self.module)
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
        groups = [
            {"params": alike, "weight_decay": decay}
            for all_, decay in ((decayed, train.weight_decay), (others, 0.0))
            for alike in sharded.by_mesh(all_)
        ]
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
        self._summed = False  # the gradients are those of all processes already
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

    # -- packs and processes -----------------------------------------------------------------------------------------

    @property
    def shares(self) -> int:
        """How many shares its packs are divided into."""
        return self.ranks.shares(self.lockstep)

    def pack(self, trees: Sequence[Tree]) -> list[Pack]:
        """The packs of `trees`, so that each process has as many."""
        return pack_trees(trees, self.train_settings.max_tokens, multiple=self.shares)

    def each(self, items: Sequence[Any], compute: Callable[[Any], T]) -> list[T]:
        """What `compute` reads of every pack with this model, in order; each process reads its share (`Ranks.each`)."""
        return self.ranks.each(items, compute, lockstep=self.lockstep)

    def learn(self, items: Sequence[Any], compute: Callable[[Any], tuple[Tensor, T]]) -> list[tuple[float, T]]:
        """The backward pass of every pack's loss: `compute` gives (loss, what is to be reported of the pack); so does this, in order.

        Each process takes its share. Gradients are summed over processes once, in the last backward pass or in `step`.
        """
        own: dict[int, tuple[float, T]] = {}
        like, turns = None, self.ranks.turns(len(items), self.lockstep)
        for turn, (number, counts) in enumerate(turns, 1):
            if self.lockstep:
                sharded.reduce_gradients(self.module, turn == len(turns))
            loss, result = compute(items[number])
            self.backward(loss if counts else 0 * loss)
            like = (float(loss.detach()), result)
            if counts:
                own[number] = like
        found = self.ranks.collect(own, like, len(items))
        self._nonfinite |= not all(math.isfinite(loss) for loss, _ in found)
        return found

    # -- one optimizer step ------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`. A loss that is not finite adds none and spoils the step (see `step`)."""
        if not torch.isfinite(loss.detach()):
            self._nonfinite = True
        self._summed = False
        if not self._nonfinite or self.lockstep:  # the others wait for this pass
            loss.backward()

    def spoil(self) -> None:
        """Make the step one that is not finite."""
        self._nonfinite = True

    def gradient_norm(self) -> float | None:
        """The norm of the step's gradient over all processes; None where there is none. NaN where a loss was not finite."""
        if not self._summed:
            self._sum_gradients()
            if self.lockstep and self.ranks.tensor > 1:
                self._sum_over_products()
            self._summed = True
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self._nonfinite:
            return math.nan
        if not gradients:
            return None
        if not self.lockstep:
            return float(torch.nn.utils.get_total_norm(gradients))
        parted = [gradient for gradient in gradients if sharded.is_parted(gradient)]
        square = torch.tensor(sharded.squared_norm(parted, self.ranks.tensor), dtype=torch.float64)
        others = sharded.squared_norm([gradient for gradient in gradients if not sharded.is_parted(gradient)])
        return math.sqrt(float(self.ranks.sum_(square)) + others)

    def _sum_gradients(self) -> None:
        """Σ over the processes of the gradients that FSDP has not summed. A parameter with a gradient anywhere has one everywhere then."""
        if self.ranks.world == 1:
            return
        own = [p for p in self.parameters.values() if not sharded.is_parted(p)]
        flags = torch.tensor([*(p.grad is not None for p in own), self._nonfinite], dtype=torch.uint8)
        *present, self._nonfinite = self.ranks.max_(flags).bool().tolist()
        gradients = []
        for parameter in (p for p, there in zip(own, present, strict=True) if there):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for together in _runs(gradients, _SUMMED_AT_ONCE):
            summed = self.ranks.sum_(torch.cat([gradient.reshape(-1) for gradient in together]))
            if self.lockstep:
                summed /= self.ranks.tensor  # so many have read the same packs
            _scatter(summed, together)

    def _sum_over_products(self) -> None:
        """Of what all that divide products hold, the same gradient in each: the mean of theirs, which differ by rounding at most, or the
        sum where each has seen its own heads alone (norms of a head). What they hold could drift apart else."""
        partial = {id(p) for p in self._partial}
        held = [p for p in self.parameters.values() if p.grad is not None and sharded.copies(p, self.ranks.tensor) > 1]
        for parts in (True, False):
            gradients = [sharded.local(p.grad) for p in held if p.grad is not None and (id(p) in partial) == parts]
            for together in _runs(gradients, _SUMMED_AT_ONCE):
                summed = self.ranks.dividing.sum_(torch.cat([gradient.reshape(-1) for gradient in together]))
                _scatter(summed if parts else summed / self.ranks.tensor, together)

    def step(self) -> StepInfo:
        """Clip, update, advance the schedule and the EMA; gradients are cleared.

        Without any gradient (no valid item) nothing happens. A loss or gradient that is not finite raises NonFiniteError, or
        with `on_nonfinite: skip` leaves weights and schedule alone and is counted; five in a row raise all the same.
        """
        lr = self.lr(self.schedule_step + 1)
        norm = self.gradient_norm()
        if norm is None:
            self._packs.clear()
            return StepInfo(0.0, lr, True)
        if not math.isfinite(norm):
            return self._nonfinite_step(lr)
        if self.train_settings.max_grad_norm:
            self._clip(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.schedule_step += 1
        self._skipped_in_a_row = 0
        self._clear()
        self._weights_changed()
        if self.ema is not None and self.ema_decay is not None:
            with torch.no_grad():
                weights = [sharded.local(p).float() for p in self.parameters.values()]
                torch._foreach_lerp_([sharded.local(average) for average in self.ema.values()], weights, 1 - self.ema_decay)
        return StepInfo(norm, lr, False)

    def _clip(self, norm: float) -> None:
        limit = self.train_settings.max_grad_norm
        if not self.lockstep:
            torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), limit, torch.tensor(norm))
        elif (scale := limit / (norm + 1e-6)) < 1:  # the same formula
            torch._foreach_mul_([sharded.local(p.grad) for p in self.parameters.values() if p.grad is not None], scale)

    def _weights_changed(self) -> None:
        """What a sharded model has brought together is out of date."""
        if self.lockstep:
            sharded.reshard(self.module)

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
        self._nonfinite = self._summed = False
        self._packs.clear()

    def _nonfinite_step(self, lr: float) -> StepInfo:
        own = [{"input_ids": pack.input_ids.tolist(), "segments": [list(s) for s in pack.segments]} for pack in self._packs]
        batch = [pack for packs in self.ranks.collect({self.ranks.rank: own}, None, self.ranks.world) for pack in packs]
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
        self._weights_changed()
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
        self._weights_changed()
        self.holds_ema = True
        try:
            yield
        finally:
            self.holds_ema = False
            with torch.no_grad():
                for name, p in self.parameters.items():
                    p.copy_(kept[name])
            self._weights_changed()

    # -- whole weights -----------------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, all weights are whole everywhere, and each process may read them as often as it likes. No gradient."""
        with sharded.gathered(self.module):
            yield

    def write(self, save: Callable[[], None]) -> None:
        """Let the main process `save` the model, its weights whole on the CPU; the others wait."""
        with sharded.whole_weights(self.module, self.ranks.is_main):
            self.ranks.ask_main(save)


def shards(train: Train, ranks: Ranks) -> bool:
    """Whether models are divided over the processes (`train.shard`). Raises ConfigError for an offload of what is not."""
    by_itself = torch.cuda.is_available() or ranks.tensor > 1
    divided = ranks.world > 1 and (train.shard == "always" or (train.shard == "auto" and by_itself))
    if train.offload != "none" and not divided:
        raise ConfigError(
            f"train.offload={train.offload}: only a model that is sharded over several processes can lie in the CPU's memory. "
            "Start several processes (torchrun) with train.shard=always, or set train.offload=none."
        )
    return divided


def frozen_model(module: torch.nn.Module, train: Train) -> FrozenModel:
    """A reference or reward model beside a trained one, divided over the processes where that is."""
    model = FrozenModel(module, precision=train.precision)
    ranks = join()
    if shards(train, ranks):
        sharded.shard(model.module, ranks.mesh, offload=train.offload == "params")
    return model


def _runs(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Neighbours of one type, `most` numbers together, or one tensor that has more."""
    run: list[Tensor] = []
    for tensor in tensors:
        if run and (run[0].dtype != tensor.dtype or sum(t.numel() for t in run) + tensor.numel() > most):
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _scatter(numbers: Tensor, targets: Sequence[Tensor]) -> None:
    """Write numbers laid end to end back into the tensors they came from."""
    for target, part in zip(targets, numbers.split([t.numel() for t in targets]), strict=True):
        target.copy_(part.view_as(target))


def prefixed(prefix: str, files: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """State files under another model's name: {"model": …} → {"critic-model": …}."""
    return {f"{prefix}-{name}": tensors for name, tensors in files.items()}


def unprefixed(prefix: str, files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Mapping[str, Tensor]]:
    return {name.removeprefix(f"{prefix}-"): tensors for name, tensors in files.items() if name.startswith(f"{prefix}-")}


def count_targets(packs: Sequence[Pack]) -> int:
    return sum(pack.num_targets for pack in packs)
