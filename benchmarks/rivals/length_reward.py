"""The rule that the GRPO case scores with, the same for both systems: a text of 100 characters is best."""


def score(response: str) -> float:
    return -abs(len(response) - 100) / 100
