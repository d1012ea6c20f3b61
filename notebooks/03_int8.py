# %% [markdown]
# # 03. INT8
#
# After this chapter you can
#
# * turn float tensors into int8 and back, and say what that costs before you run it,
# * decide which entries share a scale: those of a tensor, a row, a channel,
# * take the mean of the keys away without changing attention, and tell when it helps and when it does not,
# * find out where the error of an integer kernel comes from, on real activations, and what attention sinks have to do with it,
# * recognise an error figure that says nothing.
#
# *Activations* are the numbers that a trained model computes for a text, here Q, K and V. Those of this chapter come from a sentence
# encoder, all-MiniLM-L6-v2: layer 2, 12 heads, 512 tokens, D = 32.

# %% [markdown] tags=["map"]
# > **The idea:** An 8-bit number costs half a step of error, and the largest entry sets the step.
# >
# > **Where you are:** CPU path, stop 4 of 8: [00](00_memory.ipynb) → [01](01_online_softmax.ipynb) → [02](02_tiling.ipynb) → **03** → [06](06_register_tile.ipynb) → [07](07_fused.ipynb) → [09](09_threads_causal_gqa.ipynb) → [24](24_capstone.ipynb)
# >
# > **Time:** 30 minutes to read, 15 for the exercises. **Before it:** [00](00_memory.ipynb).
# >
# > **Terms:** [activation](../docs/glossary.md#activation), [quantisation](../docs/glossary.md#quantisation), [scale](../docs/glossary.md#scale), [rms](../docs/glossary.md#rms), [relative l1](../docs/glossary.md#relative-l1), [smoothing](../docs/glossary.md#smoothing), [attention sink](../docs/glossary.md#attention-sink).
# >
# > **Papers:** [SageAttention](https://arxiv.org/abs/2410.02367), [StreamingLLM](https://arxiv.org/abs/2309.17453).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import numpy as np

import numflash
from numflash import reference
from numflash.course import answer_of, bars, check, exact_attention, figure, quantised, roof, table
from numflash.measure.data import minilm
from numflash.measure.metrics import errors
from numflash.numerics import fixedpoint as fx

query, key, value = (x.astype(np.float32)[None] for x in minilm())


def relative_l1(out, exact):
    return float(np.abs(out - exact).sum() / np.abs(exact).sum())


exact = exact_attention(query, key, value)
print("query, key, value", query.shape, "largest magnitudes", [round(float(np.abs(x).max()), 1) for x in (query, key, value)])

# %% [markdown]
# ## Why
#
# An int8 is a quarter of a float32 to store and to move, and a core multiplies more of them per second. On this machine, in
# loops of nothing but the instruction (`amx_int8`, where a core has it, multiplies tiles of 16 x 64 bytes at once: chapter 06):

# %%
peak = roof()
print(f"{peak.int8 / 1e9:.0f} GOP/s in int8 ({peak.isa}), {peak.float32 / 1e9:.0f} GFLOP/s in float32: "
      f"{peak.int8 / peak.float32:.1f} to 1")

# %% [markdown]
# ## 127 steps to each side
#
# Symmetric quantisation: one float, the `scale`, is the largest magnitude divided by 127. Store round(x / scale), an integer from -127 to
# 127; it is read back as stored * scale. Neighbouring integers are one scale apart, so the scale is the size of a *step*.
#
# **Exercise 1.** Quantise a vector: return the int8 values and the scale.

# %% tags=["exercise"]
def quantise(x):
    return ...


check("03.1", quantise)

# %%
row = query[0, 0, 0]
stored, step = answer_of("03.1")(row)
print("x     ", np.round(row[:8], 3))
print("stored", stored[:8], f"scale {step:.5f}")
print("back  ", np.round(stored[:8] * step, 3))
print(f"largest error {np.abs(stored * step - row).max():.5f}, half a step is {step / 2:.5f}; "
      f"RMS {np.sqrt(np.mean((stored * step - row) ** 2)):.5f}, a step / sqrt(12) is {step / np.sqrt(12):.5f}")
assert np.abs(stored * step - row).max() <= step / 2 * 1.001

# %% [markdown]
# So the error is known beforehand: at most half a step; its root mean square (RMS) is about step / sqrt(12), the value for errors spread
# evenly over a step. And the *largest* entry sets the step.
#
# ## Which entries share a scale?
#
# The fewer entries share one, the smaller the steps. `numflash.quantize` knows four ways: in each head, one scale for all entries
# ("tensor"), for 128 rows ("block"), for a row, for a channel. Error of the tensors read back, as a share of their own RMS:

# %%
WAYS = ("tensor", "block", "row", "channel")


def read_back_error(x, way):
    return float(np.sqrt(np.mean((numflash.quantize(x, way).dequantize() - x) ** 2) / np.mean(x**2)))


table(("a scale per", "query", "key", "value"),
      [(way, *(f"{100 * read_back_error(x, way):.2f} %" for x in (query, key, value))) for way in WAYS])

# %% [markdown]
# Small steps are not all. The product runs in integers, so a scale must come *out of the sum*. A score sums over channels: S[i,
# j] = sum over d of q[i, d] * k[j, d]. A scale per row of Q and one per row of K come out of it: S = scale_q[i] * scale_k[j] *
# (integer). A scale per channel of K would stay inside.
#
# **Exercise 2.** O[i, c] = sum over keys j of p[i, j] * v[j, c]. Which scale of V comes out of this sum: one per "row" or one per
# "channel"?

# %% tags=["exercise"]
answer = ...
check("03.2", answer)

# %%
q, k, v = numflash.quantize_qkv(query, key, value)         # what precision="int8" makes: query and key per row, value per channel
dots = q.data[0, 0].astype(np.int32) @ k.data[0, 0].T.astype(np.int32)
restored = dots * q.row_scale()[0, 0][:, None] * k.row_scale()[0, 0]
real = query[0, 0] @ (key[0, 0] - k.offset[0, 0]).T
print(f"integer scores times both scales: off by {100 * relative_l1(restored, real):.2f} % (relative L1)")
assert relative_l1(restored, real) < 0.02

# %% [markdown]
# ## Smoothing the keys
#
# `k.offset`, just subtracted, is the mean of each channel over all keys (SageAttention, section 4.2). Channels of K often have a mean far
# from zero; then most of the 127 steps represent a part that all keys have in common. May one take it away? A vector m taken from every
# key lowers the scores of row i by the same number for all keys.
#
# **Exercise 3.** By what number, per row? Given are `q` (rows, D) and `m` (D,); return what each row's scores lose. (The scale of a score is
# 1 / sqrt(D).)

# %% tags=["exercise"]
def shift_of_scores(q, m):
    return ...


check("03.3", shift_of_scores)

# %% [markdown]
# Softmax divides by the sum, so what all keys have in common cancels. (A kernel that also returns the log of the sum of weights must add this number
# back; chapter 11 uses it.) In float64:

# %%
moved = key - key.mean(2, keepdims=True)
print(f"attention with K and with K minus its mean differ by {np.abs(exact_attention(query, moved, value) - exact).max():.0e}")
assert np.abs(exact_attention(query, moved, value) - exact).max() < 1e-5

# %% [markdown]
# Does it help? On these activations, and on random ones where 8 of 128 channels of K have a large common part:

# %%
rng = np.random.default_rng(0)
biased = [rng.standard_normal((1, 1, 1024, 128)).astype(np.float32) for _ in range(3)]
biased[1][..., :8] += rng.normal(0, 10, 8).astype(np.float32)


def int8_error(q, k, v, smooth):
    in_bytes = numflash.quantize(q, "row"), numflash.quantize(k, "row", smooth=smooth), numflash.quantize(v, "channel")
    return relative_l1(numflash.attention_int8(*in_bytes), exact_attention(q, k, v))


smoothing = {name: [int8_error(*tensors, smooth) for smooth in (False, True)]
             for name, tensors in (("MiniLM, layer 2", (query, key, value)), ("8 biased channels", biased))}
common = {"MiniLM, layer 2": key, "8 biased channels": biased[1]}
table(("keys", "largest mean / spread of a channel", "relative L1", "smoothed"), [
    (name, f"{float((np.abs(common[name].mean(2)) / common[name].std(2)).max()):.1f}", *(f"{100 * e:.2f} %" for e in pair))
    for name, pair in smoothing.items()])
assert smoothing["8 biased channels"][0] > 2 * smoothing["8 biased channels"][1]

# %% [markdown]
# With biased channels the error falls to less than half. On this layer it hardly changes: the means are at most four times the spread
# (the standard deviation) of their channel, and most of the error does not come from K, as the next section shows. The package always
# does it: it costs one pass over K.
#
# ## Where the error comes from
#
# Round one tensor at a time and compute everything else in float64. Then all three: no kernel that is given these int8 inputs can do
# better than that. Then two whole pipelines:
#
# * "weights in 8 bits" computes both products with bytes, so it also rounds P to 8 bits. It is the plain pipeline that the course builds,
#   here in NumPy.
# * "kernel, pv fp32" is the shipped kernel with `pv="fp32"`. It keeps P in 16 bits and V in float.
#
# (The shipped kernel without this option is the plain pipeline with two additions: one is at the end of this chapter, the other in
# chapter 04.)

# %%
sources = {
    "Q rounded": exact_attention(q.dequantize(), key, value),
    "K rounded": exact_attention(query, k.dequantize(), value),
    "V rounded": exact_attention(query, key, v.dequantize()),
    "Q, K, V rounded: the floor": exact_attention(*(x.dequantize() for x in (q, k, v))),
    "kernel, pv fp32": numflash.attention(query, key, value, precision="int8", pv="fp32"),
    "weights in 8 bits": reference.integer_model(quantised(query, key, value), plain=True)[0],
}
error = {name: relative_l1(out, exact) for name, out in sources.items()}
for name, e in error.items():
    print(f"{name:28s} {100 * e:.2f} %")
floor = error["Q, K, V rounded: the floor"]
assert error["weights in 8 bits"] >= floor

# %% [markdown]
# Independent errors add by their squares: the square of the total is the sum of the squares of the parts. So take the square of the error
# of "weights in 8 bits", subtract the square of the floor, and the rest is nearly all from rounding P to 8 bits. ("kernel, pv fp32" may
# be below the floor: it keeps V in float, and the floor counts V rounded to 8 bits as well. Its own floor is Q and K rounded.)

# %%
together = np.sqrt(sum(error[f"{x} rounded"] ** 2 for x in "QKV"))
print(f"root of the sum of squares of the first three: {100 * together:.2f} %; measured together: {100 * floor:.2f} %")
print(f"left for P: {100 * np.sqrt(error['weights in 8 bits'] ** 2 - floor**2):.2f} %")
assert abs(together / floor - 1) < 0.2

# %% [markdown]
# ## Five figures
#
# One figure hides what another shows, so `numflash.accuracy(query, key, value)` always reports five, for your own tensors if you like:
#
# * cosine: of the angle between the output and the exact one, both taken as one long vector (1 is right),
# * relative L1: the sum of all errors' magnitudes, divided by that of the exact numbers' magnitudes,
# * RMSE: the root mean square of the errors,
# * max abs: the largest error,
# * worst row: the largest relative L1 error of a single row.
#
# Here they are for two outputs above:

# %%
found = {name: errors(sources[name], exact) for name in ("weights in 8 bits", "kernel, pv fp32")}
table(("precision", "cosine", "relative L1", "RMSE", "max abs", "worst row"),
      [(name, f"{e.cosine:.6f}", f"{e.relative_l1:.1e}", f"{e.rmse:.1e}", f"{e.max_abs:.1e}", f"{e.worst_row:.1e}")
       for name, e in found.items()])

# %% [markdown]
# The cosine is 0.9999, and yet one row is wrong by a third. Look at that row:

# %%
out = sources["weights in 8 bits"]
gap, size = np.abs(out - exact).sum(-1), np.abs(exact).sum(-1)
at = np.unravel_index((gap / size).argmax(), gap.shape)
print(f"head {at[1]}, token {at[2]}: error {gap[at]:.2f}, where the median row has {np.median(gap):.2f}; "
      f"size {size[at]:.1f}, where the median row has {np.median(size):.1f}")

# %% [markdown]
# The output is small and the error is large. The row of weights shows why:

# %%
_, head, token = at
weights = np.exp(query[0, head, token] @ key[0, head].T / np.sqrt(32))
weights /= weights.sum()
first = weights.argmax()
steps = list(reference.integer_steps(quantised(query, key, value), 0, head, plain=True))
lost = steps[0].p[token] == 0                              # the weights of the first block of 128 keys, as the kernel has them
sizes = np.abs(value[0, head]).sum(-1)
print(f"{100 * weights[first]:.0f} % of the weight is on token {first}, whose value has size {sizes[first]:.1f}; "
      f"the median value has {np.median(sizes):.1f}")
print(f"the other tokens of its block share {100 * (weights[:128].sum() - weights[first]):.1f} %, and {lost.sum()} of them, "
      f"with {100 * weights[:128][lost].sum():.1f} %, are rounded to 0")
assert lost.sum() == 121

# %% [markdown]
# This is an *attention sink* ([StreamingLLM](https://arxiv.org/abs/2309.17453)): the head puts its weight on a token whose value is
# nearly zero, when no other token is of interest. So the output consists of the other tokens' values. Their weights are small beside the
# largest weight of the block, which sets the step: most of them are less than half a step, and 8 bits round them to 0. (The step is 1/255
# of the next power of two above the largest weight: chapter 04.)
#
# ## The cure
#
# Sinks are nearly always among the first tokens of a text. So the kernel that ships takes the first four keys by themselves, before the block
# that they belong to:
#
# * Their keys and values have 13 bits instead of 8: what rounding took from them is stored beside them (`QuantizedTensor.low`), for four rows only.
# * Their weights have 12 bits.
# * The other keys of the block then have a largest weight of their own, so that their 8 bits are used for what is left.
#
# Four keys among thousands take hardly any time. The rows with a sink, in the three pipelines:

# %%
unnormalised = np.exp(query[0, head] @ key[0, head].T / np.sqrt(32))
rows = unnormalised[:, first] / unnormalised.sum(1) > 0.8
sources["as shipped: first keys apart"] = numflash.attention(query, key, value, precision="int8")
error["as shipped: first keys apart"] = relative_l1(sources["as shipped: first keys apart"], exact)
sinks = {}
for name in ("weights in 8 bits", "as shipped: first keys apart", "kernel, pv fp32"):
    each = np.abs(sources[name] - exact).sum(-1)[0, head] / size[0, head]
    sinks[name] = each[rows].mean(), each[~rows].mean()
table((f"head {head}: error of", f"{rows.sum()} rows with a sink of over 80 %", f"the other {(~rows).sum()} rows", "the layer"),
      [(name, *(f"{100 * x:.1f} %" for x in pair), f"{100 * error[name]:.2f} %") for name, pair in sinks.items()])
assert sinks["as shipped: first keys apart"][0] < sinks["weights in 8 bits"][0] / 2

# %% [markdown]
# ## A figure that says nothing
#
# Suppose that a test calls a kernel correct if its largest error is below 5.0. Its data is drawn from N(0, 1). Which kernels pass?

# %%
q2, k2, v2 = (rng.standard_normal((1, 1, 2048, 128)).astype(np.float32) for _ in range(3))
output = exact_attention(q2, k2, v2)
print(f"the output has RMS {np.sqrt((output**2).mean()):.3f} and no entry larger than {np.abs(output).max():.2f}")
for name, kernel in (("the int8 kernel", numflash.attention(q2, k2, v2, precision="int8")), ("all zeros", 0 * output),
                     ("right, times -10", -10 * output)):
    print(f"{name:17s} max error {np.abs(kernel - output).max():5.2f}, passes: {bool(np.abs(kernel - output).max() < 5)}; "
          f"relative L1 {relative_l1(kernel, output):.3f}")
assert np.abs(output).max() < 5 and np.sqrt((output**2).mean()) < 0.05

# %% [markdown]
# All zeros is a real case. A kernel returns them if it divides the weights by the row sum first and rounds them to 8 bits afterwards.
# With 2048 keys of about the same score, each probability is 1/2048. In units of 1/255:

# %%
score = np.zeros(2048)                                     # all keys alike
probability = np.exp(score) / np.exp(score).sum()
first_divided = np.rint(255 * probability).astype(np.uint8)
relative_to_maximum = fx.exp2_p8(np.zeros(2048, np.uint16))          # 2**0, the weight relative to the largest
print(f"divide, then round: {first_divided[:4]} ...")
print(f"round, then divide: {relative_to_maximum[:4]} ... by {relative_to_maximum.sum(dtype=int)}")
assert not first_divided.any() and (relative_to_maximum == 255).all()

# %% [markdown]
# So this package rounds weights relative to the maximum (to its whole octave, chapter 04) and divides once, at the end.
#
# ## The picture and its ceiling

# %%
fig, (image_axis, error_axis) = figure(2, width=11.5, height=4, width_ratios=(1, 1.25))
shown = image_axis.imshow(np.abs(key[0, 3]).T, aspect="auto", interpolation="nearest")
fig.colorbar(shown, ax=image_axis, label="|K|")
image_axis.set_title("K of head 3: channel 9 is large for nearly all tokens")
image_axis.set_xlabel("token")
image_axis.set_ylabel("channel")
bars(error_axis, {name: 100 * e for name, e in error.items() if "floor" not in name}, "relative L1 error, %",
     ("floor: Q, K, V rounded", 100 * floor), digits=2)

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert found["weights in 8 bits"].relative_l1 < 0.017 and found["weights in 8 bits"].cosine > 0.9998      # what the tests allow for these activations
assert error["kernel, pv fp32"] < error["weights in 8 bits"] and error["as shipped: first keys apart"] < error["weights in 8 bits"]
print(f"ceiling: relative L1 of {100 * floor:.2f} %, with Q, K and V rounded to 8 bits and all else exact; "
      f"the shipped int8 kernel is at {100 * error['as shipped: first keys apart']:.2f} %")

# %% [markdown]
# **What you can do now**
#
# * quantise a row, and say what half a step of error costs,
# * take the mean of the keys away, and say why softmax does not notice,
# * name what makes a tensor hard to quantise: one large channel, or the keys that all rows attend to.
#
# **Next:** [06](06_register_tile.ipynb). Keep many sums in registers, so that each load serves several products.
