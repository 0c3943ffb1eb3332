"""YAML with the line of every key (`yaml.compose`), read by YAML 1.2's rules: `1e-5` is a number, `no` is a word."""

from __future__ import annotations

import re
from pathlib import Path as FilePath
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from accord.config.messages import Locations, Path
from accord.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-5 for text, `no` for false and 1:30 for ninety; a configuration must not."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+."),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"^<<$", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def read_file(path: FilePath) -> tuple[dict[str, Any], Locations]:
    """The file's values and the place (`file:line`) of every key. Raises ConfigError for what is no mapping in UTF-8 YAML."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}.") from None
    locations: Locations = {}
    values = read_text(text, str(path), locations)
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections (run, model, data, …), got {type(values).__name__}.")
    return values, locations


def read_text(text: str, name: str, locations: Locations | None = None) -> Any:
    """The values of a YAML text; places of its keys are added to `locations`."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)  # refuses characters that YAML has no place for
        node = loader.get_single_node()
        return None if node is None else _Builder(loader, name, locations).value(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{line}  not readable as YAML: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}  not readable as YAML: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{name}  not readable as YAML: nested too deeply.") from None
    finally:
        if loader is not None:
            loader.dispose()


class _Builder:
    """Turns composed nodes into values, noting where each key stands."""

    def __init__(self, loader: _Loader, name: str, locations: Locations | None):
        self.loader, self.name, self.locations = loader, name, locations
        self.open: set[int] = set()  # nodes being built: an alias to one of them is a loop

    def value(self, node: Node, path: Path) -> Any:
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise self._odd_tag(node)
        if id(node) in self.open:
            raise ConfigError(f"{self._place(node)}  an alias refers to the mapping or list it stands in.")
        self.open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [self._noted(item, (*path, i), item) for i, item in enumerate(node.value)]
            return self._mapping(node, path) if isinstance(node, MappingNode) else None
        finally:
            self.open.discard(id(node))

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for source in value_node.value if isinstance(value_node, SequenceNode) else [value_node]:
                    value = self.value(source, path)
                    if not isinstance(value, dict):
                        raise ConfigError(f"{self._place(key_node)}  << takes a mapping.")
                    merged = {**value, **merged}
                continue
            if not isinstance(key_node, ScalarNode):
                raise ConfigError(f"{self._place(key_node)}  a key must be a word.")
            key = key_node.value
            if key in own:
                raise ConfigError(f"{self._place(key_node)}  {'.'.join(map(str, (*path, key)))}: written twice in this section.")
            own[key] = self._noted(value_node, (*path, key), key_node)
        return {**merged, **own}

    def _noted(self, node: Node, path: Path, at: Node) -> Any:
        if self.locations is not None:
            self.locations[path] = self._place(at)
        return self.value(node, path)

    def _scalar(self, node: ScalarNode) -> Any:
        kind = node.tag.rsplit(":", 1)[-1]
        if kind == "str":
            return node.value
        if kind == "null":
            return None
        if kind == "bool":
            return node.value.lower() == "true"
        if kind == "int":
            try:
                return int(node.value)
            except ValueError:  # Python reads at most 4300 digits
                raise ConfigError(f"{self._place(node)}  a number of {len(node.value)} digits is too long.") from None
        if kind == "float":
            return float(
                node.value.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf").lower().replace(".nan", "nan")
            )
        raise self._odd_tag(node)

    def _odd_tag(self, node: Node) -> ConfigError:
        return ConfigError(f"{self._place(node)}  the tag {node.tag} is not understood. Write plain values.")

    def _place(self, node: Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"
