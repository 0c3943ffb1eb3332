"""What a run was made with: library versions, machine, git commits. Written into the head of RUN/config.yaml."""

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import accord

LIBRARIES = ("accord", "torch", "transformers", "tokenizers", "peft", "safetensors", "datasets", "numpy", "bitsandbytes")


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide the numbers, without importing them."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name == "accord":  # run from its source, not installed
                found[name] = accord.__version__
    return found


def conditions(tensor: int = 1) -> dict[str, str]:
    """What must be the same for a resume to be exact to the bit: versions, threads, ranks and the processor that computes.

    `tensor`: ranks that divide each product (launch.mesh.tensor).
    """
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    layout = str(ranks) if tensor == 1 else f"{ranks // tensor} × {tensor}"
    if torch.cuda.is_available():
        processor = torch.cuda.get_device_name()
    else:
        processor = f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    return versions() | {"threads": str(torch.get_num_threads()), "ranks": layout, "processor": processor}


def changed(before: Mapping[str, str], tensor: int = 1) -> list[str]:
    """What of `before` (earlier `conditions()`) is another now, as "torch 2.11 → 2.13"."""
    now = conditions(tensor)
    return [f"{name} {value} → {now.get(name, 'none')}" for name, value in before.items() if value != now.get(name)]


def git_commits() -> dict[str, str]:
    """`accord`: the commit of this package when it runs from a checkout; `project`: that of the current folder, if another.

    A commit ends in "+changes" when tracked files differ from it. Empty without git.
    """
    package = Path(__file__).resolve().parent
    commits = {}
    tracked = _git(package, "ls-files", "--error-unmatch", Path(__file__).name)
    own = _commit(package) if tracked else None  # site-packages inside somebody's repository is not a checkout of accord
    here = _commit(Path.cwd())
    if own:
        commits["accord"] = own
    if here and here != own:
        commits["project"] = here
    return commits


def _commit(folder: Path) -> str | None:
    head = _git(folder, "rev-parse", "HEAD")
    if not head:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return head + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # reading must not take the user's index lock
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe(identity: Mapping[str, str]) -> dict[str, Any]:
    """Everything of this module in one dictionary, for the head of config.yaml, after what tells the run from others."""
    return {
        **identity,
        "versions": versions(),
        "git": git_commits(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
