"""Machine code of the 16-bit kernels.

Exact counts of tensor-core operations, no stack, a register ceiling, wide accesses. Of the longer
tables half by the date: a kernel takes the compiler some three seconds.
"""

import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from daily import WHOLE, of_today
from sass_checks import resources
from sass_table import ALL, MASKED, hopper_tile

from numflash.cuda import cycles, launch_backward, launch_backward_hopper
from numflash.cuda.compile import compiled, sass
from numflash.cuda.kernels.backward import flash_backward
from numflash.cuda.kernels.backward_hopper import backward_hopper
from numflash.cuda.kernels.backward_rows import backward_rows
from numflash.cuda.kernels.flash_float import flash_float
from numflash.cuda.kernels.flash_hopper import flash_hopper
from numflash.tiling import cuda_tiling

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", [{"band": True, "group": 4}, MASKED, {**ALL, "sinks": True}])
def test_options_of_wide_heads_on_turing(options):
    """Blocks of 16 keys.

    Those of 32 leave up to 40 bytes of stack with any option but a boolean mask alone.
    """
    block_k = cuda_tiling("sm_75", "float16", 256).key_block
    resources(
        flash_float,
        "sm_75",
        d=256,
        dv=256,
        block_q=64,
        block_k=block_k,
        dtype="float16",
        turing=True,
        **options,
    )


@pytest.mark.parametrize(
    ("arch", "mask"), [("sm_80", "bool"), ("sm_90a", "bool"), ("sm_90a", "float")]
)
def test_every_option_of_wide_heads(arch, mask):
    """With sinks 8 bytes of stack, unless the slopes are read again for every tile."""
    block_k = cuda_tiling("sm_80", "float16", 256).key_block
    resources(
        flash_float,
        arch,
        d=256,
        dv=256,
        block_q=64,
        block_k=block_k,
        **{**ALL, "mask": mask, "sinks": True},
    )


@pytest.mark.parametrize(
    ("arch", "d", "block_k", "registers"),
    [
        ("sm_75", 64, 64, 200),
        ("sm_80", 32, 64, 168),
        ("sm_80", 64, 64, 192),
        ("sm_86", 96, 64, 224),
        ("sm_80", 128, 64, 224),
        ("sm_89", 128, 64, 224),
        ("sm_80", 256, 32, 255),
    ],
)
def test_float(arch, d, block_k, registers):
    turing = arch == "sm_75"
    found = resources(flash_float, arch, d=d, dv=d, block_q=64, block_k=block_k, turing=turing)
    products = (d // 16) * (block_k // 8) + (block_k // 16) * (d // 8)
    assert found.count("HMMA") == products * (2 if turing else 1)
    assert found.count("LDSM") == products // 2 + d // 16
    assert found.registers <= registers
    assert (
        found.count("LDG.E.128") if turing else found.count("LDGSTS.E.BYPASS.128")
    ) > 0 and found.count("STG.E.128") > 0
    assert found.count("STG") == found.count("STG.E.128") + 2  # the other two are the LSE


@pytest.mark.parametrize(
    ("arch", "gradients", "d", "registers"),
    of_today(
        [
            ("sm_75", "kv", 64, 232),
            ("sm_75", "q", 128, 255),
            ("sm_75", "kv", 128, 255),
            ("sm_80", "kv", 32, 200),
            ("sm_80", "kv", 64, 232),
            ("sm_80", "q", 64, 208),
            ("sm_86", "kv", 96, 255),
            ("sm_80", "kv", 128, 255),
            ("sm_80", "q", 128, 248),
            ("sm_89", "v", 256, 255),
            ("sm_80", "k", 256, 255),
            ("sm_80", "q", 256, 255),
            ("sm_90a", "kv", 64, 240),
            ("sm_90a", "kv", 128, 255),
            ("sm_100", "kv", 64, 216),
            ("sm_100", "q", 128, 224),
            ("sm_120", "q", 64, 176),
            ("sm_120", "kv", 128, 255),
            ("sm_120", "k", 256, 255),
            ("sm_100", "v", 256, 255),
        ],
        2,
    ),
)
def test_backward(arch, gradients, d, registers):
    turing = arch == "sm_75"
    shape = launch_backward.shape_of(gradients, d, d, arch)
    found = resources(flash_backward, arch, gradients=gradients, d=d, dv=d, turing=turing, **shape)
    scores = 1 if gradients == "v" else 2  # S, and dP unless only dV is wanted
    each = (d // 16) * (shape["chunk"] // 8)  # products of 16 x 8 x 16 of one matrix product
    assert found.count("HMMA") == (scores + len(gradients)) * each * (2 if turing else 1)
    # a transposed or plain operand per two products; the own rows' once per step, either before the
    # loop or in it
    assert found.count("LDSM") == (scores + len(gradients)) * each // 2 + scores * d // 16
    assert found.registers <= registers
    assert (found.count("LDG.E.128") if turing else found.count("LDGSTS.E.BYPASS.128")) > 0
    assert found.count("STG") == found.count("STG.E.128") > 0
    assert found.count("ATOM") == found.count("ATOMG") == found.count("RED") == 0


@pytest.mark.parametrize(("factory", "arch"), [(flash_float, "sm_80"), (flash_hopper, "sm_90a")])
def test_a_softcap_calls_nothing(factory, arch):
    """Division and reciprocal that are rounded correctly have a slow path of their own.

    The sums of the two rows of a thread are inverted so, once; a score is not.
    """
    options = {"softcap": True}
    sizes, calls = {"d": 64, "dv": 64, "block_q": 64, "block_k": 64}, 3
    if factory is flash_hopper:  # which writes its output in two places
        sizes, calls = hopper_tile(64, options), 4
    found = resources(factory, arch, **sizes, **options)
    assert found.count("FCHK") == 0 and found.count("CALL") <= calls


def test_a_softcap_calls_nothing_in_gradients():
    shape = launch_backward.shape_of("kv", 64, 64, "sm_80")
    found = resources(flash_backward, "sm_80", gradients="kv", d=64, dv=64, softcap=True, **shape)
    assert found.count("FCHK") == 0 and found.count("CALL") <= 3


EVERY = {"mask": "float", "softcap": True, "alibi": True, "band": True, "group": 4}


@pytest.mark.parametrize("gradients", ["kv", "q"])
@pytest.mark.parametrize(
    ("d", "options"),
    of_today(
        [
            *((d, EVERY) for d in (64, 96, 128)),
            (96, {"band": True, "mask": "bool"}),
            (128, {"band": True}),
        ],
        2,
    ),
)
def test_backward_with_options(d, gradients, options):
    """Masks cost registers for their addresses.

    The chunk is smaller with them, and what they need is computed tile by tile.
    """
    shape = launch_backward.shape_of(gradients, d, d, "sm_80", "mask" in options)
    resources(flash_backward, "sm_80", gradients=gradients, d=d, dv=d, **shape, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_backward_rows(dtype):
    found = resources(backward_rows, "sm_80", dv=128, dtype=dtype)
    assert found.count("LDG.E.128") == 4 and found.count("STG.E.64") == found.count("STG") == 1
    assert found.registers <= 64


@pytest.mark.parametrize(("arch", "d"), [("sm_100", 128), ("sm_120", 64)])
def test_blackwell(arch, d):
    """Assembled from sm_80's PTX, with all its products."""
    found = resources(flash_float, arch, d=d, dv=d, block_q=64, block_k=64)
    assert (
        found.count("HMMA") == (d // 16) * 8 + 4 * (d // 8)
        and found.count("LDGSTS.E.BYPASS.128") > 0
    )


CHANNELS = (64, 128, 256)


@pytest.mark.parametrize(("overlap", "ping_pong"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("d", CHANNELS)
def test_hopper(d, overlap, ping_pong):
    sizes = hopper_tile(d, {})
    block_k = sizes["block_k"]
    found = resources(flash_hopper, "sm_90a", overlap=overlap, ping_pong=ping_pong, **sizes)
    # the first scores of a tile of rows, the main loop, the last P . V; with `overlap` the first
    # scores again, of a block's later tiles of rows
    assert found.count("HGMMA") == (d // 16 + block_k // 16) * 2 + overlap * d // 16
    assert found.count("WARPGROUP.ARRIVE") == 4 + overlap, "a wait after each product"
    assert found.count("WARPGROUP.DEPBAR") == 4 + 2 * overlap
    assert found.count("USETMAXREG") == 2 and found.count("UTMALDG") > 0
    # 65536 / 384 or 512, shared out by setmaxnreg
    assert found.registers == (128 if sizes["block_q"] == 192 else 168)
    assert found.count("R2UR") <= (32 if d == 256 else 16), (
        "the role of a warp is one number for it"
    )


OVERLAPPED = {
    "plain": {},
    "causal": {"band": True, "dtype": "bfloat16"},
    "float mask": {"mask": "float", "softcap": True, "alibi": True, "sinks": True},
    "packed heads": {"mask": "bool", "band": True, "group": 4, "packed": 4},
}


def in_other_tests(options, ping_pong):
    """Whether the kernel is compiled for its registers, too."""
    return options == "plain" or (options != "causal" and not ping_pong)


@pytest.mark.parametrize(
    ("d", "options", "ping_pong"),
    of_today(
        [
            (d, options, ping_pong)
            for n, d in enumerate(CHANNELS)
            for options in OVERLAPPED
            for ping_pong in (False, True)
            if WHOLE
            or in_other_tests(options, ping_pong)
            or (options == "causal" and n % 2 == ping_pong)
        ],
        2,
    ),
)
def test_hopper_softmax_runs_beside_the_products(d, options, ping_pong):
    """Every exponential of the main loop is issued before the wait for P . V.

    By position in the machine code, and after the wait for the scores.
    """
    constants = {**hopper_tile(d, OVERLAPPED[options]), "ping_pong": ping_pong}
    item = compiled(flash_hopper, "sm_90a", "cubin", **constants, **OVERLAPPED[options])
    softmax_beside_products(item.code, d, constants["block_k"], "band" in OVERLAPPED[options])


def test_hopper_clusters():
    """As a block of its own, but that copies go to two blocks and one lane of a warp arrives at
    each of them: no more instructions in the main loop, and nothing that waits for memory.
    """
    d, constants = 256, {**hopper_tile(256, {}), "cluster": 2}
    block_k = constants["block_k"]
    found = resources(flash_hopper, "sm_90a", **constants)
    item = compiled(flash_hopper, "sm_90a", "cubin", **constants)
    assert item.cluster == 2 and found.registers == 168
    assert found.count("HGMMA") == (d // 16 + block_k // 16) * 2
    assert found.count("UTMALDG.4D.MULTICAST") == found.count("UTMALDG.4D") > 0
    assert found.count("UCGABAR_ARV") == found.count("UCGABAR_WAIT") == 2
    softmax_beside_products(item.code, d, block_k, False)
    (main,) = tile_loops(item.code, d, block_k, False)
    names = [name for name, _ in main]
    assert sum(name.startswith("SYNCS.ARRIVE.TRANS64.RED") for name in names) == 2
    assert not any(name.startswith(("MEMBAR", "ERRBAR", "CCTL")) for name in names)
    assert sum(name.startswith("BRA") for name in names) == 3


@pytest.mark.parametrize("d", CHANNELS)
@pytest.mark.parametrize("band", [False, True])
def test_output_is_written_beside_the_next_scores(d, band):
    """Between the wait for a tile of rows' last P . V and that for the next one's first scores."""
    constants = {**hopper_tile(d, {"band": band}), "band": band, "ping_pong": d <= 128}
    code = sass.instructions(compiled(flash_hopper, "sm_90a", "cubin", **constants).code)
    names = [name for name, _ in code]
    waits = [n for n, name in enumerate(names) if name.startswith("WARPGROUP.DEPBAR")]
    ones = [k for k, n in enumerate(waits) if code[n][1].endswith("0x1")]
    assert len(ones) == 2 + band, "of the loops over tiles, and of the last P . V"
    start, stop = max(
        ((waits[k], waits[k + 1]) for k in ones),
        key=lambda x: names[slice(*x)].count("STG.E.128"),
    )
    between = names[start:stop]
    assert between.count("STG.E") == 2 and between.count("STG.E.128") >= d // 32
    shuffles = sum(name.startswith("SHFL") for name in between)
    assert shuffles >= d // 4, "the words of the output are exchanged before the wait"
    assert not any(name.startswith("HGMMA") for name in between)


def softmax_beside_products(code, d, block_k, band):
    """The loops over tiles hold every exponential between the two waits, behind all products."""
    exponentials = block_k // 2 + 2  # of the scores, and of the change of two maxima
    for loop in tile_loops(code, d, block_k, band):
        places = {
            kind: [n for n, (name, _) in enumerate(loop) if name.startswith(kind)]
            for kind in ("MUFU.EX2", "HGMMA", "WARPGROUP.DEPBAR")
        }
        scores, values = places["WARPGROUP.DEPBAR"]
        assert loop[scores][1].endswith("0x1") and loop[values][1].endswith("0x0")
        assert max(places["HGMMA"]) < scores
        assert len(places["MUFU.EX2"]) >= exponentials
        assert scores < min(places["MUFU.EX2"]) and max(places["MUFU.EX2"]) < values


def tile_loops(code, d, block_k, band):
    """The loops over tiles of keys, the main one first; with a band the one of its edges.

    The longer ones hold both, or the waits for barriers, which lie behind the kernel.
    """
    products = d // 16 + block_k // 16
    found = [
        loop
        for loop in sass.loops(sass.instructions(code))
        if sum(name.startswith("HGMMA") for name, _ in loop) == products
        and sum(name.startswith("WARPGROUP.DEPBAR") for name, _ in loop) == 2
    ]
    return sorted(found, key=len)[: 2 if band else 1]


@pytest.mark.parametrize("d", CHANNELS)
@pytest.mark.parametrize("band", [False, True])
def test_keys_are_hidden_at_edges_only(d, band):
    """The main loop compares no keys, selects no scores, and branches for barriers alone."""
    constants = {**hopper_tile(d, {"band": band}), "band": band}
    block_k = constants["block_k"]
    if band:
        constants["dtype"] = "bfloat16"
    constants["ping_pong"] = CHANNELS.index(d) % 2 == band  # compiled for its positions
    item = compiled(flash_hopper, "sm_90a", "cubin", **constants)
    main, *edges = tile_loops(item.code, d, block_k, band)

    def count(loop, *kinds):
        return sum(name.startswith(kinds) for name, _ in loop)

    assert count(main, "FSEL") <= 2 and count(main, "ISETP") <= 3, "the two rows' maxima, the end"
    assert count(main, "BRA") == 3  # two barriers of the ring that are not ready, the loop
    assert len(edges) == band
    for edge in edges:
        assert count(edge, "FSEL") >= block_k // 2 and len(edge) > len(main) + block_k


@pytest.mark.parametrize("d", CHANNELS)
@pytest.mark.parametrize("options", ["packed heads", "float mask"])
def test_hopper_with_options(d, options):
    sizes = hopper_tile(d, OVERLAPPED[options])
    block_k = sizes["block_k"]
    found = resources(flash_hopper, "sm_90a", **sizes, **OVERLAPPED[options])
    bodies = 3 if "band" in OVERLAPPED[options] else 2  # around the main loop and in it, at edges
    products = (d // 16 + block_k // 16) * bodies + d // 16
    assert found.count("HGMMA") == products and found.registers == 168
    assert found.count("WARPGROUP.ARRIVE") == 2 * bodies + 1
    assert found.count("WARPGROUP.DEPBAR") == 2 * bodies + 2


BANDED = {"band": True, "group": 4, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("gradients", "d", "options"),
    of_today([(g, d, x) for d in (64, 128) for x in ({}, BANDED) for g in ("kv", "q")], 2),
)
def test_hopper_gradients(gradients, d, options):
    """Four or three products of a tile in the main loop, and one wait for each of S, dP and the last
    sum; the exponentials stand behind the wait for S, before that for dP and the sum of P.e.
    """
    constants = launch_backward_hopper.shape_of(gradients, "float16", d) | options
    found = resources(backward_hopper, "sm_90a", gradients=gradients, **constants)
    scores, sums = d // 16, constants["columns"] // 16
    # only a pass of keys without a band hides nothing: other loops over tiles hide columns at edges
    bodies = 1 if gradients == "kv" and not options else 2
    assert found.count("HGMMA") == bodies * (2 * scores + len(gradients) * sums)
    assert found.count("WARPGROUP.DEPBAR") <= 3 * bodies + 1
    assert found.registers == 168 and found.count("USETMAXREG") == 2
    assert found.count("STG") == found.count("STG.E.128") > 0
    assert found.count("ATOM") == found.count("ATOMG") == found.count("RED") == 0
    item = compiled(backward_hopper, "sm_90a", "cubin", gradients=gradients, **constants)
    products = (2 + len(gradients)) * cycles.WARP_ROWS * d * constants["columns"]
    main = cycles.main_loop(sass.instructions(item.code), products)
    places = {
        kind: [n for n, (name, _) in enumerate(main) if name.startswith(kind)]
        for kind in ("MUFU.EX2", "HGMMA", "WARPGROUP.DEPBAR", "FSEL", "BRA")
    }
    _, before, after = places["WARPGROUP.DEPBAR"]
    assert len(places["MUFU.EX2"]) == constants["columns"] // 2 and not places["FSEL"]
    assert before < min(places["MUFU.EX2"]) and max(places["MUFU.EX2"]) < after
    beside = [n for n in places["HGMMA"] if before < n < after]
    assert len(beside) == (len(gradients) - 1) * sums and max(places["MUFU.EX2"]) < min(
        [*beside, after]
    )
    assert len(places["BRA"]) <= 3, (
        "a barrier of the ring that is not ready, the first tile, the loop"
    )
