"""From a validated problem in floats to one kernel launch.

Which kernel, with which constants, over which grid, on which arguments.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import UnsupportedError
from ..tiling import CUDA_SCORE_TIME, CUDA_SHARED_KEYS, Tiling, cuda_tiling, cuda_tilings
from ..tiling import padded as smallest
from ..validation import Problem
from .device.arrangement import Arrangement, band_costs, listed_costs
from .device.operands import (
    KEPT_IN_L2,
    LOG2E,
    Launch,
    Parts,
    Results,
    aligned,
    band,
    float_cap,
    folding,
    key_places,
    one_mask,
    option_constants,
    packed_heads,
    packed_rows,
    padded,
    padded_rows,
    refuse_bfloat16,
    resident_ids,
    rows_per_block,
    scores_unchanged,
    slopes_of,
    steps,
    storage,
    strides_of,
)
from .device.tile_list import tile_list
from .instructions.tensormap import TensorMap

# beyond it scores are scaled before their maximum is taken off, as with a scale of 0 or less. Else one
# fused multiply-add does both, exactly, where the maximum times the scale is rounded: from 2**28 on
# they differ by more than 16 octaves, which a weight of 16 bits does not hold
LARGEST_SCALE = 2.0**16
MOST_ROWS = (1 << 31) - 1  # of all heads: kernels number them in 32 bits
LISTS_KEPT = 8  # lists of tiles of one problem's functions: lengths, heads together, tile sizes
_lists: WeakKeyDictionary[Any, dict[Any, np.ndarray]] = WeakKeyDictionary()


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
    if nb * nh * length > MOST_ROWS:
        raise UnsupportedError(
            f"query: got {nb * nh * length} rows of all heads; allowed on a card: {MOST_ROWS}"
        )
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


def _sinks(problem: Problem, results: Results) -> np.ndarray:
    """Sinks (H) as a kernel reads them on the card, or one number that nobody reads."""
    if results is None or problem.sinks is None:
        return np.zeros(1, np.float32)
    return problem.sinks


def _factors(problem: Problem) -> tuple[np.float32, np.float32, np.float32]:
    """Of the scores, which the 16-bit kernels have in units of log2: see `scores.make_adjust`."""
    cap = float_cap(problem)
    twice = 2 / cap if cap else 0.0
    return np.float32(problem.scale * LOG2E), np.float32(cap * LOG2E), np.float32(twice)


def _tiles_of(
    functions: Any, lengths: tuple[int, int], packed: int, tile: tuple[int, int]
) -> np.ndarray:
    """`tile_list` of a problem's functions, made once for all calls with one block mask, which
    keeps these.
    """
    known = _lists.setdefault(functions, {})
    found = known.get((lengths, packed, tile))
    if found is None:
        found = tile_list(functions.states, functions.block, lengths, packed, tile)
        if len(known) >= LISTS_KEPT:
            known.clear()
        known[lengths, packed, tile] = found
    return found


def _functions(problem: Problem, packed: int, tile: tuple[int, int]) -> tuple[dict, tuple]:
    """Constants and arrays of a problem's functions, for tiles of (rows, keys) of `packed` heads;
    nothing where there are none.
    """
    functions = problem.functions
    if functions is None:
        return {}, ()
    nb, nh, _, length, s, *_ = problem.shape
    code = functions.on_device((nb, nh, length, s))
    listed = bool(functions.states.size and tile[1])
    tiles = np.zeros(1, np.int32)
    if listed:
        tiles = _tiles_of(functions, (length, s), packed, tile)
    constants: dict[str, Any] = {"functions": code.name}
    if tile[1]:
        constants["listed"] = listed
    return constants, (code.frame, code.batches, tiles, *code.arrays)


def _moderate(problem: Problem) -> bool:
    """Whether the largest score is that of the largest product, and its scale within bounds."""
    return 0 < problem.scale <= LARGEST_SCALE


def _float_options(problem: Problem, mask: str, results: Results) -> dict[str, Any]:
    """The constants that say what a 16-bit kernel has code for.

    With options that imply "transform" the scale has no say.
    """
    softcap = bool(problem.softcap)
    alibi = problem.alibi_slopes is not None
    scaled = softcap or alibi or mask == "float"
    return {
        "dtype": problem.precision,
        "band": band(problem)[0],
        "mask": mask,
        "softcap": softcap,
        "alibi": alibi,
        "sinks": results is not None and problem.sinks is not None,
        "transform": not (scaled or _moderate(problem)),
    }


def float_tiling(problem: Problem, arch: str) -> Tiling:
    """The tiling of `kernels.flash_float` for a problem."""
    *_, d, dv = problem.shape
    family = "sm_75" if arch == "sm_75" else "sm_80"
    return cuda_tiling(family, problem.precision, padded(d), padded(dv))


def float_forward(
    problem: Problem, arch: str, results: Results = None, parts: Parts | None = None
) -> Launch:
    """The launch of `kernels.flash_float` for a float16 or bfloat16 problem.

    `results` (out, lse) say that it is on the card; with `parts` of the keys these are written.

    Sinks are added on the card by the kernel, else by the caller.
    """
    from .kernels.flash_float import flash_float

    nb, nh, nkv, length, s, d, dv = problem.shape
    refuse_bfloat16(problem, arch)
    q, k, v, out, lse = _operands(problem, results)
    if parts is not None:
        out, lse = parts.out, parts.lse
    group = nh // nkv
    _, left, right = band(problem)
    mask, kind = one_mask(problem)
    stored, sinks = storage(mask, results), _sinks(problem, results)
    turing = arch == "sm_75"
    count = 1 if parts is None else parts.number
    tiling = float_tiling(problem, arch)
    block_q = rows_per_block(tiling, length * group)
    constants = {
        "d": padded(d),
        "dv": padded(dv),
        "block_q": block_q,
        "block_k": tiling.key_block,
        "group": group,
        "turing": turing,
        **({} if parts is None else {"split": True}),
        **folding(nb),
        **_float_options(problem, kind, results),
    }
    chosen, functions = _functions(problem, group, (block_q, tiling.key_block))
    constants.update(chosen)
    strides = steps(q, k, v, out) + strides_of(mask, results)
    args = (
        (q, k, v, out, lse, *key_places(problem, s), stored, slopes_of(problem), sinks, *functions),
        strides,
        (length, q.shape[-1] * 2, v.shape[-1] * 2, nh, left, right, count),
        _factors(problem),
    )
    grid = (-(-length * group // block_q) * count, nkv, nb)
    return Launch(
        flash_float,
        constants,
        arch,
        grid,
        args,
        lambda: (out[..., :dv], lse),
        resident_ids(results, q, k, v, out, lse, stored, sinks),
        written=(out, lse),
    )


def scores_as_they_are(problem: Problem) -> bool:
    """Whether no option touches the scores, nor does their scale."""
    return _moderate(problem) and scores_unchanged(problem)


def hopper_tiling(problem: Problem) -> Tiling:
    """The tiling of `kernels.flash_hopper` for a problem: the one whose tiles take the least time.

    They compute scores beyond the last row and key and beside a band, too, more of them the larger
    they are. Lengths and diagonal are those of the longest sequence.
    """
    _, nh, nkv, length, s, d, dv = problem.shape
    banded, left, right = band(problem)
    plain = scores_as_they_are(problem)
    packed = packed_heads(nh // nkv)
    diagonal, keys = key_places(problem, s)
    longest = slice(keys.argmax(), keys.argmax() + 1) if keys.size else slice(0)

    def time(t: Tiling) -> float:
        tile = t.block_q, t.key_block
        rows = length, packed, -(-length * packed // t.block_q)
        costs = band_costs(rows, keys[longest], diagonal[longest], (left, right), tile)
        each = CUDA_SCORE_TIME.get(tile, (1.0, 1.0))[banded]
        return (costs - 1).sum() * t.block_q * t.key_block * each

    return min(cuda_tilings("sm_90a", problem.precision, d, dv, plain, banded), key=time)


def units_together(problem: Problem, packed: int) -> int:
    """How many units of `packed` query heads read keys and values that L2 holds together."""
    nb, nh, nkv, _, s, d, dv = problem.shape
    units = KEPT_IN_L2 // (2 * s * (d + dv)) * (nh // nkv // packed)
    return max(1, min(units, nb * nh // packed))


def _order(
    problem: Problem, packed: int, row_tiles: int, tile: tuple[int, int], functions: tuple
) -> Any:
    """The order of the tiles of rows where they take different times: with a band, and with a list of
    tiles, which is the third array of `functions`. Else one number that nobody reads.
    """
    nb, nh, _, length, s, *_ = problem.shape
    units = nb * nh // packed
    if functions and functions[2].size > 1:
        costs = listed_costs(functions[2], (nb, nh // packed, row_tiles)).reshape(units, row_tiles)
    elif band(problem)[0]:
        diagonal, keys = key_places(problem, s)
        rows = length, packed, row_tiles
        each = band_costs(rows, keys, diagonal, band(problem)[1:], tile)
        costs = np.repeat(each, units // nb, 0)
    else:
        return np.zeros(1, np.int32)
    return Arrangement(costs, units_together(problem, packed))


def hopper_cluster(d: int, dv: int, row_tiles: int, alone: bool) -> int:
    """Blocks of a cluster, which share keys and values: two for wide heads with an even number of
    tiles of rows, unless a tile of rows has tiles of keys of its own (`alone`).
    """
    return 1 if alone or row_tiles % 2 or min(d, dv) < CUDA_SHARED_KEYS else 2


def hopper_forward(
    problem: Problem,
    overlap: bool = True,
    results: Results = None,
    tiling: Tiling | None = None,
    parts: Parts | None = None,
) -> Launch:
    """The launch of `kernels.flash_hopper` for a float16 or bfloat16 problem.

    Sinks and parts as for `float_forward`; `tiling` replaces the one that is chosen for the problem.
    """
    from .kernels.flash_hopper import flash_hopper
    from .kernels.hopper import PANEL

    nb, nh, nkv, length, s, d, dv = problem.shape
    q, k, v, out, lse = _operands(problem, results)
    if parts is not None:
        out, lse = parts.out, parts.lse
    count = 1 if parts is None else parts.number
    banded, left, right = band(problem)
    plain = scores_as_they_are(problem)
    packed = packed_heads(nh // nkv)
    tiling = tiling or hopper_tiling(problem)
    wide, dv_wide = (smallest(x, tiling.head_dims) for x in (d, dv))
    block_q, block_k = tiling.block_q, tiling.key_block
    mask, kind = one_mask(problem)
    stored, sinks = storage(mask, results), _sinks(problem, results)
    row_tiles, units = -(-length * packed // block_q) * count, nb * nh // packed
    alone = banded or not plain or parts is not None
    cluster = hopper_cluster(wide, dv_wide, row_tiles, alone)
    constants = {
        "d": wide,
        "dv": dv_wide,
        "block_k": block_k,
        "block_q": block_q,
        "group": nh // nkv,
        "packed": packed,
        "overlap": overlap,
        "queries": tiling.buffers[0].copies,
        # turns at the tensor cores pay where a tile's products take about as long as its softmax, and
        # of 64 channels with three warpgroups (measured on an H200; FlashAttention-3 does the same)
        "ping_pong": block_q > 128 or 64 < max(wide, dv_wide) <= 128,
        "cluster": cluster,
        **({} if parts is None else {"split": True}),
        **_float_options(problem, kind, results),
    }
    chosen, functions = _functions(problem, packed, (block_q, block_k))
    constants.update(chosen)
    order = np.zeros(1, np.int32)
    if parts is None:
        order = _order(problem, packed, row_tiles, (block_q, block_k), functions)
    maps = [
        TensorMap(packed_rows(q, packed), (1, 1, block_q // packed, packed, PANEL)),
        *(TensorMap(x, (1, 1, block_k, PANEL)) for x in (k, v)),
    ]
    args = (
        (
            maps,
            out,
            lse,
            *key_places(problem, s),
            stored,
            slopes_of(problem),
            sinks,
            order,
            *functions,
        ),
        (*(int(n) for n in out.strides[:3]), *strides_of(mask, results)),
        (length, v.shape[-1] * 2, nh, left, right, row_tiles, units, count),
        _factors(problem),
    )
    return Launch(
        flash_hopper,
        constants,
        "sm_90a",
        (row_tiles * units, 1, 1),
        args,
        lambda: (out[..., :dv], lse),
        resident_ids(results, q, k, v, out, lse, stored, sinks),
        persistent=True,
        cluster=cluster,
        written=(out, lse),
    )


def float32_forward(problem: Problem, arch: str, results: Results = None) -> Launch:
    """The launch of `kernels.flash_float32` for a float32 problem.

    On the card its arrays are contiguous.
    """
    from .kernels.flash_float32 import flash_float32
    from .kernels.float32_pairs import WARPS

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
    mask_at, bias_at = storage(problem.mask, results), storage(problem.bias, results)
    sinks = _sinks(problem, results)
    constants = {
        "d": padded(d),
        "dv": padded(dv),
        "group": nh // nkv,
        **folding(nb),
        **option_constants(problem),
        "sinks": results is not None and problem.sinks is not None,
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
            slopes_of(problem),
            sinks,
            *functions,
        ),
        (*strides_of(problem.mask, results), *strides_of(problem.bias, results)),
        (length, s, d, dv, nh, left, right),
        (np.float32(problem.scale * LOG2E), np.float32(float_cap(problem) * LOG2E)),
    )
    return Launch(
        flash_float32,
        constants,
        arch,
        (-(-length // WARPS), nh, nb),
        args,
        lambda: (out, lse),
        resident_ids(results, q, k, v, out, lse, mask_at, bias_at, sinks),
        written=(out, lse),
    )
