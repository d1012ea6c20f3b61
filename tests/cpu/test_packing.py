"""Packed K and V against the layouts that `numflash.cpu.int8.packing` describes, written once more
with NumPy's own indexing.
"""

import numpy as np
import pytest

from numflash.cpu.floats.float_isas import FLOAT_ISAS
from numflash.cpu.floats.float_packing import MANY_ROWS
from numflash.cpu.int8 import packing
from numflash.cpu.isa.isas import VECTOR_ISAS, running_lanes
from numflash.cpu.launch_float import FloatPlan
from numflash.jit import target
from numflash.jit.memory import LINE
from numflash.tiling import KEY_BLOCK
from numflash.validation import problem
from numflash.validation.options import Options

SHAPES = [
    (1, 1),
    (2, 7),
    (63, 60),
    (64, 64),
    (65, 32),
    (128, 128),
    (130, 72),
    (200, 33),
    (257, 40),
    (384, 160),
    (100, 300),
]
here = pytest.mark.parametrize("isa", [isa for isa in target.available() if isa in VECTOR_ISAS])


def filled(x, *shape):
    """x (N, S, D) with zeros up to `shape`."""
    out = np.zeros((x.shape[0], *shape), x.dtype)
    out[:, : x.shape[1], : x.shape[2]] = x
    return out


@here
@pytest.mark.parametrize(("s", "d"), SHAPES)
def test_keys(isa, s, d):
    rng = np.random.default_rng(s * 1000 + d)
    kind = VECTOR_ISAS[isa]
    lanes = running_lanes(isa)
    k = rng.integers(-128, 128, (3, s, d), dtype=np.int8)
    scale = rng.random((3, s), np.float32)
    scale[1, s // 2] = np.nan
    packed = packing.pack_keys(isa, k, scale)
    whole = filled(k, packing.padded(s, KEY_BLOCK), packing.padded(d, kind.step)).astype(
        np.int8 if kind.group == 4 else np.int16
    )
    panel = kind.nv * lanes
    order = kind.key_order(lanes)
    panels = whole.reshape(3, -1, panel, whole.shape[2] // kind.group, kind.group)[:, :, order]
    if kind.tiled:  # 32 keys, step, tile, group, key, channel of the group
        tiles = panels.reshape(3, -1, 2, 16, whole.shape[2] // 64, 16, 4)
        want = tiles.transpose(0, 1, 4, 2, 5, 3, 6)
    else:
        want = panels.swapaxes(2, 3)
    assert np.array_equal(packed.data, want.reshape(3, -1))
    sums = panels.astype(np.int32).sum((3, 4), dtype=np.int32).reshape(3, -1)
    assert np.array_equal(packed.start, -kind.q_offset * sums)
    scales = (
        filled(scale[:, :, None], whole.shape[1], 1)
        .reshape(3, -1, panel)[:, :, order]
        .reshape(3, -1)
    )
    assert np.array_equal(packed.scale, scales, equal_nan=True)
    assert np.array_equal(packed.wide, np.isnan(scales).reshape(3, -1, KEY_BLOCK).any(2))


@here
@pytest.mark.parametrize(("s", "dv"), SHAPES)
def test_values(isa, s, dv):
    rng = np.random.default_rng(s * 1000 + dv)
    kind = VECTOR_ISAS[isa]
    lanes = running_lanes(isa)
    v = rng.integers(-128, 128, (3, s, dv), dtype=np.int8)
    columns = packing.padded(dv, kind.unit * lanes)
    wide = np.int8 if kind.group == 4 else np.int16
    shifted = (
        filled(v, packing.padded(s, KEY_BLOCK), columns).astype(np.int16) + kind.v_offset
    ).astype(wide)
    if kind.tiled:  # key block, 32 columns, step, tile, group, column, key of the group
        keys = shifted.reshape(3, -1, 2, 2, 16, 2, columns // 32, 2, 16)  # step, half, pair, of it
        want = keys.transpose(0, 1, 6, 2, 7, 4, 8, 5, 3)
        assert np.array_equal(packing.pack_values(isa, v), want.reshape(3, -1))
        return
    blocks = shifted.reshape(3, -1, KEY_BLOCK // kind.group, kind.group, columns)
    chunks = []
    t = 0
    while t < columns:
        left = columns - t
        width = next(w for w in (kind.nv * lanes, 2 * lanes, lanes) if w <= left)
        chunks.append(blocks[..., t : t + width].swapaxes(3, 4).reshape(3, blocks.shape[1], -1))
        t += width
    assert np.array_equal(packing.pack_values(isa, v), np.concatenate(chunks, 2).reshape(3, -1))


@here
def test_keys_that_are_not_aligned(isa):
    room = np.random.default_rng(0).integers(-128, 128, 64 * 64 + 1, dtype=np.int8)
    k = room[1:].reshape(1, 64, 64)
    scale = np.ones((1, 64), np.float32)
    for packed, same in zip(
        packing.pack_keys(isa, k, scale), packing.pack_keys(isa, k.copy(), scale), strict=True
    ):
        assert np.array_equal(packed, same)


@pytest.mark.parametrize("isa", [i for i in target.available(target.FLOAT_ISAS) if i != "portable"])
@pytest.mark.parametrize("rows", [1, MANY_ROWS])
def test_float_values_stay_in_place_where_they_are_aligned(isa, rows):
    """Kernels load whole floats: an array that begins between two of them is copied."""
    columns = FLOAT_ISAS[isa].lanes
    raw = np.arange(16 * columns * 4 + LINE + 1, dtype=np.uint8)
    line = -raw.ctypes.data % LINE
    q, k = np.ones((1, 1, rows, 8), np.float32), np.ones((1, 1, 16, 8), np.float32)
    for offset, in_place in ((0, True), (1, False)):
        v = raw[line + offset :][: 16 * columns * 4].view(np.float32).reshape(1, 1, 16, columns)
        assert v.flags.aligned == in_place
        given = problem(q, k, v, Options())
        _, _, taken = FloatPlan(given, isa).operands(given.query, given.key, given.value)
        assert taken.flags.aligned and taken.flags.c_contiguous
        assert taken.tobytes() == v.tobytes() and np.shares_memory(taken, raw) == in_place
