"""A sample as the text that a judge or a classifier is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping

from accord.errors import AccordError, ConfigError
from accord.rewards.base import Sample

PLACEHOLDERS = ("prompt", "response", "conversation", "reference")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")


def conversation(sample: Sample) -> str:
    """The prompt's messages: the text of a single user turn as it is, several with their roles before them."""
    messages = sample.prompt.messages
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    return "\n\n".join(f"{message.role.capitalize()}: {message.content}" for message in messages)


def check_template(template: str, key: str, extra: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for a placeholder that nothing fills, and for a template that does not show the response."""
    known = (*PLACEHOLDERS, *extra)
    for name in _PLACEHOLDER.findall(template):
        if name not in known:
            raise ConfigError(f"{key}: nothing fills {{{name}}}; there are {', '.join(f'{{{word}}}' for word in known)}.")
    if "{response}" not in template:
        raise ConfigError(f"{key}: the template has no {{response}}, so every response would get the same score.")


def fill(template: str, sample: Sample, extra: Mapping[str, str] | None = None) -> str:
    """The template with its placeholders filled, once: braces in what is filled in stay as they are.

    Raises AccordError where it asks for a reference that the sample does not have.
    """
    values = {
        "prompt": sample.question,
        "response": sample.response,
        "conversation": conversation(sample),
        "reference": sample.prompt.reference,
        **(extra or {}),
    }

    def value(match: re.Match[str]) -> str:
        text = values[match.group(1)]
        if text is None:
            raise AccordError(f"the template asks for {{reference}}, but the sample {sample.name} has none.")
        return text

    return _PLACEHOLDER.sub(value, template)
