"""Machine code of the INT8 forward kernels.

Exact counts of tensor-core operations, no stack, nothing spilled, for every option. Half of each
table by the date: a kernel takes the compiler some three seconds.
"""

import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from daily import WHOLE, of_today
from sass_checks import resources

from numflash.cuda.kernels.flash_int8 import flash_int8
from numflash.cuda.kernels.flash_int8_hopper import flash_int8_hopper
from numflash.cuda.kernels.int8_quantize import int8_quantize
from numflash.cuda.kernels.int8_results import int8_results
from numflash.cuda.kernels.int8_statistics import int8_statistics
from numflash.cuda.launch_int8 import hopper_tiling
from numflash.tiling import CUDA_HEAD_DIMS, cuda_tiling

OPTIONS = {
    "none": {},
    "band": {"band": True},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "all": {"band": True, "mask": True, "bias": True, "softcap": True, "alibi": True, "group": 4},
}
SINGLE = list(OPTIONS) if WHOLE else ["none", "band", "all"]  # where registers are shortest
# none and all of the options elsewhere on the same machine, all of them on others: a kernel takes
# ptxas some ten seconds
TABLE = [
    (arch, d, name)
    for arch in ("sm_75", "sm_80", "sm_120")
    for d in CUDA_HEAD_DIMS
    for name in SINGLE
    if (arch == "sm_80" and (name in ("none", "all") or d == 128)) or (name == "all" and d >= 128)
]
OTHERS = [
    ("sm_86", 128, "all"),
    ("sm_89", 256, "all"),
    ("sm_90a", 128, "none"),
    ("sm_100", 256, "all"),
]


def check(arch, d, name, dv=None, pv="int8"):
    """Resources of the kernel with the constants that `launch_int8.int8_forward` takes, for a block of
    64 rows and 128 keys.
    """
    wide, turing = pv == "fp32", arch == "sm_75"
    tiling = cuda_tiling("sm_75" if turing else "sm_80", "int8-fp32" if wide else "int8", d, dv)
    halves = tiling.key_block // (tiling.nv * tiling.lanes)
    sizes = tiling.sizes(d, dv)
    found = resources(
        flash_int8,
        arch,
        d=sizes["d"],
        dv=sizes["dv"],
        block_q=64,
        pv=pv,
        turing=turing,
        halves=halves,
        **OPTIONS[name],
    )
    scores = sizes["d"] // 32 * (16 // halves + (not wide))  # and one of the first keys
    values = sizes["dv"] // 8 * 4 // halves * (2 if pv == "int16" else 1)
    if wide:  # three products of TF32 per 8 keys and channels; a part of 32 keys is one round
        assert (
            found.count("IMMA") == scores
            and found.count("HMMA.1688.F32.TF32") == found.count("HMMA") == 3 * values
        )
    elif turing:  # m8n8k16: a quarter of the product that later cards have
        assert found.count("IMMA.8816") == found.count("IMMA") == 4 * (scores + values)
        assert found.count("LDG.E.128") > 0 and found.count("LDGSTS") == 0
    else:
        assert found.count("IMMA") == scores + values
    if not turing:
        assert found.count("LDGSTS.E.BYPASS.128") == found.count("LDGSTS") > 0
    # 16 bytes at a time, but for m and l; Blackwell has the shuffles before twice, for warps
    # together and apart, and some with them
    channels = sizes["dv"] // halves // 8
    blackwell = found.count("STG.E.128") - channels if arch in ("sm_100", "sm_120") else 0
    assert (
        found.count("STG.E.128") == channels + blackwell
        and found.count("STG") == channels + blackwell + 4
        and blackwell >= 0
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "d", "name"),
    of_today(TABLE + OTHERS, 2),
)
def test_every_option(arch, d, name):
    """With a stack of 0 bytes (`resources`).

    A pair of warps that shares 256 channels leaves room.
    """
    found = check(arch, d, name)
    assert found.registers <= (
        {32: 232, 64: 232, 128: 255, 256: 240}.get(d, 255) if arch == "sm_80" else 255
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "d", "dv"),
    of_today(
        [
            (arch, d, dv)
            for d, dv in ((64, 256), (256, 32), (96, 40))
            for arch in ("sm_75", "sm_80")
        ],
        2,
    ),
)
def test_head_sizes_that_differ(arch, d, dv):
    check(arch, d, "band", dv)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "d", "name"),
    of_today(
        [
            ("sm_80", 64, "all"),
            *(("sm_80", 128, n) for n in SINGLE),
            ("sm_80", 256, "none"),
            ("sm_80", 256, "all"),
            ("sm_120", 128, "none"),
            ("sm_120", 256, "all"),
        ],
        2,
    ),
)
def test_float_values(arch, d, name):
    check(arch, d, name, pv="fp32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "d", "name"),
    of_today(
        [
            *(("sm_80", d, "all") for d in (64, 128, 256)),
            *((arch, 128, "all") for arch in ("sm_75", "sm_89", "sm_120")),
            ("sm_90a", 128, "none"),
            ("sm_75", 256, "band"),
        ],
        2,
    ),
)
def test_two_planes_of_weights(arch, d, name):
    """Twice the products of weights and values, in branches that keep operands few."""
    found = check(arch, d, name, pv="int16")
    assert found.registers <= (255 if d == 128 else 224)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "name"),
    [(d, n) for d in (64, 128, 256) for n in SINGLE if d == 128 or n in ("none", "all")],
)
def test_hopper(d, name):
    """Where scores of the next block overlap they are multiplied in two places (the first block's, the
    next one's), weights and values too (a block's in the loop, the last one's); elsewhere in one.

    As many fences and as many waits as groups of products (scores, parts of the values): ptxas has
    added none of its own.
    """
    options = OPTIONS[name]
    block_q = hopper_tiling(d, d, options).block_q
    found = resources(
        flash_int8_hopper,
        "sm_90a",
        d=d,
        dv=d,
        block_q=block_q,
        **options,
        **({"packed": 4} if name == "all" else {}),
    )
    assert block_q == (
        192 if d == 64 or (d == 128 and name in ("none", "band", "softcap")) else 128
    )
    columns, places = 64 if d <= 128 else 32, 2 if d <= (64 if block_q == 192 else 128) else 1
    groups = 1 + d // columns
    assert found.count("IGMMA") == places * (d // 32 + 4 * d // columns)
    assert found.count("WARPGROUP.ARRIVE") == found.count("WARPGROUP.DEPBAR") == places * groups
    assert found.count("R2UR") <= 16, "the role of a warp is one number for it"
    assert (
        found.count("USETMAXREG") == 2
        and found.count("UTMALDG.5D") > 0
        and found.count("UTMALDG.4D") > 0
    )
    assert found.count("STG.E.128") == d // 8 and found.count("STG") == d // 8 + 4
    # 65536 / 384 or / 512, shared out by setmaxnreg
    assert found.registers == (128 if block_q == 192 else 168)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "dtype"), of_today([(64, "float16"), (256, "float32")], 2))
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
def test_operands_of_floats_on_the_card(arch, d, dtype):
    """No float64 but the additions of the chunks' sums, loaded eight at a time; four channels of a row
    are one load, four keys of a channel one store.

    No product of two operations is contracted to one, or the bits would be others.
    """
    found = resources(int8_statistics, arch, d=d, dv=d, source=dtype)
    sizes = {"d": d, "dv": d, "smooth": True}
    assert found.count("FFMA") == 0 and found.count("FADD") > 0
    found = resources(int8_quantize, arch, doubles=8, **sizes, width=d, source=dtype)
    turns, load = max(1, d // 128), "LDG.E.128" if dtype == "float32" else "LDG.E.64"
    assert found.count("DADD") > 0 and found.count("STS.U8") == 0
    assert found.count(load + ".CONSTANT") == 3 * 4 * turns
    assert found.registers <= (128 if turns == 1 else 255)
    found = resources(int8_results, arch, **sizes, dtype=dtype, sinks=True)
    assert found.registers <= (80 if turns == 1 else 112)
