# %% [markdown]
# # 05. How LLVM vectorises it
#
# After this chapter you can
#
# * read the machine code of a Numba kernel from within Python, for your CPU and for ones that you do not have,
# * tell whether a loop was vectorised, and to which instructions,
# * say what the compiler does with int8 on its own, and what it cannot do.
#
# Numba hands your function to *LLVM*, the compiler library that makes the machine code. To *vectorise* a loop is to compute several of
# its turns with one vector instruction.

# %% [markdown] tags=["map"]
# > **The idea:** A compiler vectorises a loop as it is written; it does not build a register tile.
# >
# > **Where you are:** optional: on neither path (CPU path: [00](00_memory.ipynb) ...; GPU path: [13](13_threads_warps_memory.ipynb) ...)
# >
# > **Time:** 40 minutes to read, 10 for the exercises. **Before it:** [02](02_tiling.ipynb).
# >
# > **Terms:** [llvm](../docs/glossary.md#llvm), [vectorise](../docs/glossary.md#vectorise), [hot loop](../docs/glossary.md#hot-loop), [instruction set](../docs/glossary.md#instruction-set), [vector](../docs/glossary.md#vector), [fma](../docs/glossary.md#fma), [dot instruction](../docs/glossary.md#dot-instruction), [register tile](../docs/glossary.md#register-tile).
# >
# > **Papers:** [LLVM: auto-vectorization](https://llvm.org/docs/Vectorizers.html).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
from itertools import zip_longest

import numpy as np

from numflash.course import bars, check, figure, roof, rounds, table
from numflash.cpu.floats import float_tiles
from numflash.cpu.int8 import microkernels
from numflash.cpu.isa.operands import Packed, Rows, Scales
from numflash.cpu.study import ladder
from numflash.jit.compiler import kernel
from numflash.machinecode import assembly, codegen

F, I = np.float32, np.int32


def show(signature, most=12, **functions):
    """The hot loops of kernels side by side, each for a CPU, as cpu=function; returns their histograms."""
    loops = [assembly.hot_loop(codegen.compile_for(function, signature, codegen.Target.named(cpu.replace("_", "-"))).assembly)
             for cpu, function in functions.items()]
    columns = [[f"{cpu.replace('_', '-')}: {len(loop.instructions)} instructions", "", *loop.instructions[:most],
                *["..."] * (len(loop.instructions) > most)] for cpu, loop in zip(functions, loops, strict=True)]
    for line in zip_longest(*columns, fillvalue=""):
        print("   ".join(f"{cell:42}" for cell in line).rstrip())
    print()
    return [assembly.histogram(loop.instructions) for loop in loops]


# %% [markdown]
# ## A float dot product
#
# The inner loop of Q.K^T. `kernel` is Numba's `njit` with this package's options; `float_math` allows the compiler to add in another
# order and to contract a product and a sum into one instruction. Without it the compiler must add one number after the other.
#
# `show` prints the *hot loop*: the innermost loop, where nearly all time is spent. How to read it: on x86 the last operand is the result;
# `%xmm1`, `%ymm1` and `%zmm1` are registers of 128, 256 and 512 bits; an operand in parentheses, as `32(%rax,%r9,4)`, is read from
# memory. On Arm the first operand is the result, and memory is in brackets.

# %%
def dot(x, y):
    total = F(0)
    for e in range(x.size):
        total += x[e] * y[e]
    return total


FLOATS = "float32(float32[::1], float32[::1])"
(strict,) = show(FLOATS, icelake_server=kernel(dot))
(free,) = show(FLOATS, icelake_server=kernel(float_math=True)(dot))

# %% [markdown]
# * Without the permission (`strict`): one number at a time (`ss`, scalar single), and every `vaddss` waits for the one before it.
# * With it (`free`): `vfmadd231ps` on 256-bit registers, four of them, so that four chains of additions run side by side. (`ymm` is 256
#   bits; LLVM prefers those on Intel servers, where 512-bit code once slowed the clock.)
#
# `strict` and `free` are histograms of these loops: dictionaries from an instruction and its registers, as "vaddss xmm", to how often it
# occurs.
#
# **Exercise 1.** Write a function that says whether a histogram has vector multiply-adds: names that begin with "vfmadd" (x86) or "fmla"
# (Arm), but not the scalar ones of x86, whose first word ends in "ss".

# %% tags=["exercise"]
def has_vector_fma(histogram):
    return ...


check("05.1", has_vector_fma)

# %% [markdown]
# The same loop for Fugaku's A64FX, whose vectors are *scalable*: the machine code does not say how long they are. `fmla z` is the
# multiply-add, `p` registers (predicates) say which lanes take part. Predicates can mask the last lanes, so that no scalar rest is
# needed. LLVM does not use that here: p0 is all true, and a scalar loop follows.

# %%
(scalable,) = show(FLOATS, 16, a64fx=kernel(float_math=True)(dot))
assert any(name.startswith("fmla") for name in scalable)

# %% [markdown]
# ## An int8 dot product, three times
#
# Numba computes with 64-bit integers unless told otherwise, so the natural loop turns each byte into a number of 8 bytes. Forcing the sum to
# int32 helps; NumPy's functions `add` and `multiply` keep *every* step in 32 bits, where the operators widen and narrow
# again.

# %%
def natural(x, y):
    total = 0
    for e in range(x.size):
        total += x[e] * y[e]
    return total


def cast_sum(x, y):
    total = I(0)
    for e in range(x.size):
        total = I(total + I(x[e]) * I(y[e]))
    return total


def cast_all(x, y):
    total = I(0)
    for e in range(x.size):
        total = np.add(total, np.multiply(I(x[e]), I(y[e])))
    return total


BYTES = "(int8[::1], int8[::1])"
kinds = {name: kernel(f) for name, f in (("natural", natural), ("cast the sum", cast_sum), ("cast every step", cast_all))}
found = {name: show(("int64" if name == "natural" else "int32") + BYTES, icelake_server=f)[0] for name, f in kinds.items()}

# %% [markdown]
# The natural loop multiplies in 64-bit lanes: four bytes to a 256-bit register that could hold 32. With the sum in int32,
# LLVM finds `vpmaddwd`: it widens bytes to 16 bits, multiplies pairs and adds them in 32 bits; both ways of writing it lead
# there. That is as far as it goes. The CPU also has `vpdpbusd` (AVX-512 VNNI), four byte products and their sum in one
# instruction, without widening. But it multiplies unsigned by signed bytes, and the loop says signed by signed. A compiler keeps the
# meaning of the loop; only a person can change the data so that the instruction fits.

# %%
assert not any("vpdpbusd" in name for histogram in found.values() for name in histogram)
assert any("vpmaddwd" in name for name in found["cast the sum"])
assert any("vpmul" in name and "q" in name.split()[0] for name in found["natural"])

# %% [markdown]
# ## The same source for Arm
#
# Arm's dot instruction multiplies signed by signed, so the plain loop *is* what it does, and LLVM finds it: `sdot`. Here for
# Fugaku's A64FX with its scalable vectors, compiled on this machine, and for Neoverse N1, which has only 128-bit NEON.

# %%
best = kinds["cast every step"]
arm = dict(zip(("a64fx", "neoverse-n1"), show("int32" + BYTES, 16, a64fx=best, neoverse_n1=best), strict=True))
table(["CPU", "dot instructions in the hot loop", "all instructions"],
      [[cpu, ", ".join(f"{n} {name}" for name, n in h.items() if "dot" in name or "pmadd" in name) or "none", sum(h.values())]
       for cpu, h in [*arm.items(), ("icelake-server", found["cast every step"])]])

# %% [markdown]
# **Exercise 2.** One `sdot` on a vector of `bits` bits multiplies how many pairs of bytes? And one `vpmaddwd`, whose operands
# were widened to 16 bits?

# %% tags=["exercise"]
def products(instruction, bits):
    return ...


check("05.2", products)

# %% [markdown]
# ## What it costs here
#
# All of these loops on this machine, over vectors in the first-level cache, against the measured peaks. Each is
# asked for the same thing: one row against 512 rows of 128.

# %%
def float_rows(x, ys, out):
    for j in range(ys.shape[0]):
        y, total = ys[j], F(0)
        for e in range(x.size):
            total += x[e] * y[e]
        out[j] = total


def rows_of(dot):
    @kernel
    def rows(x, ys, out):
        for j in range(ys.shape[0]):
            out[j] = dot(x, ys[j])
    return rows


rng = np.random.default_rng(0)
ys = rng.integers(-127, 128, (512, 128), np.int8)
x, exact = ys[3].copy(), ys.astype(np.int64) @ ys[3]
runs = {"float32, strict": kernel(float_rows), "float32, free": kernel(float_math=True)(float_rows)}
runs |= {f"int8, {name}": rows_of(function) for name, function in kinds.items()}
speed = {}
for name, run in runs.items():
    a, b, out = (z.astype(F if "float" in name else np.int8) for z in (x, ys, exact))
    out = out if "float" in name else np.empty(512, np.int64)
    run(a, b, out)
    assert np.array_equal(out, exact)                      # whole numbers this small are exact in float32 too
    speed[name] = 2 * ys.size / rounds(lambda run=run, a=a, b=b, out=out: run(a, b, out), 0.1) / 1e9
peak = roof(isa=ladder.vector_isa())
print(peak)

# %%
fig, axes = figure(2, width=11, height=3)
for ax, kind, top in ((axes[0], "float32", peak.float32), (axes[1], "int8", peak.int8)):
    ax.set_title(f"{kind}: one dot product after another, one core")
    bars(ax, {name: x for name, x in speed.items() if kind in name}, "GOP/s", (f"{kind} peak", top / 1e9), digits=0)

# %% [markdown]
# On x86 the compiler's int8 loops are not much faster than its float32 loop, though a vector holds four times as many bytes as floats:
# widening costs most of what the shorter numbers save. So they are much further from their peak.
#
# ## What it cannot do
#
# Even `sdot`, found by the compiler, would not reach the peak. A dot product loads *two* operands for every instruction that
# multiplies them, adds into few registers, and ends in adding up the lanes of a vector. Count it in the best x86 loop above:

# %%
loop = found["cast every step"]
multiplies = sum(n for name, n in loop.items() if "pmadd" in name)
print(f"{multiplies} multiplying instructions of {sum(loop.values())}")

# %% [markdown]
# A *register tile* (chapter 06) loads a vector of K and multiplies it with 6 rows of Q, and the lanes of its sums are never added up.
# LLVM does not build it out of loops: accumulators that live in an array stay in memory, loaded and stored each time.
# Here is that very loop: four sums in an array, against the same four in named variables.

# %%
@kernel
def in_array(q, key, sums):
    for e in range(key.size):
        for r in range(4):
            sums[r] = np.add(sums[r], np.multiply(I(q[r, e]), I(key[e])))


@kernel
def in_variables(q, key, sums):
    q0, q1, q2, q3 = q[0], q[1], q[2], q[3]
    s0 = s1 = s2 = s3 = I(0)
    for e in range(key.size):
        s0, s1 = np.add(s0, np.multiply(I(q0[e]), I(key[e]))), np.add(s1, np.multiply(I(q1[e]), I(key[e])))
        s2, s3 = np.add(s2, np.multiply(I(q2[e]), I(key[e]))), np.add(s3, np.multiply(I(q3[e]), I(key[e])))
    sums[0], sums[1], sums[2], sums[3] = s0, s1, s2, s3


SUMS = "void(int8[:, ::1], int8[::1], int32[::1])"
array_loop, variable_loop = (codegen.report(codegen.compile_for(f, SUMS, codegen.Target.named("icelake-server")))
                             for f in (in_array, in_variables))
for name, r in (("in an array", array_loop), ("in variables", variable_loop)):
    vector = sum(n for kind, n in r["instructions"].items() if "mm" in kind)
    print(f"{name:13} {r['total']} instructions, {vector} on vectors: {dict(list(r['instructions'].items())[:5])}")
tile = np.zeros(4, np.int32)
for f in (in_array, in_variables):
    tile[:] = 0
    f(ys[:4].copy(), x, tile)
    assert np.array_equal(tile, ys[:4].astype(np.int64) @ x)

# %% [markdown]
# The array version is scalar code; the variables become vectors. So the package writes its register tile in LLVM's own language, once for
# all instruction sets (`numflash/cpu/int8/microkernels.py`), and leaves the loops around it to Numba. This is the loop for an Intel
# server, with `vpdpbusd`, and beside it the loop for an A64FX from the same source, with `sdot`:

# %%
def register_tile(isa):
    score = microkernels.score_tile(isa, 6)

    @kernel
    def tile(q, k, start, key_scale, row_scale, x):        # 6 rows of 128 channels against one panel of packed keys
        scales = Scales(start, key_scale, 0, row_scale, 0)
        score(Rows(q, 0, 128), Packed(k, 0), 32, scales, Rows(x, 0, 128))
    return tile


TILE = "void(uint8[::1], int8[::1], int32[::1], float32[::1], float32[::1], int16[:, ::1])"
shipped = dict(zip(("sapphirerapids", "a64fx"), show(TILE, 16, sapphirerapids=register_tile("avx512_vnni"),
                                                     a64fx=register_tile("sve")), strict=True))

# %% [markdown]
# The same is done for floats. This is the float32 tile of attention for the A64FX, in scalable vectors: 6 rows of Q and 4 vectors of K, four
# channels a turn. `ld1rw` loads one number into all lanes, `ld1w` a vector, `fmla` and `fmad` multiply and add. LLVM adds `prfm` for this CPU:
# it prefetches a cache line.

# %%
def float_tile(isa):
    score = float_tiles.score_tile(isa, float_tiles.FLOAT_ISAS[isa].nv)

    @kernel
    def tile(q, k, x):                                     # 6 rows of 128 channels against one panel of packed keys
        score(q, 0, 128, k, 0, 128, x, 0, 128)
    return tile


(sve_floats,) = show("void(float32[::1], float32[::1], float32[::1])", 16, a64fx=float_tile("sve512"))
sums = sum(n for name, n in sve_floats.items() if name.startswith(("fmla", "fmad")))
loads = sum(n for name, n in sve_floats.items() if name.startswith("ld1"))
print(f"A64FX: {sums} multiply-adds and {loads} loads a turn; its two pipes need {sums / 2:.0f} cycles for the one, {loads / 2:.0f} for the other")
assert sums == 96 and loads == 40 and sum(scalable.values()) > 3 * sum(n for name, n in scalable.items() if name.startswith("fmla"))

# %% [markdown]
# The two pipes are busy with sums for 48 cycles a turn, and the loads need 20 of them: arithmetic is the limit, as it should be. The loop
# that LLVM made of the plain dot product, far above, has 16 instructions. Its 8 loads need 4 cycles, its 4 multiply-adds 2. But each sum
# waits 9 cycles for its last multiply-add, and only four sums are under way: a turn takes 9 cycles. Latency is the limit (chapter 06).
# (No A64FX was at hand: these are counts of its machine code. `numflash estimate --cpu a64fx` models the cycles.)
#
# The next cell checks the claims of this page. You can skip it.

# %%
share = {name: max(n for kind, n in h.items() if "dot" in kind or "vpdp" in kind) / sum(h.values()) for name, h in shipped.items()}
print({name: f"{100 * x:.0f} % of the hot loop multiplies" for name, x in share.items()})
assert min(share.values()) > 0.4 > multiplies / sum(loop.values())
assert any("vpdpbusd zmm" in kind for kind in shipped["sapphirerapids"])
assert any("dot z" in kind for kind in shipped["a64fx"])
assert all(any("dot" in kind for kind in h) for h in arm.values())

# %% [markdown]
# **What you can do now**
#
# * see in a hot loop whether it multiplies vectors, and what else it does,
# * say why a float sum is not vectorised unless the order may change,
# * name what a compiler does not do by itself: keep many sums in registers.
#
# **Next:** [06](06_register_tile.ipynb). Keep many sums in registers, so that each load serves several products.
