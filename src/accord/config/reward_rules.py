"""What a source of `ppo.rewards` cannot work with, said before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from urllib.parse import parse_qsl, urlsplit

from accord.config.messages import Path, Refusal, shown
from accord.config.reward_sections import (
    ClassifierReward,
    FormatReward,
    JudgeReward,
    LengthReward,
    RemoteReward,
    RewardSource,
)

_SECRET = re.compile(r"key|token|secret|password|signature|credential", re.IGNORECASE)


def reward_refusals(sources: Sequence[RewardSource]) -> Iterator[Refusal]:
    """Every refusal of every source, and of the sources together."""
    names: dict[str, int] = {}
    for i, source in enumerate(sources):
        path: Path = ("ppo", "rewards", i)
        if source.name is not None and source.name in names:
            yield Refusal(
                (*path, "name"),
                f"source {names[source.name]} is called {source.name} too. Give each its own name: it is its metric's.",
            )
        if source.name is not None:
            names.setdefault(source.name, i)
        yield from _of_one(path, source)
    if all(source.weight == 0 for source in sources):
        yield Refusal(("ppo", "rewards"), "every source weighs 0, so there is nothing to learn. Give one a weight.")


def _of_one(path: Path, source: RewardSource) -> Iterator[Refusal]:
    if isinstance(source, RemoteReward):
        yield from _address((*path, "url"), source.url, "headers_env: {Authorization: MY_TOKEN}")
    elif isinstance(source, JudgeReward):
        yield from _address((*path, "base_url"), source.base_url, "api_key_env: MY_KEY")
        if source.base_url.rstrip("/").endswith("/chat/completions"):
            yield Refusal(
                (*path, "base_url"), "the address without /chat/completions is expected, such as http://127.0.0.1:8000/v1."
            )
        low, high = source.scale
        if low >= high:
            yield Refusal((*path, "scale"), f"expected the lowest score, then the highest one, got [{low:g}, {high:g}].")
    elif isinstance(source, ClassifierReward):
        if source.template is not None and source.input in ("chat", "pair"):
            yield Refusal((*path, "template"), f"does nothing with input: {source.input}. Leave it out, or set input: text.")
    elif isinstance(source, LengthReward):
        yield from _length(path, source)
    elif isinstance(source, FormatReward):
        yield from _format(path, source)


def _address(path: Path, url: str, cure: str) -> Iterator[Refusal]:
    """No address of an HTTP service, or one that holds a secret, which would be written into every run's configuration."""
    try:
        parts = urlsplit(url)
        host, secret = parts.hostname, parts.username is not None or parts.password is not None
        _ = parts.port  # raises for what is no number
    except ValueError:
        parts, host, secret = urlsplit(""), None, False
    if parts.scheme not in ("http", "https") or not host:
        yield Refusal(path, f"expected an address that begins with http:// or https://, got {shown(url)}.")
    elif secret or any(_SECRET.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        yield Refusal(
            path, f"holds a secret, which would be written into the run's files. Name an environment variable instead: {cure}."
        )


def _length(path: Path, source: LengthReward) -> Iterator[Refusal]:
    low, high = source.min_tokens, source.max_tokens
    if low is None and high is None:
        yield Refusal((*path, "max_tokens"), "is needed (or min_tokens, or both): what length is wanted?")
    elif low is not None and high is not None and low > high:
        yield Refusal((*path, "min_tokens"), f"{low} is more than max_tokens {high}. Equal ones name one wanted length.")


def _format(path: Path, source: FormatReward) -> Iterator[Refusal]:
    if (source.pattern is None) == (source.valid is None):
        yield Refusal((*path, "pattern"), "give either a pattern or valid: json.")
        return
    if source.pattern is None:
        for key in ("match", "timeout", "fallback"):
            if getattr(source, key) != FormatReward.model_fields[key].default:
                yield Refusal((*path, key), "does nothing with valid: json. Leave it out.")
        return
    import regex

    try:
        regex.compile(source.pattern)
    except regex.error as error:
        yield Refusal((*path, "pattern"), f"is no regular expression: {error}.")
