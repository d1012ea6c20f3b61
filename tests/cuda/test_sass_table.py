"""No stack: the kernels that need the most registers, by default.

Those of `sass_table` with boolean masks among the slow tests.
"""

import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from daily import of_today
from sass_checks import resources
from sass_table import ALL, MASKED, variants

from numflash.cuda import launch_backward
from numflash.cuda.compile import Source, compile_source
from numflash.cuda.compile.target import cuda, types
from numflash.cuda.instructions import ptx
from numflash.cuda.kernels.backward import flash_backward
from numflash.cuda.kernels.flash_hopper import flash_hopper


def conditional_product(apart: bool) -> Source:
    """A product of wgmma in a branch, which is read before its wait unless `apart`."""
    multiply, pause = ptx.wgmma(64, "float16", False), ptx.wgmma_wait[0]

    def kernel(y, n):
        shared = cuda.shared.array(4096, types.uint32)
        sums = cuda.local.array(32, types.float32)
        base = (ptx.shared_address(shared) + types.uint32(1023)) & types.uint32(0xFFFFFC00)
        a = types.uint64(0x4000004000000000) | types.uint64(base >> types.uint32(4))
        for i in range(n):
            ptx.wgmma_fence()
            multiply(sums, 0, a, a, types.int32(1))
            if not apart and i & 3 == y[0]:
                multiply(sums, 0, a, a, types.int32(1))
            ptx.wgmma_commit()
            if apart:
                pause()
            y[i] = sums[1]
            pause()
        y[cuda.threadIdx.x] = sums[0]

    return Source(kernel, types.void(types.float32[::1], types.int32), 128)


def test_waits_that_ptxas_adds_are_failures():
    """C7517: a wait is injected. C7514: products run one by one."""
    assert compile_source(conditional_product(False), "sm_90a", "cubin").remarks == (
        "C7514", "C7517",
    )  # fmt: skip
    assert compile_source(conditional_product(True), "sm_90a", "cubin").remarks == ()
    with pytest.raises(AssertionError, match="ptxas waits for products"):
        resources(conditional_product, "sm_90a", apart=False)


def options_at_once(d, block_k):
    found = resources(
        flash_hopper, "sm_90a", d=d, dv=d, block_k=block_k, packed=4, sinks=True, **ALL
    )
    # around the main loop, in it, in that of the edges; the next tile of rows' first scores
    products = 3 * (d // 16 + block_k // 16) + d // 16
    assert found.count("HGMMA") == products and found.count("WARPGROUP.DEPBAR") == 8


@pytest.mark.slow
def test_all_options_at_once():
    options_at_once(64, 128)


@pytest.mark.slow
def test_all_options_of_wide_heads_at_once():
    """The widest kernel for Hopper.

    Its descriptors' upper halves, and addresses in a mask, are no registers between tiles.
    """
    options_at_once(256, 64)
    shape = launch_backward.shape_of("kv", 96, 96, "sm_80", True)
    resources(flash_backward, "sm_80", gradients="kv", d=96, dv=96, **shape, **MASKED)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_widest_kernels(arch):
    """float16 with boolean masks at D = 96 and 128, and on Hopper 256; a third by the date."""
    widest = 256 if arch == "sm_90a" else 128
    chosen = [
        (factory, constants)
        for factory, constants in variants(arch)
        if 96 <= constants.get("d", 0) <= widest
        and (constants.get("mask"), constants.get("dtype")) == ("bool", "float16")
    ]
    for factory, constants in of_today(chosen, 3):
        resources(factory, arch, **constants)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "mask"),
    [
        *((arch, "bool") for arch in ("sm_75", "sm_80", "sm_90a", "sm_120")),
        ("sm_80", "float"),
        ("sm_90a", "float"),
    ],
)
def test_masked_gradients_of_256_channels(arch, mask):
    """Half of a thread's registers hold sums: where a mask's addresses are first to be spilled.

    One of the passes by the date.
    """
    for gradients in of_today(launch_backward.passes(256, 256), 3):
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
