# %% [markdown]
# # 14. The tensor core's fragments
#
# After this chapter you can
#
# * multiply two matrices on a tensor core from Python, and say which thread holds which element,
# * load operands with `ldmatrix`, also transposed, and say why V needs that,
# * explain the step between the two products of attention: the result of one is the operand of the next,
# * count tensor-core operations.

# %% [markdown] tags=["map"]
# > **The idea:** The result of one tensor-core product is the operand of the next, without moving.
# >
# > **Where you are:** GPU path, stop 2 of 6: [13](13_threads_warps_memory.ipynb) → **14** → [15](15_bank_conflicts.ipynb) → [16](16_flash_attention_2.ipynb) → [17](17_hopper.ipynb) → [23](23_broken_kernels.ipynb)
# >
# > **Time:** 25 minutes to read, 15 for the exercises. **Before it:** [13](13_threads_warps_memory.ipynb).
# >
# > **Terms:** [tensor core](../docs/glossary.md#tensor-core), [fragment](../docs/glossary.md#fragment), [ldmatrix](../docs/glossary.md#ldmatrix), [warp](../docs/glossary.md#warp), [half](../docs/glossary.md#half).
# >
# > **Papers:** [PTX manual](https://docs.nvidia.com/cuda/parallel-thread-execution/), [FlashAttention-2](https://arxiv.org/abs/2307.08691).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import numpy as np
from matplotlib.colors import ListedColormap
from numba import cuda

from numflash.course import bars, card, check, figure, table
from numflash.cuda import emulate, study
from numflash.cuda.device.operands import emulated
from numflash.cuda.emulator import tensor
from numflash.cuda.instructions import ptx

rng = np.random.default_rng(0)
u32, f32, i32 = np.uint32, np.float32, np.int32
device = card()

# %% [markdown]
# **The question:** a product of two matrices is shared out among 32 threads. Which thread holds which number, and must the weights of
# attention move between threads before they are multiplied with V?
#
# ## One instruction, 32 threads
#
# A *tensor core* is a unit of the GPU that multiplies small matrices. A *half* is a float16, 2 bytes; a register of 32 bits holds two. The
# 32 threads of a warp are called *lanes* 0 to 31.
#
# The instruction `mma.m16n8k16` computes C += A B: A is 16 x 16 (m x k), B 16 x 8 (k x n), C 16 x 8 (m x n). For scores, A is 16 queries of
# 16 channels, B 8 keys of the same channels, and C the 16 x 8 scores. No single thread has these matrices. Each lane holds a *fragment*
# (a part) of each, in registers: of A four with two halves each, of B two, of C four floats.
#
# Which lane holds what is written in the PTX manual (the section on the matrix fragments of `mma.m16n8k16` with floating point types). It
# follows from two numbers, group = lane / 4 (0 to 7) and t = lane % 4 (0 to 3). For lane 5 they are 1 and 1:
#
# | lane 5 | holds | in general |
# |---|---|---|
# | B, register 0 | key 1, channels 2 and 3 | key group, channels 2 t and 2 t + 1 |
# | B, register 1 | key 1, channels 10 and 11 | the same, 8 channels further |
# | C, floats 0 and 1 | row 1, columns 2 and 3 | row group, columns 2 t and 2 t + 1 |
# | C, floats 2 and 3 | row 9, columns 2 and 3 | the same, 8 rows below |
#
# (A follows in exercise 1. In the code below, `numflash.cuda.instructions.ptx` has PTX instructions that Numba has no name for;
# `mma(fc, 0, fa, 0, fb, 0)` is the product of the arrays' elements from 0 on. `x.view(u32)` shows an array of halves as pairs. `x >> n` is
# x // 2**n, and `x & 3` is x % 4: a GPU has single instructions for them.)

# %%
mma = ptx.mma["float16"]


def product(a, b, c):
    """One warp. a (16, 8), b (8, 8): pairs of halves along k; B is given transposed, as K lies in memory. c (16, 8) float32."""
    lane = i32(cuda.threadIdx.x)
    group, t = lane >> 2, lane & 3
    fa, fb, fc = cuda.local.array(4, u32), cuda.local.array(2, u32), cuda.local.array(4, f32)
    for r in range(4):
        fa[r] = a[group + 8 * (r & 1), t + 4 * (r >> 1)]
        fc[r] = f32(0)
    for r in range(2):
        fb[r] = b[group, t + 4 * r]
    mma(fc, 0, fa, 0, fb, 0)
    for r in range(4):
        c[group + 8 * (r >> 1), 2 * t + (r & 1)] = fc[r]


a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((8, 16)).astype(np.float16)
c = np.zeros((16, 8), np.float32)
report = emulate(product, 1, 32, (a.view(u32), b.view(u32), c))
exact = a.astype(float) @ b.T.astype(float)
print(f"{report.tensor_operations} operation, {report.tensor_flops} flop, largest error {np.abs(c - exact).max():.1e}")
assert report.tensor_flops == 2 * 16 * 8 * 16 and np.abs(c - exact).max() < 1e-5

# %% [markdown]
# Each of the 16 x 8 results is a sum of 16 products, so one instruction does 2 * 16 * 8 * 16 = 4096 operations (flop). A multiply-add of all
# 32 lanes does 64. But the larger instruction takes longer: an L4 does 121 TFLOP/s of float16 products and 30 TFLOP/s of float32
# multiply-adds, 4 to 1; an A100 16 to 1. Only products gain: loads, address arithmetic and the softmax do not get faster.
#
# Drawn, each cell with the number of its lane. The tint is the register: white is register 0, and the darker, the higher its number:

# %%
fig, axes = figure(3, width=11, height=5.2, width_ratios=(2, 1, 1))
tints = ("#FFFFFF", "#D6E6F2", "#F0C173", "#B0A8A0")      # from light to dark, also in greyscale


def owners(which):
    """(lane, register) of every element of A (16 x 16), B (16 x 8, as k x n) or C (16 x 8)."""
    if which == "C":
        place = tensor.accumulator_layout()
        return place // 4, place % 4
    registers, place = tensor.operand_layout(which.lower(), 16, 2)
    lane, register = place // (2 * registers), place // 2 % registers
    return (lane, register) if which == "A" else (lane.T, register.T)


for ax, which, title in zip(axes, "ABC", ("A: 16 queries x 16 channels", "B: 16 channels x 8 keys", "C: 16 queries x 8 keys"),
                            strict=True):
    lanes, registers = owners(which)
    ax.pcolormesh(registers, cmap=ListedColormap(tints[:registers.max() + 1]), edgecolors="#777777", linewidth=0.5)
    for (row, column), lane in np.ndenumerate(lanes):
        ax.text(column + 0.5, row + 0.5, lane, ha="center", va="center", fontsize=7,
                bbox={"facecolor": "white", "edgecolor": "black", "pad": 1.5} if lane == 5 else None)
    ax.set(xlim=(0, lanes.shape[1]), ylim=(lanes.shape[0], 0), xticks=[], yticks=[], aspect="equal", title=title)
_ = axes[0].set_xlabel("register 0 and 2 above, 1 and 3 below")

# %% [markdown]
# Follow lane 5 (boxed). Of A it holds rows 1 and 9; of C too, and its two columns are neighbours.
#
# **Exercise 1.** Return (row, column) of the first of the two neighbouring elements of A in register `r` (0 to 3) of `lane`.

# %% tags=["exercise"]
def element(lane, r):
    return ...


check("14.1", element)

# %% [markdown]
# ## ldmatrix
#
# Filling A as above takes four loads and their addresses. `ldmatrix` fetches four 8 x 8 matrices of halves from shared memory at once:
# lane n gives the address of one row of 16 bytes, and the hardware gives each thread the pair that the product needs.
#
# V needs one thing more. In the product P . V the sum runs over keys: keys are the k now, and a register of B must hold two neighbouring
# *keys* of one channel. Take the corner of V
#
# | | channel 0 | channel 1 |
# |---|---|---|
# | key 0 | a | b |
# | key 1 | c | d |
#
# Memory holds a, b, ..., c, d, row after row. A load of 32 bits at a gives the pair (a, b), one key; the product needs (a, c), one channel.
# `ldmatrix.trans` transposes each 8 x 8 on the way.

# %%
def weigh(p, v, out, transpose):
    """One warp: out (16, 8) = p (16, 16) . v (16 keys, 8 channels), both through shared memory."""
    shared = cuda.shared.array(16 * 8 + 16 * 8, u32)       # p, then v: its rows padded to 16 channels
    lane = i32(cuda.threadIdx.x)
    group, t = lane >> 2, lane & 3
    at = ptx.shared_address(shared)
    for i in range(4):
        shared[lane + 32 * i] = p[(lane + 32 * i) >> 3, lane & 7]
        shared[128 + lane + 32 * i] = v[(lane + 32 * i) >> 3, lane & 3]
    cuda.syncwarp()
    fa, fb, fc = cuda.local.array(4, u32), cuda.local.array(4, u32), cuda.local.array(4, f32)
    for r in range(4):
        fc[r] = f32(0)
    row = at + u32((lane & 15) * 32 + (lane >> 4) * 16)
    ptx.ldmatrix(fa, 0, row)
    if transpose:
        ptx.ldmatrix_trans(fb, 0, row + u32(512))
    else:
        ptx.ldmatrix(fb, 0, row + u32(512))
    mma(fc, 0, fa, 0, fb, 0)
    for r in range(4):
        out[group + 8 * (r >> 1), 2 * t + (r & 1)] = fc[r]


p, v = rng.random((16, 16)).astype(np.float16), rng.standard_normal((16, 8)).astype(np.float16)
wanted, errors = p.astype(float) @ v.astype(float), {}
for transpose in (False, True):
    out = np.zeros((16, 8), np.float32)
    report = emulate(weigh, 1, 32, (p.view(u32), v.view(u32), out, transpose))
    errors[transpose] = np.abs(out - wanted).max()
    print(f"transposed {transpose}: largest error {errors[transpose]:.1e}; "
          f"{report.opcodes.get('ldmatrix.sync.aligned.m8n8.x4.shared.b16', 0)} plain, "
          f"{report.opcodes.get('ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16', 0)} transposing loads")
assert errors[True] < 1e-5 < 0.1 < errors[False]

# %% [markdown]
# ## The step between the two products
#
# Scores S = Q . K^T come out as C. The weights P = exp(S - max) are needed as A of the next product. Compare the two pictures:
# lane 5 holds neighbouring columns of rows 1 and 9 in both. Two tiles of C side by side (16 keys) are one A, with the floats
# rounded to halves and packed in pairs. The weights never leave the registers.
#
# **Exercise 2.** Two tiles of C are side by side. A lane's pair (columns 2 t, 2 t + 1) of tile 0 or 1, in row `group` (lower = 0) or
# `group` + 8 (lower = 1), becomes which register of A?

# %% tags=["exercise"]
def register_of(tile, lower):
    return ...


check("14.2", register_of)

# %%
lanes_c, _ = owners("C")
lanes_a, _ = owners("A")
print("same lane for every element of two tiles of C and of A:", np.array_equal(np.hstack([lanes_c, lanes_c]), lanes_a))
assert np.array_equal(np.hstack([lanes_c, lanes_c]), lanes_a)

# %% [markdown]
# ## Counting
#
# How many products does one tile take: 32 queries by 32 keys with 64 channels? (WMMA is CUDA's older interface to the tensor core, with
# products of 16 x 16 x 16.) And how long is that at least on a card? An L4 has 58
# SMs, runs at 2.04 GHz and is sold with 121 TFLOP/s (data sheet).

# %%
wmma = (32 // 16) * (32 // 16) * (64 // 16)
ours = (32 // 16) * (32 // 8) * (64 // 16)
flop = 2 * 32 * 32 * 64
per_cycle = 121e12 / 58 / 2.04e9
table(["", ""], [["16 x 16 x 16 products (WMMA)", wmma], ["m16n8k16 products", ours], ["flop of the tile", flop],
                 ["flop per cycle and SM of an L4", f"{per_cycle:.0f}"], ["the tile at that rate, ns", f"{flop / per_cycle / 2.04:.0f}"]])
assert wmma == 16 and ours * 4096 == flop == 131072 and round(per_cycle) == 1023

# %% [markdown]
# Two mistakes are easy here. 4 is the number of 16 x 16 tiles of the *result*: the loop over the 64 channels multiplies it by 4. And a
# multiply-add counts as two operations.
#
# ## Adding up in float16
#
# A tensor core can also accumulate in float16: half of the registers, and on some cards twice the speed. What does it cost? One
# long product, then rung 7h of the GPU's ladder (chapter 16), which does that for the scores only.

# %%
mma_half = ptx.mma_f16_accumulate


def long_product(a, b, wide, narrow, steps):
    """One warp: a (16, 8 steps), b (8, 8 steps) pairs of halves; the sums in float32 and in float16."""
    lane = i32(cuda.threadIdx.x)
    group, t = lane >> 2, lane & 3
    fa, fb, fc = cuda.local.array(4, u32), cuda.local.array(2, u32), cuda.local.array(4, f32)
    fh, x = cuda.local.array(2, u32), cuda.local.array(2, f32)
    for r in range(4):
        fc[r] = f32(0)
    for r in range(2):
        fh[r] = u32(0)
    for step in range(steps):
        for r in range(4):
            fa[r] = a[group + 8 * (r & 1), 8 * step + t + 4 * (r >> 1)]
        for r in range(2):
            fb[r] = b[group, 8 * step + t + 4 * r]
        mma(fc, 0, fa, 0, fb, 0)
        mma_half(fh, 0, fa, 0, fb, 0)
    for r in range(4):
        wide[group + 8 * (r >> 1), 2 * t + (r & 1)] = fc[r]
    for r in range(2):
        ptx.unpack_half(x, 0, fh[r])
        narrow[group + 8 * r, 2 * t], narrow[group + 8 * r, 2 * t + 1] = x[0], x[1]


long_errors = {}
for k in (64, 256, 1024, 4096):
    a, b = rng.random((16, k)).astype(np.float16), rng.random((8, k)).astype(np.float16)       # like weights: no sign cancels
    wide, narrow = np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
    emulate(long_product, 1, 32, (a.view(u32), b.view(u32), wide, narrow, k // 16))
    exact = a.astype(float) @ b.T.astype(float)
    long_errors[k] = [np.abs(x / exact - 1).max() for x in (wide, narrow)]
table(["length of the sums", "error, float32 sums", "error, float16 sums"], [[k, *e] for k, e in long_errors.items()])

# %%
q, k, v, exact = study.problem(128, 64, seed=0)
rungs = {rung.number: rung for rung in study.LADDER}
ladder = {}
for number in ("7a", "7h"):
    out, _, _ = emulated(study.launch(rungs[number], q, k, v))
    ladder[rungs[number].name] = study.validated(rungs[number], out, exact)
table(["scores, D = 64", "relative error of the output"], list(ladder.items()))

# %% [markdown]
# A float16 has 11 bits. The longer the sum, the smaller each new term beside it; above 2048 a term below 1 is simply lost. So sums
# over keys, which are long, are never kept in float16 here; scores, of 64 or 128 terms, could be. (The emulator rounds after each
# instruction; a tensor core's own order of summation differs.)

# %%
assert np.float16(2048) + np.float16(0.99) == 2048

# %% [markdown]
# ## The picture, and the ceiling

# %%
fig, axes = figure(2, width=11, height=3.4)
for n, (name, marker) in enumerate((("float32 sums", "o"), ("float16 sums", "s"))):
    axes[0].loglog(list(long_errors), [e[n] for e in long_errors.values()], marker=marker, label=name)
axes[0].axhline(2.0**-11, color="#D55E00", linestyle="--", marker="")
axes[0].text(500, 2.0**-11 * 0.45, "rounding of one float16", color="#A04000", fontsize=9)
axes[0].set(xlabel="length of the sum", ylabel="largest relative error", title="accumulation")
axes[0].legend(loc="center right")
axes[1].set_title("one warp-instruction")
bars(axes[1], {"multiply-add": 64, "m16n8k8 (Turing)": 2 * 16 * 8 * 8, "m16n8k16": 4096, "m16n8k32, INT8": 2 * 16 * 8 * 32},
     "operations", ("largest mma.sync here", 8192), digits=0)

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert long_errors[4096][1] > 100 * long_errors[4096][0]
assert ladder["float16 scores"] > 1.2 * ladder["Q in registers"]

# %% [markdown]
# **What you can do now**
#
# * say which lane holds which element of a tensor core's operands and result,
# * load operands with `ldmatrix`, V transposed,
# * pass the weights from one product to the next without leaving the registers.
#
# **Next:** [15](15_bank_conflicts.ipynb). An XOR of the address puts a column into 32 different banks.
