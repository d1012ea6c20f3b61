# %% [markdown]
# # 08. Variants of exp2 and P.V
#
# After this chapter you can
#
# * say why an exponential inside the product costs more than one beside it,
# * measure on your machine whether a weight should be broadcast from a register or from memory,
# * choose an exp2 by its error, its cost and what it does to the order of the keys,
# * check by hand whether the columns of a benchmark table agree with one another.
#
# In attention each score becomes a weight by one exp2, and the weight is then multiplied with a row of V. Should a kernel compute the exp2
# inside of the loop of the product, or in a loop of its own before it? And how exact must it be? This chapter measures both, in float32.
#
# It redoes a benchmark that a [document](../docs/sources.md) made for the A64FX (512-bit vectors, 128 GFLOP/s per core). The document is not
# published; every figure that you need is quoted here. It is about the second stage of attention on its own:
#
# $$O = \mathrm{exp2}(S \cdot \mathrm{scale} - \mathrm{max}) \; V$$
#
# S is M x Nc (int32 scores), V is Nc x D, O is M x D. M is small (the 4 or 16 rows of a query tile) and D = 64.

# %% [markdown] tags=["map"]
# > **The idea:** Optional study: what an exponential costs beside a product, on this machine.
# >
# > **Where you are:** optional: on neither path (CPU path: [00](00_memory.ipynb) ...; GPU path: [13](13_threads_warps_memory.ipynb) ...)
# >
# > **Time:** 40 minutes to read, 15 for the exercises. **Before it:** [04](04_fixed_point.ipynb), [06](06_register_tile.ipynb).
# >
# > **Terms:** [fixed point](../docs/glossary.md#fixed-point), [fma](../docs/glossary.md#fma).
# >
# > **Papers:** [A fast, compact approximation of the exponential function](https://doi.org/10.1162/089976699300016467).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import inspect

import numpy as np

from numflash.course import COLOURS, answer_of, bars, check, figure, table
from numflash.cpu.isa.isas import running_lanes
from numflash.cpu.study import exp2_benchmark, exp2_values, ladder
from numflash.cpu.study.registers import aligned
from numflash.machinecode import assembly, codegen
from numflash.measure.timing import best_time
from numflash.tiling import Caches

s, scale, top, v = exp2_benchmark.draw(m=4, nc=64)
weights = np.exp2(s * np.float64(scale) - top)
exact = weights @ v
print(f"S {s.shape}, V {v.shape}, O {exact.shape}; a row of weights starts {np.round(weights[0, :5], 3)}")

# %% [markdown]
# ## The same tile, four times
#
# Every kernel holds 4 rows of O in registers and, for each key, adds p[i] * v[key] to row i. They differ in where p comes from.
# This is the plain product, P given, as it runs. `no_sums()` is four rows of 64 zeros and `load_v()` a row of 64 numbers, all in vector
# registers; `whole_registers()` is no instruction, it tells the compiler how long the registers of an Arm CPU with SVE are (chapter 05):

# %%
print(inspect.getsource(exp2_values.add_key))
print(inspect.getsource(exp2_values.gemm.py_func))

# %% [markdown]
# `fused` computes the exponentials where they are needed. The scores are stored row by row, so one key needs a *column*: 4 values,
# from 4 places, in a register that has room for 16. `fused4` takes four keys at a time and fills the register.

# %%
print(inspect.getsource(exp2_values.make_fused))

# %% [markdown]
# `two_pass` first turns all of S into P, 16 scores per step, and then calls `gemm`. All of them against float64:

# %%
def relative_l1(a, b):
    return float(np.abs(a - b).sum() / np.abs(b).sum())


found = {}
for name, exp2, broadcast in exp2_benchmark.combinations():
    if name != "exp2" and exp2 == "accurate":
        found[name, broadcast] = relative_l1(exp2_benchmark.compute(name, exp2, broadcast, s, scale, top, v)[1], exact)
table(("kernel", "weights broadcast from", "relative L1"), [(*key, error) for key, error in found.items()])
assert max(found.values()) < 1e-6

# %% [markdown]
# ## The table
#
# M = 4 and 16, Nc = 64 to 512, three kinds of exp2, two kinds of broadcast: some 150 lines, about ten seconds. Percentages are
# of the FMA peak that this machine reaches in a loop of nothing but multiply-adds, measured in the same run.

# %%
rows = exp2_benchmark.measure(rows=(4, 16), keys=(64, 128, 256, 512))
pick = {(r.kernel, r.exp2, r.broadcast, r.m, r.nc): r for r in rows}
one = pick["gemm", "accurate", "memory", 4, 64]
fma_peak = 2 * 4 * 64 * 64 / one.seconds / one.share                         # of the same run: what `share` is a share of
print(f"{len(rows)} lines; FMA peak {fma_peak / 1e9:.0f} GFLOP/s")

# %%
KERNELS = {"fused": "one key", "fused4": "four keys", "two_pass": "two-pass", "gemm": "product alone"}
DOCUMENT = {("fused", 4): (12.7, 12.9, 12.8), ("fused4", 4): (14.5, 14.6, 14.6), ("two_pass", 4): (51.0, 58.1, 47.2),
            ("gemm", 4): (79.5, 82.9, 65.3), ("fused", 16): (11.7, 11.8, 11.7), ("two_pass", 16): (54.6, 57.3, 48.1),
            ("gemm", 16): (79.6, 83.1, 61.9)}


def share(kernel, m, nc):
    """Per cent of the FMA peak with the accurate exp2, by the better broadcast."""
    return 100 * max(r.share for r in rows if (r.kernel, r.exp2, r.m, r.nc) == (kernel, "accurate", m, nc))


for m in (4, 16):
    lines = []
    for kernel, words in KERNELS.items():
        lines.append((words, "here", *(f"{share(kernel, m, nc):.1f}" for nc in (64, 128, 256, 512))))
        if (kernel, m) in DOCUMENT:
            lines.append(("", "A64FX document", *DOCUMENT[kernel, m], ""))
    print(f"M = {m}, per cent of the FMA peak")
    table(("kernel", "", "Nc = 64", "128", "256", "512"), lines)

# %% [markdown]
# Read it downwards, and compare the order of the four with the document's, and the distance: it calls two passes "3 to 4 times
# faster" than fused.

# %%
for m in (4, 16):
    one, four, two_pass = (share(kernel, m, 64) for kernel in ("fused", "fused4", "two_pass"))
    print(f"M = {m:2d}, Nc = 64: two passes are {two_pass / one:.1f} times as fast as one key at a time, "
          f"and {two_pass / four:.1f} times as fast as four")

# %% [markdown]
# Why is fused slower? Look at the loops over keys: every instruction that is not a multiply-add of the product takes time from it.

# %%
MATRICES = "void(float32[:, ::1], float32[:, ::1], float32[:, ::1])"
SCORES = "void(int32[:, ::1], float32, float32, float32[:, ::1], float32[::1], float32[:, ::1])"


def multiply_adds(instructions):
    return sum(name.startswith(("vfmadd", "fmla", "fmadd")) for name in instructions)


def loop_over_keys(kernel, signature):
    """Its instructions, as compiled for this machine."""
    code = codegen.compile_for(kernel, signature, codegen.Target.named("host"))
    return max((loop.instructions for loop in assembly.loops(code.assembly)), key=multiply_adds)


inner = {"fused": loop_over_keys(exp2_values.make_fused("accurate", "memory"), SCORES),
         "fused4": loop_over_keys(exp2_values.make_fused4("accurate", "memory"), SCORES),
         "gemm": loop_over_keys(exp2_values.gemm, MATRICES)}
wide = "".join(inner["gemm"])
lanes = 16 if "zmm" in wide else 8 if "ymm" in wide else running_lanes(ladder.vector_isa())
one_key = 4 * 64 // lanes                                  # multiply-adds of the product; the polynomial of exp2 has some too
of_product = {name: multiply_adds(loop) // one_key * one_key for name, loop in inner.items()}
table(("loop", "instructions", "multiply-adds", "of the product", "instructions for one of these", "of the peak, M = 4, Nc = 64"),
      [(KERNELS[name], len(loop), multiply_adds(loop), of_product[name], len(loop) / of_product[name], f"{share(name, 4, 64):.0f} %")
       for name, loop in inner.items()])
print("the product alone:", assembly.histogram(inner["gemm"]))

# %% [markdown]
# With one key at a time, a whole exp2 is computed for four weights; with four keys, for sixteen. Then the count is nearer to that of the
# product alone, but the speed is not: a count does not show how long instructions wait for one another. Two passes keep the exponentials
# out of this loop.
#
# And what does the product alone lack of the peak? Time two lengths to tell its loop from the rest of the call:

# %%
short, long = (1e9 * pick["gemm", "accurate", "memory", 4, nc].seconds for nc in (64, 128))
print(f"a call takes {short:.0f} ns with 64 keys, {long:.0f} with 128: {(long - short) / 64:.2f} per key, and some "
      f"{round(2 * short - long)} that do not depend on the keys; at the peak a key takes {2e9 * 4 * 64 / fma_peak:.2f}")

# %% [markdown]
# More depends on where V starts. Here it starts at a cache line. NumPy promises 16 bytes only, and then most registers are
# loaded from two lines at once:

# %%
def product_seconds(offset):
    """Of one product with 128 keys, V starting so many bytes behind a cache line."""
    s, scale, top, v = exp2_benchmark.draw(4, 128)
    call, times = exp2_benchmark.prepare("gemm", "accurate", "memory", s, scale, top, aligned(v, offset))
    return best_time(call, 0.1) / times


for offset in (0, 16):
    rate = 2 * 4 * 128 * 64 / np.median([product_seconds(offset) for _ in range(5)])
    print(f"V of 128 keys starts {offset:2d} bytes behind a line: {100 * rate / fma_peak:.0f} % of the peak")

# %% [markdown]
# Then read the table across. The document's product slows down at Nc = 256, where V alone fills the first-level cache of the
# A64FX. Here:

# %%
l1 = Caches.of_this_machine().l1
for nc, document in zip((64, 128, 256), DOCUMENT["gemm", 4], strict=True):
    size = nc * 64 * 4
    print(f"Nc = {nc:3d}: V {size // 1024:3d} KiB, of 64 on the A64FX ({document} % of the peak), of {l1 // 1024} here "
          f"({share('gemm', 4, nc):.0f} %)")

# %% [markdown]
# A kernel that takes its keys in blocks of 128, as the rest of this package does, stays within the first level.
#
# ## The fewest cycles per key
#
# **Exercise 1.** A core has two FMA pipes of 512 bits (16 float32 each) and does M * D multiply-adds per key. How many cycles does a key take
# at least, for M rows of D columns?

# %% tags=["exercise"]
def fewest_cycles(m, d):
    return ...


check("08.1", fewest_cycles)

# %% [markdown]
# ## A table that does not hold
#
# The document goes on with four more fused kernels (M = 4, Nc = 512). Its columns are cycles per key, GFLOP/s and per cent of
# the peak. Each can be computed from any other: a key is 2 * 4 * 64 = 512 operations, the clock is 2 GHz, the peak 128 GFLOP/s.

# %%
PRINTED = {"memory": (5.4, 10.2, 15.9), "four keys, memory": (3.5, 15.8, 24.7), "register": (3.3, 16.7, 26.1),
           "four keys, register": (1.9, 28.9, 45.1)}
right = {}
for name, (cycles, gflops, percent) in PRINTED.items():
    right[name] = 100 * gflops / 128
    print(f"{name:20s} printed {cycles} cycles, {gflops} GFLOP/s, {percent} %; {cycles} cycles would be {512 / cycles * 2:.0f} "
          f"GFLOP/s, and {gflops} GFLOP/s are {512 / gflops * 2:.0f} cycles and {right[name]:.1f} %")
print(f"cycles wrong by a factor of {np.mean([512 / g * 2 / c for c, g, _ in PRINTED.values()]):.1f} in every line, "
      f"per cent by {np.mean([p / right[n] for n, (_, _, p) in PRINTED.items()]):.2f}")
assert min(c for c, _, _ in PRINTED.values()) < answer_of("08.1")(4, 64)

# %% [markdown]
# 1.9 cycles are fewer than the 8 that the pipes need. The same factor in every line says what the "cycles" were: ticks of a slower
# clock, near the A64FX's 100 MHz timer against its 2 GHz. And the percentages were taken of 64 GFLOP/s, half of the peak that
# the same document states.
#
# The document concludes "45 % fused against 51 to 58 % in two passes".
#
# **Exercise 2.** Its two passes reach 51 % of the peak of 128 GFLOP/s. How many times as fast as its best fused kernel are they?

# %% tags=["exercise"]
times_as_fast = ...
check("08.2", times_as_fast)

# %% [markdown]
# So the two passes are far ahead, where "45 % against 51 to 58 %" reads like a close race.
#
# ## From a register or from memory?
#
# A weight must reach all lanes before it can be multiplied with a row of V. It is in some lane of the register where exp2
# left it: shuffle it out (the document's DUP), or store the register and load each weight back replicated (LD1RW). The
# document's finding for the A64FX: shuffling is faster, as it saves the trip through memory. Here:

# %%
for m in (4, 16):
    for kernel in ("fused", "fused4"):
        register, memory = (np.median([pick[kernel, "accurate", b, m, nc].cycles for nc in (64, 128, 256, 512)])
                            for b in ("register", "memory"))
        winner = "memory" if memory < register else "register"
        print(f"M = {m:2d}, {KERNELS[kernel]:9s}: register {register:5.2f}, memory {memory:5.2f} cycles per score; "
              f"{winner} wins by {100 * abs(register / memory - 1):.0f} %")

# %% [markdown]
# What the compiler made of the two says why they differ. The hot loops for four keys, in the lines where their instructions are
# not the same in number:

# %%
reports = {b: codegen.report(codegen.compile_for(exp2_values.make_fused4("accurate", b), SCORES, codegen.Target.named("host")))
           for b in ("register", "memory")}
kinds = {kind: [r["instructions"].get(kind, 0) for r in reports.values()] for r in reports.values() for kind in r["instructions"]}
table(("instruction", *reports), [(kind, *counts) for kind, counts in kinds.items() if counts[0] != counts[1]]
      + [("all in the loop", *(r["total"] for r in reports.values())),
         ("of them to and from the stack", *(r["stack"] for r in reports.values()))])

# %% [markdown]
# 16 broadcasts out of a register are 16 shuffles or more, and some shuffles need a pattern, which wants a register of its own:
# where the sums and V take them all, patterns come from the stack. A broadcast out of memory is one load. So the finding depends on
# the machine: shuffling is better where loads are the limit, loading where shuffles are.
#
# For the A64FX there is a model of the same kernels in SVE (`numflash estimate exp2`), where a DUP takes one of the two arithmetic pipes
# and LD1RW a load pipe. (The figures are those of release 19 of llvm-mca, LLVM's model of processors; release 14 gives up to 60 % more
# cycles for DUP.) Four keys at a time with the exact exp2: 26.1 cycles a key by DUP, and by LD1RW 19.0 if no load waits for the weight
# that was just stored, 40.2 if every one does. So the document's finding fits a machine on which every such load waits. Two passes take
# 11.3 cycles and need neither.
#
# ## Which exp2?
#
# P is used D = 64 times, so exp2 seems cheap: one exponential for 64 multiply-adds. What does it cost, and what does a cheaper
# one spoil? Three kinds: `accurate`, a polynomial of degree 5; `fast`, the quadratic of chapter 04; `ultra`, just 2 to the
# floor of x. Ranking errors: of all pairs of keys in a row with different scores, the share whose weights are not in the same
# order.

# %%
product = pick["gemm", "accurate", "memory", 4, 64].cycles
lines = []
for exp2 in exp2_values.EXP2:
    alone, whole = pick["exp2", exp2, "register", 4, 64], pick["two_pass", exp2, "memory", 4, 64]
    lines.append((exp2, f"{alone.cycles:.2f}", f"{100 * alone.cycles / product:.0f} %", f"{100 * whole.share:.1f} %",
                  f"{alone.weight_error:.1e}", f"{whole.output_error:.1e}", f"{100 * alone.ranking_errors:.1f} %"))
print(f"M = 4, Nc = 64, D = 64; the product takes {product:.2f} cycles per score")
table(("exp2", "cycles per score", "of the product", "two-pass, of peak", "worst weight", "L1 error of O", "ranking errors"), lines)
print("the document, on A64FX: 1.19, 0.79 and 0.63 cycles; 47, 31 and 25 % of the product")

# %% [markdown]
# Are two keys ever reversed, or do they only become equal? (The document reports "ranking errors" of `ultra` and leaves it
# open.)

# %%
ultra = exp2_benchmark.compute("exp2", "ultra", "register", s, scale, top, v)[0]
order = np.argsort(s, axis=1)
sorted_weights = np.take_along_axis(ultra, order, 1)
print(f"neighbours in the order of their scores: {(np.diff(sorted_weights) < 0).sum()} reversed, "
      f"{(np.diff(sorted_weights) == 0).sum()} of {sorted_weights[:, 1:].size} equal")
assert (np.diff(sorted_weights) >= 0).all()

# %% [markdown]
# The document lists 14 instructions for 16 scores, calls them a floor of 14 / 16 = 0.875 cycles per score, and 5 % of the
# product out of reach. The floor counts one instruction per cycle. But the core has two floating-point pipes, and loads and
# stores use neither.

# %%
LISTED = ["ld1w", "scvtf", "fmul", "fadd", "frintm", "fsub", "fmul", "fcvtzs", "fcvtzs", "add", "lsl", "orr", "fexpa", "st1w"]
floor = sum(name not in ("ld1w", "st1w") for name in LISTED) / 2 / 16
print(f"{len(LISTED)} instructions, floor {floor} cycles per score; the document measured 0.79 and 0.63, below 0.875")
assert floor == 0.375

# %% [markdown]
# And whether exp2 takes 5 % depends on D, because a score meets D columns of V.
#
# **Exercise 3.** From which D on is exp2 5 % of the product or less? Given are the cycles per score of exp2, and those of the product for a
# certain D; the product grows in proportion to D.

# %% tags=["exercise"]
def columns_for_share(exp2_cycles, product_cycles, d, share):
    return ...


check("08.3", columns_for_share)

# %%
for exp2 in exp2_values.EXP2:
    cycles = pick["exp2", exp2, "register", 4, 64].cycles
    print(f"{exp2:9s}: 5 % of the product from D = {answer_of('08.3')(cycles, product, 64, 0.05):.0f} on, on this machine")

# %% [markdown]
# Most heads have 64 or 128 columns. A cheaper exp2 needs smaller numbers: the integer kernels of this package take 32 scores of
# 16 bits per register where these take 16 of 32 bits.
#
# ## When does fusing save time?
#
# The document's traffic table for M = 4, Nc = 64: two-pass moves P out and in again.

# %%
kib = {"S": 4 * 64 * 4 / 1024, "P": 4 * 64 * 4 / 1024, "V": 64 * 64 * 4 / 1024, "O": 4 * 64 * 4 / 1024}
two_pass, fused = kib["S"] + 2 * kib["P"] + kib["V"] + kib["O"], kib["S"] + kib["V"] + kib["O"]
print(f"two-pass {two_pass:.0f} KiB, fused {fused:.0f} KiB; the first-level cache holds {l1 // 1024} KiB")
assert (two_pass, fused) == (20, 18)

# %% [markdown]
# That table is right: 2 KiB more, and they stay in the cache. So fusing exp2 into the product *in registers* saves next to
# nothing. Fusing *by tiles*, which is what chapter 07 does, saves the trip to memory: two passes over a tile that stays in the
# cache is the design of every fast kernel here.
#
# ## The picture and its ceiling

# %%
fig, (left, right_ax) = figure(2, width=11, height=4)
peak = fma_peak / 1e9
bars(left, {f"{words}, M = {m}": share(kernel, m, 64) * peak / 100 for m in (4, 16) for kernel, words in KERNELS.items()},
     "GFLOP/s of the product, accurate exp2, Nc = 64", ("measured FMA peak", peak), digits=0)
for n, exp2 in enumerate(exp2_values.EXP2):
    r = pick["exp2", exp2, "register", 4, 64]
    right_ax.plot(r.cycles, r.weight_error, linestyle="", color=COLOURS[n], markersize=9)
    right_ax.annotate(f"{exp2}\n{100 * r.ranking_errors:.0f} % ranking errors", (r.cycles, r.weight_error), (8, -3),
                      textcoords="offset points", va="top")
right_ax.set_title("what exp2 costs and spoils")
right_ax.set_xlim(0, 1.6 * pick["exp2", "accurate", "register", 4, 64].cycles)
right_ax.set_ylim(1e-8, 3)
right_ax.set_yscale("log")
right_ax.set_xlabel("cycles per score")
_ = right_ax.set_ylabel("worst relative error of a weight")

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert all(0 < r.share < 1.2 for r in rows if r.kernel != "exp2")
assert all((r.ranking_errors > 0.1) == (r.exp2 == "ultra") for r in rows)
assert all(r.output_error < {"accurate": 1e-6, "fast": 3e-3, "ultra": 0.5}[r.exp2] for r in rows)
assert abs(right["four keys, register"] - 22.6) < 0.05
best = max(("fused", "fused4", "two_pass"), key=lambda kernel: share(kernel, 4, 64))
print(f"ceiling: the FMA peak, {peak:.0f} GFLOP/s; product alone {share('gemm', 4, 64):.0f} %, "
      f"best with exp2 ({KERNELS[best]}) {share(best, 4, 64):.0f} % at M = 4, Nc = 64")

# %% [markdown]
# **What you can do now**
#
# * say what an exponential costs beside a product, and inside it,
# * choose an exp2 by its error and by what it does to the order of the keys,
# * check whether the columns of a benchmark's table belong together.
#
# **Next:** [09](09_threads_causal_gqa.ipynb). Query tiles are independent tasks; start the longest first.
