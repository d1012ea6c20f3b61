# %% [markdown]
# # 13. Threads, warps and the memory hierarchy
#
# After this chapter you can
#
# * write a CUDA kernel in Python and run it on a machine without a GPU,
# * say what a warp costs whose 32 threads do different things,
# * count the bytes that an access really moves, before you run it,
# * explain what shared memory saves for attention, and what a forgotten barrier does.

# %% [markdown] tags=["map"]
# > **The idea:** 32 threads move together, and memory is near (shared) or far (global).
# >
# > **Where you are:** GPU path, stop 1 of 6: **13** → [14](14_fragments.ipynb) → [15](15_bank_conflicts.ipynb) → [16](16_flash_attention_2.ipynb) → [17](17_hopper.ipynb) → [23](23_broken_kernels.ipynb)
# >
# > **Time:** 30 minutes to read, 30 for the exercises. **Before it:** [00](00_memory.ipynb), [01](01_online_softmax.ipynb).
# >
# > **Terms:** [ptx](../docs/glossary.md#ptx), [emulator](../docs/glossary.md#emulator), [block](../docs/glossary.md#block), [warp](../docs/glossary.md#warp), [sector](../docs/glossary.md#sector), [coalesced](../docs/glossary.md#coalesced), [shared memory](../docs/glossary.md#shared-memory), [barrier](../docs/glossary.md#barrier), [race](../docs/glossary.md#race).
# >
# > **Papers:** [CUDA programming guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import inspect
import linecache

import numpy as np
from numba import cuda

from numflash.course import answer_of, bars, card, check, figure, table
from numflash.cuda import emulate, study
from numflash.cuda.compile import ARCHITECTURES
from numflash.cuda.device.operands import emulated
from numflash.cuda.emulator import EmulatorError
from numflash.cuda.study import scalar

rng = np.random.default_rng(0)
device = card()

# %% [markdown]
# ## A kernel, and a machine to run it on
#
# A kernel is a function that thousands of threads run at once; each asks for its number and does its own share. Threads are grouped into
# *blocks* of, say, 128; all blocks together are the *grid*. `cuda.threadIdx.x` is the number of a thread within its block,
# `cuda.blockIdx.x` that of its block, and `cuda.grid(1)` its number in the whole grid. Numba compiles the function to PTX, the assembly
# language of NVIDIA's GPUs, and needs no GPU for that. (A kernel computes with single numbers. NumPy's habits do not work in it:
# no `x[1:3] = y`, no `a @ b`; give every index, and loop.) The emulator then executes this PTX, every thread and every byte, checks the rules of
# the machine and counts. `emulate(kernel, grid, block, arguments)` runs `grid` blocks of `block` threads and returns the counts.

# %%
def scale_and_add(a, x, y):
    i = cuda.grid(1)                                       # number of this thread in the whole grid
    if i < x.size:
        y[i] = a * x[i] + y[i]


x, y = rng.standard_normal(1000, np.float32), rng.standard_normal(1000, np.float32)
exact = np.float32(2) * x + y
report = emulate(scale_and_add, grid=8, block=128, args=(np.float32(2), x, y))
print(report)
assert np.allclose(y, exact, atol=1e-6) and report.blocks * report.threads == 1024 >= x.size

# %% [markdown]
# 8 blocks of 128 threads are 1024 threads for 1000 numbers. A block runs on one of the chip's processors (SM, streaming multiprocessor)
# from start to end. Its threads do not run one by one: the hardware takes 32 of them, a *warp*, and gives all the same instruction. The
# threads of a warp are its *lanes*, 0 to 31. So the emulator counts warp-instructions. (The lines on shared memory and tensor cores are 0
# here. Shared memory comes below, tensor cores in chapter 14; a *wavefront* is NVIDIA's word for a pass over the banks of shared memory,
# chapter 15.)
#
# ## A warp is as slow as its slowest thread
#
# In causal attention row i attends to the keys up to i. Let each thread add up as many terms as its row has:

# %%
def walk(terms, x, y):
    i = cuda.grid(1)
    total = np.float32(0)
    for j in range(terms[i]):
        total += x[j]
    y[i] = total


threads = 256
terms = 8 * np.arange(1, threads + 1, dtype=np.int32)      # row i has 8 i terms
x, counted, rows = rng.standard_normal(8 * threads, np.float32), {}, []
for name, order in (("in order", np.arange(threads)), ("shuffled", rng.permutation(threads))):
    y = np.zeros(threads, np.float32)
    report = emulate(walk, 2, 128, (terms[order], x, y))
    assert np.allclose(y, np.cumsum(x, dtype=np.float64)[terms[order] - 1], atol=1e-3)
    longest = terms[order].reshape(-1, 32).max(1).sum()    # of each warp
    counted[name] = sum(report.instructions.values())
    rows.append([name, int(terms.sum()) // 32, int(longest), counted[name]])
table(["rows", "terms of all threads / 32", "sum of the warps' longest", "warp-instructions"], rows)

# %% [markdown]
# Work and result are the same. Shuffled, nearly every warp has one long row, for which its other threads wait. Neighbouring rows have
# nearly the same length, so in order the loss is small. Attention kernels give a warp *tiles*: 16 neighbouring rows against 64 keys, all
# with the same work.
#
# ## Global memory comes in sectors
#
# Memory is moved in sectors of 32 bytes. The 32 addresses of a warp's load are put together: what falls into the same sector is
# moved once. Read float32 numbers that are `stride` numbers apart:

# %%
def strided(x, y, stride):
    i = cuda.grid(1)
    y[i] = x[i * stride]


rows, strides = [], (0, 1, 2, 4, 8, 16)
for stride in strides:
    x, y = rng.standard_normal(16 * 128, np.float32), np.zeros(128, np.float32)
    report = emulate(strided, 1, 128, (x, y, stride))
    assert np.array_equal(y, x[np.arange(128) * stride])
    rows.append([stride, report.global_loaded // 4, report.global_load_sectors // 4, 8 * report.global_load_sectors])
table(["stride", "bytes asked for by a warp", "sectors it moves", "bytes moved"], rows)
by_stride = {row[0]: row[2] for row in rows}

# %% [markdown]
# Stride 1 is *coalesced*: all that is moved is used. At stride 8 each number costs a whole sector, eight times its size. With
# stride 0 all threads read the same number: one sector serves the warp.
#
# **Exercise 1.** How many sectors does a warp's load move, if lane n reads an item of `size` bytes at address n * stride * size?

# %% tags=["exercise"]
def sectors(stride, size):
    return ...


check("13.1", sectors)

# %%
assert all(answer_of("13.1")(stride, 4) == by_stride[stride] for stride in strides)

# %% [markdown]
# (1, 16) is the load that the kernels of this package use: 16 bytes per thread, 512 per instruction, 16 sectors, nothing wasted.
# As coalesced as one of 4 bytes, with a quarter of the instructions.
#
# ## Shared memory: read once, use often
#
# Each SM has memory of its own, which all threads of a block can read and write. Attention gains from it, because every row of Q needs
# all of K. This is the first kernel of the GPU's ladder: chapter 01's step, one thread for each row of Q, and all keys from global
# memory. (`ptx.fmax` and `ptx.ex2` are single instructions, a maximum and 2**x; `alpha` is chapter 01's shrink; `LOWEST` is a large
# negative number. `Source` holds the kernel, the types of its arguments and its threads per block.)

# %%
print(inspect.getsource(scalar.one_thread_per_row))

# %% [markdown]
# In the second kernel a block of 64 rows brings 64 keys at a time into shared memory, and all its rows use them there. (It differs in more:
# two threads share a row, a thread loads 16 bytes at once, and the maximum is taken over 16 scores before anything is rescaled. Its
# source is in `numflash/cuda/study/scalar.py`; chapter 16 counts every rung of this ladder.)

# %%
length, d = 128, 64
q, k, v, exact = study.problem(length, d, seed=0)
reports = {}
for rung in study.LADDER[:2]:
    out, _, reports[rung.name] = emulated(study.launch(rung, q, k, v))
    study.validated(rung, out, exact)                      # relative error against float64 below 0.1 %
least = 4 * length * d * 2                                 # Q, K, V once in, O once out, 2 bytes each
moved = {name: 32 * (r.global_load_sectors + r.global_store_sectors) for name, r in reports.items()}
table(["kernel", "global bytes moved", "times the least", "shared bytes read", "barriers"],
      [[name, moved[name], moved[name] / least, r.shared_loaded, r.barriers] for name, r in reports.items()])

# %% [markdown]
# The first kernel's load of an element of K is stride 0: 32 lanes ask for the same 2 bytes, 32 bytes come. The caches would answer most
# of these requests; the counter counts all of them. The second reads K and V twice in all, once for each of its two blocks, in whole
# sectors. Shared memory is read instead, which is near. Most of what it still moves is its output: each thread stores 2 bytes of a row of
# its own, and every one of these stores costs a sector. (From rung 4 on the ladder stores better.)

# %%
second = reports["tiles in shared memory"]
print(f"output: {2 * length * d} bytes, moved {32 * second.global_store_sectors}")
assert 32 * second.global_store_sectors == 16 * 2 * length * d

# %% [markdown]
# **Exercise 2.** How many bytes of K and V (float16, `length` keys, `d` channels each) are read from global memory, if each block
# holds `rows` queries and reads every key once? All `length` queries, one head. (The last block may hold fewer queries; it reads every key
# too.)

# %% tags=["exercise"]
def key_bytes(length, d, rows):
    return ...


check("13.2", key_bytes)

# %%
assert second.global_loaded == answer_of("13.2")(length, d, 64) + length * d * 2          # and Q once

# %% [markdown]
# ## Barriers
#
# `cuda.shared.array(128, np.float32)` is an array in shared memory, one for each block. Threads that share memory must agree on *when*.
# `cuda.syncthreads()` waits until every thread of the block has come. Here each
# thread writes a number and reads that of its mirror image, which another warp wrote. `mirror` forgets the barrier, and its read
# may come before anything was written: the emulator says "uninitialised". `mirror_over_zeros` has zeros there from before, so the
# read may find either the old zero or the new number: that is a "race".

# %%
def mirror(x, y):
    shared = cuda.shared.array(128, np.float32)
    t = cuda.threadIdx.x
    shared[t] = x[t]
    y[t] = shared[127 - t]


def mirror_with_barrier(x, y):
    shared = cuda.shared.array(128, np.float32)
    t = cuda.threadIdx.x
    shared[t] = x[t]
    cuda.syncthreads()
    y[t] = shared[127 - t]


def mirror_over_zeros(x, y):
    shared = cuda.shared.array(128, np.float32)
    t = cuda.threadIdx.x
    shared[t] = np.float32(0)
    cuda.syncthreads()
    shared[t] = x[t]                                       # the barrier belongs after this line
    y[t] = shared[127 - t]


x, y = rng.standard_normal(128, np.float32), np.zeros(128, np.float32)
kinds = {}
for kernel in (mirror, mirror_over_zeros):
    try:
        emulate(kernel, 1, 128, (x, y))
    except EmulatorError as error:
        kinds[kernel.__name__] = error.kind
        print(f"{kernel.__name__}: " + str(error).split(" [")[0] + "\n    at: " + linecache.getline(*error.source).strip())
emulate(mirror_with_barrier, 1, 128, (x, y))
assert np.array_equal(y, x[::-1]) and kinds == {"mirror": "uninitialised", "mirror_over_zeros": "race"}

# %% [markdown]
# On a card the faulty kernel may give the right result for years. The emulator lets some warps run ahead of others, in another
# order for each seed, and keeps a record for every word of who wrote it and who may know of it.
#
# A complete example with a matrix: each thread copies one row, and then needs a column, to which all threads have contributed.

# %%
def column_sums(x, y):
    shared = cuda.shared.array((64, 64), np.float32)       # its shape is fixed when the kernel is compiled
    t = cuda.threadIdx.x
    for c in range(64):
        shared[t, c] = x[t, c]                             # thread t fills row t
    cuda.syncthreads()                                     # all rows are there
    total = np.float32(0)
    for r in range(64):
        total += shared[r, t]                              # and adds up column t
    y[t] = total


x, y = rng.standard_normal((64, 64), np.float32), np.zeros(64, np.float32)
emulate(column_sums, 1, 64, (x, y))
assert np.allclose(y, x.sum(0), atol=1e-4)
print("first sums:", y[:4])

# %% [markdown]
# **Exercise 3.** Your first kernel with shared memory. One block of 64 threads computes the scores `out` (64, 64) = q . k^T of `q` and
# `k` (64, 32), float32. Thread t owns row t of `out`. Bring K into shared memory once, so that each number of q and k is loaded from
# global memory once. Thread t needs its row of q for every key, so keep it: `cuda.local.array(32, np.float32)` makes an array that each
# thread has for itself. It stays in registers only if every index is known at compile time (loops of fixed length). Otherwise it is in
# slow local memory. The check runs your kernel under four schedules (orders in which the warps run) and counts its loads. (It also
# reports a loop that never ends, after some seconds. In a cell of your own the emulator takes minutes for that: interrupt it, in Jupyter
# with Kernel, Interrupt.)

# %% tags=["exercise"]
def score_tile(q, k, out):
    shared = cuda.shared.array((64, 32), np.float32)       # noqa: F841
    t = cuda.threadIdx.x                                   # noqa: F841
    # bring K here, wait for all threads, then compute row t


check("13.3", score_tile)

# %% [markdown]
# ## Registers
#
# Nearest of all are the registers: 65 536 of 32 bits per SM, shared out among its threads, at most 255 for one. A kernel that
# takes many leaves room for few threads. So an SM holds, by registers alone (rounded up to 8 per thread, whole warps):

# %%
def resident(registers):
    return 65536 // (-(-registers // 8) * 8 * 32) * 32


table(["registers per thread", "threads per SM (sm_80, sm_90)", "warps"], [[n, min(2048, resident(n)), min(64, resident(n) // 32)]
                                                            for n in (32, 64, 128, 168, 255)])
table(["architecture", "shared memory of a block, KB"], [[name, nbytes >> 10] for name, (_, nbytes) in ARCHITECTURES.items()])
assert resident(32) == 2048 and resident(255) == 256

# %% [markdown]
# ## The picture
#
# Left: which sectors a warp touches. Right: what the two kernels move, beside the least that any kernel must.

# %%
fig, axes = figure(2, width=11, height=3.6, width_ratios=(1, 1.3))
for n, stride in enumerate((1, 2, 4, 8)):
    first = np.arange(32) * stride * 4 // 32
    axes[0].eventplot([np.unique(first)], lineoffsets=n, linelengths=0.7, linewidths=4, colors="#0072B2")
    axes[0].text(33, n, f"{by_stride[stride]} sectors", va="center", fontsize=9)
axes[0].set(yticks=range(4), yticklabels=["stride 1", "stride 2", "stride 4", "stride 8"], xlim=(-1, 43), ylim=(3.6, -0.6),
            xlabel="sector of 32 bytes", title="one load of a warp, float32")
axes[1].set_title(f"global memory, L = {length}, D = {d}, one head")
bars(axes[1], {name: n / 1000 for name, n in (moved | {"least: Q, K, V in, O out": least}).items()}, "KB moved", digits=0)

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert moved["one thread per row"] > 7 * moved["tiles in shared memory"] and moved["tiles in shared memory"] > 5 * least
assert by_stride == {0: 1, 1: 4, 2: 8, 4: 16, 8: 32, 16: 32}
assert counted["shuffled"] > 1.5 * counted["in order"]

# %% [markdown]
# **What you can do now**
#
# * write a CUDA kernel with shared memory and a barrier, and run it without a GPU,
# * count the sectors of a load before you run it,
# * say what a warp costs whose threads do different things.
#
# **Next:** [14](14_fragments.ipynb). The result of one tensor-core product is the operand of the next, without moving.
