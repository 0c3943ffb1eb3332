"""The compiled kernels against float64, and what happens where they can't be compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accord.engine.generate import native
from accord.engine.generate.decoder import rotate
from accord.engine.generate.native import LANES, kernels
from tests.engine.decoder_setup import ids, known, ragged

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-8}  # relative, of one number
SHAPES = {
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 10**6),
    "scale": st.sampled_from([0.1, 1.0, 30.0]),
}

pytestmark = pytest.mark.skipif(kernels(torch.float32, CPU, 64, 1) is None, reason="no C compiler")


def drawn(seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def threads_agree(compute) -> torch.Tensor:
    """What `compute` gives with one thread, having checked that it gives the same bits with two."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = compute()
        torch.set_num_threads(2)
        two = compute()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, two)
    return one


def attention_reference(query, keys, values, positions, scaling, window, softcap):
    """[n, heads, d] float64, and the largest score, which float32 rounds."""
    n, heads, _ = query.shape
    out, largest = torch.zeros(query.shape, dtype=torch.float64), 0.0
    for row in range(n):
        last = int(positions[row])
        first = max(0, last + 1 - window) if window else 0
        for head in range(heads):
            shared = head // (heads // keys.shape[1])
            k, v = (x[row, shared, first : last + 1].double() for x in (keys, values))
            scores = k @ query[row, head].double() * scaling
            largest = max(largest, float(scores.abs().max()))
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[row, head] = torch.softmax(scores, 0) @ v
    return out, largest


def side_by_side(keys: torch.Tensor) -> torch.Tensor:
    """Keys [slots, heads, capacity, d] as the kernels read them."""
    return keys.unflatten(2, (-1, LANES)).transpose(-1, -2).contiguous()


@settings(max_examples=60, deadline=None)
@given(
    **SHAPES,
    n=st.integers(1, 4),
    key_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    dim=st.sampled_from([1, 5, 8, 32, 64, 80, 128, 256]),
    capacity=st.sampled_from([1, 31, 32, 33, 64, 100]),
    window=st.sampled_from([None, 1, 7, 32, 50, 1000]),
    softcap=st.sampled_from([None, 2.0, 50.0]),
)
def test_attention_of_one_query_over_the_cache(dtype, seed, scale, n, key_heads, group, dim, capacity, window, softcap):
    qkv = drawn(seed, n, group * key_heads + 2 * key_heads, dim, dtype=dtype, scale=scale)
    query = qkv[:, : group * key_heads]  # rows stand apart, as in the decoder
    room = -(-capacity // 64) * 64  # the cache has whole blocks
    keys = drawn(seed + 1, n + 1, key_heads, room, dim, dtype=dtype)
    values = drawn(seed + 2, n + 1, key_heads, room, dim, dtype=dtype, scale=scale)
    positions = torch.randint(0, capacity, (n,), generator=torch.Generator().manual_seed(seed))
    positions[0] = 0
    if n > 1:
        positions[1] = capacity - 1
    for row in range(n):  # what lies beyond is not looked at
        keys[row, :, int(positions[row]) + 1 :] = float("nan")
        values[row, :, int(positions[row]) + 1 :] = float("nan")
    scaling = dim**-0.5
    kernel = kernels(dtype, CPU, dim, group)
    got = threads_agree(
        lambda: kernel.attention(query, side_by_side(keys), values, positions, torch.arange(n), scaling, window, softcap)
    )
    expected, largest = attention_reference(query, keys, values, positions, scaling, window, softcap)
    error = (got.double() - expected).abs()
    # Rounding of scores in float32 is one of weights, which mix values of about 3 · scale; then the result is rounded once.
    bound = expected.abs() * ROUNDING[dtype] + 3 * scale * (4e-6 + largest * 2**-21)
    assert (error <= bound).all(), float((error - bound).max())


def test_attention_with_scores_beyond_what_exp_can_hold():
    """One key far above the others has all the weight; nothing overflows."""
    keys = torch.zeros(1, 1, 128, 64)
    values = drawn(1, 1, 1, 128, 64, dtype=torch.float32)
    query = torch.full((1, 1, 64), 100.0)
    keys[0, 0, 50] = 100.0
    keys[0, 0, 60] = -100.0
    kernel, last = kernels(torch.float32, CPU, 64, 1), torch.tensor([69])
    got = kernel.attention(query, side_by_side(keys), values, last, torch.tensor([0]), 1.0, None, None)
    torch.testing.assert_close(got[0, 0], values[0, 0, 50])
    low = kernel.attention(query, torch.full((1, 1, 8, 64, LANES), -1e4), values, last, torch.tensor([0]), 1.0, None, None)
    torch.testing.assert_close(low[0, 0], values[0, 0, :70].mean(0))


@settings(max_examples=50, deadline=None)
@given(
    **SHAPES,
    tokens=st.integers(1, 9),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.sampled_from([2, 8, 20, 64, 128]),
    share=st.sampled_from([0, 0.25, 0.5, 1]),
)
def test_rotary_positions_and_the_write_to_the_cache(dtype, seed, scale, tokens, key_heads, group, dim, share):
    heads, capacity, slots = group * key_heads, 64, 3
    qkv = drawn(seed, tokens, heads + 2 * key_heads, dim, dtype=dtype, scale=scale)
    width = int(dim * share) // 2 * 2
    angles = torch.rand(capacity, width // 2, generator=torch.Generator().manual_seed(seed)) * 6.3
    cos, sin = angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], dim=1)
    places = torch.randperm(slots * capacity, generator=torch.Generator().manual_seed(seed))[:tokens]
    where, positions = places // capacity, places % capacity
    if width:
        expected = rotate(qkv.double(), *(table[positions][:, None].double() for table in (cos, sin)))
        x, y = qkv.double()[..., : width // 2], qkv.double()[..., width // 2 : width]  # once more, from the definition
        c, s = angles.cos().double()[positions][:, None], angles.sin().double()[positions][:, None]
        torch.testing.assert_close(expected[..., :width], torch.cat([x * c - y * s, y * c + x * s], dim=-1))
    else:
        expected = qkv.double()
    kept = qkv[:, heads + key_heads :].clone()

    def compute() -> torch.Tensor:
        rotated = qkv.clone()
        values = torch.full((slots, key_heads, capacity, dim), 7.0, dtype=dtype)
        blocks = side_by_side(values)
        rotation = (cos, sin) if width else None
        kernels(dtype, CPU, dim, group).rotate_and_write(rotated, rotation, positions, where, blocks, values)
        keys = blocks.transpose(-1, -2).flatten(2, 3)
        assert torch.equal(keys[where, :, positions], rotated[:, heads : heads + key_heads])
        assert torch.equal(values[where, :, positions], kept) and torch.equal(rotated[:, heads + key_heads :], kept)
        untouched = torch.ones(slots, capacity, dtype=torch.bool)
        untouched[where, positions] = False
        assert (keys.transpose(1, 2)[untouched] == 7).all() and (values.transpose(1, 2)[untouched] == 7).all()
        return rotated

    got = threads_agree(compute)
    torch.testing.assert_close(
        got[:, : heads + key_heads].double(), expected[:, : heads + key_heads], rtol=ROUNDING[dtype], atol=scale * 2e-6
    )


@settings(max_examples=50, deadline=None)
@given(**SHAPES, rows=st.integers(1, 40), width=st.sampled_from([1, 7, 8, 64, 576, 1024]), eps=st.sampled_from([1e-6, 0.5]))
def test_rms_norm(dtype, seed, scale, rows, width, eps):
    x, weight = drawn(seed, rows, width, dtype=dtype, scale=scale), drawn(seed + 1, width, dtype=torch.float32)
    got = threads_agree(lambda: kernels(dtype, CPU, 8, 1).rms_norm(x, weight, eps))
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    torch.testing.assert_close(got.double(), expected, rtol=ROUNDING[dtype] + 1e-6, atol=1e-7)


def test_rms_norm_of_zeros_is_zero():
    kernel = kernels(torch.float32, CPU, 8, 1)
    assert torch.equal(kernel.rms_norm(torch.zeros(3, 16), torch.ones(16), 1e-6), torch.zeros(3, 16))


@settings(max_examples=50, deadline=None)
@given(**SHAPES, rows=st.integers(1, 40), width=st.sampled_from([1, 7, 64, 500, 1536]))
def test_gated_activation(dtype, seed, scale, rows, width):
    x = drawn(seed, rows, 2 * width, dtype=dtype, scale=scale)
    x[0, 0], x[-1, width - 1] = 300.0, -300.0  # e^300 is no float32
    got = threads_agree(lambda: kernels(dtype, CPU, 8, 1).silu_mul(x))
    gate, up = x.double().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(got.double(), expected, rtol=ROUNDING[dtype] + 2e-6, atol=1e-30)


def test_a_fault_in_the_numbers_is_not_hidden():
    """NaN stays NaN: a spoilt weight must show."""
    kernel = kernels(torch.float32, CPU, 8, 1)
    x = torch.ones(2, 16)
    x[1, 3] = float("nan")
    assert kernel.silu_mul(x)[1, 3].isnan() and not kernel.silu_mul(x)[0].isnan().any()
    assert kernel.rms_norm(x, torch.ones(16), 1e-6)[1].isnan().all()
    keys = torch.ones(1, 1, 64, 8)
    keys[0, 0, 2, 5] = float("nan")
    one = torch.ones(1, 1, 64, 8)
    out = kernel.attention(one[:, :, 0], side_by_side(keys), one, torch.tensor([3]), torch.tensor([0]), 1.0, None, None)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype,dim,group", [(torch.float16, 64, 1), (torch.float32, 257, 1), (torch.float32, 64, 65)])
def test_what_the_kernels_do_not_do_is_left_to_torch(dtype, dim, group):
    assert kernels(dtype, CPU, dim, group) is None
    assert kernels(torch.float32, torch.device("meta"), 64, 1) is None


# --------------------------------------------------------------------------------------------------------------------- the library

# The module alone, without transformers: torch is what it needs.
LOAD = f"""
import importlib.util, logging, sys, torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
spec = importlib.util.spec_from_file_location("native", {native.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module._FLAGS = ("-O0", "-fopenmp", "-fPIC")  # quick to compile
kernels = module.kernels(torch.float32, torch.device("cpu"), 8, 1)
print("none" if kernels is None else kernels.rms_norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist())
"""


def start(code: str, folder: Path, **environment: str) -> subprocess.Popen:
    environment = {**os.environ, "ACCORD_CACHE": str(folder), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen) -> list[str]:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out.strip().splitlines()


def test_without_a_compiler_torch_gives_the_same_answers(tmp_path):
    code = f"""
import json, logging, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
from tests.engine.decoder_setup import generator_of, ids, ragged, tiny
generator = generator_of(tiny("llama"))
assert generator.decoder.native is None
print(json.dumps(ids(generator, {ragged((5, 9))!r}, 10)))
"""
    root = Path(__file__).resolve().parents[2]
    process = start(code, tmp_path, CC="/nonexistent/cc", PYTHONPATH=os.pathsep.join([str(root), *sys.path]))
    *told, answers = finish(process)
    from accord.engine.generate import DecoderGenerator

    here = DecoderGenerator(known("llama")[0], None)
    assert here.decoder.native is not None
    assert json.loads(answers) == ids(here, ragged((5, 9)), 10)
    assert len([line for line in told if "could not be built" in line]) == 1


def test_a_compiler_may_have_arguments(tmp_path):
    code = "from accord.engine.generate.native import _library; print(_library() is not None)"
    assert finish(start(code, tmp_path, CC="cc -DUNUSED")) == ["True"]
    assert finish(start(code, tmp_path, CC="cc '"))[-1] == "False"


def test_processes_that_compile_at_once_have_one_library_and_one_that_was_cut_short_is_made_again(tmp_path):
    first, second = (start(LOAD, tmp_path) for _ in range(2))
    assert finish(first) == finish(second) == ["[[1.0, 1.0, 1.0, 1.0]]"]
    [library] = (tmp_path / "native").glob("*.so")
    assert sorted(path.suffix for path in (tmp_path / "native").iterdir()) == [".so"]  # nothing else is left lying about
    whole = library.read_bytes()
    assert native._intact(library)
    for broken in (b"", whole[:10], whole[: len(whole) // 2], whole[:-1], whole[:-1] + b"?", b"?" + whole[1:]):
        library.write_bytes(broken)
        assert not native._intact(library)
    library.write_bytes(whole[: len(whole) // 2])  # loading it would be a bus error
    assert finish(start(LOAD, tmp_path)) == ["[[1.0, 1.0, 1.0, 1.0]]"]
    assert native._intact(library) and library.stat().st_size == len(whole)


def test_a_cache_folder_that_cannot_be_written_leaves_it_to_torch(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    told, last = finish(start(LOAD, tmp_path / "file"))
    assert last == "none" and "could not be built" in told
