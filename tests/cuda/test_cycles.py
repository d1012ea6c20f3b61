"""What the main loops of the shipped kernels allow: read from machine code, and in the docs."""

from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from daily import of_today
from sass_checks import resources

from numflash.cuda import cycles
from numflash.errors import UnsupportedError
from numflash.tiling import KEY_BLOCK, cuda_tiling

PAGE = Path(__file__).parents[2] / "docs" / "cuda.md"


def documented():
    """{(kernel, architecture): issue, MUFU, tensor and TFLOP/s} of the page's table."""
    lines = PAGE.read_text().split(cycles.HEAD)[1].split("\n\n")[0].strip().splitlines()
    cells = [[x.strip() for x in line.strip("| ").split("|")] for line in lines]
    return {(name, arch): numbers for name, arch, *numbers in cells}


def test_the_loop_with_the_densest_products():
    """A label in front of a wait that is placed behind the kernel's end makes a longer loop."""
    product, other = ("HGMMA.64", "x128x16.F32 R24"), ("MUFU.EX2", "R1, R2")
    inner = [("", ".L1"), product, other, ("BRA", ".L1")]
    code = [("", ".L0"), other, *inner, other, ("BRA", ".L0"), other]
    assert cycles.main_loop(code) == inner == cycles.main_loop(code, 16 * 128 * 16)
    assert list(cycles._products([("IMMA.16832.S8.S8", ""), ("HMMA.1688.F32", "")])) == [
        ("IMMA.16832.S8.S8", 16 * 8 * 32), ("HMMA.1688.F32", 16 * 8 * 8),
    ]  # fmt: skip


def test_help_and_a_missing_tool_print_no_table(monkeypatch, capsys):
    def rows(arch):
        raise UnsupportedError("nvdisasm is not installed")
        yield

    monkeypatch.setattr(cycles, "rows", rows)
    assert cycles.main(["--arch", "sm_80"]) == 1
    assert capsys.readouterr() == ("", "nvdisasm is not installed\n")
    with pytest.raises(SystemExit):
        cycles.main(["--help"])
    assert cycles.HEAD not in capsys.readouterr().out


def test_what_a_branch_skips():
    """A block behind a branch; both ways of a choice count."""
    a, b, c = ("FADD", "R1"), ("FMUL", "R2"), ("MUFU.EX2", "R3")
    loop = [("", ".L0"), a, ("BRA", "`(.L1)"), b, b, ("", ".L1"), c, ("BRA", "`(.L0)")]
    assert cycles.common_path(loop) == [a, ("BRA", "`(.L1)"), c, ("BRA", "`(.L0)")]
    ways = [a, ("BRA", "`(.L1)"), b, ("BRA", "`(.L2)"), ("", ".L1"), c, ("", ".L2"), a]
    assert cycles.common_path(ways) == [x for x in ways if x[0]]


def test_what_the_limits_allow():
    """An H100's peak: products alone, at 512 multiplications per cycle and quarter."""
    card = cycles.CARDS["sm_90a"]
    tile = cycles.Cycles(100, 80, 128.0, 2 * 128 * 512)
    assert tile.limit == 128 and tile.teraflops(card) == pytest.approx(989, rel=2e-3)
    assert tile._replace(issue=256).teraflops(card) == pytest.approx(989 / 2, rel=2e-3)


def test_the_page_has_every_kernel():
    found = documented()
    assert set(found) == {
        (name, arch) for arch in cycles.CARDS for name, *_ in cycles.kernels(arch)
    }


def test_int8_issues_for_less_time_than_float16_multiplies():
    """Of the page, which the next test compares with machine code, for 128 keys and 16 rows."""
    found = documented()
    issue = {key: float(x[0]) for key, x in found.items() if key[0].startswith("INT8 forward")}
    assert len(issue) == 12 and max(issue.values()) <= 1400
    for d in (128, 256):
        key_block = cuda_tiling("sm_90a", "float16", d).key_block
        tensor = float(found[f"float16 forward, D={d}", "sm_90a"][2]) * KEY_BLOCK / key_block
        assert issue[f"INT8 forward, D={d}", "sm_90a"] < tensor


@pytest.mark.slow
@pytest.mark.parametrize("arch", cycles.CARDS)
def test_the_page_is_the_machine_code(arch):
    """Within 3 %: another version of the compiler may place a few instructions differently.

    A third of the kernels by the date.
    """
    found = documented()
    for row in of_today(list(cycles.kernels(arch)), 3):
        factory, _, constants = row.kernel
        resources(factory, arch, **dict(constants))
        got = row.cycles()
        numbers = [float(x) for x in found[row.name, arch][:3]]
        assert numbers == pytest.approx([got.issue, got.mufu, got.tensor], rel=0.03, abs=1), row
