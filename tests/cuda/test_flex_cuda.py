"""Score and mask functions in the CUDA kernels, run by the emulator, and in ptxas's machine code."""

import gc
from weakref import WeakKeyDictionary

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from flex import gallery as g
from flex import test_random_functions as r
from hypothesis import given, settings
from sass_checks import resources

import numflash
from numflash.cuda import launch_float
from numflash.cuda.compile import Source, compile_source
from numflash.cuda.compile.target import cuda, types
from numflash.cuda.device.operands import emulated
from numflash.cuda.device.tile_list import tile_list
from numflash.cuda.emulator import emulate
from numflash.cuda.kernels import score_functions
from numflash.cuda.kernels.flash_float import flash_float
from numflash.cuda.kernels.flash_hopper import flash_hopper
from numflash.cuda.launch import plan
from numflash.errors import UnsupportedError
from numflash.flex.attention import with_functions
from numflash.flex.fused import Fused
from numflash.flex.prepared import prepare
from numflash.tiling import cuda_tiling
from numflash.validation import problem
from numflash.validation.options import Options

CLOSE = {"float32": 4e-6, "bfloat16": 3e-2, "float16": 4e-3}


def check(score_mod, mask_mod, arch, precision, length=40, s=70, block=16, **options):
    q, k, v = g.operands(3, length=length, s=s)
    mask = None
    if mask_mod is not None:
        mask = numflash.create_block_mask(mask_mod, g.B, g.H, length, s, BLOCK_SIZE=block)
    out, lse = numflash.flex_attention(
        q, k, v, score_mod, mask, return_lse=True,
        impl=f"cuda-emulator:{arch}", precision=precision, **options,
    )  # fmt: skip
    wanted, wanted_lse = g.oracle(q, k, v, score_mod, mask_mod)
    assert np.abs(out.astype(float) - wanted).max() < CLOSE[precision]
    seen = np.isfinite(wanted_lse)
    assert np.array_equal(seen, np.isfinite(lse)) and (lse[~seen] == -np.inf).all()
    assert np.abs(lse[seen] - wanted_lse[seen]).max() < CLOSE[precision]


def test_functions_in_the_float32_kernel():
    check(g.t5_bias, g.nothing_for_some, "sm_80", "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "precision"), [("sm_80", "float32"), ("sm_80", "float16"), ("sm_90a", "float16")]
)
def test_a_softcap_leaves_hidden_what_a_function_hides(arch, precision):
    q, k, v = g.operands(6, length=20, s=40)
    found = numflash.flex_attention(
        q, k, v, g.causal_in_score, softcap=1.0, precision=precision, impl=f"cuda-emulator:{arch}"
    )
    wanted, _ = g.oracle(q, k, v, lambda s, *at: np.where(at[2] >= at[3], np.tanh(s), -np.inf))
    assert np.abs(found - wanted).max() < CLOSE[precision]


def test_functions_and_blocks_in_the_tensor_core_kernel():
    check(g.relative_bias, g.sliding_window, "sm_80", "float16", length=70, s=150)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a"])  # by hand: sm_75, sm_80
def test_heads_that_share_keys_sequences_and_other_options(arch):
    q, k, v = g.operands(4, hkv=2, length=70, s=70)
    mask = numflash.create_block_mask(g.strided_heads, g.B, g.H, 70, 70, BLOCK_SIZE=(8, 24))

    def capped(score, *at):
        return 4.0 * np.tanh(g.alibi(score, *at) / 4.0)

    _, _, i, j = g.indices(70, 70)
    found = numflash.flex_attention(
        q, k, v, g.alibi, mask, enable_gqa=True, is_causal=True, softcap=4.0, precision="bfloat16",
        impl=f"cuda-emulator:{arch}",
    )  # fmt: skip
    wanted = g.oracle(q, k, v, capped, g.strided_heads, hidden=j > i)[0]
    assert np.abs(found - wanted).max() < CLOSE["bfloat16"]
    options = {"score_mod": g.rotary_latent, "mask_mod": g.padded, "enable_gqa": True}
    ends = [0, 70, 120]
    packed = [np.concatenate([x[0], x[1][:, :50]], 1).swapaxes(0, 1) for x in (q, k, v)]
    on_gpu, wanted = (
        numflash.attention_varlen(*packed, ends, ends, impl=impl, **options)
        for impl in (f"cuda-emulator:{arch}", "reference")
    )
    assert np.abs(on_gpu - wanted).max() < 1e-5


def test_what_cuda_does_not_take():
    q, k, v = g.operands(5, length=8, s=8)
    with pytest.raises(UnsupportedError, match="precision 'int8' and functions; allowed: 'auto'"):
        numflash.flex_attention(q, k, v, g.alibi, precision="int8", impl="cuda-emulator")
    out, lse = np.zeros_like(q), np.zeros(q.shape[:3], np.float32)
    with pytest.raises(UnsupportedError, match="of which CUDA has no gradients"):
        numflash.attention_backward(out, q, k, v, out, lse, score_mod=g.alibi, impl="cuda-emulator")


@pytest.mark.parametrize(
    ("lengths", "packed", "tile", "block"),
    [
        ((70, 150), 1, (64, 64), (32, 32)),
        ((70, 150), 4, (64, 16), (7, 20)),
        ((9, 40), 2, (128, 64), (1, 1)),
    ],
)
def test_listed_tiles_hold_every_pair_that_is_seen(lengths, packed, tile, block):
    """Against each tile's own rows and heads; every block is empty, full or in part at random."""
    rng = np.random.default_rng(0)
    nb, nh = 2, 4
    counts = [-(-n // b) for n, b in zip(lengths, block, strict=True)]
    states = rng.choice([0, 1, 2], (nb, nh, *counts), p=[0.6, 0.1, 0.3]).astype(np.uint8)
    states[1] = 0
    states[1, :, : counts[0] // 2] = 2
    table = tile_list(states, block, lengths, packed, tile)
    every = np.repeat(np.repeat(states, block[0], 2), block[1], 3)[:, :, : lengths[0], : lengths[1]]
    rows = every.reshape(nb, nh // packed, packed, *lengths).swapaxes(2, 3)
    rows = rows.reshape(nb, nh // packed, lengths[0] * packed, lengths[1])
    for b, h in np.ndindex(nb, nh // packed):
        for n in range(-(-rows.shape[2] // tile[0])):
            at = 3 + b * table[0] + h * table[1] + n * table[2]
            found = table[at + 1 : at + 1 + table[at]]
            wanted = []
            for t in range(-(-lengths[1] // tile[1])):
                part = rows[b, h, n * tile[0] : (n + 1) * tile[0], t * tile[1] : (t + 1) * tile[1]]
                wanted += [2 * t + int((part == 2).all())] if part.any() else []
            assert found.tolist() == wanted


def test_a_block_mask_is_listed_once(monkeypatch):
    """For each problem of it, as long as there is the mask; a bounded number of lists."""
    made = []
    monkeypatch.setattr(launch_float, "tile_list", lambda *a: made.append(a) or tile_list(*a))
    monkeypatch.setattr(launch_float, "LISTS_KEPT", 2)
    monkeypatch.setattr(launch_float, "_lists", WeakKeyDictionary())
    mask = numflash.create_block_mask(g.sliding_window, g.B, g.H, 70, 150, BLOCK_SIZE=16)
    q, k, v = (x.astype(np.float16) for x in g.operands(3, length=70, s=150))

    def tiles(packed=1, mask=mask):
        whole = with_functions(problem(q, k, v, Options()), None, mask, "cuda-emulator")
        _, given = launch_float._functions(whole, packed, (64, 64))
        return given[2]

    assert tiles() is tiles() and len(made) == 1
    assert tiles(2) is not tiles() and len(made) == 2
    tiles(4), tiles(2)
    assert len(made) == 4 and len(launch_float._lists) == 1
    del mask, tiles
    gc.collect()
    assert not launch_float._lists


def test_empty_tiles_are_skipped():
    """Products of 3 tiles of keys (64 each) instead of 6: a row's window is 25 keys."""
    q, k, v = (x.astype(np.float16) for x in g.operands(3, length=70, s=150))
    mask = numflash.create_block_mask(g.sliding_window, g.B, g.H, 70, 150, BLOCK_SIZE=16)
    whole = with_functions(problem(q, k, v, Options()), g.relative_bias, mask, "cuda-emulator")
    launch = plan(whole, "sm_80")
    tiles = launch.args[0][12]
    assert tiles[3 :: tiles[2]].tolist() == [1, 2]
    report = emulated(launch)[2]
    products = sum(n for name, n in report.opcodes.items() if name.startswith("mma"))
    a_tile = (64 // 8) * (g.D // 16) + (64 // 16) * (g.D // 8)
    warps = 4  # of each of the two tiles of rows; the second has 6 rows
    assert products == g.B * g.H * 3 * a_tile * warps


def point(name, own=1):
    """A kernel that changes scores x (rows, keys) of entry 1 and head 2, from query 3 on."""
    value = score_functions.make_root(own, name, "score")

    def change(pointers, rows, keys):
        n = cuda.blockIdx.x * 32 + cuda.threadIdx.x
        if n < rows * keys:
            from_ = pointers[0] + types.uint64(4 * n)
            x = score_functions.ptx.load_global_f32(from_)
            q, k = types.int32(n // keys + 3), types.int32(n % keys)
            x = value(x, types.int32(1), types.int32(2), q, k, pointers)
            score_functions.ptx.store_global_f32(from_, x)

    kind = types.void(score_functions.pointers_of(own, name), types.int32, types.int32)
    return Source(change, kind, 32)


@pytest.mark.slow
@settings(r.EXAMPLES, max_examples=8)
@given(r.real)
def test_random_functions_give_what_numpy_gives(tree):
    functions = Fused(prepare(r.traced(tree), None)).on_device(r.SHAPE)
    x = r.SCORES.astype(np.float32)
    kernel = compile_source(point(functions.name), "sm_80", "ptx")
    own = (x, functions.frame, functions.batches, np.zeros(3, np.int32), *functions.arrays)
    rows, keys = x.shape
    emulate(kernel, -(-x.size // 32), None, [own, np.int32(rows), np.int32(keys)])
    assert r.share_close(x, r.value_of(tree), 1e-3) > 0.85


@pytest.mark.slow
def test_machine_code_has_no_stack():
    """Functions keep the kernels' registers: fragments stay where they are."""
    code = Fused(prepare(g.t5_bias, g.documents)).on_device((g.B, g.H, g.L, g.S))
    sizes = {"d": 128, "dv": 128, "functions": code.name, "listed": True}
    block_k = cuda_tiling("sm_80", "float16", 128).key_block
    assert resources(flash_float, "sm_80", block_q=64, block_k=block_k, **sizes).registers <= 192
    block_k = cuda_tiling("sm_90a", "float16", 128).key_block
    found = resources(flash_hopper, "sm_90a", block_k=block_k, ping_pong=True, **sizes)
    assert found.registers <= 168
