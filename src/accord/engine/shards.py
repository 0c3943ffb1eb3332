"""Tensors on disk, each rank its own part: PyTorch's distributed checkpoint with safetensors as its storage, never a pickle.

    FOLDER/shard-00001-model-00001-of-00001.safetensors   what rank 0 holds; every tensor with the offset of this part in the whole

What isn't sharded is written by one rank. Any number of ranks reads what any other number wrote.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from accord.errors import AccordError

FILE_BYTES = 2 << 30  # of a file, about: PyTorch holds one whole in memory while it writes it

# PyTorch says so at every call without a process group, where it is what was meant.
warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled")


def once(group: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, contiguous and each with memory of its own, and which other names stand for one of them (tied weights)."""
    from torch.distributed.tensor import DTensor

    distinct: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    storages: set[int] = set()
    for name, tensor in group.items():
        if isinstance(tensor, DTensor):  # by identity: what a rank holds of it may be empty
            identity: Any = id(tensor)
            plain = tensor.detach()
        else:
            plain = tensor.detach()
            storage = plain.untyped_storage().data_ptr()
            identity = (storage, plain.storage_offset(), tuple(plain.shape), plain.stride(), plain.dtype)
            plain = plain.contiguous()
            if plain.numel() and identity not in seen and storage in storages:  # another view of the same memory
                plain = plain.clone()
            storages.add(storage)
        if tensor.numel() and identity in seen:
            aliases[name] = seen[identity]
            continue
        seen[identity] = name
        distinct[name] = plain
    return distinct, aliases


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], ranks: ProcessGroup | None) -> None:
    """Write `tensors` (see `once`) into `folder`; all of `ranks` call it, and it returns when all have written and synced.

    Raises OSError, on every rank, where one of them can't write.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    if not tensors:
        return
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_files(tensors), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer, process_group=ranks, no_dist=ranks is None)
    except CheckpointException as error:  # no Exception but a BaseException, with what went wrong on each rank
        rank, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(cause, OSError):  # such as a lost connection: the disk is not to blame
            raise cause from None
        where = "" if ranks is None else f"rank {rank}: "
        raise OSError(cause.errno, f"{where}{cause.strerror or cause}") from cause


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file (1, 2, …) that each tensor goes to: the same on every rank, for it counts whole tensors."""
    numbers, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if size and size + bytes_ > FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += bytes_
    return numbers


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of one folder by name, each read, whole and onto the CPU, when it is asked for. `read_into` reads parts of them."""

    def __init__(self, folder: Path, aliases: Mapping[str, str]) -> None:
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        self.folder, self.aliases = folder, aliases
        known: Any = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata if folder.is_dir() else {}
        self._kinds = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in known.items()}

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._kinds[self.aliases.get(name, name)]
        tensor = torch.empty(shape, dtype=dtype)
        self.read_into({name: tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        yield from self._kinds
        yield from self.aliases

    def __len__(self) -> int:
        return len(self._kinds) + len(self.aliases)

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill `targets`; see the function of that name."""
        from torch.distributed.checkpoint import HuggingFaceStorageReader, load
        from torch.distributed.checkpoint.api import CheckpointException

        wanted: dict[str, Tensor] = {}
        again: list[tuple[Tensor, str]] = []  # two names of one tensor: the second one is filled from the first
        for name, target in targets.items():
            kept = self.aliases.get(name, name)
            there = self._kinds.get(kept)
            here = (tuple(target.shape), target.dtype)
            if there != here:
                raise AccordError(
                    f"{self.folder} is of another model: {name} is {_kind(there)} there and {_kind(here)} here. "
                    "Give model.path the model that the run began with, or start afresh with run.overwrite=true."
                )
            if kept in wanted:
                again.append((target.detach(), kept))
            else:
                wanted[kept] = target.detach()
        if not wanted:
            return
        try:  # every rank reads for itself: nothing is to be agreed on
            load(dict(wanted), storage_reader=HuggingFaceStorageReader(str(self.folder)), no_dist=True)
        except CheckpointException as error:
            _, (cause, _) = next(iter(error.failures.items()))
            raise AccordError(f"could not read {self.folder}: {cause}") from cause
        for target, kept in again:
            target.copy_(wanted[kept])


def read_into(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Fill `targets` (whole or sharded, on any device) in place with `saved`, which must have the same names.

    Of a checkpoint's tensors each rank reads its own part alone. Raises AccordError where a name, shape or type differs.
    """
    if more := [name for name in saved if name not in targets]:
        raise AccordError(
            f"the state to go on from is of another model: it has {more[0]}, which is absent here. Give model.path the model that the run "
            "began with, or start afresh with run.overwrite=true."
        )
    if isinstance(saved, SavedTensors):
        saved.read_into(targets)
    else:
        for name, target in targets.items():
            target.detach().copy_(saved[name])


def _kind(kind: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "absent" if kind is None else f"{'×'.join(map(str, kind[0])) or 'a number'} ({str(kind[1]).removeprefix('torch.')})"
