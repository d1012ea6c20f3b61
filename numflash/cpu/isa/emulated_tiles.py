"""The tile instructions of AMX as plain loops, for CPUs with AVX-512 that have no AMX.

With NUMFLASH_EMULATE_AMX=1, `amx_tiles.tile_call` emits calls of these functions. The rest of an AMX
kernel (layouts, the order of products, the vector work between them) is compiled as for a CPU with
AMX, so that its results can be tested on one without. Each thread has eight tiles of its own, as it
has registers. Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2,
"TDPBSSD", "TDPBF16PS", "LDTILECFG".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import cfunc, njit, types

from ...jit.memory import array_at
from ...jit.target import EMULATED_TILES

ROWS, WIDTH = 16, 64
TILE = ROWS * WIDTH
CONFIGURATION = 8 * TILE  # behind the tiles: what ldtilecfg read
ROWS_OF = CONFIGURATION + 48  # a byte for each tile

_libc = ctypes.CDLL(None)
_key = ctypes.c_uint()
_libc.pthread_key_create(ctypes.byref(_key), ctypes.cast(_libc.free, ctypes.c_void_p))
KEY = _key.value
_get = types.ExternalFunction("pthread_getspecific", types.int64(types.uint32))
_set = types.ExternalFunction("pthread_setspecific", types.int32(types.uint32, types.int64))
_allocate = types.ExternalFunction("calloc", types.int64(types.int64, types.int64))


@njit
def _tiles():
    """Address of this thread's tiles."""
    if _get(KEY) == 0:
        _set(KEY, _allocate(1, CONFIGURATION + WIDTH))
    return _get(KEY)


@njit
def _tile(number, shape, dtype):
    return array_at(_tiles() + number * TILE, shape, dtype)


@njit
def _rows(number):
    """The rows of a tile; 0 if the thread's tiles are not configured."""
    return np.int64(array_at(_tiles() + ROWS_OF, (8,), np.uint8)[number])


def _ldtilecfg(source):
    array_at(_tiles() + CONFIGURATION, (WIDTH,), np.uint8)[:] = array_at(source, (WIDTH,), np.uint8)
    for number in range(8):
        _tilezero(number)


def _tilerelease():
    array_at(_tiles() + CONFIGURATION, (WIDTH,), np.uint8)[:] = 0


@njit
def _tilezero(number):
    _tile(number, (TILE,), np.uint8)[:] = 0


def _tileloadd64(number, source, stride):
    _tilezero(number)
    tile = _tile(number, (ROWS, WIDTH), np.uint8)
    for row in range(_rows(number)):
        tile[row] = array_at(source + row * stride, (WIDTH,), np.uint8)


def _tilestored64(number, target, stride):
    tile = _tile(number, (ROWS, WIDTH), np.uint8)
    for row in range(_rows(number)):
        array_at(target + row * stride, (WIDTH,), np.uint8)[:] = tile[row]


def _integer_products(left: Any, right: Any) -> Callable:
    """f(sums, a, b): sums += A.B, of bytes of these two types in groups of four."""

    def products(sums, a, b):
        c = _tile(sums, (ROWS, ROWS), np.int32)
        x, y = _tile(a, (ROWS, ROWS, 4), left), _tile(b, (ROWS, ROWS, 4), right)
        for row in range(_rows(sums)):
            for group in range(_rows(b)):
                for column in range(ROWS):
                    for n in range(4):
                        c[row, column] += np.int32(x[row, group, n]) * np.int32(y[group, column, n])

    return products


@njit
def _float(bits):
    """bfloat16 as float32; denormals are 0."""
    return np.uint32(bits << 16 if bits & 0x7F80 else 0).view(np.float32)


def _tdpbf16ps(sums, a, b):
    c = _tile(sums, (ROWS, ROWS), np.float32)
    x, y = _tile(a, (ROWS, ROWS, 2), np.uint16), _tile(b, (ROWS, ROWS, 2), np.uint16)
    for row in range(_rows(sums)):
        for column in range(ROWS):
            first, second = np.float32(0), np.float32(0)
            for pair in range(_rows(b)):
                first += _float(x[row, pair, 0]) * _float(y[pair, column, 0])
                second += _float(x[row, pair, 1]) * _float(y[pair, column, 1])
            c[row, column] += first + second


INSTRUCTIONS: dict[str, tuple[Callable, int]] = {  # what does it, and its numbers
    "ldtilecfg": (_ldtilecfg, 1),
    "tilerelease": (_tilerelease, 0),
    "tilezero": (_tilezero.py_func, 1),
    "tileloadd64": (_tileloadd64, 3),
    "tilestored64": (_tilestored64, 3),
    "tdpbssd": (_integer_products(np.int8, np.int8), 3),
    "tdpbsud": (_integer_products(np.int8, np.uint8), 3),
    "tdpbusd": (_integer_products(np.uint8, np.int8), 3),
    "tdpbf16ps": (_tdpbf16ps, 3),
}
_compiled = {
    name: cfunc(types.void(*[types.int64] * count))(function)
    for name, (function, count) in INSTRUCTIONS.items()
}
for _name, _function in _compiled.items():
    llvm.add_symbol(EMULATED_TILES + _name, _function.address)
