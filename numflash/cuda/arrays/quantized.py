"""INT8 attention of float arrays that are on the card: quantised, computed and written there.

Four launches on the caller's stream, nothing on the host: statistics of K and V, quantise, the
INT8 kernel, results in the caller's dtype and layout. What passes between them is one piece of
scratch memory, which the caller's library allocates. The output has the CPU's bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import UnsupportedError
from ...numerics.fixedpoint import FIRST_KEYS
from ...numerics.quantize_kernels import CHUNK
from ...numerics.scores import score_unit
from ...tiling import KEY_BLOCK
from ...validation import Problem
from ..device.operands import Launch, folding, key_places, padded, resident_ids
from ..launch_int8 import Chosen, Operands, choose, launch_of, sizes_of

ALIGNMENT = 256  # bytes, of each array in the scratch memory


def _arrays(problem: Problem, chosen: Chosen) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of each array in the scratch memory; names of `Operands` and others."""
    nb, nh, nkv, length, s, d, dv = problem.shape
    channels, stored = sizes_of(problem)
    row_bytes, chunks = -(-d // 16) * 16, max(1, -(-s // CHUNK))
    rows, kv = (nb, nh, length), (nb, nkv)
    return {
        "query": ((*rows, row_bytes), np.int8),
        "key": ((*kv, s, row_bytes), np.int8),
        "value": ((*kv, channels, stored), np.int8),
        "query_scale": (rows, np.float32),
        "key_scale": ((*kv, 1, stored), np.float32),
        "value_scale": ((*kv, channels), np.float32),
        "shift": (rows if problem.softcap else (1,), np.float32),
        "first_keys": ((*kv, 2 * FIRST_KEYS, chosen.width), np.int8),
        "first_scale": ((*kv, FIRST_KEYS), np.float32),
        "first_value": ((*kv, FIRST_KEYS, padded(dv)), np.float32),
        "out": ((*rows, channels), np.float32),
        "octave": (rows, np.int32),
        "total": (rows, np.float32),
        "plain_scale": (rows, np.float32),
        "mean": ((*kv, d), np.float32),
        "sums": ((*kv, chunks, d), np.float32),
        "peaks": ((*kv, chunks, dv), np.int32),
    }


def _nbytes(shape: tuple[int, ...], dtype: Any) -> int:
    wanted = max(1, math.prod(shape)) * np.dtype(dtype).itemsize
    return -(-wanted // ALIGNMENT) * ALIGNMENT


def check(problem: Problem) -> None:
    """Raise UnsupportedError for what has no kernel on the card."""
    if problem.pv not in ("int8", "int16"):
        raise UnsupportedError(
            f"pv: got {problem.pv!r} for arrays on a card; allowed there: 'int8' and 'int16'"
        )
    if problem.functions is not None:
        raise UnsupportedError(
            "precision: got 'int8' with score or mask functions on a card; allowed there: the arrays' own"
        )


def scratch_bytes(problem: Problem, arch: str) -> int:
    """Bytes of scratch memory that `plan` takes."""
    return sum(_nbytes(*x) for x in _arrays(problem, choose(problem, arch)).values())


def plan(
    problem: Problem,
    arch: str,
    dtype: str,
    results: tuple[np.ndarray, np.ndarray],
    scratch: np.ndarray,
) -> list[Launch]:
    """The launches that solve a problem of float arrays of any strides.

    dtype : of query, key, value and of the output
    results : out (B, H, L, Dv) of any strides whose rows are contiguous, and lse (B, H, L)
    scratch : contiguous uint8, `scratch_bytes`
    """
    chosen = choose(problem, arch)
    heads = problem.shape[0] * problem.shape[2]
    # numbers of a head's first keys, in bytes and what these leave, or of their values
    most = (1 << 31) // (FIRST_KEYS * max(2 * chosen.width, padded(problem.shape[6])))
    if heads > most:  # 32 bits number them
        raise UnsupportedError(
            f"key: got {heads} heads of all batch entries; allowed with precision 'int8' on a card: {most}"
        )
    memory, start = {}, 0
    for name, (shape, kind) in _arrays(problem, chosen).items():
        size = math.prod(shape) * np.dtype(kind).itemsize
        memory[name] = scratch[start : start + size].view(kind).reshape(shape)
        start += _nbytes(shape, kind)
    x = Operands(**{name: memory[name] for name in Operands._fields})
    attend = launch_of(problem, arch, chosen, x, lambda: results, results)
    return [
        *_quantise(problem, arch, dtype, chosen, memory),
        attend,
        _write(problem, arch, dtype, results, memory),
    ]


def _quantise(
    problem: Problem, arch: str, dtype: str, chosen: Chosen, memory: dict[str, np.ndarray]
) -> list[Launch]:
    """The launches that fill `Operands`."""
    from ..kernels.int8_quantize import int8_quantize
    from ..kernels.int8_statistics import int8_statistics

    nb, nh, nkv, length, s, d, dv = problem.shape
    q, k, v = problem.query, problem.key, problem.value
    channels, stored = sizes_of(problem)
    smooth = problem.smooths
    lengths = key_places(problem, s)[1]
    sums, peaks = memory["sums"], memory["peaks"]
    sizes = {"d": padded(d), "dv": padded(dv), **folding(nb)}
    look = Launch(
        int8_statistics,
        {**sizes, "source": dtype},
        arch,
        (sums.shape[2], nkv * (1 + smooth), nb),
        ((k, v, lengths, sums, peaks), (*k.strides, *v.strides), (nkv, s, d, dv)),
        tuple,
        resident_ids((), k, v, sums, peaks),
    )
    names = (
        *("query", "plain_scale", "query_scale", "shift", "key", "key_scale", "value"),
        *("value_scale", "mean", "first_keys", "first_scale", "first_value"),
    )
    made = [memory[name] for name in names]
    unit = score_unit(problem.scale, problem.softcap)
    with np.errstate(all="ignore"):
        factors = (np.float32(unit),)
    quantise = Launch(
        int8_quantize,
        {
            **sizes,
            "width": chosen.width,
            "source": dtype,
            "smooth": smooth,
            "softcap": bool(problem.softcap),
        },
        arch,
        (max(1, -(-max(length, s) // KEY_BLOCK)), nh + nkv, nb),
        (
            (q, k, v, lengths, sums, peaks, *made),
            (*q.strides, *k.strides, *v.strides),
            (nh, nkv, length, s, d, dv, memory["query"].shape[-1], channels, stored),
            factors,
        ),
        tuple,
        resident_ids((), q, k, v, sums, peaks, *made),
    )
    return [look, quantise]


def _write(
    problem: Problem,
    arch: str,
    dtype: str,
    results: tuple[np.ndarray, np.ndarray],
    memory: dict[str, np.ndarray],
) -> Launch:
    """The launch that writes out and lse."""
    from ..kernels.int8_results import BLOCK_ROWS, int8_results

    nb, nh, nkv, length, _, d, dv = problem.shape
    out, lse = results
    sinks = np.zeros(1, np.float32) if problem.sinks is None else problem.sinks
    names = ("out", "octave", "total", "query", "plain_scale", "mean")
    found = [memory[name] for name in names]
    return Launch(
        int8_results,
        {
            "d": padded(d),
            "dv": padded(dv),
            "dtype": dtype,
            "pv": problem.pv,
            "smooth": problem.smooths,
            "sinks": problem.sinks is not None,
            **folding(nb),
        },
        arch,
        (-(-length // BLOCK_ROWS), nh, nb),
        (
            (*found, sinks, out, lse),
            out.strides[:3],
            (nh, nkv, length, d, dv, memory["query"].shape[-1], memory["out"].shape[-1]),
            (np.float32(problem.scale),),
        ),
        lambda: results,
        resident_ids((), *found, sinks, out, lse),
    )
