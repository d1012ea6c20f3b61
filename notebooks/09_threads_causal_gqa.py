# %% [markdown]
# # 09. Threads, causal, GQA
#
# After this chapter you can
#
# * divide attention among threads so that none waits long,
# * say what a causal mask saves at your length and tile before you run it,
# * say what grouped-query attention saves and what it does not.

# %% [markdown] tags=["map"]
# > **The idea:** Query tiles are independent tasks; start the longest first.
# >
# > **Where you are:** CPU path, stop 7 of 8: [00](00_memory.ipynb) → [01](01_online_softmax.ipynb) → [02](02_tiling.ipynb) → [03](03_int8.ipynb) → [06](06_register_tile.ipynb) → [07](07_fused.ipynb) → **09** → [24](24_capstone.ipynb)
# >
# > **Time:** 15 minutes to read, 15 for the exercises. **Before it:** [07](07_fused.ipynb).
# >
# > **Terms:** [causal](../docs/glossary.md#causal), [mask](../docs/glossary.md#mask), [gqa](../docs/glossary.md#gqa), [tile](../docs/glossary.md#tile), [atomic](../docs/glossary.md#atomic).
# >
# > **Papers:** [FlashAttention-2](https://arxiv.org/abs/2307.08691), [GQA](https://arxiv.org/abs/2305.13245).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import heapq

import numpy as np

import numflash
from numflash.course import answer_of, bars, check, figure, roof, rounds, table
from numflash.cpu.study import ladder
from numflash.jit.threads import limit, most
from numflash.tiling import tiling

isa = ladder.vector_isa()
block_q, key_block = tiling(isa).block_q, tiling(isa).key_block
length, d = 4096, 128
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((length, d), np.float32) for _ in range(3))
work = 4.0 * length * length * d
threads = [n for n in (1, 2, 4, 8, 16) if n <= most()]
print(f"{most()} threads; tiles of {block_q} query rows x {key_block} keys")

# %% [markdown]
# ## Threads
#
# A query tile needs all keys and nothing of another query tile. So tiles are tasks: a thread takes the next number from a shared counter
# until there are no more tiles. (The counter is raised by an *atomic* addition: it reads, adds and writes in one step, so no two threads
# get the same number.) Only that counter is shared; each thread has its own 20 KB of scores and weights.
#
# A row is computed by one thread from its first key to its last, in the same order whichever thread it is. So the bits are those of
# one thread.

# %%
one = ladder.prepare("parallel", query, key, value, 1)()
seconds = {}
for n in threads:
    run = ladder.prepare("parallel", query, key, value, n)
    assert np.array_equal(run(), one)
    seconds[n] = rounds(run)
table(["threads", "ms", "times one thread", "GOP/s", "share of the peak of as many threads"],
      [[n, 1e3 * t, seconds[1] / t, work / t / 1e9, f"{100 * work / t / roof(n, isa).int8:.0f} %"] for n, t in seconds.items()])

# %% [markdown]
# There are many more tiles than threads, so the arithmetic divides evenly. Two things do not: packing K and V at the start (chapter 06's
# order of keys), and the wait for the last tile at the end.
#
# **Exercise 1.** If `serial` of the time (0 to 1) stays on one thread and the rest divides evenly, how many times faster are
# `n` threads? (Amdahl's law.)

# %% tags=["exercise"]
def amdahl(serial, n):
    return ...


check("09.1", amdahl)

# %% [markdown]
# ## Causal: half of the work?
#
# Query i attends to the keys up to i. Tiles above the diagonal are empty and are skipped; tiles *on* it are computed completely and
# then masked. So the saving is less than half of the work, and depends on the tile.
#
# **Exercise 2.** How many times fewer tiles are computed with the mask than without? A tile of rows r .. r + block_q - 1
# needs the key blocks that start at or before its last row. Count the tiles, and round up where `length` is no multiple.

# %% tags=["exercise"]
def times_fewer(length, block_q, block_k):
    return ...


check("09.2", times_fewer)

# %%
fewer = answer_of("09.2")
claimed = {n: fewer(n, 48, 64) for n in (512, 1024, 4096)}
table(["L", "48 x 64 tiles", f"our tiles, {block_q} x {key_block}"],
      [[n, x, fewer(n, block_q, key_block)] for n, x in claimed.items()])
causal = ladder.prepare("causal", query, key, value, 1)
exact = numflash.attention(query, key, value, is_causal=True, impl="reference")
assert np.abs(causal() - exact).sum() / np.abs(exact).sum() < 0.02
full = ladder.prepare("parallel", query, key, value, 1)
turns = np.array([(rounds(full, 0.1), rounds(causal, 0.1)) for _ in range(5)])
gain, causal_seconds = np.median(turns[:, 0] / turns[:, 1]), np.median(turns[:, 1])
print(f"measured at L = {length}, one thread: {gain:.2f} times as fast as the full problem")

# %% [markdown]
# Counted are tiles only. The mask does not shrink what is done once per query tile or once per call (packing K and V), and applying the
# mask takes time itself. The measured gain is smaller where these weigh, and differs by some per cent from run to run.
#
# ## Which thread waits
#
# With a mask, the last query tile has the most keys and the first almost none. Give each thread an equal run of rows, and the last thread
# works while the others wait. Three ways to assign the tiles to 4 threads, in units of one tile and key block:

# %%
tiles = [-(-(row + block_q) // key_block) for row in range(0, length, block_q)]        # key blocks of each query tile


def take_next(tiles, n):
    """Each thread takes the next tile when it is done: the time at which each one ends."""
    ends = [0] * n
    for t in tiles:
        heapq.heapreplace(ends, ends[0] + t)
    return sorted(ends)


n = 4
dealt = {"equal runs of rows": [sum(part) for part in np.array_split(tiles, n)],
         "next tile, shortest first": take_next(tiles, n), "next tile, longest first": take_next(tiles[::-1], n)}
least = sum(tiles) / n
table(["schedule", "busiest thread", "over an even share"], [[name, max(ends), max(ends) / least] for name, ends in dealt.items()])

# %% [markdown]
# Numba's own parallel loop (`prange`) gives each thread an equal run on most machines. So the package takes tiles from a counter instead,
# the longest first: the tiles that are left for the end are short.
#
# ## GQA: heads that share keys
#
# Grouped-query attention lets `H / Hkv` query heads attend to the same keys and values. Does that make attention over a full prompt
# faster? Count: the two products are the same size for every *query* head, shared keys or not.
#
# (The rows below are the shipped kernel with the best instructions that the machine has. With AMX, Intel's matrix tiles, it does
# more GOP/s than the vector tiles of the ladder above, so compare these rows with each other only.)

# %%
heads, n_keys = 8, 1024
q, k, v = (rng.standard_normal((1, heads, n_keys, d), np.float32) for _ in range(3))
rows = []
for kv_heads in (8, 2, 1):
    packed = numflash.quantize_qkv(q, k[:, :kv_heads], v[:, :kv_heads])
    out = numflash.attention_int8(*packed, enable_gqa=True)
    same = numflash.attention(q, *(np.repeat(x[:, :kv_heads], heads // kv_heads, axis=1) for x in (k, v)), impl="reference")
    assert np.abs(out - same).sum() / np.abs(same).sum() < 0.02
    with limit(1):
        t = rounds(lambda packed=packed: numflash.attention_int8(*packed, enable_gqa=True))
    rows.append([f"{heads} query, {kv_heads} KV heads", 1e3 * t, 4e-9 * heads * n_keys**2 * d / t, 2 * kv_heads * n_keys * d / 1e6])
table(["prefill, L = 1024, one thread", "ms", "GOP/s", "MB of K and V in int8"], rows)

# %% [markdown]
# In prefill (the prompt, computed at once) the time hardly changes: only packing and quantising K and V get cheaper. What shrinks is the
# *memory* of the cache: the keys and values of all tokens so far, which a model keeps to write the next token. With it shrinks the time of
# decoding, which is nothing but reading that memory (chapter 10).
#
# **Exercise 3.** Qwen 2.5 0.5B has 14 query heads, 2 KV heads, D = 64. How many bytes do K and V of one layer take for 1024
# tokens in float16, and how many would they take with 14 KV heads?

# %% tags=["exercise"]
answer = ..., ...
check("09.3", answer)

# %% [markdown]
# ## The picture

# %%
fig, axes = figure(3, width=12, height=3.5, width_ratios=(1, 1.1, 1.3))
small = 1024
row, block = np.mgrid[0:small:block_q, 0:small:key_block]
state = np.where(block > row + block_q - 1, 0.0, np.where(block + key_block - 1 > row, 1.0, 2.0))
axes[0].imshow(state, aspect="auto", cmap="cividis", extent=(0, small, small, 0))
axes[0].set(title=f"causal, L={small}", xlabel="key", ylabel="query")
for x, y, word, colour in ((760, 220, "skipped", "white"), (560, 610, "masked", "black"), (230, 800, "whole", "black")):
    axes[0].text(x, y, word, color=colour, ha="center", fontsize=9, bbox=None if colour == "white" else
                 {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8})
for i, ends in enumerate(dealt.values()):
    axes[1].barh([i + 0.2 * (j - 1.5) for j in range(n)], ends, height=0.17, color=("#B7D3E8", "#E69F00", "#0072B2")[i],
                 edgecolor="black", hatch=("", "//", "..")[i])
axes[1].axvline(least, color="#D55E00", linestyle="--", marker="")
axes[1].set(yticks=range(3), yticklabels=["equal\nruns", "shortest\nfirst", "longest\nfirst"], ylim=(2.6, -0.6),
            xlabel="tiles x key blocks of each thread", title="four threads, causal (line: even share)")
axes[2].set_title(f"L={length} D={d}")
shares = {f"full, {n_} thread{'s' * (n_ > 1)}": 100 * work / t / roof(n_, isa).int8 for n_, t in seconds.items()}
shares["causal, 1 thread, visible work"] = 100 * work * (length + 1) / (2 * length) / causal_seconds / roof(1, isa).int8
bars(axes[2], shares, f"% of the peak of as many threads ({isa})", digits=0)

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert 1.6 < claimed[512] < 1.7 and 1.75 < claimed[1024] < 1.85 and 1.9 < claimed[4096] < 1.96
assert max(dealt["next tile, longest first"]) < 1.02 * least < max(dealt["equal runs of rows"]) / 1.5

# %% [markdown]
# **What you can do now**
#
# * say what limits the gain of threads: the part that does not divide, and unequal tasks,
# * count the tiles that a causal mask leaves, and start the longest first,
# * say what GQA saves: the bytes of K and V, not the operations.
#
# **Next:** [24](24_capstone.ipynb). Change a tile of the shipped kernel: other time, the same bits.
