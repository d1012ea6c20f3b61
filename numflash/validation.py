"""Arguments of the public functions, checked and put into one frozen description that every backend
takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np

from .arguments import choice
from .errors import ArgumentError, ArgumentTypeError
from .interop import Imported, convert, import_array, widen, writable
from .options import DEFAULT, Options
from .quantization import QuantizedTensor
from .tiling import MAX_HEAD_DIM


@dataclass(frozen=True)
class Problem:
    """One attention problem, validated: what every backend's `run(problem)` takes.

    Attributes
    ----------
    query : (B, H, L, D) array, of any strides
        In the storage of `precision`: float32, float16, uint16 (the bits of bfloat16); a
        QuantizedTensor for "int8".
    key : (B, Hkv, S, D) array or QuantizedTensor, Hkv divides H
    value : (B, Hkv, S, Dv) array or QuantizedTensor; float32 for "int8" with pv "fp32"
    scale : float
        Factor of Q.K^T, 1/sqrt(D) unless given.
    left, right : int or None
        Row i attends to keys j with i + diagonal[b] - left <= j <= i + diagonal[b] + right; None is
        no limit. Causal is right = 0.
    diagonal : (B,) int64
        Key under the diagonal in row 0: 0 for alignment "upper_left", key_lengths - L for
        "lower_right".
    key_lengths : (B,) int64
        Keys from here on do not exist.
    mask : (B, H, L, S) bool or None
        True where a key may be seen; a broadcast view (zero strides), not a copy.
    bias : (B, H, L, S) float32 or None
        Added to the scaled scores; a broadcast view. -inf hides a key.
    softcap : float
        0 is none; else scores become softcap * tanh(scores / softcap), before bias and mask.
    alibi_slopes : (B, H) float32 or None
        Adds -slope * |i + diagonal - j|.
    sinks : (H,) float32 or None
        Adds exp(sink) to each row's denominator.
    precision : "float32", "bfloat16", "float16" or "int8"
    pv : "int8" or "fp32"
        The second product of precision "int8".
    return_lse : bool
    functions : flex.Fused or None
        Score and mask functions, and which blocks they see.
    """

    query: Any
    key: Any
    value: Any
    scale: float
    left: int | None
    right: int | None
    diagonal: np.ndarray
    key_lengths: np.ndarray
    mask: np.ndarray | None
    bias: np.ndarray | None
    softcap: float
    alibi_slopes: np.ndarray | None
    sinks: np.ndarray | None
    precision: str
    pv: str
    return_lse: bool
    functions: Any = None

    @property
    def smooths(self) -> bool:
        """Whether INT8 may take the mean off K: nothing but the softmax uses the scores."""
        return not self.softcap and (self.functions is None or not self.functions.changes_scores)

    def with_functions(self, functions: Any) -> Problem:
        """A copy with score and mask functions; cheaper than `dataclasses.replace`."""
        copy = object.__new__(Problem)
        copy.__dict__.update(self.__dict__)
        copy.__dict__["functions"] = functions
        return copy

    @property
    def shape(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H, Hkv, L, S, D, Dv."""
        b, h, length, d = self.query.shape
        return b, h, self.key.shape[1], length, self.key.shape[2], d, self.value.shape[3]


# ---- builders
# ------------------------------------------------------------------------------------------------------------------
LARGEST_PER_HEAD = 1e20
LARGEST_INT8_CAP = 1e4
OWN_PRECISION = {
    "float32": "float32",
    "float64": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
}


def tensor(name: str, x: np.ndarray, layout: str) -> np.ndarray:
    """A 2-D, 3-D or 4-D array as a (B, H, L, D) view."""
    if not 2 <= x.ndim <= 4:
        raise ArgumentError(
            f"{name}: got shape {x.shape}; allowed: 2 to 4 dimensions, {' '.join(SHAPES[layout])}"
        )
    if layout == "blhd":
        x = x[None, :, None] if x.ndim == 2 else x[None] if x.ndim == 3 else x
        return x.transpose(0, 2, 1, 3)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


SHAPES = {
    "bhld": ("(B, H, L, D)", "(H, L, D)", "(L, D)"),
    "blhd": ("(B, L, H, D)", "(L, H, D)", "(L, D)"),
}


def check_shapes(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], enable_gqa: bool
) -> None:
    """Whether (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv) fit together."""
    shown = "as (B, H, L, D)"
    for name, shape in (("query", q), ("key", k), ("value", v)):
        if not 1 <= shape[3] <= MAX_HEAD_DIM:
            raise ArgumentError(
                f"{name}: got shape {shape} {shown}; allowed: head_dim 1 to {MAX_HEAD_DIM}"
            )
        if shape[1] < 1:
            raise ArgumentError(f"{name}: got shape {shape} {shown}; allowed: at least one head")
    for axis, word in ((0, "batch"), (3, "head_dim")):
        if k[axis] != q[axis]:
            raise ArgumentError(
                f"key: got shape {k} {shown}; allowed: the query's {word}, {q[axis]}"
            )
    if v[2] != k[2]:
        # blame the one that is not as long as the query
        name, other, found = ("key", "value", (k, v)) if v[2] == q[2] else ("value", "key", (v, k))
        raise ArgumentError(
            f"{name}: got {found[0][2]} keys, shape {found[0]} {shown}, where {other} has {found[1][2]}; "
            "allowed: as many in both"
        )
    for axis, word in ((0, "batch"), (1, "heads")):
        if v[axis] != k[axis]:
            raise ArgumentError(
                f"value: got shape {v} {shown}; allowed: the key's {word}, {k[axis]}"
            )
    if k[1] != q[1]:
        if not enable_gqa:
            raise ArgumentError(
                f"enable_gqa: got False with {q[1]} query and {k[1]} key heads; allowed: True, or equal heads"
            )
        if q[1] % k[1]:
            raise ArgumentError(
                f"key: got {k[1]} heads; allowed: a divisor of the query's {q[1]} heads"
            )


def per_head(name: str, x: Any, allowed: tuple[tuple[int, ...], ...], words: str) -> np.ndarray:
    """A float32 array of one of the allowed shapes, of numbers that no length of a sequence takes
    out of float32.
    """
    array = widen(import_array(name, x).array)
    if array.dtype.kind not in "fiu":
        raise ArgumentTypeError(f"{name}: got dtype {array.dtype}; allowed: numbers")
    if array.shape not in allowed:
        raise ArgumentError(
            f"{name}: got shape {array.shape}; allowed: {words} = {' or '.join(map(str, allowed))}"
        )
    if not (np.abs(array) <= LARGEST_PER_HEAD).all():  # false for NaN
        raise ArgumentError(
            f"{name}: got NaN, infinity or a number beyond +-{LARGEST_PER_HEAD:g}; allowed: numbers up to it"
        )
    return array.astype(np.float32)


def split_mask(
    attn_mask: Any, shape: tuple[int, int, int, int]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """`attn_mask` as (mask, bias), one of them None: broadcast views of `shape`."""
    if attn_mask is None:
        return None, None
    taken = import_array("attn_mask", attn_mask)
    array = widen(taken.array) if taken.dtype == "bfloat16" else taken.array
    if array.dtype.kind not in "bf":
        raise ArgumentTypeError(
            f"attn_mask: got dtype {taken.dtype}; allowed: bool (True = may attend) or float (added to scores)"
        )
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(np.float32, copy=False)
    try:
        array = writable(np.broadcast_to(array, shape))
    except ValueError:
        padding = array.shape == (shape[0], shape[3])
        hint = ". For padding give mask[:, None, None], or key_lengths" if padding else ""
        raise ArgumentError(
            f"attn_mask: got shape {array.shape}; allowed: what broadcasts to (B, H, L, S) = {shape}{hint}"
        ) from None
    return (array, None) if array.dtype.kind == "b" else (None, array)


def lengths(name: str, x: Any, batch: int, most: int) -> np.ndarray:
    """(B,) int64 counts between 0 and `most`."""
    if x is None:
        return np.array([most] * batch, np.int64)
    array = import_array(name, x).array
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{name}: got dtype {array.dtype}; allowed: integers")
    if array.shape != (batch,):
        raise ArgumentError(f"{name}: got shape {array.shape}; allowed: (B,) = ({batch},)")
    if batch and not (array.min() >= 0 and array.max() <= most):
        raise ArgumentError(f"{name}: got {array.tolist()}; allowed: 0 to {most}")
    return array.astype(np.int64)


def describe(query: Any, key: Any, value: Any, options: Options, precision: str) -> Problem:
    """The Problem of 4-D operands whose shapes are checked.

    What of the options depends on shapes or precision is checked here.
    """
    (b, h, l, d), s = query.shape, key.shape[2]
    if precision == "int8" and options.softcap > LARGEST_INT8_CAP:
        raise ArgumentError(
            f"softcap: got {options.softcap:g} with precision 'int8'; allowed: 0 to {LARGEST_INT8_CAP:g}, beyond which "
            "the error of its tanh would show"
        )
    if options.pv is not None and precision != "int8":
        raise ArgumentError(
            f"pv: got {options.pv!r} with precision {precision!r}; allowed: None, or precision 'int8'"
        )
    left, right = options.limits(l + s)
    counts = lengths("key_lengths", options.key_lengths, b, s)
    mask, bias = split_mask(options.attn_mask, (b, h, l, s))
    slopes = options.alibi_slopes
    sinks = options.sinks
    if slopes is not None:
        slopes = per_head("alibi_slopes", slopes, ((h,), (b, h)), "(H,) or (B, H)")
        slopes = writable(np.broadcast_to(slopes, (b, h)))
    if sinks is not None:
        sinks = per_head("sinks", sinks, ((h,),), "(H,)")
    return Problem(
        query=query,
        key=key,
        value=value,
        scale=1.0 / math.sqrt(d) if options.scale is None else options.scale,
        left=left,
        right=right,
        diagonal=counts - l if options.alignment == "lower_right" else np.zeros(b, np.int64),
        key_lengths=counts,
        mask=mask,
        bias=bias,
        softcap=options.softcap,
        alibi_slopes=slopes,
        sinks=sinks,
        precision=precision,
        pv=options.pv or "int8",
        return_lse=options.return_lse,
    )


def import_operands(query: Any, key: Any, value: Any) -> tuple[Imported, Imported, Imported]:
    """The three arrays of a call, taken in once."""
    return import_array("query", query), import_array("key", key), import_array("value", value)


def problem(query: Any, key: Any, value: Any, options: Options = DEFAULT) -> Problem:
    """Check the arguments of `numflash.attention` and describe them; see `problem_of`."""
    return problem_of(import_operands(query, key, value), options)


def problem_of(
    operands: tuple[Imported, Imported, Imported], options: Options, convert_operands: bool = True
) -> Problem:
    """The same for arrays that are taken in.

    The operands come out in the storage of the precision: float32, float16, or uint16 (the bits of
    bfloat16); for "int8", or without `convert_operands`, they stay as they came: for
    `quantize_problem`, or for the oracle.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, what came and what is allowed.
    """
    taken = dict(zip(("query", "key", "value"), operands, strict=True))
    precision = options.precision
    layout = options.layout
    tensor("query", operands[0].array, layout)
    dtype = operands[0].dtype
    for name, x in taken.items():
        if x.dtype not in OWN_PRECISION and not (x.dtype == "uint16" and precision == "bfloat16"):
            raise ArgumentTypeError(
                f"{name}: got dtype {x.dtype}; allowed: float32, float64, float16, bfloat16, "
                "or uint16 (the bits of bfloat16) with precision='bfloat16'"
            )
        if x.dtype != dtype:
            raise ArgumentTypeError(f"{name}: got dtype {x.dtype}; allowed: the query's, {dtype}")
        if x.array.ndim != taken["query"].array.ndim:
            raise ArgumentError(
                f"{name}: got shape {x.array.shape}; allowed: the query's {taken['query'].array.ndim} dimensions"
            )
    precision = precision or OWN_PRECISION[dtype]
    q, k, v = (tensor(n, x.array, layout) for n, x in taken.items())
    check_shapes(q.shape, k.shape, v.shape, options.enable_gqa)
    if convert_operands and precision != "int8":
        q, k, v = (convert(x, precision) for x in (q, k, v))
    q, k, v = (writable(x) for x in (q, k, v))
    return describe(q, k, v, options, precision)


LARGEST_LSE = (
    2.0**23
)  # from here on float32 holds an LSE to no better than 1: gradients compute it anew


def gradient_operands(
    problem: Problem, query_shape: tuple[int, ...], grad_out: Any, out: Any, lse: Any, layout: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """grad_out and out as (B, H, L, Dv), lse as (B, H, L), float32.

    They come in the query's layout and number of dimensions.
    """
    lead = query_shape[:-1]
    found = []
    for name, given, shape in (
        ("grad_out", grad_out, (*lead, problem.shape[6])),
        ("out", out, (*lead, problem.shape[6])),
        ("lse", lse, lead),
    ):
        taken = import_array(name, given)
        floats: tuple[str, ...] = ("float32", "float64")
        if name != "lse":
            floats = (
                (*OWN_PRECISION, "uint16")
                if problem.precision == "bfloat16"
                else tuple(OWN_PRECISION)
            )
        if taken.dtype not in floats:
            raise ArgumentTypeError(
                f"{name}: got dtype {taken.dtype}; allowed: {', '.join(floats)}"
            )
        if taken.array.shape != shape:
            raise ArgumentError(
                f"{name}: got shape {taken.array.shape}; allowed: {shape} with query {query_shape}"
            )
        found.append(writable(convert(taken.array, "float32")))
    grad_out, out, lse = found
    return (
        tensor("grad_out", grad_out, layout),
        tensor("out", out, layout),
        tensor("lse", lse[..., None], layout)[..., 0],
    )


def is_plain(x: Any, dtype: type) -> bool:
    """Whether x is an unmasked NumPy array of this dtype."""
    return isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray) and x.dtype == dtype


def kind(x: Any) -> str:
    """What came where an array should be: its dtype and shape, or its type."""
    return f"{x.dtype} {x.shape}" if type(x) is np.ndarray else type(x).__name__


def part(name: str, x: Any, dtype: type, shape: tuple[int, ...]) -> None:
    """Whether an attribute of a QuantizedTensor is the array that it should be."""
    if not is_plain(x, dtype) or x.shape != shape:
        raise ArgumentError(f"{name}: got {kind(x)}; allowed: {np.dtype(dtype)} {shape}")


def whole(name: str, t: QuantizedTensor) -> None:
    """Whether the parts of a QuantizedTensor fit each other.

    Looked at once, the arrays are not expected to change.
    """
    if t.checked:
        return
    if not is_plain(t.data, np.int8) or not 2 <= t.data.ndim <= 4:
        raise ArgumentTypeError(
            f"{name}.data: got {kind(t.data)}; allowed: int8 of 2 to 4 dimensions"
        )
    lead, (rows, d), block = t.data.shape[:-2], t.data.shape[-2:], 1
    if t.granularity == "block":
        block = t.block
        if isinstance(block, bool) or not isinstance(block, Integral) or block < 1:
            raise ArgumentError(f"{name}.block: got {block!r}; allowed: an integer, 1 or more")
    shape = {
        "row": (rows, 1),
        "block": (-(-rows // block), 1),
        "channel": (1, d),
        "tensor": (1, 1),
    }[t.granularity]
    part(f"{name}.scale", t.scale, np.float32, (*lead, *shape))
    if not (np.isfinite(t.scale).all() and (t.scale >= 0).all()):
        raise ArgumentError(
            f"{name}.scale: got NaN, infinity or a negative number; allowed: finite, 0 or more"
        )
    if t.offset is not None:
        part(f"{name}.offset", t.offset, np.float32, (*lead, 1, d))
        if not np.isfinite(t.offset).all():
            raise ArgumentError(f"{name}.offset: got NaN or infinity; allowed: finite numbers")
    if t.nonfinite is not None:
        part(f"{name}.nonfinite", t.nonfinite, np.bool_, (*lead, rows))
    object.__setattr__(t, "checked", True)


def quantized(name: str, t: Any, granularities: tuple[str, ...]) -> QuantizedTensor:
    """A QuantizedTensor that is whole and fit for its place, with 4-D data."""
    if not isinstance(t, QuantizedTensor):
        raise ArgumentTypeError(
            f"{name}: got {type(t).__name__}; allowed: a QuantizedTensor (numflash.quantize)"
        )
    choice(f"{name}.granularity", t.granularity, granularities)
    if t.offset is not None and name != "key":
        raise ArgumentError(
            f"{name}.offset: got {kind(t.offset)}; allowed: None, only the key is smoothed"
        )
    whole(name, t)
    if t.data.ndim == 4:
        return t

    def four(x: Any, tail: int) -> Any:
        return None if x is None else x.reshape((1,) * (2 + tail - x.ndim) + x.shape)

    return replace(
        t,
        data=four(t.data, 2),
        scale=four(t.scale, 2),
        offset=four(t.offset, 2),
        nonfinite=four(t.nonfinite, 1),
    )


def quantized_problem(query: Any, key: Any, value: Any, options: Options = DEFAULT) -> Problem:
    """Check the arguments of `numflash.attention_int8` and describe them."""
    pv = options.pv or "int8"
    q, k = (
        quantized(n, t, ("row", "block", "tensor")) for n, t in (("query", query), ("key", key))
    )
    v = quantized(
        "value",
        value,
        ("channel", "tensor") if pv == "int8" else ("row", "block", "channel", "tensor"),
    )
    for name, t in (("key", key), ("value", value)):
        if t.data.ndim != query.data.ndim:
            raise ArgumentError(
                f"{name}: got shape {t.data.shape}; allowed: as many dimensions as query {query.data.shape}"
            )
    check_shapes(q.shape, k.shape, v.shape, options.enable_gqa)
    if pv == "int8" and v.granularity == "tensor":
        v = replace(v, granularity="channel", scale=np.repeat(v.scale, v.shape[3], -1))
    return describe(q, k, v.dequantize() if pv == "fp32" else v, options, "int8")


def cumulative(name: str, x: Any, total: int) -> np.ndarray:
    """(N + 1,) int64 cumulative lengths from 0 to `total`."""
    array = import_array(name, x).array
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(f"{name}: got dtype {array.dtype}; allowed: integers")
    if array.ndim != 1 or not array.size:
        raise ArgumentError(f"{name}: got shape {array.shape}; allowed: (N + 1,)")
    array = array.astype(np.int64)
    if array[0] != 0 or array[-1] != total or (np.diff(array) < 0).any():
        raise ArgumentError(
            f"{name}: got {shorten(array)}; allowed: from 0, never falling, up to the packed length {total}"
        )
    return array


def shorten(array: np.ndarray) -> str:
    """An array as text short enough for a message."""
    return np.array2string(array, threshold=8)


# Multiplications that take about as long as a call: sequences share a call where filling them up to
# one length costs less.
CALL = 1e6


def sequences(
    whole: Problem, cu_q: np.ndarray, cu_k: np.ndarray, alignment: str
) -> Iterator[tuple[Problem, list[int]]]:
    """The packed problem, (1, H, total, D), as few batches of sequences of like lengths, filled up
    to the longest.

    Yields the problem of a batch, and the numbers of its sequences.
    """
    many = np.diff(cu_q)
    few = np.diff(cu_k)
    _, h, _, _, _, d, dv = whole.shape
    queue = [n for n in np.lexsort((few, many))[::-1].tolist() if many[n]]
    price = CALL / (h * (d + dv))
    first = 0
    while first < len(queue):
        longest = many[queue[first]]
        stop = first
        waste = 0
        most = 0
        cells = 0
        while stop < len(queue):  # one more sequence, if that is cheaper than one more call
            n = queue[stop]
            most = max(most, few[n])
            cells = cells + many[n] * few[n]
            padding = (stop + 1 - first) * longest * most - cells
            if padding - waste > price:
                break
            stop = stop + 1
            waste = padding
        chosen = np.sort(queue[first:stop])
        yield (
            _batch(whole, cu_q[chosen], many[chosen], cu_k[chosen], few[chosen], alignment),
            chosen.tolist(),
        )
        first = stop


def _batch(
    whole: Problem, at_q: np.ndarray, l: np.ndarray, at_k: np.ndarray, s: np.ndarray, alignment: str
) -> Problem:
    """Sequences that begin at packed rows `at_q` and keys `at_k`, `l` and `s` long, as a batch.

    Filled up with any rows.
    """

    def gather(x: np.ndarray, at: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        rows = x[0].transpose(1, 0, 2)
        n = len(at)
        longest = int(lengths.max())
        if n == 1 or (np.array_equal(at[1:], at[:-1] + longest) and lengths.min() == longest):
            return (
                rows[at[0] : at[0] + n * longest]
                .reshape(n, longest, *rows.shape[1:])
                .transpose(0, 2, 1, 3)
            )
        return rows[np.minimum(at[:, None] + np.arange(longest), len(rows) - 1)].transpose(
            0, 2, 1, 3
        )

    slopes = whole.alibi_slopes
    return replace(
        whole,
        query=gather(whole.query, at_q, l),
        key=gather(whole.key, at_k, s),
        value=gather(whole.value, at_k, s),
        diagonal=(s - l if alignment == "lower_right" else np.zeros(len(l), np.int64)),
        key_lengths=s,
        alibi_slopes=None
        if slopes is None
        else writable(np.broadcast_to(slopes, (len(l), slopes.shape[1]))),
    )
