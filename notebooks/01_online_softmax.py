# %% [markdown]
# # 01. Online softmax, and tiled attention written by you
#
# After this chapter you can
#
# * compute softmax over scores that arrive one by one or block by block, without a second pass,
# * say what the running state (m, l, O) means, and merge two of them,
# * write tiled attention in NumPy: the algorithm of FlashAttention.

# %% [markdown] tags=["map"]
# > **The idea:** Softmax needs no second pass: keep a maximum and a sum, and shrink them when the maximum grows.
# >
# > **Where you are:** CPU path, stop 2 of 8: [00](00_memory.ipynb) → **01** → [02](02_tiling.ipynb) → [03](03_int8.ipynb) → [06](06_register_tile.ipynb) → [07](07_fused.ipynb) → [09](09_threads_causal_gqa.ipynb) → [24](24_capstone.ipynb)
# >
# > **Time:** 20 minutes to read, 30 for the exercises. **Before it:** [00](00_memory.ipynb).
# >
# > **Terms:** [online softmax](../docs/glossary.md#online-softmax), [running state](../docs/glossary.md#running-state), [octave](../docs/glossary.md#octave), [tile](../docs/glossary.md#tile), [relative l1](../docs/glossary.md#relative-l1).
# >
# > **Papers:** [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867), [FlashAttention](https://arxiv.org/abs/2205.14135).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import inspect

import numpy as np

import numflash
from numflash.course import check, drawings, figure, table, yours_or
from numflash.cpu.study import ladder, ladder_float

# %% [markdown]
# ## One number at a time
#
# Softmax needs the maximum of a row before its first `exp`. So it seems to need a pass over all scores for the maximum, before the pass
# that adds up the weights. It does not (Milakov and Gimelshein, 2018). Keep two numbers while the scores arrive:
#
# * **m**, the largest score *so far*,
# * **l**, the sum of the weights so far, *relative to m*: the sum of 2**(score - m).
#
# When a larger score comes, m grows. Every weight that was added before was relative to the old m, so each of them is too large, all by
# the same factor: 2**(m_old - m_new), which is less than 1. Multiply l by this factor (it *shrinks*), and everything is relative to the
# new m. No weight has to be computed again, because all of them change by one common factor, and that can be taken out of the sum.
#
# We use powers of two instead of e throughout (chapter 00 said why). A distance of 1 between two scores is then a factor of two between
# their weights; it is called an **octave**.

# %%
scores = [1.0, 3.0, 2.0, 6.0, 5.0, 6.0]
m, l, rows = -np.inf, 0.0, []
for s in scores:
    m_new = max(m, s)
    shrink = 2.0 ** (m - m_new)                            # 0 for the first score: nothing was summed yet
    l = l * shrink + 2.0 ** (s - m_new)
    m = m_new
    rows.append([s, m, shrink, l])
table(["score", "m", "shrink", "l"], rows)
assert l == sum(2.0 ** (s - max(scores)) for s in scores)

# %% [markdown]
# The same, step by step. The dashed line is m. When it rises, all blue weights shrink together. (With the sliders: at which order of the
# scores does nothing ever shrink? And what changes if two or three scores come at a time?)

# %% tags=["drawing"]
drawings.online_softmax((1, 3, 2, 6, 5, 6))

# %% [markdown]
# ## With values, and a block at a time
#
# The output is a weighted sum of values, so it works like l: keep **o**, the sum of weight times value so far, relative to m. When m
# grows, o shrinks by the same factor. At the end, o / l is the row of the output. The state of a row is therefore (m, l, o), and its size
# does not depend on the number of keys that it has processed.
#
# A kernel takes a *block* of scores at a time: one maximum of the block, one shrink, then the weights of the whole block.
#
# **Exercise 1.** Write one step: take the state (m, l, o) and the scores `s` (n,) and values `v` (n, d) of one block. Return the new
# state as a tuple. The first state is (-inf, 0, zeros). Weights are powers of two, not of e. o is not divided here.

# %% tags=["exercise"]
def step(state, s, v):
    m, l, o = state
    return ...


check("01.1", step)

# %% [markdown]
# ## Order does not matter
#
# A state belongs to a set of keys, in whichever order they came. Two states of different keys merge by the same rule: bring both to the
# larger m, then add. (Up to rounding: in floats two orders may differ in the last bits. Chapter 18 shows what that means.) This is behind
# split-KV decoding (chapter 10) and ring attention (chapter 21).
#
# **Exercise 2.** Write `merge` of two states (m, l, o). (The cell after it uses your functions of both exercises if `check` has found
# them right. While an exercise is open, `yours_or` takes a right function of the course, so that you can read on.)

# %% tags=["exercise"]
def merge(a, b):
    return ...


check("01.2", merge)

# %%
rng = np.random.default_rng(0)
t, values = rng.normal(0, 3, 12), rng.normal(size=(12, 2))
begin, take, together = (-np.inf, 0.0, np.zeros(2)), yours_or("01.1", step), yours_or("01.2", merge)
whole = take(begin, t, values)
parts = [take(begin, t[i:i + 4], values[i:i + 4]) for i in (0, 4, 8)]
for order in ((0, 1, 2), (2, 0, 1)):
    state = begin
    for i in order:
        state = together(state, parts[i])
    assert all(np.allclose(x, y) for x, y in zip(state, whole, strict=True))
print("three parts of four keys, merged in two orders: the state of all twelve")

# %% [markdown]
# ## Tiled attention, by you
#
# Now put it together. Chapter 00 printed the loop as a kernel of single numbers; in NumPy a tile is a small matrix and each step is one
# line for all its rows:
#
# 1. take `block_q` rows of Q; m is a vector of -inf, l of zeros, o a matrix of zeros,
# 2. for each block of `block_k` keys: the scores of the tile (`q_tile @ k_tile.T * scale`),
# 3. the new m of each row (the maximum of the old one and the block's), the shrink factors, the weights 2**(s - m),
# 4. l and o shrink, then gain the sums of this block,
# 5. after the last block, write o / l.
#
# **Exercise 3.** Write it. `scale` already contains log2(e) / sqrt(D), so weights are powers of two. The last tile of rows and the last
# block of keys may be smaller than the others: slices do that by themselves. The check tries several sizes, very large scores (a kernel
# that does not subtract the maximum overflows), and measures how much memory your function uses at a time: tiles, not all scores.

# %% tags=["exercise"]
def tiled_attention(q, k, v, scale, block_q, block_k):
    # your two loops
    return ...


check("01.3", tiled_attention)

# %% [markdown]
# That was FlashAttention, in the order of its second version: queries outside, keys inside, one division at the end. (In the first version
# the keys are outside, and O is rescaled in every block.) What a fast kernel adds is *how* each of the five steps is computed: in registers
# instead of arrays (chapter 06), and all steps of a tile in one compiled loop (chapter 07). The order stays the one that you wrote.
#
# **Exercise 4.** o is divided by l once, after the last block. One could also divide it after every block, and multiply back before the
# next one. How many numbers are divided for a row of D = 128 channels with 32 key blocks in each case? (A kernel may multiply by 1 / l
# instead, as the one in chapter 00 does: count that as dividing.) Give two numbers: (divided at the end, divided after every block).

# %% tags=["exercise"]
answer = ..., ...                                          # (at the end, in every block)
check("01.4", answer)

# %% [markdown]
# ## One row and one key: the second rung
#
# The smallest tile has one row and one key. This is rung 2 of the ladder, `online`, whose bytes chapter 00 counted. m and l are two numbers,
# and o is the row of the output itself. It shrinks only where a larger score comes:

# %%
print(inspect.getsource(ladder_float.online.py_func))

# %% [markdown]
# No matrix of scores, but all of K and V are read for every row. A larger tile does the same steps and reads K and V once for all its rows.

# %% [markdown]
# ## The picture
#
# One row of attention. Left: its scores as they arrive, and m (the black lines), which changes at most once in a block. Right: the sum of
# the weights from the first key up to each key, as a share of the sum of all, and l after each block (the squares), multiplied by the
# shrinks that follow. Ten keys that fit the query well arrive in the third block. m rises there, and all that was summed before becomes a
# small share: compare the first two squares with the last two.

# %%
length, d, block = 512, 64, 128
query, key, value = (rng.standard_normal((length, d)) for _ in range(3))
key[300:310] += 0.8 * query[7]                             # ten keys that fit query 7 well
t = key @ query[7] * np.log2(np.e) / np.sqrt(d)
state, stairs = (-np.inf, 0.0, np.zeros(d)), []
for first in range(0, length, block):
    state = take(state, t[first:first + block], value[first:first + block])
    stairs.append((first, state[0], state[1]))
fig, axes = figure(2, width=11, height=3.6)
axes[0].plot(t, linestyle="", marker=".", markersize=3, color="#0072B2", label="score of a key, octaves")
for n, (first, m, _) in enumerate(stairs):
    axes[0].plot([first, first + block], [m, m], color="black", linestyle="-", marker="", label="m" if not n else None)
axes[0].set(xlabel="key", ylabel="octaves", title="row 7: four key blocks of 128", ylim=(t.min() - 0.5, t.max() + 3))
axes[0].legend(loc="upper left", fontsize=8)
weights = 2.0 ** (t - t.max())
axes[1].plot(np.cumsum(weights) / weights.sum(), color="#0072B2", linestyle="-", marker="", label="share of the final sum")
axes[1].plot([first + block - 1 for first, _, _ in stairs], [l * 2.0 ** (m - state[0]) / state[1] for _, m, l in stairs],
             color="black", linestyle="", marker="s", label="l after each block")
axes[1].set(xlabel="key", ylabel="share", title="ten keys hold most of the weight")
_ = axes[1].legend(loc="upper left", fontsize=8)

# %% [markdown]
# ## How exact is it?
#
# Shrinking is a multiplication, so it rounds, once per block and number. The table compares with float64: the one-pass kernels of the
# ladder and a two-pass softmax in float32 have errors of the same size. So the single pass costs no accuracy. (The *relative L1 error* is
# the sum of all errors' magnitudes, divided by the sum of the exact numbers' magnitudes. `ladder.prepare(name, q, k, v)` returns a rung
# of the ladder, compiled and ready to call.)

# %%
q, k, v = (x.astype(np.float32) for x in (query, key, value))
exact = numflash.attention(q, k, v, impl="reference")
s = (q @ k.T) * np.float32(d**-0.5)
p = np.exp(s - s.max(1, keepdims=True))
found = {"two passes (NumPy)": p @ v / p.sum(1, keepdims=True), "one pass, key by key (rung online)": ladder.prepare("online", q, k, v)(),
         "one pass, tiles (rung tiled)": ladder.prepare("tiled", q, k, v)()}
error = {name: float(np.abs(x - exact).sum() / np.abs(exact).sum()) for name, x in found.items()}
table(["float32 kernel", "relative L1 error"], list(error.items()))

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert max(error.values()) < 2e-6
assert np.allclose(state[2] / state[1], exact[7], atol=1e-5)
assert stairs[2][1] > stairs[1][1] + 6 and weights[300:310].sum() > 0.5 * weights.sum()

# %% [markdown]
# **What you can do now**
#
# * compute softmax in one pass: a maximum m and a sum l, which shrinks when m grows,
# * merge two states (m, l, O) of different keys in any order,
# * write tiled attention, and say why it needs no matrix of scores.
#
# **Next:** [02](02_tiling.ipynb). Add up what the inner loop touches: the largest tile that fits the cache moves the fewest bytes.
