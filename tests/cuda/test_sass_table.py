"""No stack: the kernels that need the most registers, by default; those of `sass_table` with boolean masks among the slow tests."""
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from sass_checks import resources
from sass_table import ALL, MASKED, variants

from numflash.cuda import backward
from numflash.cuda.kernels.backward import flash_backward
from numflash.cuda.kernels.flash_hopper import flash_hopper

# (kernel, architecture, D, which gradients): bytes of stack that are known to be left, with additive masks too
LEFT = {("flash_backward", "sm_90a", d, gradients): nbytes
        for d, gradients, nbytes in ((128, "q", 8), (256, "k", 8), (256, "q", 16))}


def stack_of(factory, arch, constants):
    return LEFT.get((factory.__name__, arch, constants.get("d"), constants.get("gradients")), 0)


def test_all_options_at_once():
    """The widest kernel for Hopper: its descriptors' upper halves, and addresses in a mask, are no registers between tiles."""
    found = resources(flash_hopper, "sm_90a", d=256, dv=256, block_k=64, packed=4, sinks=True, **ALL)
    assert found.count("HGMMA") == 40 and found.count("WARPGROUP.DEPBAR") == 4
    shape = backward.shape_of("kv", 96, 96, "sm_80", True)
    resources(flash_backward, "sm_80", gradients="kv", d=96, dv=96, **shape, **MASKED)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_widest_kernels(arch):
    """float16 with boolean masks at D = 96 and 128, and on Hopper 256."""
    widest = 256 if arch == "sm_90a" else 128
    for factory, constants in variants(arch):
        if 96 <= constants.get("d", 0) <= widest and (constants.get("mask"), constants.get("dtype")) == ("bool", "float16"):
            resources(factory, arch, stack_of(factory, arch, constants), **constants)
