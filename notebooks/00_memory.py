# %% [markdown]
# # 00. Attention and the memory it moves
#
# After this chapter you can write attention down in four lines, say how many operations and bytes a size costs before you run it,
# and read off a trace why the same arithmetic in another order moves five times fewer bytes.

# %%
import numpy as np

import numflash
from numflash.course.lessons import bars, check, figure, roof, table
from numflash.course.tracer import trace
from numflash.cpu.study import ladder, ladder_float

# %% [markdown]
# ## The definition
#
# Every query row asks all keys for a score, softmax turns the scores of a row into weights that sum to one, and the output is the
# weighted mean of the values.

# %%
def attention(query, key, value):
    scores = query @ key.T / np.sqrt(query.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ value


rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((96, 16), np.float32) for _ in range(3))
exact = numflash.attention(query, key, value, impl="reference")
assert np.abs(attention(query, key, value) - exact).max() < 1e-6

# %% [markdown]
# Subtracting the maximum changes nothing (it cancels in the quotient), and keeps `exp` from overflowing.
#
# Two products of L x D x L multiply-adds make 4 L² D operations. The inputs and the output are only 4 L D numbers. Between them
# stands a matrix of L² scores.
#
# **Exercise 1.** How many MiB (2**20 bytes) does the float32 score matrix of one head take at L = 4096?

# %% tags=["exercise"]
mebibytes = ...
check("MiB of scores at L = 4096", mebibytes, np.empty((4096, 4096), np.float32).nbytes / 2**20)

# %% tags=["solution"] jupyter={"source_hidden": true}
mebibytes = 4096 * 4096 * 4 / 2**20
check("MiB of scores at L = 4096", mebibytes, np.empty((4096, 4096), np.float32).nbytes / 2**20)

# %% [markdown]
# ## Counting
#
# The definition as a Numba kernel is `ladder_float.naive`, rung 1 of our ladder: three loops over rows, one for each line above.
# `trace` runs its very source in the interpreter, on arrays that count. The cache of the model is small, as our arrays are: 4 KiB
# against 6 KiB of keys. (Real sizes have the same ratio, a thousand times larger.)

# %%
length, d = query.shape
scale = np.float32(np.log2(np.e) / np.sqrt(d))             # weights are powers of two: 2**(x log2(e)) is e**x
out, scores = np.empty_like(query), np.empty((length, length), np.float32)
naive = trace(ladder_float.naive, query, key, value, scale, scores, out, cache=4096)
print(naive)
assert np.abs(out - exact).max() < 1e-6

# %% [markdown]
# Each row reads every key; by the time the next row starts, the first keys have left the cache. So K and V come from memory once
# *per row*: 96 times. The matrix of scores does not fit either: it is written, read back, and written again.
#
# The second rung, `online`, has no matrix (chapter 01 shows how). The third, `tiled`, also lets 16 query rows share each
# block of 16 keys while it is in the cache.

# %%
online = trace(ladder_float.online, query, key, value, scale, out, cache=4096)
assert np.abs(out - exact).max() < 1e-6
block = 16
tile = np.empty((block, block), np.float32), np.empty(block, np.float32), np.empty(block, np.float32)
tiled = trace(ladder_float.make_tiled(block, block), query, key, value, scale, *tile, out, cache=4096)
assert np.abs(out - exact).max() < 1e-6

runs = {"naive": naive, "online": online, "tiled": tiled}
table(["kernel", "loads", "stores", "K from memory", "S moved", "all bytes moved"],
      [[name, r.total.loads, r.total.stores, r.arrays["k"].misses * r.line, r.bytes_of("s"), r.moved] for name, r in runs.items()])

# %% [markdown]
# All three load and store about as many elements: the arithmetic is the same. What differs is how many come from far away. Online
# softmax by itself saves the matrix (184 kB), and nothing of K and V; sharing blocks saves the rest.
#
# **Exercise 2.** With tiles of `block_q` rows, each tile reads all of K and V once. Write the bytes of K and V that come from
# memory, for float32. The traces are the judge: with one row per tile, and with 16.

# %% tags=["exercise"]
def bytes_of_k_and_v(length, d, block_q):
    return ...


def traced(length, d, block_q):
    report = online if block_q == 1 else tiled
    return (report.arrays["k"].misses + report.arrays["v"].misses) * report.line


check("K and V from memory", bytes_of_k_and_v, traced, (96, 16, 1), (96, 16, 16))

# %% tags=["solution"] jupyter={"source_hidden": true}
def bytes_of_k_and_v(length, d, block_q):
    tiles = length // block_q
    return tiles * 2 * length * d * 4


check("K and V from memory", bytes_of_k_and_v, traced, (96, 16, 1), (96, 16, 16))

# %% [markdown]
# ## "Each score is used 128 times"
#
# The A64FX [document](../docs/sources.md) *Fused FlashAttention V2* credits fusion with reusing each element of S D = 128
# times, against once in the
# unfused code. Count it in the unfused kernel: the last pass loads each weight once and multiplies a whole row of V with it.

# %%
loads_per_score = naive.arrays["s"].loads / length**2      # maximum; weight; sum; quotient; P.V
products_in_pv = naive.arrays["v"].loads / length**2       # each load of v is one product with a weight
print(f"a score is loaded {loads_per_score:.0f} times in all, once of them in P.V, where it meets {products_in_pv:.0f} values")
assert (loads_per_score, products_in_pv) == (5, d)

# %% [markdown]
# The reuse is the same, D, in both. What fusion removes is the way to memory and back, in the column "S moved" above.
#
# ## The picture
#
# Each dot is a line of K that comes from memory, in the same stretch of time. Naive: a sweep through all of K for every row.
# Tiled: a block of 16 lines comes, and is used for 16 rows before the next one.

# %%
fig, axes = figure(3, width=11, height=3.4, width_ratios=(1, 1, 1.1))
for ax, name in zip(axes, ("naive", "tiled"), strict=False):
    events = runs[name].events
    keys = list(runs[name].arrays).index("k")
    came = np.flatnonzero((events[:, 0] == keys) & (events[:, 3] == 1))
    ax.plot(came / 1e3, events[came, 1], linestyle="", marker=".", markersize=1.5, color="#0072B2")
    ax.set(title=f"{name}: {len(came):,} lines of K from memory", xlabel="time (thousand accesses)", ylabel="line of K",
           xlim=(0, 40))
once = 4 * query.nbytes
axes[2].set_title("between cache and memory")
bars(axes[2], {name: r.moved / 1e3 for name, r in runs.items()} | {"each once": once / 1e3}, "kB moved", digits=0)

# %% [markdown]
# ## The ceiling
#
# No order of work moves less than Q, K, V and O once each. What that means in time on this machine: the least time by memory
# (bytes over the measured read bandwidth) and by arithmetic (operations over the measured float32 peak), for one core.

# %%
peak = roof()
print(peak)
trips = naive.bytes_of("s") / scores.nbytes
print(f"the matrix of scores goes {trips:.0f} times between cache and memory")
rows = []
for n, head_dim in ((512, 64), (4096, 64), (4096, 128)):
    work, matrix, least = 4 * n * n * head_dim, trips * 4 * n * n, 4 * 4 * n * head_dim
    rows.append([f"L={n} D={head_dim}", 1e3 * work / peak.float32, 1e3 * matrix / peak.read, 1e3 * least / peak.read])
table(["size", "arithmetic, ms", "naive scores through memory, ms", "Q, K, V, O once, ms"], rows)

# %% [markdown]
# Five trips of the matrix cost time of the same order as the arithmetic itself; the inputs cost next to nothing. Attention is
# limited by arithmetic *if* the scores stay in the cache. That is what FlashAttention is about.
#
# **Exercise 3.** Which of the two limits fused attention at L = 4096, D = 64 on this machine: "memory" or "arithmetic"?

# %% tags=["exercise"]
answer = ...
check("what limits fused attention", answer, "arithmetic" if rows[1][1] > rows[1][3] else "memory")

# %% tags=["solution"] jupyter={"source_hidden": true}
answer = "arithmetic"
check("what limits fused attention", answer, "arithmetic" if rows[1][1] > rows[1][3] else "memory")

# %%
for name in ("naive", "online", "tiled"):                  # the same kernels, compiled
    assert np.abs(ladder.prepare(name, query, key, value)() - exact).max() < 1e-6
assert naive.moved > online.moved > 3 * tiled.moved > 3 * once
assert naive.arrays["k"].misses == length * tiled.arrays["k"].misses // (length // block)
