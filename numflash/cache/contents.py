"""Reading a cache back.

The stored numbers, the floats they represent, and all of it as arrays on the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..interop.arrays import widen
from ..numerics import fixedpoint as fx
from ..numerics.code_pairs import from_pairs, to_pairs
from ..numerics.quantization import QuantizedTensor
from ..numerics.rotation import rotate
from .damage import STATE_VERSION, check_numbers, checked_lengths
from .memory import Memory
from .settings import INTEGERS

F = np.float32
STORED = {"int8": np.int8, "float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
BITS = {
    "int8": np.int8,
    "int4": np.int8,
    "float32": np.uint32,
    "float16": np.uint16,
    "bfloat16": np.uint16,
}


def stored(memory: Memory, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What sequence b holds as it is stored, in slot order.

    Elements (Hkv, slots, D) and (Hkv, slots, Dv), and scales (2, Hkv, slots) for integers, else (1,
    Hkv, slots). Elements of "int4" are odd numbers from -15 to 15.
    """
    layout = memory.layout
    store = memory.store
    settings = memory.settings
    pages, n = memory.slots(b)
    if not n:  # the layouts reshape by the sizes of what is there
        heads = settings.kv_heads
        d = settings.head_dim
        exact = settings.dtype in INTEGERS
        both = np.zeros((heads, 0, d + settings.value_dim), BITS[settings.dtype])
        return both[..., :d], both[..., d:], np.zeros((1 + exact, heads, 0), F)
    keys = layout.keys(store, pages)[:, :n]
    values = layout.values(store, pages)[:, :n]
    return keys, values, layout.scales(store, pages)[:, :, :n]


def quantized(memory: Memory, b: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Keys and values of sequence b as "int8" or "int4" stores them, in slot order."""
    keys, values, scales = stored(memory, b)
    k_scale, v_scale = scales[..., None]
    v_scale = np.where(v_scale == F(fx.ZERO_VALUE_SCALE), F(1), v_scale)  # as `quantize` has it
    bad = np.isnan(k_scale[..., 0])
    offset = memory.offset[b, :, None].copy()
    if memory.settings.rotate:
        offset = rotate(offset, memory.settings.rotation)
    marked = bad if bad.any() else None
    k_scale = np.where(bad[..., None], F(1), k_scale)
    key = QuantizedTensor(keys, k_scale, "row", offset, marked)
    return key, QuantizedTensor(values, v_scale, "row", None, marked)


def read_into(memory: Memory, b: int, key: np.ndarray, value: np.ndarray) -> None:
    """Write what sequence b holds to the start of key (Hkv, slots or more, D) and value.

    Contiguous float32 arrays, in slot order.
    """
    pages, n = memory.slots(b)
    if memory.layout.read(memory.store, pages, n, memory.offset[b], (key, value)) is None:
        key[:, :n], value[:, :n] = read(memory, b)


def read(memory: Memory, b: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of sequence b as float32, in slot order; NaN where a token was not finite."""
    pages, n = memory.slots(b)
    unpacked = memory.layout.read(memory.store, pages, n, memory.offset[b])
    if unpacked is not None:
        return unpacked
    if memory.settings.dtype in INTEGERS:
        key, value = quantized(memory, b)
        if not memory.settings.rotate:
            return key.dequantize(), value.dequantize()
        plain = replace(key, offset=None)
        k, v = (rotate(x.dequantize(), memory.settings.rotation) for x in (plain, value))
        return k + memory.offset[b, :, None], v
    *elements, scales = stored(memory, b)
    bad = np.isnan(scales[0, ..., None])
    found = (x.copy().view(STORED[memory.settings.dtype]) for x in elements)
    k, v = (np.where(bad, F(np.nan), widen(x).astype(F)) for x in found)
    return k, v


def state(memory: Memory) -> dict[str, np.ndarray]:
    """All sequences as arrays, for `restore`: independent of device, instruction set and pages."""
    found: dict[str, np.ndarray] = {
        "version": np.array(STATE_VERSION),
        "lengths": memory.store.lengths.copy(),
        "offset": memory.offset.copy(),
        "oldest": memory.oldest.copy(),
        "rotate": np.array(memory.settings.rotate),
        "window": np.array(memory.settings.window or 0),
        "sinks": np.array(memory.settings.sinks),
        "value_dim": np.array(memory.settings.value_dim),
        "value_in_key": np.array(memory.settings.value_in_key),
    }
    for b in range(memory.batch):
        for name, x in zip(("key", "value", "scale"), stored(memory, b), strict=True):
            codes = memory.settings.dtype == "int4" and name != "scale"
            if name != "value" or not memory.settings.value_in_key:
                found[f"{name}{b}"] = np.ascontiguousarray(to_pairs(x) if codes else x)
    return found


def restore(memory: Memory, given: dict[str, Any]) -> Memory:
    """Write the tokens of a `state` into an empty memory; returns that with the state's lengths.

    Raises
    ------
    ArgumentError, CacheFullError
        What was given is no state, or of a cache of another shape or dtype. Nothing counts as
        written then.
    """
    lengths = checked_lengths(memory.settings, memory.batch, given)
    arrays = [_tokens(memory, given, b, int(lengths[b])) for b in range(memory.batch)]
    for b, tokens in enumerate(arrays):
        check_numbers(memory.settings, b, *tokens)
    if memory.settings.paged:
        memory.grow(lengths)
    size = memory.layout.page_size
    for b, (key, value, scales) in enumerate(arrays):
        slots = key.shape[1]
        if not slots:  # layouts do not store nothing
            continue
        pages = memory.store.table[b, : -(-slots // size)]
        pad = len(pages) * size - slots
        memory.layout.write(
            memory.store,
            pages,
            np.pad(key, ((0, 0), (0, pad), (0, 0))),
            np.pad(value, ((0, 0), (0, pad), (0, 0))),
            np.pad(scales, ((0, 0), (0, 0), (0, pad))),
        )
    memory.offset[...] = given["offset"]
    store = memory.layout.rebound(memory.store, memory.store.table, lengths.copy())
    return replace(memory, store=store, oldest=np.array(given["oldest"]))


def _tokens(
    memory: Memory, given: dict[str, Any], b: int, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, values and scales of one sequence of a state."""
    settings = memory.settings
    layout = memory.layout
    used = min(length, layout.sinks + layout.ring)
    exact = settings.dtype in INTEGERS
    codes = settings.dtype == "int4"
    bits = np.dtype(np.uint8 if codes else BITS[settings.dtype])
    dims = settings.head_dim, settings.value_dim
    d, dv = (-(-n // 2) for n in dims) if codes else dims
    pairs = ", two to a byte" if codes else ""
    wanted = {
        f"key{b}": ((settings.kv_heads, used, d), bits, f", head_dim={dims[0]}{pairs}"),
        f"value{b}": ((settings.kv_heads, used, dv), bits, f", value_dim={dims[1]}{pairs}"),
        f"scale{b}": ((2 if exact else 1, settings.kv_heads, used), np.dtype(F), ""),
    }
    if settings.value_in_key:
        del wanted[f"value{b}"]
    for name, (shape, dtype, channels) in wanted.items():
        x = given.get(name)
        if not isinstance(x, np.ndarray) or x.shape != shape or x.dtype != dtype:
            got = (
                "nothing" if x is None else f"{getattr(x, 'dtype', type(x))} of shape {np.shape(x)}"
            )
            raise ArgumentError(
                f"state: got {got} for {name!r}; allowed: {dtype} of shape {shape}, by this cache's "
                f"dtype={settings.dtype!r}, kv_heads={settings.kv_heads}{channels} and the state's lengths, {length}"
            )
    key, scale = given[f"key{b}"], given[f"scale{b}"]
    value = key[..., : settings.value_dim] if settings.value_in_key else given[f"value{b}"]
    if codes:
        key, value = (from_pairs(x, n) for x, n in zip((key, value), dims, strict=True))
    return key, value, scale
