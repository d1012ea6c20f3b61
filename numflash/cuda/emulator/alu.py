"""Arithmetic, logic and comparisons.

Each instruction becomes one NumPy call over all threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...numerics import fused
from .binders import DTYPES, Run, binds, write
from .errors import Fault
from .parse import Instruction

if TYPE_CHECKING:
    from .machine import Machine

_BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@binds("add", "sub", "and", "or", "xor", "max", "min", "div", "rem")
def binary(m: Machine, i: Instruction) -> Run:
    t = i.type
    d = m.target(i.operands[0], t)
    a = m.value(i.operands[1], t)
    b = m.value(i.operands[2], t)
    floating = t[0] == "f" or (t[0] == "b" and t[1] == "f")
    if i.op in ("max", "min"):
        keeps_nan = floating and "NaN" in i.modifiers
        f = getattr(np, "f" + i.op if floating and not keeps_nan else i.op + "imum")
    elif i.op == "div" and floating:
        f = np.divide
    elif i.op in ("div", "rem"):
        return _integer_division(i.op, d, a, b)
    else:
        f = _BINARY[i.op]
    if d.dtype == np.bool_ and f not in (np.bitwise_and, np.bitwise_or, np.bitwise_xor):
        raise Fault("unsupported", i.text)
    return lambda mask: f(a, b, out=d, where=mask)


def _integer_division(op: str, d: np.ndarray, a: Any, b: Any) -> Run:
    def run(mask: Any) -> None:
        divisor = np.where(b == 0, b.dtype.type(1), b)
        rest = np.fmod(a, divisor)  # C's sign, as PTX
        write(d, rest if op == "rem" else (a - rest) // divisor, mask)

    return run


_UNARY = {
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rcp": np.reciprocal,
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
}


@binds("neg", "abs", "sqrt", "rcp", "ex2", "lg2", "tanh")
def unary(m: Machine, i: Instruction) -> Run:
    f = _UNARY[i.op]
    d = m.target(i.operands[0], i.type)
    a = m.value(i.operands[1], i.type)
    return lambda mask: f(a, out=d, where=mask)


@binds("rsqrt")
def rsqrt(m: Machine, i: Instruction) -> Run:
    d = m.target(i.operands[0], i.type)
    a = m.value(i.operands[1], i.type)
    return lambda mask: write(d, 1 / np.sqrt(a), mask)


@binds("not")
def bitwise_not(m: Machine, i: Instruction) -> Run:
    d = m.target(i.operands[0], i.type)
    a = m.value(i.operands[1], i.type)
    return lambda mask: np.invert(a, out=d, where=mask)


@binds("mul")
def multiply(m: Machine, i: Instruction) -> Run:
    t = i.type
    a = m.value(i.operands[1], t)
    b = m.value(i.operands[2], t)
    if "wide" in i.modifiers:
        d = m.target(i.operands[0], t[0] + str(2 * int(t[1:])))
        return lambda mask: np.multiply(a, b, out=d, where=mask, dtype=d.dtype)
    d = m.target(i.operands[0], t)
    if "hi" in i.modifiers:
        if t[1:] == "64":
            return lambda mask: write(d, _high64(a, b, t), mask)
        wide = DTYPES[t[0] + str(2 * int(t[1:]))]
        bits = int(t[1:])
        return lambda mask: write(
            d, (np.multiply(a, b, dtype=wide) >> wide(bits)).astype(d.dtype), mask
        )
    return lambda mask: np.multiply(a, b, out=d, where=mask)


def _high64(a: Any, b: Any, t: str) -> np.ndarray:
    product = np.broadcast_to(np.asarray(a), np.broadcast(a, b).shape).astype(object) * np.asarray(
        b
    ).astype(object)
    return np.array([(int(x) >> 64) & (2**64 - 1) for x in product.reshape(-1)], np.uint64).view(
        DTYPES[t]
    )


@binds("mad")
def multiply_add(m: Machine, i: Instruction) -> Run:
    t = i.type
    wide = t[0] + str(2 * int(t[1:])) if "wide" in i.modifiers else t
    d = m.target(i.operands[0], wide)
    c = m.value(i.operands[3], wide)
    a = m.value(i.operands[1], t)
    b = m.value(i.operands[2], t)
    if "hi" in i.modifiers:
        raise Fault("unsupported", i.text)
    return lambda mask: write(d, np.multiply(a, b, dtype=d.dtype) + c, mask)


@binds("fma")
def fused_multiply_add(m: Machine, i: Instruction) -> Run:
    d = m.target(i.operands[0], i.type)
    a, b, c = (m.value(x, i.type) for x in i.operands[1:4])
    if i.type != "f32":
        return lambda mask: write(d, a * b + c, mask)

    def toward_zero(mask: Any) -> None:
        product = np.multiply(a, b, dtype=np.float64)  # exact: 48 bits
        total = product + c
        error = fused.rounding_error(product, c, total)
        beyond = np.isfinite(total) & (error != 0) & ((error > 0) != (total > 0))
        total = np.where(beyond, np.nextafter(total, 0), total)
        near = total.astype(np.float32)
        write(
            d, np.where(np.abs(near) > np.abs(total), np.nextafter(near, np.float32(0)), near), mask
        )

    def run(mask: Any) -> None:
        total = fused.multiply_add(a, b, c)
        if saturated:
            total = np.where(np.isnan(total), 0.0, np.clip(total, 0.0, 1.0))
        np.copyto(d, total, where=mask, casting="same_kind")

    saturated = "sat" in i.modifiers
    if ("rn" not in i.modifiers and "rz" not in i.modifiers) or (saturated and "rz" in i.modifiers):
        raise Fault("unsupported", i.text)
    return toward_zero if "rz" in i.modifiers else run


@binds("shl", "shr")
def shift(m: Machine, i: Instruction) -> Run:
    t = i.type
    d = m.target(i.operands[0], t)
    a = m.value(i.operands[1], t)
    width = d.dtype.itemsize * 8
    f = np.left_shift if i.op == "shl" else np.right_shift
    n = m.value(i.operands[2], "u32")
    if np.ndim(n) == 0 and int(n) < width:
        amount = d.dtype.type(int(n))
        return lambda mask: f(a, amount, out=d, where=mask)

    def run(mask: Any) -> None:
        clamped = np.minimum(n, width - 1).astype(d.dtype)
        result = f(a, clamped)
        over = n >= width  # PTX clamps: everything is shifted out
        rest = (a >> d.dtype.type(width - 1)) if i.op == "shr" and t[0] == "s" else d.dtype.type(0)
        write(d, np.where(over, rest, result), mask)

    return run


@binds("shf")
def funnel_shift(m: Machine, i: Instruction) -> Run:
    d = m.target(i.operands[0], "u32")
    low, high, n = (m.value(x, "u32") for x in i.operands[1:4])
    left = i.modifiers[0] == "l"
    wrap = "wrap" in i.modifiers

    def run(mask: Any) -> None:
        both = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | np.asarray(low).astype(
            np.uint64
        )
        amount = (np.asarray(n) & 31 if wrap else np.minimum(n, 32)).astype(np.uint64)
        r = ((both << amount) >> np.uint64(32)) if left else (both >> amount)
        write(d, r.astype(np.uint32), mask)

    return run


@binds("bfi")
def bit_field_insert(m: Machine, i: Instruction) -> Run:
    d = m.target(i.operands[0], i.type)
    a = m.value(i.operands[1], i.type)
    b = m.value(i.operands[2], i.type)
    position = int(i.operands[3], 0)
    length = int(i.operands[4], 0)
    T = d.dtype.type
    field = T((((1 << length) - 1) << position) & ((1 << d.dtype.itemsize * 8) - 1))
    return lambda mask: write(d, (b & ~field) | ((a << T(position)) & field), mask)


@binds("bfe")
def bit_field_extract(m: Machine, i: Instruction) -> Run:
    d = m.target(i.operands[0], i.type)
    a = m.value(i.operands[1], i.type)
    position = int(i.operands[2], 0)
    length = int(i.operands[3], 0)
    width = d.dtype.itemsize * 8
    T = d.dtype.type
    # signed types keep the field's sign
    up = T(width - position - length)
    down = T(width - length)
    return lambda mask: write(d, (a << up) >> down, mask)


_COMPARE: dict[str, Callable[..., Any]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": lambda a, b: ~(a == b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}
_COMBINE: dict[str, Callable[..., Any]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


@binds("setp")
def set_predicate(m: Machine, i: Instruction) -> Run:
    t = i.type
    if "|" in i.operands[0]:
        raise Fault("unsupported", i.text)
    d = m.target(i.operands[0], "pred")
    a = m.value(i.operands[1], t)
    b = m.value(i.operands[2], t)
    f = _COMPARE[i.modifiers[0]]
    if t[0] == "f" and i.modifiers[0] == "ne":  # ordered: false when either is NaN
        f = lambda x, y: (x < y) | (x > y)  # noqa: E731
    if len(i.operands) == 4:
        combine = _COMBINE[i.modifiers[1]]
        other = i.operands[3]
        c = m.value(other.lstrip("!"), "pred")
        negate = other.startswith("!")
        return lambda mask: write(d, combine(f(a, b), ~c if negate else c), mask)
    return lambda mask: write(d, f(a, b), mask)


@binds("selp")
def select(m: Machine, i: Instruction) -> Run:
    d = m.target(i.operands[0], i.type)
    a = m.value(i.operands[1], i.type)
    b = m.value(i.operands[2], i.type)
    p = m.value(i.operands[3], "pred")
    return lambda mask: write(d, np.where(p, a, b), mask)


@binds("dp4a")
def dot4(m: Machine, i: Instruction) -> Run:
    d = m.target(i.operands[0], "s32")
    c = m.value(i.operands[3], "s32")
    kinds = [np.int8 if t == "s32" else np.uint8 for t in i.modifiers[-2:]]
    a, b = (m.value(x, "u32") for x in i.operands[1:3])

    def run(mask: Any) -> None:
        x, y = (
            np.ascontiguousarray(np.broadcast_to(v, d.shape))
            .view(k)
            .reshape(-1, 4)
            .astype(np.int32)
            for v, k in zip((a, b), kinds, strict=True)
        )
        write(d, (x * y).sum(1, dtype=np.int32) + c, mask)

    return run


@binds("popc", "clz", "brev")
def count_bits(m: Machine, i: Instruction) -> Run:
    if i.op != "popc":
        raise Fault("unsupported", i.text)
    d = m.target(i.operands[0], "u32")
    a = m.value(i.operands[1], i.type)
    return lambda mask: write(d, np.bitwise_count(a).astype(np.uint32), mask)


@binds("fence", "membar", "griddepcontrol", "prefetch", "nop")
def nothing(m: Machine, i: Instruction) -> Run:
    if i.op == "fence" and "async" in i.modifiers and "proxy" in i.modifiers:

        def fence(mask: Any) -> None:
            warps = m.warps_of(mask)
            m.shared.fence(warps)
            m.copies.fence(warps)

        return fence
    if i.op == "fence" and "mbarrier_init" in i.modifiers:
        return lambda mask: m.copies.fence(m.warps_of(mask))
    return lambda mask: None
