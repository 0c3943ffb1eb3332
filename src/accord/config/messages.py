"""What a refusal looks like: place, key, what is wrong, what was expected, the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from accord.config.fields import PATTERNS
from accord.errors import ConfigError

Path = tuple[str | int, ...]
Locations = dict[Path, str]  # key → "file:line" or "command line"

# what other systems call it → what it is called here
ALIASES = {
    "learning_rate": "train.lr",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.max_tokens",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "model_name_or_path": "model.path",
    "output_dir": "run.dir",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "kl_coef": "ppo.kl.coef",
    "init_kl_coef": "ppo.kl.coef",
    "cliprange": "ppo.clip",
    "cliprange_value": "ppo.value_clip",
    "vf_coef": "ppo.value_coef",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "bf16": "train.precision",
    "ema": "train.ema_decay",
    "seed": "run.seed",
}


@dataclass(frozen=True)
class Refusal:
    """A refused key and why."""

    path: Path
    why: str


def dotted(path: Iterable[str | int]) -> str:
    return ".".join(str(part) for part in path)


def place_of(path: Path, locations: Locations) -> str:
    """Where the key was written, or the innermost section around it, or the first key below it ("" in code)."""
    for length in range(len(path), 0, -1):
        if path[:length] in locations:
            return locations[path[:length]]
    return next((place for known, place in locations.items() if known[: len(path)] == path), "")


def nearest(name: str, names: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return close[0] if close else None


def refuse(refusals: Iterable[Refusal], locations: Locations) -> None:
    """Raise ConfigError with one line for each refusal, if there is any.

    A refusal of a section is left out where something inside it is refused: the inner one says what to do.
    """
    found = list(refusals)
    paths = {refusal.path for refusal in found}
    lines = []
    for refusal in found:
        depth = len(refusal.path)
        if any(len(path) > depth and path[:depth] == refusal.path for path in paths):
            continue
        place = place_of(refusal.path, locations)
        lines.append((f"{place}  " if place else "") + f"{dotted(refusal.path)}: {refusal.why}")
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))


def validation_refusals(error: ValidationError, values: Any) -> list[Refusal]:
    """What pydantic refused, in our words."""
    return [_refusal(item, values) for item in error.errors(include_url=False)]


def _refusal(item: Any, values: Any) -> Refusal:
    from accord.config import keys

    path = _own_path(item["loc"], values)
    kind, got = item["type"], item.get("input")
    if kind == "extra_forbidden" or (kind == "invalid_key"):
        return Refusal(path, unknown(path, values))
    if kind == "literal_error" and item["loc"][-1:] == ("[key]",):
        if path[:1] == ("stages",):
            return Refusal(path, f"no such stage. The stages are {', '.join(keys.stage_names())}.")
        names = item["ctx"]["expected"].replace("'", "")  # pydantic's: 'sigmoid', 'ipo' or 'robust'
        return Refusal(path, f"{dotted(path[:-1])} has no such entry: expected {names}.")
    if kind == "string_pattern_mismatch" and item["loc"][-1:] == ("[key]",):
        return Refusal(path, f"expected a name of {PATTERNS[item['ctx']['pattern']]}.")
    if kind == "missing":
        return Refusal(path, f"is needed. {keys.description(path, values)}".rstrip())
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        given = got.get("type") if isinstance(got, dict) else got
        words = keys.types(path)
        text = f"expected one of {', '.join(words)}, got {shown(given)}."
        close = nearest(given, words) if isinstance(given, str) else None
        return Refusal((*path, "type"), text + (f" Did you mean {close}?" if close else ""))
    expected = keys.expected(path, values)
    if "environment variable" in expected:  # what stands there instead may be the secret itself
        return Refusal(path, f"expected {expected}; the secret itself does not belong into a configuration.")
    text = (
        f"expected {expected}, got {shown(got)}." if expected else f"{item['msg'][0].lower()}{item['msg'][1:]}, got {shown(got)}."
    )
    options = keys.options(path, values)
    if isinstance(got, str) and options and (close := nearest(got, options)):
        text += f" Did you mean {close}?"
    if kind == "string_type" and isinstance(got, (int, float, bool)):
        text += f' For text write it in quotes: "{got}".'
    if isinstance(got, str) and "number" in expected and got.lower() in ("inf", "nan", "infinity"):
        text += " Numbers must be finite."
    return Refusal(path, text)


def unknown(path: Path, values: Any = None) -> str:
    """Why a key is refused that does not exist, with the nearest one that does."""
    from accord.config import keys

    name, parent = str(path[-1]), path[:-1]
    if "." in name and (close := nearest(name, keys.all_keys())):
        section, _, rest = close.partition(".")
        return f"no such key. In a file, dots are levels: write {section}: {{{rest}: …}}."
    siblings = keys.children(parent, values)
    close = nearest(name, siblings)
    if close is None and name in ALIASES:
        return f"no such key. Did you mean {ALIASES[name]}?"
    if close is not None:
        return f"no such key. Did you mean {dotted((*parent, close))}?"
    same_leaf = [key for key in keys.all_keys() if key.rsplit(".", 1)[-1] == name]
    if same_leaf:
        return f"no such key. Did you mean {same_leaf[0]}?"
    where = dotted(parent)
    return "no such key." + (f" {where or 'The configuration'} has: {', '.join(siblings)}." if siblings else "")


def shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (dict, list)):
        text = str(value)
        return text if len(text) <= 60 else text[:57] + "…"
    return repr(value)


def _own_path(loc: Path, values: Any) -> Path:
    """pydantic's location without the names of union branches: the path as it is written in the values."""
    path: list[str | int] = []
    current = values
    for number, part in enumerate(loc):
        last = number == len(loc) - 1
        if part == "[key]":
            continue
        if isinstance(current, dict) and (part in current or last):
            path.append(part)
            current = current.get(part)
        elif isinstance(current, list) and isinstance(part, int):
            path.append(part)
            current = current[part] if part < len(current) else None
    return tuple(path)
