"""Reward functions for the tests of PPO."""

import asyncio
from collections import Counter


def length(response: str) -> float:
    return float(len(response))


def letters(response: str) -> float:
    """Share of the characters that are the letter e or a."""
    return sum(c in "ea" for c in response) / max(1, len(response))


def ended(truncated: bool) -> float:
    """1 for an answer that the model ended itself."""
    return 0.0 if truncated else 1.0


def constant(response: str) -> float:
    return 1.0


def fails(response: str) -> float:
    raise ValueError("no")


def brevity(response: str) -> float:
    """What a reader may want while `length` is paid for."""
    return -float(len(response))


async def later(response: str) -> float:
    await asyncio.sleep(0)
    return float(len(response) % 3)


def each_token(tokens: list[str]) -> list[float]:
    """1, 2, 3 …"""
    return [float(number) for number in range(1, len(tokens) + 1)]


SEEN: dict[str, list[str]] = {}


def remember(response: str, tokens: list[str]) -> list[float]:
    SEEN[response] = tokens
    return [0.0] * len(tokens)


ASKED: Counter[tuple[str, str]] = Counter()  # how often `moody` was asked about each answer
PATIENCE: dict[str, Counter[tuple[str, str]] | None] = {"left": None}  # how often it may be


def moody(prompt: str, response: str) -> float:
    """Share of e and a; but a hundred for what it is asked more often than it has patience for: no service need repeat itself."""
    ASKED[prompt, response] += 1
    left = PATIENCE["left"]
    return letters(response) if left is None or ASKED[prompt, response] <= left[prompt, response] else 100.0


def moody_tokens(prompt: str, response: str, tokens: list[str]) -> list[float]:
    return [moody(prompt, response) + number / 8 for number in range(len(tokens))]
