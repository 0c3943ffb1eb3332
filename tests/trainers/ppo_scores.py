"""Reward functions for the tests of PPO."""


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
