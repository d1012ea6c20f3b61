"""From an INT8 problem to one kernel launch: the operands, and the kernel that takes them.

Operands are made of QuantizedTensors here, or of floats on the card (`quantized`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnsupportedError
from ..numerics import fixedpoint as fx
from ..numerics.quantization import float_values
from ..numerics.scores import cap_shift, combined_scale, log_sum_exp, row_shift
from ..tiling import CUDA_NARROW, KEY_BLOCK, Tiling, cuda_tiling
from ..tiling import padded as smallest
from ..validation import Problem
from .device.operands import (
    MMA_ROWS,
    Launch,
    Results,
    band,
    folding,
    key_places,
    option_constants,
    packed_heads,
    packed_rows,
    padded,
    padded_rows,
    resident_ids,
    rows_per_block,
    slopes_of,
    storage,
    strides_of,
)
from .instructions.tensormap import TensorMap


class Operands(NamedTuple):
    """What an INT8 kernel reads, and what it writes.

    query, key : (B, H, L, bytes) and (B, Hkv, S, bytes) int8, rows of whole 16 bytes
    value : (B, Hkv, C, stored) int8, transposed, the keys of each 32 permuted
        (`flash_int8.permuted_keys`); with pv "fp32" (B, Hkv, S, C) float32
    query_scale : (B, H, L) float32, in Q8.8 or units of the softcap
    key_scale : (B, Hkv, 1, stored) float32, NaN for a key that is not finite
    value_scale : (B, Hkv, C) float32
    shift : (B, H, L) float32, `scores.cap_shift`; read with a softcap only
    first_keys, first_scale, first_value : of every sequence, as `kernels.int8_first` takes them:
        (B, Hkv, 8, width) int8, bytes and what these leave of 13 bits; (B, Hkv, 4) float32, the
        scales of the latter; (B, Hkv, 4, padded Dv) float32
    out, octave, total : (B, H, L, C) float32; m and l, (B, H, L) int32 and float32

    C is Dv rounded up to whole 16 bytes of float32, `stored` S to whole key blocks.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    query_scale: np.ndarray
    key_scale: np.ndarray
    value_scale: np.ndarray
    shift: np.ndarray
    first_keys: np.ndarray
    first_scale: np.ndarray
    first_value: np.ndarray
    out: np.ndarray
    octave: np.ndarray
    total: np.ndarray


class Chosen(NamedTuple):
    """The kernel for a problem.

    hopper : `flash_int8_hopper`, else `flash_int8`;  tiling : its own;  width : channels of K's rows
        as it computes with them
    """

    hopper: bool
    tiling: Tiling
    width: int


def choose(problem: Problem, arch: str) -> Chosen:
    """Which kernel takes a problem on an architecture."""
    _, nh, nkv, length, s, d, dv = problem.shape
    wide, turing = problem.pv == "fp32", arch == "sm_75"
    if problem.pv == "bf16":
        raise UnsupportedError(
            "pv: got 'bf16' on a card; allowed there: 'int8', 'int16' and 'fp32'"
        )
    if wide and turing:
        raise UnsupportedError(
            "pv: got 'fp32'; sm_75 has no TF32 products; allowed there: 'int8' and 'int16'"
        )
    many = length * packed_heads(nh // nkv) > MMA_ROWS
    if (
        arch == "sm_90a" and problem.pv == "int8" and many and s
    ):  # of nothing there is no tensor map
        return Chosen(True, hopper_tiling(d, dv, option_constants(problem)), padded(d))
    tiling = cuda_tiling("sm_75" if turing else "sm_80", "int8-fp32" if wide else "int8", d, dv)
    return Chosen(False, tiling, smallest(d, tiling.head_dims))


def hopper_tiling(d: int, dv: int, options: dict[str, Any]) -> Tiling:
    """As many rows as registers allow: options that touch the scores take some, a softcap none.

    options : those of `kernels.int8_rows.Int8Options`
    """
    plain = not any(options.get(name) for name in ("mask", "bias", "alibi"))
    return cuda_tiling("sm_90a", "int8", d, dv, plain or dv <= CUDA_NARROW)


def sizes_of(problem: Problem) -> tuple[int, int]:
    """C and `stored` of `Operands`."""
    _, _, _, _, s, _, dv = problem.shape
    return -(-dv // 4) * 4, -(-s // KEY_BLOCK) * KEY_BLOCK


def int8_forward(problem: Problem, arch: str) -> Launch:
    """The launch for a problem of QuantizedTensors in host memory.

    With pv "int8" and "int16" its bits are those of `reference.integer_model`; with pv "fp32" its sums
    are in an order of their own.
    """
    nb, nh, nkv, length, s, _, dv = problem.shape
    chosen = choose(problem, arch)
    wide, softcap = problem.pv == "fp32", bool(problem.softcap)
    cq, ck = combined_scale(problem.query, problem.key, problem.scale, problem.softcap)
    shift = (
        cap_shift(problem)
        if softcap
        else row_shift(problem.query, problem.key.offset, problem.scale)
    )
    channels, stored = sizes_of(problem)
    v, v_scale, bad = _float_values(problem) if wide else _byte_values(problem, channels, stored)
    key_scale = np.zeros((nb, nkv, 1, stored), np.float32)
    key_scale[..., 0, :s] = ck if bad is None else np.where(bad, np.float32(np.nan), ck)
    rows = (nb, nh, length)
    nothing = np.zeros(1, np.float32)
    first_keys, first_scale, first_value = (
        (nothing,) * 3 if wide else _first_keys(problem, key_scale, chosen.width)
    )
    x = Operands(
        padded_rows(problem.query.data, 16),
        padded_rows(problem.key.data, 16),
        v,
        np.ascontiguousarray(cq),
        key_scale,
        v_scale,
        shift if shift is not None and softcap else np.zeros(rows, np.float32),
        first_keys,
        first_scale,
        first_value,
        np.zeros((*rows, v_scale.shape[-1]), np.float32),
        np.zeros(rows, np.int32),
        np.zeros(rows, np.float32),
    )

    def finish() -> tuple[np.ndarray, np.ndarray]:
        one = fx.WEIGHT_ONE[problem.pv]
        return x.out[..., :dv], log_sum_exp(x.octave, x.total, None if softcap else shift, one)

    return launch_of(problem, arch, chosen, x, finish)


def launch_of(
    problem: Problem,
    arch: str,
    chosen: Chosen,
    x: Operands,
    finish: Callable[[], Any],
    results: Results = None,
) -> Launch:
    """The launch on these operands; `results` say that they, and the masks, are on the card."""
    nb, nh, nkv, length, s, _, dv = problem.shape
    group = nh // nkv
    has_band, left, right = band(problem)
    options = {
        "dv": padded(dv),
        "group": group,
        "band": has_band,
        **folding(nb),
        **option_constants(problem),
        "first_keys": problem.first_keys,
    }
    with np.errstate(all="ignore"):
        slopes = slopes_of(problem) * fx.LOG2E_Q8
    mask_at, bias_at = storage(problem.mask, results), storage(problem.bias, results)
    per_row = (*key_places(problem, s), mask_at, bias_at, slopes, x.shift)
    strides = (*strides_of(problem.mask, results), *strides_of(problem.bias, results))
    cap = (np.float32(problem.softcap) * fx.LOG2E_Q8,)
    first = (x.first_keys, x.first_scale, x.first_value)
    resident = resident_ids(results, *x, mask_at, bias_at)
    outputs = (x.out, x.octave, x.total)
    row_bytes, channels = x.query.shape[-1], x.value_scale.shape[-1]
    if chosen.hopper:
        from .kernels.flash_int8_hopper import flash_int8_hopper
        from .kernels.hopper import PANEL_BYTES

        packed, block_q = packed_heads(group), chosen.tiling.block_q
        maps = [
            TensorMap(packed_rows(x.query, packed), (1, 1, block_q // packed, packed, PANEL_BYTES)),
            TensorMap(x.key, (1, 1, KEY_BLOCK, PANEL_BYTES)),
            TensorMap(x.value, (1, 1, padded(dv), KEY_BLOCK)),
            TensorMap(x.key_scale, (1, 1, 1, KEY_BLOCK), swizzle=0),
        ]
        args: tuple = (
            (maps, *outputs, x.query_scale, x.value_scale, *per_row, x.query, *first),
            strides,
            (length, channels, nh, left, right, row_bytes),
            cap,
        )
        constants: dict[str, Any] = {
            "d": chosen.width,
            "block_q": block_q,
            **options,
            "packed": packed,
        }
        grid = (-(-length * packed // block_q), nh // packed, nb)
        return Launch(
            flash_int8_hopper, constants, arch, grid, args, finish, resident, written=outputs
        )
    from .kernels.flash_int8 import flash_int8

    tiling = chosen.tiling
    block_q = rows_per_block(tiling, length * group)
    scales = (x.query_scale, x.key_scale, x.value_scale)
    args = (
        (x.query, x.key, x.value, *outputs, *scales, *per_row, *first),
        strides,
        (length, s, row_bytes, x.key_scale.shape[-1], channels, nh, left, right),
        cap,
    )
    constants = {
        "d": chosen.width,
        **options,
        "block_q": block_q,
        "pv": problem.pv,
        "turing": arch == "sm_75",
        "halves": tiling.key_block // (tiling.nv * tiling.lanes),
    }
    grid = (-(-length * group // block_q), nkv, nb)
    return Launch(flash_int8, constants, arch, grid, args, finish, resident, written=outputs)


def _byte_values(
    problem: Problem, channels: int, stored: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Values transposed to (B, Hkv, C, stored), their keys permuted; their scales (B, Hkv, C).

    Third, which values are not finite, or None.
    """
    from .kernels.flash_int8 import permuted_keys

    nb, _, nkv, _, s, _, dv = problem.shape
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
    values[:, :, :n, :dv] = problem.value.finer_rows() * np.float32(1 / fx.FINER)
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
