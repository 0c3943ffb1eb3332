"""A turn in a process of its own, under its own Python: its memory and its threads are nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LOG_LINES = 30


def ask(python: Path | str, worker: str, settings: Mapping[str, Any], *, threads: int) -> dict[str, Any]:
    """What `rivals/<worker>.py` answers to `settings`, once it has ended. Raises RuntimeError with the end of its log if it fails."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        done = subprocess.run(
            [str(python), str(Path(__file__).with_name(f"{worker}.py")), json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        log.seek(0)
        lines = done.stdout.splitlines()
        if done.returncode == 0 and lines:
            return json.loads(lines[-1])  # before it a library may have printed while it was imported
        raise RuntimeError(f"{worker} ended with {done.returncode}:\n" + "".join(log.readlines()[-_LOG_LINES:]))
