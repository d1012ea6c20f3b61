# %% [markdown]
# # 16. FlashAttention-2 in Numba
#
# After this chapter you can
#
# * read a complete FlashAttention-2 kernel, and say which decision each of its parts is,
# * climb from one thread per row to that kernel in seven steps, and name what each step saves in counted figures,
# * turn counts into the least time that a given card can take, and say which of its limits a kernel meets,
# * check a table of gains that was never measured.

# %%
import inspect

from numflash.course.lessons import card, check, figure, table
from numflash.cuda import study
from numflash.cuda.operands import emulated
from numflash.cuda.study.tensor_cores import both_products

device = card()

# %% [markdown]
# ## The kernel
#
# A block of four warps owns 64 queries, each warp 16. Tiles of 64 keys come into shared memory one after another. Per tile: scores
# on the tensor cores, the online softmax of chapter 01 in registers, outputs on the tensor cores. This is all of it (rungs 4 and 5
# of the ladder); its parts are in `numflash/cuda/study/pieces.py`, each a few lines of what chapters 14 and 15 explained.

# %%
print(inspect.getsource(both_products))

# %% [markdown]
# ## The ladder
#
# Seven steps lead there and beyond. Every rung is run and compared with float64 first; a rung that is wrong raises an error instead
# of a row.

# %%
length, d = 128, 64
FA2 = ("1", "2", "3", "4", "5a", "5b", "6", "7a", "7b", "7h")
rows = {row["rung"]: row for row in study.climb(length, d, rungs=FA2)}
for row in rows.values():
    print(f"{row['rung']:>2}  {row['name']}: {row['why']}")

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
# Read it from top to bottom. **2** moves the traffic from global to shared memory. **3** shows that half a step is little: the
# scalar P . V is as long as before, and the weights now travel through shared memory. **4** is the step: fewer instructions by
# an order of magnitude, because one instruction does 4096 flop. **5** removes the conflicts, **6** one of two barriers, and its
# copies run beside the arithmetic; a counter cannot show overlap, only a clock can. **7a** and **7b** are chapter 06 again:
# what is in registers is used more often. From 4 on the largest class is moves and address arithmetic, nearly half of all PTX
# instructions.
#
# **Exercise 1.** How many m16n8k16 products does attention take: `queries` x `keys` with `d` channels, all multiples of 16?

# %% tags=["model"] jupyter={"source_hidden": true}
def counted_products(queries, keys, d):
    return sum(1 for flop in (2 * queries * keys * d, 2 * queries * keys * d) for _ in range(flop // 4096))

# %% tags=["exercise"]
def products(queries, keys, d):
    return ...


check("products", products, counted_products, (128, 128, 64), (16, 64, 128), (512, 512, 64))

# %% tags=["solution"] jupyter={"source_hidden": true}
def products(queries, keys, d):
    scores = (queries // 16) * (keys // 8) * (d // 16)
    outputs = (queries // 16) * (d // 8) * (keys // 16)
    return scores + outputs


check("products", products, counted_products, (128, 128, 64), (16, 64, 128), (512, 512, 64))

# %%
assert {rows[n]["tensor_operations"] for n in FA2[3:]} == {counted_products(length, length, d)}

# %% [markdown]
# **Exercise 2.** In 7a a warp holds 16 queries, in 7b 32. How many bytes of K and V does it read from shared memory per product? A
# tile is 64 keys of D = 64 channels in float16, and a warp reads all of it. Give it for `rows` queries per warp.

# %% tags=["model"] jupyter={"source_hidden": true}
def model(rows):
    return (2 * 64 * 64 * 2) / counted_products(rows, 64, 64)

# %% tags=["exercise"]
def bytes_per_product(rows):
    return ...


check("bytes per product", bytes_per_product, model, (16,), (32,), (64,))

# %% tags=["solution"] jupyter={"source_hidden": true}
def bytes_per_product(rows):
    tile = 2 * 64 * 64 * 2
    return tile / (2 * (rows // 16) * (64 // 8) * (64 // 16))


check("bytes per product", bytes_per_product, model, (16,), (32,), (64,))

# %%
q_once = length * d * 2
for n, per_warp in (("7a", 16), ("7b", 32)):
    assert rows[n]["shared_bytes_read"] == q_once + model(per_warp) * rows[n]["tensor_operations"]
print("bytes of K and V per product:", {n: model(r) for n, r in (("7a", 16), ("7b", 32), ("64 rows", 64))})

# %% [markdown]
# With 64 rows per warp it would be half again, but scores and outputs alone would be 256 registers, more than a thread has
# (255). In rung 8 (chapter 17) the products read shared memory without going through registers.
#
# ## The L4 document's gap table, redone
#
# The [document](../docs/sources.md)'s kernel took 1028 us for B = 1, H = 8, L = 512, D = 64 on an L4. It expects 300 us of
# FlashAttention-2, which it
# never ran, and explains the gap by a table of gains. First its arithmetic:

# %%
said = {"Q.K^T": (400, 80), "P.V": (300, 60), "softmax": (200, 80), "memory": (128, 80)}
before, after = (sum(pair[i] for pair in said.values()) for i in range(2))
table(["", "said", "found"], [["sum before, us", 1028, before], ["sum after, us", 300, after], ["saved", 728, before - after],
                              ["ratio", 3.4, before / after],
                              ["Q.K^T and P.V before -> after", "680 -> 136", f"{400 + 300} -> {80 + 60}"],
                              ["ratio to the measured SDPA (25 to 50 us)", "-", f"{1028 / 50:.0f} to {1028 / 25:.0f}"]])
assert (before, after) == (1028, 300)

# %% [markdown]
# The columns add up; nothing in them was measured but the 1028 and SDPA's 25 to 50 us. And PyTorch's SDPA calls FlashAttention-2 on
# this card. So FlashAttention-2 *was* measured, at 25 to 50 us, and the gap is 20 to 40 times, not 3.4.
#
# What *can* be said without a card: what a kernel asks for, counted, and how long an L4 takes for that at the very least. Its
# data sheet: 58 SMs at 2.04 GHz, 121 TFLOP/s on tensor cores, 300 GB/s, 48 MB of L2. An SM starts 4 warp-instructions per
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
# So the gap of the table, by counted figures. Scalar arithmetic (rung 2, which is what the document's Phase 4 does) costs tens
# of microseconds of instructions alone; with tensor cores (4) they shrink by more than ten times, and now the bank conflicts
# are what is longest. Without them (5b), and with registers used well (7b), no limit is above the few microseconds that memory
# takes anyway.
#
# Three things follow. The document's kernel ran many times slower than rung 2's scalar instructions explain: most of its time
# went to waiting (barriers, latency, too few warps), or to instructions that even a scalar kernel need not have. Its 300 us for
# FlashAttention-2 is far above what the card's limits explain. And its gains per part add up to nothing of the kind, because
# the parts run side by side: what counts is the largest, not the sum.

# %%
largest = {n: max(b, key=b.get) for n, b in bounds.items()}
table(["rung", "longest", "us", "document's figure is so many times longer"],
      [[n, largest[n], 1e6 * bounds[n][largest[n]], f"{said_us / (1e6 * bounds[n][largest[n]]):.0f} ({what})"]
       for n, said_us, what in (("2", 1028, "Phase 4, measured"), ("7b", 300, "FlashAttention-2, expected"),
                                ("7b", 50, "SDPA, measured"))])

# %% [markdown]
# Other claims of the document about FlashAttention-2, by reading its paper and source: it has **no** producer and consumer
# warps; all its warps do the same, on rows of their own (specialised warps come with FlashAttention-3, chapter 17). It sets
# **no** L2 persistence window. Here K and V are a few per cent of the L2 and stay there unasked. The window is still an option
# of this package's launcher (`Device.prepared(..., persist=arrays)`), and the ladder times with and without it on a card:

# %%
if device is None:
    print("no card: times are not shown, and nothing here claims any")
else:
    table(["rung", "us, 4096 x 4096", "us with K and V kept in L2"],
          [[n, *(1e6 * t for t in pair)] for n, pair in study.clock().items()])

# %% [markdown]
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
axes[1].legend(fontsize=8, loc="upper right")

# %%
assert 4.3 < 1e6 * flop / TENSOR < 4.6 and 6.9 < 1e6 * traffic / MEMORY < 7.1
assert bounds["2"]["instructions"] > 10 * bounds["4"]["instructions"]
assert largest["4"] == "shared memory" and largest["7b"] == "memory, least"
assert rows["1"]["warp_instructions"] > 10 * rows["7b"]["warp_instructions"]
