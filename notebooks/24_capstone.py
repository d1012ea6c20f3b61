# %% [markdown]
# # 24. Capstone: your tile in the shipped kernel
#
# You have written tiled attention (01), a register tile (06) and the fused order (07). Now change the kernel that ships.
#
# After this chapter you can
#
# * predict what a tile size does to traffic and working set, before anything runs,
# * change `block_q`, `mr` and `nv` of the shipped INT8 kernel, and show that no bit of the result changes,
# * measure, plot, and explain the times by the model of chapter 02, also where they do not follow it,
# * add a score function of your own, and run it on the CPU and in the GPU's emulator.

# %% [markdown] tags=["map"]
# > **The idea:** Change a tile of the shipped kernel: other time, the same bits.
# >
# > **Where you are:** CPU path, stop 8 of 8: [00](00_memory.ipynb) → [01](01_online_softmax.ipynb) → [02](02_tiling.ipynb) → [03](03_int8.ipynb) → [06](06_register_tile.ipynb) → [07](07_fused.ipynb) → [09](09_threads_causal_gqa.ipynb) → **24**
# >
# > **Time:** 20 minutes to read, 30 for the exercises. **Before it:** [02](02_tiling.ipynb), [03](03_int8.ipynb), [07](07_fused.ipynb).
# >
# > **Terms:** [tile](../docs/glossary.md#tile), [working set](../docs/glossary.md#working-set), [equal bits](../docs/glossary.md#equal-bits), [register tile](../docs/glossary.md#register-tile).
# >
# > **Papers:** [FlashAttention](https://arxiv.org/abs/2205.14135), [FlexAttention](https://arxiv.org/abs/2412.05496).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
from importlib.util import find_spec

import numpy as np

import numflash
from numflash import tiling
from numflash.course import answer_of, check, figure, quantised, roof, rounds, table, yours_or
from numflash.cpu import launch
from numflash.cpu.study import ladder
from numflash.jit.threads import limit

isa = ladder.vector_isa()                                # where there is AMX, calls use another kernel: chapter 06
named = tiling.tiling(isa)
caches = tiling.Caches.of_this_machine()
print(named.explain(128))
print(", ".join(f"{level} {size / 1024:.0f} KiB" for level, size in caches.levels()))

# %% [markdown]
# ## Predict
#
# The kernel takes `block_q` query rows at a time and goes through all keys in blocks of 128. Every tile of rows reads all of K and V once, as
# bytes. They come from the second-level cache, or from further away if they do not fit there.
#
# **Exercise 1.** Suppose that K and V come at 32 bytes a nanosecond, a round figure for a second-level cache. How many milliseconds does it
# take to read them in all, for `length` queries and keys of `d` channels, with tiles of `block_q` rows? (One head; a byte per number; the
# last tile may be smaller but reads all keys too. A machine that has only AVX2 has no dot instruction for bytes and keeps 2 bytes per
# number: there the true figure is twice as large.)

# %% tags=["exercise"]
def kv_milliseconds(length, d, block_q):
    return ...


check("24.1", kv_milliseconds)

# %% [markdown]
# Now the other side. A larger tile needs more room: O (float32), scores and weights of all its rows. Here are both for a few sizes.
# Before you read on, write down which size you expect to be the fastest, and by how much. Two facts help: a core reads tens of bytes per
# nanosecond from its second-level cache, and the arithmetic takes the same time in every row of this table. (Compare your milliseconds
# with the time of the products, which is printed below the table.)

# %%
length, d = 1024, 128
SIZES = (12, 48, 96, 192)
work = 4.0 * length * length * d
peak = roof(isa=isa)
lines = []
for block_q in SIZES:
    with tiling.using(isa, block_q=block_q) as t:
        need = sum(t.working_set(d).values())
    read = answer_of("24.1")(length, d, block_q)
    lines.append([block_q, f"{read * 32e6 / 2**20:.1f}", f"{read:.3f}", f"{need / 1024:.0f}", "L1" if need <= caches.l1 else "L2" if need <= caches.l2 else "further"])
table(["block_q", "MiB of K and V read", "ms at 32 bytes a ns", "working set, KiB", "fits"], lines)
print(f"at the INT8 peak the products alone take {1e3 * work / peak.int8:.2f} ms")

# %% [markdown]
# ## Change it
#
# `tiling.using(isa, block_q=96)` is a context manager: calls within it use a kernel with this size. The first call compiles it (some seconds), the
# next ones find it in memory or on the disk.
#
# **Exercise 2.** Write `sweep`. For each size, within `using(block_q=size)`, call `run()`, which returns (seconds, output). Return a
# dictionary of size: (seconds, output). (Your function is the one that runs, once it is right. The cell after it defines `run` and
# `using`: `quantised` rounds Q, K and V to bytes once, before the timing, and `launch.run` calls the kernel.)

# %% tags=["exercise"]
def sweep(sizes, run, using):
    return ...


check("24.2", sweep)

# %%
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((1, 1, length, d), np.float32) for _ in range(3))
problem = quantised(query, key, value)


def run():
    """(median seconds, output) of the shipped kernel on one thread."""
    with limit(1):
        return rounds(lambda: launch.run(problem, isa), 0.2), launch.run(problem, isa)[0]


def using(**sizes):
    return tiling.using(isa, **sizes)


swept = yours_or("24.2", sweep)(SIZES, run, using)
first = swept[SIZES[0]][1]
table(["block_q", "ms", "share of the INT8 peak", "equal bits"],
      [[size, 1e3 * seconds, f"{100 * work / seconds / peak.int8:.0f} %", np.array_equal(out, first)]
       for size, (seconds, out) in swept.items()])
assert all(np.array_equal(out, first) for _, out in swept.values())

# %% [markdown]
# Equal bits, every time. Why? Each row is computed by itself: its scores are integers (exact in any order), its maximum and its sums depend on
# the order of the *key blocks*, and that order did not change. `block_q` only decides which rows are computed together. (`key_block` would change
# the order of the sums; `using` refuses it for INT8 kernels.)
#
# ## The register tile
#
# Next, `mr` x `nv`: rows and vectors of sums that stay in registers (chapter 06).
#
# **Exercise 3.** With 32 vector registers, which shapes need no stack? A tile needs mr * nv sums, nv vectors of K and one broadcast. Return
# True or False.

# %% tags=["exercise"]
def fits(mr, nv):
    return ...


check("24.3", fits)

# %%
shapes = [(named.mr, named.nv), (4, named.nv) if named.mr == 6 else (4, 2)]
tiles = {}
for mr, nv in shapes:
    with tiling.using(isa, mr=mr, nv=nv):
        tiles[f"{mr} x {nv}"] = run()
table(["mr x nv", "loads per dot", "ms", "equal bits"],
      [[name, answer_of("06.1")(*map(int, name.split(" x ")))[0], 1e3 * seconds, np.array_equal(out, first)]
       for name, (seconds, out) in tiles.items()])
assert all(np.array_equal(out, first) for _, out in tiles.values())

# %% [markdown]
# ## Plot it, and explain
#
# As in chapter 02 there are two times, here with the second-level cache instead of memory:
#
# * the arithmetic, at the speed of the best size,
# * reading K and V at 32 bytes a nanosecond, which a small tile does more often.
#
# The roofline takes the larger of the two, as if they always ran at the same time. The model here adds them, as if they never did. The
# truth is between: a core loads the next lines while it computes. The model leaves out what else a small tile costs: packing a tile of
# queries, starting a loop over the keys, filling the last register tile.

# %%
best = min(seconds for seconds, _ in swept.values())
model = {n: best + (answer_of("24.1")(length, d, n) - answer_of("24.1")(length, d, SIZES[-1])) / 1e3 for n in SIZES}
fig, ax = figure(width=8, height=3.6)
ax.plot(SIZES, [1e3 * swept[n][0] for n in SIZES], label="measured")
ax.plot(SIZES, [1e3 * model[n] for n in SIZES], label="model: arithmetic + K and V from L2")
ax.axhline(1e3 * work / peak.int8, color="#D55E00", linestyle="--", marker="")
ax.text(SIZES[-1], 1.03e3 * work / peak.int8, "products at the INT8 peak", ha="right", color="#A04000", fontsize=9)
ax.axvline(named.block_q, color="#777777", linestyle=":", marker="")
ax.set(xlabel="block_q", ylabel="ms, one thread", ylim=(0, None), title=f"{isa}, L={length} D={d}; dotted: the shipped size")
_ = ax.legend(fontsize=9)

# %% [markdown]
# Compare with what you wrote down. Where the measured curve is below the model, the reads ran beside the arithmetic; with a tile of 12 rows most
# of them did when these figures were made. Where the measured curve is above the model, the tile loses time to something other than traffic. Where it
# is flat, neither traffic nor room decides: that is the range from which the shipped size was chosen.
#
# ## Invent a score
#
# Last, change the scores. `numflash.flex_attention` takes a function that changes each score, and compiles it into the same float kernel.
#
# **Exercise 4.** Write a score function that takes 0.1 per position of distance: the score of query i and key j becomes score - 0.1 * |i - j|.
# `q_idx` and `kv_idx` are the positions; `abs`, `np.abs` and arithmetic work on them.

# %% tags=["exercise"]
def distance(score, b, h, q_idx, kv_idx):
    return ...


check("24.4", distance)

# %%
penalty = yours_or("24.4", distance)
out = numflash.flex_attention(query[..., :64], key[..., :64], value[..., :64], penalty)
plain = numflash.attention(query[..., :64], key[..., :64], value[..., :64])
print(f"with the penalty the output differs from plain attention by up to {np.abs(out - plain).max():.2f}")

# %% [markdown]
# ## The same function on a GPU
#
# On CUDA your function becomes part of the kernel itself: it is compiled to PTX and called on scores in registers, between the two
# products. No card is needed to try it. `impl="cuda-emulator"` runs the kernel's PTX as the GPU path's chapters do (from
# [13](13_threads_warps_memory.ipynb) on). The emulator is slow, so take 64 queries and keys, in float16.

# %%
if find_spec("numba_cuda"):
    small = [x[:, :, :64, :64].astype(np.float16) for x in (query, key, value)]
    on_gpu = numflash.flex_attention(*small, penalty, impl="cuda-emulator").astype(np.float32)
    on_cpu = numflash.flex_attention(*(x.astype(np.float32) for x in small), penalty)
    print(f"GPU kernel in float16 against the CPU's in float32: largest difference {np.abs(on_gpu - on_cpu).max():.1e}")
    assert np.abs(on_gpu - on_cpu).max() < 4e-3
else:
    print("no CUDA compiler here: pip install 'numflash[cuda]' (Linux)")

# %% [markdown]
# A float16 has 11 bits, so the results agree to about three decimal places; the function is the same one.
#
# You have now changed the tiles and the scores of this kernel, and checked each change. The source files in the order in which to read
# them are listed in [the course's overview](../docs/course.md).
#
# The next cell checks the claims of this page. You can skip it.

# %%
assert not np.allclose(out, plain, atol=1e-2)
assert answer_of("24.1")(length, d, 12) > 10 * answer_of("24.1")(length, d, 192)

# %% [markdown]
# **What you can do now**
#
# * predict and measure what another tile does to the shipped kernel,
# * show that no bit of the result changes, and say why,
# * add a score of your own, on the CPU and on a GPU.
#
# **Next:** [13](13_threads_warps_memory.ipynb). 32 threads move together, and memory is near (shared) or far (global).
