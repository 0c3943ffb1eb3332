"""Compiled kernels for the decoding step on a CPU: built once by the system's C compiler, kept in the cache folder, optional.

Without a compiler (or with ACCORD_NATIVE=0) torch's own operations are used: the same results up to rounding, slower.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.c")
# Sums may be taken in any order, but infinities and NaN keep their meaning: masks and faults rely on them.
_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fopenmp", "-fPIC")
_SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
LANES = 16  # positions side by side in the cache of keys, as kernels.c wants them
_DIGEST = 16  # bytes
_MOST_DIM = 256
_MOST_GROUP = 64


class Kernels:
    """The compiled functions for one type, called with tensors. What they compute stands in kernels.c."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        suffix = _SUFFIX[dtype]
        p, i, f, c = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._attention = self._function(library, f"attention_{suffix}", p, i, p, p, p, p, p, i, i, i, i, i, f, f, i, c)
        self._rotate = self._function(library, f"rotate_and_write_{suffix}", p, p, p, p, p, p, p, i, i, i, i, i, i, c)
        self._rms_norm = self._function(library, f"rms_norm_{suffix}", p, p, p, i, i, f, c)
        self._silu_mul = self._function(library, f"silu_mul_{suffix}", p, p, i, i, c)

    @staticmethod
    def _function(library: ctypes.CDLL, name: str, *arguments: Any) -> Any:
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
        return function

    def attention(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        slots: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """query [T, heads, d] (rows may stand apart); keys [slots, key heads, capacity / LANES, d, LANES], values [slots, key heads,
        capacity, d]; positions and slots [T] → [T, heads, d]."""
        tokens, heads, dim = query.shape
        _, key_heads, capacity, _ = values.shape
        out = torch.empty(tokens, heads, dim, dtype=query.dtype)
        self._attention(
            query.data_ptr(), query.stride(0), keys.data_ptr(), values.data_ptr(), out.data_ptr(), positions.data_ptr(), slots.data_ptr(),
            tokens, key_heads, heads // key_heads, capacity, dim, scaling, softcap or 0.0, window or 0, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def rotate_and_write(
        self, qkv: Tensor, rotation: tuple[Tensor, Tensor] | None, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """qkv [T, heads + 2 key heads, d] contiguous, rotated in place; keys and values go to the cache."""
        tokens, heads, dim = qkv.shape
        _, key_heads, capacity, _ = values.shape
        width = 0 if rotation is None else rotation[0].shape[-1]
        cos, sin = (0, 0) if rotation is None else (rotation[0].data_ptr(), rotation[1].data_ptr())
        self._rotate(
            qkv.data_ptr(), cos, sin, positions.data_ptr(), slots.data_ptr(), keys.data_ptr(), values.data_ptr(), tokens,
            heads - 2 * key_heads, key_heads, capacity, dim, width, torch.get_num_threads(),
        )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / √(mean x² + eps) · weight, over the last dimension of a contiguous x; weight in float32."""
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps, torch.get_num_threads())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of [T, 2 width] contiguous."""
        tokens, both = gate_up.shape
        out = gate_up.new_empty(tokens, both // 2)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), tokens, both // 2, torch.get_num_threads())
        return out


def kernels(dtype: torch.dtype, device: torch.device, head_dim: int, group: int) -> Kernels | None:
    """The kernels for this type and these heads; None where there are none."""
    if device.type != "cpu" or dtype not in _SUFFIX or head_dim > _MOST_DIM or group > _MOST_GROUP:
        return None
    if os.environ.get("ACCORD_NATIVE", "1") == "0":
        return None
    library = _library()
    return None if library is None else Kernels(library, dtype)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The shared library, compiled if this very source was not yet on this very processor. None, with one line, if that fails."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    processor = _processor()
    if compiler is None or processor is None:
        log.info("No C compiler: generation uses torch's own operations, slower.")
        return None
    key = hashlib.blake2b(digest_size=12)
    for part in (
        *(path.read_bytes() for path in sorted(_SOURCE.parent.glob("*.[ch]"))),
        " ".join(_FLAGS).encode(),
        compiler.encode(),
        processor.encode(),
    ):
        key.update(part)
    folder = Path(os.environ.get("ACCORD_CACHE") or Path.home() / ".cache" / "accord") / "native"
    path = folder / f"kernels-{key.hexdigest()}.so"
    try:
        if not _intact(path):
            _compile(compiler, path)
        _share_openmp()
        return ctypes.CDLL(str(path))
    except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: CC with a quote left open
        detail = getattr(error, "stderr", None) or error
        log.warning(
            "The generation kernels could not be built (%s): torch's own operations are used, slower.", str(detail).strip()[:300]
        )
        return None


def _intact(path: Path) -> bool:
    """Whether the library is there as it was written. Loading one that was cut short (a full disk, a lost connection) kills the process."""
    content = path.read_bytes() if path.exists() else b""
    return len(content) > _DIGEST and content[-_DIGEST:] == _digest(content[:-_DIGEST])


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


def _compile(compiler: str, path: Path) -> None:
    """Written beside and renamed: another process sees the whole library or none."""
    command = shlex.split(compiler)  # CC="ccache gcc"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        objects = []
        for dtype in ("FLOAT32", "BFLOAT16"):
            objects.append(f"{work}/{dtype}.o")
            subprocess.run(
                [*command, *_FLAGS, f"-D{dtype}", "-c", str(_SOURCE), "-o", objects[-1]],
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
            )
        # Linked without OpenMP: its functions are those of the runtime that torch has loaded. Two runtimes would fight for the cores.
        built = f"{work}/kernels.so"
        subprocess.run(
            [*command, "-shared", *objects, "-o", built, "-lm"], check=True, capture_output=True, text=True, timeout=120
        )
        with open(built, "r+b") as library:
            library.write(_digest(library.read()))  # at its end, where the loader does not look
        os.replace(built, path)


def _share_openmp() -> None:
    """Make the symbols of torch's OpenMP runtime visible to the library."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        for name in dict.fromkeys(re.findall(r"(/\S*lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)", maps.read_text())):
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)


def _processor() -> str | None:
    """What -march=native depends on: the home folder may be shared by different machines. None where it can't be told."""
    try:
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return f"{platform.machine()} {flags[1].strip()}" if flags else None
