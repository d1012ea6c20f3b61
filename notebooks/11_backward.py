# %% [markdown]
# # 11. Backward: gradients without the score matrix
#
# After this chapter you can
#
# * derive the gradients of attention, and say what the term delta = rowsum(dO * O) is for,
# * explain why one number per row is all that the forward pass has to keep,
# * check a gradient in two ways that do not trust it,
# * count the products of a backward pass, and see why more workers must not mean other bits.

# %% [markdown] tags=["map"]
# > **The idea:** Keep one number per row and compute the weights again.
# >
# > **Where you are:** optional: on neither path (CPU path: [00](00_memory.ipynb) ...; GPU path: [13](13_threads_warps_memory.ipynb) ...)
# >
# > **Time:** 30 minutes to read, 15 for the exercises. **Before it:** [01](01_online_softmax.ipynb), [07](07_fused.ipynb).
# >
# > **Terms:** [backward](../docs/glossary.md#backward), [log sum exp](../docs/glossary.md#log-sum-exp).
# >
# > **Papers:** [FlashAttention](https://arxiv.org/abs/2205.14135), [FlashAttention-2](https://arxiv.org/abs/2307.08691).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import inspect
import math

import numpy as np

import numflash
from numflash.course import bars, check, figure, roof, rounds, table
from numflash.cpu.backward import operands
from numflash.cpu.backward.tiled import scratch_kinds
from numflash.cpu.study import backward_plain
from numflash.jit.target import FLOAT_ISAS, available
from numflash.jit.threads import limit, most
from numflash.tiling import Caches

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape, np.float32)


# %% [markdown]
# **The question:** training moves each number of Q, K and V so that a loss becomes smaller. For this it needs their *gradients*. Must the
# forward pass keep the L x S weights P for that?
#
# ## The mathematics, step by step
#
# The gradient dX of an array X has the shape of X. It says for each number of X how much the loss grows if that number grows by 1 (for small
# steps, in proportion). Forward computes S = Q K^T * scale with scale = 1 / sqrt(head size), P = softmax(S) row by row, and O = P V. Given
# is dO; wanted are dQ, dK and dV. Go backward through the three steps.
#
# **Step 1: O = P V.** Value j enters row i of O with the factor P_ij. So it gets back the sum over i of P_ij dO_i. And the weight P_ij
# multiplies value j, so it gets back dO_i . V_j. For all rows together:
#
# $$dV = P^T dO, \qquad dP = dO\,V^T$$
#
# **Step 2: softmax.** The weights of a row sum to 1, so raising one score takes weight from all others. The derivative of P_j with respect to
# S_k is P_j (1 - P_j) if j = k, and -P_j P_k otherwise. Adding up the effects of S_k on all P_j of its row gives
#
# $$dS_k = \sum_j dP_j \, \frac{\partial P_j}{\partial S_k} = P_k \, dP_k - P_k \sum_j P_j \, dP_j = P_k \, (dP_k - \delta)$$
#
# where delta is the mean of dP over the row, weighted with P. (The papers call it D. Here D is the head size.) With two keys, P = (0.75,
# 0.25) and dP = (2, -2): delta = 0.75 * 2 - 0.25 * 2 = 1, and dS = (0.75 * (2 - 1), 0.25 * (-2 - 1)) = (0.75, -0.75). The two sum to 0, as
# they must: raising all scores by the same number changes no weight.
#
# **Step 3: S = Q K^T * scale.** By the rule of step 1:
#
# $$dQ = dS\,K \cdot scale, \qquad dK = dS^T Q \cdot scale$$
#
# **delta without P.** The sum over j of P_ij dP_ij is the sum over j of P_ij (dO_i . V_j). The sum over j of P_ij V_j is O_i, so it is dO_i
# . O_i: one dot product of two rows that are known.
#
# **If the loss uses the log-sum-exp, too.** (A "z-loss" keeps the log-sum-exp L of a row small, and merging two parts of the keys weighs
# each by it.) The derivative of L with respect to S_k is P_k, so dS_k grows by P_k dL, and dS_k = P_k (dP_k - (delta - dL)): only the
# number that is subtracted changes. `attention_backward(grad_lse=)` takes dL.

# %%
def definition(do, q, k, v, causal=False):
    """dQ, dK, dV of one head in float64, with the whole of P in memory."""
    do, q, k, v = (np.asarray(x, np.float64) for x in (do, q, k, v))
    scale = q.shape[1] ** -0.5
    s = q @ k.T * scale
    if causal:
        s[np.triu_indices_from(s, 1)] = -np.inf
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    dp = do @ v.T
    ds = p * (dp - (do * (p @ v)).sum(1, keepdims=True))
    return ds @ k * scale, ds.T @ q * scale, p.T @ do


# %% [markdown]
# **Exercise 1.** Softmax alone: from weights `p` (n,) of one row and the gradient `dp` (n,) of these weights, the gradient of
# the scores. (Try the two keys above before you `check`.)

# %% tags=["exercise"]
def softmax_backward(p, dp):
    return ...


check("11.1", softmax_backward)

# %% [markdown]
# ## Keep one number, compute the rest again
#
# P is L x S. At L = 8192 and 8 heads in float32:

# %%
length, heads = 8192, 8
table(["kept for the backward pass", "MB"],
      [["P, all of it", 4 * heads * length**2 / 1e6], ["LSE, one number per row", 4 * heads * length / 1e6]])

# %% [markdown]
# LSE_i, the log-sum-exp of row i, is the logarithm of the sum of exp(S_ij) over its keys. So P_ij = exp(S_ij) / sum = exp(S_ij - LSE_i):
# that gives any tile of P back, without a maximum and without a division. (Two scores of ln 3 and 0: the sum is 4, LSE = ln 4, and exp(ln 3
# - ln 4) = 0.75, as above.) So the backward pass computes Q K^T once more. On a GPU that takes less time than reading P from memory: the
# same trade as in the forward pass. On a CPU core it need not (with the peaks of chapter 00, 128 operations for a score at D = 64 take
# longer than reading 4 bytes). There the reason is the room: the first row of the table is one layer of a model.
#
# (The code below computes exp2(S' - LSE'), with S' and LSE' in octaves: both sides times log2(e). It is the same number, and
# exp2 is what the machine computes fast.)
#
# Here is the plain kernel. `key_pass` owns a block of keys and goes through the queries; `query_pass` owns a block of queries and goes
# through the keys. No other worker writes there. Printed are the tile that both share, and `query_pass`; `key_pass` is the same with the
# roles of queries and keys exchanged. (`dot_products(a, b, out)` is out = a b^T, and `add_rows(w, x, out)` is out += w x. `seen_keys`
# says for each row how many keys of the tile the causal mask leaves. `group` is the number of query heads that share a KV head.)

# %%
print(inspect.getsource(backward_plain.tile_gradients.py_func))
print(inspect.getsource(backward_plain.query_pass.py_func))

# %%
q, k, v, do = normal(1, 2, 200, 32), normal(1, 2, 200, 32), normal(1, 2, 200, 32), normal(1, 2, 200, 32)
out, lse = numflash.attention(q, k, v, is_causal=True, return_lse=True)
found = backward_plain.backward(do, q, k, v, out, lse, is_causal=True)
wanted = [definition(do[0, h], q[0, h], k[0, h], v[0, h], causal=True) for h in range(2)]
table(["gradient", "largest", "error of the plain kernel"],
      [[name, float(np.abs(x).max()), float(max(np.abs(x[0, h] - wanted[h][n]).max() for h in range(2)))]
       for n, (name, x) in enumerate(zip(("dQ", "dK", "dV"), found, strict=True))])
assert all(np.abs(x[0, h] - wanted[h][n]).max() < 1e-5 for n, x in enumerate(found) for h in range(2))

# %% [markdown]
# ## A check that knows nothing of the formula
#
# `definition` could contain the same mistake as the kernel. Finite differences do not: move one number of Q by a little, run the
# *forward* pass again, and see by how much the loss sum(dO * O) moves. Forward in float64, because the difference of two close numbers
# loses digits.

# %%
small = [x[:, :1, :6, :4].astype(np.float64) for x in (q, k, v)]
direction = do[:, :1, :6, :4]


def loss(q, k, v):
    p = np.exp(q[0, 0] @ k[0, 0].T * q.shape[3] ** -0.5)   # small scores: no maximum needed
    return float((direction[0, 0] * (p @ v[0, 0]) / p.sum(1, keepdims=True)).sum())


narrow = [x.astype(np.float32) for x in small]
o, lse_small = numflash.attention(*narrow, return_lse=True)
gradients = numflash.attention_backward(np.ascontiguousarray(direction), *narrow, o, lse_small)
worst = 0.0
for x, gradient in zip(small, gradients, strict=True):
    for at in np.ndindex(x.shape):
        kept, moved = x[at], []
        for step in (1e-5, -1e-5):
            x[at] = kept + step
            moved.append(loss(*small))
        x[at] = kept
        worst = max(worst, abs((moved[0] - moved[1]) / 2e-5 - gradient[at]))
print(f"{sum(x.size for x in small)} gradients, largest difference to finite differences {worst:.1e}")
assert worst < 1e-5

# %% [markdown]
# ## How many products
#
# A product of L x S x D costs 2 L S D operations. Forward has two. The two passes of the plain kernel share nothing.
#
# **Exercise 2.** Count the products of both plain passes together; and of a kernel that computes a tile of P and dS once and
# uses it for dQ, dK and dV.

# %% tags=["exercise"]
products = ...                                             # (two passes, one pass)
check("11.2", products)

# %% [markdown]
# One pass has a price: the worker that owns a block of keys adds to *every* row of dQ. With many workers that needs atomic additions
# (FlashAttention 2: fast, but the order of the sums, and so the last bits, differ from run to run) or a copy of dQ for each. In
# `numflash.attention_backward` (`numflash/cpu/backward`) a worker owns a whole head, or every n-th block of its keys and a copy of dQ.
# The copies are added in a fixed order. Their number depends on the shape, never on the number of threads.

# %%
shape = (1, 2, 500, 64)
q, k, v, do = (normal(*shape) for _ in range(4))
out, lse = numflash.attention(q, k, v, return_lse=True)
runs = []
for threads in sorted({1, most()}):
    with limit(threads):
        runs.append(numflash.attention_backward(do, q, k, v, out, lse))
equal = all(np.array_equal(a, b) for a, b in zip(runs[0], runs[-1], strict=True))
print(f"equal bits on 1 and {most()} threads: {equal}")

# %% [markdown]
# Its tile is transposed: rows are keys, columns are queries. LSE and delta are then along the lanes of the vectors, where
# subtracting them costs one instruction; and P^T and dS^T are already what dV and dK need. Only dQ needs dS transposed, in
# registers. The working set (`scores` holds P^T, `slopes` dS^T, `transposed` dS):

# %%
isa = available(FLOAT_ISAS)[0]
scratch = scratch_kinds(isa, (64, 64), 1)  # of one worker at D = 64, as the kernel's plan allocates them
sizes = {name: math.prod(shape) * np.dtype(dtype).itemsize / 1024 for name, (dtype, shape) in scratch.items()}
sizes = {name: size for name, size in sizes.items() if size}
sizes["Q, dO (both forms), dQ"] = 5 * operands.QUERIES * 64 * 4 / 1024
caches = Caches.of_this_machine()
table(["buffer", "KiB"], [*sizes.items(), ["together", sum(sizes.values())]])
print(", ".join(f"{level} {size / 1024:.0f} KiB" for level, size in caches.levels()))

# %% [markdown]
# More than L1 holds, but L2 holds it. What one register tile runs through must fit L1; the rest streams from L2.
#
# ## How fast
#
# L = 1024, 4 heads, D = 64, one core. PyTorch's own backward takes part where it is installed.

# %%
length, heads, d = 1024, 4, 64
q, k, v, do = (normal(1, heads, length, d) for _ in range(4))
one = 2 * heads * length**2 * d                            # operations of one product
out, lse = numflash.attention(q, k, v, return_lse=True)
with limit(1):
    seconds = {"forward": rounds(lambda: numflash.attention(q, k, v, return_lse=True)),
               "backward, plain": rounds(lambda: backward_plain.backward(do, q, k, v, out, lse), 0.2),
               "backward, register tiles": rounds(lambda: numflash.attention_backward(do, q, k, v, out, lse))}
count = {"forward": 2, "backward, plain": 7, "backward, register tiles": 5}

try:
    import torch
except ImportError:
    torch = None
if torch is not None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    leaves = [torch.from_numpy(x).requires_grad_(True) for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention

    def train():
        for x in leaves:
            x.grad = None
        attend(*leaves).backward(torch.from_numpy(do))

    seconds["PyTorch, both"] = rounds(train)
    with limit(1):
        seconds["ours, both"] = rounds(
            lambda: numflash.attention_backward(do, q, k, v, *numflash.attention(q, k, v, return_lse=True)))
    torch.set_num_threads(before)
    count |= {"PyTorch, both": 7, "ours, both": 7}
    ratio = seconds["PyTorch, both"] / seconds["ours, both"]
    print(f"forward and backward: {ratio:.2f} times as fast as PyTorch")
rate = {name: count[name] * one / t / 1e9 for name, t in seconds.items()}
table(["what", "products", "ms", "GFLOP/s"], [[name, count[name], 1e3 * t, rate[name]] for name, t in seconds.items()])

# %% [markdown]
# The plain kernel does seven products, which is more work, and plain loops reach a small part of the peak: they load and store their sums
# for each addition, where a register tile keeps 24 vectors of sums in registers. The tiled kernel is slower than its products alone would
# be (chapter 06), for two reasons: each of the five products on tiles of 144 x 64 loads and stores its sums once, and between the
# products come exp2, a transposition and the gradient of softmax.

# %%
fig, axes = figure(2, width=11, height=3.4, width_ratios=(1, 1.15))
grid = np.add.outer(-np.arange(48), np.arange(48)) <= 0
pattern = np.where(grid.T, 0.25, 1.0)
for n in range(0, 48, 12):
    pattern[n:n + 12][grid.T[n:n + 12]] = 0.2 + 0.2 * (n // 12 % 4)
axes[0].imshow(pattern.T, vmin=0, vmax=1, cmap="Greys_r")
for n in range(4):
    axes[0].text(12 * n + 6, 44.5, f"block {n}", ha="center", va="center", fontsize=9,
                 bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
axes[0].set(xlabel="keys: a worker owns a column of tiles, and its dK and dV", ylabel="queries: dQ gathers along rows",
            xticks=(), yticks=(), title="causal: a block of keys begins at the diagonal")
bars(axes[1], rate, "GFLOP/s on one core", ("measured float32 peak", roof().float32 / 1e9), digits=0)

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert equal and worst < 1e-5
tiled = numflash.attention_backward(do, q, k, v, out, lse)
for a, b in zip(tiled, backward_plain.backward(do, q, k, v, out, lse), strict=True):
    assert np.abs(a - b).max() < 1e-5

# %% [markdown]
# **What you can do now**
#
# * compute the gradients from one number per row, the log-sum-exp,
# * write the gradient of softmax without its Jacobian,
# * say why two passes of seven products need no atomics where one pass of five does.
#
# **Next:** [12](12_claims.ipynb). Check a figure with the arithmetic that it rests on.
