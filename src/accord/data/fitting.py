"""Records → trees no longer than the limit: left out, cut at the front or cut at the end, never in silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from accord.data.formats import UnusableError
from accord.data.needs import IDENTICAL
from accord.data.records import Demonstration, Labelled, Message, Messages, PlainText, Preference, Prompt, Ranking, Record, Scored
from accord.data.template import ConversationEncoder, TrainOn
from accord.data.trees import Segment, Tree, single

Truncate = Literal["drop", "left", "right"]
TOO_LONG = "too long"


def encode_record(encoder: ConversationEncoder, record: Record, train_on: TrainOn = "assistant") -> Tree:
    """The record's tree, however long. Raises DataError if the template refuses it."""
    if isinstance(record, Demonstration):
        return encoder.encode(record.messages, train_on)
    if isinstance(record, Preference):
        return encoder.encode_responses(record.prompt, [record.chosen, record.rejected])
    if isinstance(record, Ranking):
        return encoder.encode_responses(record.prompt, record.responses)
    if isinstance(record, Scored | Labelled):
        return encoder.encode_responses(record.prompt, [record.response])
    if isinstance(record, Prompt):
        ids = encoder.encode_prompt(record.messages)
        return single(ids, [False] * len(ids))
    return encoder.encode_text(record.text)


def fit(
    encoder: ConversationEncoder, record: Record, max_length: int, truncate: Truncate, train_on: TrainOn = "assistant"
) -> tuple[Tree, Record, bool]:
    """The record's tree with sequences of at most `max_length` tokens, the record it now is, and whether it was cut.

    `left` leaves out the oldest turns of the prompt, then the beginning of the last one; `right` cuts the answers, which then have no end
    token. A ranking loses the answers that are the same tokens as an earlier one. Raises UnusableError if it can't be made to fit, or
    nothing to train on would be left.
    """
    tree, record = _distinct(encode_record(encoder, record, train_on), record)
    if tree.longest <= max_length:
        return tree, record, False
    if truncate == "drop":
        raise UnusableError(TOO_LONG)
    if truncate == "right":
        if isinstance(record, Prompt):
            raise UnusableError(f"{TOO_LONG} (a prompt has no answer to cut)")
        return *_distinct(_cut_right(tree, max_length), record), True
    if isinstance(record, PlainText):
        segment = tree.segments[0]
        trained = segment.trained[-max_length:].copy()
        trained[0] = False
        return Tree((Segment(segment.tokens[-max_length:], trained),)), record, True
    shorter = _shorten(record, lambda r: encode_record(encoder, r, train_on).longest <= max_length)
    return *_distinct(encode_record(encoder, shorter, train_on), shorter), True


def _distinct(tree: Tree, record: Record) -> tuple[Tree, Record]:
    """Answers that differ as text can be the same tokens (trimmed by the template, or cut): a ranking goes on without the later ones.

    Raises UnusableError if no two answers of different ranks are left; a pair's are always two.
    """
    if not isinstance(record, Preference | Ranking):
        return tree, record
    kept: list[int] = []  # numbers of the leaves
    for i, leaf in enumerate(tree.leaves):
        if not any(np.array_equal(tree.segments[leaf].tokens, tree.segments[tree.leaves[k]].tokens) for k in kept):
            kept.append(i)
    if len(kept) == len(tree.leaves):
        return tree, record
    if isinstance(record, Preference) or not (thinner := record.only(kept)).ordered:
        raise UnusableError(IDENTICAL)
    gone = set(tree.leaves) - {tree.leaves[k] for k in kept}
    return Tree(tuple(segment for i, segment in enumerate(tree.segments) if i not in gone)), thinner


def _cut_right(tree: Tree, max_length: int) -> Tree:
    shared = len(tree.segments[0]) if len(tree.segments) > len(tree.leaves) else 0
    room = max_length - shared
    if room < 1:
        raise UnusableError(TOO_LONG)
    cut = [Segment(s.tokens[:room], s.trained[:room], s.parent) for s in tree.segments[1 if shared else 0 :]]
    tree = Tree((*tree.segments[: 1 if shared else 0], *cut))
    if not all(tree.sequence_trained(leaf).any() for leaf in tree.leaves):
        raise UnusableError(TOO_LONG)
    return tree


def _shorten(record: Record, fits: Callable[[Record], bool]) -> Record:
    """Fewer and fewer turns of the prompt (a system turn stays), then less and less of its last turn."""
    prompt = _prompt_of(record)
    system = prompt[:1] if prompt and prompt[0].role == "system" else ()
    turns = prompt[len(system) :]
    while True:
        start = next((i for i in range(1, len(turns)) if turns[i].role == "user"), None)
        if start is None:
            break
        turns = turns[start:]
        if fits(shorter := _with_prompt(record, (*system, *turns))):
            return shorter
    content = turns[0].content
    low, high = 1, len(content)  # the smallest number of characters to cut that makes it fit lies in [low, high]

    def cut(count: int) -> Record:
        return _with_prompt(record, (*system, Message(turns[0].role, content[count:]), *turns[1:]))

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(cut(middle)) else (middle + 1, high)
    if not content[low:].strip() or not fits(cut(low)):
        raise UnusableError(TOO_LONG)
    return cut(low)


def _prompt_of(record: Record) -> Messages:
    if isinstance(record, Prompt):
        return record.messages
    if isinstance(record, Demonstration):
        return record.messages[:-1]
    assert not isinstance(record, PlainText)
    return record.prompt


def _with_prompt(record: Record, prompt: Messages) -> Record:
    if isinstance(record, Prompt):
        return replace(record, messages=prompt)
    if isinstance(record, Demonstration):
        return replace(record, messages=(*prompt, record.messages[-1]))
    assert not isinstance(record, PlainText)
    return replace(record, prompt=prompt)
