"""From a validated problem to one kernel launch.

Which kernel, with which constants, over which grid, on which arguments.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import fixedpoint as fx
from ..errors import UnsupportedError
from ..quantization import float_values
from ..scores import cap_shift, combined_scale, log_sum_exp, row_shift
from ..tiling import KEY_BLOCK, Tiling, cuda_tiling
from ..tiling import padded as smallest
from ..validation import Problem
from .operands import (
    LOG2E,
    Launch,
    Results,
    aligned,
    band,
    key_places,
    padded,
    padded_rows,
    resident_ids,
    storage,
    strides_of,
)
from .tensormap import TensorMap
from .tile_list import tile_list

MMA_ROWS = 64  # so few rows fill no tile of the Hopper kernels: mma.sync has smaller ones


def rows_per_block(tiling: Tiling, rows: int) -> int:
    """Query rows per tile: the tiling's, or fewer warps where there are few rows."""
    warps = min(tiling.block_q // tiling.mr, max(1, -(-rows // tiling.mr)))
    return tiling.mr * (4 if warps == 3 else warps)


def hide_nonfinite(key: np.ndarray, value: np.ndarray, bits: bool) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values such that 0 * NaN never happens.

    A key row whose value is not finite becomes NaN, its value 0.

    A hidden key's score is replaced before it is used, so a NaN key makes exactly the rows NaN that
    attend to it.
    """
    exponent = np.uint16(0x7F80 if bits else 0x7C00)
    bad = (value.view(np.uint16) & exponent) == exponent
    if not bad.any():
        return key, value
    rows = bad.any(-1)
    key = key.copy()
    value = value.copy()
    key.view(np.uint16)[rows] = 0x7FC0 if bits else 0x7E00
    value.view(np.uint16)[bad] = 0
    return key, value


def _operands(problem: Problem, results: Results) -> tuple[np.ndarray, ...]:
    """q, k, v, out and lse for the 16-bit kernels.

    In host memory made fit for them, on the card taken as they are.
    """
    nb, nh, _, length, *_ = problem.shape
    if results is not None:
        return (
            *(
                aligned(n, x)
                for n, x in (
                    ("query", problem.query),
                    ("key", problem.key),
                    ("value", problem.value),
                )
            ),
            *results,
        )
    key, value = hide_nonfinite(
        np.ascontiguousarray(problem.key),
        np.ascontiguousarray(problem.value),
        problem.precision == "bfloat16",
    )
    q = padded_rows(problem.query)
    k = padded_rows(key)
    v = padded_rows(value)
    return (
        q,
        k,
        v,
        np.zeros((nb, nh, length, v.shape[-1]), q.dtype),
        np.zeros((nb, nh, length), np.float32),
    )


def _one_mask(problem: Problem) -> tuple[np.ndarray | None, str]:
    """The mask that a 16-bit kernel reads, and its kind.

    "", "bool" or "float" (a boolean mask then hides by -inf).
    """
    if problem.bias is None:
        return problem.mask, "" if problem.mask is None else "bool"
    return problem.bias if problem.mask is None else np.where(
        problem.mask, problem.bias, np.float32(-np.inf)
    ), "float"


def _per_head(problem: Problem, results: Results) -> tuple[np.ndarray, np.ndarray]:
    """Slopes (B x H) and sinks (H) as a 16-bit kernel reads them.

    One number that nobody reads where there are none.
    """
    nothing = np.zeros(1, np.float32)
    slopes = (
        nothing
        if problem.alibi_slopes is None
        else np.ascontiguousarray(problem.alibi_slopes, np.float32)
    )
    return slopes, nothing if results is None or problem.sinks is None else problem.sinks


def _functions(problem: Problem, packed: int, tile: tuple[int, int]) -> tuple[dict, tuple]:
    """Constants and arrays of a problem's functions, for tiles of (rows, keys) of `packed` heads;
    nothing where there are none.
    """
    functions = problem.functions
    if functions is None:
        return {}, ()
    nb, nh, nkv, length, s, *_ = problem.shape
    code = functions.on_device((nb, nh, length, s))
    listed = bool(functions.states.size and tile[1])
    tiles = np.zeros(1, np.int32)
    if listed:
        tiles = tile_list(functions.states, functions.block, (length, s), packed, tile)
    constants: dict[str, Any] = {"functions": code.name}
    if tile[1]:
        constants["listed"] = listed
    return constants, (code.frame, code.batches, tiles, *code.arrays)


def _float_options(problem: Problem, mask: str, results: Results) -> dict[str, Any]:
    """The constants that say what a 16-bit kernel has code for.

    With options that imply "transform" the scale's sign is none.
    """
    softcap = bool(problem.softcap)
    alibi = problem.alibi_slopes is not None
    return {
        "dtype": problem.precision,
        "band": band(problem)[0],
        "mask": mask,
        "softcap": softcap,
        "alibi": alibi,
        "sinks": results is not None and problem.sinks is not None,
        "transform": problem.scale <= 0 and not (softcap or alibi or mask == "float"),
    }


def float_forward(problem: Problem, arch: str, results: Results = None) -> Launch:
    """The launch of `kernels.flash_float` for a float16 or bfloat16 problem.

    `results` (out, lse) say that it is on the card.

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
    stored = np.zeros(1, np.uint8) if mask is None else storage(mask, results)
    slopes, sinks = _per_head(problem, results)
    turing = arch == "sm_75"
    tiling = cuda_tiling("sm_75" if turing else "sm_80", problem.precision, padded(d), padded(dv))
    block_q = rows_per_block(tiling, length * group)
    constants = {
        "d": padded(d),
        "dv": padded(dv),
        "block_q": block_q,
        "block_k": tiling.key_block,
        "group": group,
        "turing": turing,
        **_float_options(problem, kind, results),
    }
    chosen, functions = _functions(problem, group, (block_q, tiling.key_block))
    constants.update(chosen)
    strides = tuple(int(n) for x in (q, k, v, out) for n in x.strides[:3]) + strides_of(
        mask, results
    )
    # softcap acts on natural units: (cap * log2 e) * tanh(x / (cap * log2 e)) with x in units of
    # log2
    args = (
        (q, k, v, out, lse, *key_places(problem, s), stored, slopes, sinks, *functions),
        strides,
        (length, q.shape[-1] * 2, v.shape[-1] * 2, nh, left, right),
        (np.float32(problem.scale * LOG2E), np.float32(problem.softcap * LOG2E)),
    )
    grid = (-(-length * group // block_q), nkv, nb)
    return Launch(
        flash_float,
        constants,
        arch,
        grid,
        args,
        lambda: (out[..., :dv], lse),
        resident_ids(results, q, k, v, out, lse, stored, sinks),
    )


def hopper_forward(problem: Problem, overlap: bool = True, results: Results = None) -> Launch:
    """The launch of `kernels.flash_hopper` for a float16 or bfloat16 problem.

    Sinks as for `float_forward`.
    """
    from .kernels.flash_hopper import BLOCK_Q, PANEL, flash_hopper

    nb, nh, nkv, length, s, d, dv = problem.shape
    q, k, v, out, lse = _operands(problem, results)
    _, left, right = band(problem)
    tiling = cuda_tiling("sm_90a", problem.precision, d, dv)
    wide, dv_wide = (smallest(x, tiling.head_dims) for x in (d, dv))
    block_k = tiling.key_block
    packed = packed_heads(nh // nkv)
    mask, kind = _one_mask(problem)
    stored = np.zeros(1, np.uint8) if mask is None else storage(mask, results)
    slopes, sinks = _per_head(problem, results)
    constants = {
        "d": wide,
        "dv": dv_wide,
        "block_k": block_k,
        "group": nh // nkv,
        "packed": packed,
        "overlap": overlap,
        # turns at the tensor cores pay where a tile's products are about as long as its softmax
        # (FlashAttention-3 does the same)
        "ping_pong": max(wide, dv_wide) <= 128,
        **_float_options(problem, kind, results),
    }
    chosen, functions = _functions(problem, packed, (BLOCK_Q, block_k))
    constants.update(chosen)
    maps = [
        TensorMap(packed_rows(q, packed), (1, 1, BLOCK_Q // packed, packed, PANEL)),
        *(TensorMap(x, (1, 1, block_k, PANEL)) for x in (k, v)),
    ]
    args = (
        (maps, out, lse, *key_places(problem, s), stored, slopes, sinks, *functions),
        (*(int(n) for n in out.strides[:3]), *strides_of(mask, results)),
        (length, v.shape[-1] * 2, nh, left, right),
        (np.float32(problem.scale * LOG2E), np.float32(problem.softcap * LOG2E)),
    )
    return Launch(
        flash_hopper,
        constants,
        "sm_90a",
        (-(-length * packed // BLOCK_Q), nh // packed, nb),
        args,
        lambda: (out[..., :dv], lse),
        resident_ids(results, q, k, v, out, lse, stored, sinks),
    )


def int8_forward(problem: Problem, arch: str) -> Launch:
    """The launch of `kernels.flash_int8` for a problem of QuantizedTensors.

    With pv "int8" its bits are those of `reference.integer_model`; with pv "fp32" its sums are in
    an order of their own.
    """
    nb, nh, nkv, length, s, d, dv = problem.shape
    wide = problem.pv == "fp32"
    turing = arch == "sm_75"
    group = nh // nkv
    if wide and turing:
        raise UnsupportedError("pv: got 'fp32'; sm_75 has no TF32 products; allowed there: 'int8'")
    cq, ck = combined_scale(problem.query, problem.key, problem.scale, problem.softcap)
    shift = (
        cap_shift(problem)
        if problem.softcap
        else row_shift(problem.query, problem.key.offset, problem.scale)
    )
    q = padded_rows(problem.query.data, 16)
    k = padded_rows(problem.key.data, 16)
    stored = -(-s // KEY_BLOCK) * KEY_BLOCK
    v, v_scale, bad = _float_values(problem) if wide else _byte_values(problem, stored)
    channels = v_scale.shape[-1]
    key_scale = np.zeros((nb, nkv, 1, stored), np.float32)
    key_scale[..., 0, :s] = ck if bad is None else np.where(bad, np.float32(np.nan), ck)
    out = np.zeros((nb, nh, length, channels), np.float32)
    m = np.zeros((nb, nh, length), np.int32)
    l = np.zeros((nb, nh, length), np.float32)
    has_band, left, right = band(problem)
    mask = problem.mask
    bias = problem.bias
    nothing = np.zeros(1, np.float32)
    unit = fx.LOG2E_Q8
    softcap = bool(problem.softcap)
    options = {
        "dv": padded(dv),
        "group": group,
        "band": has_band,
        "mask": mask is not None,
        "bias": bias is not None,
        "softcap": softcap,
        "alibi": problem.alibi_slopes is not None,
    }
    capped = shift if shift is not None and softcap else np.zeros((nb, nh, length), np.float32)
    with np.errstate(over="ignore"):
        slopes = (
            nothing
            if problem.alibi_slopes is None
            else np.ascontiguousarray(problem.alibi_slopes, np.float32) * unit
        )
    cq = np.ascontiguousarray(cq)
    places = key_places(problem, s)
    extras = (
        nothing if mask is None else storage(mask),
        nothing if bias is None else storage(bias),
        slopes,
        capped,
    )
    mask_strides = (*strides_of(mask), *strides_of(bias))
    cap = (np.float32(problem.softcap) * unit,)

    def finish() -> tuple[np.ndarray, np.ndarray]:
        return out[..., :dv], log_sum_exp(m, l, None if softcap else shift, 1 if wide else fx.P_ONE)

    packed = packed_heads(group)
    if arch == "sm_90a" and not wide and length * packed > MMA_ROWS:
        from .kernels.flash_int8_hopper import BLOCK_Q, PANEL_BYTES, flash_int8_hopper

        first = _first_keys(problem, key_scale, padded(d))
        maps = [
            TensorMap(packed_rows(q, packed), (1, 1, BLOCK_Q // packed, packed, PANEL_BYTES)),
            TensorMap(k, (1, 1, KEY_BLOCK, PANEL_BYTES)),
            TensorMap(v, (1, 1, padded(dv), KEY_BLOCK)),
            TensorMap(key_scale, (1, 1, 1, KEY_BLOCK), swizzle=0),
        ]
        on_hopper = (
            (maps, out, m, l, cq, v_scale, *places, *extras, q, *first),
            mask_strides,
            (length, channels, nh, left, right, q.shape[-1]),
            cap,
        )
        return Launch(
            flash_int8_hopper,
            {"d": padded(d), **options, "packed": packed, "first_keys": problem.first_keys},
            arch,
            (-(-length * packed // BLOCK_Q), nh // packed, nb),
            on_hopper,
            finish,
        )
    from .kernels.flash_int8 import flash_int8

    tiling = cuda_tiling("sm_75" if turing else "sm_80", "int8-fp32" if wide else "int8", d, dv)
    block_q = rows_per_block(tiling, length * group)
    width = smallest(d, tiling.head_dims)
    first = (nothing,) * 3 if wide else _first_keys(problem, key_scale, width)
    args = (
        (q, k, v, out, m, l, cq, key_scale, v_scale, *places, *extras, *first),
        mask_strides,
        (length, s, q.shape[-1], stored, channels, nh, left, right),
        cap,
    )
    constants = {
        "d": width,
        **options,
        "block_q": block_q,
        "wide": wide,
        "turing": turing,
        "first_keys": problem.first_keys,
        "halves": tiling.key_block // (tiling.nv * tiling.lanes),
    }
    return Launch(
        flash_int8, constants, arch, (-(-length * group // block_q), nkv, nb), args, finish
    )


def packed_heads(group: int) -> int:
    """Heads that a Hopper kernel packs into one tile of 128 rows.

    The largest power of two that divides the group.
    """
    return math.gcd(group, 128)


def packed_rows(q: np.ndarray, packed: int) -> np.ndarray:
    """(B, H, L, D) seen as (B, H / packed, L, packed, D).

    Row r of a tile is query r // packed of head r % packed.
    """
    nb, nh, length, d = q.shape
    return q.reshape(nb, nh // packed, packed, length, d).swapaxes(2, 3)


def _byte_values(problem: Problem, stored: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Values transposed to (B, Hkv, C, stored), their keys permuted; their scales (B, Hkv, C).

    Third, which values are not finite, or None. C is Dv rounded up to whole 16 bytes of the output's float32.
    """
    from .kernels.flash_int8 import permuted_keys

    nb, _, nkv, _, s, _, dv = problem.shape
    channels = -(-dv // 4) * 4
    v = np.zeros((nb, nkv, channels, stored), np.int8)
    scale = np.zeros((nb, nkv, channels), np.float32)
    v[..., :dv, :s] = problem.value.data.swapaxes(-1, -2)
    scale[..., :dv] = problem.value.scale[:, :, 0]
    return np.ascontiguousarray(v[..., permuted_keys(stored)]), scale, problem.value.nonfinite


def _first_keys(
    problem: Problem, key_scale: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first keys of every sequence as `kernels.int8_first` takes them.

    Their bytes and what these leave of 13 bits (B, Hkv, 8, width) int8, the scales of the latter
    (B, Hkv, 4) and the values (B, Hkv, 4, padded Dv) float32; key_scale (B, Hkv, 1, keys).
    """
    nb, _, nkv, _, s, d, dv = problem.shape
    n = min(s, fx.FIRST_KEYS)
    planes = np.zeros((nb, nkv, 2, fx.FIRST_KEYS, width), np.int8)
    scale = np.zeros((nb, nkv, fx.FIRST_KEYS), np.float32)
    values = np.zeros((nb, nkv, fx.FIRST_KEYS, padded(dv)), np.float32)
    planes[:, :, 0, :n, :d] = problem.key.data[:, :, :n]
    if problem.key.low is not None:
        planes[:, :, 1, :n, :d] = problem.key.low
    scale[..., :n] = key_scale[:, :, 0, :n] * np.float32(1 / fx.FINER)
    rows = problem.value.data[:, :, :n].astype(np.int16) * np.int16(fx.FINER)
    if problem.value.low is not None:
        rows = rows + problem.value.low
    values[:, :, :n, :dv] = rows * np.float32(1 / fx.FINER)
    return planes.reshape(nb, nkv, 2 * fx.FIRST_KEYS, width), scale, values


def _float_values(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values (B, Hkv, S, Dv or more) float32 with rows of whole 16 bytes, 0 where a key is not
    finite; the units of their channels; those keys.
    """
    values, units, bad = float_values(problem.value)
    v = padded_rows(np.where(bad[..., None], np.float32(0), values), 4)
    scale = np.ones((*v.shape[:2], v.shape[-1]), np.float32)
    scale[..., : units.shape[-1]] = units
    return v, scale, bad


def float32_forward(problem: Problem, arch: str, results: Results = None) -> Launch:
    """The launch of `kernels.flash_float32` for a float32 problem.

    On the card its arrays are contiguous.
    """
    from .kernels.flash_float32 import WARPS, flash_float32

    nb, nh, nkv, length, s, d, dv = problem.shape
    if results is None:
        q, k, v = (
            np.ascontiguousarray(x, np.float32) for x in (problem.query, problem.key, problem.value)
        )
        out = np.zeros((nb, nh, length, dv), np.float32)
        lse = np.zeros((nb, nh, length), np.float32)
    else:
        q, k, v, (out, lse) = problem.query, problem.key, problem.value, results
        if not all(x.flags.c_contiguous for x in (q, k, v, out)):
            raise UnsupportedError(
                "query, key, value: not contiguous (B, H, L, D) on the card, which its float32 kernel needs"
            )
    _, left, right = band(problem)
    mask = problem.mask
    bias = problem.bias
    slopes = problem.alibi_slopes
    nothing = np.zeros(1, np.float32)
    mask_at, bias_at = (nothing if x is None else storage(x, results) for x in (mask, bias))
    sinks = nothing if results is None or problem.sinks is None else problem.sinks
    constants = {
        "d": padded(d),
        "dv": padded(dv),
        "group": nh // nkv,
        "mask": mask is not None,
        "bias": bias is not None,
        "softcap": bool(problem.softcap),
        "alibi": slopes is not None,
        "sinks": sinks is not nothing,
    }
    chosen, functions = _functions(problem, 1, (WARPS, 0))
    constants.update(chosen)
    args = (
        (
            q,
            k,
            v,
            out,
            lse,
            *key_places(problem, s),
            mask_at,
            bias_at,
            nothing if slopes is None else np.ascontiguousarray(slopes, np.float32),
            sinks,
            *functions,
        ),
        (*strides_of(mask, results), *strides_of(bias, results)),
        (length, s, d, dv, nh, left, right),
        (np.float32(problem.scale * LOG2E), np.float32(problem.softcap * LOG2E)),
    )
    return Launch(
        flash_float32,
        constants,
        arch,
        (-(-length // WARPS), nh, nb),
        args,
        lambda: (out, lse),
        resident_ids(results, q, k, v, out, lse, mask_at, bias_at, sinks),
    )
