# %% [markdown]
# # 07. Fusing it
#
# After this chapter you can
#
# * read the fused loop of the shipped kernel, and name the four parts of each turn,
# * say what fusion changes (where scores are stored, and for how long) and what it does not (the operations and the bits),
# * read the gain of each step, from naive attention to threads and causal masks, in one table.

# %% [markdown] tags=["map"]
# > **The idea:** Do all four steps for one tile before the next, so that its scores never leave the cache.
# >
# > **Where you are:** CPU path, stop 6 of 8: [00](00_memory.ipynb) → [01](01_online_softmax.ipynb) → [02](02_tiling.ipynb) → [03](03_int8.ipynb) → [06](06_register_tile.ipynb) → **07** → [09](09_threads_causal_gqa.ipynb) → [24](24_capstone.ipynb)
# >
# > **Time:** 25 minutes to read, 15 for the exercises. **Before it:** [01](01_online_softmax.ipynb), [02](02_tiling.ipynb), [06](06_register_tile.ipynb).
# >
# > **Terms:** [fusion](../docs/glossary.md#fusion), [rung](../docs/glossary.md#rung), [tile](../docs/glossary.md#tile), [octave](../docs/glossary.md#octave).
# >
# > **Papers:** [FlashAttention](https://arxiv.org/abs/2205.14135), [FlashAttention-2](https://arxiv.org/abs/2307.08691).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import inspect

import numpy as np

import numflash
from numflash.course import answer_of, bars, check, drawings, figure, roof, rounds, table
from numflash.cpu.int8 import flash_int8
from numflash.cpu.study import ladder, ladder_int8
from numflash.jit.threads import most
from numflash.measure import phases
from numflash.tiling import tiling

isa = ladder.vector_isa()
length, d = 4096, 128
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((length, d), np.float32) for _ in range(3))
peak = roof(isa=isa)
work = 4.0 * length * length * d
print(peak)

# %% [markdown]
# ## Four parts
#
# The integer kernel does the same as your tiled attention of chapter 01, in four parts for each tile of queries and block of 128 keys:
#
# 1. **scores**: Q K^T by the register tile of chapter 06, scaled to octaves,
# 2. **softmax**: the largest score of each row in this block, the weights below it as bytes, their sum,
# 3. **merge**: where the running maximum m grows, l and O shrink (chapter 01's `shrink`),
# 4. **values**: O += P V, again by a register tile.
#
# A program can run them in two orders. *Unfused*: all scores of the whole problem, then all softmax, then all merges and values. *Fused*: all
# four for one block of keys, then the next block. Step through both. A block that holds scores or weights needs memory for them: unfused,
# as many blocks as there are; fused, one.

# %% tags=["drawing"]
drawings.fused_against_unfused()

# %% [markdown]
# Here are both, from the course's ladder (rungs 5 and 6), on the very same parts. First unfused: three passes over everything.

# %%
def shown(function, begin, end):
    """The lines of a function from the one with `begin` up to the one with `end`."""
    lines = inspect.getsource(function).splitlines()
    first = next(n for n, line in enumerate(lines) if begin in line)
    last = next(n for n, line in enumerate(lines) if end in line and n > first)
    print("\n".join(lines[first:last + 1]))


shown(ladder_int8.make_unfused, "tiles, blocks = x.shape", "values(p[tile, b]")

# %% [markdown]
# Now fused. Only the order of the loops differs: the loop over key blocks `c` is outside, the four parts are inside. `x` and `p` hold the
# scores and weights of one tile and one block, and every turn uses them again. The other names, here and above:
#
# * `q` with `cq`, `keys`, `v`: Q with the scales of its rows, K with its scales, V; `row` is the first row of the tile, `c` the first key
#   of the block,
# * `octave`: the maximum of each row in this block, rounded up to a whole number. Then every shrink is a power of two, and multiplying
#   by a power of two rounds nothing. `octave_q8` is the same number as the integer softmax takes it,
# * `total`: the sum of the weights of each row in this block (`sums` is scratch memory for it),
# * `m`, `l` and `o`: the state of chapter 01; `scale` is 2**(octave - m), by which the sums of this block are multiplied,
# * `HIDDEN`: a score whose weight is 0 (of a key after the end, or hidden by a mask); `UNSEEN`: the m of a row that has attended to no
#   key.

# %%
shown(ladder_int8.make_tile, "for c in range", "values(p, v, c")

# %% [markdown]
# And the kernel that ships, `numflash/cpu/int8/flash_int8.py`. The four parts are five calls: `block_scores` (1), `weigh` (2),
# `grow_rows` and `add_sums` (3), `add_values` (4). (`grow_rows` raises m, shrinks l and O, and computes `scale`. It comes before `weigh`,
# which takes this `scale`.) The shipped kernel has more options: masks, score functions, padding. Find the same calls in it; skip the
# rest.

# %%
calls = ("block_scores(job", "grow_rows(state", "weigh(scratch", "add_sums(total", "add_values(p")
print("\n".join(line.strip() for line in inspect.getsource(flash_int8.make_run_tiles).splitlines() if any(call in line for call in calls)))

# %% [markdown]
# ## Write it
#
# `m` is a model of the machine. `m.scores(b)`, `m.softmax(b)`, `m.merge(b)` and `m.values(b)` do the four parts for key block `b`; the model
# checks that each part of a block comes after the one before, and counts how many blocks hold scores or weights at the same time.
#
# **Exercise 1.** Write the fused order for `blocks` key blocks, so that never more than one block of scores is alive.

# %% tags=["exercise"]
def fused_order(m, blocks):
    ...                                                    # your loop


check("07.1", fused_order)

# %% [markdown]
# **Exercise 2.** A score takes 2 bytes (int16). How many bytes do all scores take unfused at L = 8192, and how many times smaller are those of
# one tile of 48 rows x 128 keys?

# %% tags=["exercise"]
answer = ..., ...                                          # (bytes, times smaller)
check("07.2", answer)

# %% [markdown]
# ## What fusion gains
#
# The operations and the bits are the same. What differs is for how long a score is stored, and so in which memory.

# %%
unfused, fused = (ladder.prepare(name, query, key, value) for name in ("unfused", "fused"))
assert np.array_equal(unfused(), fused())
seconds = {"unfused": rounds(unfused, 0.2), "fused": rounds(fused, 0.2)}
room = {name: 3 * (length**2 if name == "unfused" else tiling(isa).block_q * 128) / 2**20 for name in seconds}
table(["kernel", "ms", "GOP/s", "share of the INT8 peak", "MiB of scores and weights"],
      [[name, 1e3 * t, work / t / 1e9, f"{100 * work / t / peak.int8:.0f} %", room[name]] for name, t in seconds.items()])
print(f"unfused takes {seconds['unfused'] / seconds['fused']:.2f} times as long as fused")

# %% [markdown]
# The gain is what the trips of scores and weights cost on this machine: 3 bytes for each of L x L scores are written to a larger, slower
# cache or to memory, and read again. On a GPU the gain is far larger: its arithmetic is thousands of times as fast as that of one CPU
# core, its memory only one or two hundred times (chapter 00's table).
#
# ## Where the time goes now
#
# A clock inside the inner loop would disturb what it measures. So the fused kernel is built four times, with one part more each time; what a
# part adds is its time (`numflash/measure/phases.py`). One thread. (The sum can be less than the time of `fused` above: that was the median of
# complete calls of the course's own loop, which also allocate the output and divide it by l at the end. This is packing and
# the shipped kernel's loop alone, each the fastest of some calls.)

# %%
parts = {name: float(np.nan_to_num(t)) for name, t in phases.measure(isa, length, d).items()}
whole = parts.pop("sum")
table(["part", "ms", "share"], [[name, 1e3 * t, f"{100 * t / whole:.1f} %"] for name, t in parts.items()])
products = work / (parts["scores"] + parts["values"])
print(f"the two products alone: {products / 1e9:.0f} GOP/s, {100 * products / peak.int8:.0f} % of the peak")
print(f"everything: {work / whole / 1e9:.0f} GOP/s, {100 * work / whole / peak.int8:.0f} %")

# %% [markdown]
# The two products run at the speed of their register tile (chapter 06), less the time for scaling the scores and adding to O. The time of
# the softmax is added to theirs, because on one core it runs after the products and not beside them.
#
# **Exercise 3.** If softmax took half of its time, how many times faster would the entire kernel be? Write it for any dictionary of parts like
# `parts`, which has the entry "softmax". (The kernel gains less than its part.)

# %% tags=["exercise"]
def gain_of_half_a_softmax(parts):
    return ...


check("07.3", gain_of_half_a_softmax)

# %% [markdown]
# ## The ladder as one table
#
# Eight rungs, one change each, but for rung 5, which makes two: numbers become bytes, and sums stay in registers. (It also goes back to
# all scores in memory, so that rung 6 shows what fusion gains by itself.) `climb` runs every rung on the same numbers, compares it with
# float64 first, then times it. The float rungs are held against the float32 peak, the integer rungs against the INT8 peak of as many
# threads. The table is for L = 1024, so that the slow rungs are done quickly; longer sequences favour the later rungs further.

# %%
n = 1024
workers = min(2, most())
climbed = [(rung, t) for rung, t, _ in ladder.climb(n, d, workers, repeats=9)]
changes = {"naive": "the definition", "online": "one pass, no matrix of scores", "tiled": "48 rows share each block of 64 keys",
           "packed": "K transposed by block: vectors hold keys", "unfused": f"bytes, and register tiles of {tiling(isa).mr} x {tiling(isa).nv}",
           "fused": "four parts per block: scores stay in the cache", "parallel": ("one thread takes", "two threads take")[workers - 1] + " tiles",
           "causal": "tiles above the diagonal are skipped"}
lines, before = [], None
for rung, t in climbed:
    flops = 4.0 * n * n * d * (0.5 * (n + 1) / n if rung.name == "causal" else 1)
    top = peak.float32 if rung.precision == "float32" else roof(workers if rung.number >= 7 else 1, isa).int8
    lines.append([rung.number, rung.name, changes[rung.name], 1e3 * t, f"{before / t:.2f}" if before else "",
                  f"{climbed[0][1] / t:.1f}", f"{100 * flops / t / top:.0f} %"])
    before = t
table(["rung", "name", "change", "ms", "times the previous", "times naive", "share of its peak"], lines)

# %% [markdown]
# Read the column "times the previous". Tiling alone gains little on this core, because memory was not the limit (chapters 00 and 02). The
# large step is rung 5: bytes instead of floats, and sums that stay in registers. A kernel between rungs 4 and 5 shows what each of the
# two gains: the shipped float32 kernel (`numflash.attention`) has register tiles but no bytes, though it is fused too. On the same kind
# of machine, timed in turns with rungs 4 and 5 (2026-11-23, L = 1024, one thread, medians of three runs): rung 4 takes 14.5 ms, the
# float32 kernel 3.8, rung 5 1.56. So register tiles give a factor of about 3.8, and bytes about 2.4. Fusion keeps the gain of rung 5 when
# the scores no longer fit the second-level cache (3 MiB at L = 1024, 48 MiB at 4096). The share of rung 8 counts visible work only.
#
# The same step can be predicted for a machine that is not here. The package has a model of the A64FX, the processor of the Fugaku computer
# (`numflash estimate unfused` and `numflash estimate attention`; nothing was measured there). Unfused, the model's product Q K^T loses
# speed as soon as its scores go to memory and back, and softmax, which reads and writes them again, takes most of the time. Fused, scores
# and weights stay in the first-level cache, so the share of the peak is the same at every L.
#
# ## The picture

# %%
fig, axes = figure(2, width=11, height=3.4, width_ratios=(1.1, 1))
left = 0.0
for (name, t), colour, hatch in zip(parts.items(), ("#0072B2", "#E69F00", "#F0E442", "#56B4E9", "white"), ("", "//", "..", "\\\\", "xx"), strict=True):
    axes[0].barh(0, 1e3 * t, left=left, color=colour, edgecolor="black", hatch=hatch, label=f"{name}: {1e3 * t:.1f} ms")
    left += 1e3 * t
axes[0].set(yticks=(), xlabel="ms", title=f"the fused kernel, L={length} D={d}, one core", ylim=(-0.6, 2.2))
axes[0].legend(loc="upper left", ncols=2, fontsize=9)
axes[1].set_title(f"L={length} D={d}, one core")
bars(axes[1], {"unfused": work / seconds["unfused"] / 1e9, "fused": work / seconds["fused"] / 1e9,
               "products alone": products / 1e9}, "GOP/s", ("INT8 peak", peak.int8 / 1e9), digits=0)

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert ladder_int8.KEY_BLOCK == 128
error = np.abs(fused() - numflash.attention(query, key, value, impl="reference")).mean()
assert error < 1e-3
assert answer_of("07.3")(parts) >= 1 and room["unfused"] > 1000 * room["fused"]

# %% [markdown]
# **What you can do now**
#
# * find the four parts of the fused loop in the shipped kernel,
# * say what fusion changes (where scores are stored) and what it does not (operations and bits),
# * predict the gain of the whole from the gain of a part.
#
# **Next:** [09](09_threads_causal_gqa.ipynb). Query tiles are independent tasks; start the longest first.
