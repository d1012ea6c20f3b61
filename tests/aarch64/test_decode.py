"""Decode's integer products on AArch64 are dot products, and the whole kernels, executed, have the
bits of the integer model.
"""

import functools

import numba
import numpy as np
import pytest
from daily import of_today

pytest.importorskip("unicorn")
pytest.importorskip("elftools")

from numflash.cpu import decode_layout, launch_decode
from numflash.cpu.decode import (
    append,
    append_int4,
    changes,
    flash_decode,
    functions,
    register_tiles,
    row_changes,
    tiles,
)
from numflash.cpu.isa.vectors import address
from numflash.errors import UnsupportedError
from numflash.machinecode import assembly, export
from numflash.machinecode.emulator import Emulated
from numflash.numerics import fixedpoint
from numflash.tiling import KEY_BLOCK

from .test_guest import decode_and_compare

MACHINES = [("sve", "a64fx"), ("neon_dot", "neoverse-n1")]
ROWS = 6


def tile(isa, dtype="int8"):
    q_offset, v_offset = (15, 15) if dtype == "int4" else (0, 128)
    return tiles.Tile(isa, dtype, 4, 4, 4, q_offset, v_offset, ahead=tiles.ahead(""))


@functools.cache
def one_thread(make, *arguments):
    """A kernel that is called with its arguments, compiled for the emulator."""
    return numba.njit(make(*arguments, False).py_func, error_model="numpy")


@pytest.mark.parametrize(("isa", "cpu"), MACHINES)
def test_scores_of_a_row_become_floats_and_integers_again(isa, cpu):
    to_floats, to_integers = functions.row_conversions(tile(isa))

    @numba.njit
    def run(whole, real):
        to_floats(address(whole), 1)
        to_integers(address(real), 0)
        to_integers(address(real), 1)

    whole = np.random.default_rng(0).integers(-(2**20), 2**20, (2, KEY_BLOCK)).astype(np.int32)
    real = np.random.default_rng(1).normal(0, 1e5, (2, KEY_BLOCK)).astype(np.float32)
    real[0, :8] = -np.inf, np.inf, 3e38, -3e38, 0.5, 1.5, -2.5, -0.0
    real[1, 100] = np.nan
    limit = float(fixedpoint.T_LIMIT)
    wanted = np.rint(np.clip(real, -limit, limit).astype(np.float64))
    wanted[real == -np.inf] = tiles.HIDDEN
    floats = whole.copy()
    Emulated(run, "void(int32[:, ::1], float32[:, ::1])", cpu)(floats, real)
    assert np.array_equal(floats[0], whole[0])
    assert np.array_equal(floats[1].view(np.float32), whole[1].astype(np.float32))
    seen = np.arange(2 * KEY_BLOCK) != KEY_BLOCK + 100  # NaN becomes any number
    assert np.array_equal(real.view(np.int32).ravel()[seen], wanted.ravel()[seen])


@pytest.mark.parametrize(("isa", "cpu"), MACHINES)
def test_soft_cap_and_slopes_of_a_row(isa, cpu):
    change_row = row_changes.make_change_row(tile(isa))

    @numba.njit
    def run(scores, numbers, position, first):
        for r in range(3):
            cap, inverse, shift, slope = numbers[r]
            row = changes.RowOptions(position, cap, inverse, shift, slope)
            change_row(address(scores), r, row, first)

    f = np.float32
    scores = np.random.default_rng(0).integers(-(2**15), 2**15, (3, KEY_BLOCK)).astype(np.int32)
    cap, slope = f(30) * fixedpoint.LOG2E_Q8, f(0.3) * fixedpoint.LOG2E_Q8
    numbers = np.array([[cap, 1 / cap, 0.5, slope], [cap, 1 / cap, -1, 0], [0, 0, 0, slope]], f)
    away = np.abs(300 - 256 - np.arange(KEY_BLOCK)).astype(f)
    wanted = []
    for x, (cap, inverse, shift, slope) in zip(scores.astype(f), numbers, strict=True):
        x = fixedpoint.softcap(f(x * inverse) + shift, cap) if cap else x
        wanted.append(np.rint(x - slope * away))
    signature = "void(int32[:, ::1], float32[:, ::1], int64, int64)"
    Emulated(run, signature, cpu)(scores, numbers, 300, 256)
    assert np.array_equal(scores, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "cpu", "dtype", "rotate"),
    of_today(
        [
            (*machine, *kind)
            for machine in MACHINES
            for kind in (("int8", False), ("int8", True), ("int4", False))
        ],
        2,
    ),
)
def test_bits_of_the_integer_model(isa, cpu, dtype, rotate, monkeypatch):
    def run(make, arguments, given):
        function = one_thread(make, *arguments[:-1])
        Emulated(function, tuple(map(numba.typeof, given)), cpu)(*given)

    def emulated(make):
        return lambda *arguments: lambda *given: run(make, arguments, given)

    def decode(plan, query, c, store, out):
        """A plan's call by its arrays: the emulated memory is not at their addresses."""
        rows, results = query.reshape(plan.shape), out.reshape(*plan.shape[:3], -1)
        given = rows, c, store, plan.scratch, tuple(plan.sizes), results, plan.m, plan.l
        run(flash_decode.make_decode, plan.kernel, given)
        plan.again = plan.scratch.counter[1] != 0

    monkeypatch.setattr(decode_layout, "tile", lambda *_: tile(isa, dtype))
    monkeypatch.setattr(launch_decode, "make_call", lambda *_: None)
    monkeypatch.setattr(launch_decode.DecodePlan, "__call__", decode)
    monkeypatch.setattr(launch_decode, "make_append_int8", emulated(append.make_append_int8))
    make_append_int4 = emulated(append_int4.make_append_int4)
    monkeypatch.setattr(launch_decode, "make_append_int4", make_append_int4)
    decode_and_compare(dtype, rotate)


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["a64fx", "neoverse-v1"])
@pytest.mark.parametrize("kernel", ["int8-append", "int8-decode"])
def test_what_is_exported_for_c(kernel, cpu):
    """The function behind plain pointers: the bytes of the cache by NumPy, the bits of the model."""
    entry = export.EXPORTS[kernel]
    isa = export.isa_of(entry, kernel, cpu)
    assert isa == {"a64fx": "sve", "neoverse-v1": "neon_dot"}[cpu]
    function, arguments = entry.factory(isa), entry.example(isa, 4)
    pointers = sum(isinstance(x, np.ndarray) for x in arguments)
    names = [p.name for p in entry.parameters]
    given = ", ".join(f"at({n})" if i < pointers else n for i, n in enumerate(names))
    call = numba.njit(
        eval(f"lambda {', '.join(names)}: f({given})", {"f": function, "at": address})
    )
    results = [
        np.full_like(x, 77)
        if p.result and kernel == "int8-decode"
        else np.zeros_like(x)
        if p.result
        else x
        for p, x in zip(entry.parameters, arguments, strict=True)
    ]
    Emulated(call, tuple(map(numba.typeof, results)), cpu)(*results)
    for p, expected, got in zip(entry.parameters, arguments, results, strict=True):
        if p.result:
            np.testing.assert_array_equal(got, expected, err_msg=p.name)


@functools.cache
def products(isa, keys):
    """One tile of ROWS rows: scores, or values."""
    t = tile(isa)
    nv = t.width(ROWS)
    if keys:
        score = register_tiles.score_tile(t, ROWS)
        return numba.njit(
            lambda q, k, ck, work: score(
                address(q), q.shape[1], address(k), address(ck), 0, address(work)
            )
        ), ("void(int32[:,::1], int8[::1], float32[::1], int32[:,::1])")
    value = register_tiles.value_tile(t, ROWS, nv)
    return numba.njit(
        lambda work, v, o: value(
            address(work), address(v), v.size // 32, KEY_BLOCK // 4, address(o), 0, o.shape[1]
        )
    ), ("void(int32[:,::1], int8[::1], float32[:,::1])")


@pytest.mark.parametrize(
    ("isa", "cpu"),
    [
        ("sve", "a64fx"),
        ("neon_dot", "neoverse-n1"),
        ("neon_dot", "neoverse-v1"),
        ("neon_dot", "neoverse-v2"),
    ],
)
@pytest.mark.parametrize(("keys", "dot"), [(True, "sdot"), (False, "udot")])
def test_hot_loops_are_dot_products(isa, cpu, keys, dot):
    loop = assembly.hot_loop(Emulated(*products(isa, keys), cpu).code.assembly)
    counts = assembly.histogram(loop.instructions)
    dots = sum(n for kind, n in counts.items() if kind.startswith(dot + " "))
    assert dots and dots % (ROWS * tile(isa).width(ROWS)) == 0
    assert not any(
        kind.startswith(("mla", "mul", "smull", "umull", "sshll", "ushll")) for kind in counts
    ), counts
    assert not any(map(assembly.is_stack, loop.instructions)) and not any(
        map(assembly.is_lanes64, loop.instructions)
    )


def test_what_the_target_lacks_is_refused():
    for isa, cpu in (("neon_dot", "a64fx"), ("sve", "neoverse-n1")):
        for keys in (True, False):
            with pytest.raises(UnsupportedError, match=f"{isa}.* needs"):
                Emulated(*products(isa, keys), cpu)
