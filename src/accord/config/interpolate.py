"""`${a.b}` → the value of that key (OmegaConf does the work; here its errors get the key and the place)."""

from __future__ import annotations

import re
from typing import Any

from accord.config.messages import Path, Refusal, nearest

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")


def interpolate(values: Any) -> tuple[Any, list[Refusal]]:
    """All interpolations in `values` resolved (a whole value keeps its type), and a refusal for each name that is not there."""
    if not isinstance(values, dict) or not _any_reference(values):
        return values, []
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    refusals: list[Refusal] = []

    def readable(value: Any, path: Path) -> Any:
        """What OmegaConf can read; what it can't (an open brace) is refused and taken out."""
        if isinstance(value, dict):
            return {key: readable(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [readable(item, (*path, i)) for i, item in enumerate(value)]
        if not (isinstance(value, str) and "${" in value):
            return value
        try:
            OmegaConf.create([value])
        except OmegaConfBaseException as error:
            if path[0] != "stages":  # those are read, and refused, once they are merged
                refusals.append(Refusal(path, _why(value, error)))
            return None
        return value

    checked = readable(values, ())
    tree = OmegaConf.create(_with_known_keys(checked))

    def resolved(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {key: resolved(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [resolved(item, (*path, i)) for i, item in enumerate(value)]
        if not (isinstance(value, str) and "${" in value):
            return value
        try:
            found = OmegaConf.select(tree, "".join(f"[{part}]" for part in path), throw_on_resolution_failure=True)
        except (OmegaConfBaseException, RecursionError) as error:
            refusals.append(Refusal(path, _why(value, error)))
            return None
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found

    # `stages` are overrides that are merged before they are resolved (Config.for_stage): as text they stay
    result = {key: value if key == "stages" else resolved(checked[key], (key,)) for key, value in values.items()}
    return result, refusals


def _with_known_keys(values: dict[str, Any]) -> dict[str, Any]:
    """The values over every key's default, so that a key that was not written can be referred to."""
    from accord.config.root import Config, merge, plain

    defaults = {name: plain_defaults(field.default) for name, field in Config.model_fields.items()}
    return merge(plain(defaults), values)


def plain_defaults(value: Any) -> Any:
    return value.model_dump(mode="json", warnings=False) if hasattr(value, "model_dump") else value


def _any_reference(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_any_reference(item) for item in value.values())
    if isinstance(value, list):
        return any(_any_reference(item) for item in value)
    return isinstance(value, str) and "${" in value


def _why(value: str, error: Exception) -> str:
    from accord.config.keys import all_keys

    if isinstance(error, RecursionError):
        return f"{value} refers to itself."
    for name in _REFERENCE.findall(value):
        close = nearest(name, all_keys())
        if name not in all_keys():
            return f"{value}: there is no key {name}." + (f" Did you mean ${{{close}}}?" if close else "")
    first = str(error).strip().splitlines()[0].rstrip(".")
    if "Recursive" in first:
        return f"{value} refers to itself."
    return f"{value} can't be resolved: {first}. For a plain dollar sign before a brace write \\${{."
