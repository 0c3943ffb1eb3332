"""Every key there is: its type in words, its default, its description (from the sections' JSON Schema)."""

from __future__ import annotations

from functools import cache
from typing import Any

from accord.config.fields import PATTERNS
from accord.config.messages import Path, dotted
from accord.config.sections import STAGES


@cache
def schema() -> dict[str, Any]:
    """JSON Schema of a configuration file (for editors); every key is optional in a file that extends another."""
    from accord.config.root import Config

    result = Config.model_json_schema()
    for section in result["$defs"].values():  # a list of sources may also be one path or one source (sections.as_sources)
        for node in section.get("properties", {}).values():
            if {"$ref": "#/$defs/Source"} in [branch.get("items") for branch in node.get("anyOf", [])]:
                node["anyOf"] = [{"type": "string"}, {"$ref": "#/$defs/Source"}, *node["anyOf"]]
    result["properties"]["extends"] = {
        "anyOf": [{"type": "string"}, {"type": "null"}],
        "default": None,
        "description": "A preset's name or a file whose values this file overrides.",
    }
    return result


def stage_names() -> tuple[str, ...]:
    return STAGES


def _resolve(node: dict[str, Any]) -> dict[str, Any]:
    """The node with its reference followed; a sibling description wins."""
    if "$ref" in node:
        target = schema()["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        return {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def _branches(node: dict[str, Any]) -> list[dict[str, Any]]:
    node = _resolve(node)
    inner = node.get("anyOf") or node.get("oneOf")
    return [leaf for branch in inner for leaf in _branches(branch)] if inner else [node]


def node_at(path: Path, values: Any = None) -> dict[str, Any] | None:
    """The schema of a key, or None where there is no such key.

    `values` (the whole configuration as it is written) say of which `type` an item is, where each type has keys of its own; a list's
    item may also be named by its type (`ppo.rewards.judge`).
    """
    if path[:1] == ("stages",) and len(path) > 2:
        return node_at(path[2:], _inside(_inside(values, "stages"), path[1]))
    node: dict[str, Any] | None = schema()
    for part in path:
        if node is None:
            return None
        found = None
        for branch in _of_type(_branches(node), values):
            if branch.get("type") == "array" and str(part).isdigit():
                items = branch.get("prefixItems") or []
                found = branch.get("items") or (items[int(part)] if int(part) < len(items) else None)
            elif branch.get("type") == "array":
                found = next((item for item in _branches(branch.get("items", {})) if type_of(item) == part), None)
            else:
                found = branch.get("properties", {}).get(part) or _mapped_values(branch)
            if found is not None:
                break
        node, values = found, _inside(values, part)
    return node


def _mapped_values(branch: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of the values of a mapping of texts or numbers, whatever its keys."""
    values = branch.get("additionalProperties") or next(iter(branch.get("patternProperties", {}).values()), None)
    return values if isinstance(values, dict) and values.get("type") in ("string", "number") else None


def _inside(values: Any, part: str | int) -> Any:
    if isinstance(values, dict):
        return values.get(part)
    return values[part] if isinstance(values, list) and isinstance(part, int) and part < len(values) else None


def type_of(branch: dict[str, Any]) -> str | None:
    """The word that tells this section from its alternatives, such as "function"."""
    return branch.get("properties", {}).get("type", {}).get("const")


def _of_type(branches: list[dict[str, Any]], values: Any) -> list[dict[str, Any]]:
    """The branch whose type the values name; all where they name none."""
    chosen = [branch for branch in branches if type_of(branch) is not None and type_of(branch) == _inside(values, "type")]
    return chosen or branches


def children(path: Path, values: Any = None) -> list[str]:
    """The keys of the section at `path`."""
    node = node_at(path, values)
    if node is None:
        return []
    inner = _at(path, values)
    names = [name for branch in _of_type(_branches(node), inner) for name in branch.get("properties", {})]
    return list(dict.fromkeys(names))


def _at(path: Path, values: Any) -> Any:
    for part in path:
        values = _inside(values, part)
    return values


@cache
def all_keys() -> tuple[str, ...]:
    """Every dotted key, sections included."""
    found: list[str] = []

    def walk(path: Path) -> None:
        for name in children(path):
            found.append(dotted((*path, name)))
            walk((*path, name))

    walk(())
    return tuple(found)


def description(path: Path, values: Any = None) -> str:
    node = node_at(path, values)
    return str(_resolve(node).get("description", "")) if node is not None else ""


def options(path: Path, values: Any = None) -> list[str]:
    """The words a key may be, where it is one of a few."""
    node = node_at(path, values)
    if node is None:
        return []
    return [
        str(word) for branch in _branches(node) for word in ([branch["const"]] if "const" in branch else branch.get("enum", []))
    ]


def types(path: Path) -> list[str]:
    """The types that the section at `path` may be of."""
    node = node_at(path)
    return [] if node is None else [name for branch in _branches(node) if (name := type_of(branch)) is not None]


def expected(path: Path, values: Any = None) -> str:
    """A key's type in words: "a number greater than 0 or null"."""
    node = node_at(path, values)
    return _words(node) if node is not None else ""


def _words(node: dict[str, Any]) -> str:
    branches = _branches(node)
    names = [type_of(branch) for branch in branches]
    if None not in names and len(names) > 1:
        return f"a section {{type: {' | '.join(map(str, names))}, …}}"
    words = [_one(branch) for branch in branches]
    words = list(dict.fromkeys(words))
    if "null" in words:
        words = [word for word in words if word != "null"] + ["null"]
    return " or ".join(words)


def _one(node: dict[str, Any]) -> str:
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(str(word) for word in node["enum"])
    kind = node.get("type")
    if kind in ("number", "integer"):
        noun = "a whole number" if kind == "integer" else "a number"
        low, high = node.get("minimum"), node.get("maximum")
        above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
        limits = [
            text
            for value, text in (
                (above, f"greater than {above:g}" if above is not None else ""),
                (low, f"of at least {low:g}" if low is not None else ""),
                (below, f"less than {below:g}" if below is not None else ""),
                (high, f"of at most {high:g}" if high is not None else ""),
            )
            if value is not None
        ]
        return " ".join([noun, " and ".join(limits)]).strip()
    if kind == "string":
        return PATTERNS.get(node["pattern"], f"text like {node['pattern']}") if "pattern" in node else "text"
    if kind == "boolean":
        return "true or false"
    if kind == "null":
        return "null"
    if kind == "array":
        inner = node.get("prefixItems")
        if inner:
            return f"a list of {len(inner)}, each {_words(inner[0])}"
        return f"a list of {_words(node['items'])}" if "items" in node and _words(node["items"]) else "a list"
    if kind == "object":
        names = list(node.get("properties", {}))
        return "a section {" + ", ".join(names) + "}" if names else "a mapping"
    return ""


def default_text(path: Path) -> str:
    """The default as it would be written in YAML, or "" for a key that must be given."""
    import json

    node = node_at(path)
    node = _resolve(node) if node is not None else {}
    return json.dumps(node["default"], ensure_ascii=False) if "default" in node else ""


def explanation(path: Path) -> list[str]:
    """Lines that explain a key, or a section with its keys."""
    names = children(path)
    if not path:
        width = max(map(len, names))
        return [f"{name:<{width}}  {description((name,))}" for name in names] + [
            "",
            "accord config explain SECTION lists its keys.",
        ]
    lines = [f"{dotted(path)}: {description(path)}"]
    if not names:
        default = default_text(path)
        lines += [f"  type     {expected(path)}", f"  default  {default}" if default else "  must be given"]
        return lines + _alternatives((*path, 0), path)
    if len(types(path)) > 1:
        return lines + _alternatives(path, path[:-1])
    width = max(map(len, names))
    for name in names:
        inner = (*path, name)
        default = default_text(inner)
        if children(inner) and default not in ("null", ""):
            default = "{…}"
        told = f"default {default}" if default else "must be given"
        lines.append(f"  {name:<{width}}  {description(inner)}")
        lines.append(f"  {'':<{width}}  {expected(inner)}; {told}")
    return lines


def _alternatives(item: Path, whole: Path) -> list[str]:
    """A line for each type that an item of the list `whole` may be of."""
    branches = [branch for branch in _branches(node_at(item) or {}) if type_of(branch) is not None]
    if len(branches) < 2:
        return []
    width = max(len(str(type_of(branch))) for branch in branches)
    lines = [
        f"  {type_of(branch):<{width}}  {branch.get('description', '')} {{{', '.join(branch['properties'])}}}"
        for branch in branches
    ]
    return [f"An item is of one of these types; accord config explain {dotted(whole)}.TYPE lists its keys.", *lines]
