"""`accord chat`: several turns, streaming, history."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accord.commands import chat as command
from accord.commands.inference import load_speaker
from accord.commands.inference import settings as command_settings
from accord.data.records import Message
from accord.engine.generate import TextStream, before_stop
from accord.errors import ConfigError


def conversation(folder, *overrides: str, system: str | None = None) -> command.Conversation:
    config = command_settings("chat", overrides, command.READS)
    return command.Conversation(load_speaker(str(folder), config), system, 1)


def scripted(talker: command.Conversation, script: str) -> tuple[str, str]:
    answers, notes = io.StringIO(), io.StringIO()
    command.talk(talker, io.StringIO(script), answers, notes)
    return answers.getvalue(), notes.getvalue()


def test_a_scripted_conversation_in_both_languages_answers_every_turn_and_remembers(tiny_folder):
    talker = conversation(tiny_folder(), "generate.max_new_tokens=10")
    answers, _ = scripted(talker, "Hello there\n你好,三加四等于几?\n\nAnd now?\n")
    assert [turn.role for turn in talker.turns] == ["user", "assistant"] * 3
    assert talker.turns[2].content == "你好,三加四等于几?"
    assert answers == "".join(turn.content + "\n" for turn in talker.turns if turn.role == "assistant")


def test_the_answer_is_what_the_whole_history_calls_for(tiny_folder):
    talker = conversation(tiny_folder(), "generate.max_new_tokens=10", "generate.temperature=0", system="Be kind.")
    scripted(talker, "Hello\nMore\n")
    speaker = talker.speaker
    ids = speaker.encoder.encode_prompt((Message("system", "Be kind."), *talker.turns[:3]))
    assert talker.turns[3].content == speaker.text(speaker.generator.generate([ids], speaker.params)[0].token_ids)


def test_clear_starts_anew_quit_ends_and_unknown_commands_are_not_sent(tiny_folder):
    talker = conversation(tiny_folder(), "generate.max_new_tokens=5")
    answers, notes = scripted(talker, "one\n/clear\n/cler\ntwo\n/quit\nnever\n")
    assert [turn.content for turn in talker.turns if turn.role == "user"] == ["two"]
    assert "no command /cler" in notes and "a new conversation" in notes
    first, *_ = answers.split("\n")
    talker.clear()
    assert talker.say("one") == first  # nothing of the earlier conversation is left, the seeds neither


def test_a_backslash_continues_the_message(tiny_folder):
    talker = conversation(tiny_folder(), "generate.max_new_tokens=5")
    scripted(talker, "first line\\\nsecond line\nnext\\\n")
    assert [turn.content for turn in talker.turns[::2]] == ["first line\nsecond line", "next"]


def test_a_line_that_is_not_utf_8_is_left_out_and_the_conversation_goes_on(tiny_folder):
    talker = conversation(tiny_folder(), "generate.max_new_tokens=5")
    _, notes = scripted(talker, b"caf\xe9\nhello\n".decode("utf-8", "surrogateescape"))
    assert [turn.content for turn in talker.turns[::2]] == ["hello"] and "not UTF-8" in notes


def test_history_is_left_out_by_whole_exchanges_and_the_system_message_stays(tiny_folder):
    talker = conversation(tiny_folder(), "generate.max_new_tokens=20", system="Be kind.")  # the context is 256 tokens
    asked = [f"question {i}: " + "why " * 12 for i in range(12)]
    _, notes = scripted(talker, "\n".join(asked) + "\n")
    users = [turn.content for turn in talker.turns if turn.role == "user"]
    assert 1 < len(users) < 12 and users == [text.strip("\n") for text in asked[-len(users) :]]
    assert [turn.role for turn in talker.turns] == ["user", "assistant"] * len(users)
    ids = talker.speaker.encoder.encode_prompt((*talker.system, *talker.turns[:-1]))
    assert len(ids) + 20 <= 256 and "Be kind." in talker.speaker.encoder.decode(ids)
    assert "no longer fit" in notes


def test_a_message_that_leaves_no_room_is_refused_and_forgotten(tiny_folder):
    talker = conversation(tiny_folder(), "generate.max_new_tokens=5")
    answers, notes = scripted(talker, "word " * 300 + "\nshort\n")
    assert "the model reads 256" in notes
    assert [turn.content for turn in talker.turns if turn.role == "user"] == ["short"]
    assert answers.count("\n") >= 1


def test_an_answer_longer_than_the_context_leaves_room_for_the_question(tiny_folder):
    talker = conversation(tiny_folder(), "generate.max_new_tokens=5000")
    talker.say("Hello")
    assert talker.turns[1].content


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(tiny_folder):
    talker = conversation(tiny_folder(), "generate.max_new_tokens=50")
    heard: list[str] = []

    def interrupt(piece: str) -> None:
        heard.append(piece)
        if len(heard) == 3:
            raise KeyboardInterrupt

    assert talker.say("Hello", interrupt) == "".join(heard) == talker.turns[1].content


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30), stop=st.lists(st.text(min_size=1, max_size=4), max_size=2))
def test_streamed_pieces_are_the_plain_text(text, stop):
    data = list(text.encode())  # one token a byte: every character but ASCII comes in pieces

    def decode(ids):
        return bytes(ids).decode("utf-8", "replace")

    stream = TextStream(decode, stop)
    pieces = [stream.add(byte) for byte in data]
    told = "".join(pieces)
    assert before_stop(text, stop).startswith(told)
    assert told + stream.finish() == before_stop(text, stop)


def test_characters_cut_by_the_length_limit_are_shown_as_they_decode():
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", "replace"))
    assert [stream.add(byte) for byte in "aé".encode()[:2]] == ["a", ""]
    assert stream.finish() == "�"


def test_keys_that_chat_does_not_read_are_refused():
    with pytest.raises(ConfigError, match="does not read this key"):
        command.chat("anything", ["data.format=hh"], None)
