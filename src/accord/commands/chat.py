"""`accord chat MODEL`: a conversation in the terminal, or over a pipe with one message a line."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from accord.commands.inference import MODEL_KEYS, Speaker, load_speaker, quiet, sampling_seed, settings
from accord.data.records import Message
from accord.errors import UserError

READS = ("generate.", "engine.", *MODEL_KEYS)
HELP = (
    "/clear starts anew, /quit (or Ctrl-D) ends, Ctrl-C stops an answer; a backslash at the end of a line continues the message"
)


class MessageTooLong(UserError):
    """One message alone leaves no room for an answer."""


class Conversation:
    """The turns so far and the model that answers them.

    The history is trimmed by whole turns: the oldest exchange goes first, a system message stays.
    """

    def __init__(self, speaker: Speaker, system: str | None = None, seed: int = 0) -> None:
        self.speaker, self.seed = speaker, seed
        self.system = (Message("system", system),) if system else ()
        self.clear()

    def clear(self) -> None:
        self.turns: list[Message] = []
        self.answers = 0

    def say(self, text: str, on_text: Callable[[str], None] = lambda piece: None) -> str:
        """The answer to `text`; its pieces go to `on_text` as they come.

        Stopped by Ctrl-C, what was said until then counts as the answer. Raises MessageTooLong, and forgets the message.
        """
        from accord.engine.generate import TextStream
        from accord.engine.generate.sampling import row_seeds

        ids, turns, dropped = self._fitting([*self.turns, Message("user", text)])
        self.forgotten = dropped
        params, limit = self.speaker.params, self.speaker.context_length
        if limit is not None and len(ids) + params.max_new_tokens > limit:
            room = limit - len(ids)
            params = dataclasses.replace(params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room))
        stream = TextStream(self.speaker.encoder.decode, params.stop)
        self.answers += 1
        seed = int(row_seeds(self.seed, self.answers)[-1])  # asked again, a question may be answered differently

        def on_token(_row: int, token: int) -> None:
            if piece := stream.add(token):
                on_text(piece)

        try:
            self.speaker.generator.generate([ids], params, seeds=[seed], on_token=on_token)
            if piece := stream.finish():
                on_text(piece)
        except KeyboardInterrupt:
            if not stream.told:
                raise
        self.turns = [*turns, Message("assistant", stream.told)]
        return stream.told

    def _fitting(self, turns: list[Message]) -> tuple[list[int], list[Message], int]:
        """The prompt's tokens, the turns they hold, and how many exchanges were left out to make room for an answer.

        An answer is promised `max_new_tokens`, but at most half of the context.
        """
        limit = self.speaker.context_length
        reserve = 0 if limit is None else min(self.speaker.params.max_new_tokens, limit // 2)
        dropped = 0
        while True:
            ids = self.speaker.encoder.encode_prompt((*self.system, *turns))
            if limit is None or len(ids) + reserve <= limit:
                return ids, turns, dropped
            if len(turns) <= 2:
                raise MessageTooLong(
                    f"the message needs {len(ids):,} tokens; the model reads {limit:,}, of which {reserve:,} are kept for the answer. "
                    "Shorten it, or lower generate.max_new_tokens."
                )
            turns, dropped = turns[2:], dropped + 1


def chat(model: str, overrides: list[str], system: str | None) -> None:
    """Talk until /quit or the end of the input. Answers go to stdout, everything else to stderr."""
    config = settings("chat", overrides, READS)
    quiet()
    speaker = load_speaker(model, config)
    conversation = Conversation(speaker, system, sampling_seed(config))
    talk(conversation, sys.stdin, sys.stdout, sys.stderr)


def talk(conversation: Conversation, source: TextIO, answers: TextIO, notes: TextIO) -> None:
    """The loop: one message a line, its answer and a line break."""
    interactive = source.isatty()
    if interactive:
        print(f"{conversation.speaker.name}: {HELP}", file=notes)

    def show(piece: str) -> None:
        answers.write(piece)
        answers.flush()

    for text in _messages(source, notes, interactive):
        command = text.strip()
        if not command.isascii() and any("\ud800" <= letter <= "\udfff" for letter in command):
            print("(that line is not UTF-8 text and was left out)", file=notes)
            continue
        if command == "/quit":
            return
        if command == "/clear":
            conversation.clear()
            print("(a new conversation)", file=notes)
        elif command.startswith("/") and " " not in command:
            print(f"(no command {command}: {HELP})", file=notes)
        elif command:
            try:
                conversation.say(text, show)
            except MessageTooLong as error:
                print(f"({error})", file=notes)
                continue
            except KeyboardInterrupt:
                print("(stopped)", file=notes)
                continue
            show("\n\n" if interactive else "\n")
            if conversation.forgotten:
                print(f"(the oldest {conversation.forgotten} exchange(s) no longer fit and were left out)", file=notes)


def _messages(source: TextIO, notes: TextIO, interactive: bool) -> Iterator[str]:
    """Lines; one that ends with a backslash goes on in the next."""
    parts: list[str] = []
    while True:
        if interactive:
            prompt = "... " if parts else "> "
            try:
                line = input(prompt) + "\n"  # with the terminal's line editing
            except EOFError:
                print(file=notes)
                return
        else:
            line = source.readline()
        if not line:
            if parts:
                yield "\n".join(parts)
            return
        line = line.rstrip("\r\n")
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        yield "\n".join([*parts, line])
        parts = []
