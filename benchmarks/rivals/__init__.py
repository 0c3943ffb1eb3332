"""Engines that Accord is compared with, behind one interface, each with the settings that suit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workloads import Request


@dataclass(frozen=True)
class Turn:
    """What one engine did with all requests of a case."""

    seconds: float
    tokens: list[int]  # of each answer


class Engine(Protocol):
    name: str

    def run(self, requests: Sequence[Request]) -> Turn: ...

    def close(self) -> None: ...
