# %% [markdown]
# # 01. Online softmax by hand, tile by tile
#
# After this chapter you can compute softmax over keys that arrive piece by piece, explain what the running state (m, l, O) means,
# merge two partial results, and follow the integer kernel of this package through its key blocks.

# %%
import numpy as np

import numflash
from numflash.course.lessons import check, figure, table
from numflash.cpu.study import ladder
from numflash.options import Options
from numflash.quantization import quantize_problem
from numflash.reference import integer_model, integer_steps
from numflash.validation import describe

# %% [markdown]
# ## One number at a time
#
# Softmax needs the maximum before the first `exp`, it seems, and so a pass over all scores of its own. It does not: keep the
# maximum *so far*, m, and the sum of weights relative to it, l. When a larger score comes, everything summed so far was too
# large by the same factor 2**(m_old - m_new): shrink it, and go on (Milakov and Gimelshein, 2018). We use powers of two
# throughout: 2**x is what the machine is good at.

# %%
scores = [1.0, 3.0, 2.0, 6.0, 5.0, 6.0]
m, l, rows = -np.inf, 0.0, []
for s in scores:
    m_new = max(m, s)
    shrink = 2.0 ** (m - m_new)                            # 0 for the first score: nothing was summed yet
    l = l * shrink + 2.0 ** (s - m_new)
    m = m_new
    rows.append([s, m, shrink, l])
table(["score", "m", "shrink", "l"], rows)
assert l == sum(2.0 ** (s - max(scores)) for s in scores)

# %% [markdown]
# The output works like l, as a weighted sum of values: O shrinks by the same factor. At the end, O / l is the answer.
#
# **Exercise 1.** Write one step for a whole block: scores `s` (n,) and values `v` (n, d) meet the state (m, l, o). Return the
# new state.

# %% tags=["model"] jupyter={"source_hidden": true}
def state_of(s, v):
    """The state after seeing scores s and values v at once, by the definition."""
    m = s.max()
    p = 2.0 ** (s - m)
    return m, p.sum(), p @ v


def all_at_once(state, s, v):
    m_before, l_before, o_before = state
    top = max(m_before, s.max())
    old, p = 2.0 ** (m_before - top), 2.0 ** (s - top)
    return top, l_before * old + p.sum(), o_before * old + p @ v


rng = np.random.default_rng(0)
first, second = ((rng.normal(0, 3, 8), rng.normal(size=(8, 2))) for _ in range(2))
nothing = (-np.inf, 0.0, np.zeros(2))

# %% tags=["exercise"]
def step(state, s, v):
    m, l, o = state
    return ...


check("one step", step, all_at_once, (nothing, *first), (state_of(*first), *second))

# %% tags=["solution"] jupyter={"source_hidden": true}
def step(state, s, v):
    m, l, o = state
    m_new = max(m, s.max())
    shrink, p = 2.0 ** (m - m_new), 2.0 ** (s - m_new)
    return m_new, l * shrink + p.sum(), o * shrink + p @ v


check("one step", step, all_at_once, (nothing, *first), (state_of(*first), *second))

# %% [markdown]
# ## Order does not matter
#
# A state stands for a set of keys, however it came about. Two states of disjoint sets merge by the same rule: this one line is
# behind split-KV decoding (chapter 10), ring attention (chapter 21) and the tiles of this one.

# %%
def merge(a, b):
    m = max(a[0], b[0])
    return m, *(x * 2.0 ** (a[0] - m) + y * 2.0 ** (b[0] - m) for x, y in zip(a[1:], b[1:], strict=True))


both = state_of(np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]]))
for merged in (merge(state_of(*first), state_of(*second)), merge(state_of(*second), state_of(*first))):
    assert all(np.allclose(x, y) for x, y in zip(merged, both, strict=True))

# %% [markdown]
# ## The integer kernel, block by block
#
# `reference.integer_steps` is the definition of this package's `precision="int8"`, as a generator: one key block a step,
# everything the kernels hold. Two things differ from above. Scores are fixed-point numbers in units of log2, Q8.8: 256 is one
# octave. And m is a *whole* octave, the maximum rounded up, so that every shrink is an exact power of two: no rounding enters
# through rescaling.

# %%
length, d = 512, 64
query, key, value = (rng.standard_normal((1, 1, length, d), np.float32) for _ in range(3))
key[0, 0, 300:310] += 0.5 * query[0, 0, 7]                 # ten keys that row 7 will find interesting
problem = quantize_problem(describe(query, key, value, Options(), "int8"))
steps = list(integer_steps(problem, 0, 0))
row = 7
table(["keys", "largest score, octaves", "block's octave", "m", "weights: largest, sum", "l"],
      [[f"{s.first}..{s.stop - 1}", float(s.t[row].max() / 256), int(s.octave[row]), int(s.m[row]),
        f"{s.p[row].max()}, {s.p[row].sum()}", float(s.l[row])] for s in steps])

# %% [markdown]
# The third block holds the interesting keys: its octave is higher, m grows, and the l of the first two blocks shrinks to
# almost nothing. Weights are bytes: 255 stands for 1.0 at the block's *own* octave, so that a block of small weights keeps
# all its bits and enters the running sums with a factor 2**(octave - m).
#
# **Exercise 2.** In the table, what factor did l of the first two blocks shrink by when the third came?

# %% tags=["exercise"]
factor = ...
check("the shrink at the third block", factor, 2.0 ** (int(steps[1].m[row]) - int(steps[2].m[row])))

# %% tags=["solution"] jupyter={"source_hidden": true}
factor = 1 / 2 ** (int(steps[2].m[row]) - int(steps[1].m[row]))
check("the shrink at the third block", factor, 2.0 ** (int(steps[1].m[row]) - int(steps[2].m[row])))

# %% [markdown]
# **Exercise 3.** Every block and row rounds m up to a whole octave. By what factor, at most, does that make the largest
# weight of a block smaller than 255?

# %% tags=["model"] jupyter={"source_hidden": true}
largest = np.array([s.p.max(1) for s in steps])

# %% tags=["exercise"]
answer = ...
check("the largest weight is smaller by at most", answer, round(255 / largest.min()))

# %% tags=["solution"] jupyter={"source_hidden": true}
answer = 2                                                 # a score just above an octave is rounded up by almost one octave
check("the largest weight is smaller by at most", answer, round(255 / largest.min()))

# %%
print(f"largest weight of a row and block: {largest.min()} to {largest.max()}")
assert largest.min() >= 127

# %% [markdown]
# ## The picture
#
# Left: the row's scores as they arrive, and the staircase m above them, always a whole octave. Right: how much of the final
# sum each key holds, and the state l relative to its end.

# %%
fig, axes = figure(2, width=11, height=3.6)
t = np.concatenate([s.t[row] for s in steps]) / 256
axes[0].plot(t, linestyle="", marker=".", markersize=3, color="#0072B2", label="score of a key, log2")
for n, s in enumerate(steps):
    axes[0].plot([s.first, s.stop], [s.octave[row]] * 2, color="#D55E00", linestyle="--", marker="", linewidth=2,
                 label="the block's own octave" if not n else None)
    axes[0].plot([s.first, s.stop], [s.m[row]] * 2, color="black", linestyle="-", marker="", label="running m" if not n else None)
axes[0].set(xlabel="key", ylabel="octaves", title=f"row {row}: four key blocks of 128", ylim=(t.min() - 0.5, t.max() + 3))
axes[0].legend(loc="upper left", fontsize=8)
weights = np.concatenate([s.p[row] * 2.0 ** (int(s.octave[row]) - int(steps[-1].m[row])) for s in steps])
axes[1].plot(np.cumsum(weights) / weights.sum(), color="#0072B2", linestyle="-", marker="", label="share of the final sum")
axes[1].plot([s.stop - 1 for s in steps], [s.l[row] * 2.0 ** (int(s.m[row]) - int(steps[-1].m[row])) / steps[-1].l[row]
                                           for s in steps], color="black", linestyle="", marker="s", label="l after each block")
axes[1].set(xlabel="key", ylabel="share", title="ten keys hold most of the weight")
_ = axes[1].legend(loc="upper left", fontsize=8)

# %% [markdown]
# ## The ceiling
#
# What is right here is not a speed but an error: float64 is the ceiling of accuracy. The float kernel of rung 2 reaches it to
# rounding; the integer pipeline loses what its bytes cost, and its kernels lose nothing more: their bits are those of the model.

# %%
exact = numflash.attention(query, key, value, impl="reference")[0, 0]
q, k, v = (x[0, 0] for x in (query, key, value))
found = {"rung 2, float32": ladder.prepare("online", q, k, v)(), "the integer model": integer_model(problem)[0][0, 0]}
last = steps[-1]
found["the steps above"] = last.o / last.l[:, None] * problem.value.scale[0, 0]
found["the shipped kernel, int8"] = numflash.attention(query, key, value, precision="int8")[0, 0]
table(["kernel", "relative L1 error"], [[name, float(np.abs(x - exact).sum() / np.abs(exact).sum())] for name, x in found.items()])

# %%
error = {name: np.abs(x - exact).sum() / np.abs(exact).sum() for name, x in found.items()}
assert error["rung 2, float32"] < 2e-6
assert error["the integer model"] < 0.02
assert np.array_equal(found["the integer model"], found["the shipped kernel, int8"])
assert steps[2].m[row] > steps[1].m[row] and (np.diff([s.m for s in steps], axis=0) >= 0).all()
