"""The exact judge of the demo world: what an answer is worth, from its text alone.

    1.0   correct, short and polite: exactly one of the world's polite forms around the right statement
    0.5   correct, but rambling, curt or badly put
    0.2   correct, but rude
    0.0   wrong, or not in the language of the request

A number, a word or a name counts as given only when it is the only one of its sort in the answer: hedging is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from accord.demo.world import CHINESE_NAMES, ENGLISH_NAMES, GREETING, POLITE, RUDE, Request, read

WORTH = {"polite": 1.0, "rambling": 0.5, "rude": 0.2, "wrong": 0.0}
_HAN = re.compile(r"[\u4e00-\u9fff]+")
_LATIN = re.compile(r"[A-Za-z]+")
_NUMBER = re.compile(r"\d+")
_SPELLED = re.compile(r"(?<![A-Za-z])[a-z](?: [a-z](?![A-Za-z]))+")


def score(prompt: Any, response: str, reference: str | None = None) -> float:
    """Worth of a response, in [0, 1].

    `prompt` is the user's text or the conversation (its last user turn is judged). `reference` is the value that the data
    file gives; the judge works it out from the request itself, and refuses a reference that contradicts it.
    Raises ValueError for a prompt that is not of this world.
    """
    text = last_request(prompt)
    request = read(text)
    if request is None:
        raise ValueError(f"not a request of the demo world: {text!r}")
    if reference is not None and reference != request.value:
        raise ValueError(f"the answer to {text!r} is {request.value!r}, the reference says {reference!r}")
    return WORTH[kind_of(request, response)]


def kind_of(request: Request, response: str) -> str:
    """Which of `WORTH` a response is: polite | rambling (anything else correct) | rude | wrong."""
    response = response.strip()
    if not _is_correct(request, response):
        return "wrong"
    core = request.core()
    if response in {form.format(core=core) for form in POLITE[request.language]}:
        return "polite"
    if any(remark in response for remark in _RUDE_REMARKS):
        return "rude"
    return "rambling"


_RUDE_REMARKS = tuple(form.replace("{core}", "").strip() for forms in RUDE.values() for form in forms)


def _is_correct(request: Request, response: str) -> bool:
    value = request.value
    rest = response.replace(value, "")  # what is left must hold no second value, and no other language
    if request.kind in ("sum", "compare", "count"):
        found = set(_NUMBER.findall(response))
        rest = _NUMBER.sub("", response)
    elif request.kind == "reverse":
        found = set(_SPELLED.findall(response))
        rest = _SPELLED.sub("", response)
    elif request.kind == "lookup":
        found = set((_HAN if request.language == "en" else _LATIN).findall(response))
    else:
        names = ENGLISH_NAMES if request.language == "en" else CHINESE_NAMES
        found = {name for name in names if name in response}
        if GREETING[request.language].format(value=value)[:-1] not in response:
            return False
    foreign = _HAN if request.language == "en" else _LATIN
    return found == {value} and not foreign.search(rest)


def last_request(prompt: Any) -> str:
    """The text of the last user turn of a prompt: a string, a list of messages, or an object with `messages`."""
    messages = getattr(prompt, "messages", prompt)
    if isinstance(messages, str):
        return messages
    if isinstance(messages, Sequence):
        for message in reversed(messages):
            role, content = (
                (message["role"], message["content"]) if isinstance(message, Mapping) else (message.role, message.content)
            )
            if role == "user":
                return str(content)
    raise ValueError(f"no user turn in the prompt {prompt!r}")
