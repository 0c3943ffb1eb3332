"""`accord config`: show, schema, explain, presets. Nothing heavy is imported."""

from __future__ import annotations

import json
from collections.abc import Sequence

from accord.config import STAGES, dump_yaml, keys, load_config
from accord.config.loading import PRESETS, preset_names
from accord.config.messages import nearest, unknown
from accord.errors import ConfigError


def known_stage(stage: str) -> str:
    """The stage, or ConfigError naming the stages."""
    if stage not in STAGES:
        close = nearest(stage, STAGES)
        raise ConfigError(f"--stage {stage}: expected one of {', '.join(STAGES)}." + (f" Did you mean {close}?" if close else ""))
    return stage


def show(config: str | None, overrides: Sequence[str], stage: str | None) -> None:
    """Print the resolved configuration, of the whole run or as one stage sees it."""
    loaded = load_config(config, overrides)
    print(dump_yaml(loaded.for_stage(known_stage(stage)) if stage is not None else loaded), end="")


def schema() -> None:
    """Print JSON Schema."""
    print(json.dumps(keys.schema(), indent=2, ensure_ascii=False))


def explain(key: str) -> None:
    """Print a key's description, type and default; of a section, its keys; of nothing, every section."""
    path = tuple(int(part) if part.isdigit() else part for part in key.split(".")) if key else ()
    if path and keys.node_at(path) is None:
        raise ConfigError(f"{key}: {unknown(path)}")
    print("\n".join(keys.explanation(path)))


def presets() -> None:
    """Print each preset's name and the first line of its comment."""
    width = max(map(len, preset_names()), default=0)
    for name in preset_names():
        first = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[:1]
        print(f"{name:<{width}}  {first[0].lstrip('# ') if first and first[0].startswith('#') else ''}".rstrip())
