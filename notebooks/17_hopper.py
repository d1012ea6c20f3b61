# %% [markdown]
# # 17. Hopper: TMA, mbarrier, wgmma, specialised warps
#
# After this chapter you can
#
# * let one thread copy a complete tile, and wait for it with a barrier that counts bytes,
# * compute which stage of a ring a tile is in, and which phase of its barrier to wait for,
# * multiply with `wgmma`, whose operands stay in shared memory and whose result comes later,
# * say what specialised warps and overlap are for, and how much they can gain at your head size.
#
# **The question:** in chapter 16 every warp copied tiles *and* multiplied. Can the copying be taken from the warps that multiply, and how does a
# warp then know that its tile has come?
#
# All of this exists from the H100 on (sm_90a). A kernel needs none of it to be right, only to be fast. A mistake with it can stay
# unnoticed for long, so most of the emulator's rules are about this part.

# %% [markdown] tags=["map"]
# > **The idea:** One warp copies tiles, the others multiply; barriers that count bytes say when a tile is ready.
# >
# > **Where you are:** GPU path, stop 5 of 6: [13](13_threads_warps_memory.ipynb) → [14](14_fragments.ipynb) → [15](15_bank_conflicts.ipynb) → [16](16_flash_attention_2.ipynb) → **17** → [23](23_broken_kernels.ipynb)
# >
# > **Time:** 35 minutes to read, 30 for the exercises. **Before it:** [16](16_flash_attention_2.ipynb).
# >
# > **Terms:** [tma](../docs/glossary.md#tma), [stage](../docs/glossary.md#stage), [mbarrier](../docs/glossary.md#mbarrier), [phase](../docs/glossary.md#phase), [parity](../docs/glossary.md#parity), [fence](../docs/glossary.md#fence), [wgmma](../docs/glossary.md#wgmma), [warpgroup](../docs/glossary.md#warpgroup), [named barrier](../docs/glossary.md#named-barrier), [descriptor](../docs/glossary.md#descriptor), [warp specialisation](../docs/glossary.md#warp-specialisation).
# >
# > **Papers:** [FlashAttention-3](https://arxiv.org/abs/2407.08608).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import numpy as np
from numba import cuda
from numba.cuda import types

from numflash.course import bars, card, check, drawings, figure, table
from numflash.cuda import emulate, study
from numflash.cuda.compile import Source
from numflash.cuda.emulator import EmulatorError, TensorMap
from numflash.cuda.instructions import ptx
from numflash.cuda.kernels.flash_hopper import DESCRIPTOR, descriptor

u32, u64, i32, f32 = types.uint32, types.uint64, types.int32, types.float32
rng = np.random.default_rng(0)
device = card()

# %% [markdown]
# ## TMA: a tile in one instruction
#
# In chapter 16 every thread computed addresses and copied its 16 bytes. From Hopper on there is a copy engine, the *TMA* (tensor memory
# accelerator). A *tensor map* describes the array in global memory: address, shape, strides, the box to copy, the swizzle. One thread
# says: this box, to that place, and tell this barrier. The engine computes the addresses, does the XOR of chapter 15, and writes zeros for
# what is outside of the array.
#
# The calls of the kernel below, in their order:
#
# * `ptx.mbarrier_init(bar, u32(n))`: the 8 bytes at the shared address `bar` become a barrier that expects n arrivals in each phase.
# * `ptx.fence_mbarrier_init()` and `ptx.tensormap_acquire(maps)`: *fences*. What a thread has just written is not
#   visible to the copy engine before a fence; here it needs the new barrier and the tensor map.
# * `ptx.mbarrier_expect(bar, u32(bytes))`: arrives, and announces that so many bytes will come.
# * `ptx.tma_load_4d(place, maps, channel, row, head, batch, bar)`: copies the box that begins at these four coordinates (the fastest one
#   first), and counts its bytes at `bar`.
# * `ptx.mbarrier_wait(bar, u32(parity))`: waits until a phase is over; the next section says which.
# * `ptx.load_shared_v4(four, 0, address)`: 16 bytes from shared memory into four registers.

# %%
def bring(maps, out, first):
    """64 rows of 64 halves from row `first` on, by TMA; then out as they lie in shared memory."""
    shared = cuda.shared.array(0, u32)
    t = i32(cuda.threadIdx.x)
    bar = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)       # the swizzle counts from multiples of 1024
    tile = bar + u32(1024)
    if t == 0:
        ptx.mbarrier_init(bar, u32(1))                     # one arrival per phase
        ptx.fence_mbarrier_init()
        ptx.tensormap_acquire(maps)
    cuda.syncthreads()
    if t == 0:
        ptx.mbarrier_expect(bar, u32(64 * 128))            # arrives, and announces 8192 bytes
        ptx.tma_load_4d(tile, maps, i32(0), first, i32(0), i32(0), bar)
    ptx.mbarrier_wait(bar, u32(0))
    four = cuda.local.array(4, u32)
    for i in range(4):
        ptx.load_shared_v4(four, 0, tile + u32((t + 128 * i) * 16))
        ptx.store_global_v4(out + u64((t + 128 * i) * 16), four, 0)


keys = rng.standard_normal((1, 1, 100, 64)).astype(np.float16)             # batch, head, row, channel
seen = np.zeros((64, 8, 8), np.float16)                                    # row, chunk, half
source = Source(bring, types.void(u64, u64, i32), 128, 64 * 128 + 2048)
report = emulate(source, 1, None, ([TensorMap(keys, (1, 1, 64, 64))], seen, np.int32(64)), arch="sm_90a")
wanted = np.zeros((64, 64), np.float16)
wanted[:36] = keys[0, 0, 64:]
row, chunk = np.arange(64)[:, None], np.arange(8)[None]
assert np.array_equal(seen[row, chunk ^ (row % 8)], wanted.reshape(64, 8, 8))
asked = {name: n for name, n in report.opcodes.items() if name.startswith(("cp", "mbarrier"))}
table(["instruction", "warps that ran it"], list(asked.items()))
print(f"{report.tma_copied} bytes copied")

# %% [markdown]
# Rows 64 to 99 exist; the other 28 rows of the box are zeros, and no thread compared an index. With `cp.async` (chapter 16) the same tile
# is 512 pieces of 16 bytes: 16 warp-instructions, and address arithmetic for each.
#
# ## mbarrier: a barrier that counts bytes
#
# A block barrier waits for threads. An *mbarrier* is stored in shared memory, counts arrivals **and** bytes, and can be waited for by
# others than those that arrive. When both counts are complete, its *phase* ends and the next begins: 0, 1, 2, 3 and so on. The *parity* of a
# phase is its number modulo 2. A thread that waits names the phase by its parity: `wait(bar, p)` returns when the phase with parity p is
# over. (One bit is enough, because no thread can be more than one phase behind.)
#
# FlashAttention-3 keeps tiles in a *ring* of stages:
#
# * A *stage* is a place for one tile in shared memory. Tile n goes to stage n % stages.
# * One warp, the *producer*, copies tiles into the stages. Other warps, the *consumers*, compute with them.
# * Each stage has two barriers: *full* (the tile has come) and *empty* (all consumers have read it). Each use of a stage is one phase of both.
#
# With two stages, stage 0 holds the tiles 0, 2, 4. This happens at its barriers:
#
# | tile | the consumers wait for | the producer waits for, before it copies |
# |---|---|---|
# | 0 | phase 0 of full, parity 0 | nothing: the stage is new |
# | 2 | phase 1 of full, parity 1 | phase 0 of empty (tile 0 has been read), parity 0 |
# | 4 | phase 2 of full, parity 0 | phase 1 of empty (tile 2 has been read), parity 1 |
#
# For tile 0 the producer calls the same `wait`, with parity 1: that stands for the phase *before* phase 0, which counts as over, so the call
# returns at once.
#
# **Exercise 1.** For tile n of a ring of `stages` stages: its stage, the parity the consumers wait for on *full*, and the parity the producer
# waits for on *empty* before it overwrites the stage. (The table has the answers for n = 0, 2 and 4 of two stages.)

# %% tags=["exercise"]
def place(n, stages):
    return ...


check("17.1", place)

# %% [markdown]
# Step through the ring. What each side does, and which wait it has passed, is printed below the stages. In Jupyter, change the number of
# stages and the times: with one stage the consumers wait for every copy; with two they wait only if a copy takes longer than the work on a
# tile. More stages than two help against copies that take *unequal* times, which this picture does not have.

# %% tags=["drawing"]
drawings.ring_of_stages()

# %% [markdown]
# **Exercise 2.** Write the pipeline. A block has 96 threads:
#
# * Thread 64 is the producer. It brings tile n, 8 rows of 64 halves (1024 bytes) from row 8 n on, to stage n & 1 by TMA.
# * Threads 0 to 63 are the consumers. They add up the 32-bit words of all tiles: consumer t takes the 16 bytes at 16 t of the stage, and
#   stores its sum in `out[t]`.
# * The barriers are set up for you: `full` of stage s at `base + 8 s`, `empty` at `base + 16 + 8 s`. The stages are at `base + 1024` and
#   `base + 2048`.
# * When a consumer has read a tile, it tells `empty` so: `ptx.mbarrier_arrive` takes the address of a barrier.
#
# (As in `bring` above, addresses, parities and counts are `u32(...)`, coordinates `i32(...)`.)

# %% tags=["exercise"]
def pipeline(maps, out, tiles):
    shared = cuda.shared.array(0, u32)
    t = i32(cuda.threadIdx.x)
    base = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)
    if t == 0:
        for s in range(2):
            ptx.mbarrier_init(base + u32(8 * s), u32(1))   # full: one arrival, and bytes
            ptx.mbarrier_init(base + u32(16 + 8 * s), u32(64))  # empty: every consumer arrives
        ptx.fence_mbarrier_init()
        ptx.tensormap_acquire(maps)
    cuda.syncthreads()
    # if t >= 64: thread 64 brings tiles; else: consume them


check("17.2", pipeline)

# %% [markdown]
# ## wgmma: operands in shared memory, results later
#
# `wgmma.m64n64k16` belongs to 128 threads, four warps, a *warpgroup*. It multiplies 64 x 16 by 16 x 64 numbers: 2 * 64 * 64 * 16 operations, as
# many as 32 of chapter 14's products. It reads both operands from shared memory, so there is no `ldmatrix`, and no registers hold operands.
# Where they are, it is told by *descriptors*, numbers of 64 bits that hold the start of a tile, its strides and its swizzle. And it is
# asynchronous, in four steps:
#
# * `wgmma_fence` says that ordinary instructions are done with the registers of the sums; from now on the tensor core may change them.
# * `multiply` only *starts* a product. The next line of the program runs before it is done.
# * `wgmma_commit` closes a group of products that were started.
# * `wgmma_wait` waits for such groups. Until then no instruction may use the sums. (`settle` keeps the compiler from moving a use of the sums
#   to a place before the wait.)

# %%
multiply, settle, wait_none = ptx.wgmma(64, "float16", False), ptx.register_fence(32), ptx.wgmma_wait[0]


def make_scores(wait):
    def scores(maps, out):
        """Q . K^T for 64 queries and 64 keys of 64 channels; maps of Q and K."""
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
        ptx.wgmma_fence()
        for step in range(4):                              # 16 channels are 32 bytes: the descriptor counts in units of 16
            multiply(s, 0, descriptor(DESCRIPTOR, sq) + u64(2 * step), descriptor(DESCRIPTOR, sk) + u64(2 * step), i32(step != 0))
        ptx.wgmma_commit()
        if wait:
            wait_none()
        settle(s, 0)
        for i in range(32):                                # the layout of chapter 14, tile after tile
            out[warp * 16 + (lane >> 2) + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)] = s[i]
    return Source(scores, types.void(u64, types.Array(f32, 2, "C")), 128, 2 * 64 * 128 + 2048)


q, k = (rng.standard_normal((1, 1, 64, 64)).astype(np.float16) for _ in range(2))
maps, out = [TensorMap(x, (1, 1, 64, 64)) for x in (q, k)], np.zeros((64, 64), np.float32)
report = emulate(make_scores(True), 1, None, (maps, out), arch="sm_90a")
exact = q[0, 0].astype(float) @ k[0, 0].T.astype(float)
per_product = report.tensor_flops // 4
print(f"largest error {np.abs(out - exact).max():.1e}; {report.tensor_flops} flop in 4 products of {per_product}: "
      f"each replaces {per_product // 4096} of m16n8k16; ldmatrix: {report.opcodes.get('ldmatrix', 0)}")
assert np.abs(out - exact).max() < 1e-4 and per_product == 2 * 64 * 64 * 16

# %% [markdown]
# Forget the wait, and on a card you read registers that may or may not be finished. Here:

# %%
forgotten = None
try:
    emulate(make_scores(False), 1, None, (maps, out), arch="sm_90a")
except EmulatorError as error:
    forgotten = error.kind
    print(str(error).split("\n")[0].split(" [")[0])
assert forgotten == "pending"

# %% [markdown]
# ## Specialised warps
#
# Now copies need one thread, and products need registers. So FlashAttention-3 gives the warps different tasks: one warpgroup only copies
# tiles, two compute, 64 queries each. The kernel starts with equal shares of the register file (168 for each of 384 threads). A producer
# needs few: it holds addresses only. A consumer holds scores and outputs, and would spill with 168. So the producer gives some back and
# the consumers take them, by the instruction `setmaxnreg`, in steps of 8.
#
# **Exercise 3.** The SM has 65 536 registers; three warpgroups of 128 threads. How many may each consumer thread have, a multiple
# of 8 and at most 240, if each producer thread keeps `n`?

# %% tags=["exercise"]
def consumers(n):
    return ...


check("17.3", consumers)

# %%
assert 128 * 24 + 256 * 240 == 384 * 168 <= 65536          # the shipped kernel's numbers: nothing is left over
rows = {row["rung"]: row for row in study.climb(128, 64, rungs=("7a", "7b", "8", "9a", "9b"))}
table(["rung", "warp instr.", "tensor op.", "memory, copies", "shared KB read", "error"],
      [[f"{n}  {r['name']}", r["warp_instructions"], r["tensor_operations"],
        sum(r["instructions"].get(x, 0) for x in ("memory", "asynchronous")), r["shared_bytes_read"] / 1000, f"{r['error']:.1e}"]
       for n, r in rows.items()])
if rows["8"]["registers"] is not None:
    print("registers at the start:", rows["8"]["registers"], "  stack:", rows["8"]["stack"], "  spills:", rows["8"]["spills"])
    assert rows["8"]["registers"] == 168 and rows["8"]["stack"] == rows["9a"]["stack"] == 0

# %% [markdown]
# The same attention as in chapter 16: the loads of fragments are gone, 1024 products became 96 warp-level parts of 24 wgmma, and one
# thread does the copying. Specialised warps gain time by TMA, wgmma and setmaxnreg together. An L4 has none of the three, and chapter 16
# counts what specialised warps cost there (rung 7s).
#
# ## Softmax beside the products
#
# What is left is the softmax: exponentials run on a small unit, 16 per cycle and SM. An H100 has 132 SMs, at 1.83 GHz, and 989
# TFLOP/s of dense float16 products (data sheet). A score costs 4 D flop and one exponential:

# %%
SM, HZ, TENSOR = 132, 1.83e9, 989e12
exponentials = SM * HZ * 16
share = {d: (1 / exponentials) / (4 * d / TENSOR) for d in (64, 128, 256)}
table(["D", "products, ps per score", "exponential, ps per score", "ratio", "one after the other / side by side"],
      [[d, 1e12 * 4 * d / TENSOR, 1e12 / exponentials, s, (1 + s) / max(1, s)] for d, s in share.items()])
assert 0.45 < share[128] < 0.55 and share[64] > 0.95

# %% [markdown]
# At D = 64 the exponentials take as long as all products. If they wait for each other, each of the two units stands still for half of the
# time. Two things let them run side by side:
#
# * *Within a warpgroup* (rung 9a), the order of the starts changes, since products are asynchronous. Start S of tile n; start O of tile n - 1;
#   wait for S only; do the softmax of tile n while O runs.
# * *Between the two warpgroups* (rung 9b), they take turns, called *ping-pong*: the products of one run during the softmax of the other. By
#   themselves they may or may not come to alternate. Two *named barriers* (barriers of the block with numbers, for some of its warps) make
#   sure: a warpgroup that has started its products lets the other one go.
#
# A model of both: two units, each serves in the order of asking; a product of a tile takes 0.5, its exponentials the ratio above.

# %%
def program(overlap, tiles):
    """What a warpgroup does, step by step."""
    steps = []
    for n in range(tiles):
        steps.append(("start", f"S{n}"))
        if overlap and n:
            steps.append(("start", f"O{n - 1}"))
        steps += [("wait", f"S{n}"), ("softmax", f"e{n}")]
        if overlap and n:
            steps.append(("wait", f"O{n - 1}"))
        if not overlap:
            steps += [("start", f"O{n}"), ("wait", f"O{n}")]
    return steps + ([("start", f"O{tiles - 1}"), ("wait", f"O{tiles - 1}")] if overlap else [])


def timeline(overlap, groups, tiles, ratio):
    """(unit, warpgroup, start, length, label) of each piece, and the end: unit 0 multiplies, unit 1 takes exponentials."""
    todo, now, done = [program(overlap, tiles) for _ in range(groups)], [0.0] * groups, [{} for _ in range(groups)]
    free, pieces = [0.0, 0.0], []
    while any(todo):
        g = min((g for g in range(groups) if todo[g]), key=lambda g: now[g])
        kind, label = todo[g].pop(0)
        if kind == "wait":
            now[g] = max(now[g], done[g][label])
            continue
        unit, width = (0, 0.5) if kind == "start" else (1, ratio)
        start = max(now[g], free[unit])
        free[unit] = done[g][label] = start + width
        pieces.append((unit, g, start, width, label))
        if kind == "softmax":
            now[g] = free[unit]
    return pieces, max(now)


model = {d: {(rung, groups): timeline(rung == 9, groups, 64, ratio)[1] / (64 * groups) for rung in (8, 9) for groups in (1, 2)}
         for d, ratio in share.items()}
table(["D", "rung 8, alone", "rung 9a, alone", "rung 8, two warpgroups", "rung 9b", "least"],
      [[d, m[8, 1], m[9, 1], m[8, 2], m[9, 2], max(1.0, share[d])] for d, m in model.items()])

# %% [markdown]
# The numbers are times, in units of a tile's products. Rung 9a hides the softmax behind O but not behind S; two warpgroups can hide all
# of it, as long as they stay out of step, which 9b ensures. Latencies, barriers and the rest of the softmax are not in the model. How
# fast that is, only a card can tell. An H200 (16,896 rows, 4,096 keys): rung 8 393 TFLOP/s, 9a 353, 9b 411. The overlap within a
# warpgroup gains time only if the warpgroups take turns. The counters say that rung 9a costs hardly any instructions more, although the
# weights are now in registers beside the next scores. Rung 9b adds only its barriers. No bit of the result changes.

# %%
print("warp-instructions:", {n: rows[n]["warp_instructions"] for n in ("8", "9a", "9b")}, f" all {rows['9a']['tensor_flops']} flop")
assert {rows[n]["tensor_flops"] for n in ("8", "9a", "9b")} == {4 * 128 * 128 * 64} and rows["9a"]["error"] == rows["9b"]["error"]
if device is None or device.arch != "sm_90a":
    print("no Hopper card here: no times")
else:
    clocked = study.clock()
    table(["rung", "us, 4096 x 4096, one head"], [[n, 1e6 * clocked[n][0]] for n in ("7a", "7b", "8", "9a", "9b")])

# %% [markdown]
# ## The picture, and the ceiling

# %%
fig, axes = figure(2, width=11, height=3.6, width_ratios=(1.5, 1))
rules = {"rung 8,\none warpgroup": (False, 1), "rung 9a,\none warpgroup": (True, 1), "rung 9b,\ntwo warpgroups": (True, 2)}
for n, (overlap, groups) in enumerate(rules.values()):
    for unit, g, start, width, label in timeline(overlap, groups, 4 // groups, share[64])[0]:
        colour = (("#B7D3E8", "#E69F00"), ("#0072B2", "#F0E442"))[g][unit]
        axes[0].barh(3 * n + unit, width, left=start, color=colour, edgecolor="black", height=0.8, hatch="//" if g else "")
        axes[0].text(start + width / 2, 3 * n + unit, label, ha="center", va="center", fontsize=7,
                     bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5} if g else None)
axes[0].set(yticks=[0.5, 3.5, 6.5], yticklabels=list(rules), ylim=(7.6, -0.6), xlabel="time (the products of a tile take 1)",
            title="D = 64, four tiles: products above, exponentials below")
axes[1].set_title("128 x 128, D = 64, one head")
bars(axes[1], {f"rung {n}": r["warp_instructions"] for n, r in rows.items()}, "warp-instructions", digits=0)

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert all(m[8, 1] > m[9, 1] > m[9, 2] >= 0.99 * max(1, share[d]) for d, m in model.items())
assert np.isclose(model[64][8, 1], 2, atol=0.01) and np.isclose(model[64][9, 1], 1.5, atol=0.02) and model[64][8, 2] < 1.05
assert rows["8"]["tensor_operations"] == 96 and rows["8"]["warp_instructions"] < rows["7a"]["warp_instructions"]

# %% [markdown]
# **What you can do now**
#
# * let one thread copy a tile, and wait for its bytes,
# * compute the stage of a tile and the parities of its two barriers,
# * say what wgmma, specialised warps and ping-pong are for.
#
# **Next:** [23](23_broken_kernels.ipynb). Read what the emulator reports, then mend the kernel.
