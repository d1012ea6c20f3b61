# %% [markdown]
# # 02. Tiling and caches
#
# After this chapter you can
#
# * add up the bytes that a tile needs,
# * predict from them what a cache of a given size will do,
# * place kernels in a picture with the two limits of your machine, its roofline.

# %% [markdown] tags=["map"]
# > **The idea:** Add up what the inner loop touches: the largest tile that fits the cache moves the fewest bytes.
# >
# > **Where you are:** CPU path, stop 3 of 8: [00](00_memory.ipynb) → [01](01_online_softmax.ipynb) → **02** → [03](03_int8.ipynb) → [06](06_register_tile.ipynb) → [07](07_fused.ipynb) → [09](09_threads_causal_gqa.ipynb) → [24](24_capstone.ipynb)
# >
# > **Time:** 25 minutes to read, 35 for the exercises. **Before it:** [00](00_memory.ipynb), [01](01_online_softmax.ipynb).
# >
# > **Terms:** [working set](../docs/glossary.md#working-set), [cache line](../docs/glossary.md#cache-line), [cache levels](../docs/glossary.md#cache-levels), [roofline](../docs/glossary.md#roofline), [gflops](../docs/glossary.md#gflops), [tile](../docs/glossary.md#tile).
# >
# > **Papers:** [Roofline](https://doi.org/10.1145/1498765.1498785).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import numpy as np

from numflash.course import check, drawings, figure, roof, rounds, table, yours_or
from numflash.course.tracer import trace
from numflash.cpu.study import ladder, ladder_float
from numflash.jit.compiler import kernel
from numflash.tiling import TILINGS, Caches

caches = Caches.of_this_machine()
print({level: f"{size / 1024:.0f} KiB" for level, size in caches.levels()}, f"lines of {caches.line} bytes,", caches.source)

# %% [markdown]
# ## Adding up
#
# The inner loop of fused attention uses a tile of Q, a block of K and one of V, the scores between them, and the rows of O to which the
# values are added. The sum of their bytes is the *working set*. It should fit a cache that delivers bytes as fast as the loop loads them.
# In this package the block sizes of a kernel are a table, a *tiling*, which can print its parts. The example is one for the A64FX, the
# processor of the supercomputer Fugaku. The names of its parts are those of chapter 00.

# %%
example = TILINGS["a64fx-fused-48x64"]               # 48 query rows x 64 keys
parts = example.explain(128).splitlines()
print("\n".join(line for line in parts if " B = " in line))

# %% [markdown]
# (O and S are kept in 4 bytes a number, Q, K and V in one. "state" is four float32 numbers per row, m and l among them.)
#
# **Exercise 1.** How many KiB does the working set take if a block has 96 keys instead of 64? The 48 rows and D = 128 stay. Decide for each
# of the six parts whether it grows.

# %% tags=["exercise"]
kibibytes = ...
check("02.1", kibibytes)

# %% [markdown]
# The 48 x 64 tile takes 58.75 KiB. It fits the 64 KiB of that processor's first-level cache, with 8 % to spare; with 96 keys it does not.
# It is easy to forget the scores and the state: Q, K, V and O alone are 46 KiB.
#
# The same for the shipped kernel on this machine's vector registers. (Where the machine has AMX, calls use another kernel; the course
# stays with vectors: chapter 06.) It works on integers of 8 bits (chapter 03 says how a float becomes one), so most numbers take one
# byte. It also has a few small arrays that the exercise did not have: scales, octaves, sums. Here only the total counts, and which cache
# it fits. L1, L2 and L3 are the caches of the first, second and third level: each is larger and slower than the one before. (In a virtual
# machine the system names the L3 of the host, which other machines use as well.)

# %%
isa = ladder.vector_isa()
mine = TILINGS[f"{isa}-int8"]
print(mine.explain(128))

# %% [markdown]
# Where that is more than the first-level cache, K and V come from the second level again for every tile; each byte that comes is used by
# all rows of the tile. A working set tells which cache a kernel reads from, not how fast the kernel is; chapter 07 measures that.
#
# ## What a cache does with it
#
# The tracer of chapter 00 has a cache of any size. Here is the float kernel `tiled` with three tiles, its traffic against the size of the
# cache. While the tile fits, every block of K and V is read from memory once per tile. When it does not fit, lines leave before they are
# used again, and come from memory again.

# %%
F = np.float32
length, d = 96, 8
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((length, d), F) for _ in range(3))
out = np.empty_like(query)


def moved(block_q, block_k, cache):
    tile = np.empty((block_q, block_k), F), np.empty(block_q, F), np.empty(block_q, F)
    return trace(ladder_float.make_tiled(block_q, block_k), query, key, value, F(0.5), *tile, out, cache=cache).moved


def working_set(block_q, block_k, d):
    """Bytes of Q, O, K, V, S and the rows' m and l in float32."""
    return 4 * (2 * block_q * d + 2 * block_k * d + block_q * block_k + 2 * block_q)


sizes = [512, 1024, 2048, 3072, 6144]
tiles = [(1, 1), (8, 8), (24, 16)]
swept = {tile: [moved(*tile, cache) for cache in sizes] for tile in tiles}
table(["tile", "working set", *(f"cache {n} B" for n in sizes)],
      [[f"{q} x {k}", working_set(q, k, d), *swept[q, k]] for q, k in tiles])

# %% [markdown]
# The tile of 1 x 1 has the smallest working set. From 1024 B on it also moves the most. A tile that is far too large for the cache moves
# more still (24 x 16 at 512 B). A larger tile moves less *as soon as it fits*. The largest tile that fits moves the fewest bytes: it
# visits K and V least often. Whether it is also the fastest, you measure (below).
#
# **Exercise 2.** Write the largest `block_q`, a multiple of 6, whose working set (as `working_set` above counts it) with `block_k` keys
# fits in a cache of `cache` bytes. (Why 6? The kernels compute 6 rows at a time in registers: chapter 06.)

# %% tags=["exercise"]
def largest_block_q(block_k, d, cache):
    return ...


check("02.2", largest_block_q)

# %% [markdown]
# Move the slider: the working set of tiles with 64 keys of D = 64 against this machine's first-level cache. (In Jupyter, change D, the
# number of keys and the cache too. Which of the three changes the largest tile that fits the most?)

# %%
drawings.tile_against_cache(64, 64, caches.l1 // 1024, (6, 12, 24, 48, 96, 192))

# %% [markdown]
# ## Measured
#
# The same kernel, compiled, at L = 2048, D = 64, with tiles from a fraction of the first-level cache to well beyond it:

# %%
length, d = 2048, 64
query, key, value = (rng.standard_normal((length, d), F) for _ in range(3))
out, scale = np.empty_like(query), F(np.log2(np.e) / np.sqrt(d))
rows = []
for block_q, block_k in ((6, 8), (24, 32), (48, 64), (192, 256), (960, 1024)):
    tile = np.empty((block_q, block_k), F), np.empty(block_q, F), np.empty(block_q, F)
    run = ladder_float.make_tiled(block_q, block_k)
    seconds = rounds(lambda run=run, tile=tile: run(query, key, value, scale, *tile, out))
    need = working_set(block_q, block_k, d)
    rows.append([f"{block_q} x {block_k}", f"{need / 1024:.0f} KiB", f"{100 * need / caches.l1:.0f} %", 1e3 * seconds,
                 4 * length * length * d / seconds / 1e9])
table(["tile", "working set", "of the first-level cache", "ms", "GFLOP/s"], rows)

# %% [markdown]
# On the machine of this page the times do not follow the traffic. The loop is so slow that the caches deliver fast enough, and fewer bytes
# save no time. K and V take 1 MiB together at this size. Where a cache of the second or third level holds them, no tile reads them from
# memory. Other differences remain, for example how often the inner loops start.
#
# So why count bytes at all? All rows of the table are far below the float32 peak, so something holds these loops back, and the roofline below
# tells whether it is memory. Chapters 06 and 07 make the arithmetic about twenty times as fast. Then the bytes do decide: chapter 07 measures
# what it costs to send the scores through memory.
#
# ## The roofline
#
# A kernel that does `i` operations for every byte from memory cannot be faster than `i` times the memory's bytes per second,
# nor than the arithmetic peak. Both are measured here, by loops that do nothing else.

# %%
peak = roof(isa=isa)
print(peak)

# %% [markdown]
# **Exercise 3.** From how many float32 operations per byte on is arithmetic, not memory, the limit? Use `peak.float32` and
# `peak.read`.

# %% tags=["exercise"]
ridge = ...
check("02.3", ridge, peak)

# %% [markdown]
# Now the rungs of the ladder under this roof. `packed` is `tiled` with K stored in another order, so that one instruction works on a
# vector of keys at once (chapter 06). `fused` is the integer kernel that chapters 06 and 07 build; it is drawn here to show how far there is to go.
# (Its error is larger because it rounds all numbers to bytes; chapter 03 says what that costs.)
#
# Bytes from memory, by chapter 00: naive moves its L x L scores five times (4 bytes each); `online` reads K and V once per
# row, `tiled` and `packed` once per 48 rows, if they do not fit a cache at all; the integer kernel the same with a byte per
# number. (In truth the second or third cache holds K and V of this size. The intensities are what they would be if nothing but
# one tile were cached.)

# %%
n, d = 4096, 64
work = 4.0 * n * n * d
kv = 8.0 * n * n * d                                       # K and V once per row, float32
intensity = {"naive": work / (5 * 4.0 * n * n), "online": work / kv, "tiled": work / (kv / 48), "packed": work / (kv / 48),
             "fused": work / (kv / 4 / mine.block_q)}
climbed = {rung.name: (seconds, error) for rung, seconds, error in ladder.climb(n, d, repeats=3) if rung.name in intensity}
top = {name: peak.int8 if name == "fused" else peak.float32 for name in climbed}
table(["rung", "operations per byte", "GOP/s", "share of its peak", "relative L1 error"],
      [[name, intensity[name], work / seconds / 1e9, f"{100 * work / seconds / top[name]:.0f} %", error]
       for name, (seconds, error) in climbed.items()])

# %%
fig, ax = figure(width=9, height=4.4)
x = np.logspace(-1, 3, 200)
for name, flat, dash in (("INT8", peak.int8, "-."), ("float32", peak.float32, "-")):
    ax.plot(x, np.minimum(flat, x * peak.read) / 1e9, color="black", linestyle=dash, marker="")
    ax.text(x[-1], flat / 1e9 * 1.06, f"measured {name} peak, {flat / 1e9:.0f} GOP/s", ha="right", fontsize=9)
ax.text(1.2, 0.75 * peak.read / 1e9, f"measured memory read, {peak.read / 1e9:.0f} GB/s", rotation=31, fontsize=9)
places = {"naive": (-38, -3), "tiled": (8, -14), "packed": (8, 6), "fused": (8, -14)}        # of the labels, in points
for (name, (seconds, _)), marker in zip(climbed.items(), "os^DP", strict=False):
    rate = work / seconds / 1e9
    ax.plot(intensity[name], rate, linestyle="", marker=marker, markersize=9, color="#D55E00" if name == "fused" else "#0072B2")
    ax.annotate(name, (intensity[name], rate), textcoords="offset points", xytext=places.get(name, (8, 8)), fontsize=9)
_ = ax.set(xscale="log", yscale="log", xlabel="operations per byte from memory", ylabel="GOP/s, one core",
           ylim=(1, 2.2 * peak.int8 / 1e9), title=f"the ladder under this machine's roof, L={n} D={d}")

# %% [markdown]
# ## What the picture says, and what it does not
#
# * `naive` may be as fast as `tiled`: the caches deliver the bytes of both fast enough.
# * `online` is above the slanted roof or close to it: K and V come from a cache, not from memory.
# * From `tiled` on, memory is not the limit: the points are to the right of where the roofs meet, and still far below the flat one.
#
# The roofline says that something *else* limits them, but not what. It is inside the core: every multiply-add of these loops loads an
# operand and the sum that it adds to. That is the subject of chapters 05 and 06. The point of the fused integer kernel shows what they
# gain.
#
# ## A kernel of your own
#
# **Exercise 4.** In chapter 01 you wrote tiled attention in NumPy. Write it as a kernel that Numba compiles (chapter 00 says what matters
# there): loops over single numbers, tiles of 24 rows and 32 keys. `scale` contains log2(e), so weights are powers of two. Store the
# result in `out` (L, D). Scratch arrays like `np.empty((24, 32), np.float32)` are made once, before the loops. The check compares the
# numbers with float64 for several sizes, and asks whether the function is compiled. (Compiled code does not test its indices: one beyond
# the end of an array reads or overwrites other memory. `compiled_tiled.py_func(...)` runs the function in the interpreter, which raises
# an IndexError there.)

# %% tags=["exercise"]
@kernel
def compiled_tiled(q, k, v, scale, out):
    ...                                                    # your loops


check("02.4", compiled_tiled)

# %% [markdown]
# The same function, compiled and in the interpreter, on 96 queries and keys of 16 channels:

# %%
yours, few = yours_or("02.4", compiled_tiled), [rng.standard_normal((96, 16), F) for _ in range(3)]
arguments = (*few, F(0.25), np.empty((96, 16), F))
took = {name: rounds(lambda run=run: run(*arguments), 0) for name, run in (("compiled", yours), ("interpreted", yours.py_func))}
table(["", "ms"], [[name, 1e3 * seconds] for name, seconds in took.items()])
print(f"compiled, it is {took['interpreted'] / took['compiled']:.0f} times as fast")

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert sum(example.working_set(128).values()) == 58.75 * 1024
assert swept[24, 16][-1] < swept[8, 8][-1] < swept[1, 1][-1]                # large cache: the large tile moves least
assert swept[24, 16][0] > swept[8, 8][0]                                    # small cache: it does not fit, and moves more
assert all(error < 1e-4 for name, (_, error) in climbed.items() if name != "fused")
assert intensity["tiled"] > 40 * intensity["online"]

# %% [markdown]
# **What you can do now**
#
# * add up a working set, the scores and the state included,
# * choose the largest tile that fits a cache, and say what that does to the bytes,
# * read a roofline: which limit a kernel meets, and that it does not say why a kernel is below it.
#
# **Next:** [03](03_int8.ipynb). An 8-bit number costs half a step of error, and the largest entry sets the step.
