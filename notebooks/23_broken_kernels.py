# %% [markdown]
# # 23. Twelve broken kernels
#
# Each kernel below has one fault. The check runs it in the emulator under four schedules (which warp goes first) and prints what it found.
# Read the report, find the fault, repair the kernel in its cell, and run the cell again. If you are stuck, `hint("23.1")` gives the first hint.
#
# Among the faults are a wrong parity, bank conflicts, a missing rescale, a race, a wrong count, missing barriers, a bad start, a missing
# fence and a wrong edge, in no order.
#
# After this chapter you can
#
# * read the emulator's reports: which rule was broken, by which line,
# * tell faults of the machine (barriers, races, parities, fences) from faults of the algorithm (rescaling, masks),
# * say why a kernel that gave the right result may still be wrong.
#
# Tasks 1 to 8 need chapters 01, 13 and 15; tasks 9 to 12 need chapter 17.

# %% [markdown] tags=["map"]
# > **The idea:** Read what the emulator reports, then mend the kernel.
# >
# > **Where you are:** GPU path, stop 6 of 6: [13](13_threads_warps_memory.ipynb) → [14](14_fragments.ipynb) → [15](15_bank_conflicts.ipynb) → [16](16_flash_attention_2.ipynb) → [17](17_hopper.ipynb) → **23**
# >
# > **Time:** 35 minutes to read, 60 for the exercises. **Before it:** [01](01_online_softmax.ipynb), [13](13_threads_warps_memory.ipynb), [15](15_bank_conflicts.ipynb), [17](17_hopper.ipynb).
# >
# > **Terms:** [race](../docs/glossary.md#race), [barrier](../docs/glossary.md#barrier), [bank conflict](../docs/glossary.md#bank-conflict), [parity](../docs/glossary.md#parity), [online softmax](../docs/glossary.md#online-softmax).
# >
# > **Papers:** [compute-sanitizer](https://docs.nvidia.com/compute-sanitizer/).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import numpy as np
from numba import cuda
from numba.cuda import types

from numflash.course import check, drawings
from numflash.cuda.instructions import ptx
from numflash.cuda.kernels.flash_hopper import DESCRIPTOR, descriptor

u32, u64, i32, f32 = types.uint32, types.uint64, types.int32, types.float32
multiply, settle, wait_none = ptx.wgmma(64, "float16", False), ptx.register_fence(32), ptx.wgmma_wait[0]

# %% [markdown]
# ## How to read a report
#
# The check says what happened. The first word after "the emulator reports" is the rule that was broken:
#
# | word | means | usual cause |
# |---|---|---|
# | uninitialised | shared memory is read before it was written | a missing barrier |
# | race | two warps use a word, one writes, and no barrier orders them | a missing barrier, often the second one of a loop |
# | out-of-bounds | an address outside every array | no test for the last threads |
# | divergent | some threads of a warp come to an instruction that all must run | a barrier or a warp operation in a branch |
# | deadlock | all threads wait | a wrong parity, byte or arrival count |
# | pending | data is used before the wait that makes it valid | a missing wait |
# | protocol | a barrier, copy or fence is used against its rules | a missing fence or init |
#
# After it comes the line of your kernel that the emulator stopped at. The fault is often a few lines *above*: the emulator names the
# access that went wrong, and what is missing is what should have come before it. Where no rule is broken, the check compares the numbers
# with float64 and says in which rows they differ.
#
# The picture shows a race: two warps, one shared word each, and a barrier that is there or not. The emulator keeps such a record for
# every word: who wrote it, who read it, and since which barrier.

# %% tags=["drawing"]
drawings.race()

# %% [markdown]
# Now the kernels. Each report below is that of the kernel as it is shown.

# %% [markdown]
# ## 1. Backwards
#
# `reverse` writes x backwards, by way of shared memory. One block of 128 threads, four warps.

# %% tags=["exercise"]
def reverse(x, out):
    shared = cuda.shared.array(128, np.float32)
    t = cuda.threadIdx.x
    shared[t] = x[t]
    out[t] = shared[127 - t]


check("23.1", reverse)

# %% [markdown]
# ## 2. Running sums
#
# `running_sums` adds up the rows of x (4, 128), each read backwards. There is a barrier between the write and the read. It is not
# enough.

# %% tags=["exercise"]
def running_sums(x, out):
    shared = cuda.shared.array(128, np.float32)
    t = cuda.threadIdx.x
    total = np.float32(0)
    for n in range(x.shape[0]):
        shared[t] = x[n, t]
        cuda.syncthreads()                             # all have written this row
        total += shared[127 - t]
    out[t] = total


check("23.2", running_sums)

# %% [markdown]
# ## 3. Twice as much
#
# `scale` doubles 100 numbers with 4 blocks of 32 threads.

# %% tags=["exercise"]
def scale(x, out):
    i = cuda.grid(1)
    out[i] = np.float32(2) * x[i]


check("23.3", scale)

# %% [markdown]
# ## 4. Attention, one thread per row
#
# `attention` is chapter 01 on a GPU, one thread per row: 32 queries and keys of 16 channels, weights 2**score. The emulator has nothing to
# report, because no rule of the machine is broken. The check compares the numbers.

# %% tags=["exercise"]
def attention(q, k, v, out):
    row = cuda.threadIdx.x
    o = cuda.local.array(16, np.float32)
    m, l = np.float32(-1e30), np.float32(0)
    for c in range(16):
        o[c] = np.float32(0)
    for j in range(32):
        s = np.float32(0)
        for c in range(16):
            s += q[row, c] * k[j, c]
        top = ptx.fmax(m, s)
        shrink, p = ptx.ex2(m - top), ptx.ex2(s - top)
        m = top
        l = l * shrink + p
        for c in range(16):
            o[c] += p * v[j, c]
    for c in range(16):
        out[row, c] = o[c] / l


check("23.4", attention)

# %% [markdown]
# ## 5. Shifted scores
#
# The same kernel with a number `shift` added to all scores, which changes nothing in softmax. Here it is -400.

# %% tags=["exercise"]
def shifted_attention(q, k, v, shift, out):
    row = cuda.threadIdx.x
    o = cuda.local.array(16, np.float32)
    m, l = np.float32(0), np.float32(0)
    for c in range(16):
        o[c] = np.float32(0)
    for j in range(32):
        s = np.float32(0)
        for c in range(16):
            s += q[row, c] * k[j, c]
        s += shift[0]
        top = ptx.fmax(m, s)
        shrink, p = ptx.ex2(m - top), ptx.ex2(s - top)
        m = top
        l = l * shrink + p
        for c in range(16):
            o[c] = o[c] * shrink + p * v[j, c]
    for c in range(16):
        out[row, c] = o[c] / l


check("23.5", shifted_attention)

# %% [markdown]
# ## 6. Causal attention
#
# Causal: query i attends to the keys up to its own.

# %% tags=["exercise"]
def causal_attention(q, k, v, out):
    row = cuda.threadIdx.x
    o = cuda.local.array(16, np.float32)
    m, l = np.float32(-1e30), np.float32(0)
    for c in range(16):
        o[c] = np.float32(0)
    for j in range(row):
        s = np.float32(0)
        for c in range(16):
            s += q[row, c] * k[j, c]
        top = ptx.fmax(m, s)
        shrink, p = ptx.ex2(m - top), ptx.ex2(s - top)
        m = top
        l = l * shrink + p
        for c in range(16):
            o[c] = o[c] * shrink + p * v[j, c]
    for c in range(16):
        out[row, c] = o[c] / l


check("23.6", causal_attention)

# %% [markdown]
# ## 7. Sums of rows
#
# `row_sums` adds up the rows of x (32, 32) with one warp. The numbers are right. It takes 32 times as many passes over the banks as it
# needs when it reads.

# %% tags=["exercise"]
def row_sums(x, out):
    shared = cuda.shared.array((32, 32), np.float32)
    t = cuda.threadIdx.x
    for r in range(32):
        shared[r, t] = x[r, t]
    cuda.syncwarp()
    total = np.float32(0)
    for c in range(32):
        total += shared[t, c]
    out[t] = total


check("23.7", row_sums)

# %% [markdown]
# ## 8. The sum of a block
#
# `block_sum` adds up 128 numbers by halves: 64 threads add the upper half to the lower one, then 32 threads, and so on.

# %% tags=["exercise"]
def block_sum(x, out):
    shared = cuda.shared.array(128, np.float32)
    t = cuda.threadIdx.x
    shared[t] = x[t]
    cuda.syncthreads()
    half = 64
    while half > 0:
        if t < half:
            shared[t] += shared[t + half]
            cuda.syncthreads()
        half //= 2
    if t == 0:
        out[0] = shared[0]


check("23.8", block_sum)

# %% [markdown]
# ## 9. A ring of two stages
#
# `pipeline` is chapter 17's ring with two stages: thread 64 brings tiles of 8 x 64 halves by TMA, threads 0 to 63 add up their words.
# Stage n & 1 has a barrier `full` and a barrier `empty`.

# %% tags=["exercise"]
def pipeline(maps, out, tiles):
    shared = cuda.shared.array(0, u32)
    t = i32(cuda.threadIdx.x)
    base = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)
    if t == 0:
        for s in range(2):
            ptx.mbarrier_init(base + u32(8 * s), u32(1))          # full: one arrival, and bytes
            ptx.mbarrier_init(base + u32(16 + 8 * s), u32(64))    # empty: every consumer arrives
        ptx.fence_mbarrier_init()
        ptx.tensormap_acquire(maps)
    cuda.syncthreads()
    if t >= 64:                                            # the producer's warp
        if t == 64:
            for n in range(tiles):
                full, empty = base + u32(8 * (n & 1)), base + u32(16 + 8 * (n & 1))
                ptx.mbarrier_wait(empty, u32(((n >> 1) & 1) ^ 1))
                ptx.mbarrier_expect(full, u32(1024))                 # 8 rows of 64 halves
                ptx.tma_load_4d(base + u32(1024 + 1024 * (n & 1)), maps, i32(0), i32(8 * n), i32(0), i32(0), full)
    else:
        total, four = u32(0), cuda.local.array(4, u32)
        for n in range(tiles):
            full, empty = base + u32(8 * (n & 1)), base + u32(16 + 8 * (n & 1))
            ptx.mbarrier_wait(full, u32(n & 1))
            ptx.load_shared_v4(four, 0, base + u32(1024 + 1024 * (n & 1) + 16 * t))
            for e in range(4):
                total += four[e]
            ptx.mbarrier_arrive(empty)
        out[t] = total


check("23.9", pipeline)

# %% [markdown]
# ## 10. Scores by wgmma
#
# `scores` is chapter 17's product Q . K^T of 64 x 64 by `wgmma`.

# %% tags=["exercise"]
def scores(maps, out):
    shared = cuda.shared.array(0, u32)
    t = i32(cuda.threadIdx.x)
    lane, warp = t & 31, t >> 5
    bar = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)
    sq, sk = bar + u32(1024), bar + u32(1024 + 64 * 128)
    if t == 0:
        ptx.mbarrier_init(bar, u32(1))
        ptx.fence_mbarrier_init()
        ptx.tensormap_acquire(maps)
        ptx.tensormap_acquire(maps + u64(128))
    cuda.syncthreads()
    if t == 0:
        ptx.mbarrier_expect(bar, u32(2 * 64 * 128))
        ptx.tma_load_4d(sq, maps, i32(0), i32(0), i32(0), i32(0), bar)
        ptx.tma_load_4d(sk, maps + u64(128), i32(0), i32(0), i32(0), i32(0), bar)
    ptx.mbarrier_wait(bar, u32(0))
    s = cuda.local.array(32, f32)
    for step in range(4):
        multiply(s, 0, descriptor(DESCRIPTOR, sq) + u64(2 * step), descriptor(DESCRIPTOR, sk) + u64(2 * step), i32(step != 0))
    ptx.wgmma_commit()
    wait_none()
    settle(s, 0)
    for i in range(32):
        out[warp * 16 + (lane >> 2) + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)] = s[i]


check("23.10", scores)

# %% [markdown]
# ## 11. A fast producer
#
# A ring with three stages: stage n % 3 and its two barriers are used by tile n for the (n // 3)-th time. The producer is fast.

# %% tags=["exercise"]
def pipeline(maps, out, tiles):
    shared = cuda.shared.array(0, u32)
    t = i32(cuda.threadIdx.x)
    base = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)
    if t == 0:
        for s in range(3):
            ptx.mbarrier_init(base + u32(8 * s), u32(1))          # full: one arrival, and bytes
            ptx.mbarrier_init(base + u32(24 + 8 * s), u32(64))    # empty: every consumer arrives
        ptx.fence_mbarrier_init()
        ptx.tensormap_acquire(maps)
    cuda.syncthreads()
    if t >= 64:                                            # the producer's warp
        if t == 64:
            for n in range(tiles):
                s, use = n % 3, n // 3
                full, empty = base + u32(8 * s), base + u32(24 + 8 * s)
                ptx.mbarrier_expect(full, u32(1024))           # 8 rows of 64 halves
                ptx.tma_load_4d(base + u32(1024 + 1024 * s), maps, i32(0), i32(8 * n), i32(0), i32(0), full)
    else:
        total, four = u32(0), cuda.local.array(4, u32)
        for n in range(tiles):
            s, use = n % 3, n // 3
            full, empty = base + u32(8 * s), base + u32(24 + 8 * s)
            ptx.mbarrier_wait(full, u32(use & 1))          # consumers: this use of the stage
            ptx.load_shared_v4(four, 0, base + u32(1024 + 1024 * s + 16 * t))
            for e in range(4):
                total += four[e]
            ptx.mbarrier_arrive(empty)
        out[t] = total


check("23.11", pipeline)

# %% [markdown]
# ## 12. A ring that stops
#
# A ring with two stages for smaller tiles: 4 rows of 64 halves, and 32 consumers; thread 32 brings the tiles. It stops and never ends;
# the emulator says who waits for what.

# %% tags=["exercise"]
def pipeline(maps, out, tiles):
    shared = cuda.shared.array(0, u32)
    t = i32(cuda.threadIdx.x)
    base = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)
    if t == 0:
        for s in range(2):
            ptx.mbarrier_init(base + u32(8 * s), u32(1))          # full: one arrival, and bytes
            ptx.mbarrier_init(base + u32(16 + 8 * s), u32(32))    # empty: every consumer arrives
        ptx.fence_mbarrier_init()
        ptx.tensormap_acquire(maps)
    cuda.syncthreads()
    if t >= 32:                                            # the producer's warp
        if t == 32:
            for n in range(tiles):
                full, empty = base + u32(8 * (n & 1)), base + u32(16 + 8 * (n & 1))
                ptx.mbarrier_wait(empty, u32(((n >> 1) & 1) ^ 1))
                ptx.mbarrier_expect(full, u32(1024))
                ptx.tma_load_4d(base + u32(1024 + 1024 * (n & 1)), maps, i32(0), i32(4 * n), i32(0), i32(0), full)
    else:
        total, four = u32(0), cuda.local.array(4, u32)
        for n in range(tiles):
            full, empty = base + u32(8 * (n & 1)), base + u32(16 + 8 * (n & 1))
            ptx.mbarrier_wait(full, u32((n >> 1) & 1))                  # consumers: this use of the stage
            ptx.load_shared_v4(four, 0, base + u32(1024 + 1024 * (n & 1) + 16 * t))
            for e in range(4):
                total += four[e]
            ptx.mbarrier_arrive(empty)
        out[t] = total


check("23.12", pipeline)

# %% [markdown]
# ## What to take along
#
# Several of the twelve faults may give the right numbers on a card for a long time: whether a race is lost depends on which warp happens to
# be faster. A test that compares numbers would pass. The emulator finds them because it checks the rules and not only the result: it
# remembers for every word of shared memory who wrote it, and which barrier has made that visible to whom. On a card the tool
# `compute-sanitizer` does a part of this.

# %%
from numflash.course.exercises import answers

latest = {x.number: x.verdict for x in answers if x.number.startswith("23.")}
print(f"mended: {sum(verdict == 'right' for verdict in latest.values())} of 12")

# %% [markdown]
# **What you can do now**
#
# * read a report: the rule, the line, and who waits for what,
# * tell a fault of the machine from a fault of the algorithm,
# * say why a kernel that gave the right numbers may still be wrong.
#
# **Next:** [18](18_int8_equal_bits.ipynb). Integer sums have one result in any order, so CPU and GPU give the same bits.
