"""The parent of such workers, in a process that may be signalled: `python parent.py RUN PROCESSES WHAT [RANK]`."""

from __future__ import annotations

import sys
from pathlib import Path

from accord.cli import guarded
from accord.config import Config
from accord.launch import process
from accord.launch.local import run_local

if __name__ == "__main__":
    process.PROGRAM = (sys.executable, str(Path(__file__).parent / "worker.py"))
    run, processes, *command = sys.argv[1:]
    sys.exit(guarded(lambda: run_local(Config(run={"dir": run}), command, int(processes))))
