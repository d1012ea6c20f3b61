# %% [markdown]
# # 19. Decode on the GPU
#
# After this chapter you can
#
# * keep a cache on the card, and say what a step moves between host and card, to the byte,
# * say how many blocks a step gives the card to do, and why heads that share keys belong into one of them,
# * divide the keys among blocks, and count what that costs,
# * give the least time of a step on a card of known bandwidth, and say what else it must be compared with.
#
# Chapter 10 explained split-KV and its merge. Here the same cache is stored on the card.

# %% [markdown] tags=["map"]
# > **The idea:** A cache on the card: count every byte that a step moves.
# >
# > **Where you are:** optional: on neither path (CPU path: [00](00_memory.ipynb) ...; GPU path: [13](13_threads_warps_memory.ipynb) ...)
# >
# > **Time:** 25 minutes to read, 15 for the exercises. **Before it:** [10](10_decode.ipynb), [16](16_flash_attention_2.ipynb).
# >
# > **Terms:** [decode](../docs/glossary.md#decode), [kv cache](../docs/glossary.md#kv-cache), [split kv](../docs/glossary.md#split-kv).
# >
# > **Papers:** [Flash-Decoding](https://pytorch.org/blog/flash-decoding/).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import numpy as np

import numflash
from numflash.course import answer_of, bars, card, check, figure, table
from numflash.tiling import KEY_BLOCK, split_count

rng = np.random.default_rng(0)
device = card()
heads, kv_heads, d = 14, 2, 64                             # one layer of Qwen 0.5B


def normal(*shape):
    return rng.standard_normal(shape, np.float32)


# %% [markdown]
# ## A cache that stays there
#
# `KVCache` takes `device="cuda"`; `"cuda-emulator"` runs the same kernels without a card. `append` converts and stores new tokens
# in one kernel, `decode` computes the attention of the newest token in one or two. Against attention over the whole text:

# %%
def fill(dtype="float16", groups=kv_heads, tokens=320, **options):
    """A cache of one sequence with `tokens` tokens, and the tokens."""
    options = {"device": "cuda-emulator"} | options
    cache = numflash.KVCache(1, groups, d, 1024, dtype, **options)
    k, v = normal(1, groups, tokens, d), normal(1, groups, tokens, d)
    cache.append(k, v)
    return cache, k, v


cache, k, v = fill()
query = normal(1, heads, 1, d)
exact = numflash.attention(query, k, v, impl="reference", enable_gqa=True)
error = np.abs(cache.decode(query) - exact).sum() / np.abs(exact).sum()
print(f"float16 cache of {cache.nbytes / 1e6:.2f} MB: relative L1 error {error:.1e}")
assert error < 1e-3

# %% [markdown]
# ## What crosses the bus
#
# A cache that stays on the card costs no transfers of its own. But the new token's K and V and the query go up at every step, and a
# copy does not convert: a kernel does.
#
# **Exercise 1.** How many bytes go up per step and layer, all as float32: K and V of one token, and its query?

# %% tags=["exercise"]
def uploaded(heads, kv_heads, d):
    return ...


check("19.1", uploaded)

# %%
emulator = cache.emulator                                  # its counters
steps = []
for _ in range(3):
    before = emulator.uploaded
    cache.append(normal(1, kv_heads, 1, d), normal(1, kv_heads, 1, d))
    cache.decode(normal(1, heads, 1, d))
    steps.append(emulator.uploaded - before)
print("bytes up, step by step:", steps)
assert steps[1:] == [answer_of("19.1")(heads, kv_heads, d)] * 2         # the first step also allocates its buffers

# %% [markdown]
# Not zero, but 4.6 KB, whatever the length of the text. What does grow with the text is the reading of the cache.
#
# ## One block for the heads that share keys
#
# 14 query heads are 14 rows. An engine that gives each head a block of its own would read the K and V of its head, and with 2 KV heads
# every key would be read 7 times. Here a block takes a *KV head*: its 7 queries are 7 of the 16 rows of a tensor-core tile, and each key
# is read once. (With an INT8 cache the queries are columns, two for each: 14 of 16.) Counted, beside a cache that stores K and V for all
# 14 heads:

# %%
def step(cache, query, **options):
    """The counters of each kernel of a decode step."""
    cache.emulator.reports.clear()
    cache.decode(query, **options)
    return list(cache.emulator.reports)


tokens, rows, read = 320, [], {}
for name, groups, dtype, size in (("2 KV heads, float16", 2, "float16", 2), ("14 KV heads, float16", 14, "float16", 2),
                                  ("2 KV heads, INT8", 2, "int8", 1)):
    other, _, _ = fill(dtype, groups)
    report, = step(other, query, splits=1)
    held = groups * tokens * (2 * d * size + (8 if dtype == "int8" else 0))        # INT8: two scales per token
    read[name] = report.global_loaded
    rows.append([name, held, report.global_loaded, report.blocks, report.tensor_flops, 4 * heads * tokens * d,
                 report.shared_conflicts])
    assert 0 < report.global_loaded - held <= report.blocks * 4 * (128 + 7 * d)    # the rest: query and length, once per block
table(["cache", "bytes of its tokens", "bytes read", "blocks", "flop of the tensor cores", "of them wanted", "conflicts"], rows)

# %% [markdown]
# Every byte of the tokens is read once; INT8 needs about half as many (half, and two scales per token). There a query and a weight have
# two bytes each, and each byte has a column of its own: four heads fill the eight columns of a product, whose rows are keys. The keys of
# an INT8 cache are rounded up to blocks of 128. Of the float16 caches 7 of 16 rows are in use, or 1, so more than half of the tensor
# cores' work is wasted. That costs no time: a T4, with 320 GB/s and 65 TFLOP/s, could do 203 flop for each byte that it reads.

# %%
ridge = 65e12 / 320e9
wanted = {name: row[5] / row[2] for name, row in zip(read, rows, strict=True)}
done = {name: row[4] / row[2] for name, row in zip(read, rows, strict=True)}
table(["cache", "wanted flop per byte", "done, with the empty rows", "a T4 could do"],
      [[n, wanted[n], done[n], ridge] for n in read])
print(f"the T4's float32 cores, 8.1 TFLOP/s: {8.1e12 / 320e9:.0f} flop per byte")
assert max(wanted.values()) < 8.1e12 / 320e9 < max(done.values()) < ridge

# %% [markdown]
# Even the float32 cores would be fast enough for the wanted operations. So tensor cores cannot make decode faster: it is limited by
# memory. They are used here because with them the arithmetic of the packed rows costs next to nothing, the empty rows included.
#
# ## Split the keys
#
# 2 KV heads are 2 blocks. A T4 has 40 SMs, an H200 132: nearly all of them idle. So the keys are divided, and a second kernel
# merges the parts: it weighs each with 2^(m_i - max) and divides by the sum, the division that chapter 10 found missing. Up to 256 keys one block per KV head does it all; beyond, the number of splits is
# FlashAttention-2's rule (chapter 10), with two blocks of threads to an SM.

# %%
multiprocessors = {"T4": 40, "L4": 58, "H200": 132}
table(["context", *(f"splits on {name}" for name in multiprocessors), "blocks on T4"],
      [[n, *(split_count(kv_heads, -(-n // KEY_BLOCK), 2 * count) for count in multiprocessors.values()),
        kv_heads * split_count(kv_heads, -(-n // KEY_BLOCK), 80)] for n in (512, 1024, 4096, 16384, 65536)])
short, _, _ = fill(tokens=256)
print("kernels of a step at 256 keys:", len(step(short, query)), "  at 320:", len(step(fill()[0], query)))
assert split_count(heads, 4, 80) == 4                      # a T4: 14 blocks, 4 pieces of 256 keys

# %% [markdown]
# Each part writes its output, not divided, with its maximum and its sum, in float32, a row for each query head of its KV head.
#
# **Exercise 2.** How many bytes do the parts write per step?

# %% tags=["exercise"]
def written(heads, splits, d):
    return ...


check("19.2", written)

# %%
cache, k, v = fill()
exact, costs = numflash.attention(query, k, v, impl="reference", enable_gqa=True), []
for splits in (2, 3):
    parts, merge = step(cache, query, splits=splits)
    assert parts.global_stored == answer_of("19.2")(heads, splits, d)
    out = cache.decode(query, splits=splits)
    assert np.abs(out - exact).sum() / np.abs(exact).sum() < 1e-3
    costs.append([splits, parts.blocks, parts.global_loaded, parts.global_stored, merge.blocks])
table(["splits", "blocks", "bytes read of the cache and queries", "bytes of the parts", "blocks of the merge"], costs)

# %% [markdown]
# The merge has a block for each row. First each of its threads takes one split, to find the largest maximum and the weights of the
# splits. Then each takes one channel and loads 16 parts of it at a time, because loads one after another would take longer than all the
# rest. What a split costs, written and read again, beside the cache's own bytes, with the T4's number of splits:

# %%
each = 2 * (costs[1][3] - costs[0][3])                     # bytes per split, from the two rows above
share = {}
for n in (512, 1024, 4096, 16384, 65536):
    splits = split_count(kv_heads, -(-n // KEY_BLOCK), 80)
    share[n] = splits * each / (kv_heads * n * 2 * d * 2)
table(["context", "bytes of parts / bytes of the cache"], [[n, f"{100 * x:.0f} %"] for n, x in share.items()])

# %% [markdown]
# Much, at short contexts; but these bytes were just written and are in the L2, while the cache comes from memory. A split gains time if
# it gives work to an SM that would have none.
#
# ## Equal bits, token by token
#
# INT8 decode adds up integers within a split and merges splits in a stated order. So with equal splits the CPU's cache and the card's
# give equal bits. Token by token, across the end of a page: a cache may be stored in *pages* of a fixed number of tokens, here 16, which
# sequences can share.

# %%
growing = [numflash.KVCache(1, kv_heads, d, 256, "int8", page_size=size, device=where)
           for where, size in (("cpu", 128), ("cuda-emulator", 16), *([("cuda", 16)] if device else []))]
prompt_k, prompt_v = normal(1, kv_heads, 126, d), normal(1, kv_heads, 126, d)
for x in growing:
    x.append(prompt_k, prompt_v)
same = []
for _ in range(4):                                         # from 126 to 130 tokens
    new_k, new_v, q = normal(1, kv_heads, 1, d), normal(1, kv_heads, 1, d), normal(1, heads, 1, d)
    for x in growing:
        x.append(new_k, new_v)
    first, *others = (x.decode(q, splits=1).view(np.int32) for x in growing)
    same.append(all(np.array_equal(first, x) for x in others))
print("tokens:", growing[0].lengths[0], " equal bits in every step:", same)

# %% [markdown]
# ## The least time of a step
#
# Bytes over bandwidth. 14 query heads, 2 KV heads, one layer; T4 320 GB/s, H200 4800 (data sheets). The INT8 kernels need
# sm_80: for the T4 that column is arithmetic only.

# %%
bandwidth = {"T4": 320e9, "H200": 4800e9}
lengths = (256, 1024, 4096, 16384, 65536)


def least(tokens, groups, size, scales, rate):
    return groups * tokens * (2 * d * size + scales) / rate


table(["context", *(f"us on {name}, {kind}" for name in bandwidth for kind in ("float16", "INT8"))],
      [[n, *(1e6 * least(n, kv_heads, size, scales, rate) for rate in bandwidth.values() for size, scales in ((2, 0), (1, 8)))]
       for n in lengths])

# %% [markdown]
# At 1024 tokens a T4 needs 1.6 us per layer at least. Launching a kernel costs the host a few microseconds, so up to some
# thousand tokens a step is as long as its launches, not as its bytes. That is why a step uploads nothing it need not, and why
# whole steps are recorded once and replayed (CUDA graphs).
#
# An H200 copies at 4200 GB/s, reads and writes counted. 16 sequences of 32,768 tokens, 32 query and 8 KV heads of 128 channels: float16 takes
# 0.48 ms, INT8 0.26, INT4 0.15, which is 106, 103 and 93 % of that rate. Long steps do take what their bytes take. A step
# of one sequence of 1,024 tokens takes 55 to 75 us with all that is around it, where its bytes would take less than one.

# %%
if device is None:
    print("no card: no times")
else:
    from time import perf_counter
    long = numflash.KVCache(16, 8, 128, 8192, "float16", device="cuda")
    for _ in range(4):
        long.append(normal(16, 8, 2048, 128), normal(16, 8, 2048, 128))
    ask, times = normal(16, 32, 1, 128), []
    for _ in range(20):
        begin = perf_counter()
        long.decode(ask)
        times.append(perf_counter() - begin)
    print(f"16 sequences of 8192 tokens, with the way to the host and back: {1e6 * np.median(times):.0f} us, "
          f"{long.nbytes / np.median(times) / 1e9:.0f} GB/s")

# %% [markdown]
# ## The picture, and the ceiling

# %%
fig, axes = figure(2, width=11, height=3.6, width_ratios=(1.1, 1))
for name, groups, size, scales in (("2 KV heads, float16", 2, 2, 0), ("14 KV heads, float16", 14, 2, 0),
                                   ("2 KV heads, INT8", 2, 1, 8)):
    axes[0].loglog(lengths, [1e6 * least(n, groups, size, scales, bandwidth["T4"]) for n in lengths], label=name)
axes[0].axhspan(2, 5, color="#D55E00", alpha=0.25)
axes[0].text(lengths[-1], 3, "a launch", ha="right", va="center", fontsize=9, color="#803300")
axes[0].set(xlabel="tokens in the cache", ylabel="microseconds per layer", title="the least time of a step on a T4")
axes[0].legend(fontsize=8)
axes[1].set_title(f"read in a step, {tokens} tokens")
bars(axes[1], {name: n / 1000 for name, n in read.items()}, "KB", digits=0)

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert all(same) and share[65536] < 0.1 < share[512]
assert np.isclose(read["14 KV heads, float16"] / read["2 KV heads, float16"], 7, rtol=0.03)
assert 1.6 < 1e6 * least(1024, kv_heads, 2, 0, bandwidth["T4"]) < 1.7

# %% [markdown]
# **What you can do now**
#
# * count the bytes of a decode step: up, read, and written by the parts,
# * say why heads that share keys belong to one block,
# * say from which context on a step is limited by memory and not by its launches.
#
# **Next:** [20](20_backward_gpu.ipynb). Two passes, each sum with one owner: no atomics, the same bits every time.
