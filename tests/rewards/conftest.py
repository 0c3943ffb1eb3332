from __future__ import annotations

import pytest

from accord.rewards import http


@pytest.fixture(autouse=True)
def short_waits_and_no_proxy(monkeypatch):
    """Further attempts come at once, and requests to this machine go straight to it."""
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
