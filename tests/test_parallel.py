"""Tasks on threads: each runs once, on any number of threads.

One that fails is an exception and not a wrong result.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np import arrayobj

from numflash.jit.compiler import inline, kernel
from numflash.jit.memory import zeros
from numflash.jit.parallel import over_tasks
from numflash.jit.threads import limit


@inline
def add_row(n, x, shape, out):
    for i in range(shape[1]):
        out[n] += x[n, i]


@kernel
def add_rows(x, out):
    over_tasks(add_row, x.shape[0], (x, x.shape, out))


@inline
def take_room(n, size, failing, out):
    room = zeros((size if n == failing else 1,), np.int64, "room")
    out[n] = room.size


@kernel
def take_rooms(size, failing, out):
    over_tasks(take_room, out.size, (size, failing, out))


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 1000])
def test_each_task_runs_once(rows):
    x = np.arange(rows * 5, dtype=np.int64).reshape(rows, 5)
    for threads in {1, numba.config.NUMBA_NUM_THREADS}:
        out = np.zeros(rows, np.int64)
        with limit(threads):
            add_rows(x, out)
        assert (out == x.sum(1)).all()


@pytest.mark.parametrize("failing", [0, 3, 5])
def test_a_task_that_fails_is_an_error(failing):
    """Numba itself loses an exception inside a `prange`."""
    out = np.zeros(6, np.int64)
    with pytest.raises(MemoryError, match="could not allocate"):
        take_rooms(1 << 45, failing, out)
    assert (np.delete(out, failing) == 1).sum() >= 1 and out[failing] == 0
    take_rooms(1, failing, out)
    assert (out == 1).all()


@intrinsic
def owner(typingctx, x):
    """Address of what counts the references of an array."""

    def codegen(context, builder, signature, args):
        array = arrayobj.make_array(x)(context, builder, args[0])
        return builder.ptrtoint(array.meminfo, ir.IntType(64))

    return types.intp(x), codegen


class Pair(NamedTuple):
    x: np.ndarray
    rest: tuple


@inline
def own(n, pair, out):
    out[n, 0], out[n, 1], out[n, 2] = owner(pair.x[n]), owner(pair.rest[0][n:]), owner(out[n])


@kernel
def owners(x, out):
    over_tasks(own, out.shape[0], (Pair(x, (x, 1)), out))
    return owner(x[0])


def test_tasks_count_no_references():
    """A locked instruction for each slice of a shared array made quantising on two threads three
    times as slow as on one.
    """
    out = np.full((3, 3), -1, np.int64)
    assert owners(np.ones((3, 2)), out) != 0
    assert not out.any()
