"""DPO's frozen reference: asked in every step, or asked once before training and remembered on disk (ALGORITHMS §3)."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from accord.data.dataset import Example, cache_folder
from accord.data.packing import Pack
from accord.data.trees import Tree
from accord.engine.trained import TrainedModel, frozen_model
from accord.errors import ConfigError
from accord.models.forward import FrozenModel
from accord.models.heads import unwrap
from accord.models.load import load_causal
from accord.models.lora import REFERENCE, has_adapter
from accord.models.sharded import whole
from accord.trainers.common import batch_packs, parts

if TYPE_CHECKING:
    from accord.config import Config

log = logging.getLogger(__name__)

Split = Literal["train", "valid"]


def reference_for(config: Config, model: TrainedModel) -> FrozenModel | None:
    """The frozen reference beside `model`, or None when LoRA's own start serves (`model.as_reference()`)."""
    path = config.reference.path
    if has_adapter(model.module) and path in (None, config.model.path):
        return None
    if path is None and config.model.path is None:  # from scratch: the reference is the same fresh model
        if model.lockstep:
            raise ConfigError(
                "reference.path: a model from scratch that is sharded has no copy of its start. Set train.shard=never."
            )
        return FrozenModel(copy.deepcopy(model.module), precision=config.train.precision)
    bare = config.model.model_copy(update={"lora": None})
    loaded = load_causal(
        bare,
        seed=config.run.seed,
        trainable=False,
        path=path or config.model.path,
        dtype=config.reference.dtype or config.model.dtype,
    )
    return frozen_model(loaded.module, config.train)


class Reference:
    """log π_ref of the sequences of a pack, each summed over its response in float64.

    By default the frozen model is asked in every step, with the very pack that the policy reads: while π = π_ref the two agree to the
    bit. With `reference.precompute` it is asked once about every example before training and then given back: a step needs neither
    its time nor its memory. Held-out examples are asked about once in both cases.
    """

    def __init__(self, config: Config, model: TrainedModel, train: Sequence[Example], valid: Sequence[Example]) -> None:
        """`model` must still be what training starts from. Raises ConfigError for a reference that can't be loaded."""
        self.model, self.frozen = model, None
        self.max_tokens = config.train.max_tokens
        self.weights: str | None = None  # with precompute: the fingerprint of the model that was asked
        self.examples: dict[Split, Sequence[Example]] = {"train": train, "valid": valid}
        self.tables: dict[Split, Table] = {}
        self.is_the_start = config.reference.path in (None, config.model.path)
        # Training starts from the reference, but what is compared with comes from other packs or another dtype.
        self.rounds = self.is_the_start and (config.reference.precompute or config.reference.dtype != "float32")
        if config.reference.precompute:
            self._precompute(config)
        else:
            self.frozen = reference_for(config, model)

    def _precompute(self, config: Config) -> None:
        read, module = self.read, self.model.module
        if has_adapter(module) or not self.is_the_start or config.reference.dtype != "float32":
            self.frozen = reference_for(config, self.model)
            module = self.frozen.module if self.frozen is not None else module
        else:  # trained weights are float32: before its first step the policy is the reference to the bit, and no other is loaded
            read = self._read_policy
        self.weights = weights_fingerprint(module)
        key = f"{self.weights} {config.train.precision} {self.max_tokens}"
        folder = cache_folder() / "reference" if config.data.cache else None
        for split, examples in self.examples.items():
            self.tables[split] = _precompute(self.model, read, examples, key, folder)
        self.frozen = None  # all it had to say is in the tables

    def logps(self, pack: Pack, numbers: Sequence[int], split: Split) -> Tensor:
        """[S] log π_ref of the pack's sequences; its trees are `examples[numbers[i]]` of `split`, i in `pack.tree_index`."""
        if split == "valid":
            self.prepare(split)
        if split in self.tables:
            return self.tables[split].of([numbers[i] for i in pack.tree_index]).to(self.model.device)
        return self.read(pack)

    def prepare(self, split: Split) -> None:
        """Ask about all of `split` now, where that has not been done."""
        if split not in self.tables:
            self.tables[split] = _precompute(self.model, self.read, self.examples[split], "", None)

    @torch.no_grad()
    def read(self, pack: Pack) -> Tensor:
        """[S] the same, asked now. Not there any more once everything is precomputed."""
        if self.frozen is not None:
            return pack.sum_by_sequence(self.frozen.token_logprobs(pack).logprobs)
        with self.model.as_reference():
            return pack.sum_by_sequence(self.model.token_logprobs(pack).logprobs)

    def _read_policy(self, pack: Pack) -> Tensor:
        with self.model.evaluating():
            return pack.sum_by_sequence(self.model.token_logprobs(pack).logprobs)


# ------------------------------------------------------------------------------------------------- computed once, kept on disk


@dataclass(frozen=True)
class Table:
    """log π_ref of every sequence of a list of examples, in their order."""

    values: Tensor  # [all sequences] float64
    first: np.ndarray  # [examples + 1] where each example's sequences begin

    def of(self, numbers: Sequence[int]) -> Tensor:
        """[S] those of the examples `numbers`."""
        rows = [row for number in numbers for row in range(self.first[number], self.first[number + 1])]
        return self.values[rows]


def _precompute(
    model: TrainedModel, read: Callable[[Pack], Tensor], examples: Sequence[Example], key: str, folder: Path | None
) -> Table:
    """Ask about every example, part by part; a part that was kept before, of the same model and the same tokens, is not asked again."""
    values, counts, asked = [], [], 0
    for numbers in parts(len(examples)):
        trees = [examples[i].tree for i in numbers]
        counts += [len(tree.leaves) for tree in trees]
        path = folder / f"{_digest(key, trees)}.safetensors" if folder is not None else None
        found = _kept(path, sum(len(tree.leaves) for tree in trees)) if path is not None else None
        if model.ranks.any(found is None):
            found = _ask(model, read, examples, numbers)
            asked += len(numbers)
            if path is not None and model.ranks.is_main:
                _keep(path, found)
        assert found is not None
        values.append(found)
    if folder is not None and len(examples):
        log.info(
            "Reference log-probabilities: %s examples computed, %s from the cache.", f"{asked:,}", f"{len(examples) - asked:,}"
        )
    return Table(
        torch.cat(values) if values else torch.zeros(0, dtype=torch.float64), np.concatenate([[0], np.cumsum(counts)]).astype(int)
    )


def _ask(model: TrainedModel, read: Callable[[Pack], Tensor], examples: Sequence[Example], numbers: Sequence[int]) -> Tensor:
    by_example: dict[int, Tensor] = {}
    packs = batch_packs(model, examples, numbers)
    for pack, logps in zip(packs, model.each(packs, lambda pack: read(pack).cpu()), strict=True):
        by_example.update(zip(pack.tree_index, logps.split([len(tree.leaves) for tree in pack.trees]), strict=True))
    return torch.cat([by_example[i] for i in range(len(numbers))])


def _kept(path: Path, sequences: int) -> Tensor | None:
    """What the file holds; None where there is none, or it is damaged."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            logps, checksum = file.get_tensor("logps"), (file.metadata() or {}).get("blake2b")
    except (OSError, SafetensorError):
        logps, checksum = torch.zeros(0), None
    # A wrong bit leaves a number that looks like any other: only the checksum tells.
    if logps.dtype == torch.float64 and logps.shape == (sequences,) and checksum == _checksum(logps):
        return logps
    log.warning("%s is damaged: these log-probabilities are computed again.", path)
    return None


def _keep(path: Path, logps: Tensor) -> None:
    """Written beside and renamed; a cache that can't be written costs time, not the run."""
    if not bool(torch.isfinite(logps).all()):
        return
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".reference-", dir=path.parent)
        os.close(handle)
        save_file({"logps": logps.contiguous()}, temporary, metadata={"blake2b": _checksum(logps)})
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        log.warning("%s can't be written (%s): the reference is computed again next time.", path, error)


def _checksum(logps: Tensor) -> str:
    return hashlib.blake2b(logps.contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def weights_fingerprint(module: nn.Module) -> str:
    """Of all that decides what a model answers: its configuration and every weight, but not where they were loaded from.

    A LoRA adapter that starts at nothing is left out: the reference is the base.
    """
    base = unwrap(module)
    settings = {k: v for k, v in base.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16)
    fresh = has_adapter(module) and REFERENCE not in module.peft_config  # type: ignore[operator]
    tensor: Any
    for name, tensor in sorted(module.state_dict().items()):
        if fresh and "lora_" in name:
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        tensor = whole(tensor)
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _digest(key: str, trees: Sequence[Tree]) -> str:
    digest = hashlib.blake2b(key.encode(), digest_size=16)
    for part in _contents(trees):
        digest.update(part)
    return digest.hexdigest()


def _contents(trees: Sequence[Tree]) -> Iterator[bytes]:
    for tree in trees:
        for segment in tree.segments:
            yield f"|{len(segment)} {segment.parent} ".encode()
            yield segment.tokens.tobytes()
            yield segment.trained.tobytes()
