"""The Hybrid Engine: one set of weights, trained by one engine and sampled by another, and where the time of an iteration goes.

The idea is DeepSpeed-Chat's (Yao et al. 2023, arXiv:2308.01320, §4): training wants the ordinary module, sampling a lean decoder.
Here both read the same tensors; copies that the decoder makes for speed are renewed after a step and can be given back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from accord.engine.generate import Rollout, SamplingParams, make_generator
from accord.engine.generate.lockstep import Lockstep
from accord.engine.trained import StepInfo, TrainedModel
from accord.errors import ConfigError
from accord.models.sharded import LayerGroups

if TYPE_CHECKING:
    from accord.config.sections import Engine

Part = Literal["gather", "generate", "score", "logprob", "train"]
PARTS: tuple[Part, ...] = ("gather", "generate", "score", "logprob", "train")


class HybridEngine:
    """A trained model and its sampler.

        engine = HybridEngine(model, config.engine)
        rollouts = engine.generate(prompts, params)
        …
        model.backward(loss)
        engine.step()

    `generate` switches to evaluation and back by itself; `eval()` and `train()` are there for those who alternate in blocks.
    """

    def __init__(self, model: TrainedModel, settings: Engine) -> None:
        """Raises ConfigError for what these processes, or this model, can't do."""
        self.model = model
        self.lockstep = in_lockstep(model, settings)
        with self._weights():
            self.generator = make_generator(model.module, model.tokenizer, settings, model.compute_dtype, self.lockstep)
        self.times = TimeSplit()

    def _weights(self) -> AbstractContextManager[None]:
        return self.model.gathered() if self.lockstep is None else self.lockstep.groups.open()

    def eval(self) -> None:
        """To sampling: no dropout."""
        self.model.module.eval()

    def train(self) -> None:
        """To training."""
        self.model.module.train()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        seeds: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """Answers from the weights as they are now. The time counts as `generate`; renewing copies, as `gather`.

        In a group each process answers its share of the prompts. With weights that are whole everywhere (`engine.pin_parameters`) one whose
        answers end early waits for the others' answers; else it takes part in the others' steps. With `engine.inference_tp_size` it is so many
        processes that answer a share together; with `launch.mesh.tensor`, those that divide the products.
        """
        ranks, size = self.model.ranks, self._sharing
        own = list(range(ranks.rank // size, len(prompts), ranks.world // size))
        if isinstance(params, Sequence):
            params = [params[number] for number in own]
        with ExitStack() as stack:
            with self.times("gather"):
                stack.enter_context(self._weights())
                if self.model.lockstep:
                    self.generator.refresh()  # what was gathered anew shows no trace of a change
                self.generator.prepare()
            with self.times("generate"), ranks.agreeing():
                found = self.generator.generate(
                    [prompts[number] for number in own],
                    params,
                    seeds=None if seeds is None else [seeds[number] for number in own],
                )
            with self.times("generate"):
                first = dict(zip(own, found, strict=True)) if ranks.rank % size == 0 else {}
                return ranks.collect(first, Rollout([], [], "stop"), len(prompts))

    @property
    def _sharing(self) -> int:
        """Processes that answer the same prompts."""
        return self.lockstep.ranks.world if self.lockstep is not None and self.lockstep.tensor_parallel else 1

    def step(self) -> StepInfo:
        """The optimizer's step; the sampler's copies are out of date afterwards."""
        info = self.model.step()
        if not info.skipped:
            self.generator.refresh()
        return info


def in_lockstep(model: TrainedModel, settings: Engine) -> Lockstep | None:
    """How the processes sample `model` together; None: each by itself, with whole weights. Raises ConfigError for what can't be."""
    size, world = settings.inference_tp_size, model.ranks.world
    groups = LayerGroups(model.module, settings.tp_gather_partition_size)
    if model.ranks.tensor > 1:  # each has its part of the layers already
        return Lockstep(model.ranks.dividing, groups, tensor_parallel=True)
    if size == 1 and settings.pin_parameters:
        return None
    if size == 1:
        if not model.lockstep:
            raise ConfigError(
                "engine.pin_parameters=false: there is nothing to gather, since every process holds the whole model. "
                "Start several processes with train.shard=always, or leave it true."
            )
        return Lockstep(model.ranks, groups, tensor_parallel=False)
    if world % size:
        fitting = [n for n in range(1, world + 1) if world % n == 0]
        raise ConfigError(
            f"engine.inference_tp_size={size} does not divide the number of processes, {world}. Set it to one of {fitting}, "
            f"or start {size} processes or a multiple."
        )
    return Lockstep(model.ranks.neighbours(size), groups, tensor_parallel=True)


class TimeSplit:
    """Seconds of an iteration by part: `with times("score"): …`, then `times.close(samples)`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()
        self._samples = self._total = 0.0

    def start(self) -> None:
        """An iteration begins."""
        self.seconds, self.began = dict.fromkeys(PARTS, 0.0), time.perf_counter()

    @contextmanager
    def __call__(self, part: Part) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what was launched belongs to the part that launched it
            self.add(part, time.perf_counter() - began)

    def add(self, part: Part, seconds: float) -> None:
        """Seconds that were measured elsewhere."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def close(self, samples: int) -> dict[str, float]:
        """The iteration's metrics: time/<part>, other, step; samples a second now and since the beginning."""
        step = time.perf_counter() - self.began
        self._samples, self._total = self._samples + samples, self._total + step
        metrics = {f"time/{part}": seconds for part, seconds in self.seconds.items()}
        return metrics | {
            "time/other": max(0.0, step - sum(self.seconds.values())),
            "time/step": step,
            "throughput/samples_per_s": samples / step,
            "throughput/samples_per_s_average": self._samples / self._total,
        }
