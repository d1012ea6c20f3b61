# %% [markdown]
# # 07. Fusing it
#
# After this chapter you can take a fused kernel apart by time, tell a share from a time, and check a
# [document](../docs/sources.md)'s table with
# nothing but its own numbers.

# %% [markdown] tags=["map"]
# > **The idea:** Do all four steps for one tile before the next: scores live for a moment, in the cache.
# >
# > **Where you are:** CPU path, stop 5 of 7: [00](00_memory.ipynb) → [01](01_online_softmax.ipynb) → [02](02_tiling.ipynb) → [06](06_register_tile.ipynb) → **07** → [09](09_threads_causal_gqa.ipynb) → [24](24_capstone.ipynb)
# >
# > **Time:** 20 minutes to read, 15 for the exercises. **Before it:** [01](01_online_softmax.ipynb), [02](02_tiling.ipynb), [06](06_register_tile.ipynb).
# >
# > **Terms:** [fusion](../docs/glossary.md#fusion), [rung](../docs/glossary.md#rung), [tile](../docs/glossary.md#tile), [octave](../docs/glossary.md#octave).
# >
# > **Papers:** [FlashAttention](https://arxiv.org/abs/2205.14135), [FlashAttention-2](https://arxiv.org/abs/2307.08691).

# %% tags=["machine"]
from numflash.course import machine

machine()

# %%
import numpy as np

import numflash
from numflash.course import bars, check, figure, roof, rounds, table
from numflash.cpu import launch
from numflash.cpu.study import ladder, ladder_int8, unfused_times
from numflash.jit.threads import limit
from numflash.measure import phases
from numflash.options import Options
from numflash.quantization import quantize_problem
from numflash.tiling import tiling
from numflash.validation import describe

isa = ladder.vector_isa()
length, d = 4096, 128
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((length, d), np.float32) for _ in range(3))
peak = roof(isa=isa)
work = 4.0 * length * length * d
print(peak)

# %% [markdown]
# ## The same parts, in another order
#
# Rungs 5 and 6 of the ladder have the same four parts, on the register tiles of chapter 06: scores, softmax, merge, values.
# Rung 5 does each for the whole problem before the next; rung 6 does all four for one tile of rows and 128 keys, then moves
# on. Same operations, same bits. What differs is how long a score lives.

# %%
unfused, fused = (ladder.prepare(name, query, key, value) for name in ("unfused", "fused"))
assert np.array_equal(unfused(), fused())
seconds = {"unfused": rounds(unfused), "fused": rounds(fused)}
problem = quantize_problem(describe(*(x[None, None] for x in (query, key, value)), Options(), "int8"))
with limit(1):
    seconds["shipped"] = rounds(lambda: launch.run(problem, isa))
room = {name: 3 * (length**2 if name == "unfused" else tiling(isa).block_q * 128) / 2**20 for name in seconds}
table(["kernel", "ms", "GOP/s", "share of the INT8 peak", "MiB of scores and weights"],
      [[name, 1e3 * t, work / t / 1e9, f"{100 * work / t / peak.int8:.0f} %", room[name]] for name, t in seconds.items()])

# %% [markdown]
# (`shipped` is the kernel behind `attention_int8`, with everything that masks, options and extreme scores need, on as many
# threads as the machine has.)
#
# **Exercise 1.** The documents fuse with an S tile of 48 x 64 int32. How many bytes of scores does the unfused form hold at L
# = 8192 in int32, and how many times smaller is the tile?

# %% tags=["model"] jupyter={"source_hidden": true}
unfused_bytes_and_ratio = (4 * 8192**2, 8192**2 / (48 * 64))

# %% tags=["exercise"]
answer = ..., ...
check("bytes of S at L = 8192, times smaller", answer, unfused_bytes_and_ratio)

# %% tags=["solution"] jupyter={"source_hidden": true}
bytes_unfused, times_smaller = 8192 * 8192 * 4, 8192 * 8192 / (48 * 64)
answer = bytes_unfused, times_smaller
check("bytes of S at L = 8192, times smaller", answer, unfused_bytes_and_ratio)

# %% [markdown]
# "256 MB" and "21,000x smaller": the document's figures hold.
#
# ## Where the time goes
#
# A clock inside the inner loop would disturb what it measures. So the kernel is built four times, with one part more each
# time; what a part adds is its time (`cpu/phases.py`). One thread.

# %%
parts = phases.measure(isa, length, d)
whole = sum(parts.values())
share = {name: 100 * t / whole for name, t in parts.items()}
table(["part", "ms", "share"], [[name, 1e3 * t, f"{share[name]:.1f} %"] for name, t in parts.items()])
products = work / (parts["scores"] + parts["values"])
print(f"the two products alone: {products / 1e9:.0f} GOP/s, {100 * products / peak.int8:.0f} % of the peak")
print(f"everything: {work / whole / 1e9:.0f} GOP/s, {100 * work / whole / peak.int8:.0f} %")

# %% [markdown]
# ## Three documents' answers to the same question
#
# How much of attention is softmax?
#
# * The status document measured 63.6 %: GEMM 11.840 ms, softmax 20.697 ms (L = 4096, D = 128, A64FX, unfused).
# * *Fused FlashAttention V2* says 3 %, at 810 million elements per second. Its table gives the products: Q.K^T 4.3 G
#   operations at 2900 GOPS, P.V 4.3 G at 1850 GFLOP/s.
#
# **Exercise 2.** Work out the second table with its own numbers: how many ms does softmax take for 4096 x 4096 elements, and what
# per cent of the three parts is that?

# %% tags=["model"] jupyter={"source_hidden": true}
def from_the_table():
    softmax, scores, values = 1e3 * 4096**2 / 810e6, 1e3 * 4.3e9 / 2900e9, 1e3 * 4.3e9 / 1850e9
    return softmax, 100 * softmax / (softmax + scores + values)

# %% tags=["exercise"]
answer = ..., ...
check("softmax in the document's table, ms and per cent", answer, from_the_table(), within=0.01)

# %% tags=["solution"] jupyter={"source_hidden": true}
softmax_ms = 4096 * 4096 / 810e6 * 1000
products_ms = 4.3 / 2900 * 1000 + 4.3 / 1850 * 1000
answer = softmax_ms, 100 * softmax_ms / (softmax_ms + products_ms)
check("softmax in the document's table, ms and per cent", answer, from_the_table(), within=0.01)

# %% [markdown]
# So the table that says 3 % says 84.5 %: the softmax rate of the unfused code (20.7 ms, the same number) stands beside
# products that are faster than the machine allows. One A64FX core does 512 GOPS in INT8 and 128 GFLOP/s in float32.
#
# **Exercise 3.** "Softmax overhead reduced from 63.6 % to 3 % (21x faster)". A share is not a time. With the products' time
# unchanged, how many times faster must softmax be for its share to fall from 63.6 % to 3 %?

# %% tags=["model"] jupyter={"source_hidden": true}
from_the_shares = (0.636 / 0.364) / (0.03 / 0.97)

# %% tags=["exercise"]
times_faster = ...
check("softmax must be faster by", times_faster, from_the_shares, within=0.01)

# %% tags=["solution"] jupyter={"source_hidden": true}
before = 0.636 / (1 - 0.636)                               # in units of the products' time
after = 0.03 / (1 - 0.03)
times_faster = before / after
check("softmax must be faster by", times_faster, from_the_shares, within=0.01)

# %%
claims = {
    "Q.K^T, one core, GOPS": (2900, 2 * 64 * 2 * 2.0, "2 pipes x 64 products x 2 operations x 2.0 GHz"),
    "P.V, one core, GFLOP/s": (1850, 2 * 16 * 2 * 2.0, "2 pipes x 16 lanes x 2 operations x 2.0 GHz"),
}
table(["claimed", "figure", "peak of one core", "times the peak", "how the peak comes about"],
      [[name, figure_, top, figure_ / top, why] for name, (figure_, top, why) in claims.items()])
rate = 2 / (1 / 2900 + 1 / 1850)
print(f'"4650 GFLOPS effective" adds two rates of phases that run one after the other; together they would be {rate:.0f}')
assert all(figure_ > top for figure_, top, _ in claims.values()) and round(rate) == 2259

# %% [markdown]
# ## The status document's pipeline, run here
#
# Its 63.6 % belong to a pipeline that writes all of S to memory and reads it in three passes (its total ends there, without P.V).
# `unfused_times` runs the same on this machine, and the document's own proposals for it: the maximum from the product, which
# leaves two passes; 48 rows of S at a time, which stay in the second-level cache ("strip"); tiles of S by way of two buffers.

# %%
times = unfused_times.measure(length, d)
table(["pipeline", "part", "ms", "share"],
      [[c.pipeline, c.part, 1e3 * c.seconds, f"{100 * c.share:.1f} %"] for c in times.components])
print(f"softmax takes {100 * times.softmax:.1f} % of three passes (document: 63.6 %), "
      f"{times.elements / 1e6:.0f} million scores per second (document: 810)")
for words, rate in (("S written to memory", times.gemm), ("S in the second-level cache", times.gemm_in_l2),
                    ("tiles through one buffer", times.staged), ("tiles through two", times.double_buffered)):
    print(f"product, {words:27s} {rate / 1e9:4.0f} GOP/s, {100 * rate / times.peak:.0f} % of the peak of the dot instruction")
grouped = unfused_times.measure_gqa()
print(f"GQA, 8 query heads on 2 of K: packing K once {1e6 * grouped['packing shared']:.0f} us, for every head "
      f"{1e6 * grouped['packing repeated']:.0f} us; the products take {1e3 * grouped['product shared']:.1f} and "
      f"{1e3 * grouped['product repeated']:.1f} ms")

# %% [markdown]
# Most of the time goes to softmax, on another machine and with other code: that is the pipeline's doing. Read the proposals off
# the table. A buffer is one more copy of S, and a second buffer hardly hides it. Reusing K saves packing; the products are as many
# as before, and take no less time.
# Two passes and strips save trips of S, not one exponential. What is left of softmax has to get cheaper itself, and P.V has to
# take its result where it lies: that is the fused kernel at the top.
#
# ## The picture
#
# Shares of the time: what the documents say, what their numbers give, and this kernel on this machine.

# %%
softmax = share["softmax"] + share["rescaling"]
answers = {"status document, unfused (measured)": (36.4, 63.6, 0),
           "the same pipeline, here": (100 - 100 * times.softmax, 100 * times.softmax, 0),
           "fused V2, as printed": (97, 3, 0), "fused V2, from its own rates": (15.5, 84.5, 0),
           f"this kernel, {isa}": (share["scores"] + share["values"], softmax, share["packing"])}
fig, axes = figure(2, width=11, height=3.4, width_ratios=(1.25, 1))
for n, shares in enumerate(answers.values()):
    left = 0.0
    for x, colour, hatch, name in zip(shares, ("#0072B2", "#E69F00", "white"), ("", "//", ".."),
                                      ("products", "softmax", "packing"), strict=True):
        axes[0].barh(n, x, left=left, color=colour, edgecolor="black", hatch=hatch, label=None if n else name)
        if x > 2.5:
            axes[0].text(left + x / 2, n, f"{x:.0f} %", ha="center", va="center", fontsize=9,
                         bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
        left += x
axes[0].set(yticks=range(len(answers)), yticklabels=list(answers), xlabel="per cent of the time", xlim=(0, 100),
            ylim=(len(answers) - 0.5, -1))
axes[0].legend(loc="upper center", ncols=3, fontsize=8)
axes[1].set_title(f"L={length} D={d}, one core")
bars(axes[1], {"unfused": work / seconds["unfused"] / 1e9, "fused": work / seconds["fused"] / 1e9,
               "products alone": products / 1e9}, "GOP/s", ("measured INT8 peak", peak.int8 / 1e9), digits=0)

# %% [markdown]
# ## What remains to the ceiling
#
# The two products run at what their register tile reaches (chapter 06), minus their epilogues: scores are scaled and rounded,
# sums added to O. Softmax costs what it costs, because it follows the products instead of running beside them; overlapping
# them within one core would have to be written by hand, instruction by instruction. Fusion's own gain on this machine is the
# difference of the first two bars. The document's 21 was a quotient of two shares.

# %%
gain = seconds["unfused"] / seconds["fused"]
print(f"fused is {gain:.2f} times as fast as unfused, with the same register tiles")
assert abs(from_the_table()[1] - 84.5) < 0.1
assert ladder_int8.KEY_BLOCK == 128
error = np.abs(fused() - numflash.attention(query, key, value, impl="reference")).mean()
assert error < 1e-3
