"""From a file or a preset, what it extends, and the command line's overrides to a `Config`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from accord.config import rules
from accord.config.messages import Locations, Path, Refusal, dotted, nearest, refuse
from accord.config.root import Config, build, merge
from accord.config.sections import as_sources
from accord.config.yaml_lines import read_file, read_text
from accord.errors import ConfigError

PRESETS = FilePath(__file__).parent / "presets"
COMMAND_LINE = "command line"


def load_config(
    config: str | FilePath | None = None, overrides: Sequence[str] = (), *, stage: str | None = None, pipeline: bool = False
) -> Config:
    """Read CONFIG (a file, else a preset's name), what it `extends`, then `key=value` overrides.

    With `stage` the result is that stage's configuration and what the stage can't start without is checked; with `pipeline` the
    same is checked for every stage of `pipeline.stages`. Without either only what is written is checked.
    Raises ConfigError; each line names the key, the place, what was expected, and the nearest valid name.
    """
    changes, extends = _parse_overrides(overrides)
    values: dict[str, Any] = {}
    locations: Locations = {}
    name = stage or "accord"
    if config is not None:
        path = find_config(config)
        name = path.stem
        values, locations = _read_chain(path, extends)
    elif extends is not None:
        values, locations = _read_chain(find_config(extends), None)
    values, locations = _apply_overrides(values, locations, changes)
    whole = build(values, name=name, locations=locations)
    for listed in whole.stages:  # a mistake in an override is found now, not when its stage begins
        whole.for_stage(listed)
    if pipeline:
        refuse(rules.missing_for_pipeline(whole), locations)
    if stage is None:
        return whole
    chosen = whole.for_stage(stage)
    refuse(rules.missing_for_stage(chosen), locations)
    return chosen


def preset_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def find_config(config: str | FilePath) -> FilePath:
    """The file of that name, else the preset. Raises ConfigError naming the presets."""
    path, text = FilePath(config), str(config)
    if path.is_file():
        return path
    preset = PRESETS / f"{text}.yaml"
    if text in preset_names():
        return preset
    if path.is_dir():
        inside = path / "config.yaml"
        hint = f" Did you mean {inside}?" if inside.is_file() else ""
        raise ConfigError(f"{text}: a folder, not a configuration file.{hint}")
    close = nearest(text, preset_names())
    raise ConfigError(
        f"{text}: no such file, and no preset of that name. "
        + (f"Did you mean {close}? " if close else "")
        + f"The presets are {', '.join(preset_names())}."
    )


def _read_chain(path: FilePath, extends: str | None, seen: tuple[FilePath, ...] = ()) -> tuple[dict[str, Any], Locations]:
    """The file's values over those of what it extends. `extends` (from the command line) replaces the file's own."""
    if path.resolve() in seen:
        raise ConfigError(f"{path}: extends itself ({' → '.join(p.name for p in (*seen, path))}).")
    values, locations = read_file(path)
    base = values.pop("extends", None)
    place = locations.pop(("extends",), str(path))
    if extends is not None:
        base, place = extends, COMMAND_LINE
    if base is None:
        return values, locations
    if not isinstance(base, str):
        raise ConfigError(f"{place}  extends: expected a preset's name or a file, got {base!r}.")
    beside = path.parent / base  # a file beside this one wins over one in the working directory
    try:
        found = beside if beside.is_file() and extends is None else find_config(base)
    except ConfigError as error:
        raise ConfigError(f"{place}  extends: {error}") from None
    below, below_locations = _read_chain(found, None, (*seen, path.resolve()))
    return merge(below, values), {**below_locations, **locations}


def _parse_overrides(overrides: Sequence[str]) -> tuple[list[tuple[Path, Any]], str | None]:
    """`key=value` texts → (path, value) pairs, and what `extends=` names."""
    changes: list[tuple[Path, Any]] = []
    extends: str | None = None
    for text in overrides:
        key, equals, written = text.partition("=")
        key = key.strip().lstrip("+")
        if not equals or not key:
            raise ConfigError(f"{COMMAND_LINE}  {text}: expected key=value, such as dpo.beta=0.2.")
        if not written.strip():
            raise ConfigError(f"{COMMAND_LINE}  {key}: no value. Write {key}=null for none, or {key}='\"\"' for empty text.")
        try:
            value = "-" if written.strip() == "-" else read_text(written, COMMAND_LINE)  # standard input, not an empty list
        except ConfigError:
            value = written  # a template or a path that is no YAML is text
        if key == "extends":
            extends = str(value)
            continue
        if key == "stages" and not isinstance(value, dict):  # short for pipeline.stages
            key, value = "pipeline.stages", [s.strip() for s in value.split(",")] if isinstance(value, str) else value
        changes.append((tuple(int(part) if part.isascii() and part.isdigit() else part for part in key.split(".")), value))
    return changes, extends


def _apply_overrides(
    values: dict[str, Any], locations: Locations, changes: Sequence[tuple[Path, Any]]
) -> tuple[dict[str, Any], Locations]:
    values = merge(values, {})
    for path, value in changes:
        values = _set(values, path, value, ())
        # what was written below a key that is now replaced is no longer where it was
        gone = [known for known in locations if known[: len(path)] == path]
        locations = {known: place for known, place in locations.items() if known not in gone or isinstance(value, dict)}
        locations[path] = COMMAND_LINE
        for stage, section in (values.get("stages") or {}).items() if isinstance(values.get("stages"), dict) else ():
            if path[0] != "stages" and _speaks_of(
                section, path
            ):  # the command line has the last word, over a stage's own value too
                values = _set(values, ("stages", stage, *path), value, ())
                locations[("stages", stage, *path)] = COMMAND_LINE
    return values, locations


def _speaks_of(section: Any, path: Path) -> bool:
    """Whether `section` gives a value for `path`, for something above it, or for something below it."""
    for part in path:
        if not isinstance(section, dict):
            return True
        if part not in section:
            return False
        section = section[part]
    return True


def _set(current: Any, path: Path, value: Any, done: Path) -> Any:
    """`current` with the item at `path` set; mappings are merged, missing levels are made, a list's item is named by its number."""
    if not path:
        return merge(current, value)
    part, rest = path[0], path[1:]
    if isinstance(part, int):
        items = _as_list(current, done)
        if part > len(items):
            refuse([Refusal((*done, part), f"there are {len(items)} items, numbered from 0.")], {(*done, part): COMMAND_LINE})
        if part == len(items):
            items = [*items, {} if rest else None]
        return [_set(item, rest, value, (*done, part)) if i == part else item for i, item in enumerate(items)]
    if current is None:
        current = {}
    if not isinstance(current, dict):
        refuse([Refusal((*done, *path), f"{dotted(done)} is {current!r}, not a section.")], {(*done, *path): COMMAND_LINE})
    return {**current, part: _set(current.get(part), rest, value, (*done, part))}


def _as_list(current: Any, path: Path) -> list[Any]:
    if isinstance(current, list):
        return current
    if path[-1:] in (("train",), ("valid",), ("ptx_data",), ("judge_prompts",)):
        return list(as_sources(current) or [])
    if current is None:  # not written: the default is what its items are counted in
        default: Any = Config().to_dict()
        for part in path[2:] if path[:1] == ("stages",) else path:
            default = default.get(part) if isinstance(default, dict) else None
        if isinstance(default, list):
            return default
    refuse([Refusal(path, "not a list, so it has no items.")], {path: COMMAND_LINE})
    return []
