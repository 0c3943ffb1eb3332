"""RUN/journal.jsonl: what PPO sampled and how it was scored, by step, so that a step that is done again asks nobody twice.

A line is one step's (or evaluation's) record and its checksum, on the disk before its scores are used (docs/algorithms/ppo.md).
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from accord.engine.checkpoint import checkpoint_steps
from accord.errors import AccordError, DataError
from accord.rewards.base import LARGEST, ScoreBoard
from accord.track.files import parse_line, sync_folder

if TYPE_CHECKING:
    from accord.trainers.ppo_answers import Answers, Request
    from accord.trainers.ppo_experience import Rollouts

log = logging.getLogger(__name__)

Kind = Literal["train", "eval"]
Identity = dict[str, str]  # what a record depends on → digest
Place = tuple[str, int]  # kind and step
JOURNAL = "journal.jsonl"  # in a run's folder
PROBED = 64  # elements of each parameter in the digest of the weights
NAMES = {"prompts": "other prompts", "sampling": "other random numbers or sampling settings", "rewards": "other reward sources",
         "weights": "other weights of the policy"}  # fmt: skip


Natural = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Reward = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]


class RecordForm(BaseModel):
    """The form of a record. What has another was written by hand or by another version."""

    model_config = ConfigDict(strict=True)
    kind: Kind
    step: Natural
    identity: Identity
    prompts: list[str]
    responses: list[Annotated[list[Natural], Field(min_length=1)]]
    truncated: list[bool]
    logprobs: str
    scores: dict[str, list[Finite]]
    total: list[Reward]
    token_rewards: list[list[Reward]] | None
    failures: Natural
    judge: list[Finite] | None

    @property
    def fits_together(self) -> bool:
        """Whether every response has its numbers, and every token."""
        lengths = [len(response) for response in self.responses]
        lists = (self.prompts, self.truncated, self.total, *self.scores.values(), lengths if self.judge is None else self.judge)
        logprobs = _numbers(self.logprobs)
        return (
            all(len(one) == len(lengths) for one in lists)
            and (self.token_rewards is None or [len(one) for one in self.token_rewards] == lengths)
            and len(logprobs) == sum(lengths)
            and bool(np.isfinite(logprobs).all())
        )


class Scored(NamedTuple):
    """Answers and what they were given."""

    rollouts: Rollouts
    board: ScoreBoard
    judged: list[float] | None  # [R] by ppo.judge, at evaluation


class Journal:
    """The journal of a run. Nothing is read or written before it is first used.

    `checkpoints` is the folder of the run's checkpoints: what was recorded up to the oldest of them is forgotten in time, since no
    resume comes back to it. None: everything is kept.
    """

    def __init__(self, path: Path, checkpoints: Path | None = None) -> None:
        self.path, self.checkpoints = path, checkpoints
        self._places: dict[Place, int] | None = None  # where each newest whole record begins
        self._end = 0  # of the last whole line
        self._forgotten = 0  # the step up to which

    def recall(self, kind: Kind, step: int, identity: Identity) -> dict[str, Any] | None:
        """The record of that step, or None where there is none that `identity` fits; one that does not fit is told in a line."""
        record = self.read(kind, step)
        if record is None or not (others := misfits(record, identity)):
            return record
        what = "evaluation at step" if kind == "eval" else "step"
        log.warning("%s: its record of %s %d is of %s; sampled and scored again.", self.path, what, step, " and ".join(others))
        return None

    def read(self, kind: Kind, step: int) -> dict[str, Any] | None:
        """The newest whole record of that step, whatever it depends on; None without one."""
        at = self._known().get((kind, step))
        if at is None:
            return None
        with self._opened() as file:
            file.seek(at)
            return _record(file.readline())

    def steps(self) -> list[int]:
        """The steps of training with a whole record, in order."""
        return sorted(step for kind, step in self._known() if kind == "train")

    def write(self, kind: Kind, step: int, record: dict[str, Any]) -> None:
        """Append the record; it is on the disk when this returns. Raises AccordError when the disk refuses; nothing is torn then."""
        self._known()  # where the last whole line ends
        try:
            self._forget(step)
            new = not self.path.exists()
            record = {"kind": kind, "step": step, **record}
            line = json.dumps({"blake2b": _digest(record), "record": record}, separators=(",", ":")).encode() + b"\n"
            with self.path.open("ab") as file:
                file.truncate(self._end)  # what a killed process, or a full disk, left half written
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            if new:
                sync_folder(self.path.parent)
        except OSError as error:
            raise AccordError(
                f"{self.path}: cannot write it ({error.strerror or error}). Free some space and start the same command again."
            ) from error
        self._known()[kind, step] = self._end
        self._end += len(line)

    def _opened(self) -> IO[bytes]:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot read it ({error.strerror or error}). Restore it, or move it away to have its steps sampled and scored again."
            ) from error

    def _known(self) -> dict[Place, int]:
        if self._places is None:
            self._places = self._index()
        return self._places

    def _index(self) -> dict[Place, int]:
        places: dict[Place, int] = {}
        self._end = 0
        if not self.path.exists():
            return places
        with self._opened() as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # torn by a kill: that step is not recorded
                record = _record(line)
                if record is None:
                    log.warning(
                        "%s:%d: this record is damaged. If its step is done again, it is sampled and scored again.",
                        self.path,
                        number,
                    )
                else:
                    places[record["kind"], record["step"]] = self._end
                self._end += len(line)
        return places

    def _forget(self, now: int) -> None:
        """Rewrite the file, whole or not at all, without what was recorded up to the oldest checkpoint before step `now`."""
        present = [] if self.checkpoints is None else checkpoint_steps(self.checkpoints)
        oldest = min((step for step in present if step < now), default=0)  # a later one is damaged, or another run's
        if oldest <= self._forgotten:
            return
        self._forgotten = oldest
        kept = {place: at for place, at in self._known().items() if place[1] > oldest}
        if len(kept) == len(self._known()):
            return
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        places: dict[Place, int] = {}
        with self.path.open("rb") as old, beside.open("wb") as new:
            for place, at in sorted(kept.items(), key=lambda item: item[1]):
                old.seek(at)
                places[place] = new.tell()
                new.write(old.readline())
            new.flush()
            os.fsync(new.fileno())
            self._end = new.tell()
        os.replace(beside, self.path)
        sync_folder(self.path.parent)
        self._places = places


def identity_of(request: Request, params: Any, rewards: Any, parameters: Iterable[Tensor]) -> Identity:
    """What answers and scores depend on: the prompts' tokens, seeds and sampling, the settings of the sources, the policy's weights."""
    return {
        "prompts": _digest(request.prompt_ids),
        "sampling": _digest([request.seeds, repr(params)]),
        "rewards": _digest(rewards),
        "weights": fingerprint(parameters),
    }


def misfits(record: dict[str, Any], identity: Identity) -> list[str]:
    """What the record was made with that is not so now, in words."""
    return [NAMES[name] for name, digest in identity.items() if record["identity"].get(name) != digest]


@torch.no_grad()
def fingerprint(parameters: Iterable[Tensor]) -> str:
    """Digest of up to 64 evenly spaced elements of each parameter: cheap, and an optimizer step moves nearly all of them."""
    probes = []
    for parameter in parameters:
        if hasattr(parameter, "to_local"):  # of a sharded one, the part that lies here
            parameter = parameter.to_local()
        flat = parameter.detach().reshape(-1)
        probes.append(flat[:: max(1, len(flat) // PROBED)][:PROBED].float())
    values = torch.cat(probes).cpu().numpy() if probes else np.zeros(0, np.float32)
    return hashlib.blake2b(values.astype("<f4").tobytes(), digest_size=16).hexdigest()


def record_of(identity: Identity, scored: Scored) -> dict[str, Any]:
    """What is written of answers and their scores. Log-probabilities as base64 of little-endian float32: exact, and a third as long."""
    rollouts, board, judged = scored
    assert rollouts.sampler_logprobs is not None
    return {
        "identity": identity,
        "prompts": [sample.prompt.origin for sample in rollouts.samples],
        "responses": [list(sample.response_ids) for sample in rollouts.samples],
        "truncated": [sample.truncated for sample in rollouts.samples],
        "logprobs": base64.b64encode(rollouts.sampler_logprobs.numpy().astype("<f4").tobytes()).decode(),
        "scores": board.by_source,
        "total": board.total,
        "token_rewards": board.per_token,
        "failures": board.failures,
        "judge": judged,
    }


def scored_of(record: dict[str, Any], request: Request, answers: Answers) -> Scored:
    """What was written, again: `request` is what the answers were sampled for. Raises DataError where they can't be answers to it."""
    responses, size = record["responses"], answers.vocabulary
    if len(responses) != len(request.prompts) or max(map(max, responses), default=0) >= size:
        raise DataError(
            f"{JOURNAL}: the record of step {record['step']} has no {len(request.prompts)} responses of token ids below {size:,}: "
            f"it was changed by hand. Remove {JOURNAL} from the run's folder to have the step sampled and scored again."
        )
    logprobs = torch.from_numpy(_numbers(record["logprobs"]))
    rollouts = answers.rollouts(request, responses, record["truncated"], logprobs)
    board = ScoreBoard(record["total"], record["scores"], record["failures"], record["token_rewards"])
    return Scored(rollouts, board, record["judge"])


def _record(line: bytes) -> dict[str, Any] | None:
    """The record on a line whose checksum and form fit, else None."""
    row = parse_line(line)
    record = None if row is None else row.get("record")
    if row is None or not isinstance(record, dict) or row.get("blake2b") != _digest(record):
        return None
    try:
        return record if RecordForm.model_validate(record).fits_together else None
    except ValueError:
        return None


def _numbers(text: str) -> np.ndarray:
    """Those that base64 of little-endian float32 stands for. Raises ValueError where it stands for none."""
    return np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32)


def _digest(value: dict[str, Any] | Sequence[Any]) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
