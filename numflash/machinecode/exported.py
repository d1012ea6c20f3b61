# ruff: noqa: ANN001, ANN202 (arguments of compiled functions)
"""The functions that `export` makes for C: kernels behind plain pointers and sizes.

Each `Export` has a factory that builds the function for an instruction set, its parameters as C
declares them, and an example whose results come from NumPy and the integer model, not from the
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from .. import reference, validation
from ..cpu.floats import float_tiles
from ..cpu.int8 import flash_int8, microkernels, packing
from ..cpu.int8.arguments import Operands, Results, Sizes
from ..cpu.int8.first_keys import FirstKeys, first_keys
from ..cpu.int8.packing import PackedKeys
from ..cpu.isa import fexpa
from ..cpu.isa.isas import VECTOR_ISAS, lanes_of, padded
from ..cpu.isa.operands import Packed, Rows, Scales
from ..cpu.isa.strided import Strided
from ..cpu.semantics import Semantics, no_tiles
from ..jit.memory import array_at
from ..numerics import scores as score_rules
from ..numerics.fixedpoint import FIRST_KEYS
from ..numerics.quantization import quantize_problem
from ..tiling import KEY_BLOCK
from ..validation import NO_LIMIT
from ..validation.options import Options

F = np.float32
ROWS = 6


class Parameter(NamedTuple):
    """One parameter: its C type, name, and contract.

    result : the function writes it; in the example it holds what it must be afterwards
    """

    kind: str
    name: str
    contract: str
    result: bool = False


class Export(NamedTuple):
    """One function.

    floats : its instruction set is one of the float tiles
    tolerance : of the example's float32 results; 0 for equal bits
    facts : f(instruction set, lanes) -> what the contracts name; None for those of the INT8 tiles
    isas : its instruction sets in order of preference, where that is not the order of all kernels
    """

    text: str
    factory: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    example: Callable[..., list[Any]]
    floats: bool = False
    tolerance: float = 0.0
    facts: Callable[[str, int], dict[str, Any]] | None = None
    isas: tuple[str, ...] = ()


def _draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, shape).astype(np.int8)


def _scores(isa_name: str) -> Any:
    isa = VECTOR_ISAS[isa_name]
    tile, vector_lanes = microkernels.score_tile(isa_name, ROWS), lanes_of(isa_name)
    nv, group = isa.nv, isa.group
    operand = np.uint8 if group == 4 else np.int16

    @njit(error_model="numpy")
    def scores(q, channels, k, start, key_scale, query_scale, x, x_stride):
        panel = nv * vector_lanes()
        qs, ks = array_at(q, (ROWS * channels,), operand), array_at(k, (panel * channels,), operand)
        starts, ck = array_at(start, (panel,), np.int32), array_at(key_scale, (panel,), np.float32)
        cq, xs = (
            array_at(query_scale, (ROWS,), np.float32),
            array_at(x, (ROWS * x_stride,), np.int16),
        )
        rows, scales = Rows(qs, 0, channels), Scales(starts, ck, 0, cq, 0)
        tile(rows, Packed(ks, 0), channels // group, scales, Rows(xs, 0, x_stride))

    return scores


def _scores_example(isa_name: str, lanes: int) -> list[Any]:
    isa, d = VECTOR_ISAS[isa_name], 64
    panel = isa.nv * lanes
    q, k = _draw(0, ROWS, d), _draw(1, panel, d)
    cq, ck = (
        np.random.default_rng(s).uniform(0.1, 0.3, n).astype(F) for s, n in ((2, ROWS), (3, panel))
    )
    keys = packing.pack_keys(isa_name, k[None], ck[None], lanes)
    exact = (q.astype(np.int32) @ k.T.astype(np.int32)).astype(F) * ck * cq[:, None]
    x = np.clip(np.rint(exact), -32768, 32767).astype(np.int16)
    bytes_ = np.uint8 if isa.q_offset else np.int8
    operand = (q.astype(np.int16) + isa.q_offset).astype(bytes_ if isa.group == 4 else np.int16)
    return [
        operand,
        d,
        keys.data[0, : panel * d],
        keys.start[0, :panel],
        keys.scale[0, :panel],
        cq,
        x,
        panel,
    ]


def _values(isa_name: str) -> Any:
    isa = VECTOR_ISAS[isa_name]
    tile, vector_lanes = microkernels.value_tile(isa_name, ROWS, isa.nv), lanes_of(isa_name)
    nv, group = isa.nv, isa.group
    operand, weight = (np.int8, np.uint8) if group == 4 else (np.int16, np.int16)

    @njit(error_model="numpy")
    def values(p, v, scale, total, o, o_stride):
        width = nv * vector_lanes()
        ps, vs = (
            array_at(p, (ROWS * KEY_BLOCK,), weight),
            array_at(v, (KEY_BLOCK * width,), operand),
        )
        s, t = array_at(scale, (ROWS,), np.float32), array_at(total, (ROWS,), np.int32)
        os = array_at(o, (ROWS * o_stride,), np.float32)
        rows, to = Rows(ps, 0, KEY_BLOCK), Rows(os, 0, o_stride)
        tile(rows, Packed(vs, 0), KEY_BLOCK // group, s, t, 0, to)

    return values


def _values_example(isa_name: str, lanes: int) -> list[Any]:
    isa = VECTOR_ISAS[isa_name]
    width = isa.nv * lanes
    p = np.abs(_draw(4, ROWS, KEY_BLOCK)).astype(np.uint8 if isa.group == 4 else np.int16)
    v = _draw(5, KEY_BLOCK, width)
    scale = F(2.0) ** -np.arange(ROWS, dtype=F)
    total = p.sum(1, dtype=np.int32)
    o = (p.astype(np.int32) @ v.astype(np.int32)).astype(F) * scale[:, None]
    packed = packing.pack_values(isa_name, v[None], lanes)[0]
    return [p, packed, scale, total, o, width]


def _float_scores(isa_name: str) -> Any:
    isa = float_tiles.FLOAT_ISAS[isa_name]
    tile, width = float_tiles.score_tile(isa_name, isa.nv), isa.nv * isa.lanes

    @njit(error_model="numpy")
    def scores(q, channels, k, x, x_stride):
        qs, ks = (
            array_at(q, (ROWS * channels,), np.float32),
            array_at(k, (width * channels,), np.float32),
        )
        xs = array_at(x, (ROWS * x_stride,), np.float32)
        tile(qs, 0, channels, ks, 0, channels, xs, 0, x_stride)

    return scores


def _float_values(isa_name: str) -> Any:
    isa = float_tiles.FLOAT_ISAS[isa_name]
    tile = float_tiles.value_tile(isa_name, isa.nv)

    @njit(error_model="numpy")
    def values(p, keys, v, v_stride, o, o_stride):
        ps, vs = (
            array_at(p, (ROWS * keys,), np.float32),
            array_at(v, (keys * v_stride,), np.float32),
        )
        os = array_at(o, (ROWS * o_stride,), np.float32)
        tile(ps, 0, keys, vs, 0, v_stride, keys, os, 0, o_stride)

    return values


def _float_operands(isa_name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    isa = float_tiles.FLOAT_ISAS[isa_name]
    rng = np.random.default_rng(6)
    a, b = (rng.uniform(-1, 1, shape).astype(F) for shape in ((ROWS, 64), (64, isa.nv * isa.lanes)))
    return a, b, (a.astype(np.float64) @ b).astype(F)


def _float_scores_example(isa_name: str, lanes: int) -> list[Any]:
    q, k, x = _float_operands(isa_name)
    return [q, q.shape[1], k, x, x.shape[1]]


def _float_values_example(isa_name: str, lanes: int) -> list[Any]:
    p, v, o = _float_operands(isa_name)
    return [p, p.shape[1], v, v.shape[1], o, o.shape[1]]


def _exp2(isa_name: str) -> Any:
    row = fexpa.exp2_row("fexpa-quadratic")

    @njit(error_model="numpy")
    def exp2(x, y, n):
        row(array_at(x, (n,), np.float32), array_at(y, (n,), np.float32), n)

    return exp2


def _exp2_example(isa_name: str, lanes: int) -> list[Any]:
    x = np.linspace(-20, 0, 77).astype(F)
    return [x, np.exp2(x.astype(np.float64)).astype(F), x.size]


def _attention(isa_name: str) -> Any:
    attend = flash_int8.make_attend(isa_name, "int8")
    operand = np.int8 if VECTOR_ISAS[isa_name].group == 4 else np.int16

    @njit(error_model="numpy")
    def attention(
        q, query_scale, k, start, key_scale, bad, v, first_k, first_scale, first_v, value_scale, out, m, l,
        heads, kv_heads, length, keys, channels, columns, head_dim, value_dim, causal,
    ):  # fmt: skip
        all_keys = (keys + KEY_BLOCK - 1) // KEY_BLOCK * KEY_BLOCK
        packed = PackedKeys(
            array_at(k, (kv_heads, all_keys * channels), operand),
            array_at(start, (kv_heads, all_keys), np.int32),
            array_at(key_scale, (kv_heads, all_keys), np.float32),
            array_at(bad, (kv_heads, all_keys // KEY_BLOCK), np.uint8),
        )
        row = value_dim * 4
        counter = np.zeros(1, np.int64)
        lengths = np.zeros(1, np.int64)
        lengths[0] = keys
        zeros = np.zeros((1, 1, 1, 1), np.float32)
        semantics = Semantics(
            NO_LIMIT,
            0 if causal else NO_LIMIT,
            np.zeros(1, np.int64),
            lengths,
            False,
            np.zeros((1, 1, 1, 1), np.uint8),
            zeros,
            False,
            False,
            F(0),
            np.zeros((1, 1, 1), np.float32),
            np.zeros((1, 1), np.float32),
            False,
            no_tiles(q),
        )
        first = FirstKeys(
            array_at(first_k, (kv_heads, FIRST_KEYS, head_dim), np.int16),
            array_at(first_scale, (kv_heads, FIRST_KEYS), np.float32),
            array_at(first_v, (kv_heads, FIRST_KEYS, columns), np.float32),
            np.int64(FIRST_KEYS),
        )
        attend(
            Operands(
                array_at(q, (heads, length, head_dim), np.int8),
                array_at(query_scale, (heads, length), np.float32),
                packed,
                array_at(v, (kv_heads, all_keys * columns), operand),
                first,
                array_at(value_scale, (kv_heads, value_dim), np.float32),
            ),
            semantics,
            Sizes(heads, kv_heads, keys, 1, 0),
            counter,
            Results(
                Strided(out, 0, length * row, row, heads, length, value_dim),
                array_at(m, (heads, length), np.int32),
                array_at(l, (heads, length), np.float32),
            ),
        )

    return attention


def _attention_example(isa_name: str, lanes: int) -> list[Any]:
    isa = VECTOR_ISAS[isa_name]
    heads, kv_heads, length, keys, d, dv = 2, 1, 30, 150, 40, 36
    rng = np.random.default_rng(7)
    q, k, v = (
        rng.standard_normal((1, h, n, x), np.float32)
        for h, n, x in ((heads, length, d), (kv_heads, keys, d), (kv_heads, keys, dv))
    )
    options = Options(precision="int8", is_causal=True, enable_gqa=True)
    problem = quantize_problem(validation.problem(q, k, v, options))
    out, _ = reference.integer_model(problem)
    cq, ck = score_rules.combined_scale(problem.query, problem.key, problem.scale)
    packed = packing.pack_keys(isa_name, problem.key.data[0], ck.reshape(kv_heads, keys), lanes)
    values = packing.pack_values(isa_name, problem.value.data[0], lanes)
    columns = padded(dv, isa.unit * lanes)
    key_scale = ck.reshape(kv_heads, keys)
    first = first_keys(
        problem.key.finer_rows()[0], problem.value.finer_rows()[0], key_scale, columns
    )
    rows = heads * length
    return [
        problem.query.data[0], cq.reshape(heads, length), packed.data, packed.start, packed.scale, packed.wide,
        values, *first[:3], problem.value.scale.reshape(kv_heads, dv), out[0], np.zeros(rows, np.int32), np.zeros(rows, F),
        heads, kv_heads, length, keys, padded(d, isa.step), columns, d, dv, 1,
    ]  # fmt: skip


P = Parameter
_Q = "rows of channels, with the instruction set's offset added ({q_offset}); {operand} each"
_K = "packed panel: [channel group][key][{group} channels] of {panel} keys; channels a multiple of {group}"
EXPORTS = {
    "int8-scores": Export(
        "6 rows of Q times one panel of K: int16 scores, rounded to even and saturated",
        _scores,
        (
            P("const {operand} *", "q", "6 " + _Q),
            P("int64_t", "channels", "of a row, padded with zeros to a multiple of {group}"),
            P("const {packed} *", "k", _K),
            P("const int32_t *", "start", "{panel}: what each key's sum begins with (-{q_offset} * sum of its channels)"),
            P("const float *", "key_scale", "{panel}"),
            P("const float *", "query_scale", "6"),
            P("int16_t *", "x", "6 rows of {panel} scores", True),
            P("int64_t", "x_stride", "elements between rows of x"),
        ),
        _scores_example,
    ),
    "int8-values": Export(
        "6 rows of o += (p times a block of 128 keys of V) * scale",
        _values,
        (
            P("const {weight} *", "p", "6 rows of 128 weights"),
            P("const {packed} *", "v", "packed: [key group][column][{group} keys] of {panel} columns, {v_offset} added"),
            P("const float *", "scale", "6: of each row's weights"),
            P("const int32_t *", "total", "6: sums of each row of p"),
            P("float *", "o", "6 rows of {panel} columns; added to", True),
            P("int64_t", "o_stride", "elements between rows of o"),
        ),
        _values_example,
    ),
    "int8-attention": Export(
        "fused INT8 attention of one batch entry on one thread, with the bits of the integer model",
        _attention,
        (
            P("const int8_t *", "q", "[heads][length][head_dim]"),
            P("const float *", "query_scale", "[heads][length]: quantisation scale * softmax scale * log2(e) * 256"),
            P("const {packed} *", "k", "[kv_heads] packed keys, padded to whole blocks of 128: panels as in int8-scores"),
            P("const int32_t *", "start", "[kv_heads][padded keys]: as in int8-scores"),
            P("const float *", "key_scale", "[kv_heads][padded keys]"),
            P("const uint8_t *", "bad", "[kv_heads][blocks of 128]: 1 where a key_scale is NaN"),
            P("const {packed} *", "v", "[kv_heads] packed values: blocks as in int8-values, columns wide"),
            P("const int16_t *", "first_k", "[kv_heads][4][head_dim]: the first four keys in 1/32 of their steps"),
            P("const float *", "first_scale", "[kv_heads][4]: key_scale / 32"),
            P("const float *", "first_v", "[kv_heads][4][columns]: their values in steps of value_scale, multiples of 1/32"),
            P("const float *", "value_scale", "[kv_heads][value_dim]"),
            P("float *", "out", "[heads][length][value_dim]", True),
            P("int32_t *", "m", "[heads][length]: scratch, then the octave of each row's maximum"),
            P("float *", "l", "[heads][length]: scratch, then the sum of each row's weights"),
            P("int64_t", "heads", "a multiple of kv_heads"),
            P("int64_t", "kv_heads", ""),
            P("int64_t", "length", "queries of a head"),
            P("int64_t", "keys", "of a head"),
            P("int64_t", "channels", "of a packed key: head_dim padded to a multiple of {step}"),
            P("int64_t", "columns", "of a packed value: value_dim padded to a multiple of {unit}"),
            P("int64_t", "head_dim", ""),
            P("int64_t", "value_dim", ""),
            P("int64_t", "causal", "1: row i attends to keys 0 .. i; 0: to all"),
        ),
        _attention_example,
    ),
    "float32-scores": Export(
        "6 rows of Q times one panel of K in float32",
        _float_scores,
        (
            P("const float *", "q", "6 rows of channels"),
            P("int64_t", "channels", "1 or more"),
            P("const float *", "k", "packed panel: [channel][{panel} keys]"),
            P("float *", "x", "6 rows of {panel} scores", True),
            P("int64_t", "x_stride", "elements between rows of x"),
        ),
        _float_scores_example,
        True,
        2e-5,
    ),
    "float32-values": Export(
        "6 rows of o += p times V in float32",
        _float_values,
        (
            P("const float *", "p", "6 rows of keys weights"),
            P("int64_t", "keys", "1 or more"),
            P("const float *", "v", "keys rows of {panel} columns"),
            P("int64_t", "v_stride", "elements between rows of v"),
            P("float *", "o", "6 rows of {panel} columns; added to", True),
            P("int64_t", "o_stride", "elements between rows of o"),
        ),
        _float_values_example,
        True,
        2e-5,
    ),
    "exp2-fexpa": Export(
        "y = 2**x for x <= 0 by FEXPA and a quadratic: 1.4e-7 relative (SVE only)",
        _exp2,
        (
            P("const float *", "x", "n numbers, none NaN, none above 0"),
            P("float *", "y", "n", True),
            P("int64_t", "n", "0 or more"),
        ),
        _exp2_example,
        tolerance=3e-7,
    ),
}  # fmt: skip
