"""From a validated problem to one kernel launch: which kernel, with which constants, over which grid, on which arguments."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import fixedpoint as fx
from ..errors import UnsupportedError
from ..reference import cap_shift, combined_scale, log_sum_exp, row_shift
from ..tiling import CUDA_HEAD_DIMS, KEY_BLOCK, Tiling, cuda_tiling
from ..tiling import padded as smallest
from ..validation import Problem
from .arrays import aligned
from .tensormap import TensorMap

NO_LIMIT = 1 << 29
Results = tuple[np.ndarray, np.ndarray] | None
LOG2E = 1.4426950408889634
MMA_ROWS = 64                       # so few rows fill no tile of the Hopper kernels: mma.sync has smaller ones


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `args` holds tuples of arrays, which stand for their addresses, and of numbers."""

    factory: Callable
    constants: dict[str, Any]
    arch: str
    grid: tuple[int, int, int]
    args: tuple
    finish: Callable[[], Any]                       # the results, once the kernel has run
    resident: frozenset[int] = frozenset()          # ids of the arrays that lie on the card already


def padded(d: int) -> int:
    """The smallest head size that a kernel is built for and that holds d."""
    return smallest(d, CUDA_HEAD_DIMS)


def rows_per_block(tiling: Tiling, rows: int) -> int:
    """Query rows per tile: the tiling's, or fewer warps where there are few rows."""
    warps = min(tiling.block_q // tiling.mr, max(1, -(-rows // tiling.mr)))
    return tiling.mr * (4 if warps == 3 else warps)


def _rows(x: np.ndarray, multiple: int = 8) -> np.ndarray:
    """Contiguous, with rows of a multiple of 16 bytes: the last axis is padded where it is not."""
    d = x.shape[-1]
    if d % multiple:
        wide = np.zeros((*x.shape[:-1], -(-d // multiple) * multiple), x.dtype)
        wide[..., :d] = x
        return wide
    return np.ascontiguousarray(x)


def hide_nonfinite(key: np.ndarray, value: np.ndarray, bits: bool) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values such that 0 * NaN never happens: a key row whose value is not finite becomes NaN, its value 0.

    A hidden key's score is replaced before it is used, so a NaN key spoils exactly the rows that see it.
    """
    exponent = np.uint16(0x7F80 if bits else 0x7C00)
    bad = (value.view(np.uint16) & exponent) == exponent
    if not bad.any():
        return key, value
    rows = bad.any(-1)
    key, value = key.copy(), value.copy()
    key.view(np.uint16)[rows] = 0x7FC0 if bits else 0x7E00
    value.view(np.uint16)[bad] = 0
    return key, value


def band(problem: Problem) -> tuple[bool, int, int]:
    """Whether rows see only a band of keys, and its two sides."""
    left, right = problem.left, problem.right
    return left is not None or right is not None, NO_LIMIT if left is None else min(left, NO_LIMIT), \
        NO_LIMIT if right is None else min(right, NO_LIMIT)


def _operands(problem: Problem, results: Results) -> tuple[np.ndarray, ...]:
    """q, k, v, out and lse for the 16-bit kernels: in host memory made fit for them, on the card taken as they are."""
    nb, nh, _, length, *_ = problem.shape
    if results is not None:
        return (*(aligned(n, x) for n, x in (("query", problem.query), ("key", problem.key), ("value", problem.value))), *results)
    key, value = hide_nonfinite(np.ascontiguousarray(problem.key), np.ascontiguousarray(problem.value),
                                problem.precision == "bfloat16")
    q, k, v = _rows(problem.query), _rows(key), _rows(value)
    return q, k, v, np.zeros((nb, nh, length, v.shape[-1]), q.dtype), np.zeros((nb, nh, length), np.float32)


def _resident(results: tuple | None, *arrays: np.ndarray) -> frozenset[int]:
    """Ids of the arrays that lie on the card: they stand for memory that is not theirs. One that owns its memory is the host's."""
    return frozenset() if results is None else frozenset(id(x) for x in arrays if x.base is not None)


def _one_mask(problem: Problem) -> tuple[np.ndarray | None, str]:
    """The mask that a 16-bit kernel reads, and its kind: "", "bool" or "float" (a boolean mask then hides by -inf)."""
    if problem.bias is None:
        return problem.mask, "" if problem.mask is None else "bool"
    return problem.bias if problem.mask is None else np.where(problem.mask, problem.bias, np.float32(-np.inf)), "float"


def _per_head(problem: Problem, results: Results) -> tuple[np.ndarray, np.ndarray]:
    """Slopes (B x H) and sinks (H) as a 16-bit kernel reads them; one number that nobody reads where there are none."""
    nothing = np.zeros(1, np.float32)
    slopes = nothing if problem.alibi_slopes is None else np.ascontiguousarray(problem.alibi_slopes, np.float32)
    return slopes, nothing if results is None or problem.sinks is None else problem.sinks


def _float_options(problem: Problem, mask: str, results: Results) -> dict[str, Any]:
    """The constants that say what a 16-bit kernel has code for; with options that imply "transform" the scale's sign is none."""
    softcap, alibi = bool(problem.softcap), problem.alibi_slopes is not None
    return {"dtype": problem.precision, "band": band(problem)[0], "mask": mask, "softcap": softcap, "alibi": alibi,
            "sinks": results is not None and problem.sinks is not None,
            "transform": problem.scale <= 0 and not (softcap or alibi or mask == "float")}


def float_forward(problem: Problem, arch: str, results: Results = None) -> Launch:
    """The launch of `kernels.flash_float` for a float16 or bfloat16 problem; `results` (out, lse) say that it lies on the card.

    Sinks are added on the card by the kernel, else by the caller.
    """
    from .kernels.flash_float import flash_float
    nb, nh, nkv, length, s, d, dv = problem.shape
    bits = problem.precision == "bfloat16"
    if bits and arch == "sm_75":
        raise UnsupportedError("precision: got 'bfloat16'; sm_75 has float16 tensor cores only")
    q, k, v, out, lse = _operands(problem, results)
    group = nh // nkv
    _, left, right = band(problem)
    mask, kind = _one_mask(problem)
    stored = np.zeros(1, np.uint8) if mask is None else _storage(mask, results)
    slopes, sinks = _per_head(problem, results)
    turing = arch == "sm_75"
    tiling = cuda_tiling("sm_75" if turing else "sm_80", problem.precision, padded(d), padded(dv))
    block_q = rows_per_block(tiling, length * group)
    constants = {"d": padded(d), "dv": padded(dv), "block_q": block_q, "block_k": tiling.key_block, "group": group,
                 "turing": turing, **_float_options(problem, kind, results)}
    strides = tuple(int(n) for x in (q, k, v, out) for n in x.strides[:3]) + _strides(mask, results)
    # softcap acts on natural units: (cap * log2 e) * tanh(x / (cap * log2 e)) with x in units of log2
    args = ((q, k, v, out, lse, *_places(problem, s), stored, slopes, sinks), strides,
            (length, q.shape[-1] * 2, v.shape[-1] * 2, nh, left, right),
            (np.float32(problem.scale * LOG2E), np.float32(problem.softcap * LOG2E)))
    grid = (-(-length * group // block_q), nkv, nb)
    return Launch(flash_float, constants, arch, grid, args, lambda: (out[..., :dv], lse),
                  _resident(results, q, k, v, out, lse, stored, sinks))


def hopper_forward(problem: Problem, overlap: bool = True, results: Results = None) -> Launch:
    """The launch of `kernels.flash_hopper` for a float16 or bfloat16 problem; sinks as for `float_forward`."""
    from .kernels.flash_hopper import BLOCK_Q, PANEL, flash_hopper
    nb, nh, nkv, length, s, d, dv = problem.shape
    q, k, v, out, lse = _operands(problem, results)
    _, left, right = band(problem)
    tiling = cuda_tiling("sm_90a", problem.precision, d, dv)
    wide, dv_wide = (smallest(x, tiling.head_dims) for x in (d, dv))
    block_k, packed = tiling.key_block, packed_heads(nh // nkv)
    mask, kind = _one_mask(problem)
    stored = np.zeros(1, np.uint8) if mask is None else _storage(mask, results)
    slopes, sinks = _per_head(problem, results)
    constants = {"d": wide, "dv": dv_wide, "block_k": block_k, "group": nh // nkv, "packed": packed, "overlap": overlap,
                 **_float_options(problem, kind, results)}
    maps = [TensorMap(packed_rows(q, packed), (1, 1, BLOCK_Q // packed, packed, PANEL)),
            *(TensorMap(x, (1, 1, block_k, PANEL)) for x in (k, v))]
    args = ((maps, out, lse, *_places(problem, s), stored, slopes, sinks),
            (*(int(n) for n in out.strides[:3]), *_strides(mask, results)),
            (length, v.shape[-1] * 2, nh, left, right), (np.float32(problem.scale * LOG2E), np.float32(problem.softcap * LOG2E)))
    return Launch(flash_hopper, constants, "sm_90a", (-(-length * packed // BLOCK_Q), nh // packed, nb), args,
                  lambda: (out[..., :dv], lse), _resident(results, q, k, v, out, lse, stored, sinks))


def int8_forward(problem: Problem, arch: str) -> Launch:
    """The launch of `kernels.flash_int8` for a problem of QuantizedTensors.

    With pv "int8" its bits are those of `reference.integer_model`; with pv "fp32" its sums are in an order of their own.
    """
    nb, nh, nkv, length, s, d, dv = problem.shape
    wide, turing, group = problem.pv == "fp32", arch == "sm_75", nh // nkv
    if wide and turing:
        raise UnsupportedError("pv: got 'fp32'; sm_75 has no TF32 products; allowed there: 'int8'")
    cq, ck = combined_scale(problem.query, problem.key, problem.scale, problem.softcap)
    shift = cap_shift(problem) if problem.softcap else row_shift(problem.query, problem.key, problem.scale)
    q, k = _rows(problem.query.data, 16), _rows(problem.key.data, 16)
    stored = -(-s // KEY_BLOCK) * KEY_BLOCK
    v, v_scale, bad = _float_values(problem) if wide else _byte_values(problem, stored)
    channels = v_scale.shape[-1]
    key_scale = np.zeros((nb, nkv, 1, stored), np.float32)
    key_scale[..., 0, :s] = ck if bad is None else np.where(bad, np.float32(np.nan), ck)
    out = np.zeros((nb, nh, length, channels), np.float32)
    m, l = np.zeros((nb, nh, length), np.int32), np.zeros((nb, nh, length), np.float32)
    has_band, left, right = band(problem)
    mask, bias, nothing = problem.mask, problem.bias, np.zeros(1, np.float32)
    unit, softcap = fx.LOG2E_Q8, bool(problem.softcap)
    options = {"dv": padded(dv), "group": group, "band": has_band, "mask": mask is not None, "bias": bias is not None,
               "softcap": softcap, "alibi": problem.alibi_slopes is not None}
    capped = shift if shift is not None and softcap else np.zeros((nb, nh, length), np.float32)
    with np.errstate(over="ignore"):
        slopes = nothing if problem.alibi_slopes is None else np.ascontiguousarray(problem.alibi_slopes, np.float32) * unit
    cq, places = np.ascontiguousarray(cq), _places(problem, s)
    extras = (nothing if mask is None else _storage(mask), nothing if bias is None else _storage(bias), slopes, capped)
    mask_strides, cap = (*_strides(mask), *_strides(bias)), (np.float32(problem.softcap) * unit,)

    def finish() -> tuple[np.ndarray, np.ndarray]:
        return out[..., :dv], log_sum_exp(m, l, None if softcap else shift, 1 if wide else fx.P_ONE)

    packed = packed_heads(group)
    if arch == "sm_90a" and not wide and length * packed > MMA_ROWS:
        from .kernels.flash_int8_hopper import BLOCK_Q, PANEL_BYTES, flash_int8_hopper
        maps = [TensorMap(packed_rows(q, packed), (1, 1, BLOCK_Q // packed, packed, PANEL_BYTES)),
                TensorMap(k, (1, 1, KEY_BLOCK, PANEL_BYTES)), TensorMap(v, (1, 1, padded(dv), KEY_BLOCK)),
                TensorMap(key_scale, (1, 1, 1, KEY_BLOCK), swizzle=0)]
        on_hopper = (maps, out, m, l, cq, v_scale, *places, *extras), mask_strides, (length, channels, nh, left, right), cap
        return Launch(flash_int8_hopper, {"d": padded(d), **options, "packed": packed}, arch,
                      (-(-length * packed // BLOCK_Q), nh // packed, nb), on_hopper, finish)
    from .kernels.flash_int8 import flash_int8
    tiling = cuda_tiling("sm_75" if turing else "sm_80", "int8-fp32" if wide else "int8", d, dv)
    block_q = rows_per_block(tiling, length * group)
    args = ((q, k, v, out, m, l, cq, key_scale, v_scale, *places, *extras), mask_strides,
            (length, s, q.shape[-1], stored, channels, nh, left, right), cap)
    constants = {"d": smallest(d, tiling.head_dims), **options, "block_q": block_q, "wide": wide, "turing": turing,
                 "halves": tiling.key_block // (tiling.nv * tiling.lanes)}
    return Launch(flash_int8, constants, arch, (-(-length * group // block_q), nkv, nb), args, finish)


def packed_heads(group: int) -> int:
    """Heads that a Hopper kernel packs into one tile of 128 rows: the largest power of two that divides the group."""
    return math.gcd(group, 128)


def packed_rows(q: np.ndarray, packed: int) -> np.ndarray:
    """(B, H, L, D) seen as (B, H / packed, L, packed, D): row r of a tile is query r // packed of head r % packed."""
    nb, nh, length, d = q.shape
    return q.reshape(nb, nh // packed, packed, length, d).swapaxes(2, 3)


def _byte_values(problem: Problem, stored: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Values transposed to (B, Hkv, C, stored), their keys permuted; their scales (B, Hkv, C); keys that are not finite.

    C is Dv rounded up to whole 16 bytes of the output's float32.
    """
    from .kernels.flash_int8 import permuted_keys
    nb, _, nkv, _, s, _, dv = problem.shape
    channels = -(-dv // 4) * 4
    v, scale = np.zeros((nb, nkv, channels, stored), np.int8), np.zeros((nb, nkv, channels), np.float32)
    v[..., :dv, :s] = problem.value.data.swapaxes(-1, -2)
    scale[..., :dv] = problem.value.scale[:, :, 0]
    return np.ascontiguousarray(v[..., permuted_keys(stored)]), scale, problem.value.nonfinite


def _float_values(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values (B, Hkv, S, Dv or more) float32 with rows of whole 16 bytes, 0 where a key is not finite; scales of 1; those keys."""
    bad = ~np.isfinite(problem.value).all(-1)
    v = _rows(np.where(bad[..., None], np.float32(0), problem.value), 4)
    return v, np.ones((*v.shape[:2], v.shape[-1]), np.float32), bad


def float32_forward(problem: Problem, arch: str, results: Results = None) -> Launch:
    """The launch of `kernels.flash_float32` for a float32 problem; on the card its arrays are contiguous."""
    from .kernels.flash_float32 import WARPS, flash_float32
    nb, nh, nkv, length, s, d, dv = problem.shape
    if results is None:
        q, k, v = (np.ascontiguousarray(x, np.float32) for x in (problem.query, problem.key, problem.value))
        out, lse = np.zeros((nb, nh, length, dv), np.float32), np.zeros((nb, nh, length), np.float32)
    else:
        q, k, v, (out, lse) = problem.query, problem.key, problem.value, results
        if not all(x.flags.c_contiguous for x in (q, k, v, out)):
            raise UnsupportedError("query, key, value: not contiguous (B, H, L, D) on the card, which its float32 kernel needs")
    _, left, right = band(problem)
    mask, bias, slopes, nothing = problem.mask, problem.bias, problem.alibi_slopes, np.zeros(1, np.float32)
    mask_at, bias_at = (nothing if x is None else _storage(x, results) for x in (mask, bias))
    sinks = nothing if results is None or problem.sinks is None else problem.sinks
    constants = {"d": padded(d), "dv": padded(dv), "group": nh // nkv, "mask": mask is not None, "bias": bias is not None,
                 "softcap": bool(problem.softcap), "alibi": slopes is not None, "sinks": sinks is not nothing}
    args = ((q, k, v, out, lse, *_places(problem, s), mask_at, bias_at,
             nothing if slopes is None else np.ascontiguousarray(slopes, np.float32), sinks),
            (*_strides(mask, results), *_strides(bias, results)), (length, s, d, dv, nh, left, right),
            (np.float32(problem.scale * LOG2E), np.float32(problem.softcap * LOG2E)))
    return Launch(flash_float32, constants, arch, (-(-length // WARPS), nh, nb), args, lambda: (out, lse),
                  _resident(results, q, k, v, out, lse, mask_at, bias_at, sinks))


def _places(problem: Problem, s: int) -> tuple[np.ndarray, np.ndarray]:
    """Diagonal and number of keys of each batch entry, as int32."""
    return (np.clip(problem.diagonal, -NO_LIMIT, NO_LIMIT).astype(np.int32), np.minimum(problem.key_lengths, s).astype(np.int32))


def _storage(x: np.ndarray, results: tuple | None = None) -> np.ndarray:
    """The memory behind a broadcast view: one element stands for every index along an axis of stride 0. On a card as it lies."""
    part = x[tuple(slice(0, 1) if n == 0 else slice(None) for n in x.strides)]
    return part if results is not None else np.ascontiguousarray(part).view(np.uint8)


def _strides(x: np.ndarray | None, results: tuple | None = None) -> tuple[int, ...]:
    """Bytes from element to element of `_storage`, 0 along the axes where one stands for all; zeros without an array."""
    if x is None:
        return (0, 0, 0, 0)
    if results is not None:
        return x.strides
    sizes = [1 if n == 0 else size for n, size in zip(x.strides, x.shape, strict=True)]
    return tuple(0 if n == 0 else x.itemsize * int(np.prod(sizes[axis + 1:])) for axis, n in enumerate(x.strides))


def emulated(launch: Launch, **options: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Run a launch in the emulator: out, lse and the report."""
    from .compile import compiled
    from .emulator import emulate
    kernel = compiled(launch.factory, launch.arch, "ptx", **launch.constants)
    report = emulate(kernel, launch.grid, None, list(launch.args), **options)
    return (*launch.finish(), report)
