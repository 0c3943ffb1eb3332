"""Reward functions for the tests of PPO."""

import asyncio


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
