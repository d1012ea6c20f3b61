"""What the main loops of the shipped kernels allow, read from machine code."""

import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from numflash.cuda import cycles


def test_the_loop_with_the_densest_products():
    """A label in front of a wait that is placed behind the kernel's end makes a longer loop."""
    product, other = ("HGMMA.64", "x128x16.F32 R24"), ("MUFU.EX2", "R1, R2")
    inner = [("", ".L1"), product, other, ("BRA", ".L1")]
    code = [("", ".L0"), other, *inner, other, ("BRA", ".L0"), other]
    assert cycles.main_loop(code) == inner
    assert list(cycles._products([("IMMA.16832.S8.S8", ""), ("HMMA.1688.F32", "")])) == [
        ("IMMA.16832.S8.S8", 16 * 8 * 32), ("HMMA.1688.F32", 16 * 8 * 8),
    ]  # fmt: skip


def test_what_the_limits_allow():
    """An H100's peak: products alone, at 512 multiplications per cycle and quarter."""
    card = cycles.CARDS["sm_90a"]
    tile = cycles.Cycles(100, 80, 128.0, 2 * 128 * 512)
    assert tile.limit == 128 and tile.teraflops(card) == pytest.approx(989, rel=2e-3)
    assert tile._replace(issue=256).teraflops(card) == pytest.approx(989 / 2, rel=2e-3)
