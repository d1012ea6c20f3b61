"""What options do to scores and rows: softcap, bias, ALiBi, masks, sinks.

In float kernels on a fragment of scores; `softcap_exact` is the INT8 kernels' too.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from ...numerics import fixedpoint as fx
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .softmax import NEG_INF

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
# numbers: in a kernel `math` would run, in float64
LOG2E, LN2 = f32(math.log2(math.e)), f32(math.log(2))
TWO_LOG2E = f32(2 * math.log2(math.e))
CAP_P0, CAP_P1, CAP_Q0, CAP_Q1, CAP_Q2 = (
    f32(c) for c in (fx.CAP_P0, fx.CAP_P1, fx.CAP_Q0, fx.CAP_Q1, fx.CAP_Q2)
)
CAP_UNIT, CAP_LIMIT = f32(fx.CAP_UNIT), f32(fx.CAP_LIMIT)


class ScoreOptions(NamedTuple):
    """What a 16-bit forward kernel has code for besides plain attention: constants of its factory.

    Attributes
    ----------
    band : a causal or windowed problem; tiles outside are skipped
    mask : "", "bool" (uint8) or "float" (float32, added)
    transform : scores are scaled before the maximum is taken (implied by softcap, alibi, mask
        "float"; needed for scale <= 0)
    sinks : exp(sink) of the head joins each row's sum
    functions : name of the code of score and mask functions (`score_functions`), called before
        every other option
    listed : only the tiles of keys of a list are visited
    """

    band: bool = False
    mask: str = ""
    softcap: bool = False
    alibi: bool = False
    transform: bool = False
    sinks: bool = False
    functions: str = ""
    listed: bool = False

    @property
    def transforms(self) -> bool:
        """Whether scores leave the products' units before their maximum is taken."""
        return self.transform or self.softcap or self.alibi or self.mask == "float"


class Rows(NamedTuple):
    """The two rows of a tile that a thread holds: local arrays of two."""

    query: Any  # int32
    head: Any  # int32
    slope: Any  # float32, ALiBi's times log2 e


class Place(NamedTuple):
    """Where a tile's scores are in the problem, int32."""

    batch: Any
    diagonal: Any  # query i's own key is i + diagonal
    queries: Any
    keys: Any


class Mask(NamedTuple):
    """A mask in global memory."""

    address: Any
    strides: Any  # bytes along batch, head, query and key, 0 along broadcast axes


@device_function
def load_slopes(slope, slopes, first, head):
    """ALiBi's slopes of a thread's two rows, in units of log2.

    `first` is the place of the batch's first head.
    """
    for r in range(2):
        slope[r] = ptx.load_global_f32(slopes + u64((first + head[r]) * 4)) * LOG2E


@device_function
def join_sink(x, l, sink):
    """A row's maximum x and sum l (both in units of log2) with one more key of this score.

    Returns the new maximum and sum, and the factor of the output.
    """
    top = ptx.fmax(x, sink)
    alpha = ptx.ex2(x - top)
    return top, l * alpha + ptx.ex2(sink - top), alpha


@device_function
def tanh_accurate(x):
    """tanh to float32 rounding of 1, where tanh.approx keeps 11 bits: 1 - 2 / (1 + e**(2 x))."""
    return f32(1) - f32(2) * ptx.rcp(f32(1) + ptx.ex2(x * TWO_LOG2E))


@device_function
def tanh_fast(x, twice):
    """tanh(x / cap) of a score in units of log2, `twice` = 2 / cap: 1 - 2 / (1 + 2**(2 x / cap)).

    Without a division: one that is rounded correctly is a call for every score, as is such a
    reciprocal. The approximate one is off by an ulp, as 2**x is.
    """
    return f32(1) - f32(2) * ptx.rcp_approx(f32(1) + ptx.ex2(x * twice))


@device_function
def add_bias(x, bias):
    """A score in units of log2 plus a bias in natural ones: -inf masks it, NaN stays.

    Rounded towards zero an overflow is the largest finite number: a row of such keys alone
    gives all of them equal weight.
    """
    return NEG_INF if bias == NEG_INF else ptx.fma_toward_zero(bias, LOG2E, x)


@functools.cache
def make_adjust(
    key_tiles: int,
    transform: bool,
    softcap: bool,
    alibi: bool,
    kind: str,
    part: int = 4,
    hidden: bool = False,
) -> Any:
    """adjust(s, first, rows: Rows, place: Place, factors, mask: Mask).

    Options on a fragment of float scores.

    `first` is the key of the thread's first score, `factors` = (scale * log2 e, softcap * log2 e,
    2 / softcap). With `transform` scores are turned into units of log2, on which softcap and ALiBi act; the kind of
    mask is "", "bool" (uint8) or "float" (float32, added). With more than a boolean mask `part`
    tiles of 8 keys are unrolled. With `hidden` a score of -inf hides its key, and the softcap leaves it.
    """
    has_mask, float_mask = bool(kind), kind == "float"
    # more code than that is not unrolled: the fragment turns, a part at a time, and is never
    # indexed
    part = min(part, key_tiles) if softcap or alibi or float_mask else key_tiles
    turns, n_s, n_part = key_tiles // part, 4 * key_tiles, 4 * part

    @device_function
    def adjust(s, first, rows, place, factors, mask):
        query, head, slope = rows
        batch, diagonal, queries, keys = place
        scale, cap, twice = factors
        mask_at, strides = mask
        done, q = cuda.local.array(n_part, f32), cuda.local.array(2, i32)
        row_at = cuda.local.array(2, u64)
        for r in range(2):
            # addresses in the mask are no registers that every tile keeps
            q[r] = ptx.fresh(query[r])
            if has_mask and turns > 1:
                row_at[r] = ptx.fresh_address(
                    mask_at
                    + u64(
                        batch * strides[0]
                        + head[r] * strides[1]
                        + q[r] * strides[2]
                        + first * strides[3]
                    )
                )
        for turn in range(turns):
            for n in range(part):
                for e in range(4):
                    j = i32(first + 8 * (turn * part + n) + (e & 1))
                    x = s[4 * n + e]
                    if transform:
                        x = x * scale
                    if softcap:
                        capped = cap * tanh_fast(x, twice)
                        x = NEG_INF if hidden and x == NEG_INF else capped
                    if alibi:
                        x -= slope[e >> 1] * ptx.to_float(i32(abs(q[e >> 1] + diagonal - j)))
                    if has_mask and q[e >> 1] < queries and j < keys:
                        if turns > 1:
                            at = row_at[e >> 1] + u64(
                                (8 * (turn * part + n) + (e & 1)) * strides[3]
                            )
                        else:  # unrolled, sums with a row's address would all be in registers
                            at = mask_at + u64(
                                batch * strides[0]
                                + head[e >> 1] * strides[1]
                                + q[e >> 1] * strides[2]
                                + j * strides[3]
                            )
                        if float_mask:
                            x = add_bias(x, ptx.load_global_f32(at))
                        elif ptx.load_global_u8(at) == u32(0):
                            x = NEG_INF
                    s[4 * n + e] = x
            if turns > 1:
                for i in range(n_part):
                    done[i] = s[i]
                for i in range(n_s - n_part):
                    s[i] = s[i + n_part]
                for i in range(n_part):
                    s[n_s - n_part + i] = done[i]

    return adjust


@functools.cache
def make_hide(key_tiles: int) -> Any:
    """hide(s, first, low, high).

    Scores of keys outside [low, high) of each of the two rows become -inf.
    """

    @device_function
    def hide(s, first, low, high):
        for n in range(key_tiles):
            for e in range(4):
                j = first + 8 * n + (e & 1)
                if j < low[e >> 1] or j >= high[e >> 1]:
                    s[4 * n + e] = NEG_INF

    return hide


@device_function
def softcap_exact(x, cap):
    """`fixedpoint.softcap`, each operation rounded once: the same bits as on the CPU.

    A NaN becomes CAP_LIMIT.
    """
    x = ptx.fmax(ptx.fmin(x, CAP_LIMIT), -CAP_LIMIT)
    z = ptx.mul(x, x)
    p = ptx.add(ptx.mul(ptx.add(z, CAP_P1), z), CAP_P0)
    q = ptx.add(ptx.mul(ptx.add(z, CAP_Q2), z), CAP_Q1)
    q = ptx.add(ptx.mul(q, z), CAP_Q0)
    return ptx.div(ptx.mul(ptx.mul(x, ptx.mul(cap, CAP_UNIT)), p), q)
