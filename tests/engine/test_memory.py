"""What training frees is used again without asking the system for pages."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from accord.engine.memory import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else False
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    blocks = [torch.ones(5 * 2**20 // 4) for _ in range(20)]; del blocks
before = faults()
for _ in range(5):
    blocks = [torch.ones(5 * 2**20 // 4) for _ in range(20)]; del blocks
print(kept, faults() - before)
"""


def faults(mode: str, **environment: str) -> tuple[bool, int]:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | environment
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True, env=settings)
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_freed_blocks_are_not_fetched_again():
    pages = 5 * 20 * 5 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    kept, count = faults("keep")
    assert kept
    assert count < pages / 50


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_the_users_own_settings_stand():
    assert faults("keep", MALLOC_ARENA_MAX="2")[0] is False
