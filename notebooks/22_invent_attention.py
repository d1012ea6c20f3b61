# %% [markdown]
# # 22. Invent an attention
#
# Models keep changing attention: positions enter the scores, far tokens are hidden, several documents share a batch. Most of these changes
# are a new score or a new mask. Neither needs a new kernel: you write a function of one score and its indices, and `flex_attention` compiles
# it into the kernel that you know. After this chapter you can
#
# * write a score function and a mask function, and test them against float64,
# * read what becomes of them: the recorded graph, and the vector instructions,
# * read the picture of a mask's blocks, and predict how much time it leaves,
# * say what a function costs, in INT8 and in decoding too.

# %% [markdown] tags=["map"]
# > **The idea:** A score or a mask of your own is a function that is compiled into the existing kernel.
# >
# > **Where you are:** optional: on neither path (CPU path: [00](00_memory.ipynb) ...; GPU path: [13](13_threads_warps_memory.ipynb) ...)
# >
# > **Time:** 20 minutes to read, 15 for the exercises. **Before it:** [01](01_online_softmax.ipynb), [02](02_tiling.ipynb).
# >
# > **Terms:** [score](../docs/glossary.md#score), [softmax](../docs/glossary.md#softmax), [mask](../docs/glossary.md#mask), [tile](../docs/glossary.md#tile), [causal](../docs/glossary.md#causal).
# >
# > **Papers:** [FlexAttention](https://arxiv.org/abs/2412.05496), [ALiBi](https://arxiv.org/abs/2108.12409), [StreamingLLM](https://arxiv.org/abs/2309.17453).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import numpy as np

import numflash
from numflash.course import answer_of, bars, check, figure, rounds, table
from numflash.flex import listing
from numflash.jit.threads import limit

rng = np.random.default_rng(0)
HEADS, LENGTH, D = 2, 1024, 64
query, key, value = (rng.standard_normal((1, HEADS, LENGTH, D), np.float32) for _ in range(3))


def exact(score_mod=None, mask_mod=None):
    """Attention with the functions, in float64: every pair at once."""
    s = query.astype(float) @ key.swapaxes(2, 3) / D**0.5
    h, q, k = np.arange(HEADS)[:, None, None], np.arange(LENGTH)[:, None], np.arange(LENGTH)
    s = s if score_mod is None else score_mod(s, 0, h, q, k)
    s = s if mask_mod is None else np.where(mask_mod(0, h, q, k), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p @ value / p.sum(-1, keepdims=True)


# %% [markdown]
# ## First variant: far keys count less
#
# ALiBi (Press, Smith, Lewis 2021) needs no position embedding (vectors that tell each token its position). It subtracts a slope times the
# distance of query and key from each score. Every head has a slope of its own, so that some heads look near and some far.
#
# A score function gets the score (already scaled), the number of the sequence `b`, of the head `h`, of the query `q_idx` and of the key
# `kv_idx`, and returns the new score.
#
# **Exercise 1.** Write ALiBi with `SLOPES[h]`.

# %%
SLOPES = np.array([0.25, 0.015625])

# %% tags=["exercise"]
def alibi(score, b, h, q_idx, kv_idx):
    return ...


check("22.1", alibi, SLOPES)

# %%
variant = answer_of("22.1", SLOPES)
out = numflash.flex_attention(query, key, value, variant)
print(f"largest difference from float64: {np.abs(out - exact(variant)).max():.1e}")
assert np.abs(out - exact(variant)).max() < 2e-6

# %% [markdown]
# ## What your function becomes
#
# Your function was called once. Its arguments were not numbers but symbols, which wrote down what you did with them:

# %%
print(listing(variant, shape=(1, HEADS, LENGTH, LENGTH)))

# %% [markdown]
# That is the whole program: a load from your array (its bounds are proven, so no test is left), a subtraction, an absolute value, a
# conversion, a product, a subtraction. (`wide False`: 32 bits hold every integer. `roots 9`: line 9 is the new score.)
#
# From these lines the machine code is made, one vector of scores at a time. The kernel calls it for each tile of scores, between Q K^T and the
# softmax, while they are in the first-level cache. Look for the absolute value (`abs`), the conversion (`cvt`), the product with the slope
# (`mul`), and the subtraction, which is fused with the scale of the score (`fm`). The compiler may work on several vectors in turn:

# %%
code = listing(variant, shape=(1, HEADS, LENGTH, LENGTH), assembly=True).splitlines()
widest = next(name for name in ("zmm", "ymm", "z0.s", ".4s", "xmm") if any(name in line for line in code))
inner = [line.strip().replace("\t", " ") for line in code if widest[:3] in line]
arithmetic = [line for line in inner if any(word in line.split()[0] for word in ("abs", "sub", "mul", "fm", "cvt"))]
print(f"{len(code)} lines of assembly, {len(inner)} of them with vectors; what computes the score:")
print("\n".join(arithmetic[:10]))

# %% [markdown]
# Because the function runs on symbols, `if q_idx > kv_idx` cannot work: there is no number to decide on. The error says what to write instead.

# %%
try:
    numflash.flex_attention(query, key, value, lambda s, b, h, q, k: s if q > k else -s)
except numflash.errors.ArgumentTypeError as error:
    print(error)
else:
    raise AssertionError("a branch on a traced value must be refused")

# %% [markdown]
# ## Second variant: a window and the first keys
#
# A mask function says whether a query may attend to a key. In StreamingLLM (Xiao et al. 2023) a token attends to the last few tokens and to
# the first four of the text, to which models give the weight that they do not need elsewhere.
#
# **Exercise 2.** Write it: causal, the last 128 keys (the query's own included) and the first 4. Use `&` and `|`, not `and` and `or`,
# with each comparison in parentheses: `(x < 3) & (y > 1)`. (Without them Python computes `3 & y` first.)

# %% tags=["exercise"]
def stream(b, h, q_idx, kv_idx):
    return ...


check("22.2", stream)

# %% [markdown]
# `create_block_mask` looks at blocks of queries and keys. It does not evaluate the mask for every pair: it follows the smallest and largest value
# that each line of the graph can have in a block. If the result is certain, the block is full or empty. Full blocks do not call the mask;
# empty blocks are not computed at all. In the printed picture a dark sign is a full block, a light one a block that calls the mask, and a
# space an empty one.

# %%
window = answer_of("22.2")
mask = numflash.create_block_mask(window, None, None, LENGTH, LENGTH, BLOCK_SIZE=64)
print(mask)
out = numflash.flex_attention(query, key, value, block_mask=mask)
assert np.abs(out - exact(mask_mod=window)).max() < 2e-6

# %%
_, axes = figure(width=5, height=4)
drawn = mask.plot(ax=axes)

# %% [markdown]
# **Exercise 3.** At a length of 8192, with blocks of 64, how many blocks does one row of blocks in the middle compute (full or in part), and
# what share of the 128 blocks is that?

# %% tags=["exercise"]
answer = ...                                               # (blocks, share of all blocks of the row)
check("22.3", answer)

# %% [markdown]
# ## Third variant: both, in any precision
#
# Functions combine: `and_masks`, `or_masks`, a score function and a mask at once. The same two functions serve float32, INT8 (where the scores are
# exact integer products, put through your function in float32 and rounded to 1/256 octave) and decoding over a cache.

# %%
documents = np.repeat(np.arange(4), LENGTH // 4)
together = numflash.and_masks(window, lambda b, h, q, k: documents[q] == documents[k])
blocks = numflash.create_block_mask(together, None, None, LENGTH, LENGTH, BLOCK_SIZE=64)
wanted = exact(variant, together)
errors = []
for precision in ("float32", "bfloat16", "int8"):
    out = numflash.flex_attention(query, key, value, variant, blocks, precision=precision)
    errors.append([precision, f"{np.abs(out - wanted).sum() / np.abs(wanted).sum():.1e}"])
cache = numflash.KVCache(1, HEADS, D, LENGTH, dtype="float32")
cache.append(key, value)
last = cache.decode(query[:, :, -1:], score_mod=variant, mask_mod=together)
errors.append(["float32, decoded", f"{np.abs(last - wanted[:, :, -1:]).sum() / np.abs(wanted[:, :, -1:]).sum():.1e}"])
table(["precision", "relative error"], errors)
assert np.abs(last - wanted[:, :, -1:]).max() < 1e-5

# %% [markdown]
# On a GPU the function is compiled into the CUDA kernel (or run by the emulator, where there is no card): chapter
# [24](24_capstone.ipynb) does that.
#
# ## What it costs
#
# A dense mask or bias must be read from memory, 4 bytes for each score. Your function reads no such array: it computes from the indices. What it
# costs are its instructions, once for each vector of scores. The row "ALiBi" below shows how much that is on this machine.

# %%
dense = np.where(window(0, 0, np.arange(LENGTH)[:, None], np.arange(LENGTH)), 0, -np.inf).astype(np.float32)
runs = {
    "plain": lambda: numflash.attention(query, key, value),
    "dense bias": lambda: numflash.attention(query, key, value, dense),
    "ALiBi": lambda: numflash.flex_attention(query, key, value, variant),
    "window, blocks": lambda: numflash.flex_attention(query, key, value, block_mask=mask),
    "all three": lambda: numflash.flex_attention(query, key, value, variant, blocks),
}
with limit(1):
    seconds = {name: rounds(run) for name, run in runs.items()}
table(["variant", "ms", "of plain"], [[name, 1e3 * t, t / seconds["plain"]] for name, t in seconds.items()])
_, axes = figure()
bars(axes, {name: 1e3 * t for name, t in seconds.items()}, "milliseconds, one thread")

# %% [markdown]
# The window computes 23 % of the blocks and takes a fraction of the time. That is what a function gives you and a dense mask cannot: the
# kernel knows beforehand what it need not do. The window takes more than its 23 %, since three of the four blocks in a row call the mask.
#
# Now invent your own. Some that people have published are in [the guide](../docs/flex.md): neighbourhoods of pixels, distances in a graph,
# prefixes, dilated windows. Write one, test it with `exact`, look at its blocks, and measure it.

# %% [markdown]
# **What you can do now**
#
# * write a score function and a mask function, and test them against float64,
# * read the recorded graph and the vector instructions that become of it,
# * predict from the picture of its blocks what a mask saves.
#
# **Next:** [23](23_broken_kernels.ipynb). Read what the emulator reports, then mend the kernel.
