# %% [markdown]
# # 12. The documents' claims, each with its check
#
# A figure of performance can often be checked before anything is run: bytes, operations, cycles and shares must agree with one another.
# This chapter practises that on real documents.
#
# Five [documents](../docs/sources.md) stand behind this package: three on the A64FX (a fused kernel, the status of INT8 products, a
# benchmark of exp2), one on decode with a T4, one on an L4 and FlashAttention-2. They are not published; every figure that you need is
# quoted here. Much in them holds. This chapter goes through the figures that a laptop can check.
#
# After this chapter you can
#
# * check a performance figure with the arithmetic that it rests on: bytes, operations, cycles, shares,
# * tell a share from a time, and a part's gain from the whole's,
# * measure on your own machine what eight proposed improvements bring, one by one and together.

# %% [markdown] tags=["map"]
# > **The idea:** Check a figure with the arithmetic that it rests on.
# >
# > **Where you are:** optional: on neither path (CPU path: [00](00_memory.ipynb) ...; GPU path: [13](13_threads_warps_memory.ipynb) ...)
# >
# > **Time:** 45 minutes to read, 15 for the exercises. **Before it:** [07](07_fused.ipynb), [10](10_decode.ipynb).
# >
# > **Terms:** [roofline](../docs/glossary.md#roofline), [fixed point](../docs/glossary.md#fixed-point), [bank conflict](../docs/glossary.md#bank-conflict).
# >
# > **Papers:** [Twelve ways to fool the masses](https://doi.org/10.1142/S0129626491000410).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import textwrap

import numpy as np
from numba import njit

import numflash
from numflash.course import answer_of, bars, check, figure, roof, rounds, table
from numflash.cpu.study import improvements
from numflash.jit.threads import limit, most
from numflash.numerics import fixedpoint as fx
from numflash.tiling import TILINGS, split_count

rng = np.random.default_rng(0)
ledger = []                                                # (document, claim, said, found, holds)


def claim(document, what, said, found, *, holds=False):
    """Put a claim into the ledger and print it."""
    ledger.append((document, what, said, found, holds))
    print(f"{what}: said {'nothing' if said is None else f'{said:g}'}, found {found:.4g}{', holds' if holds else ''}")


# %% [markdown]
# ## Peaks: count before you compare
#
# An A64FX core has two vector pipes of 512 bits at 2.0 GHz: per cycle and pipe 64 INT8 products, or 16 float32 multiply-adds,
# two operations each. 12 cores make a memory group (CMG), four groups the chip.

# %%
GHZ, PIPES = 2.0, 2
int8_core, float_core = PIPES * 64 * 2 * GHZ, PIPES * 16 * 2 * GHZ
table(["GOP/s", "core", "12 cores", "48 cores"], [["INT8", int8_core, 12 * int8_core, 48 * int8_core],
                                                   ["float32", float_core, 12 * float_core, 48 * float_core]])
claim("GEMM status", "INT8 peak, GOPS", 512, int8_core, holds=True)
claim("GEMM status", "362.8 GOPS in per cent of it", 70.8, 100 * 362.8 / int8_core, holds=True)
claim("fused", "INT8 peak, GOPS (one thread)", 3072, int8_core)
claim("fused", "float32 peak, GFLOP/s (one thread)", 2048, float_core)
claim("fused", "float32 achieved, times the peak", 0.90, 1850 / float_core)
claim("exp2 benchmark", "FP32 peak, GFLOP/s", 128, float_core, holds=True)
assert int8_core == 512 and 1850 / float_core > 14

# %% [markdown]
# 3072 is no peak of this chip: it is 12 cores counted in multiply-adds, or with one pipe.
#
# ## Working sets: add them up

# %%
fused = TILINGS["a64fx-fused-48x64"]
print("\n".join(line for line in fused.explain(128).splitlines() if "% of" not in line))
fused_kib = sum(fused.working_set(128).values()) / 1024
claim("fused", "working set, KiB", 46, fused_kib)
claim("fused", "with V in float32, as its FMLA kernel needs, KiB", 46, fused_kib + 3 * 64 * 128 / 1024)
claim("GEMM status", "working set, KiB", 54, sum(TILINGS["a64fx-unfused-48x128"].working_set(128).values()) / 1024)
claim("fused", "score matrix at L=8192, MiB", 256, 4 * 8192**2 / 2**20, holds=True)
claim("fused", "reference memory at L=4096, MiB (tested to 512 because of it)", None, 4 * 4096**2 / 2**20)
assert fused_kib == 58.75

# %% [markdown]
# 46 is 6 + 8 + 8 + 24: the tile of S and the state were left out. 58.75 KiB leave only 5 of the 64 KiB for everything else. The status
# file forgot the 16 KiB tile of K; with it, the sum is 70 KiB, more than the 64 KiB cache.
#
# ## Shares, rates and gains
#
# A gain of one part is not a gain of the whole, and two rates one after the other do not add up:

# %%
left = 0.636 / 21
claim("fused", "what 21 times faster would leave, per cent", 3, 100 * left / (left + 0.364))
claim("fused", "2900 and 1850 one after the other, GOP/s", 4650, 2 / (1 / 2900 + 1 / 1850))
whole = 1 / (0.364 / 3 + 0.636 / (21 * 2))
claim("fused", "speed-up from 3 x 21 x 2 applied to their parts (GEMM 36.4 %)", 126, whole)
claim("GEMM status", "softmax, per cent of the time", 63.6, 100 * 20.697 / 32.537, holds=True)
claim("GEMM status", "softmax at 10 operations per element, GOPS", 8.1, 810.6e6 * 10 / 1e9, holds=True)
claim("exp2 benchmark", "fast exp2 at 0.79 cycles, per cent of peak", 50, 100 * 512 / (512 / 0.795 + 0.79 * 4 * 64))
claim("exp2 benchmark", "original exp2 at 1.19 cycles, per cent of peak", 51.0, 100 * 512 / (512 / 0.795 + 1.19 * 4 * 64))
claim("exp2 benchmark", "least cycles per element, 12 instructions on 2 pipes", 0.875, 12 / PIPES / 16)

# %% [markdown]
# **Exercise 1.** Work out the fused document's table with its own numbers. Softmax does 4096 x 4096 elements at 810 million a second,
# Q.K^T 4.3 G operations at 2900 GOPS, P.V 4.3 G at 1850 GFLOP/s. How many ms does softmax take, and what per cent of the time of all
# three?

# %% tags=["exercise"]
answer = ..., ...
check("12.1", answer)

# %% [markdown]
# **Exercise 2.** "Softmax overhead reduced from 63.6 % to 3 % (21x faster)". A share is not a time. With the products' time unchanged, how
# many times faster must softmax be for its share to fall from 63.6 % to 3 %?

# %% tags=["exercise"]
times_faster = ...
check("12.2", times_faster)

# %%
claim("fused", "softmax, per cent of the time", 3, answer_of("12.1")[1])
claim("fused", "softmax faster for 63.6 % to become 3 %, times", 21, answer_of("12.2"))

# %% [markdown]
# The first of these files measured 63.6 % and calls 3 % "fundamentally unachievable"; the second, of the same day, claims it.
# The first is the credible one.
#
# **The table whose columns disagree.** Cycles per key, GFLOP/s and per cent of peak are three names of one thing: 4 x 64
# multiply-adds are 512 operations per key, at least 8 cycles.

# %%
printed = {"LD1RW": (5.4, 10.2, 15.9), "4K + LD1RW": (3.5, 15.8, 24.7), "DUP": (3.3, 16.7, 26.1), "4K + DUP": (1.9, 28.9, 45.1)}
table(["kernel", "cycles per key", "GFLOP/s they mean", "printed", "ratio", "% printed", "% of 128"],
      [[name, c, 512 / c * GHZ, g, 512 / c * GHZ / g, share, 100 * g / float_core] for name, (c, g, share) in printed.items()])
claim("exp2 benchmark", "4K + DUP, per cent of peak", 45.1, 100 * 28.9 / float_core)
claim("exp2 benchmark", "traffic two-pass, KB", 20, 1 + 1 + 16 + 1 + 1, holds=True)
ratios = [512 / c * GHZ / g for c, g, _ in printed.values()]
assert max(ratios) / min(ratios) < 1.02

# %% [markdown]
# One and the same ratio (the column "ratio") for all rows: the "cycles" are ticks of a slower clock (the 100 MHz timer would give 20), and the percentages were
# taken of 64, half the peak that the same file states. So fused is 22.6 % beside 51 to 58 %.
#
# ## L = 512, "144 times faster"
#
# 2.1 ms for the fused kernel, 303.6 ms for the reference on one thread.

# %%
operations = 4 * 512**2 * 128
claim("fused", "2.1 ms at L=512, per cent of the INT8 peak", 91, 100 * operations / 2.1e-3 / 1e9 / int8_core)
claim("fused", "the reference, GFLOP/s", 0.44, operations / 303.6e-3 / 1e9, holds=True)
print(f"which is {100 * operations / 303.6e-3 / 1e9 / float_core:.2f} % of the float32 peak: code without vectors")
q, k, v = (rng.standard_normal((1, 1, 512, 128), np.float32) for _ in range(3))
quantised = numflash.quantize_qkv(q, k, v)
with limit(1):
    ours = rounds(lambda: numflash.attention_int8(*quantised))
    floats = rounds(lambda: numflash.attention(q, k, v))
print(f"here, one core: INT8 {1e3 * ours:.2f} ms = {operations / ours / 1e9:.0f} GOP/s, "
      f"{100 * operations / ours / roof().int8:.0f} % of the measured peak; float32 {1e3 * floats:.2f} ms")

# %% [markdown]
# A factor over code without vectors says little about a kernel. Share of the peak does, and at L = 512 ours is not high either,
# least where the machine has matrix tiles: a call's fixed cost, the packing of K and V and the softmax weigh more, the faster
# the products.
#
# ## exp2 in fixed point
#
# `(256 + 177 frac) >> -int` "within 2 %". Over one octave, downwards from the top (chapter 04 draws it):

# %%
y = np.arange(256, dtype=np.uint32)                        # distance below the octave, Q8.8


def error(values, below=y):
    return values / (65536.0 * np.exp2(below / -256.0)) - 1


line = error(fx.exp2_line177(y))
claim("fused", "exp2 line, worst error in per cent", -2, 100 * line.min())
claim("fused", "exp2 line, mean error in per cent", None, 100 * line.mean())
claim("fused", "exp2 line, jump at each octave in per cent", None,
      100 * (1 / (float(fx.exp2_line177(np.uint32(1))) / 65536) - 1))
toward_zero = (256 + 177 * -(y / 256.0)) / 256             # int and frac of a negative number, both cut toward zero
claim("fused", "the same if int and frac truncate toward zero", -2, 100 * (toward_zero / np.exp2(-(y / 256.0)) - 1).min())
literal = (256 + 177 * y) / (256 * np.exp2(y / 256.0))     # no >> 8 after an 8-bit frac
claim("fused", "the formula taken literally, times too large", 1, literal.max())
x = np.linspace(0, 1, 2001)
starts = np.linspace(0.9, 1.0, 201)[:, None]               # all lines start + slope * x near 2**x, the best of them
best_line = min(np.abs((starts + slope * x) / 2.0**x - 1).max(1).min() for slope in np.linspace(0.9, 1.05, 301))
claim("fused", "the best straight line, worst error in per cent", 2, 100 * best_line)
claim("this package", "exp2 quadratic, worst error in per cent", 0.27, 100 * np.abs(error(fx.exp2_quadratic(y))).max(), holds=True)
low = error(fx.exp2_ultra(y))
claim("exp2 benchmark", "2^floor (ultra, 'ranking errors'), worst error in per cent", None, 100 * low.min())
claim("exp2 benchmark", "2^floor (ultra), mean error in per cent", None, 100 * low.mean())
steps = np.arange(0, 1, 1e-4)
claim("exp2 benchmark", "FEXPA alone (64 entries), truncated, per cent: 'perfect'", 0,
      100 * (np.exp2(np.floor(steps * 64) / 64) / np.exp2(steps) - 1).min())
claim("exp2 benchmark", "the same rounded, per cent", 0, 100 * np.abs(np.exp2(np.rint(steps * 64) / 64) / np.exp2(steps) - 1).max())
assert line.min() < -0.15 and literal.max() > 88

# %% [markdown]
# ## Ranges and constants

# %%
with np.errstate(over="ignore"):
    sums = [np.full(n, 65536, np.uint32).sum(dtype=np.uint32) for n in (65535, 65536)]
print("Q16.16 sum of 65535 and 65536 equal keys in uint32:", sums, "; 'unbounded sequence length' ends there (int32: at 32768)")
raw = 127 * 127 * 128
print(f"8-bit entries, D = 128: raw scores to {raw}; (tile_max * 33) >> 16 leaves {((raw * 33) >> 16) / 256:.2f} octaves of them")
claim("fused", "equal keys before a Q16.16 sum overflows (unbounded)", np.inf, 65536)
print(f"LOG2E_Q8 * SCORE_SCALE >> 8 = {(23 * 369) >> 8}; 1/sqrt(128) * log2(e) * 256 = {128**-0.5 * np.log2(np.e) * 256:.3f}")
constant = 128**-0.5 * np.log2(np.e) * 256
claim("GEMM status", "the score constant", 33, constant)
for gap in (5, 10, 20):
    claim("GEMM status", f"ratio of two weights {gap} nats apart, per cent off", None, 100 * np.expm1(-gap * (33 / constant - 1)))
print(f"8357 / 65536 is off by {abs(8357 / 65536 * 256 / constant - 1):.1e}")
v_long = rng.standard_normal((1, 1, 2048, 64), np.float32)
q_long, k_long = (rng.standard_normal((1, 1, 2048, 64), np.float32) for _ in range(2))
output = numflash.attention(q_long, k_long, v_long)
claim("fused", "tolerance of its test against the output's RMS", 5.0, float(np.sqrt((output**2).mean())))
print("a kernel that returns zeros passes a test for errors below 5.0:", bool(np.abs(output - 0).max() < 5.0))
assert sums[1] == 0 and abs(constant - 32.644) < 1e-3

# %% [markdown]
# **"No integer division: 12 to 84 times faster."** Every compiler divides by a constant power of two with a shift. Here is `x
# // 4`:

# %%
@njit
def quarter(x):
    return np.uint32(x) // np.uint32(4)


quarter(8)
code = "\n".join(quarter.inspect_asm().values())
print("division instructions in x // 4:", sum(line.split()[0].rstrip("lq") in ("div", "idiv", "udiv", "sdiv")
                                               for line in code.splitlines() if line.strip()))

# %% [markdown]
# **"S reused 128 times, the key innovation."** O = P V uses each P_ij for the D columns of V, in whatever order it is written:
# L x S x D products for L x S weights, fused or not. What fusion saves is the trip of S to memory (chapter 07).
#
# **Causal: "2x".** Half of the scores are hidden, but tiles on the diagonal are computed whole.
#
# **Exercise 3.** How many tiles of 48 rows x 64 keys does causal attention over L tokens visit? The gain is all tiles by those.

# %% tags=["exercise"]
def visited(length):
    return ...


check("12.3", visited)

# %%
for length in (512, 1024, 4096):
    claim("fused", f"causal gain at L={length}", 2, -(-length // 48) * (length // 64) / answer_of("12.3")(length))

# %% [markdown]
# ## The eight improvements, measured
#
# The fused document proposes eight. `cpu/study/fused.py` has them as switches; the start is that document's kernel: float32
# P.V, one thread, exp2 left to the compiler. Before anything is timed the variants are checked against each other.

# %%
gains = improvements.measure(length=1024, head_dim=128, heads=4, repeats=7)
table(["improvement", "predicted", "measured", "ms before", "ms after", "compared"],
      [[g.name, "-".join(f"{p:g}" for p in dict.fromkeys(g.predicted)), f"{g.measured:.2f}", 1e3 * g.before, 1e3 * g.after,
        g.compared] for g in gains])
by_name = {g.name: g for g in gains}
rates = improvements.tile_rates()
print("P.V register tile alone, GFLOP/s:", {name: round(rate / 1e9) for name, rate in rates.items()})
model = (1 + 4 + 0.79) / (1 + 1 + 0.79), (1 + 4 + 0.79) / (1 + 2 + 0.79)
print(f"a model of the A64FX (cycles of Q.K^T, P.V, exp2 per element): INT8 P.V {model[0]:.1f}, 16-bit P.V {model[1]:.1f}")

# %% [markdown]
# What the lines say:
#
# * *exp2 in vectors* can only save part of softmax's share, and the compiler already makes vectors of the plain loop.
# * *Prefetching* tells the hardware what it does by itself: blocks are read in straight lines. A measured gain near 1 says so;
#   below 1 the extra instructions cost time.
# * *Threads* bring the number of cores, less what is shared; 12 cores on an A64FX are plausible.
# * *GQA* saves no operation in prefill. In decode it saves bytes, up to the size of the group (8 here): the prediction is wrong
#   both ways.
# * *16-bit P.V* needs twice the products per second in 16 bits. The line before the model says whether this machine's dot product
#   has them. The A64FX has FP16 at twice the rate, and there the model's 1.5 agrees with the text.
# * *Causal skipping*: key blocks have 128 keys here, not 64, so more is computed beside the diagonal than the tiles above count.
# * *LayerNorm* fused is faster on its own part, which is a small part.
# * *INT8 P.V* "3-4" is the gain of one product, not of the kernel. The model gives 2.1.
# * *Together* the gains do not multiply to what their names promise: each is a gain over a kernel that lacks the others.
#
# `numflash estimate improvements` asks a model of the A64FX (llvm-mca 19; other releases differ by a few per cent) about the same kernels
# in SVE: vector exp2 1.01, prefetching 0.97 to 1.03, 12 threads 12, 16-bit P.V 1.42, LayerNorm 1.00, causal skipping 1.93, INT8 P.V 2.16.

# %%
apart = ("all together", "16-bit P.V", "fused LayerNorm, its part", "GQA, decode")
product = np.prod([g.measured for g in gains if g.name not in apart])
print(f"the single gains multiplied (those that were combined): {product:.1f}; "
      f"measured together: {by_name['all together'].measured:.1f}; predicted 15-20 with 12 cores")

# %% [markdown]
# ## The T4 document
#
# Its reduction without a division is checked in chapter 10, with the split itself. The rest is arithmetic:

# %%
claim("decode, T4", "20 to 65 TFLOP/s, times", 5, 65 / 20)
claim("decode, T4", "TFLOP/s that 320 GB/s feed at 1 operation per byte", 65, 320e9 / 1e12)
claim("decode, T4", "its cache over what Qwen 0.5B needs (14 heads for 2)", 1, 14 / 2)
claim("decode, T4", "splits at L=1024 by FlashAttention 2's rule", 4, split_count(14, 4, 80), holds=True)
claim("decode, T4", "its four gains multiplied; the bytes of a token stay, so at most", 5 * 1.75 * 1.75 * 1.15, 1)
largest = np.log(float(np.finfo(np.float16).max))
claim("decode, T4", "unified maximum in float16: distance in nats before overflow", np.inf, largest)
copied = np.frombuffer(np.float32([1.5, -2.0]).tobytes(), np.float16)
print("'cudaMemcpyAsync: FP32 to FP16 convert'. A copy of the bytes of [1.5, -2.0], read as float16:", copied)
o_parts, lse = rng.standard_normal((4, 8)), np.array([5.0, 5.5, 4.8, 5.1])
weights = np.exp(lse - lse.max())
claim("decode, T4", "its reduce formula, times too large", 1, weights.sum())
assert largest < 11.1 and np.allclose((weights[:, None] * o_parts).sum(0) / weights.sum(),
                                      (np.exp(lse)[:, None] * o_parts).sum(0) / np.exp(lse).sum())

# %% [markdown]
# ## The L4 document
#
# B = 1, H = 8, S = 512, D = 64 on an L4: 121 TFLOP/s in float16, 300 GB/s, 58 multiprocessors at 2.04 GHz.

# %%
work, traffic = 4 * 8 * 512**2 * 64, 4 * 8 * 512 * 64 * 2
print(f"{work / 1e9:.2f} GFLOP and {traffic / 1e6:.1f} MB: ideal {work / 121e12 * 1e6:.1f} us compute, "
      f"{traffic / 300e9 * 1e6:.1f} us memory")
claim("L4 and FA2", "FlashAttention 2, microseconds, against the ideal time", 300, max(work / 121e12, traffic / 300e9) * 1e6)
claim("L4 and FA2", "tensor core FP16 operations per cycle and SM", 200, 121e12 / 58 / 2.04e9)
claim("L4 and FA2", "WMMA products of 16x16x16 in 32 x 32 x 64", 4, (32 // 16) * (32 // 16) * (64 // 16))
claim("L4 and FA2", "tiles of that size in the 400 us that one tile is held against", 1, 8 * (512 // 32) ** 2)
claim("L4 and FA2", "Q.K^T and P.V in microseconds", 680, 400 + 300)
claim("L4 and FA2", "sum of its gap table, microseconds", 1028, 400 + 300 + 200 + 128, holds=True)
claim("L4 and FA2", "1028 / 300", 3.4, 1028 / 300, holds=True)
claim("L4 and FA2", "Q read once instead of once per key tile, times", 8, 512 / 64, holds=True)

# %% [markdown]
# **Bank conflicts.** Shared memory has 32 banks of 4 bytes. The document calls a column of `half K[64][64]` a "2-way" conflict.
#
# **Exercise 4.** 32 threads read one column: thread t reads byte t * row_bytes. Conflict means different words in one bank. How
# many-way is it?

# %% tags=["exercise"]
def conflict(row_bytes):
    return ...


check("12.4", conflict)

# %%
claim("L4 and FA2", "conflict of a column of 64 halves per row, ways", 2, answer_of("12.4")(128))
swizzled = [(row * 8 + (0 ^ (row & 7))) * 4 for row in range(8)]     # FA2 swizzles 16-byte chunks: first words of chunk 0 of 8 rows
print("8 rows, chunks swizzled by row & 7: banks", [word % 32 for word in swizzled])
assert len({word % 32 for word in swizzled}) == 8 and answer_of("12.4")(128) == 32

# %% [markdown]
# ## What a laptop cannot check
#
# | claim | where to look |
# |---|---|
# | FlashAttention 2 has producer and consumer warps, and pins K and V in L2 | its source: neither; such warps come with FA3 |
# | one backward kernel | its source: three (dO.O, the gradients, the conversion of dQ) |
# | Ada brought FP16 accumulation and 32x8x16 shapes; FP8 is 4x | NVIDIA's documents: both since Volta/Turing; FP8 is 2x of FP16 |
# | SDOT has a latency of 4 cycles | A64FX manual: 9, so at least 18 sums; the 24 of 6 x 4 suffice |
# | the memory bandwidth of the fused kernel, 128 against 8 GB/s | no measurement is shown |
# | "WMMA kernel" of the T4 | its own diagram says half2 |
# | the L4's gap table is "measured" | FlashAttention 2 was never run there; the text says so |

# %%
table(["document", "claim", "said", "found", ""],
      [[document, what, "" if said is None else float(said), float(found), "holds" if holds else ""]
       for document, what, said, found, holds in ledger])

# %%
off = {}
for document, what, said, found, holds in ledger:
    if not holds and said and np.isfinite(said):
        off[textwrap.shorten(what.split(",")[0], 46, placeholder=" ...") + f" ({document})"] = abs(said / found)
off = dict(sorted(off.items(), key=lambda item: -abs(np.log(item[1])))[:14])
fig, axes = figure(2, width=13, height=5.2, width_ratios=(1, 1))
for n, ratio in enumerate(off.values()):
    colour, marker = ("#D55E00", "^") if ratio > 1 else ("#0072B2", "s")
    axes[0].plot([1, ratio], [n, n], color="#777777", linestyle="-", marker="")
    axes[0].plot(ratio, n, color=colour, linestyle="", marker=marker, markersize=7)
axes[0].axvline(1, color="black", linestyle="-", marker="")
axes[0].set(xscale="log", yticks=range(len(off)), yticklabels=list(off), ylim=(len(off) - 0.5, -0.5),
            xlabel="what was said / what was found (1 is right)", title="14 claims furthest off")
axes[0].tick_params(axis="y", labelsize=8)
names = [g.name for g in gains]
for n, g in enumerate(gains):
    low, high = g.predicted
    axes[1].barh(n, max(high - low, 0.03 * low), left=low, color="#E69F00", hatch="//", edgecolor="black", height=0.6,
                 label=None if n else "predicted")
    axes[1].plot(g.measured, n, color="black", linestyle="", marker="o", markersize=7, label=None if n else "measured here")
axes[1].axvline(1, color="black", linestyle="-", marker="")
axes[1].axvline(most(), color="#0072B2", linestyle="--", marker="")
axes[1].text(1.05 * most(), len(names) - 0.6, f"cores here: {most()}", color="#0072B2", fontsize=9, va="bottom")
axes[1].set(xscale="log", yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -1), xlabel="gain",
            xticks=(0.5, 1, 2, 5, 10, 20), xticklabels=("0.5", "1", "2", "5", "10", "20"), title="the eight improvements")
axes[1].minorticks_off()
_ = axes[1].legend(loc="center right", fontsize=9)

# %%
fig, ax = figure(1, width=8, height=2.2)
bars(ax, {"L=512, D=128, one core": operations / ours / 1e9}, "GOP/s", ("measured INT8 peak", roof().int8 / 1e9), digits=0)

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
wrong = [what for _, what, _, _, holds in ledger if not holds]
right = [what for _, what, said, found, holds in ledger if holds]
silent = [what for _, what, said, _, holds in ledger if said is None]
print(f"{len(ledger)} figures: {len(right)} hold, {len(wrong) - len(silent)} do not, and of {len(silent)} the documents say nothing")
for _, what, said, found, holds in ledger:
    off_by = np.inf if said is None else abs(said - found) / abs(found)
    assert off_by < 0.01 if holds else off_by > 0.01, what

# %% [markdown]
# **What you can do now**
#
# * recompute a figure from bytes, operations, cycles and shares,
# * tell a share from a time, and the gain of a part from that of the whole,
# * say of a claim what would have to be measured to believe it.
#
# **Next:** [13](13_threads_warps_memory.ipynb). 32 threads move together, and memory is near (shared) or far (global).
