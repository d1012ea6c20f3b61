"""Conversions, moves and permutations of bytes, as NumPy calls over all threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .binders import DTYPES, Run, binds, write
from .parse import Instruction, vector

if TYPE_CHECKING:
    from .machine import Machine


FLOATS = ("f16", "f32", "f64")
# to a whole number
ROUNDINGS: dict[str, Any] = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits (uint16), ties to even, NaN kept."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _pack_halves(m: Machine, i: Instruction, to: str) -> Run:
    """Two float32 to one word: the first operand is the upper half."""
    d = m.target(i.operands[0], "u32")
    high, low = (m.value(x, "f32") for x in i.operands[1:3])

    def half(x: Any) -> np.ndarray:
        x = np.asarray(x, np.float32)
        return x.astype(np.float16).view(np.uint16) if to == "f16x2" else to_bfloat16(x)

    return lambda mask: write(d, (half(high).astype(np.uint32) << np.uint32(16)) | half(low), mask)


def _to_integer(a: Any, d: np.ndarray, to: str, extended: Any, rounding: Any) -> Run:
    """Floats to integers of type `to`: NaN becomes 0, the rest saturates."""
    limits = np.iinfo(DTYPES[to])
    low, high = limits.min, limits.max

    def run(mask: Any) -> None:
        x = rounding(np.asarray(a, np.float64))
        x = np.where(np.isnan(x), 0, x)
        top = x >= float(high)
        bounded: Any = np.clip(x, float(low), float(high) if high < 2**53 else 2.0**62).astype(
            DTYPES[to]
        )
        value = np.where(top, DTYPES[to](high), bounded)
        write(d, value.astype(extended), mask)

    return run


@binds("cvt")
def convert(m: Machine, i: Instruction) -> Run:
    to, source = i.modifiers[-2:]
    if to in ("f16x2", "bf16x2"):
        return _pack_halves(m, i, to)
    a = m.value(i.operands[1], source)
    if to == "bf16":
        d = m.target(i.operands[0], "u16")
        return lambda mask: write(d, to_bfloat16(a), mask)
    if source == "bf16":
        d = m.target(i.operands[0], "f32")
        return lambda mask: write(d, (a.astype(np.uint32) << np.uint32(16)).view(np.float32), mask)
    d, extended = m.wide_target(i.operands[0], to)
    rounding = next((f for name, f in ROUNDINGS.items() if name in i.modifiers), None)
    if source in FLOATS and to not in FLOATS:
        return _to_integer(a, d, to, extended, rounding or np.trunc)
    if source in FLOATS and to == source and rounding is not None:
        return lambda mask: rounding(a, out=d, where=mask)
    kind = DTYPES[to]
    if "sat" in i.modifiers and to not in FLOATS:
        limits = np.iinfo(kind)
        return lambda mask: write(
            d, np.clip(a, limits.min, limits.max).astype(kind).astype(extended), mask
        )
    return lambda mask: write(d, np.asarray(a).astype(kind).astype(extended), mask)


@binds("cvta")
def convert_address(m: Machine, i: Instruction) -> Run:
    d = m.target(i.operands[0], i.type)
    a = m.value(i.operands[1], i.type)
    space = next((s for s in ("shared", "local") if s in i.modifiers), None)
    window = m.window[space] if space else 0
    step = np.uint64(2**64 - window if "to" in i.modifiers and window else window)
    return lambda mask: write(d, a + step, mask)


@binds("mov")
def move(m: Machine, i: Instruction) -> Run:
    t, (to, source) = i.type, i.operands
    part = {"b32": "b16", "b64": "b32"}.get(t, "")
    if source.startswith("{"):
        d = m.target(to, t)
        parts = [m.value(x, part) for x in vector(source)]
        bits = d.dtype.type(DTYPES[part]().itemsize * 8)
        return lambda mask: write(
            d,
            sum(
                np.asarray(x).astype(d.dtype) << d.dtype.type(k) * bits for k, x in enumerate(parts)
            ),
            mask,
        )
    if to.startswith("{"):
        a = m.value(source, t)
        targets = [m.target(x, part) if x != "_" else None for x in vector(to)]
        T = DTYPES[t]
        bits = DTYPES[part]().itemsize * 8

        def unpack(mask: Any) -> None:
            for k, x in enumerate(targets):
                if x is not None:
                    write(x, (a >> T(k * bits)).astype(x.dtype), mask)

        return unpack
    d = m.target(to, t)
    a = m.value(source, t)
    return lambda mask: np.copyto(d, a, where=mask)


@binds("prmt")
def permute_bytes(m: Machine, i: Instruction) -> Run:
    d = m.target(i.operands[0], "u32")
    a, b, selector = (m.value(x, "u32") for x in i.operands[1:4])

    def run(mask: Any) -> None:
        both = np.broadcast_to(a, d.shape).astype(np.uint64) | (
            np.broadcast_to(b, d.shape).astype(np.uint64) << np.uint64(32)
        )
        result = np.zeros(d.shape, np.uint32)
        for k in range(4):
            s = (np.asarray(selector) >> np.uint32(4 * k)) & np.uint32(15)
            byte = (
                (both >> ((s & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
            ).astype(np.uint32)
            byte = np.where(
                s & np.uint32(8),
                np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0)),
                byte,
            )
            result |= byte << np.uint32(8 * k)
        write(d, result, mask)

    return run
