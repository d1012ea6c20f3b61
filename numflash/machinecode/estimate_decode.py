"""Cycles of decoding per score on an AArch64 CPU, by llvm-mca: the whole kernel, executed by the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cpu.decode.flash_decode import make_decode
from ..cpu.decode.matrix_tiles import SCRATCH_ROWS
from ..cpu.decode.task_data import Scratch, Store, sums_rows
from ..cpu.decode.tiles import tile
from ..cpu.decode_layout import Layout
from ..tiling import KEY_BLOCK
from ..validation import NO_LIMIT
from . import codegen, kernel_types
from .emulator import Emulated
from .model import Model, bits_of, isa_of

F = np.float32
ROWS = 4  # query rows of a KV head, which share what is loaded of K and V


def _store(layout: Layout, blocks: int) -> Store:
    """A cache of the same random key block over and over: the maxima do not grow behind the first."""
    shape = 1, KEY_BLOCK, layout.head_dim
    rng = np.random.default_rng(0)
    if layout.tile.exact:
        tokens: Any = [rng.integers(-127, 128, shape).astype(np.int8) for _ in range(2)]
    else:
        tokens = [rng.standard_normal(shape, F).view(layout.bits) for _ in range(2)]
    store = layout.allocate(1, 1, 1)
    scales = np.full((2 if layout.tile.exact else 1, 1, KEY_BLOCK * blocks), 0.02, F)
    key, value = (np.tile(x, (1, blocks, 1)) for x in tokens)
    layout.write(store, np.array([0]), key, value, scales)
    store.lengths[:] = KEY_BLOCK * blocks
    return store


def _arguments(layout: Layout, blocks: int) -> tuple[Any, ...]:
    """Of one call: ROWS query rows, one KV head, one thread."""
    t, d, columns, zeros = layout.tile, layout.head_dim, layout.columns, np.zeros
    scratch = Scratch(
        zeros((1, ROWS, t.query_planes, layout.channels // t.group), np.int32),
        zeros((1, SCRATCH_ROWS, KEY_BLOCK), np.int32),
        zeros((1, sums_rows(t, ROWS), columns), F),
        zeros((1, 3, d), F),
        zeros((1, ROWS, 5), np.int64),
        zeros((1, ROWS), np.uint8),
        zeros((1, ROWS, columns), F),
        zeros((1, 8), F),
        zeros((1, 8), F),
        zeros(2, np.int64),
    )
    q = np.random.default_rng(1).standard_normal((1, 1, ROWS, d), F)
    sizes = 1, 1, NO_LIMIT, 0, NO_LIMIT, layout.page_size, 1
    state = zeros((1, 1, ROWS), F)
    scale = F(0.1)
    store = _store(layout, blocks)
    return q, scale, store, scratch, sizes, np.zeros_like(q), state, state.copy()


def cycles_per_score(model: Model, dtype: str, head_dim: int) -> float:
    """Of a cache that stores `dtype`, a key for each of ROWS query rows being a score: what a key block
    more costs the call, with its softmax and everything between blocks, and no wait for memory.
    """
    generator = codegen.code_generator(codegen.Target.named(model.cpu))
    stored = tile(isa_of(model.cpu) or "portable", dtype, codegen=generator)
    kernel = make_decode(stored, ROWS, False, False)
    bits = max(128, bits_of(model.cpu))
    run = Emulated(kernel, kernel_types.decode(dtype), model.cpu, vector_bits=bits)

    def cycles(blocks: int) -> float:
        layout = Layout(stored, 1, head_dim, head_dim, blocks * KEY_BLOCK)
        return model.cycles(run.trace(*_arguments(layout, blocks)))

    return (cycles(3) - cycles(2)) / (ROWS * KEY_BLOCK)
