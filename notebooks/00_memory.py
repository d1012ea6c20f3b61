# %% [markdown]
# # 00. Attention and the memory it moves
#
# This course starts from nothing but NumPy. After this chapter you can
#
# * write attention down in four lines, and say what Q, K, S, P, V and O are,
# * say how many operations and bytes a size costs before you run it,
# * read a tiled attention loop line by line, and say why it moves several times fewer bytes than the definition.

# %% [markdown] tags=["map"]
# > **The idea:** The same arithmetic in another order moves several times fewer bytes.
# >
# > **Where you are:** CPU path, stop 1 of 8: **00** → [01](01_online_softmax.ipynb) → [02](02_tiling.ipynb) → [03](03_int8.ipynb) → [06](06_register_tile.ipynb) → [07](07_fused.ipynb) → [09](09_threads_causal_gqa.ipynb) → [24](24_capstone.ipynb)
# >
# > **Time:** 35 minutes to read, 10 for the exercises. **Before it:** NumPy.
# >
# > **Terms:** [head](../docs/glossary.md#head), [channel](../docs/glossary.md#channel), [score](../docs/glossary.md#score), [softmax](../docs/glossary.md#softmax), [kernel](../docs/glossary.md#kernel), [cache line](../docs/glossary.md#cache-line), [tile](../docs/glossary.md#tile), [rung](../docs/glossary.md#rung), [peak](../docs/glossary.md#peak).
# >
# > **Papers:** [Attention is all you need](https://arxiv.org/abs/1706.03762), [FlashAttention](https://arxiv.org/abs/2205.14135).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import inspect

import numpy as np

import numflash
from numflash.course import answer_of, bars, check, drawings, figure, roof, table
from numflash.course.tracer import trace
from numflash.cpu.study import ladder, ladder_float

# %% [markdown]
# ## The definition
#
# A language model turns each word (token) of a text into vectors. Attention lets every token look at the others. For this, each token
# has three vectors of D numbers: a *query* (what it looks for), a *key* (what it can be found by) and a *value* (what it gives).
#
# * **L** is the number of queries, **S** the number of keys (often the same tokens, so L = S). **D** is the length of the vectors,
#   typically 64 or 128. The D places of a vector are also called *channels*.
# * **Q** (L x D), **K** (S x D) and **V** (S x D) hold these vectors as rows.
# * The **score** S[i, j] is the dot product of query i and key j, divided by sqrt(D): how well the two fit. (By custom S is the name of
#   two things: of this matrix, and of the number of keys. "L x S" is a size, "softmax(S)" the matrix. In code the matrix is a small `s`.)
# * **P** = softmax(S), row by row: each score becomes a weight exp(score), and the weights of a row are divided by their sum.
# * The output **O** (L x D) is P V: row i is the mean of all values, with the weights of row i.
#
# A model does this many times side by side with different vectors. One such attention is a **head**; a layer has 8 to 128 of them. In
# this course one head is nearly always enough.
#
# Pictures that move play by themselves. In Jupyter they have sliders as well: step through them, and change their sizes.

# %% tags=["drawing"]
drawings.shapes()

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
# (`numflash.attention(..., impl="reference")` is the package's own definition, in float64. The course compares every kernel with it.)
#
# Why is the maximum of each row subtracted? exp(100) does not fit in float32. Subtracting the same number from all scores of a row
# multiplies all its weights by the same factor, and the division by their sum cancels it. So the result is the same, and no weight is
# larger than 1.
#
# How much work is it? Q K^T needs L x S dot products of D multiplications and D additions; P V as many. Together 4 L S D operations.
# (Softmax adds a few for each score; with D = 64 or more they are a small part, and we leave them out.) With S = L, the inputs and the
# output are only 4 L D numbers. Between them is the matrix of L x S scores.
#
# **Exercise 1.** How many MiB (2**20 bytes) does the float32 score matrix of one head take at L = S = 4096?
#
# (Replace the `...` by your answer and run the cell. `check` says whether the answer is right, and gives a first hint if it is not.
# `hint("00.1")` in a cell of your own shows it again with the next one, `solution("00.1")` prints one way to do it.)

# %% tags=["exercise"]
mebibytes = ...
check("00.1", mebibytes)

# %% [markdown]
# ## Near memory and far memory
#
# A processor does not compute on memory directly. Between the two are **caches**: small, fast memories that keep what was used last.
# Data moves between memory and cache in pieces of 64 bytes, a **cache line**. When a number is needed whose line is not in the cache,
# the line must come from memory, and another line has to leave. So the same program can be fast or slow, depending on the *order* in
# which it touches its data.
#
# Let us count that. `ladder_float.naive` is the definition as a compiled kernel, one loop for each line above. It is the first **rung**
# of a ladder: the course climbs from it to a fast kernel, one change per rung.
#
# `@kernel` is Numba's compiler with this package's options: it turns a Python function of loops into machine code. What you need to know
# of it:
#
# * The first call compiles, which takes seconds. The calls after it run the machine code.
# * There is one machine code for each combination of argument types, so float32 and float64 arrays are compiled separately.
# * A loop over single numbers is fast. Each temporary array (as in `a + b` of two arrays) costs memory and time.
# * A literal like 0.5 is a float64 and turns what it meets into float64; `np.float32(0.5)` does not.
# * `.py_func` is the Python function itself, which we print. If you call it, it runs in the interpreter, where a mistake is easier to find.
# * `float_math=True` is an option: the compiler may add floats in another order than the one written. (Chapter 05 shows what it does with
#   that.)
#
# Four names occur in all float kernels: `F` is float32, `dot(a, b)` is the dot product of two rows, `add_scaled(o, w, v)` is o += w * v,
# and `multiply(x, f)` is x *= f.

# %%
print(inspect.getsource(ladder_float.naive.py_func))

# %% [markdown]
# (`exp2(x)` is 2**x, which processors compute more easily than e**x. The scores are multiplied by log2(e) beforehand, and
# 2**(x log2(e)) is e**x.)
#
# `trace` runs this very source in the interpreter, on arrays that count every access, with a model of a cache. Our arrays are small, so
# the model's cache is small too: 4 KiB, while K alone has 6 KiB. Real arrays and real caches are both several hundred times larger: K of
# 16,384 tokens with 64 channels has 4 MiB, and a core has a cache of 1 or 2 MiB to itself.
#
# In the table below
#
# * *loads* and *stores* count the numbers that the kernel reads and writes, near or far,
# * *lines* is how many cache lines an array has,
# * *from memory* is 64 bytes for every line that was not in the cache when it was needed,
# * *to memory* is 64 bytes for every line that was written back.

# %%
length, d = query.shape
scale = np.float32(np.log2(np.e) / np.sqrt(d))
out, scores = np.empty_like(query), np.empty((length, length), np.float32)
naive = trace(ladder_float.naive, query, key, value, scale, scores, out, cache=4096)
print(naive)
assert np.abs(out - exact).max() < 1e-6

# %% [markdown]
# Each row reads every key. When the next row starts, the first keys have left the cache again. So K and V come from memory once *per
# row*: 96 times. The matrix of scores (`s`) does not fit either. Each of its lines comes into the cache three times: to receive the scores,
# for the softmax, and for P V. (A line that is only written comes from memory too, because a store changes only a part of it.) Twice it
# goes back to memory changed: with the scores, then with the weights. That is five trips of the matrix.
#
# ## The tiled loop
#
# Now the third rung, `tiled`. It computes the same thing in another order: 16 query rows together, against 16 keys at a time. Such a
# piece of work is a **tile**. (The second rung, `online`, is chapter 01.) The picture compares the two orders on 8 queries and 8 keys.

# %% tags=["drawing"]
drawings.sweep()

# %%
print(inspect.getsource(ladder_float.make_tiled))
print(inspect.getsource(ladder_float.softmax_row))

# %% [markdown]
# `make_tiled(block_q, block_k)` returns the kernel for one tile size. (`@functools.cache` keeps it for the next call; `@inline` makes the
# compiler copy a small function into its caller.) Line by line:
#
# * `for row in range(0, L, block_q)`: take the next `block_q` query rows. `q_tile` and `o_tile` are views of these rows.
# * `m[i], l[i] = -inf, 0` and `o_tile = 0`: for each row, the largest score so far, the sum of its weights so far, and the weighted sum of
#   values so far. No key has been processed yet.
# * `for c in range(0, S, block_k)`: take the next `block_k` keys and values. *These* are what comes from memory.
# * First inner loop: the scores of the tile, `block_q x block_k` dot products, into the small array `s`. Every key that came serves all
#   `block_q` rows.
# * Second inner loop: `softmax_row` turns the scores of a row into weights, relative to the largest score *so far*. If that has grown,
#   what was summed before is multiplied by `shrink` first. Why this is right is the subject of chapter 01.
# * Third inner loop: add weight times value to the outputs.
# * After the last key, divide each output row by its sum of weights.
#
# There is no L x S matrix any more: `s` has the size of one tile and is used again for every tile. A block of K and V is used by all rows
# of the tile while it is in the cache. This is what FlashAttention does (Dao et al., 2022). The order here, queries outside and keys
# inside, with one division at the end, is that of FlashAttention-2 (Dao, 2023). The paper of 2022 has the keys outside, and rescales O in
# every block.

# %%
online = trace(ladder_float.online, query, key, value, scale, out, cache=4096)
assert np.abs(out - exact).max() < 1e-6
block = 16
tile = np.empty((block, block), np.float32), np.empty(block, np.float32), np.empty(block, np.float32)
tiled = trace(ladder_float.make_tiled(block, block), query, key, value, scale, *tile, out, cache=4096)
assert np.abs(out - exact).max() < 1e-6

runs = {"naive": naive, "online": online, "tiled": tiled}
table(["kernel", "loads", "stores", "K and V from memory", "scores moved", "all bytes moved"],
      [[name, r.total.loads, r.total.stores, (r.arrays["k"].misses + r.arrays["v"].misses) * r.line, r.bytes_of("s"), r.moved]
       for name, r in runs.items()])

# %% [markdown]
# All three load and store about as many elements, because the arithmetic is the same. What differs is how many come from memory.
# `online` saves the traffic of the matrix and none of K and V. `tiled` saves most of K and V too. It still moves some scores, since the tile of Q, K,
# V, S and O together (5 KiB) is a little larger than our 4 KiB cache; chapter 02 is about choosing it.
#
# **Exercise 2.** With tiles of `block_q` rows, each tile reads all of K and V once. Write the bytes of K and V that come from memory, for
# float32 and L = S. The traces above are the judge: with one row per tile (`online`), and with 16 (`tiled`).

# %% tags=["exercise"]
def bytes_of_k_and_v(length, d, block_q):
    return ...


check("00.2", bytes_of_k_and_v, online, tiled)

# %% [markdown]
# ## The picture
#
# Each dot is one line of K that comes from memory. Both pictures show the first 40,000 accesses. (A row of K is one line here: 16 numbers
# of 4 bytes.) Naive: all lines of K come again for every row. Tiled: 16 lines come, and are used for 16 rows before the next 16 come.

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
# ## When memory decides, and when it does not
#
# No order of work moves less than Q, K, V and O once each. A kernel needs at least the larger of two times:
#
# * the bytes that it moves, divided by what the memory delivers per second,
# * its operations, divided by what the processor computes per second.
#
# The larger one is called its limit. The naive kernel moves its score matrix five times, as counted above. A kernel like `tiled`, which
# does all steps for one tile before the next, is called *fused*; with a tile that fits the cache it does not move the matrix at all.
#
# The table below has these times for two machines: one core of this machine, with measured figures, and an H100 GPU, with the figures of
# its data sheet (989 TFLOP/s of float16 products, 3.35 TB/s; 2 bytes a number).
#
# (`roof()` measures the most that this machine can do, its *peaks*, with loops that do nothing else. 1 GFLOP/s is 10^9 operations on
# floats per second, 1 TFLOP/s a thousand times that; GOP/s counts operations on integers in the same way. The peak of INT8, integers of
# 8 bits, is used from chapter 06 on.)

# %%
peak = roof()
print(peak)
trips = naive.bytes_of("s") / scores.nbytes
print(f"the matrix of scores goes {trips:.0f} times between cache and memory")
rows = []
for n, head_dim in ((512, 64), (4096, 64), (4096, 128)):
    work, matrix, least = 4 * n * n * head_dim, trips * n * n, 4 * n * head_dim
    rows.append([f"L={n} D={head_dim}", 1e3 * work / peak.float32, 1e3 * 4 * matrix / peak.read, 1e3 * 4 * least / peak.read,
                 1e6 * work / 989e12, 1e6 * 2 * matrix / 3.35e12])
table(["one head", "arithmetic, ms", "scores to memory, ms", "Q, K, V, O once, ms", "H100: arithmetic, us", "H100: scores, us"], rows)

# %% [markdown]
# On the H100 the trips of the scores take 6 to 12 times as long as the arithmetic: with a naive kernel the arithmetic units wait most of
# the time. That is why FlashAttention was invented. (The scores of one head, 32 MiB at L = 4096, would fit the H100's second-level cache
# of 50 MB; those of the 32 heads of a layer do not.)
#
# One CPU core computes thousands of times more slowly than the H100, but its memory is only one or two hundred times slower. So its first two
# columns are of the same order (at D = 64 nearly equal on the machine of this page), and large caches hold a part of the matrix. (A
# processor has caches of several sizes, one behind the other; the 1 MiB of scores at L = 512 stays in the second or the third of them.) So
# on a CPU core tiling alone gains little; chapter 02 measures it. But once the arithmetic is made fast (chapters 05 to 07), memory would be
# the limit, and tiling prevents that.
#
# **Exercise 3.** A *fused* kernel moves Q, K, V and O once, and no scores. Its times are the columns "arithmetic" and "Q, K, V, O once":
# one grows with L squared, the other with L. So a short sequence is limited by memory, a long one by arithmetic. At which L are the two
# times equal on your machine (S = L, float32)? Use `peak.float32`, operations per second, and `peak.read`, bytes per second. The answer
# need not be a whole number.

# %% tags=["exercise"]
equal_at = ...
check("00.3", equal_at, peak)

# %% [markdown]
# This is the main idea of FlashAttention: the same sums, in an order that keeps in the cache what is needed next.
#
# The next cell checks the claims of this page. You can skip it.

# %%
for name in ("naive", "online", "tiled"):                  # the same kernels, compiled
    assert np.abs(ladder.prepare(name, query, key, value)() - exact).max() < 1e-6
assert naive.moved > online.moved > 3 * tiled.moved > 3 * once
assert naive.arrays["k"].misses == length * tiled.arrays["k"].misses // (length // block)
assert answer_of("00.2")(length, d, block) == (tiled.arrays["k"].misses + tiled.arrays["v"].misses) * tiled.line

# %% [markdown]
# **What you can do now**
#
# * say what Q, K, S, P, V and O are, and what a size costs: 4 L S D operations, L x S scores,
# * read the tiled loop: queries outside, keys inside, and a block of keys serves all rows of a tile,
# * say where tiling must help (a GPU, whose arithmetic is fast) and where it may not (one CPU core).
#
# **Next:** [01](01_online_softmax.ipynb). Softmax needs no second pass: keep a maximum and a sum, and shrink them when the maximum grows.
