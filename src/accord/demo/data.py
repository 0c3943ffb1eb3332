"""The demo world's data files, as a user would have them: plain JSON lines, nothing that only Accord could read.

sft.jsonl              demonstrations: good and bad ones mixed, as real ones are
preferences.jsonl      pairs of answers, labelled by the judge and, one time in ten, the wrong way round
prompts.jsonl          what PPO answers
heldout_prompts.jsonl  requests that no training file holds, for the judge: half English, half Chinese
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accord.demo import world
from accord.demo.judge import WORTH
from accord.demo.world import KINDS, LANGUAGES, MANNERS, Manner, Request
from accord.errors import DataError

FILES = {
    "sft": "sft.jsonl",
    "preferences": "preferences.jsonl",
    "prompts": "prompts.jsonl",
    "heldout": "heldout_prompts.jsonl",
}
SIZES = {"sft": 6000, "preferences": 6000, "prompts": 4000, "heldout": 480}
SFT_MIX: dict[Manner, float] = {"polite": 0.35, "rambling": 0.35, "rude": 0.3}
PAIR_MIX: dict[Manner, float] = {"polite": 0.25, "rambling": 0.4, "rude": 0.35}
WRONG = 0.2  # share of wrong answers, in whatever manner
LABEL_NOISE = 0.1
MULTI_TURN = 0.15  # share of conversations with an earlier exchange


def write(folder: str | Path, seed: int = 1) -> Path:
    """Write all files into `folder` (made if it is missing) and return it. The same seed gives the same bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"sft": _demonstrations, "preferences": _preferences, "prompts": _prompts, "heldout": _heldout}
    for name, make_rows in rows.items():
        rng = random.Random(f"accord demo {name} {seed}")
        with open(folder / FILES[name], "w", encoding="utf-8", newline="\n") as file:
            for row in make_rows(rng, SIZES[name]):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return folder


def ensure_data(seed: int = 1) -> Path:
    """The folder of the files for this seed in the cache (`$ACCORD_CACHE` or ~/.cache/accord), written when it is missing."""
    root = Path(os.environ.get("ACCORD_CACHE") or Path.home() / ".cache" / "accord")
    folder = root / f"demo-{seed}-{_version()}"
    if folder.is_dir():
        return folder
    beside = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".demo-", dir=root))
        write(beside, seed)
        try:
            os.rename(beside, folder)  # complete or absent
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same bytes
                raise
    except OSError as error:
        raise DataError(
            f"{folder}: the demo's data can't be written ({error.strerror or error}). Free some space and start the same command again, "
            "or set the variable ACCORD_CACHE to a folder that has more."
        ) from error
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


def data_path(name: str, seed: int = 1) -> Path:
    """The file behind `demo:<name>`, written when it is missing. Raises DataError for a name that is not in FILES."""
    if name not in FILES:
        raise DataError(f"demo:{name}: no such demo data. There are: {', '.join(f'demo:{known}' for known in FILES)}.")
    return ensure_data(seed) / FILES[name]


def _version() -> str:
    """Changes whenever the world or this file does, so that no stale cache is read."""
    digest = hashlib.sha256()
    for module in ("world.py", "data.py"):
        digest.update((Path(__file__).parent / module).read_bytes())
    return digest.hexdigest()[:8]


def _demonstrations(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        request = world.sample(rng)
        reply, _ = reply_to(rng, request, SFT_MIX)
        yield {"messages": [*conversation(rng, request), {"role": "assistant", "content": reply}]}


def _preferences(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        request = world.sample(rng)
        prompt = conversation(rng, request)
        (chosen, worth), (rejected, other) = reply_to(rng, request, PAIR_MIX), reply_to(rng, request, PAIR_MIX)
        while other == worth:  # a judge has no preference between answers that are worth the same
            rejected, other = reply_to(rng, request, PAIR_MIX)
        if (worth < other) != (rng.random() < LABEL_NOISE):
            chosen, rejected = rejected, chosen
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _prompts(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        yield {"messages": conversation(rng, world.sample(rng))}


def _heldout(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    number = 0
    while len(seen) < count:
        language = LANGUAGES[len(seen) % 2]
        request = world.sample(rng, heldout=True, kind=KINDS[number % len(KINDS)], language=language)
        number += 1  # a small kind runs out of held-out requests: the others then fill up
        if request.text not in seen:
            seen.add(request.text)
            row = {"messages": [{"role": "user", "content": request.text}], "reference": request.value}
            yield {**row, "kind": request.kind, "language": language}


def conversation(rng: random.Random, request: Request) -> list[dict[str, str]]:
    """The turns up to and with the request: sometimes an earlier exchange comes first, answered in any way."""
    turns = []
    if rng.random() < MULTI_TURN:
        earlier = world.sample(rng)
        turns = [
            {"role": "user", "content": earlier.text},
            {"role": "assistant", "content": reply_to(rng, earlier, SFT_MIX)[0]},
        ]
    return [*turns, {"role": "user", "content": request.text}]


def reply_to(rng: random.Random, request: Request, mix: dict[Manner, float]) -> tuple[str, float]:
    """An answer in a manner drawn from the mix, right or wrong, and what it is worth."""
    manner = rng.choices(MANNERS, [mix[each] for each in MANNERS])[0]
    right = rng.random() >= WRONG
    return world.answer(rng, request, manner, right), WORTH[manner if right else "wrong"]
