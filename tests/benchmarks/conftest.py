"""Benchmarks are scripts that import one another from their own folder: it is put on the path here as Python does for a script."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

for folder in (FOLDER, FOLDER / "rivals"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
