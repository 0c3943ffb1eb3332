"""More processes than a machine can hold, and a signal while they are being started."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from accord.config import Launch
from accord.errors import ConfigError, Interrupted
from accord.launch import local


def test_more_processes_than_the_machine_can_start_are_refused_before_the_first():
    most = local.MOST_PER_CORE * os.cpu_count()
    assert local.number_of_processes(Launch(processes=most)) == most
    for many in (most + 1, 10**9):
        with pytest.raises(ConfigError, match=r"launch\.processes: .* too many for the .* cores of this machine\. Set it to"):
            local.number_of_processes(Launch(processes=many))


def test_a_signal_while_workers_are_started_starts_no_more_and_ends_those(tmp_path, monkeypatch):
    started, ended = [], []

    class Started:
        def __init__(self, rank, *_):
            started.append(rank)
            if rank == 1:
                signal.raise_signal(signal.SIGTERM)

        def kill(self):
            ended.append(self)

    monkeypatch.setattr(local, "Worker", Started)
    with pytest.raises(Interrupted):
        local.run_local(SimpleNamespace(run=SimpleNamespace(dir=str(tmp_path))), ["sft"], 5)
    assert started == [0, 1] and len(ended) == 2
