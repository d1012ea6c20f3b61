# %% [markdown]
# # 18. INT8 on tensor cores, and equal bits
#
# After this chapter you can
#
# * multiply bytes on a tensor core, exactly, and say why the order of its additions does not matter,
# * say which operations between two exact products may round, and how a compiler can change a bit there,
# * use one product's result as the next one's operand although their layouts differ, by reordering keys,
# * check that a GPU kernel and a CPU kernel give the same bits, and count what INT8 saves.

# %% [markdown] tags=["map"]
# > **The idea:** Integer sums have one result in any order, so CPU and GPU give the same bits.
# >
# > **Where you are:** optional: on neither path (CPU path: [00](00_memory.ipynb) ...; GPU path: [13](13_threads_warps_memory.ipynb) ...)
# >
# > **Time:** 20 minutes to read, 15 for the exercises. **Before it:** [03](03_int8.ipynb), [16](16_flash_attention_2.ipynb).
# >
# > **Terms:** [equal bits](../docs/glossary.md#equal-bits), [tensor core](../docs/glossary.md#tensor-core), [accumulator](../docs/glossary.md#accumulator), [quantisation](../docs/glossary.md#quantisation).
# >
# > **Papers:** [SageAttention](https://arxiv.org/abs/2410.02367).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import numpy as np
from numba import cuda

import numflash
from numflash.course import answer_of, bars, card, check, figure, table
from numflash.cuda import emulate, launch
from numflash.cuda.device import median_seconds
from numflash.cuda.device.operands import emulated
from numflash.cuda.emulator import tensor
from numflash.cuda.instructions import ptx
from numflash.cuda.validate.cases import problem_of
from numflash.tiling import KEY_BLOCK

rng = np.random.default_rng(0)
u32, i32, f32 = np.uint32, np.int32, np.float32
device = card()

# %% [markdown]
# ## Bytes
#
# `mma.m16n8k32` takes signed bytes, 32 channels at a time, and adds in 32-bit integers: twice the operations of the float16
# instruction, from the same number of registers, since a byte is half of a float16. And it is exact.

# %%
mma = ptx.mma_s8


def scores(q, k, s):
    """One warp: s (16, 8) int32 = q (16, 32) . k (8, 32)^T of signed bytes, four to a word."""
    lane = i32(cuda.threadIdx.x)
    group, t = lane >> 2, lane & 3
    a, b, c = cuda.local.array(4, u32), cuda.local.array(2, u32), cuda.local.array(4, i32)
    for r in range(4):
        a[r] = q[group + 8 * (r & 1), t + 4 * (r >> 1)]
        c[r] = i32(0)
    for r in range(2):
        b[r] = k[group, t + 4 * r]
    mma(c, 0, a, 0, b, 0)
    for r in range(4):
        s[group + 8 * (r >> 1), 2 * t + (r & 1)] = c[r]


q, k, s = rng.integers(-127, 128, (16, 32), np.int8), rng.integers(-127, 128, (8, 32), np.int8), np.zeros((16, 8), np.int32)
report = emulate(scores, 1, 32, (q.view(u32), k.view(u32), s))
assert np.array_equal(s, q.astype(np.int64) @ k.T.astype(np.int64)) and report.tensor_flops == 8192
print(f"{report.tensor_operations} instruction, {report.tensor_flops} operations, every sum exact")

# %% [markdown]
# ## Order
#
# No manual states the order in which a tensor core adds, and it differs from chip to chip. With floats that shows: each order rounds
# differently. Add the same 1000 numbers in 200 orders:

# %%
x = rng.standard_normal(1000, np.float32)
whole = rng.integers(-127, 128, 1000).astype(np.int32)


def sums(values):
    return len({np.cumsum(values[rng.permutation(values.size)], dtype=values.dtype)[-1].tobytes() for _ in range(200)})


different = {"float32": sums(x), "int32": sums(whole)}
print("different results of 200 orders:", different)

# %% [markdown]
# So a float kernel on a GPU can agree with one on a CPU to rounding only, and a test must allow for it. Integers need no tolerance.
# The integer pipeline (chapters 03 and 04) has two exact products; between them a few float operations, each done once per element
# in a stated order. IEEE arithmetic rounds those alike on every machine, unless the compiler is allowed to change them.
#
# ## One rounding or two
#
# A compiler likes to turn `x * y + z` into one fused multiply-add, which rounds once instead of twice. Written with operators, and
# with the operations whose rounding is named (`.rn`):

# %%
def operators(x, y, z, out):
    i = cuda.grid(1)
    out[i] = x[i] * y[i] + z[i]


def named(x, y, z, out):
    i = cuda.grid(1)
    out[i] = ptx.add(ptx.mul(x[i], y[i]), z[i])


x, y, z = (rng.standard_normal(4096, np.float32) for _ in range(3))
twice, once = x * y + z, (x.astype(np.float64) * y + z).astype(np.float32)
equal = {}
for kernel in (operators, named):
    out = np.zeros(4096, np.float32)
    report = emulate(kernel, 32, 128, (x, y, z, out))
    fused = sum(n for name, n in report.opcodes.items() if name.startswith("fma"))
    equal[kernel.__name__] = np.array_equal(out, twice)
    print(f"{kernel.__name__:>9}: {fused} fused instructions; {np.mean(out != twice):.1%} of the results differ from NumPy's")
assert equal["named"]

# %% [markdown]
# Neither is wrong; the fused one is a little closer. But a weight that rounds the other way is another byte, and then all else
# differs. So the INT8 kernel names every rounding, and fuses where the product is exact: there once and twice are the same.
#
# ## The result as operand
#
# In chapter 14 two accumulator tiles (tiles of C) were, register by register, the next operand. With bytes they are not. The accumulator
# gives a lane *two* neighbouring keys of each tile of 8; the operand wants *four* neighbouring keys in a register:

# %%
registers, place_a = tensor.operand_layout("a", 32, 4)
lane_a = place_a[0] // (4 * registers)                     # owner of keys 0 to 31 in row 0, as operand
lane_c = np.tile(tensor.accumulator_layout()[0] // 4, 4)   # the same, as four accumulator tiles
print("operand:    ", "".join(map(str, lane_a)), "\naccumulator:", "".join(map(str, lane_c)))
assert not np.array_equal(lane_a, lane_c)

# %% [markdown]
# Moving bytes between lanes would cost shuffles. But place 2 of the operand need not hold key 2: an exact sum over keys is the same in any
# order. So each lane fills its own places with its own keys, and the rows of V are put in the same order.
# Lane t has keys 2 t and 2 t + 1 of each of the four tiles, and places 4 t to 4 t + 3 of each half.
#
# **Exercise 1.** Which key (0 to 31) is at place p (0 to 31), if a lane fills its places in rising order with its keys in
# rising order?

# %% tags=["exercise"]
def key_at(p):
    return ...


check("18.1", key_at)

# %%
order = [answer_of("18.1")(place) for place in range(32)]
p, v = rng.integers(0, 256, (16, 32)), rng.integers(-127, 128, (32, 8))
assert np.array_equal(p[:, order] @ v[order], p @ v) and sorted(order) == list(range(32))
pf, vf = p / 255, v / 127.0
floats = [np.cumsum(pf[:, rows, None] * vf[rows], 1)[:, -1] for rows in (order, np.arange(32))]
print("bits after reordering 32 keys: integers equal", np.array_equal(p[:, order] @ v[order], p @ v),
      "  floats equal", np.array_equal(*floats))

# %% [markdown]
# ## How long may an exact sum be?
#
# Weights are unsigned bytes to 255, values signed to 127. Their integer sum is turned into a float32 once per key block.
# float32 holds every integer up to 2^24 exactly.
#
# **Exercise 2.** The longest key block, a power of two, whose sums are surely exact as float32; and as int32.

# %% tags=["exercise"]
answer = ...                                               # (in float32, in int32)
check("18.2", answer)

# %%
print(f"key block of the package, on every device: {KEY_BLOCK}")
assert answer_of("18.2")[0] >= KEY_BLOCK

# %% [markdown]
# ## Equal bits
#
# Now the whole kernel: quantised once, computed by the CPU's kernel (whatever instructions this machine has), by the integer
# model in NumPy, which is the definition, and by the CUDA kernel's PTX in the emulator. Outputs and log-sum-exp, compared as
# bits.

# %%
def bits(x):
    return np.ascontiguousarray(x, np.float32).view(np.int32)


cases = {"tails": ((1, 1, 1, 100, 150, 64), {}), "causal": ((1, 1, 1, 70, 70, 64), {"is_causal": True}),
         "grouped heads": ((1, 4, 2, 20, 130, 64), {"enable_gqa": True})}
kinds, rows = ["cpu", "reference", "cuda-emulator"] + ["cuda"] * (device is not None), []
for name, ((b, h, hkv, length, keys, d), options) in cases.items():
    q, k, v = (rng.standard_normal(n, np.float32) for n in ((b, h, length, d), (b, hkv, keys, d), (b, hkv, keys, d)))
    quantised = numflash.quantize_qkv(q, k, v)
    got = {impl: numflash.attention_int8(*quantised, impl=impl, return_lse=True, **options) for impl in kinds}
    same = {impl: all(np.array_equal(bits(a), bits(b)) for a, b in zip(got[impl], got["cpu"], strict=True)) for impl in kinds[1:]}
    exact = numflash.attention(q, k, v, impl="reference", **options)
    error = np.abs(got["cpu"][0] - exact).sum() / np.abs(exact).sum()
    rows.append([name, *same.values(), f"{error:.4f}"])
    assert all(same.values()) and error < 0.03
table(["case", *(f"bits of {impl}" for impl in kinds[1:]), "relative L1 error against float64"], rows)

# %% [markdown]
# So a result of a card can be checked on a laptop, and a failure that occurs on a card can be reproduced on a CPU.
#
# ## What INT8 saves, counted
#
# The shipped kernels, float16 and INT8, on the same problem: 128 queries, 512 keys, D = 64, one head.

# %%
shape, counts = (1, 1, 1, 128, 512, 64), {}
for precision in ("float16", "int8"):
    step = launch.plan(problem_of(shape, precision, {}), "sm_80")
    _, _, r = emulated(step)
    counts[precision] = {"tensor operations": r.tensor_operations, "global KB read": 32 * r.global_load_sectors / 1000,
                         "shared KB read": r.shared_loaded / 1000, "conflicts": r.shared_conflicts,
                         "warp-instructions": sum(r.instructions.values()),
                         "of them float and exp2": r.instructions["float"] + r.instructions["special"],
                         "of them integer": r.instructions["integer"]}
table(["", "float16", "INT8", "INT8 / float16"], [[n, x, counts["int8"][n], counts["int8"][n] / max(1, x)]
                                                  for n, x in counts["float16"].items()])

# %% [markdown]
# Products are halved (but for the first four keys, chapter 03, which add a few), and less is read from global and shared memory. The work
# between the products grows. A score is scaled and rounded, its weight is computed by fused multiply-adds and by integer operations on
# the bits of floats, and it is packed into a byte. Float16 has one fused multiply-add and one exponential instead. Whether the doubled
# rate of the products makes the kernel faster is decided there, and only a card can tell. On an H200 it does not: at L = 8192 INT8 takes
# 1.2 times float16's time with 128 channels, 1.5 times with 64. There the reason for INT8 is equal bits. On a CPU INT8 is several times
# as fast as float32 (chapter 07).

# %%
if device is None:
    print("no card: no times")
else:
    for precision in ("float16", "int8"):
        seconds = device.prepared(launch.plan(problem_of((4, 16, 16, 4096, 4096, 128), precision, {}), device.arch),
                                  lambda work: median_seconds(device, work))
        print(f"{precision}: {1e3 * seconds:.2f} ms, {4 * 64 * 4096**2 * 128 / seconds / 1e12:.0f} TOP/s")

# %% [markdown]
# ## The picture, and the ceiling

# %%
fig, axes = figure(2, width=11, height=3.4, width_ratios=(1.3, 1))
for y, owners in enumerate((lane_c, lane_a)):
    for key, owner in enumerate(owners):
        axes[0].barh(y, 1, left=key, color=("#B7D3E8", "#E69F00", "#56B4E9", "#F0E442")[owner], edgecolor="black", height=0.6)
        axes[0].text(key + 0.5, y, owner, ha="center", va="center", fontsize=8)
for place, key in enumerate(order):
    axes[0].plot([key + 0.5, place + 0.5], [0.3, 0.7], color="#777777", linewidth=0.6, marker="", linestyle="-")
axes[0].set(yticks=(0, 1), yticklabels=("accumulator:\nkeys", "operand:\nplaces"), xlabel="key, or place, of 32", ylim=(1.5, -0.5),
            title="which lane of a quad holds it")
axes[1].set_title("INT8 in per cent of float16")
bars(axes[1], {n: 100 * counts["int8"][n] / counts["float16"][n] for n in ("tensor operations", "global KB read", "shared KB read",
                                                                          "warp-instructions")}, "%", digits=0)

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert different["int32"] == 1 < different["float32"]
assert counts["float16"]["tensor operations"] == 4 * 128 * 512 * 64 // 4096
assert 0.5 <= counts["int8"]["tensor operations"] / counts["float16"]["tensor operations"] < 0.51
assert counts["int8"]["conflicts"] == 0 and counts["int8"]["global KB read"] < 0.75 * counts["float16"]["global KB read"]

# %% [markdown]
# **What you can do now**
#
# * say why integer sums have the same bits in any order, and floats not,
# * let the order of the keys follow the tensor core's layout,
# * choose a key block whose sums stay exact.
#
# **Next:** [19](19_decode_gpu.ipynb). A cache on the card: count every byte that a step moves.
