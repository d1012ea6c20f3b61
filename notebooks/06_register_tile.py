# %% [markdown]
# # 06. The register tile
#
# After this chapter you can
#
# * say why a loop that consists of vector instructions still runs at a few per cent of the peak,
# * choose the shape of a register tile from a few numbers of the machine,
# * predict what happens when it is too small or too large.

# %% [markdown] tags=["map"]
# > **The idea:** Keep many sums in registers, so that each load serves several products.
# >
# > **Where you are:** CPU path, stop 5 of 8: [00](00_memory.ipynb) → [01](01_online_softmax.ipynb) → [02](02_tiling.ipynb) → [03](03_int8.ipynb) → **06** → [07](07_fused.ipynb) → [09](09_threads_causal_gqa.ipynb) → [24](24_capstone.ipynb)
# >
# > **Time:** 30 minutes to read, 20 for the exercises. **Before it:** [02](02_tiling.ipynb), [03](03_int8.ipynb).
# >
# > **Terms:** [instruction set](../docs/glossary.md#instruction-set), [register](../docs/glossary.md#register), [vector](../docs/glossary.md#vector), [lane](../docs/glossary.md#lane), [broadcast](../docs/glossary.md#broadcast), [packed](../docs/glossary.md#packed), [register tile](../docs/glossary.md#register-tile), [dot instruction](../docs/glossary.md#dot-instruction), [latency](../docs/glossary.md#latency), [spill](../docs/glossary.md#spill).
# >
# > **Papers:** [Anatomy of high-performance matrix multiplication](https://doi.org/10.1145/1356052.1356053).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import numpy as np

from numflash.course import answer_of, bars, check, figure, roof, rounds, table, yours_or
from numflash.course.answers.c06 import Machine
from numflash.cpu.int8 import portable_products
from numflash.cpu.isa.isas import VECTOR_ISAS, running_lanes
from numflash.cpu.study import ladder
from numflash.cpu.study.register_tile import make_product, make_tile, pack
from numflash.jit import target
from numflash.jit.compiler import kernel
from numflash.machinecode import assembly, codegen
from numflash.tiling import TILINGS

isa = ladder.vector_isa()                                # AVX2 to AVX-512 VNNI, NEON dot products or SVE
registers = 16 if isa in ("avx_vnni", "avx2") else 32
peak = roof(isa=isa)
print(isa, f"{running_lanes(isa)} int32 lanes, {registers} vector registers;", peak)

# %% [markdown]
# ## What a core computes with
#
# So far we asked where numbers come *from*. Now they are near, and the question is what the core does with them. Five words are needed:
#
# * A core computes only on **registers**: 16 or 32 places inside the core, each a **vector** of, say, 512 bits. A vector holds 16
#   numbers of 32 bits; each of the 16 places is a **lane**. One instruction works on all lanes.
# * A **load** copies a vector from the cache into a register. A **broadcast** is a load of one number into all lanes.
# * A **dot instruction** multiplies bytes: each lane takes 4 bytes of one operand and 4 of another, multiplies them in pairs, and adds
#   the four products to its 32-bit sum. Each number is an integer of 8 bits (INT8; chapter 03 says how a float becomes one). Products of
#   floats work alike with one product per lane.
# * The **latency** of an instruction is how many cycles pass until its result can be used. An instruction with a latency of 4 cycles can
#   still start every cycle, if it does not need the result of the one before.
# * The **peak** is what the core reaches if it starts as many dot instructions as it can in every cycle, with nothing else to do. Large
#   cores can start two a cycle.
#
# The text has the numbers of vectors of 512 bits (AVX-512 VNNI); the next cell prints those of this machine. A machine that has only AVX2
# has no dot instruction for bytes: there a number takes 2 bytes, and a lane adds 2 products. It has 16 registers of 8 lanes, and the
# shipped tile is 6 x 2 with 24 rows.
#
# Of chapter 03 you need: a row of floats is divided by a *scale*, so that its largest number becomes 127, and rounded to bytes; the
# scales multiply the integer scores afterwards. Chapter 04 is not on this path. What you need of it: the weights 2**x are made in
# integers too, by a shift and a small polynomial.

# %%
shipped = TILINGS[f"{isa}-int8"]
group = VECTOR_ISAS[isa].group                             # numbers that a lane multiplies at once
print(f"{isa}: a lane takes {group} numbers of {32 // group} bits, a vector has {running_lanes(isa)} lanes, a core {registers} registers; "
      f"shipped tile {shipped.mr} x {shipped.nv}, {shipped.block_q} rows")

# %% [markdown]
# ## One product, three ways
#
# The problem: 480 rows of Q against 512 keys, 128 channels, bytes. Scores go into a block of 48 x 64, over and over, as in the
# fused kernel; everything stays in the caches.
#
# First, what plain loops give. `one by one` is a loop over the channels of one row and one key. `128 each` is the same with a length
# that the compiler knows, so it need not test for the end. `4 x 4 block` keeps 16 sums in named variables: each row of Q and each
# key that is loaded serves four products.
#
# All three are compiled to vector instructions (chapter 05 reads them), and all three reach a small part of the peak. Their lanes hold
# *channels* of one product, so at the end of every product the lanes of a register must be added up: for 128 channels that takes about as
# many instructions as the products themselves. And each product loads both of its operands.

# %%
F, I = np.float32, np.int32
rng = np.random.default_rng(0)
q, k = rng.integers(0, 128, (480, 128), np.int8), rng.integers(-127, 128, (512, 128), np.int8)
exact = q[432:].astype(np.int64) @ k[448:].T.astype(np.int64)              # the last block
work = 2 * q.shape[0] * k.shape[0] * q.shape[1]


@kernel
def one_by_one(q, k, c):
    for row in range(0, q.shape[0], c.shape[0]):
        for first in range(0, k.shape[0], c.shape[1]):
            for i in range(c.shape[0]):
                a, line = q[row + i], c[i]
                for j in range(line.size):
                    b, total = k[first + j], I(0)
                    for e in range(a.size):
                        total = np.add(total, np.multiply(I(a[e]), I(b[e])))
                    line[j] = total


@kernel
def known_length(q, k, c):
    for row in range(0, q.shape[0], c.shape[0]):
        for first in range(0, k.shape[0], c.shape[1]):
            portable_products.dots_128(q[row:row + c.shape[0]], k[first:first + c.shape[1]], c)


@kernel
def four_by_four(q, k, c):
    for row in range(0, q.shape[0], c.shape[0]):
        for first in range(0, k.shape[0], c.shape[1]):
            for i in range(0, c.shape[0], 4):
                for j in range(0, c.shape[1], 4):
                    portable_products.dot_block(q[row + i:row + i + 4], k[first + j:first + j + 4], c[i:i + 4, j:j + 4])


def measure(run, *operands):
    c = np.zeros((48, 64), I)
    run(*operands, c)
    assert np.array_equal(c, exact)
    return work / rounds(lambda: run(*operands, c), 0.1) / 1e9


speed = {"one by one": measure(one_by_one, q, k), "128 each": measure(known_length, q, k),
         "4 x 4 block of dots": measure(four_by_four, q, k)}
table(["loop", "GOP/s", "share of the INT8 peak"], [[n, x, f"{1e11 * x / peak.int8:.0f} %"] for n, x in speed.items()])

# %% [markdown]
# ## What is missing
#
# A dot product needs two loads for a multiplication, and ends in adding up the lanes of a register. A *register tile* gives the lanes
# another meaning: each lane of a vector holds a different *key*. (K is stored in this order beforehand, it is *packed*.) One group of
# channels of a query row is broadcast to all lanes, and one dot instruction multiplies it with all these keys. The sums of `mr` rows
# times `nv` vectors stay in their registers until all channels are done. No lanes are ever added up: each lane is the score of its own
# key.
#
# A step takes one group of channels (4, or 2 with AVX2). In it a tile loads `nv` vectors of K and `mr` broadcast words of Q, and does
# `mr * nv` dot instructions. Step through one: each K vector, once loaded, serves all rows, and each word of Q serves all vectors.

# %% tags=["drawing"]
from numflash.course import drawings

drawings.register_tile()

# %% [markdown]
# The strip at the bottom counts registers. In Jupyter, choose a larger tile: at 8 x 4 the strip passes the red line.
#
# **Exercise 1.** Return two numbers for an mr x nv tile: its loads per dot instruction, and the registers that it needs (the sums, the
# nv vectors of K, and one for the broadcast word).

# %% tags=["exercise"]
def loads_and_registers(mr, nv):
    return ...


check("06.1", loads_and_registers)

# %% [markdown]
# ## Every shape, measured
#
# `study/register_tile.py` makes a tile of any shape, in LLVM's own language (40 lines: one value per sum, so that each stays in a
# register). The loops around it are Numba.

# %%
first_operand = np.uint8 if VECTOR_ISAS[isa].group == 4 else np.int16
ship, runs, code = (6, VECTOR_ISAS[isa].nv), {}, {}           # the shipped tile
for mr, nv in ((1, 1), (2, 1), (1, 4), (2, 2), (4, 1), (2, 4), (4, 2), (6, 2), (4, 4), (6, 4), (8, 4)):
    if 64 % (nv * running_lanes(isa)) == 0:
        for offset in (0, 16, 32) if (mr, nv) == ship else (0,):           # where K starts: see "Alignment"
            runs[mr, nv, offset] = make_product(isa, mr, nv), q.astype(first_operand), pack(isa, k, nv, offset)
turns = [{case: measure(*run) for case, run in runs.items()} for _ in range(5)]
speeds = {case: float(np.median([turn[case] for turn in turns])) for case in runs}
shapes = {(mr, nv): speeds[mr, nv, offset] for mr, nv, offset in runs if not offset}
loads, need = zip(*(answer_of("06.1")(*shape) for shape in shapes), strict=True)
table(["tile", "sums", "registers", "loads per dot", "GOP/s", "share of the INT8 peak"],
      [[f"{mr} x {nv}", mr * nv, n, x, speed_, f"{1e11 * speed_ / peak.int8:.0f} %"]
       for ((mr, nv), speed_), n, x in zip(shapes.items(), need, loads, strict=True)])

# %% [markdown]
# Three conditions explain this table:
#
# * *Enough sums.* A dot instruction needs the result of the one before that added to the same sum. So the core must have other sums to
#   work on while it waits. (With its single sum a tile of 1 x 1 would wait for each dot. It does better than that, because the core
#   already begins the next tile, whose sum is another one.)
# * *Few loads.* The core loads two vectors a cycle at best. With more than one load per dot, it cannot start two dots a cycle.
# * *Not more sums than registers.* Otherwise the compiler keeps some of them in memory (it *spills* them to the stack), and loads and
#   stores them in every step.
#
# The A64FX, the processor of the Fugaku computer, starts 2 dot instructions a cycle, and its manual gives each a latency of 9 cycles.
#
# **Exercise 2.** How many independent sums keep a machine busy whose dot instruction has a latency of `latency` cycles and can start
# `per_cycle` times a cycle?
#
# **Exercise 3.** The shipped tile of the A64FX is 6 x 4. With nv = 4, what is the smallest number of rows `mr` that has enough sums there?

# %% tags=["exercise"]
def sums_needed(latency, per_cycle):
    return ...


fewest_rows = ...


check("06.2", sums_needed)
check("06.3", fewest_rows)

# %% [markdown]
# ## A tile to write
#
# `m` below is a machine with vector registers of 16 lanes. It has four instructions, and counts:
#
# * `m.zero()`: a vector of 16 zeros,
# * `m.load(k, e, n)`: the keys 16 n to 16 n + 15 of channel e of `k`, an array (channels, keys),
# * `m.broadcast(q, i, e)`: the number q[i, e] of `q` (rows, channels) in all 16 lanes,
# * `m.dot(total, x, y)`: total + x * y, lane by lane.
#
# **Exercise 4.** Write a tile of 2 query rows x 2 vectors (32 keys). Return the sums `[[s00, s01], [s10, s11]]`, where the first
# index is the row and the second the vector. It must do 4 dots and no more than 4 loads (broadcasts count) for each channel.

# %% tags=["exercise"]
def tile(m, q, k):
    # for each channel: loads, broadcasts, dots
    return ...


check("06.4", tile)

# %%
count, few = Machine(), np.ascontiguousarray(k[:32].T).astype(I)
sums = yours_or("06.4", tile)(count, q[:2].astype(I), few)
assert np.array_equal(np.reshape(sums, (2, 32)), q[:2].astype(I) @ few)
print(f"{count.dots} dots and {count.loads} loads: {count.loads / count.dots:g} for each dot; a tile of 1 x 1 needs 2")

# %% [markdown]
# ## Did 8 x 4 spill?
#
# Its 32 sums leave none of 32 registers for an operand. So some of them must be kept on the stack, and the machine code shows it. (With
# 16 registers the 24 sums of 6 x 4 are too many as well.)

# %%
def one_tile(mr, nv):
    tile, group = make_tile(isa, mr, nv), VECTOR_ISAS[isa].group

    @kernel
    def run(q, k, c):
        tile(q, 0, 128, k, 0, 128 // group, c, 0, 64)
    return run


first, second = ("uint8", "int8") if VECTOR_ISAS[isa].group == 4 else ("int16", "int16")
for shape in ((6, 4), (8, 4)):
    if shape in shapes:
        machine_code = codegen.compile_for(one_tile(*shape), f"void({first}[::1], {second}[::1], int32[::1])",
                                           codegen.Target.named("host"))
        loop = assembly.hot_loop(machine_code.assembly).instructions
        code[shape] = sum(map(assembly.is_stack, loop))
        print(f"{shape[0]} x {shape[1]}: {len(loop)} instructions in the hot loop, {code[shape]} of them touch the stack")

# %% [markdown]
# ## Matrix tiles
#
# Some Intel processors go one step further: AMX has eight registers of 16 x 64 bytes, and one instruction multiplies two of them, 16 rows
# by 16 keys by 64 channels, into a third. It is a register tile in hardware: one register holds 16 x 16 sums, and one instruction adds 64
# channels to each of them. The shipped kernel uses it where it exists; the course stays with vectors, which every machine has.

# %%
if "amx_int8" in target.available():
    matrix = roof(isa="amx_int8")
    print(f"AMX: {matrix.int8 / 1e9:.0f} GOP/s, {matrix.int8 / peak.int8:.1f} times the peak of {isa}")
else:
    print("no AMX here")

# %% [markdown]
# ## Alignment
#
# On some cores the address at which K starts changes the speed as well. The table shows whether it does here. A cache line is 64 bytes.
# If K starts 16 bytes after the start of a line, *every* load of 64 bytes (a vector of 512 bits) touches two lines; of loads of 32 bytes,
# every second one does. NumPy aligns arrays to 16 bytes, not to 64.

# %%
placed = {offset: speeds[(*ship, offset)] for offset in (0, 16, 32)}
table(["first byte of K", "GOP/s", "share of the INT8 peak"],
      [[f"64 n + {offset}", x, f"{1e11 * x / peak.int8:.0f} %"] for offset, x in placed.items()])

# %% [markdown]
# ## From a few per cent to most of the peak

# %%
climb = speed | {f"tile {mr} x {nv}": shapes[mr, nv] for mr, nv in shapes} | {f"{ship[0]} x {ship[1]}, K at 64 n + 16": placed[16]}
fig, ax = figure(width=9, height=5.6)
ax.set_title("Q.K^T of bytes in the caches, one core")
bars(ax, climb, "GOP/s", (f"measured INT8 peak ({isa})", peak.int8 / 1e9), digits=0)

# %% [markdown]
# What ships is 6 x 4 (6 x 2 with 16 registers): the largest tile whose sums, operands and broadcast word fit the registers. Where a tile
# of 4 rows is as fast as the shipped one in this table, the table does not decide between them; chapter 24 compares the two in the whole
# kernel. All tiles were timed in turns, and every bar of a tile is the median of five turns, so that the speed of the machine is the same
# for all. What keeps the tile from the peak? One part is the start and the end of a tile: setting the sums to 0 and storing them. With 32
# channels instead of 128 the loop is a quarter as long, so they weigh four times as much:

# %%
few_q, few_k = q[:, :32].copy(), k[:, :32].copy()
exact = few_q[432:].astype(np.int64) @ few_k[448:].T.astype(np.int64)
work //= 4
short_tile = measure(make_product(isa, *ship), few_q.astype(first_operand), pack(isa, few_k, ship[1]))
print(f"32 channels: {1e11 * short_tile / peak.int8:.0f} % of the peak, 128 channels: {1e11 * placed[0] / peak.int8:.0f} %")

# %% [markdown]
# The difference between the two figures comes from starting and ending a tile. Most of what is missing after that is lost inside the
# loop: loads and broadcasts share the core with the dots, while the peak is measured by a loop without a single load.
#
# The next cell checks the claims of this page. You can skip it.

# %%
print(f"shipped tile {ship[0]} x {ship[1]}: {1e11 * placed[0] / peak.int8:.0f} % of the measured peak")
assert need[list(shapes).index(ship)] <= registers
assert code.get((6, 4), 0) == 0 or registers < 32

# %% [markdown]
# **What you can do now**
#
# * say why a loop of perfect vectors can be at a few per cent of the peak: two loads for each product,
# * choose a shape: enough sums for the latency, few loads per dot, not more sums than registers,
# * find in the machine code whether a tile spills.
#
# **Next:** [07](07_fused.ipynb). Do all four steps for one tile before the next, so that its scores never leave the cache.
