"""The processes of a run: one alone, or a group as `torchrun` describes it in the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

Control is replicated, compute is divided: every process knows the whole batch and builds the same list of items (packs, prompts) in the
same order, computes its share of them, and gets the results of all. What follows from the results is then the same everywhere.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from accord import errors
from accord.errors import AccordError, ConfigError, PeerLost

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # of one exchange; waiting for the main process (`ask_main`) has no limit
_SHORT = timedelta(seconds=10)
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """What one process of a group of `world` can do with the others. A process alone (world 1) exchanges nothing."""

    def __init__(self, rank: int = 0, world: int = 1, store: Any = None, group: Any = None) -> None:
        """`group`: the process group of a part of the run (`neighbours`), which has no main process to ask."""
        self.rank, self.world, self._store, self._group = rank, world, store, group
        self.tensor = (
            1  # processes that divide each product of a sharded model (launch.mesh.tensor): neighbours, which read the same items
        )
        self._asked = 0
        self._mesh: Any = None

    @property
    def is_main(self) -> bool:
        """The one process that writes, prints, and asks the world outside."""
        return self.rank == 0

    @property
    def mesh(self) -> Any:
        """The device mesh over which models are sharded: `data`, or `data` × `tensor` where products are divided too."""
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            kind = "cuda" if torch.cuda.is_available() else "cpu"
            sizes = {"data": self.world // self.tensor} | ({"tensor": self.tensor} if self.tensor > 1 else {})
            self._mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return self._mesh

    def divide(self, tensor: int) -> Ranks:
        """Let `tensor` neighbours divide the products of sharded models. Raises ConfigError where that does not divide the processes."""
        if self.world % tensor:
            raise ConfigError(
                f"launch.mesh.tensor={tensor} does not divide the number of processes, {self.world}. Start {tensor} or a multiple."
            )
        if tensor != self.tensor:
            self.tensor, self._mesh = tensor, None
        return self

    @property
    def dividing(self) -> Ranks:
        """The processes that divide products with this one, as a group of their own. Needs `tensor` above 1."""
        return Ranks(self.rank % self.tensor, self.tensor, group=self.mesh["tensor"].get_group())

    def shares(self, lockstep: bool) -> int:
        """How many shares items are divided into: one for each process, or (in lockstep, products divided) for each group of neighbours."""
        return self.world // self.tensor if lockstep else self.world

    def neighbours(self, size: int) -> Ranks:
        """The `size` processes of consecutive numbers that this one is among, as a group of their own. All processes have to ask at once."""
        own = None
        for first in range(0, self.world, size):
            group = torch.distributed.new_group(list(range(first, first + size)), timeout=TIMEOUT)
            if first <= self.rank < first + size:
                own = group
        return Ranks(self.rank % size, size, group=own)

    # -- dividing work -----------------------------------------------------------------------------------------------

    def turns(self, count: int, lockstep: bool = True) -> list[tuple[int, bool]]:
        """The numbers of this process's items of `count`, each with True.

        In lockstep all have as many turns: where items are missing, the first stands in with False, an empty item that must weigh nothing.
        Without, such a turn is there only for a process that would have none.
        """
        shares = self.shares(lockstep)
        own = [(number, True) for number in range(self.rank * shares // self.world, count, shares)]
        most = -(-count // shares) if lockstep else min(count, 1)
        return own + [(0, False)] * (most - len(own))

    def each(self, items: Sequence[Any], compute: Callable[[Any], T], *, lockstep: bool = False) -> list[T]:
        """`compute` of every item, in order, on every process; each computes its share.

        A result is a tensor, a number, a text, None, or tuples, lists, dictionaries and dataclasses of these, of one shape for all items.
        """
        own, like = {}, None
        with nullcontext() if lockstep else self.agreeing():
            for number, counts in self.turns(len(items), lockstep):
                like = compute(items[number])
                if counts:
                    own[number] = like
        return self.collect(own, like, len(items))

    def collect(self, own: Mapping[int, T], like: Any, count: int) -> list[T]:
        """The results of all processes by their numbers 0 … count - 1. `like`: some result of this process."""
        if self.world == 1 or not count:
            return [own[number] for number in range(count)]
        results: dict[int, T] = {}
        for message in self._gather(_encode({str(number): result for number, result in own.items()})):
            header, tensors = _decode(message)
            results |= {int(number): _like(like, shape, tensors) for number, shape in header.items()}
        return [results[number] for number in range(count)]

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add the processes' tensors up, in place."""
        if self.world > 1:
            with _translated():
                torch.distributed.all_reduce(tensor, group=self._group)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """The largest of the processes' numbers, in place."""
        if self.world > 1:
            with _translated():
                torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=self._group)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first process's tensor, in place."""
        if self.world > 1:
            with _translated():
                torch.distributed.broadcast(tensor, group=self._group, group_src=0)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return flag if self.world == 1 else bool(self.max_(torch.tensor(int(flag))))

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Around what exchanges nothing: an AccordError that one process meets is raised by all, so that none waits for it."""
        error: AccordError | None = None
        try:
            yield
        except AccordError as met:
            error = met
        if self.world > 1:
            own = None if error is None else [type(error).__name__, str(error)]
            met_by_all = self.collect({self.rank: own}, None, self.world)
            if error is None and (others := [found for found in met_by_all if found is not None]):
                raise _error(*others[0])
        if error is not None:
            raise error

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.any(False)

    def _gather(self, message: bytes) -> list[bytes]:
        """The messages of all processes."""
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(message)
        self.sum_(sizes)
        own = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.world)]
        with _translated():
            torch.distributed.all_gather(found, own)
        return [part[:size].numpy().tobytes() for part, size in zip(found, sizes.tolist(), strict=True)]

    # -- the main process --------------------------------------------------------------------------------------------

    def ask_main(self, answer: Callable[[], T]) -> T:
        """What `answer` gives in the main process, which alone calls it; what it gives must be JSON. The others wait, however long.

        An AccordError there is raised by all.
        """
        if self.world == 1:
            return answer()
        self._asked += 1
        key = f"asked/{self._asked}"
        if not self.is_main:
            found = json.loads(self._wait(key))
            if "error" in found:
                raise _error(found["kind"], found["error"])
            return found["answer"]
        try:
            given = answer()
            self._store.set(key, json.dumps({"answer": given}))
        except BaseException as error:
            kind, text = type(error).__name__, str(error)
            if not isinstance(error, AccordError):
                kind, text = "PeerLost", f"the main process has failed: {kind}: {text}"
            self._store.set(key, json.dumps({"kind": kind, "error": text}))
            raise
        return json.loads(json.dumps(given))  # the same types everywhere: a tuple has become a list

    def _wait(self, key: str) -> bytes:
        while True:
            try:
                self._store.wait([key], _SHORT)
                return self._store.get(key)
            except torch.distributed.DistStoreError as error:  # not yet there
                if "imeout" not in str(error) and "imed out" not in str(error):
                    raise PeerLost(_GONE) from error
            except (RuntimeError, ConnectionError) as error:
                raise PeerLost(_GONE) from error


def _error(kind: str, text: str) -> AccordError:
    """An error as another process met it."""
    error: AccordError = getattr(errors, kind, AccordError)(text)
    return error


_GONE = "another process of this run has stopped; what it said, above or in its own log, is the reason."
_joined: Ranks | None = None


def join() -> Ranks:
    """The group that this process belongs to, joined at the first call; a process alone where the environment describes none.

    gloo serves tensors on the CPU, NCCL those on a GPU, of which each process takes the one of its LOCAL_RANK. Raises ConfigError for an
    environment that is incomplete, AccordError where the others can't be reached.
    """
    global _joined
    if _joined is None:
        _joined = _from_environment(os.environ)
    return _joined


def _from_environment(environment: Mapping[str, str]) -> Ranks:
    if environment.get("WORLD_SIZE", "1") == "1":
        return Ranks()
    missing = [name for name in _NEEDED if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"environment: WORLD_SIZE is {environment['WORLD_SIZE']}, but {', '.join(missing)} is not set. Start with torchrun, or unset WORLD_SIZE."
        )
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_RANK") or rank)
    except ValueError as error:
        raise ConfigError(f"environment: RANK, WORLD_SIZE and LOCAL_RANK are numbers ({error}). Start with torchrun.") from error
    if not 0 <= rank < world:
        raise ConfigError(f"environment: RANK={rank} is not one of 0 … {world - 1} (WORLD_SIZE={world}). Start with torchrun.")
    backend = "gloo"
    if torch.cuda.is_available():
        if local >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"process {local} of this machine has no GPU of its own: there are {count}. Start {count} processes."
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    from torch import distributed

    def meet() -> Any:
        store, _, _ = next(distributed.rendezvous("env://", timeout=TIMEOUT))
        distributed.init_process_group(
            backend, store=distributed.PrefixStore("group", store), rank=rank, world_size=world, timeout=TIMEOUT
        )
        return store

    try:
        store = _hearing_signals(meet)
    except (RuntimeError, ValueError) as error:
        where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        raise AccordError(
            f"process {rank} can't reach the other {world - 1} at {where}: {str(error).splitlines()[0]} "
            "Check MASTER_ADDR and MASTER_PORT, and that all processes were started."
        ) from error
    ranks = Ranks(rank, world, distributed.PrefixStore("accord", store))
    if not ranks.is_main:  # what all have to say is said once
        logging.getLogger("accord").setLevel(logging.ERROR)
    atexit.register(_leave, ranks)
    return ranks


def _hearing_signals(wait: Callable[[], T]) -> T:
    """What `wait` gives, which waits outside Python: in a thread of its own, so that Ctrl-C and SIGTERM are answered meanwhile."""
    given: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            given.append(wait())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="meeting the others", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if failed:
        raise failed[0]
    return given[0]


def _leave(ranks: Ranks) -> None:
    """The main process, which keeps the store, stays until the others have read its last answer. Where one has failed nobody waits long."""
    with suppress(Exception):
        if not ranks.is_main:
            ranks._store.set(f"left/{ranks.rank}", "")
        elif not _failed:
            ranks._store.wait([f"left/{rank}" for rank in range(1, ranks.world)], 3 * _SHORT)
    with suppress(Exception):
        if not _failed or not torch.cuda.is_available():  # NCCL would wait for those that have failed
            torch.distributed.destroy_process_group()


_failed = False


@contextmanager
def together() -> Iterator[Ranks]:
    """Around what the processes do together. Where one has failed, and its connections have broken, the others say so."""
    global _failed
    ranks = join()
    try:
        with _translated() if ranks.world > 1 else nullcontext():
            yield ranks
    except BaseException:
        _failed = True
        raise


@contextmanager
def _translated() -> Iterator[None]:
    """A broken connection in words. gloo and NCCL raise plain RuntimeErrors for it."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        signs = ("connection closed by peer", "connection reset by peer", "gloo", "nccl", "broken pipe", "timed out waiting")
        if isinstance(error, torch.distributed.DistError) or any(sign in text for sign in signs):
            raise PeerLost(_GONE) from error
        raise


# ------------------------------------------------------------------------------------------- results as bytes, without pickle


def _encode(value: Any) -> bytes:
    """A JSON header (its length first) and the tensors' bytes."""
    tensors: list[Tensor] = []
    header = json.dumps(_shape(value, tensors)).encode()
    parts = [len(header).to_bytes(8, "little"), header]
    parts += [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return b"".join(parts)


def _shape(value: Any, tensors: list[Tensor]) -> Any:
    """The value as JSON; each tensor, put aside, is {"tensor": [dtype, size …]}."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().clone(memory_format=torch.contiguous_format))
        return {"tensor": [str(value.dtype).removeprefix("torch."), *value.shape]}
    if is_dataclass(value):
        return [_shape(getattr(value, field.name), tensors) for field in fields(value)]
    if isinstance(value, tuple | list):
        return [_shape(item, tensors) for item in value]
    if isinstance(value, Mapping):
        return {key: _shape(item, tensors) for key, item in value.items()}
    return value


def _decode(message: bytes) -> tuple[dict[str, Any], Iterator[Tensor]]:
    """The header, and the tensors in their order."""
    start = 8 + int.from_bytes(message[:8], "little")
    header = json.loads(message[8:start])
    return header, _tensors(header, memoryview(message)[start:])


def _tensors(shape: Any, data: memoryview) -> Iterator[Tensor]:
    at = 0
    for name, *size in _described(shape):
        dtype = getattr(torch, name)
        length = dtype.itemsize * torch.Size(size).numel()
        raw = (
            torch.frombuffer(bytearray(data[at : at + length]), dtype=torch.uint8)
            if length
            else torch.zeros(0, dtype=torch.uint8)
        )
        yield raw.view(dtype).reshape(size)
        at += length


def _described(shape: Any) -> Iterator[list[Any]]:
    if isinstance(shape, dict):
        if list(shape) == ["tensor"]:
            yield shape["tensor"]
            return
        shape = list(shape.values())
    if isinstance(shape, list):
        for item in shape:
            yield from _described(item)


def _like(like: Any, shape: Any, tensors: Iterator[Tensor]) -> Any:
    """A value of the kind of `like` from what `_shape` made of it."""
    if isinstance(shape, dict) and list(shape) == ["tensor"]:
        tensor = next(tensors)
        return tensor.to(like.device) if isinstance(like, Tensor) else tensor
    if is_dataclass(like) and not isinstance(like, type):
        names = [field.name for field in fields(like)]
        return type(like)(**{n: _like(getattr(like, n), s, tensors) for n, s in zip(names, shape, strict=True)})
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*(_like(item, s, tensors) for item, s in zip(like, shape, strict=True)))
    if isinstance(like, tuple | list):  # items of a list may be more or fewer than in `like`
        kinds = [*like[: len(shape)], *[like[-1] if like else None] * (len(shape) - len(like))]
        return type(like)(_like(item, s, tensors) for item, s in zip(kinds, shape, strict=True))
    if isinstance(like, Mapping):
        return {key: _like(like.get(key), s, tensors) for key, s in shape.items()}
    return shape
