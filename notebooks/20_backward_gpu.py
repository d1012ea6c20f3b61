# %% [markdown]
# # 20. Backward on the GPU
#
# After this chapter you can
#
# * lay out a backward pass on tensor cores so that no block adds to the sums of another, and say what that costs,
# * say why P and dS need no transposition although dV and dK multiply by their transposes,
# * predict products, traffic and registers of each pass, and find the counters agree,
# * say what must be saved for backward, how many kernels it takes, and what it costs at least.
#
# **The question:** blocks of threads run in any order and cannot wait for one another. Which block adds up which gradient, so that no two of
# them add to the same number?

# %% [markdown] tags=["map"]
# > **The idea:** Two passes, each sum with one owner: no atomics, the same bits every time.
# >
# > **Where you are:** optional: on neither path (CPU path: [00](00_memory.ipynb) ...; GPU path: [13](13_threads_warps_memory.ipynb) ...)
# >
# > **Time:** 30 minutes to read, 15 for the exercises. **Before it:** [11](11_backward.ipynb), [16](16_flash_attention_2.ipynb).
# >
# > **Terms:** [backward](../docs/glossary.md#backward), [log sum exp](../docs/glossary.md#log-sum-exp), [atomic](../docs/glossary.md#atomic), [equal bits](../docs/glossary.md#equal-bits).
# >
# > **Papers:** [FlashAttention-2](https://arxiv.org/abs/2307.08691).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import numpy as np

import numflash
from numflash import validation
from numflash.course import answer_of, bars, card, check, figure, table
from numflash.cuda import launch, launch_backward
from numflash.cuda.device import operands
from numflash.cuda.emulator import tensor
from numflash.cuda.validate import attention as validate
from numflash.cuda.validate import peers
from numflash.cuda.validate.results import shown
from numflash.validation.options import Options

rng = np.random.default_rng(0)
device = card()

# %% [markdown]
# ## Which block owns what
#
# Chapter 11 has the mathematics. For one head of L queries and S keys, with d channels:
#
# | name | size | is |
# |---|---|---|
# | S | L x S | Q K^T * scale, the scores |
# | LSE | L | the log-sum-exp of each row, kept by the forward pass |
# | P | L x S | exp(S - LSE), the weights |
# | dO | L x d | the gradient of the output: given |
# | dP | L x S | dO V^T |
# | delta | L | the sum of dO * O over the channels of a row (the papers' D) |
# | dS | L x S | P * (dP - delta) |
#
# $$dV = P^T dO,\quad dK = dS^T Q\cdot scale,\quad dQ = dS\,K\cdot scale$$
#
# dV and dK are sums over queries, dQ is a sum over keys. Cut the matrices into 2 x 2 tiles, and call the tile of queries i and keys j (i, j). Then
# dK of keys 0 needs the tiles (0, 0) and (1, 0), a column; dQ of queries 0 needs (0, 0) and (0, 1), a row. A block that owns keys 0 goes down the
# column and keeps dV and dK in registers. A block that owns queries 0 goes along the row and keeps dQ. But a block that computes all three in
# one pass must add one of them in global memory, where other blocks add too: going down column 0 it adds to dQ of queries 0, and so does the
# block of column 1.
#
# So, two passes, and each tile is computed twice. In `kernels/backward.py` they are one kernel, because they mirror each other:
#
# | pass | own rows | tiles come from | two products | sums |
# |---|---|---|---|---|
# | keys | K, V | Q, dO | S^T = K.Q^T, dP^T = V.dO^T | dK += dS^T.Q, dV += P^T.dO |
# | queries | Q, dO | K, V | S = Q.K^T, dP = dO.V^T | dQ += dS.K |
#
# The keys' pass never transposes P. It computes S^T in the first place: keys are the rows of its accumulators. And an
# accumulator of 16 x 16 is held in registers in the same way as the left operand of the next product (chapter 14):

# %%
registers, operand = tensor.operand_layout("a", 16, 2)
row, column = tensor.accumulator_order(16)                 # of (lane, register)
same = np.array_equal(operand[row, column], np.arange(256).reshape(row.shape))
print(f"{registers} registers of two halves; the same (lane, place) for all 256 numbers: {same}")

# %% [markdown]
# What has to be transposed is Q and dO, which are rows in shared memory and whose columns the second product needs: `ldmatrix.trans`
# does that while it loads. The same tile is used as it is for S^T and transposed for dK.
#
# ## It runs
#
# Output and LSE come from float64; a small kernel then makes delta = rowsum(dO * O), and converts LSE to units of log2. Three launches.

# %%
def exact(q, k, v, do, causal=False):
    """out, lse, dq, dk, dv of (L, D) arrays in float64, the scores in memory."""
    q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
    s = q @ k.T * q.shape[1] ** -0.5
    if causal:
        s[np.triu_indices_from(s, 1)] = -np.inf
    lse = np.log(np.exp(s).sum(1))
    p = np.exp(s - lse[:, None])
    out = p @ v
    ds = p * (do @ v.T - (do * out).sum(1, keepdims=True)) * q.shape[1] ** -0.5
    return out, lse, ds @ k, ds.T @ q, p.T @ do


length, d = 256, 64
q, k, v, do = (rng.standard_normal((length, d)).astype(np.float16) for _ in range(4))
out, lse, *wanted = exact(q, k, v, do)
found = numflash.attention_backward(do, q, k, v, out.astype(np.float16), lse.astype(np.float32), impl="cuda-emulator")
errors = [float(np.linalg.norm(x - right) / np.linalg.norm(right)) for x, right in zip(found, wanted, strict=True)]
table(["gradient", "relative error"], [[n, f"{e:.1e}"] for n, e in zip(("dQ", "dK", "dV"), errors, strict=True)])
assert max(errors) < 1e-3                                  # float16 keeps 11 bits: 5e-4

# %% [markdown]
# ## Products, predicted
#
# **Exercise 1.** How many m16n8k16 products (4096 flop each) do the two passes take for `queries` x `keys` with `d` channels, all
# multiples of 64? A pair: keys' pass, queries' pass. (The table above lists the products of matrices in each pass. A product of 64 x 64 results
# with 64 channels has 2 * 64 * 64 * 64 flop, which are 128 of m16n8k16.)

# %% tags=["exercise"]
def products(queries, keys, d):
    return ...


check("20.1", products)

# %%
def problem_of(q, k, v, causal=False):
    return validation.problem(q, k, v, Options(is_causal=causal))


def gradients(do, q, k, v, out, lse, causal=False, **options):
    """(dq, dk, dv), and the reports of rows, keys' pass and queries' pass."""
    four = [x[None, None] for x in (do, out.astype(np.float16))]
    work = launch_backward.float_backward(problem_of(q, k, v, causal), *four, lse.astype(np.float32)[None, None], "sm_80")
    return launch_backward.emulated(work, **options)


_, (of_rows, of_keys, of_queries) = gradients(do, q, k, v, out, lse)
_, _, of_forward = operands.emulated(launch.plan(problem_of(q, k, v), "sm_80"))
reports = {"forward": of_forward, "rows": of_rows, "keys' pass": of_keys, "queries' pass": of_queries}
assert (of_keys.tensor_operations, of_queries.tensor_operations) == answer_of("20.1")(length, length, d)
table(["", "products", "exp2 and other special", "warp instr.", "per product", "global KB read", "shared KB read", "conflicts"],
      [[n, r.tensor_operations, r.instructions.get("special", 0), sum(r.instructions.values()),
        sum(r.instructions.values()) / r.tensor_operations if r.tensor_operations else "-", r.global_loaded / 1000,
        r.shared_loaded / 1000, r.shared_conflicts] for n, r in reports.items()])

# %% [markdown]
# Seven products where forward has two. One pass with additions in memory would have five, and half of the exponentials. The next section
# shows what is gained by the other two.
#
# ## Bits
#
# Floats are rounded after each addition, so the order matters: in float32 (1e8 + 1) - 1e8 is 0, and (1e8 - 1e8) + 1 is 1. FlashAttention-2
# takes the one pass: its blocks own keys, and add to dQ with atomic additions, in whatever order they come. What that does to
# dQ: the same contributions of 16 blocks of keys, added in float32 in 100 orders.

# %%
long = [rng.standard_normal((1024, d)).astype(np.float16) for _ in range(4)]
ql, kl, vl, dol = (x.astype(np.float64) for x in long)
s = ql[:64] @ kl.T * d**-0.5
p = np.exp(s - np.log(np.exp(s).sum(1, keepdims=True)))
dp = dol[:64] @ vl.T
ds = p * (dp - (p * dp).sum(1, keepdims=True))
parts = np.stack([ds[:, n:n + 64] @ kl[n:n + 64] for n in range(0, 1024, 64)]).astype(np.float32)


def in_order(order):
    total = np.zeros_like(parts[0])
    for n in order:
        total += parts[n]
    return total


orders = [in_order(rng.permutation(16)) for _ in range(100)]
atomic = len({x.tobytes() for x in orders})
spread = float(max(np.abs(x - orders[0]).max() for x in orders) / np.abs(orders[0]).max())
print(f"different dQ of 100 orders of addition: {atomic}; largest difference {spread:.0e} of the largest number")

# %% [markdown]
# The differences are small, and none of the results is worse than another. But a training run cannot be repeated, and a bug that shows
# once does not show again. (FlashAttention-2 has a deterministic mode, which keeps copies of dQ and adds them up in the end.) In the two
# passes each sum has one owner and one order. The emulator chooses at random which warps run first between barriers. With other seeds the
# bits are the same:

# %%
small = [x[:128] for x in (do, q, k, v)]
out_s, lse_s, *wanted_s = exact(*small[1:], small[0], causal=True)
runs = [gradients(*small, out_s, lse_s, causal=True, seed=seed)[0] for seed in range(3)]
ours = len({b"".join(x.tobytes() for x in run) for run in runs})
print(f"different gradients under 3 schedules: {ours}")
assert ours == 1 and all(np.allclose(x[0, 0], right, atol=4e-3) for x, right in zip(runs[0], wanted_s, strict=True))

# %% [markdown]
# With grouped heads (GQA) the gradient of a KV head is the sum over its query heads. The keys' pass goes through them one after
# another with its sums in registers: no copies of dK and dV for each query head, and again one order.
#
# ## Traffic, predicted
#
# A block of the keys' pass reads 64 rows of K and V once; per tile of 64 queries Q, dO, and 8 bytes per query (LSE and delta).
#
# **Exercise 2.** Bytes that the keys' pass reads from global memory, one head of float16, `queries` and `keys` multiples of 64.

# %% tags=["exercise"]
def bytes_read(queries, keys, d):
    return ...


check("20.2", bytes_read)

# %%
places = of_keys.blocks * of_keys.threads * 2 * 4          # every thread reads the number of keys and the diagonal
assert of_keys.global_loaded == answer_of("20.2")(length, length, d) + places
print(f"counted {of_keys.global_loaded} bytes: predicted, and {places} of lengths and diagonals")

# %% [markdown]
# Q and dO are read once per block of keys: by larger blocks less often, if registers allowed. Only the first reading of a tile must
# come from memory; the others can come from L2.
#
# ## Registers
#
# A warp holds 16 rows of sums in float32, shared by 32 lanes.
#
# **Exercise 3.** Registers per thread for dK and dV together at head size `d`.
#
# **Exercise 4.** A thread has at most 255 registers. What is the smallest head size, a multiple of 32, whose sums alone do not fit?

# %% tags=["exercise"]
def sums(d):
    return ...


smallest = ...


check("20.3", sums)
check("20.4", smallest)

# %% [markdown]
# From there on dV and dK get a pass each: the kernel is built three times, for "v", "k" and "q". At D = 128 half of a thread's registers
# are sums, so the own rows' fragments are read again from shared memory for every chunk of 32 columns, and only that chunk's scores are
# in registers:

# %%
for head in (64, 128, 256):
    shapes = {name: launch_backward.shape_of(name, head, head, "sm_80") for name in launch_backward.passes(head, head)}
    print(f"D = {head}:", shapes)
assert [len(launch_backward.passes(x, x)) for x in (128, 256)] == [2, 3]

# %% [markdown]
# The machine code that NVIDIA's assembler `ptxas` makes of the PTX, where the binary utilities are installed (`numflash[sass]`): `HMMA`
# are its tensor-core products, `LDSM` its `ldmatrix`. The tests demand for every size and card that it needs no stack and spills nothing.

# %%
machine = {}
try:
    from numflash.cuda.compile import compiled, sass
    from numflash.cuda.kernels.backward import flash_backward
    for name in ("kv", "q"):
        made = sass.resources(compiled(flash_backward, "sm_80", "cubin", gradients=name, d=d, dv=d,
                                       **launch_backward.shape_of(name, d, d, "sm_80")).code)
        machine[name] = {"registers": made.registers, "stack": made.stack, "HMMA": made.count("HMMA"), "LDSM": made.count("LDSM")}
    table(["pass", *machine["kv"]], [[name, *row.values()] for name, row in machine.items()])
except numflash.errors.UnsupportedError as error:
    print(error)

# %% [markdown]
# ## What backward needs
#
# A framework calls backward long after forward. A first sketch would save q, k and v and call one kernel with them and dO. It forgets three
# things.
#
# **What is saved.** LSE and O have to be saved too. delta needs O, every P needs LSE; both are what a forward pass makes.
# FlashAttention-2 saves q, k, v, out and softmax_lse. Without them backward must run forward first:

# %%
saved = length * d * 2 + length * 4
print(f"one head of L = {length}, D = {d}: {saved} bytes of O and LSE, or {of_forward.tensor_operations} products more; "
      f"all of P would be {length * length * 2} bytes")
table(["L", "O and LSE, KB", "P in float16, KB"], [[x, x * (d * 2 + 4) / 1000, x * x * 2 / 1000] for x in (512, 2048, 8192)])

# %% [markdown]
# **One kernel.** FlashAttention-2 launches three: dO * O summed by rows, the pass itself, and the conversion of dQ from float32
# sums (it is added to in memory, so it cannot be float16 meanwhile). Here there are three too: rows, keys, queries. dQ is rounded
# once, from registers.
#
# **What it costs.** Counted, for the shape of chapter 16 (B = 1, H = 8, L = 512, D = 64), an L4's least times as
# in chapter 16. That has twice the queries, twice the keys and 8 times the heads of what was counted above: 2 x 2 x 8 times the work.

# %%
SM, HZ, TENSOR, MEMORY = 58, 2.04e9, 121e12, 300e9
grid = 2 * 2 * 8
arrays = 512 * 64 * 2 * 8                                  # bytes of one tensor
moved = {"forward": 4 * arrays, "backward": 8 * arrays}    # q k v o; q k v o dO in, dq dk dv out
least = {}
for name, chosen in (("forward", [of_forward]), ("backward", [of_rows, of_keys, of_queries])):
    least[name] = {
        "instructions": grid * sum(sum(r.instructions.values()) for r in chosen) / (SM * 4 * HZ),
        "tensor cores": grid * sum(r.tensor_flops for r in chosen) / TENSOR,
        "shared memory": grid * sum(r.shared_wavefronts for r in chosen) / (SM * HZ),
        "exponentials": grid * sum(r.instructions.get("special", 0) for r in chosen) * 2 / (SM * HZ),
        "memory": moved[name] / MEMORY}
table(["us at least", *least["forward"]], [[n, *(1e6 * t for t in row.values())] for n, row in least.items()])
ratio = least["backward"]["tensor cores"] / least["forward"]["tensor cores"]
print(f"backward has {ratio:.1f} times the products of forward, and {moved['backward'] / moved['forward']:.0f} times its traffic")

# %% [markdown]
# These are PTX instructions; the machine's own differ somewhat.
#
# An H200, 16 heads of 128 channels, 2 x 8192 rows: the kernels above 221 TFLOP/s (five products counted), Hopper's own (TMA, `wgmma`, the same
# two passes) 460; cuDNN 513, PyTorch's flash backend 292. Below, some lines of what `python -m numflash.cuda.validate` measures:

# %%
if device is None:
    print("no card: no times")
else:
    for step in (*validate.backward_timings("float16", (4096,), device.arch), *peers.timings((4096,), True, None)):
        print(*map(shown, step.run(device)), sep="\n")

# %% [markdown]
# ## The picture, and the ceiling

# %%
fig, axes = figure(2, width=11, height=3.6, width_ratios=(1, 1.2))
kinds = {"tensor": ("#0072B2", ""), "memory": ("#B7D3E8", "//"), "float": ("#E69F00", ""), "special": ("#F0E442", "xx"),
         "integer": ("#DDDDDD", ""), "move": ("#FFFFFF", ".."), "other": ("#777777", "")}          # colour, hatch
left = dict.fromkeys(reports, 0.0)
for kind, (colour, hatch) in kinds.items():
    shares = {name: 100 * r.instructions.get(kind, 0) / sum(r.instructions.values()) for name, r in reports.items()}
    if kind == "other":
        shares = {name: 100 - x for name, x in left.items()}
    axes[0].barh(list(reports), list(shares.values()), left=list(left.values()), edgecolor="black", label=kind,
                 color=colour, hatch=hatch)
    left = {name: left[name] + shares[name] for name in reports}
axes[0].invert_yaxis()
axes[0].set(xlabel="% of PTX warp-instructions", xlim=(0, 100), title="instruction mix")
axes[0].legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))
limits = {f"{name}: {limit}": 1e6 * least[name][limit] for name in least for limit in ("tensor cores", "shared memory", "memory")}
axes[1].set_title("B=1 H=8 L=512 D=64 on an L4, by limit", pad=14)
bars(axes[1], limits, "least microseconds", ("seven products at 121 TFLOP/s", 1e6 * least["backward"]["tensor cores"]))

# %% [markdown]
# The next cell checks the claims of this page. You can skip it.

# %%
assert same and atomic > 1 and ours == 1 and spread < 1e-5
assert np.isclose(ratio, 3.5) and moved["backward"] == 2 * moved["forward"]
assert all(r.shared_conflicts == 0 for r in reports.values())
assert all(row["stack"] == 0 for row in machine.values())

# %% [markdown]
# **What you can do now**
#
# * say which pass owns which sum, and why no atomics are needed,
# * count the products and the bytes of both passes,
# * find out whether a head size fits the registers.
#
# **Next:** [21](21_many_machines.ipynb). Keys travel around a ring; two partial results merge exactly.
