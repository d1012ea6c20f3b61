# %% [markdown]
# # 16. FlashAttention-2 in Numba
#
# After this chapter you can
#
# * read a complete FlashAttention-2 kernel, and say which decision each of its parts is,
# * climb from one thread per row to that kernel in seven steps, and name what each step saves in counted figures,
# * turn counts into the least time that a given card can take, and say which of its limits a kernel meets,
# * read the gain of each step in one table.

# %% [markdown] tags=["map"]
# > **The idea:** Chapter 01's loop on tensor cores, one improvement per rung.
# >
# > **Where you are:** GPU path, stop 4 of 6: [13](13_threads_warps_memory.ipynb) → [14](14_fragments.ipynb) → [15](15_bank_conflicts.ipynb) → **16** → [17](17_hopper.ipynb) → [23](23_broken_kernels.ipynb)
# >
# > **Time:** 35 minutes to read, 15 for the exercises. **Before it:** [01](01_online_softmax.ipynb), [14](14_fragments.ipynb), [15](15_bank_conflicts.ipynb).
# >
# > **Terms:** [rung](../docs/glossary.md#rung), [tensor core](../docs/glossary.md#tensor-core), [accumulator](../docs/glossary.md#accumulator), [bank conflict](../docs/glossary.md#bank-conflict), [barrier](../docs/glossary.md#barrier), [named barrier](../docs/glossary.md#named-barrier), [cp async](../docs/glossary.md#cp-async).
# >
# > **Papers:** [FlashAttention-2](https://arxiv.org/abs/2307.08691).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import inspect

from numflash.course import answer_of, card, check, figure, table
from numflash.cuda import study
from numflash.cuda.compile import compiled, sass
from numflash.cuda.cycles import main_loop
from numflash.cuda.device.operands import emulated
from numflash.cuda.study import pieces
from numflash.cuda.study.specialised import specialised
from numflash.cuda.study.tensor_cores import both_products, register_blocks

device = card()

# %% [markdown]
# ## What version 2 changed
#
# FlashAttention's first version (2022) already kept scores and weights on the chip. FlashAttention-2 (2023) changed three things:
#
# * fewer operations outside the products: O is divided once, at the end of a row, and not in every block (chapter 01, exercise 4),
# * query tiles are independent blocks: the loop over queries is outside, so one long sequence fills all SMs of a card,
# * each warp owns its rows of Q, instead of a part of the keys: no warp needs the sums of another one.
#
# ## The kernel
#
# A block of four warps owns 64 queries, each warp 16. Tiles of 64 keys come into shared memory one after another. Per tile: scores
# on the tensor cores, the online softmax of chapter 01 in registers, outputs on the tensor cores. This is the loop (rungs 4 and 5
# of the ladder). It is chapter 00's `tiled` again. Look for the four calls in the inner loop: copy, scores, softmax, outputs. The lines
# above them compute addresses (`sq`, `sk`, `sv` are the places of the tiles in shared memory) and make room for a lane's scores `s` and
# outputs `acc`.

# %%
print(inspect.getsource(both_products))

# %% [markdown]
# And these are its parts `softmax` and `outputs`. The first is chapter 01's step for the two rows of which a lane holds scores: the new
# maximum, the shrink factor `alpha`, the weights, their sum. (`ptx.ex2` is 2**x. `quad_max` is the maximum over the four lanes that share
# a row; the sums of these lanes are added once, at the end.) The second is chapter 14's step: the weights become operand A.

# %%
print(inspect.getsource(pieces.make_softmax))
print(inspect.getsource(pieces.make_outputs))

# %% [markdown]
# ## The ladder
#
# Seven steps lead there and beyond. Every rung is run and compared with float64 first; a rung that is wrong raises an error instead
# of a row. (`cp.async`, from rung 6 on, is a copy from global to shared memory that runs beside the program: the thread starts it, goes on,
# and waits for it later.)

# %%
length, d = 128, 64
FA2 = ("1", "2", "3", "4", "5a", "5b", "6", "7a", "7b", "7h")
rows = {row["rung"]: row for row in study.climb(length, d, rungs=FA2)}
for row in rows.values():
    print(f"{row['rung']:>2}  {row['name']}: {row['why']}")

# %% [markdown]
# Three tables of counts follow. Go down one column at a time, and look for the rung at which it changes. *error* is relative to float64;
# *tensor op.* are products on tensor cores; *global KB* is what the SMs ask of global memory, before any cache; *passes* and *conflicts*
# are those of chapter 15. The second table says what kinds of instructions there are, the third what one thread and one block need.
# (*stack* and *spills* are 0 where all numbers of a thread fit its registers.)

# %%
table(["rung", "error", "warp instr.", "tensor op.", "global KB", "shared KB read", "passes", "conflicts", "barriers"],
      [[n, f"{r['error']:.1e}", r["warp_instructions"], r["tensor_operations"], r["global_moved"] / 1000,
        r["shared_bytes_read"] / 1000, r["shared_wavefronts"], r["shared_conflicts"], r["barriers"]] for n, r in rows.items()])
table(["rung", "warp instr.", *study.MIX],
      [[n, r["warp_instructions"], *(f"{100 * sum(r['instructions'].get(x, 0) for x in kinds) / r['warp_instructions']:.0f} %"
                                     for kinds in study.MIX.values())] for n, r in rows.items()])
if rows["1"]["registers"] is not None:                     # needs the sass extra: cuobjdump and nvdisasm
    table(["rung", "registers", "stack", "spills", "shared memory of a block, KB"],
          [[n, r["registers"], r["stack"], r["spills"], r["shared_bytes"] / 1024] for n, r in rows.items()])
    assert {r["stack"] for r in rows.values()} == {r["spills"] for r in rows.values()} == {0}

# %% [markdown]
# **2** moves the traffic from global to shared memory. **3** shows that tensor cores for one of the two products gain little: the scalar
# P . V is as long as before, and the weights now go through shared memory. **4** is the large step: fewer instructions by an order of
# magnitude, because one instruction does 4096 flop. **5** removes the conflicts, **6** one of two barriers, and its copies run beside the
# arithmetic; a counter cannot show overlap, only a clock can. **7a** and **7b** use what is in registers more often (on a CPU that is
# chapter 06). From 4 on the largest class is moves and address arithmetic, nearly half of all PTX instructions.
#
# **Exercise 1.** How many m16n8k16 products does attention take: `queries` x `keys` with `d` channels, all multiples of 16?

# %% tags=["exercise"]
def products(queries, keys, d):
    return ...


check("16.1", products)

# %%
assert {rows[n]["tensor_operations"] for n in FA2[3:]} == {answer_of("16.1")(length, length, d)}

# %% [markdown]
# **Exercise 2.** In 7a a warp holds 16 queries, in 7b 32. How many bytes of K and V does it read from shared memory per product? A
# tile is 64 keys of D = 64 channels in float16, and a warp reads all of it. Give it for `rows` queries per warp.

# %% tags=["exercise"]
def bytes_per_product(rows):
    return ...


check("16.2", bytes_per_product)

# %%
q_once = length * d * 2
for n, per_warp in (("7a", 16), ("7b", 32)):
    assert rows[n]["shared_bytes_read"] == q_once + answer_of("16.2")(per_warp) * rows[n]["tensor_operations"]
print("bytes of K and V per product:", {n: answer_of("16.2")(r) for n, r in (("7a", 16), ("7b", 32), ("64 rows", 64))})

# %% [markdown]
# With 64 rows per warp it would be halved once more, to 64 bytes, but scores and outputs alone would be 256 registers, more than a thread
# has (255). In rung 8 (chapter 17) the products read shared memory without going through registers.
#
# ## The least time on a card
#
# A counter cannot say how long a kernel takes. It can say how long a card needs at the very least for what the kernel asks for. Take
# attention with B = 1, H = 8, L = 512, D = 64 on an L4. Its data sheet: 58 SMs at 2.04 GHz, 121 TFLOP/s on tensor cores, 300 GB/s, 48 MB of L2. An SM starts 4 warp-instructions per
# cycle, makes one pass over its banks per cycle, and a warp's 32 exponentials take it 2 cycles. The instructions counted are
# PTX; the machine's own differ somewhat.
#
# The counts are for 128 queries against 512 keys; the grid has 4 x 8 times as much.

# %%
SM, HZ, TENSOR, MEMORY = 58, 2.04e9, 121e12, 300e9
flop = 4 * 512 * 512 * 64 * 8
traffic = 4 * 512 * 64 * 2 * 8                             # Q, K, V once in, O once out
print(f"{flop / 1e9:.2f} GFLOP, {traffic / 1e6:.1f} MB; at least {1e6 * flop / TENSOR:.1f} us of products, "
      f"{1e6 * traffic / MEMORY:.1f} us of memory; K and V are {traffic / 2 / 48e6:.0%} of the L2")

q, k, v, exact = study.problem(512, d, seed=0)
scale = 4 * 8
bounds = {}
for rung in study.LADDER:
    if rung.number in ("2", "4", "5b", "7a", "7b"):
        out, _, r = emulated(study.launch(rung, q[:128], k, v))
        study.validated(rung, out, exact[:128])
        bounds[rung.number] = {
            "instructions": scale * sum(r.instructions.values()) / (SM * 4 * HZ),
            "tensor cores": scale * r.tensor_flops / TENSOR,
            "shared memory": scale * r.shared_wavefronts / (SM * HZ),
            "exponentials": scale * r.instructions["special"] * 2 / (SM * HZ),
            "memory, least": traffic / MEMORY}
table(["us at least", *bounds["2"]], [[n, *(1e6 * t for t in b.values())] for n, b in bounds.items()])

# %% [markdown]
# Scalar arithmetic (rung 2) costs tens of microseconds of instructions alone. With tensor cores (4) they shrink by more than ten
# times, and now the bank conflicts are what is longest. Without them (5b), and with registers used well (7b), no limit is above
# the few microseconds that memory takes anyway.
#
# The limits run side by side: what counts is the largest, not the sum. A kernel that takes much longer than its largest limit
# waits for something that no counter here shows: barriers, latency, too few warps.

# %%
largest = {n: max(b, key=b.get) for n, b in bounds.items()}
table(["rung", "longest limit", "us at least"], [[n, largest[n], 1e6 * bounds[n][largest[n]]] for n in bounds])

# %% [markdown]
# ## Specialised warps on this card
#
# All warps of FlashAttention-2 do the same, on rows of their own; specialised warps come with FlashAttention-3 (chapter 17). They can be
# built for an L4 as well: rung 7s has four warps that compute as in 7a, three that copy tiles of Q, K and V by `cp.async`, and one that
# stores. For each buffer they meet at two named barriers (barriers with numbers, for some of the warps), "full" and "empty".

# %%
special = {r["rung"]: r for r in study.climb(length, d, rungs=("7a", "7s"), arch="sm_89")}
table(["rung", "warp instr.", "memory, copies", "control", "barriers", "global KB", "shared memory of a block, KB"],
      [[n, r["warp_instructions"], sum(r["instructions"].get(x, 0) for x in ("memory", "asynchronous")), r["instructions"]["control"],
        r["barriers"], r["global_moved"] / 1000, r["shared_bytes"] / 1024] for n, r in special.items()])
if special["7s"]["registers"] is not None:
    threads = {"7a": 128, "7s": 256}
    blocks = {n: min(65536 // (threads[n] * -(-r["registers"] // 8) * 8), 100 * 1024 // (r["shared_bytes"] + 1024))
              for n, r in special.items()}                 # what the registers and the 100 KB of an SM of the L4 allow
    table(["rung", "registers", "threads of a block", "blocks on an SM", "warps that compute on an SM"],
          [[n, r["registers"], threads[n], blocks[n], 4 * blocks[n]] for n, r in special.items()])
    assert blocks["7s"] < blocks["7a"]
    loops = {n: [name for name, _ in main_loop(sass.instructions(compiled(kernel, "sm_89", "cubin", d=d).code)) if name]
             for n, kernel in (("7a", register_blocks), ("7s", specialised))}
    table(["rung", "instructions of a computing warp per tile", "of them copies"],
          [[n, len(loop), sum(x.startswith("LDGSTS") for x in loop)] for n, loop in loops.items()])
    assert len(loops["7s"]) < len(loops["7a"]) and not any(x.startswith("LDGSTS") for x in loops["7s"])

# %% [markdown]
# What is gained:
#
# * The loop of the products contains no copies and no addresses for them, so it is a few per cent shorter.
# * A warp that copies can wait for its copies without delaying products.
# * Results are stored in whole sectors while the next tile is computed.
#
# What it costs:
#
# * The copies are issued all the same, by warps on the same four schedulers.
# * Five warps meet four times per tile, where four met once.
# * Registers. A kernel has one number of registers for all of its threads. Hopper's `setmaxnreg` moves them from producers to consumers;
#   an L4 has nothing like it. So four warps that need few registers hold as many as the four that compute, and half as many warps compute
#   on an SM.
#
# In FlashAttention-2 the places of these warps are taken by other blocks, whose products hide the copies. That is why it does not
# specialise warps.
#
# Here K and V are a few per cent of the L2 and stay there by themselves. A launcher may also ask for that (an L2 persistence window,
# `Device.prepared(..., persist=arrays)`), and the ladder times with and without it where there is a card:

# %%
if device is None:
    print("no card: times are not shown, and nothing here claims any")
else:
    table(["rung", "us, 4096 x 4096", "us with K and V kept in L2"],
          [[n, *(1e6 * t for t in pair)] for n, pair in study.clock().items()])

# %% [markdown]
# ## The ladder as one table
#
# One change per rung, and what it saves against the rung before and against the first, in counted warp-instructions; then the
# share of the L4's peak that the largest limit above would allow. (Rung 7h is 7a with float16 scores, so compare it with 7a and not with
# the row above it.)
#
# The same rungs, timed on an H200 (2026-11-26, 16,896 rows, 4,096 keys, one head of 64 channels):
#
# | rung | 1 | 2 | 3 | 4 | 5a | 5b | 6 | 7a | 7b | 7h | 7s |
# |---|---|---|---|---|---|---|---|---|---|---|---|
# | TFLOP/s | 4.6 | 15 | 24 | 49 | 204 | 198 | 259 | 276 | 295 | 288 | 195 |
#
# The largest step is the removal of bank conflicts (5a, 5b), a factor of 4. Padding and swizzling gain the same. Specialised warps (7s) are
# slower than 7a, as the counts above suggest.

# %%
first, before, lines = rows["1"]["warp_instructions"], None, []
for n, r in rows.items():
    here = r["warp_instructions"]
    allowed = f"{100 * flop / TENSOR / max(bounds[n].values()):.0f} %" if n in bounds else ""
    lines.append([n, r["name"], here, f"{before / here:.2f}" if before else "", f"{first / here:.1f}", r["barriers"],
                  r["shared_conflicts"], allowed])
    before = here
table(["rung", "change", "warp instr.", "previous / this", "first / this", "barriers", "conflicts", "share of L4's peak at most"], lines)

# %% [markdown]
# How to read the barriers: they count warps that come to one. Rungs 2 to 5 have 2 blocks of 4 warps, 2 tiles of keys and two barriers per
# tile: 2 x 4 x 2 x 2 = 32. Rung 6 needs one per tile (16). Rung 7a has one more in front of the loop, because the tile of Q is read from
# shared memory into registers first: 2 x 4 x (1 + 2) = 24. In 7b a block holds 128 queries, so there is one block instead of two: 12.
#
# ## The picture, and the ceiling

# %%
fig, axes = figure(2, width=11, height=4.0, width_ratios=(1, 1.15))
for n, row in enumerate(rows.values()):
    axes[0].barh(n, row["warp_instructions"], color="#B7D3E8" if n % 2 else "#56B4E9", edgecolor="black")
    axes[0].text(row["warp_instructions"] * 1.1, n, f"{row['warp_instructions']}", va="center", fontsize=8)
axes[0].set(xscale="log", yticks=range(len(rows)), yticklabels=[f"{n}  {r['name']}" for n, r in rows.items()],
            ylim=(len(rows) - 0.4, -0.6), xlim=(1e3, 3e6), xlabel="warp-instructions",
            title=f"counted, L = {length}, D = {d}, one head")
for limit in ("instructions", "tensor cores", "shared memory", "exponentials"):
    axes[1].plot(list(bounds), [1e6 * (b[limit] or float("nan")) for b in bounds.values()], label=limit)
axes[1].axhline(1e6 * traffic / MEMORY, color="#D55E00", linestyle="--", marker="")
axes[1].text(2.8, 1.1e6 * traffic / MEMORY, f"memory: {1e6 * traffic / MEMORY:.1f} us", color="#A04000", fontsize=9)
axes[1].set(yscale="log", xlabel="rung", ylabel="least microseconds on an L4", ylim=(0.5, 200),
            title="B=1 H=8 L=512 D=64, by limit")
_ = axes[1].legend(fontsize=8, loc="upper right")

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert 4.3 < 1e6 * flop / TENSOR < 4.6 and 6.9 < 1e6 * traffic / MEMORY < 7.1
assert bounds["2"]["instructions"] > 10 * bounds["4"]["instructions"]
assert largest["4"] == "shared memory" and largest["7b"] == "memory, least"
assert rows["1"]["warp_instructions"] > 10 * rows["7b"]["warp_instructions"]

# %% [markdown]
# **What you can do now**
#
# * read a FlashAttention-2 kernel: copy, scores, softmax, outputs,
# * name what each rung saves, in counted instructions, passes and barriers,
# * turn counts into the least time on a card.
#
# **Next:** [17](17_hopper.ipynb). One warp copies tiles, the others multiply; barriers that count bytes say when a tile is ready.
