import dataclasses

import numpy as np
import pytest

import numflash
from numflash import tiling
from numflash.errors import ArgumentError, UnsupportedError
from numflash.jit import system, target
from numflash.tiling import CACHES, TILINGS, Caches, tuned
from numflash.tiling.plan_cache import _caches, forget_plans


def test_working_sets_of_the_a64fx_notes():
    """46 KB in the A64FX summary leaves S and the state out: its items add up to 58.75 KiB.

    Unfused: 70 KiB with K, not 54.
    """
    fused = TILINGS["a64fx-fused-48x64"].working_set(128)
    assert sum(fused.values()) == 58.75 * 1024
    assert fused == {
        "Q tile": 6144,
        "K chunk": 8192,
        "V chunk": 8192,
        "O tile": 24576,
        "S chunk": 12288,
        "state": 768,
    }
    unfused = TILINGS["a64fx-unfused-48x128"].working_set(128)
    assert sum(unfused.values()) == 70 * 1024
    assert sum(unfused.values()) - unfused["K tile"] == 54 * 1024


@pytest.mark.parametrize("name", TILINGS)
def test_named_tilings_hold_their_own_rules(name):
    t = TILINGS[name]
    assert t.name == name
    assert t.block_q % t.mr == 0 and t.key_block % (t.nv * t.lanes) == 0
    assert t.accumulators == t.mr * t.nv
    if t.device == "cpu" and t.isa.startswith("avx512"):
        assert t.accumulators + t.nv + 1 <= 32, (
            "accumulators, one row of B and one of A fit 32 registers"
        )
    if t.isa in ("avx2", "avx_vnni"):
        assert t.accumulators + t.nv + 1 <= 16


@pytest.mark.parametrize(
    ("cpu", "isa", "lanes", "kib"),
    [
        ("a64fx", "sve", 16, 59.109375),
        ("neoverse-v1", "sve", 8, 58.359375),
        ("neoverse-v2", "sve", 4, 57.984375),
        ("neoverse-n1", "neon_dot", 4, 57.984375),
    ],
)
def test_aarch64_tilings_fit_the_first_cache(cpu, isa, lanes, kib):
    """Every array that the fused kernel touches for one key block at D = 128, added up by hand."""
    t = tiling.tiling(isa, lanes=lanes)
    caches = CACHES[cpu]
    rows = 24
    keys = 128
    d = 128
    by_hand = (
        rows * d
        + 2 * keys * d
        + keys * (4 + 4)
        + rows * keys * (2 + 1)
        + rows * 4 * (lanes + d + 6)
        + rows * 2
    )
    assert sum(t.working_set(d).values()) == by_hand == kib * 1024
    assert by_hand <= caches.l1 == 65536
    assert t.accumulators >= 18, "two pipes with 9 cycles of latency"
    assert t.accumulators + t.nv + 1 <= 32
    if cpu == "a64fx":
        assert t.nv * t.lanes * 4 == caches.line == 256, (
            "one row of a packed panel is one cache line"
        )
        assert (caches.l2, caches.l2_cores) == (8 << 20, 12)
        assert "92 % of L1" in t.explain(
            d, caches=caches
        ) and "8192 KiB, 683 for each of 12 cores" in t.explain(d, caches=caches)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_q", 25), ("key_block", 100), ("mr", 0), ("lanes", -1), ("key_block", 0)],
)
def test_bad_sizes_are_refused(field, value):
    with pytest.raises(ArgumentError, match=field):
        dataclasses.replace(TILINGS["avx512_vnni-int8"], **{field: value})
    with pytest.raises(ArgumentError, match=field):
        tiling.tiling("avx512_vnni", **{field: value})


def test_lookup():
    assert tiling.tiling("avx2") is TILINGS["avx2-int8"]
    assert tiling.tiling("avx2", block_q=48).block_q == 48
    with pytest.raises(ArgumentError, match="avx2-int8"):
        tiling.tiling("mmx")


def test_one_key_block_for_every_integer_kernel():
    """Weights are rounded once per row and key block.

    Equal blocks give equal bits on every device.
    """
    for t in TILINGS.values():
        if t.dtype == "int8" and not t.name.startswith("a64fx"):
            assert t.key_block == tiling.KEY_BLOCK


def test_explain_shows_the_arithmetic():
    text = TILINGS["a64fx-fused-48x64"].explain(128, caches=CACHES["a64fx"])
    for part in (
        "48 x 128 x 1 B = 6.00 KiB",
        "working set 58.75 KiB",
        "92 % of L1 (64 KiB, table",
        "6 x 4 vectors of 16: 24 acc",
    ):
        assert part in text, text


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TILINGS["avx2-int8"].mr = 3


def test_caches_from_the_system(tmp_path):
    levels = (
        ("Data", 1, "32K"),
        ("Instruction", 1, "64K"),
        ("Unified", 2, "1024K"),
        ("Unified", 3, "16M"),
    )
    for i, (kind, level, size) in enumerate(levels):
        index = tmp_path / f"index{i}"
        index.mkdir()
        for name, text in (
            ("type", kind),
            ("level", str(level)),
            ("size", size),
            ("coherency_line_size", "64"),
        ):
            (index / name).write_text(text + "\n")
    (tmp_path / "index9").mkdir()  # unreadable: skipped
    assert system.sysfs_caches(str(tmp_path)) == {0: 64, 1: 32768, 2: 1 << 20, 3: 16 << 20}
    assert system.sysfs_caches(str(tmp_path / "none")) == {}


class MacOS:
    """libc's sysctlbyname with the answers of an Apple M2."""

    known = {  # noqa: RUF012
        b"hw.cachelinesize": 128,
        b"hw.perflevel0.l1dcachesize": 128 << 10,
        b"hw.perflevel0.l2cachesize": 16 << 20,
    }

    def sysctlbyname(self, name, value, size, *_):
        if name not in self.known:
            return -1
        value._obj.value = self.known[name]
        return 0


def test_caches_of_macos():
    """On the stand-in: this has not run on a Mac. The table has the same."""
    assert system.sysctl_caches(MacOS()) == {0: 128, 1: 128 << 10, 2: 16 << 20}
    table = CACHES["apple-m2"]
    assert (table.line, table.l1, table.l2, table.l3) == (128, 128 << 10, 16 << 20, 0)


def test_caches_fall_back_on_the_table(monkeypatch):
    monkeypatch.setattr(tiling.caches, "cache_sizes", lambda: {})
    monkeypatch.setattr("numflash.jit.target.cpu_name", lambda: "a64fx")
    assert Caches.of_this_machine() is CACHES["a64fx"]
    monkeypatch.setattr("numflash.jit.target.cpu_name", lambda: "unheard-of")
    assert Caches.of_this_machine() is CACHES["generic"]


@pytest.mark.parametrize("d", [20, 64, 96, 128, 160])
@pytest.mark.parametrize("arch", tiling.SHARED_MEMORY)
def test_shared_memory_of_the_cuda_kernels(arch, d):
    """The tilings' sums are what the kernels ask for, and fit a block of every architecture."""
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    from numflash.cuda.kernels.backward_hopper import backward_hopper
    from numflash.cuda.kernels.flash_float import flash_float
    from numflash.cuda.kernels.flash_hopper import flash_hopper
    from numflash.cuda.kernels.flash_int8 import flash_int8
    from numflash.cuda.kernels.flash_int8_hopper import flash_int8_hopper
    from numflash.cuda.launch_backward_hopper import shape_of

    turing = arch == "sm_75"
    found = {}
    kinds = [(dtype, plain) for dtype in ("float16", "bfloat16") for plain in (False, True)]
    kinds += [("int8", False), ("int8", True), ("int8-fp32", False)]
    for dtype, plain in kinds:
        if turing and dtype in ("bfloat16", "int8-fp32"):
            continue
        t = tiling.cuda_tiling(arch, dtype, d, plain=plain)
        sizes = t.sizes(d)
        if (arch, dtype) == ("sm_90a", "int8"):
            made = flash_int8_hopper(sizes["d"], sizes["dv"], t.block_q)
        elif dtype.startswith("int8"):
            made = flash_int8(
                sizes["d"],
                sizes["dv"],
                t.block_q,
                pv="fp32" if dtype == "int8-fp32" else "int8",
                turing=turing,
                halves=t.key_block // (t.nv * t.lanes),
            )
        elif arch == "sm_90a":
            made = flash_hopper(
                sizes["d"], sizes["dv"], t.key_block, t.block_q, dtype, queries=t.buffers[0].copies
            )
        else:
            made = flash_float(
                sizes["d"], sizes["dv"], t.block_q, t.key_block, dtype, turing=turing
            )
        found[t.name] = made.shared_bytes, sum(t.working_set(d).values())
        assert made.shared_bytes <= tiling.SHARED_MEMORY[arch]
        assert "of the shared memory of a block" in t.explain(d, caches=t.caches(arch))
    for gradients in ("kv", "q") if arch == "sm_90a" and d <= 128 else ():
        t = tiling.gradient_tiling(gradients, "bfloat16", d)
        made = backward_hopper(gradients, **shape_of(gradients, "bfloat16", d))
        found[t.name] = made.shared_bytes, sum(t.working_set(d).values())
        assert made.shared_bytes <= tiling.SHARED_MEMORY[arch]
    assert all(kernel == table for kernel, table in found.values()), found


def test_the_cuda_tilings_are_looked_up():
    assert tiling.cuda_tiling("sm_89", "bfloat16", 128).name == "sm_80-bfloat16"
    assert tiling.cuda_tiling("sm_90a", "float16", 64, 129).name == "sm_90a-float16-wide"
    hopper = {
        (d, plain, band): tiling.cuda_tiling("sm_90a", "bfloat16", d, None, plain, band)
        for d in (64, 65, 128, 129)
        for plain in (False, True)
        for band in (False, True)
    }
    sizes = {key: (t.block_q, t.key_block) for key, t in hopper.items()}
    assert sizes.pop((64, True, False)) == sizes.pop((64, True, True)) == (192, 128)
    assert sizes.pop((65, True, False)) == sizes.pop((128, True, False)) == (128, 176)
    assert {d: n for (d, *_), n in sizes.items()} == dict.fromkeys((64, 65, 128), (128, 128)) | {
        129: (128, 64)
    }
    assert tiling.cuda_tiling("sm_80", "float16", 64, plain=True).name == "sm_80-float16"
    assert tiling.cuda_tiling("sm_90a", "int8", 256, plain=True).name == "sm_90a-int8-wide"
    assert [tiling.cuda_tiling("sm_90a", "int8", 64, plain=x).block_q for x in (False, True)] == [
        128,
        192,
    ]
    assert tiling.cuda_tiling("sm_75", "float32", 64).name == "sm_80-float32"
    assert tiling.TILINGS["sm_90a-float16"].explain(128).splitlines()[1:3] == [
        "  register tile 64 x 128 scores per warpgroup: 64 of each thread",
        "  blocks: 128 query rows x 128 keys",
    ]


@pytest.mark.slow  # a kernel each
@pytest.mark.parametrize("pv", ["int8", "int16", "fp32"])
@pytest.mark.parametrize(
    "sizes", [{"mr": 4, "nv": 2, "block_q": 12}, {"block_q": 36}, {"mr": 2, "nv": 2, "block_q": 2}]
)
def test_using_changes_the_kernel_and_no_bit(sizes, pv):
    """Another register tile, and another block_q alone: the bits of the integer model, whatever
    changes the scores, over three blocks of keys; also where the rows are no whole eights, which the
    softmax takes at a time.
    """
    from oracles import qkv

    from numflash import reference, validation
    from numflash.cpu import launch
    from numflash.jit import target
    from numflash.numerics.quantization import quantize_problem
    from numflash.validation.options import Options

    isa = next(x for x in target.available() if x not in ("amx_int8", "portable"))
    named = tiling.tiling(isa).accumulators
    with tiling.using(isa, **sizes) as t:
        assert tiling.in_use(isa) is t
        assert t.accumulators == (t.mr * t.nv if "mr" in sizes else named)
        for changes in (
            {"is_causal": True},
            {"softcap": 3.0},
            {"alibi_slopes": np.array([0.5, 0.01])},
        ):
            options = Options(precision="int8", pv=pv, return_lse=True, **changes)
            found = validation.problem(*qkv(l=70, s=340, d=40), options)
            problem = quantize_problem(found)
            expected = reference.integer_model(problem)
            for got, exact in zip(launch.run(problem, isa), expected, strict=True):
                if pv == "fp32":
                    np.testing.assert_allclose(got, exact, atol=1e-5)
                else:
                    np.testing.assert_array_equal(got, exact)


@pytest.mark.slow  # four kernels
@pytest.mark.parametrize("sizes", [{"mr": 4, "nv": 3}, {"mr": 5, "nv": 1, "key_block": 64}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float_kernels_of_other_tiles(dtype, sizes):
    """Another register tile and key block, a masked end and rows that do not fill a tile."""
    from oracles import qkv

    from numflash import reference, validation
    from numflash.cpu import launch
    from numflash.jit import target
    from numflash.validation.options import Options

    needs = target.FLOAT_ISAS if dtype == "float32" else {"avx512_bf16": target._BF16}
    isa = next((x for x in target.available(needs) if x != "portable"), None)
    if isa is None:
        pytest.skip(f"no {dtype} tiles of vectors here")
    rng = np.random.default_rng(0)
    mask = rng.random((75, 333)) < 0.6
    q, k, v = qkv(l=75, s=333, d=40)
    problem = validation.problem(q, k, v, Options(precision=dtype, attn_mask=mask))
    with tiling.using(isa, dtype, **sizes) as t:
        assert t.key_block % (t.nv * t.lanes) == 0
        out = launch.run(problem, isa)[0]
    exact = reference.oracle(problem)[0]
    error = np.abs(out - exact).sum() / np.abs(exact).sum()
    assert error < {"float32": 2e-6, "bfloat16": 1.2e-2}[dtype]


def test_a_saved_tiling_is_that_of_the_next_equal_call(tmp_path, monkeypatch):
    isa = target.available(target.ISAS)[0]
    if isa in ("portable", "amx_int8"):
        pytest.skip("one tiling only")
    monkeypatch.setenv("NUMFLASH_TILINGS", str(tmp_path / "tilings.json"))
    x = np.random.default_rng(3).standard_normal((1, 1, 40, 48)).astype(np.float32)
    try:
        numflash.attention(x, x, x, precision="int8")
        assert any(cache.plans for cache in _caches)
        tuned.save(dataclasses.replace(TILINGS[f"{isa}-int8"], block_q=96))
        assert not any(cache.plans for cache in _caches) and tiling.in_use(isa).block_q == 96
    finally:
        monkeypatch.delenv("NUMFLASH_TILINGS")
        tuned.saved.cache_clear()
        forget_plans()


def test_using_ends_with_its_block():
    isa = "avx512_vnni"
    with tiling.using(isa, block_q=96) as t:
        assert tiling.in_use(isa) is t and tiling.chosen(isa) == (isa, (96,))
        assert tiling.tiling(isa) is TILINGS[f"{isa}-int8"], "what cached factories read"
        with tiling.using(isa, mr=np.int64(8), nv=2) as inner:
            assert (
                inner.block_q == 48
                and type(inner.mr) is int
                and tiling.chosen(isa) == (f"{isa}:8x2", (48,))
            )
        assert tiling.in_use(isa) is t
    assert tiling.in_use(isa) is TILINGS[f"{isa}-int8"] and tiling.chosen(isa) == (isa, ())


@pytest.mark.parametrize(
    ("isa", "changes", "rule"),
    [
        ("amx_int8", {"key_block": 64}, "key_block = 64 breaks a rule.*rounded once per row.*128"),
        ("amx_int8", {"mr": 12}, "mr = 12 breaks a rule.*AMX.*allowed: 32"),
        ("amx_int8", {"block_q": 48}, "block_q = 48 .*multiple of mr = 32"),
        ("avx512_vnni", {"mr": 7}, "mr = 7 breaks a rule.*by twos"),
        ("avx512_vnni", {"nv": 3, "key_block": 192}, "key_block"),
        ("avx512_vnni", {"nv": 8}, "nv = 8 breaks a rule.*allowed: 2, 4"),
        ("sve", {"mr": 12, "nv": 4}, "mr x nv = 12 x 4.*53 registers of 32"),
        ("avx2", {"mr": 8}, "8 x 2 .*19 registers of 16"),
        ("avx512_vnni", {"block_q": 2**20 * 6}, "block_q .* up to 1024"),
        ("avx512_vnni", {"block_q": 48.0}, "block_q: got 48.0; allowed: an integer"),
        ("avx512_vnni", {"lanes": 8}, "lanes: not a size"),
        ("portable", {"block_q": 64}, "sizes are fixed"),
        ("sm_80", {"dtype": "float16", "block_q": 64}, "sizes are fixed"),
        ("avx512", {"dtype": "float32", "mr": 7}, "7 x 4 .*33 registers of 32"),
        ("avx512", {"dtype": "float32", "mr": 2, "nv": 8}, "nv = 8 breaks a rule.*1 to 4"),
        ("avx512", {"dtype": "float32", "nv": 3, "key_block": 128}, "key_block = 128.*nv . lanes"),
        ("avx512", {"dtype": "float32", "key_block": 2048}, "key_block = 2048 .*up to 1024"),
        ("sve512", {"dtype": "float32", "mr": 12, "nv": 3}, "40 registers of 32"),
        ("amx_bf16", {"dtype": "bfloat16", "nv": 2}, "nv = 2 breaks a rule.*AMX.*allowed: 4"),
        ("mmx", {}, "'mmx-int8'; allowed: "),
        ([1], {}, "tiling: got '.1.-int8'; allowed: "),
        (None, {"dtype": "float32"}, "isa: needed"),
    ],
)
def test_an_illegal_tiling_is_refused_with_its_rule(isa, changes, rule):
    with (
        pytest.raises((ArgumentError, UnsupportedError), match=rule),
        tiling.using(isa, **changes),
    ):
        pass
    assert not tiling.CHOSEN.get()


def test_few_rows_of_queries_read_keys_in_place():
    """From so many keys on, in parts that do not depend on the threads."""
    assert [tiling.few_parts(1, 8, keys) for keys in (1, 31, 32, 2048)] == [0, 0, 1, 1]
    assert [tiling.few_parts(2, 8, keys) for keys in (255, 256)] == [0, 1]
    assert [tiling.few_parts(1, heads, 4096) for heads in (1, 2, 3, 100)] == [8, 4, 3, 1]
    assert [tiling.few_parts(rows, 8, 4096) for rows in (0, 3)] == [0, 0]
    large = [(3, 1), (4, 4), (4, 5), (5, 1)]  # rows, query heads of a KV head
    assert [tiling.few_parts(rows, 8, 4096, group, 10 << 20) for rows, group in large] == [
        1,
        1,
        0,
        0,
    ]
    assert tiling.few_parts(4, 8, 4096, 1, (10 << 20) - 1) == 0
    assert [tiling.few_gradient_parts(12, 8, keys) for keys in (31, 32)] == [0, 1]
    assert [tiling.few_gradient_parts(rows, 2, 4096) for rows in (1, 12, 13)] == [4, 4, 0]
