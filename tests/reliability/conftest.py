"""Runs in processes of their own, as scripts/torture.py starts them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def torture() -> Any:
    spec = importlib.util.spec_from_file_location("torture", ROOT / "scripts" / "torture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACCORD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(torture: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torture.tiny_model(tmp_path_factory.mktemp("model") / "start")


@pytest.fixture(scope="module", params=["sft", pytest.param("ppo", marks=pytest.mark.slow)])
def stage(request: pytest.FixtureRequest) -> str:
    """What is run. PPO has the most state: two models, a KL controller, moments, a journal."""
    return request.param


class Runs:
    """A stage's runs of six steps in processes of their own: `start` one, `said` by the last."""

    def __init__(self, torture: Any, model: Path, folder: Path, stage: str) -> None:
        self.torture, self.model, self.folder, self.stage, self.lives = torture, model, folder, stage, 0

    @property
    def log(self) -> Path:
        return self.folder / f"log-{self.lives}.txt"

    @property
    def said(self) -> str:
        return self.log.read_text()

    def start(self, run: Path, *more: str, before: Callable[[], None] | None = None) -> Any:
        """The process. `before` is called in it at first; `more` are further key=value."""
        self.lives += 1
        (life,) = self.torture.start([*self.torture.command(self.stage, self.model, run, 6), *more], 1, self.log, before)
        return life

    def finish(self, run: Path, *more: str, before: Callable[[], None] | None = None) -> int:
        """Its exit code."""
        return self.torture.wait([self.start(run, *more, before=before)], self.log)[0]

    def left_by(self, run: Path) -> dict[str, Any]:
        """All that must repeat. The journal goes back to the oldest checkpoint, and which that is depends on what went wrong."""
        return {name: left for name, left in self.torture.left_by(run).items() if name != "journal.jsonl"}


@pytest.fixture
def runs(torture: Any, model: Path, tmp_path: Path, own_cache: Path, stage: str) -> Runs:
    return Runs(torture, model, tmp_path, stage)


@pytest.fixture(scope="module")
def whole(torture: Any, model: Path, tmp_path_factory: pytest.TempPathFactory, stage: str) -> dict[str, Any]:
    """What an undisturbed run leaves."""
    folder = tmp_path_factory.mktemp("whole")
    runs = Runs(torture, model, folder, stage)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ACCORD_CACHE", str(folder / "cache"))
        assert runs.finish(folder / "run") == 0, runs.said
    return runs.left_by(folder / "run")
