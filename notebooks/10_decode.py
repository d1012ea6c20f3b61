# %% [markdown]
# # 10. Decode and split-KV
#
# After this chapter you can
#
# * say what one new token costs, and which ceiling it meets,
# * divide its keys among workers and merge the parts, with the division that a common formula forgets,
# * choose the number of splits, and say when none is best,
# * explain the unified maximum of FlashDecoding++, its gain, and the test without which it is wrong,
# * use the package's `KVCache`, and check it against its definition,
# * say what a cache of 4 bits saves and loses, and why its rows are rotated first.

# %% [markdown] tags=["map"]
# > **The idea:** One new token reads the whole cache once: bytes decide, and the keys are what can be split.
# >
# > **Where you are:** optional: on neither path (CPU path: [00](00_memory.ipynb) ...; GPU path: [13](13_threads_warps_memory.ipynb) ...)
# >
# > **Time:** 40 minutes to read, 25 for the exercises. **Before it:** [01](01_online_softmax.ipynb), [09](09_threads_causal_gqa.ipynb).
# >
# > **Terms:** [prefill](../docs/glossary.md#prefill), [decode](../docs/glossary.md#decode), [kv cache](../docs/glossary.md#kv-cache), [split kv](../docs/glossary.md#split-kv), [log sum exp](../docs/glossary.md#log-sum-exp), [gqa](../docs/glossary.md#gqa), [rotation](../docs/glossary.md#rotation).
# >
# > **Papers:** [QuaRot](https://arxiv.org/abs/2404.00456), [Flash-Decoding](https://pytorch.org/blog/flash-decoding/), [FlashDecoding++](https://arxiv.org/abs/2311.01282).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import inspect

import numpy as np

import numflash
from numflash import DecodeEngine, reference
from numflash.course import bars, check, figure, roof, rounds, table
from numflash.cpu.study import split_decode
from numflash.jit.threads import limit, most
from numflash.measure.data import minilm
from numflash.tiling import Caches, split_count

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape, np.float32)


# %% [markdown]
# ## One row
#
# While a model writes a text, each new token is one query row against all keys so far. Each element of K and V is read
# from memory, used for one multiplication and one addition for each query head that shares it, and not needed again. The other
# chapters took blocks of query rows, so that each key was used many times; here there is one row. So the time is that of reading
# the bytes of K and V.
#
# Qwen 0.5B has 14 query heads and 2 heads of K and V, D = 64.
#
# **Exercise 1.** A core reads 20 GB/s from memory. The cache holds 1024 tokens of float16 keys and values. How many microseconds does the
# attention of one layer take for one token? Give two numbers: with its 2 KV heads, and if K and V were stored for all 14 query heads.

# %% tags=["exercise"]
answer = ...                                               # (with 2 heads, with 14 heads)
check("10.1", answer)

# %%
heads, kv_heads, d = 14, 2, 64
stored = {"2 KV heads": kv_heads, "14 KV heads": heads}
rows, decode_seconds = [], {}
for name, n in stored.items():
    cache = numflash.KVCache(1, n, d, 16384, dtype="float32")
    cache.append(normal(1, n, 16384, d), normal(1, n, 16384, d))
    query = normal(1, heads, 1, d)
    with limit(1):
        decode_seconds[name] = rounds(lambda cache=cache, query=query: cache.decode(query))
    operations = 4 * heads * 16384 * d
    rows.append([name, cache.nbytes / 1e6, operations / cache.nbytes, 1e6 * decode_seconds[name],
                 cache.nbytes / decode_seconds[name] / 1e9])
table(["stored", "MB", "operations per byte", "microseconds", "GB/s"], rows)
assert np.isclose(rows[1][1], 7 * rows[0][1])

# %% [markdown]
# The work is the same; the bytes are seven times as many, and the time grows with them: by more than seven times where the larger cache is
# also read more slowly, as the last column says. Grouped heads gain here, in decode. (In prefill they gain next to nothing: chapter 09.) For
# that the kernel packs the 7 query heads of a group as rows of one tile, so that each vector of K is read once and serves all of them.
#
# A core does at most `roof().float32` operations per second. At one operation per byte it would have to read as many bytes per second,
# which no memory delivers. That is also why faster multiplication units change nothing for decode: a T4 does 65 TFLOP/s on tensor cores,
# but its 320 GB/s are enough for only 0.32 TFLOP/s at one operation per byte.

# %%
print(roof())
print(f"to keep the float32 units busy at 1 operation per byte: {roof().float32 / 1e9:.0f} GB/s; "
      f"one core reads {roof().read / 1e9:.1f} GB/s from memory")

# %% [markdown]
# ## The split
#
# Attention over all keys of a head is one job. 2 heads are 2 jobs, and of 64 cores 62 would wait. FlashDecoding (2023) divides the keys:
# each worker takes a part and leaves the state (m, l, o) of chapter 01: its maximum, its row sum, its sum of values that is not divided.
# In the kernel below
#
# * `prange` divides the tasks, one for each head and part, among the threads,
# * `part` gives the first key of part i and the one after its last,
# * `scores` computes the scores of a block of keys into `s` and returns the largest,
# * `add_values` makes weights of them, adds weight times value to `sums`, and returns the sum of the weights.

# %%
print(inspect.getsource(split_decode.split.py_func))

# %%
q, k, v = normal(2, d), normal(2, 1000, d), normal(2, 1000, d)
o, m, l = np.empty((2, 4, d), np.float32), np.empty((2, 4), np.float32), np.empty((2, 4), np.float32)
split_decode.split(q, k, v, np.float32(d**-0.5 * np.log2(np.e)), o, m, l)
exact = numflash.attention(q[:, None], k, v, impl="reference")[:, 0]
table(["part of head 0", "maximum m (octaves)", "row sum l"], [[i, float(m[0, i]), float(l[0, i])] for i in range(4)])

# %% [markdown]
# To add the parts, bring them to one maximum. A formula that is often seen is O = sum of exp(LSE_i - max LSE) * O_i, where O_i is already
# divided by its own sum, and LSE_i = m_i + log l_i is the log-sum-exp of a part: the logarithm of the sum of its weights. Something is
# missing:

# %%
lse = m + np.log2(l)                                       # octaves
share = np.exp2(lse - lse.max(1, keepdims=True))
undivided = (share[..., None] * (o / l[..., None])).sum(1)
print(f"the formula gives {np.abs(undivided).sum() / np.abs(exact).sum():.2f} times too much")
divided = undivided / share.sum(1, keepdims=True)
print(f"divided by the sum of the shares, the error is {np.abs(divided - exact).max():.1e}")
assert np.abs(divided - exact).max() < 1e-6 and np.abs(undivided).sum() > 2 * np.abs(exact).sum()

# %% [markdown]
# **Exercise 2.** Write `merge` for two states `(m, l, o)`: the numbers `m` (in octaves: weights are powers of two) and `l`, and `o` (D,).
# It returns a state of the same kind, so that parts can be merged in any grouping; nothing is divided yet. It is chapter 01's `merge` for
# any parts: a part without keys has m = -inf, l = 0 and o = 0, and both may be without keys.

# %% tags=["exercise"]
def merge(a, b):
    return ...


check("10.2", merge)

# %% [markdown]
# **Exercise 3.** Now the kernel: write `decode` for one query `q` (D,) against keys `k` (S, D) and values `v` (S, Dv), with scores
# `k @ q` in octaves (weights are 2**score). Cut the keys into `splits` parts, compute (m, l, o) of each part, merge them by `merge`,
# which is that of exercise 2, and divide once. It must work with more splits than keys. The check counts the merges: n parts that have
# keys are merged n - 1 times.

# %% tags=["exercise"]
def decode(q, k, v, splits, merge):
    return ...


check("10.3", decode)

# %% [markdown]
# ## How many?
#
# How many parts should there be? Enough that every worker has something, and that the last round is not half empty. (A *round* is as many jobs
# as there are places to run them.) No more than that, because each part costs a merge. FlashAttention-2's rule takes the smallest number of
# splits whose rounds are filled at least 85 % as well as the best number's.
#
# An example is a GPU, the T4: it has 40 multiprocessors, each with room for 2 blocks of threads, so 80 places. For 14 heads, each with 4 blocks
# of 256 keys, the rule gives 4 splits. With the group packed there are 2 jobs, not 14:

# %%
cases = [("a T4: 14 jobs, 80 places, 4 blocks", 14, 4, 80),
         ("group packed: 2 jobs, 80 places, 8 blocks of 128", 2, 8, 80), ("2 jobs, 2 cores, 128 blocks", 2, 128, 2),
         ("1 job, 2 cores, 128 blocks", 1, 128, 2), ("1 job, 64 cores, 128 blocks", 1, 128, 64)]
table(["case", "splits"], [[name, split_count(*numbers)] for name, *numbers in cases])
assert split_count(14, 4, 80) == 4

# %%
cache = numflash.KVCache(1, 1, 128, 32768)
cache.append(normal(1, 1, 32768, 128), normal(1, 1, 32768, 128))
one = normal(1, 4, 1, 128)
threads = most()
by_splits = {n: rounds(lambda n=n: cache.decode(one, splits=n)) for n in (1, 2, 4, 8, 32)}
table(["splits", "microseconds", "parts computed by"], [[n, 1e6 * t, min(n, threads)] for n, t in by_splits.items()])
print(f"one KV head on {threads} threads; chosen: {split_count(1, 32768 // 128, threads)}")

# %% [markdown]
# One split keeps one core busy, two keep two. More than there are cores gain next to nothing here, and every part costs a little.
#
# ## The unified maximum
#
# Why look for a maximum at all? It keeps 2**(s - m) inside the number range. FlashDecoding++ (2023) subtracts one number phi
# from all scores, fixed beforehand from statistics of the model. No part then waits for a maximum, nothing is rescaled, and
# parts simply add up. "Online softmax" and "unified max" exclude each other: a kernel has one or the other.
#
# But it is not always right. A score too far above phi overflows, and if all are too far below, the sum loses its digits. Every row must
# be tested, and computed again if it fails:

# %%
print(inspect.getsource(split_decode.unified.py_func))

# %%
q, k, v = normal(4, d), normal(4, 4096, d), normal(4, 4096, d)
q[2] *= 200                                                # a head whose scores spread over hundreds of octaves
exact = numflash.attention(q[:, None], k, v, impl="reference")[:, 0]
out, fell_back = split_decode.unified_decode(q, k, v, np.zeros(4))
print("rows that fell back:", fell_back, f"   largest error {np.abs(out - exact).max():.1e}")
assert fell_back.tolist() == [False, False, True, False] and np.abs(out - exact).max() < 1e-4

octaves = np.einsum("hd,hsd->hs", q, k) * d**-0.5 * np.log2(np.e)
with np.errstate(over="ignore", invalid="ignore"):
    p = np.exp2(octaves[2].astype(np.float32))             # phi = 0, no test
    untested = p @ v[2] / p.sum()
print("without the test, head 2 would be", untested[:4])
assert not np.isfinite(untested).all()

# %% [markdown]
# In float16 there is far less room: the largest number is 65504, so exp overflows at a distance of 11.1 (16 octaves). The study kernel
# works in float32 and allows 64 octaves. What does it gain on a processor? The maximum is one comparison per score, beside 4 D operations
# for its dot product and value:

# %%
assert np.log(65504.0) < 11.1 < np.log(65504.0) + 0.02
calm = normal(8, d), normal(8, 8192, d), normal(8, 8192, d)
with limit(1):
    t_split = rounds(lambda: split_decode.split_decode(*calm))
    t_unified = rounds(lambda: split_decode.unified_decode(*calm, np.zeros(8)))
print(f"split {1e3 * t_split:.2f} ms, unified {1e3 * t_unified:.2f} ms: a gain of {t_split / t_unified:.2f}")

# %% [markdown]
# The paper measured 18.8 % of the time for the synchronisation on a GPU, where a maximum crosses threads. Here one thread keeps it in a
# register, and no thread waits for it. The last line above is the ratio of the two times. At 1 or below, the unified maximum does not pay
# for its test and for the second kernel that must compute the failed rows. So the package's own decode kernel has the split and not the
# unified maximum.
#
# ## The cache that ships
#
# `KVCache` stores keys and values in the order in which the kernel reads them, in INT8 with one scale for each token, or as
# floats. Its definition is `reference.integer_decode`; the bits are equal. And writing a text token by token gives what causal
# attention over the whole text gives:

# %%
text_q, text_k, text_v = normal(1, 4, 100, 64), normal(1, 2, 100, 64), normal(1, 2, 100, 64)
growing, outputs = numflash.KVCache(1, 2, 64, 100, dtype="float32"), []
for t in range(100):
    growing.append(text_k[:, :, t:t + 1], text_v[:, :, t:t + 1])
    outputs.append(growing.decode(text_q[:, :, t:t + 1]))
whole = numflash.attention(text_q, text_k, text_v, is_causal=True, enable_gqa=True)
print(f"token by token against all at once: {np.abs(np.concatenate(outputs, 2) - whole).max():.1e}")

small = numflash.KVCache(1, 2, 64, 400)
small.append(normal(1, 2, 300, 64), normal(1, 2, 300, 64))
last = normal(1, 4, 1, 64)
stored_k, stored_v = small.quantized(0)
model = reference.integer_decode(reference.decode_query(last[0]), stored_k, stored_v, 0.125, np.ones((1, 300), bool), splits=2)[0]
same = np.array_equal(small.decode(last, splits=2)[0], model)
print("INT8 decode has the bits of the model:", same)

# %% [markdown]
# ## Four bits
#
# If the number of bytes decides, why not half as many? With 4 bits a number has 15 levels (-7 to 7; the sixteenth, -8, is not used), and
# one scale serves a row of K: its largest entry takes the last level, and all others share the rest. In some models a few channels of K
# are many times larger than the others; then most channels are rounded to two or three levels. MiniLM's keys are not like that, so the
# second row below makes one channel ten times as large.
#
# The remedy is to *rotate*. Multiply each row of K, and each query, by the same orthogonal matrix R. All scores stay the same, because
# (R q) . (R k) = q . k. But every entry of R k is a mixture of all channels of k, so a large channel is spread over all of them. A
# Hadamard matrix, whose entries are all +1 or -1 (over sqrt(D)), does that with additions only. (Rows of V are rotated alike, and the output is
# rotated back at the end.) On the keys of chapter 03, and on the same keys with one channel ten times as large:

# %%
def hadamard(n):
    """The orthogonal matrix of n x n entries +-1 / sqrt(n), n a power of two."""
    if n == 1:
        return np.ones((1, 1))
    half = hadamard(n // 2)
    return np.block([[half, half], [half, -half]]) / np.sqrt(2)


def four_bits(x):
    """Rows rounded to 15 levels, -7 to 7 times a scale of each row."""
    scale = np.abs(x).max(-1, keepdims=True) / 7
    return np.rint(x / scale) * scale


real_q, real_k, real_v = (x.astype(np.float32)[None] for x in minilm())
turn, lines = hadamard(32), []
assert np.allclose(turn @ turn.T, np.eye(32))
for name, keys in (("MiniLM, layer 2", real_k), ("one channel 10 times as large", real_k * np.where(np.arange(32) == 3, 10, 1))):
    off = [np.sqrt(((four_bits(keys @ r) @ r.T - keys) ** 2).mean() / (keys**2).mean()) for r in (np.eye(32), turn)]
    lines.append([name, *(f"{100 * x:.1f} %" for x in off)])
table(["error of K in 4 bits, of its own size", "as it is", "rotated"], lines)
assert off[1] < off[0] / 2

# %% [markdown]
# On keys without large channels rotating changes little; on the others the error falls to less than half. `dtype="int4"` stores a cache
# in this way. What it saves, and what it costs the newest token's output on these activations:

# %%
exact_row = numflash.attention(real_q[:, :, -1:], real_k, real_v, impl="reference")
lines, lost = [], {}
for dtype in ("float32", "int8", "int4"):
    cache = numflash.KVCache(1, 12, 32, 512, dtype=dtype)
    cache.append(real_k, real_v)
    found_row = cache.decode(real_q[:, :, -1:])
    lost[dtype] = np.abs(found_row - exact_row).sum() / np.abs(exact_row).sum()
    lines.append([dtype, cache.nbytes / 1000, f"{100 * lost[dtype]:.2f} %"])
table(["512 tokens, 12 heads, D = 32", "kB", "relative L1 error of the output"], lines)
assert lost["float32"] < 1e-5 < lost["int8"] < lost["int4"] < 0.1

# %% [markdown]
# Four bits lose more than ten times as much as eight. Whether a model can live with that must be measured with the model
# ([Choosing a precision](../docs/precision.md) says how). Use them where a long context would not fit into memory.
#
# ## An engine around it
#
# In many programs the cache is an array that grows: each new token makes a new array and copies all old tokens into it
# (`np.concatenate`). For n tokens that copies n (n - 1) / 2 rows. A *resident* cache is allocated once for the longest text; a new token
# is written into the next free row, and nothing is ever copied.
#
# A program that generates text needs little more: a place for the next token, its output, a way
# to start over. `DecodeEngine` is a `KVCache` behind such a state machine, for one layer; `step` loads a token, attends and
# returns the output. Inside transformers `numflash.transformers.ResidentCache` is the same thing once for every layer of a model
# ([Long contexts on a CPU](../docs/long_contexts.md)): the same calls of the same kernels, so the same bits.

# %%
engine = DecodeEngine(batch=1, kv_heads=2, head_dim=64, max_length=100, dtype="float32")
stepped = []
for t in range(100):
    token = slice(t, t + 1)
    stepped.append(engine.step(text_q[:, :, token], text_k[:, :, token], text_v[:, :, token]).copy())
print(engine.state, "after", int(engine.cache.lengths[0]), "tokens")
assert np.array_equal(np.concatenate(stepped, 2), np.concatenate(outputs, 2))
engine.reset()                                             # the memory stays, for the next text
engine.cleanup()

# %% [markdown]
# ## The picture, and the ceiling
#
# One layer, 8 query heads over 2 KV heads, D = 128, on one core. The ceiling of a token is its bytes divided by what this core
# reads per second from memory. A cache that fits the processor's own caches may pass it, because those are faster. The line
# printed below says whether the longest one does. (In a virtual machine the L3 is the host's, shared with others.) INT8 is a quarter of
# the bytes of float32 (plus 8 bytes of scales for each token and head).

# %%
lengths = [256, 1024, 4096, 16384, 65536]
query, curves, sizes = normal(1, 8, 1, 128), {"float32": [], "int8": []}, {"float32": [], "int8": []}
with limit(1):
    for dtype in curves:
        cache = numflash.KVCache(1, 2, 128, lengths[-1], dtype=dtype)
        keys, values = normal(1, 2, lengths[-1], 128), normal(1, 2, lengths[-1], 128)
        for n in lengths:
            done = int(cache.lengths[0])
            cache.append(keys[:, :, done:n], values[:, :, done:n])
            curves[dtype].append(rounds(lambda cache=cache: cache.decode(query), 0.15))
            sizes[dtype].append(cache.nbytes * n / lengths[-1])

# %%
l3 = Caches.of_this_machine().l3
for dtype, line in sizes.items():
    fits = "fits the L3 cache, so it may be faster than the memory's line" if l3 >= line[-1] else "does not fit the L3 cache"
    print(f"{dtype}: {lengths[-1]} tokens are {line[-1] / 2**20:.0f} MiB, which {fits} ({l3 / 2**20:.0f} MiB)")
fig, axes = figure(2, width=11, height=3.6, width_ratios=(1.2, 1))
for dtype, line in curves.items():
    axes[0].loglog(lengths, 1e6 * np.array(line), label=f"decode, {dtype}")
for dtype, style in (("float32", "--"), ("int8", ":")):
    axes[0].loglog(lengths, 1e6 * np.array(sizes[dtype]) / roof().read, linestyle=style, marker="", color="#555555",
                   label=f"bytes of {dtype} / memory read")
axes[0].set(xlabel="tokens in the cache", ylabel="microseconds per token", title="one core, 8 query heads, 2 KV heads, D=128")
axes[0].legend(fontsize=8)
bars(axes[1], {f"{dtype}, {lengths[-1]} tokens": sizes[dtype][-1] / curves[dtype][-1] / 1e9 for dtype in curves} |
     {"14 KV heads (float32)": 14 * 2 * 16384 * d * 4 / decode_seconds["14 KV heads"] / 1e9},
     "GB/s", ("memory read, one core", roof().read / 1e9))

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert same and np.abs(np.concatenate(outputs, 2) - whole).max() < 1e-5
assert sizes["float32"][-1] / sizes["int8"][-1] > 3.5

# %% [markdown]
# **What you can do now**
#
# * say what limits decode: every byte of the cache is read once for one token,
# * split the keys among workers and merge their states, also if a part is empty,
# * say what 8 and 4 bits save, and what they cost.
#
# **Next:** [11](11_backward.ipynb). Keep one number per row and compute the weights again.
