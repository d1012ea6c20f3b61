"""No stack: the kernels that need the most registers, by default.

Those of `sass_table` with boolean masks among the slow tests.
"""

import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from sass_checks import resources
from sass_table import ALL, MASKED, variants

from numflash.cuda import launch_backward
from numflash.cuda.kernels.backward import flash_backward
from numflash.cuda.kernels.flash_hopper import flash_hopper


def test_all_options_at_once():
    """The widest kernel for Hopper.

    Its descriptors' upper halves, and addresses in a mask, are no registers between tiles.
    """
    found = resources(
        flash_hopper, "sm_90a", d=256, dv=256, block_k=64, packed=4, sinks=True, **ALL
    )
    assert found.count("HGMMA") == 40 and found.count("WARPGROUP.DEPBAR") == 4
    shape = launch_backward.shape_of("kv", 96, 96, "sm_80", True)
    resources(flash_backward, "sm_80", gradients="kv", d=96, dv=96, **shape, **MASKED)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_widest_kernels(arch):
    """float16 with boolean masks at D = 96 and 128, and on Hopper 256."""
    widest = 256 if arch == "sm_90a" else 128
    for factory, constants in variants(arch):
        if 96 <= constants.get("d", 0) <= widest and (
            constants.get("mask"),
            constants.get("dtype"),
        ) == ("bool", "float16"):
            resources(factory, arch, **constants)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "mask"),
    [
        *((arch, "bool") for arch in ("sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "sm_120")),
        ("sm_80", "float"),
        ("sm_90a", "float"),
    ],
)
def test_masked_gradients_of_256_channels(arch, mask):
    """Half of a thread's registers hold sums: where a mask's addresses are first to be spilled."""
    for gradients in launch_backward.passes(256, 256):
        shape = launch_backward.shape_of(gradients, 256, 256, arch, True)
        turing = arch == "sm_75"
        found = resources(
            flash_backward,
            arch,
            gradients=gradients,
            d=256,
            dv=256,
            turing=turing,
            **shape,
            **{**MASKED, "mask": mask},
        )
        assert found.count("HMMA") == (2 if gradients == "v" else 3) * 16 * (
            shape["chunk"] // 8
        ) * (2 if turing else 1)
