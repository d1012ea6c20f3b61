# %% [markdown]
# # 04. Fixed point and exp2
#
# After this chapter you can
#
# * read and write numbers like Q8.8, and say where they overflow,
# * compute 2**x with one multiplication or two and a shift,
# * draw the error of an approximation and see from the picture whether it is usable,
# * say what a constant that was rounded too far does to the probabilities,
# * follow the integer kernel of this package through its key blocks.

# %% [markdown] tags=["map"]
# > **The idea:** 2**x is a shift and a small polynomial, so softmax can run in integers.
# >
# > **Where you are:** optional: on neither path (CPU path: [00](00_memory.ipynb) ...; GPU path: [13](13_threads_warps_memory.ipynb) ...)
# >
# > **Time:** 35 minutes to read, 20 for the exercises. **Before it:** [01](01_online_softmax.ipynb), [03](03_int8.ipynb).
# >
# > **Terms:** [fixed point](../docs/glossary.md#fixed-point), [octave](../docs/glossary.md#octave), [saturation](../docs/glossary.md#saturation).
# >
# > **Papers:** [Q format](https://en.wikipedia.org/wiki/Q_(number_format)), [I-BERT](https://arxiv.org/abs/2101.01321).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import inspect

import numpy as np

import numflash
from numflash.course import COLOURS, DASHES, answer_of, bars, check, figure, quantised, table
from numflash.cpu.study import exp2_benchmark, unfused
from numflash.measure.timing import best_time
from numflash.numerics import fixedpoint as fx
from numflash.reference import integer_model, integer_steps

# %% [markdown]
# **The question:** softmax needs an exponential for every score. Can integers alone compute it, and how exact must it be?
#
# ## Fixed point: an integer that counts fractions
#
# No integer is 1.5. But 384 can stand for it, if everybody knows that it counts in steps of 1/256: 384 / 256 = 1.5. Such numbers are called
# *fixed point*. **Q8.8** is an int16 in steps of 1/256: 8 bits before the point, 8 after it. **Q16.16** has 32 bits and counts in steps of
# 1/65536.
#
# * A sum is a sum of integers: 1.5 + 0.25 is 384 + 64 = 448, and 448 / 256 = 1.75.
# * A product counts in steps of 1/256 of 1/256. Shifting it right by 8 bits (`>> 8`, which divides by 256) brings it back: 1.5 * 0.25 is
#   384 * 64 = 24576, and 24576 >> 8 = 96, which is 0.375.

# %%
a, b = round(2.71828 * 256), round(1.5 * 256)
print(f"2.71828 is {a} in Q8.8, which is {a / 256}; 1.5 is {b}; product {a * b >> 8}, which is {(a * b >> 8) / 256}")
print(f"int16 reaches from {-(1 << 15) / 256} to {((1 << 15) - 1) / 256}, in steps of {1 / 256}")

# %% [markdown]
# **Exercise 1.** Write x (float) in Q8.8: round to the nearest step (`np.rint`), and stop at the ends of int16 instead of wrapping
# around.

# %% tags=["exercise"]
def to_q8(x):
    return ...


check("04.1", to_q8)

# %% [markdown]
# The check tries 181, a number beyond the end. Scores of this size occur. Say the largest number of q and of k is 4, so that the byte 127
# stands for 4. If all 128 numbers of both are that large, the score q.k / sqrt(128) is

# %%
largest = 127 * 127 * 128 * (4 / 127) ** 2 / np.sqrt(128)
print(f"{largest:.0f}, outside of +-128: without saturation it would come back as {(largest + 128) % 256 - 128:.0f}")
assert largest > 128

# %% [markdown]
# Sums have the same trouble. Suppose that weights are 65536 for 1.0 and are added up in 32 bits:

# %%
for keys in (32767, 32768, 65535, 65536):
    total = keys * 65536                                   # that many equal keys
    print(f"{keys} equal keys: as uint32 {total % (1 << 32)}, as int32 {(total + (1 << 31)) % (1 << 32) - (1 << 31)}")
assert (65536 * 65536) % (1 << 32) == 0

# %% [markdown]
# At 65536 equal keys the sum is 0, and then comes a division by it. This package sums in 64 bits or float32.
#
# ## 2**x by a shift
#
# exp(x) = 2**(x log2 e), so let softmax count in octaves (chapter 01), relative to the largest score of the row. A key that is y octaves
# below it has the weight 2**-y, and y is 0 or more. Split y into its whole part w and its fraction f, a number from 0 to 1:
#
# $$2^{-y} = 2^{-w} \; 2^{-f}$$
#
# 2**-w is a shift to the right by w bits. Only 2**-f needs a formula, and only for one octave. By hand, for y = 2.25:
#
# * w = 2 and f = 0.25, and 2**-0.25 is 0.8409, in Q16.16 the integer 55109,
# * 55109 >> 2 = 13777, and 13777 / 65536 = 0.2102, which is 2**-2.25.
#
# Here is what ships. It takes y in Q8.8. Its lines are:
#
# * `f`: the fraction, moved from 8 to 16 fraction bits,
# * `g` and `h`: two multiplications, each shifted back by 16, make h = f * (A - B * f) with two constants A and B. 1 - h is nearly 2**-f,
# * the last line: 1 - h, shifted right by w.
#
# A is B + 1/2. So f = 1 gives exactly 1/2, with which the next octave begins: the formula has no jump there.

# %%
print(inspect.getsource(fx.exp2_quadratic))
y = 589
got = int(fx.exp2_quadratic(np.uint32(y)))
print(f"y = {y} in Q8.8 is {y / 256}; 2**-y = {2 ** (-y / 256):.6f}; exp2_quadratic gives {got}, which is {got / 65536:.6f}")

# %% [markdown]
# The cheapest formula for the fraction is a straight line. A common one is `2^x = (256 + 177 * frac) >> (-int)`, where x is int + frac, and
# int is x rounded down. 177/256 is nearly ln 2, the slope of 2**f at f = 0. So the line is the tangent at f = 0, and everywhere else it
# lies below the curve. Cheaper still is `2**floor`: it takes the whole part only and leaves the fraction out. The table compares both with
# what ships, and with a cubic:

# %%
VARIANTS = {"line177": "tangent line", "quadratic": "quadratic", "cubic": "cubic", "ultra": "2**floor"}
y = np.arange(0, 256, dtype=np.uint32)                     # one octave
errors = {name: fx.EXP2[name][0](y) / (65536 * np.exp2(y / -256.0)) - 1 for name in VARIANTS}
table(("exp2", "worst error", "mean error"), [(words, f"{100 * errors[n][np.abs(errors[n]).argmax()]:+.3f} %",
                                              f"{100 * errors[n].mean():+.3f} %") for n, words in VARIANTS.items()])
before, after = (fx.exp2_line177(np.uint32(n)) / 65536 for n in (1, 0))
print(f"the line just below 1 gives {before:.3f}, and at 1 {after:.3f}: a jump of {100 * (after / before - 1):.1f} %")
assert 0.153 < np.abs(errors["line177"]).max() < 0.155 and after / before > 1.17

# %% [markdown]
# With the tangent line a weight is up to 15 % too small, and it jumps at every whole number: there a key whose score grows by one step of
# 1/256 gains 18 % of weight. That is the formula computed correctly. Two mistakes in coding it make it much worse:

# %%
x = np.linspace(-1, 0, 1001)[1:-1]                         # between two whole numbers
toward_zero = np.trunc(x)                                  # C's conversion to integer
truncated = (256 + 177 * (x - toward_zero)) / 256 * 2.0**toward_zero / 2.0**x - 1
frac = np.arange(256)
literal = (256 + 177 * frac) / (256 * 2.0 ** (frac / 256))
print(f"whole part cut toward zero, as C does: up to {100 * truncated.min():.0f} %")
print(f"frac as the 8 bits that it is, without a shift by 8: up to {literal.max():.0f} times too large")
assert truncated.min() < -0.37 and 88 < literal.max() < 90

# %% [markdown]
# ## Straight lines at their best
#
# **Exercise 2.** Which whole number in place of 177 makes the line continuous? (At the end of an octave, f = 1, it must have the value
# with which the next octave starts.)

# %% tags=["exercise"]
slope = ...
check("04.2", slope)

# %%
f = np.linspace(0, 1, 4097)


def worst(polynomial):
    return np.abs(polynomial / 2**f - 1).max()


lines = {"256 + 177 f": worst(1 + 177 / 256 * f), "256 + 256 f": worst(1 + f), "best line, 0.9702 (1 + f)": worst(0.9702 * (1 + f))}
nudged = min(worst(u + w * f) for u in np.linspace(0.95, 1, 101) for w in np.linspace(0.9, 1.05, 101))
for name, error in lines.items():
    print(f"{name:28s} {100 * error:5.2f} %")
print(f"none of 10 201 other lines comes closer: {100 * nudged:.2f} % at best; and the best line is as far off at both ends "
      "as in the middle, so none can")
print(f"quadratic without jumps: {100 * worst(1 + f * (0.6602 + 0.3398 * f)):.2f} %; one more multiplication, ten times better")
ends, middle = 0.9702 * (1 + np.array([0, 1])) / 2.0 ** np.array([0, 1]) - 1, (0.9702 * (1 + f) / 2**f - 1).max()
assert nudged > 0.0297 and np.allclose(-ends, middle, atol=2e-4)

# %% [markdown]
# ## How good is good enough?
#
# The score is rounded to Q8.8 before exp2, which by itself moves the weight by up to half a step. And the weight that
# is multiplied with V has 8 bits (`exp2_p8`): 255 is 1.0. An exp2 much better than that is wasted.

# %%
half_step = 2 ** (0.5 / 256) - 1
p8 = fx.exp2_p8(np.arange(16 * 256, dtype=np.uint16)).astype(float)
off = np.abs(p8 - 255 * np.exp2(-np.arange(16 * 256) / 256))
print(f"half a step of Q8.8 moves 2**x by {100 * half_step:.3f} %; quadratic {100 * np.abs(errors['quadratic']).max():.2f} %")
print(f"exp2_p8: at most {off.max():.2f} steps of 1/255 off, where rounding alone is off by 0.5")
assert off.max() < 0.5 + 0.0028 * 255

# %% [markdown]
# What it does to attention: random N(0, 1) queries, keys and values, 2048 keys, D = 128. Only the weights come from the variant; V and
# the sum are in float64. In the last column the weights are rounded to bytes as well, as the kernel does: there a cubic gains nothing
# over the quadratic.

# %%
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((n, 128)) for n in (256, 2048, 2048))
scores = query @ key.T / np.sqrt(128)


def attend(weights):
    return weights @ value / weights.sum(1, keepdims=True)


def relative_l1(out):
    return np.abs(out - exact).sum() / np.abs(exact).sum()


exact = attend(np.exp(scores - scores.max(1, keepdims=True)))
t = np.rint(scores * np.log2(np.e) * 256)                  # Q8.8
distance = (t.max(1, keepdims=True) - t).astype(np.uint32)
made = {words: fx.EXP2[name][0](distance) / 65536 for name, words in VARIANTS.items()}
made["exact exp2 of Q8.8"] = np.exp2(-distance.astype(float) / 256)
cost = {words: relative_l1(attend(weights)) for words, weights in made.items()}
in_bytes = {words: relative_l1(attend(np.rint(255 * weights))) for words, weights in made.items()}
table(("exp2", "relative L1 of the output", "weights in 8 bits"),
      [(name, f"{100 * error:.3f} %", f"{100 * in_bytes[name]:.3f} %") for name, error in cost.items()])
assert abs(in_bytes["quadratic"] - in_bytes["cubic"]) < 2e-4
assert cost["tangent line"] > 10 * cost["quadratic"]

# %% [markdown]
# ## A constant that was rounded too far
#
# A score q.k must be multiplied by log2(e) / sqrt(128) to count in octaves, and by 256 to count in Q8.8: by 32.64. Integer code often
# builds such a number from two rounded ones:

# %%
exact_scale = 256 * np.log2(np.e) / np.sqrt(128)
score_scale, log2e = round(256 / np.sqrt(128)), round(256 * np.log2(np.e))
combined = (score_scale * log2e) >> 8
print(f"score_scale {score_scale} for {256 / np.sqrt(128):.3f}, log2(e) {log2e} for {256 * np.log2(np.e):.3f}, "
      f"combined {combined} for {exact_scale:.3f}: {100 * (combined / exact_scale - 1):+.2f} %")
assert combined == 33

# %% [markdown]
# 1 % sounds harmless. But every *score* grows by 1 %, which makes softmax sharper, and a score is used in an exponent:
#
# **Exercise 3.** Key A scores `gap` below key B (in natural units: the weight is e**score; 1 nat is 1.44 octaves). By what factor is the
# ratio of their probabilities off, if all scores are multiplied by 1 + error? (Right is exp(-gap); the answer for gap 0 or error 0 is 1.)

# %% tags=["exercise"]
def ratio_off(gap, error):
    return ...


check("04.3", ratio_off)

# %%
excess = combined / exact_scale - 1
for gap in (1, 5, 10, 20):
    print(f"gap {gap:2d} nats: the ratio is {100 * (1 - answer_of('04.3')(gap, excess)):4.1f} % too small")
t33 = np.rint(scores * np.log2(np.e) * 256 * (1 + excess))
with_33 = relative_l1(attend(np.exp2((t33 - t33.max(1, keepdims=True)) / 256)))
print(f"the output above, exact exp2: relative L1 {100 * with_33:.2f} %, against {100 * cost['exact exp2 of Q8.8']:.2f} %")
assert with_33 > 5 * cost["exact exp2 of Q8.8"]

# %% [markdown]
# The rounding of the constant alone costs more than the quadratic exp2. Eight more bits repair it:

# %%
for bits in (8, 12, 16):
    whole = round(exact_scale / 256 * 2**bits)
    error = whole / 2**bits * 256 / exact_scale - 1
    needed = (127 * 127 * 128 * whole).bit_length() + 1
    print(f"{whole:5d} / 2**{bits:<2d}: {100 * error:+.4f} %; its product with a raw score of 127 * 127 * 128 needs {needed} bits")
assert abs(8357 / 65536 * 256 / exact_scale - 1) < 3e-6

# %% [markdown]
# 36 bits do not fit an int32 lane. So this package converts the score to float32, multiplies, and rounds once. (float32 holds every
# integer up to 2**24, so the conversion is exact as long as 127 * 127 * D is not larger: up to D = 1040.) Since it multiplies anyway, the
# quantisation scales of q and k go into the same factor.
#
# ## The integer kernel, block by block
#
# `reference.integer_steps` is the definition of this package's `precision="int8"`. It is a generator: each step is one key block, with
# everything that a kernel holds then. It is chapter 01 with two differences:
#
# * Scores are Q8.8 numbers in octaves: 256 is one octave.
# * m is a *whole* octave, the maximum rounded up, so that every shrink is an exact power of two: no rounding enters through it.
#
# (The kernels take the first four keys of a sequence out of their block, with more bits: chapter 03 says why. Here, with `plain=True`, they
# are keys like others.)

# %%
query8, key8, value8 = (rng.standard_normal((1, 1, 512, 64)).astype(np.float32) for _ in range(3))
key8[0, 0, 300:310] += 0.5 * query8[0, 0, 7]               # ten keys that fit query 7 well
problem = quantised(query8, key8, value8)
steps = list(integer_steps(problem, 0, 0, plain=True))
row = 7
table(["keys", "largest score, octaves", "block's octave", "m", "weights: largest, sum", "l"],
      [[f"{s.first}..{s.stop - 1}", float(s.t[row].max() / 256), int(s.octave[row]), int(s.m[row]),
        f"{s.p[row].max()}, {s.p[row].sum()}", float(s.l[row])] for s in steps])

# %% [markdown]
# The third block holds the ten keys that fit: its octave is higher, so m grows, and the l of the first two blocks shrinks. Weights are
# bytes: 255 is 1.0 at the block's *own* octave, so that a block of small weights keeps all its bits. It enters the running sums with a
# factor 2**(octave - m).
#
# **Exercise 4.** In the table, by what factor (a number below 1) did the l of the first two blocks shrink when the third came?

# %% tags=["exercise"]
factor = ...
check("04.4", factor, steps, row)

# %% [markdown]
# **Exercise 5.** Every block and row rounds m up to a whole octave. By what factor (a number above 1), at most, does that make the
# largest weight of a block smaller than 255?

# %% tags=["exercise"]
answer = ...
check("04.5", answer)

# %%
largest = np.array([s.p.max(1) for s in steps])
print(f"largest weight of a row and block: {largest.min()} to {largest.max()}")
assert largest.min() >= 127

# %% [markdown]
# A row whose largest weight is 128 uses seven of its eight bits. The kernel that ships gets most of that bit back. Its weights refer to the
# row's largest score in the block rounded up to an *eighth* of an octave, and the block's sums are multiplied by what is missing to the whole
# octave: 2**(-n / 8), one factor for each row and block. m stays a whole octave, so what was summed before still shrinks exactly.

# %%
finer = list(integer_steps(problem, 0, 0))[1:]             # without the step of the first four keys
largest = np.array([s.p.max(1) for s in finer])
print(f"largest weight of a row and block: {largest.min()} to {largest.max()}")
float8 = numflash.attention(query8, key8, value8)
for words, model8 in (("whole octaves", integer_model(problem, plain=True)[0]), ("eighths", integer_model(problem)[0])):
    print(f"weights relative to {words:13s}: relative L1 {100 * np.abs(model8 - float8).sum() / np.abs(float8).sum():.2f} %")
assert np.array_equal(model8, numflash.attention(query8, key8, value8, precision="int8")) and largest.min() >= 234
print("the shipped kernel has the bits of the second")

# %% [markdown]
# ## What it costs, and the picture
#
# The same softmax pass with each exp2, scores in the first-level cache, in cycles per score (the loop is
# `unfused.make_exponentials`):

# %%
raw = -rng.integers(0, 4000, (8, 512)).astype(np.int32)
weights, top, total = np.zeros_like(raw), np.zeros(8, np.int32), np.zeros(8, np.int64)
clock, cycles = exp2_benchmark.measure_clock(), {}
for name, words in VARIANTS.items():
    kernel = unfused.make_exponentials(name)
    seconds = best_time(lambda: kernel(raw, 512, np.float32(1), top, weights, total), 0.1)  # noqa: B023
    cycles[words] = seconds * clock / raw.size
    np.testing.assert_array_equal(weights, fx.EXP2[name][0]((-raw).astype(np.uint32)))
for words, c in cycles.items():
    print(f"{words:20s} {c:.2f} cycles per score, {100 * (c / cycles[VARIANTS['line177']] - 1):+.0f} % against the tangent line")

# %%
fig, (curve, error_axis, cost_axis) = figure(3, width=12, height=4)
x = -np.arange(0, 2 * 256 + 1) / 256
steps = (-256 * x).astype(np.uint32)
curve.plot(x, 2**x, marker="")
for n, (name, words) in enumerate(VARIANTS.items()):
    approximate = fx.EXP2[name][0](steps) / 65536
    style = {"color": COLOURS[n + 1], "linestyle": DASHES[n + 1], "marker": "", "label": words}
    if name in ("line177", "ultra"):
        curve.plot(x, approximate, **style)
    error_axis.plot(x, np.maximum(np.abs(approximate / 2**x - 1), 1e-6), **style)
error_axis.axhline(half_step, color="black", linewidth=0.8, marker="")
error_axis.text(-1.98, 2.5e-6, "thin line: half a step of Q8.8", fontsize=9, bbox={"facecolor": "white", "edgecolor": "none"})
error_axis.set_yscale("log")
error_axis.set_ylim(1e-6, 1)
error_axis.set_title("relative error")
curve.set_title("two octaves of 2**x (black)")
curve.set_ylabel("2**x")
error_axis.set_ylabel("relative error (1 = 100 %)")
for axis in (curve, error_axis):
    axis.set_xlabel("x")
fig.legend(*error_axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
shown = {name: 100 * error for name, error in cost.items()} | {"exact exp2, scale 33": 100 * with_33}
bars(cost_axis, dict(sorted(shown.items(), key=lambda item: item[1])), "relative L1 of attention, %", digits=2)

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert np.abs(errors["quadratic"]).max() < 0.0028 and np.abs(errors["cubic"]).max() < 0.00014
assert cost["quadratic"] < 3 * cost["exact exp2 of Q8.8"] + 1e-3
print(f"ceiling: {100 * half_step:.3f} %, what rounding the score to Q8.8 costs a weight at worst; "
      f"quadratic {100 * np.abs(errors['quadratic']).max():.2f} %, cubic {100 * np.abs(errors['cubic']).max():.3f} %")

# %% [markdown]
# **What you can do now**
#
# * make 2**x of a shift and a small polynomial, in integers,
# * say what a number format costs: half a step, and saturation at its end,
# * follow the integer softmax block by block, with maxima in whole octaves.
#
# **Next:** [05](05_llvm.ipynb). A compiler vectorises a loop as it is written; it does not build a register tile.
