"""Conversions, moves and permutations of bytes, as NumPy calls over all threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .binders import DTYPES, Run, binds, write
from .parse import Instruction, vector

if TYPE_CHECKING:
    from .machine import Machine


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits (uint16), ties to even, NaN kept."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


@binds("cvt")
def convert(m: Machine, i: Instruction) -> Run:
    to = i.modifiers[-2]
    source = i.modifiers[-1]
    if to in ("f16x2", "bf16x2"):
        d = m.target(i.operands[0], "u32")
        high = m.value(i.operands[1], "f32")
        low = m.value(i.operands[2], "f32")
        half = (
            (lambda x: np.asarray(x, np.float32).astype(np.float16).view(np.uint16))
            if to == "f16x2"
            else (lambda x: to_bfloat16(np.asarray(x, np.float32)))
        )
        return lambda mask: write(
            d, (half(high).astype(np.uint32) << np.uint32(16)) | half(low), mask
        )
    a = m.value(i.operands[1], source)
    floats = ("f16", "f32", "f64")
    if to == "bf16":
        d = m.target(i.operands[0], "u16")
        return lambda mask: write(d, to_bfloat16(a), mask)
    if source == "bf16":
        d = m.target(i.operands[0], "f32")
        return lambda mask: write(d, (a.astype(np.uint32) << np.uint32(16)).view(np.float32), mask)
    d, extended = m.wide_target(i.operands[0], to)
    if source in floats and to not in floats:
        rounding = next(
            (
                f
                for k, f in (("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil))
                if k in i.modifiers
            ),
            np.trunc,
        )
        low = np.iinfo(DTYPES[to]).min
        high = np.iinfo(DTYPES[to]).max

        def to_integer(mask: Any) -> None:
            x = rounding(np.asarray(a, np.float64))
            x = np.where(np.isnan(x), 0, x)  # PTX: NaN becomes 0, the rest saturates
            top = x >= float(high)
            bounded: Any = np.clip(x, float(low), float(high) if high < 2**53 else 2.0**62).astype(
                DTYPES[to]
            )
            value = np.where(top, DTYPES[to](high), bounded)
            write(d, value.astype(extended), mask)

        return to_integer
    if (
        source in floats
        and to == source
        and any(r in i.modifiers for r in ("rni", "rmi", "rpi", "rzi"))
    ):
        whole = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}[
            next(r for r in i.modifiers if r in ("rni", "rmi", "rpi", "rzi"))
        ]
        return lambda mask: whole(a, out=d, where=mask)
    kind = DTYPES[to]
    if "sat" in i.modifiers and to not in floats:
        low = np.iinfo(kind).min
        high = np.iinfo(kind).max
        return lambda mask: write(d, np.clip(a, low, high).astype(kind).astype(extended), mask)
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
