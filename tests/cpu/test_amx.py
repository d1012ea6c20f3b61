"""AMX: code of nothing but the tile's work, for a target that has it.

Refusal where the target or the system lacks it.
"""

import numpy as np
import pytest

from numflash.cpu.int8 import amx
from numflash.cpu.isa.amx_tiles import configure, release
from numflash.cpu.isa.operands import Packed, Rows
from numflash.errors import UnsupportedError
from numflash.jit import target
from numflash.machinecode import assembly, codegen

CPU = "sapphirerapids"


@pytest.fixture(scope="module")
def code():
    if CPU not in codegen.TRIPLES or target.EMULATES_AMX:
        pytest.skip(f"this LLVM does not know {CPU}, or its tiles are emulated")
    multiply = amx.multiply("tdpbssd")
    both = amx.multiply_beside("tdpbssd", amx.score_rows())
    save = amx.save
    scratch = amx.scratch_blocks

    from numba import njit

    @njit
    def blocks(n, steps, q, k, ck, cq, x):
        configure()
        room = scratch()
        rows, keys = Rows(q, 0, 128), Packed(k, 0)
        multiply(rows, keys, steps)
        save(room, 0)
        for i in range(1, n):
            both(rows, keys, steps, room, i - 1, Packed(ck, 0), Packed(cq, 0), Rows(x, 0, 128), ())
            save(room, i)
        release()

    types = "void(int64, int64, uint8[::1], int8[::1], float32[::1], float32[::1], int16[::1])"
    return codegen.compile_for(blocks, types, codegen.Target.named(CPU)).assembly


def test_every_turn_is_four_products_and_eight_rows(code):
    loops = [
        loop
        for loop in assembly.loops(code)
        if any("tdpbssd" in i for i in loop.instructions)
        and any("vpackssdw" in i for i in loop.instructions)
    ]
    best = min(loops, key=lambda loop: len(loop.instructions)).instructions
    assert sum("tdpbssd" in i for i in best) == 4 and sum("tileloadd" in i for i in best) == 4
    assert sum("vpackssdw" in i for i in best) == 8 and sum("vcvtdq2ps" in i for i in best) == 16
    assert not any(
        assembly.is_stack(i) or assembly.is_call(i) or assembly.is_float64(i) for i in best
    )


def test_scratch_is_not_cleared(code):
    assert not any("memset" in i for body in assembly.functions(code).values() for i in body)


def test_a_target_without_tiles_refuses():
    if "znver4" not in codegen.TRIPLES:
        pytest.skip("this LLVM does not know znver4")
    from numba import njit

    with pytest.raises(UnsupportedError, match=r"amx_int8.*amx-tile"):
        codegen.compile_for(njit(lambda: configure()), "void()", codegen.Target.named("znver4"))


def test_a_system_that_refuses_is_not_asked_twice(monkeypatch):
    """A kernel may be new enough for the instructions and still deny their state.

    Then it is as if they were not there.
    """
    if target.missing("amx_int8") or target.EMULATES_AMX:
        pytest.skip("the target has no AMX")
    monkeypatch.setattr(target, "tiles_permitted", lambda: False)
    assert "amx_int8" not in target.available()
    with pytest.raises(
        UnsupportedError, match="refused by the operating system; allowed here: 'avx512_vnni'"
    ):
        target.require("amx_int8")


@pytest.mark.skipif("amx_int8" not in target.available(), reason="the machine has no AMX")
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize(("instruction", "dtype"), [("tdpbssd", np.int8), ("tdpbusd", np.uint8)])
def test_products_are_the_integer_products(steps, instruction, dtype):
    from numba import njit

    from numflash.jit.memory import empty

    rng = np.random.default_rng(steps)
    limits = np.iinfo(dtype)
    a = rng.integers(limits.min, limits.max + 1, (32, 64 * steps)).astype(dtype)
    b = rng.integers(-128, 128, (64 * steps, 32)).astype(np.int8)
    tiles = b.reshape(steps, 16, 4, 2, 16).transpose(0, 3, 1, 4, 2)  # step, tile, group, column
    packed = np.ascontiguousarray(tiles).reshape(-1)
    ones = np.ones(32, np.float32)
    out = empty((32, 32), np.float32)
    multiply = amx.multiply(instruction)
    save = amx.save
    finish = amx.finish(amx.value_rows)
    scratch = amx.scratch_blocks

    @njit
    def run(a, b, s, t, o):
        configure()
        room = scratch()
        multiply(Rows(a, 0, 64 * steps), Packed(b, 0), steps)
        save(room, 0)
        finish(room, 0, Packed(s, 0), Packed(t, 0), Rows(o, 0, 32), ())
        release()

    out[:] = 0
    run(a.reshape(-1), packed, ones, ones, out.reshape(-1))
    np.testing.assert_array_equal(out, (a.astype(np.int64) @ b.astype(np.int64)).astype(np.float32))
