# %% [markdown]
# # 15. Swizzle and bank conflicts, counted
#
# After this chapter you can
#
# * predict how many passes over the banks a warp's access to shared memory takes,
# * say why plainly stored tiles of K and V conflict, and remove that by padding or by an XOR,
# * choose the XOR for a row length, and check it by counting,
# * write a transpose that has no conflict.

# %% [markdown] tags=["map"]
# > **The idea:** An XOR of the address puts a column into 32 different banks.
# >
# > **Where you are:** GPU path, stop 3 of 6: [13](13_threads_warps_memory.ipynb) → [14](14_fragments.ipynb) → **15** → [16](16_flash_attention_2.ipynb) → [17](17_hopper.ipynb) → [23](23_broken_kernels.ipynb)
# >
# > **Time:** 20 minutes to read, 25 for the exercises. **Before it:** [13](13_threads_warps_memory.ipynb), [14](14_fragments.ipynb).
# >
# > **Terms:** [pass](../docs/glossary.md#pass), [bank conflict](../docs/glossary.md#bank-conflict), [chunk](../docs/glossary.md#chunk), [swizzle](../docs/glossary.md#swizzle), [shared memory](../docs/glossary.md#shared-memory).
# >
# > **Papers:** [CUDA: shared memory](https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/), [FlashAttention-2](https://arxiv.org/abs/2307.08691).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import numpy as np
from numba import cuda

from numflash.course import answer_of, bars, card, check, figure, table
from numflash.cuda import emulate, study
from numflash.cuda.device.operands import emulated
from numflash.cuda.instructions import ptx
from numflash.cuda.kernels.tiles import swizzle_of
from numflash.cuda.study.pieces import layout_of

u32, i32 = np.uint32, np.int32
device = card()

# %% [markdown]
# ## 32 banks
#
# Shared memory has 32 banks. Word n (4 bytes) is in bank n % 32, and each bank serves one word per pass. If the 32 lanes
# of a warp want words of 32 different banks, one pass does it. If two lanes want different words of one bank, it takes two. The
# same word for several lanes is no conflict: it is handed to all of them.
#
# Each lane reads the word `stride * lane`:

# %%
def spaced(out, stride):
    shared = cuda.shared.array(32 * 33, u32)
    lane = i32(cuda.threadIdx.x)
    for i in range(33):
        shared[32 * i + lane] = u32(32 * i + lane)         # 33 stores without a conflict
    cuda.syncwarp()
    out[lane] = shared[stride * lane]


def passes_of(stride):
    out = np.zeros(32, u32)
    report = emulate(spaced, 1, 32, (out, stride))
    assert np.array_equal(out, stride * np.arange(32))
    return report.shared_wavefronts - 33


measured = {stride: passes_of(stride) for stride in (0, 1, 2, 3, 4, 8, 16, 31, 32, 33)}
table(["stride in words", "passes"], list(measured.items()))

# %% [markdown]
# **Exercise 1.** How many passes does a stride of `n` words take, n from 0 to 33?

# %% tags=["exercise"]
def passes(n):
    return ...


check("15.1", passes)

# %%
assert all(answer_of("15.1")(stride) == n for stride, n in measured.items())

# %% [markdown]
# ## A column of a tile
#
# A tile of K has rows of D = 64 halves: 128 bytes, 32 words, exactly once around the banks. So everything in one column is in the
# same bank. A warp that reads a column has stride 32, which is in the table above: 32 passes.
#
# The kernels do not read single words, though. `ldmatrix` reads rows of 16 bytes, four banks at once, eight rows per 8 x 8
# matrix; a pass can serve eight such rows, if they are in eight different groups of four banks. 16 bytes of a tile are a
# *chunk*. If the rows are stored one after another, chunk c of every row is in group c.

# %%
def groups(layout, d=64, rows=8):
    """Group of four banks (0 to 7) of every chunk of a tile's first rows."""
    row_bytes, xor = layout_of(d, layout)
    r, c = np.arange(rows)[:, None], np.arange(d // 8)[None]
    return (r * row_bytes + ((c ^ (r & xor)) << 4)) // 16 % 8


fig, axes = figure(3, width=11, height=3.4)
for ax, layout in zip(axes, ("naive", "padded", "swizzled"), strict=True):
    where = groups(layout)
    ax.pcolormesh(where, cmap="cividis", edgecolors="white", linewidth=0.8)
    for (row, chunk), group in np.ndenumerate(where):
        ax.text(chunk + 0.5, row + 0.5, group, ha="center", va="center", color="white" if group < 4 else "black",
                fontweight="bold" if chunk == 2 else "normal")
    ax.set(xticks=np.arange(8) + 0.5, xticklabels=range(8), yticks=np.arange(8) + 0.5, yticklabels=range(8), ylim=(8, 0),
           xlabel="chunk of 16 bytes", title=f"{layout}: group of banks", aspect="equal")
    distinct = len(set(where[:, 2]))
    print(f"{layout}: the 8 rows of chunk 2 lie in {distinct} group{'s' * (distinct > 1)}")
_ = axes[0].set_ylabel("row of the tile")

# %% [markdown]
# There are two remedies. *Padding*: 16 bytes more per row, and the next row starts one group further. It costs memory, and a tile that
# the copy engine of newer GPUs brings (TMA, chapter 17) cannot have it. *Swizzling*: chunk c of row r is stored at place c XOR (r % 8).
# (XOR compares two numbers bit by bit; a bit of the result is 1 where they differ. Python writes it `c ^ r`.) For a fixed c that is a
# different place for each of 8 rows, and a row's chunks only change places, so nothing is lost. A swizzle of single columns, `col ^ (row
# & 7)`, would split the 16-byte chunks, which `ldmatrix` and 16-byte copies need in one piece.
#
# **Exercise 2.** Return the byte offset of element (row, column) in a swizzled tile of D = 64 halves.

# %% tags=["exercise"]
def byte_of(row, column):
    return ...


check("15.2", byte_of)

# %% [markdown]
# The solution's form is what the kernels use: an XOR of the byte address with bits of the row, one instruction.
#
# ## Counted in the kernel
#
# Rungs 4, 5a and 5b of the ladder are one kernel with three layouts.

# %%
length, d = 128, 64
q, k, v, exact = study.problem(length, d, seed=0)
rungs = {rung.number: rung for rung in study.LADDER}
reports = {}
for number in ("4", "5a", "5b"):
    step = study.launch(rungs[number], q, k, v)
    out, _, report = emulated(step)
    study.validated(rungs[number], out, exact)
    reports[step.constants.get("layout", "naive")] = report, study.factory(rungs[number])(**step.constants).shared_bytes
table(["layout", "passes over the banks", "of them conflicts", "share", "shared memory of a block, KB"],
      [[name, r.shared_wavefronts, r.shared_conflicts, f"{100 * r.shared_conflicts / r.shared_wavefronts:.0f} %", nbytes / 1024]
       for name, (r, nbytes) in reports.items()])
least = reports["swizzled"][0].shared_wavefronts

# %% [markdown]
# Eight passes instead of one for each matrix that is loaded; the copies into shared memory, whose lanes write whole rows, do not
# conflict. How many passes that saves in the kernel:

# %%
naive = reports["naive"][0]
matrices = naive.shared_loaded // 128                      # 8 x 8 halves each
stores = naive.shared_stored // 128                        # passes of 16-byte stores
table(["", "passes"], [["loads of matrices, at best", matrices], ["stores", stores], ["together", matrices + stores],
                       ["naive: 8 for every matrix", 8 * matrices + stores]])
gain, bytes_used = naive.shared_wavefronts / least, naive.shared_loaded + naive.shared_stored
print(f"naive takes {gain:.1f} times the passes")
assert matrices + stores == least == reports["padded"][0].shared_wavefronts and 8 * matrices + stores == naive.shared_wavefronts

# %% [markdown]
# How much *time* that is depends on what else the SM waits for; only a card can say. The passes themselves follow from the layout.
#
# ## Other row lengths
#
# A row of D = 32 halves is half a round: two rows share one, and an XOR with r % 8 would leave the row. `swizzle_of` gives
# shift and mask: chunk c is stored at c XOR ((r >> shift) & mask). Every D that has a kernel, all places of 8 consecutive rows
# checked:

# %%
def conflict_free(d, shift, mask):
    r, c = np.arange(8)[:, None], np.arange(d // 8)[None]
    chunk = c ^ ((r >> shift) & mask)
    if chunk.max() >= d // 8:
        return False                                       # leaves the row
    group = (r * d * 2 // 16 + chunk) % 8
    return all(len(set(group[:, column])) == 8 for column in range(d // 8))


heads = (32, 64, 96, 128, 256)
table(["D", "bytes per row", "shift, mask", "free of conflicts", "as it lies"],
      [[d, 2 * d, str(swizzle_of(2 * d)), conflict_free(d, *swizzle_of(2 * d)), conflict_free(d, 0, 0)] for d in heads])
assert all(conflict_free(d, *swizzle_of(2 * d)) and not conflict_free(d, 0, 0) for d in heads)
assert not conflict_free(32, 0, 7)

# %% [markdown]
# ## The smallest example
#
# One warp stores a tile of 32 rows and loads one column of chunks by `ldmatrix`.

# %%
def column_of_chunks(out, row_bytes, mask, chunk):
    shared = cuda.shared.array(32 * 36, u32)
    lane = i32(cuda.threadIdx.x)
    for i in range(36):
        shared[lane + 32 * i] = u32(0)
    cuda.syncwarp()
    four = cuda.local.array(4, u32)
    at = ptx.shared_address(shared) + u32(lane * row_bytes + ((chunk ^ (lane & mask)) << 4))
    ptx.ldmatrix(four, 0, at)
    out[lane] = four[0]


one = {}
for layout in ("naive", "padded", "swizzled"):
    row_bytes, mask = layout_of(64, layout)
    report = emulate(column_of_chunks, 1, 32, (np.zeros(32, u32), row_bytes, mask, 2))
    one[layout] = report.shared_wavefronts - 36
print("passes of one ldmatrix.x4:", one)

# %% [markdown]
# **Exercise 3.** Write a transpose: `y` = `x`^T of 32 x 32 float32 numbers by one warp through shared memory, reading and writing
# global memory in rows, without a single bank conflict. Do it by an XOR and without padding: store number (r, t) at a place of row r that
# depends on both, so that a column of x is in 32 banks. (`cuda.syncwarp()` makes the warp's stores visible to all its lanes; PTX, and so a report, calls it `bar.warp.sync`. The check counts
# conflicts, sectors of global memory, and bytes of shared memory.)

# %% tags=["exercise"]
def transpose(x, y):
    shared = cuda.shared.array((32, 32), np.float32)       # noqa: F841
    t = cuda.threadIdx.x                                   # noqa: F841


check("15.3", transpose)

# %% [markdown]
# ## The picture, and the ceiling

# %%
fig, axes = figure(2, width=11, height=3.2)
axes[0].set_title("one ldmatrix.x4")
bars(axes[0], one | {"least: 512 bytes, 128 per pass": 4}, "passes", digits=0)
axes[1].set_title(f"attention, L = {length}, D = {d}, one head")
bars(axes[1], {name: r.shared_wavefronts for name, (r, _) in reports.items()} | {"least: all bytes / 128": bytes_used / 128},
     "passes", digits=0)

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert one == {"naive": 32, "padded": 4, "swizzled": 4}
assert reports["padded"][1] > reports["swizzled"][1] == reports["naive"][1]
assert measured[32] == 32 and measured[33] == 1

# %% [markdown]
# **What you can do now**
#
# * predict the passes of an access from its stride,
# * store a tile by an XOR so that rows and columns are free of conflicts,
# * say when padding does the same, and what it costs.
#
# **Next:** [16](16_flash_attention_2.ipynb). Chapter 01's loop on tensor cores, one improvement per rung.
