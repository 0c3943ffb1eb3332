"""One text, two tokenizers: where tokens begin, and where the other tokenizer has read as much."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accord.data.alignment import characters_before, first_beyond
from accord.data.records import Message
from accord.data.template import ConversationEncoder
from accord.models.scratch import train_tokenizer
from tests.conftest import TEXTS

ANSWERS = ["你好,世界!", "a 😀👍🏽 b", "naïve café", "", " ", "  leading and trailing \n", "<|im_end|> is text here", "�", "éé�é"]


@pytest.fixture(scope="module")
def other() -> ConversationEncoder:
    """Few merges: nearly one token a byte."""
    return ConversationEncoder(train_tokenizer(TEXTS[:1], 270))


def plainly(encoder: ConversationEncoder, ids: list[int], text: str) -> list[int]:
    """a_t by its definition, decoding every beginning anew."""
    return [min(len(encoder.decode(ids[:t]).rstrip("\ufffd")), len(text)) for t in range(len(ids))]


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 511), max_size=24), cut=st.integers(0, 30))
def test_tokens_begin_after_what_those_before_them_decode_to(tiny_tokenizer: Any, ids: list[int], cut: int):
    """Any tokens: bytes that are no text, special tokens, a text that a stop string has cut."""
    encoder = ConversationEncoder(tiny_tokenizer)
    ids = [i for i in ids if i < len(tiny_tokenizer)]
    text = encoder.decode(ids)[:cut]
    assert characters_before(ids, encoder.decode, text).tolist() == plainly(encoder, ids, text)


def test_a_token_inside_a_character_begins_before_that_character(tiny_tokenizer: Any):
    """Every byte a token of its own."""
    text = "a😀é你b"
    byte = {tiny_tokenizer.decode([i]): i for i in range(len(tiny_tokenizer))}
    ids: list[int] = []
    for character in text:
        backend = tiny_tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(character)
        ids += [tiny_tokenizer.convert_tokens_to_ids(letter) for piece, _ in backend for letter in piece]
    assert len(ids) == len(text.encode()) and "a" in byte
    encoder = ConversationEncoder(tiny_tokenizer)
    assert encoder.decode(ids) == text
    assert characters_before(ids, encoder.decode, text).tolist() == [0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 4]


def test_bytes_that_are_no_text_count_once_text_follows(tiny_tokenizer: Any):
    encoder = ConversationEncoder(tiny_tokenizer)
    a = tiny_tokenizer.convert_tokens_to_ids("a")
    byte = tiny_tokenizer.convert_tokens_to_ids("ð")  # 0xF0, the beginning of an emoji
    text = encoder.decode([a, byte, a, a])
    assert text == "a\ufffdaa"
    assert characters_before([a, byte, a, a], encoder.decode, text).tolist() == [0, 1, 1, 3]
    assert characters_before([a, byte, byte], encoder.decode, encoder.decode([a, byte, byte])).tolist() == [0, 1, 1]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("template", ["chatml", "alpaca", "human-assistant"])
def test_what_was_read_is_what_the_tokens_hold(tiny_tokenizer: Any, answer: str, template: str):
    """Decoded one by one, the tokens before the first beyond a hold no character of the answer after a, and nearly all before it."""
    import copy

    encoder = ConversationEncoder(copy.deepcopy(tiny_tokenizer), template)
    prompt, response, read = encoder.encode_answer([Message("user", "你好")], answer)
    assert read[-1] == len(answer) + 1 and len(read) == len(response)
    tree = encoder.encode_responses([Message("user", "你好")], [answer])
    assert [*prompt, *response] == tree.sequence(tree.leaves[0]).tolist()
    for a in range(len(answer) + 1):
        (row,) = first_beyond(read, [a])
        held = encoder.tokenizer.decode(response[:row]).rstrip("\ufffd")
        assert answer.lstrip()[: len(held.strip())].startswith(held.strip()) and len(held.strip()) <= a
    (row,) = first_beyond(read, [len(answer)])
    assert encoder.tokenizer.decode(response[:row]).strip() == answer.strip(), "the end is valued after all of the answer"
