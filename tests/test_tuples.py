"""Named tuples of the package are one argument of compiled functions, others all their fields."""

from typing import NamedTuple

import numba
import numpy as np
from numba.core.registry import cpu_target

from numflash.jit.compiler import kernel, separate


class Pair(NamedTuple):
    first: np.float32
    second: np.float32


class Work(NamedTuple):
    used: bool
    x: np.ndarray
    pair: Pair
    unused: bool
    small: np.int8


class Others(NamedTuple):
    a: int
    b: float


Pair.__module__ = Work.__module__ = "numflash.cpu"


@separate
def summed(work, factor):
    """Found by its symbol, so that fields really go from one function to the other."""
    total = work.pair.first - work.pair.second if work.used and not work.unused else np.float32(0)
    for i in range(work.x.size):
        total += work.x[i] * factor
    return total + work.small


@kernel
def run(x, used, small):
    work = Work(used, x, Pair(np.float32(3), np.float32(1)), not used, small)
    return summed(work, 2)


def test_fields_arrive():
    x = np.arange(5, dtype=np.float32)
    for used in (True, False):
        assert run(x, used, np.int8(-7)) == 20 - 7 + 2 * used


def test_only_the_package_s_are_whole():
    def arguments(value):
        return len(cpu_target.target_context.get_arg_packer((numba.typeof(value),)).argument_types)

    pair = Pair(np.float32(1), np.float32(2))
    assert arguments(pair) == 1
    assert arguments(Work(True, np.zeros(3, np.float32), pair, True, np.int8(1))) == 1
    assert arguments(Others(1, 2.0)) == 2
    assert arguments((1, 2.0)) == 2
