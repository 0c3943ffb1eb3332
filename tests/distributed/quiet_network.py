"""A group in a network of its own, where nothing else sends: `unshare -rn python -m tests.distributed.quiet_network WORLD FOLDER`."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.group import ROOT, Job, answers

_SET_FLAGS, _UP = 0x8914, 1  # of Linux


def quiet_answers(world: int, jobs: list[Job], folder: Path) -> list[list[Any]]:
    """As `answers`. Skips the test where no network can be made."""
    inside = ["unshare", "-rn"]
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespace can be made here (unshare -rn)")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "quiet.json").write_text(json.dumps(jobs))
    subprocess.run(
        [*inside, sys.executable, "-m", "tests.distributed.quiet_network", str(world), str(folder)], check=True, cwd=ROOT
    )
    return json.loads((folder / "found.json").read_text())


def sent() -> int:
    """Bytes that the loopback has carried."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


if __name__ == "__main__":
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh", b"lo", _UP))
    found = answers(world, json.loads((folder / "quiet.json").read_text()), folder)
    (folder / "found.json").write_text(json.dumps(found))
