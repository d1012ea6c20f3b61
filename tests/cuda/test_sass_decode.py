"""Machine code of the decode kernels.

Exact counts of tensor-core operations, nothing spilled, wide accesses to the cache.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from daily import of_today
from sass_checks import resources
from sass_table import variants

from numflash.cuda.compile import compiled, sass
from numflash.cuda.decode_layout import Layout
from numflash.cuda.kernels.decode_append import decode_append
from numflash.cuda.kernels.decode_combine import decode_combine
from numflash.cuda.kernels.decode_float import decode_float
from numflash.cuda.kernels.decode_int8 import decode_int8
from numflash.cuda.kernels.decode_rotate import decode_rotate

pytestmark = pytest.mark.slow


def loads(found, arch):
    """Copies of 16 bytes to shared memory; no narrower ones."""
    if arch == "sm_75":
        return found.count("LDG.E.128")
    assert found.count("LDGSTS") == found.count("LDGSTS.E.BYPASS.128")
    return found.count("LDGSTS")


@pytest.mark.parametrize(
    ("arch", "d", "rows", "options", "registers"),
    [
        ("sm_75", 64, 1, {}, 168),
        ("sm_75", 128, 1, {"direct": False}, 224),
        ("sm_80", 64, 1, {"paged": True}, 168),
        ("sm_80", 128, 1, {"direct": False}, 224),
        ("sm_80", 128, 2, {"ring": True}, 255),
        ("sm_80", 64, 1, {"unified": True}, 200),
        ("sm_90a", 128, 1, {"direct": False, "dtype": "bfloat16"}, 240),
        ("sm_90a", 128, 1, {"paged": True, "direct": False}, 240),
        ("sm_90a", 256, 1, {}, 255),
    ],
)
def test_floats(arch, d, rows, options, registers):
    turing = arch == "sm_75"
    found = resources(decode_float, arch, d=d, dv=d, row_tiles=rows, turing=turing, **options)
    assert found.count("HMMA") == rows * (d // 16 * 2 + d // 32 * 4) * (2 if turing else 1)
    assert found.count("LDSM") == d // 16 * (1 + rows) + 4 * rows + d // 32 * 2
    assert found.registers <= registers
    if d <= 128:  # K at the start and ahead, V; K again after the overflow test
        assert loads(found, arch) == (4 if "unified" in options else 3) * 64 * d * 2 // 16 // 128


@pytest.mark.parametrize(
    ("arch", "d", "rows", "options"),
    [
        ("sm_80", 64, 16, {}),
        ("sm_80", 128, 4, {"direct": False}),
        ("sm_80", 128, 32, {"ring": True}),
        ("sm_80", 128, 8, {"direct": False, "paged": True}),
        ("sm_90a", 128, 4, {"direct": False}),
        ("sm_90a", 128, 32, {"paged": True, "direct": False}),
        ("sm_90a", 256, 8, {}),
    ],
)
def test_int8(arch, d, rows, options):
    found = resources(decode_int8, arch, d=d, dv=d, tile_rows=rows, **options)
    assert found.count("IMMA") == rows // 4 * d // 32 * 4  # Q.K^T and P.V, both planes at once
    assert loads(found, arch) == 3 * 128 * d // 16 // 128 + 2  # and scales, with the keys


@pytest.mark.parametrize(
    ("arch", "d", "rows", "options"),
    [
        ("sm_75", 64, 4, {"turing": True}),
        ("sm_75", 128, 32, {"turing": True, "direct": False}),
        ("sm_80", 64, 8, {"paged": True}),
        ("sm_80", 128, 4, {"direct": False}),
        ("sm_80", 128, 8, {"changed": True, "ring": True}),
        ("sm_80", 128, 32, {"ring": True}),
        ("sm_89", 128, 16, {"paged": True, "direct": False}),
        ("sm_90a", 128, 4, {"paged": True, "direct": False}),
        ("sm_90a", 256, 16, {"ring": True, "changed": True}),
    ],
)
def test_int4(arch, d, rows, options):
    """Half the copies, and three instructions to unpack the 8 codes of a word: a shift, and for each
    half of its bytes the mask and the sign in one. A query of one plane takes half the columns from
    eight rows on.
    """
    constants = {"d": d, "dv": d, "tile_rows": rows, "packed": True, **options}
    found = resources(decode_int8, arch, **constants)
    products = (-(-rows // 8) + rows // 4) * d // 32 * 2
    assert found.count("IMMA") == products * (4 if arch == "sm_75" else 1)
    assert loads(found, arch) == 3 * 64 * d // 16 // 128 + 2
    code = compiled(decode_int8, arch, "cubin", **constants).code
    signs = [opcode for opcode, operands in sass.instructions(code) if "0x88888888" in operands]
    assert set(signs) == {"LOP3.LUT"}
    assert len(signs) == 2 * (d // 8) * 2  # words of K, and of V


@pytest.mark.parametrize(
    ("arch", "dtype", "d", "rows", "blocks"),
    [
        ("sm_75", "float16", 128, 1, 1),
        ("sm_80", "float16", 128, 1, 3),
        ("sm_80", "int8", 128, 1, 4),
        ("sm_80", "int4", 64, 8, 4),
        ("sm_80", "float16", 128, 17, 2),
        ("sm_89", "int8", 128, 1, 2),
        ("sm_90a", "float16", 128, 1, 3),
        ("sm_90a", "int8", 128, 1, 5),
        ("sm_90a", "int4", 128, 9, 3),
        ("sm_90a", "int8", 256, 1, 3),
    ],
)
def test_as_many_blocks_as_are_reckoned_fit(arch, dtype, d, rows, blocks):
    """By registers, which are given out eight a thread, and shared memory; splits fill so many."""
    card = SimpleNamespace(arch=arch, multiprocessors=10)
    layout = Layout(card, dtype, 1, d, d, 128, True)
    assert layout.residents(rows) == blocks
    workers, found = layout.call(1 << 20, 1)
    assert workers == 10 and 8.5 * blocks <= layout.splits(1, rows, workers, found) <= 10 * blocks
    factory = decode_float if dtype == "float16" else decode_int8
    tile, turing = layout.tile_rows(rows), arch == "sm_75"
    kind = {"tile_rows": tile, "packed": dtype == "int4"}
    if dtype == "float16":
        kind = {"row_tiles": tile // 16, "dtype": dtype}
    constants = {"d": d, "dv": d, "turing": turing, **kind}
    registers = resources(factory, arch, direct=False, paged=True, **constants).registers
    item = compiled(factory, arch, "cubin", direct=False, paged=True, **constants)
    assert blocks * item.threads * (-(-registers // 8) * 8) <= 65536
    there = {"sm_75": 64, "sm_80": 164, "sm_89": 100, "sm_90a": 228}[arch] * 1024
    assert blocks * (item.shared_bytes + (0 if turing else 1024)) <= there


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
def test_every_variant_of_int4(arch):
    """At D = 128; a third of them by the date."""
    chosen = [
        constants
        for factory, constants in variants(arch)
        if factory is decode_int8 and constants["packed"] and constants["d"] == 128
    ]
    for constants in of_today(chosen, 3):
        resources(decode_int8, arch, **constants)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_append_and_combine(arch):
    found = resources(
        decode_append, arch, d=256, dv=256, source="float32", dtype="int4", turing=arch == "sm_75"
    )
    assert found.count("SHFL") >= 2 * 8 and found.registers <= 80  # pairs of 8 turns
    found = resources(
        decode_append,
        arch,
        d=128,
        dv=128,
        source="float32",
        dtype="float16",
        turing=arch == "sm_75",
    )
    assert found.count("ATOMG") >= 1 and found.registers <= 64
    found = resources(decode_rotate, arch, d=256, smooth=True)
    assert found.count("SHFL") == 5 * 8 + 5  # turns across lanes, the largest of the row
    found = resources(decode_combine, arch, dv=128, tile_rows=16, exact=arch != "sm_75")
    assert found.count("LDG") >= 16 and found.registers <= 96  # partial outputs on their way
