# %% [markdown]
# # 21. Many machines: a ring of ranks
#
# After this chapter you can
#
# * divide attention among many machines,
# * divide causal work so that no machine waits long,
# * say from which length on the exchange costs no time.
#
# A sequence that does not fit one machine is cut into pieces, *shards*, one for each *rank* (a rank is one of the processes of an MPI
# program; think of one per machine). Queries stay where they are; keys and values are sent. What makes this possible is one property of
# softmax: attention over two disjoint sets of keys can be merged exactly from the two outputs and their log-sum-exps. The log-sum-exp
# (LSE) of a row is the logarithm of the sum of its weights e**score. It is chapter 01's state in one number, m + log(l), beside an output
# that is already divided by l. This chapter runs the ring by hand first, then with MPI on several ranks of this machine.

# %% [markdown] tags=["map"]
# > **The idea:** Keys travel around a ring; two partial results merge exactly.
# >
# > **Where you are:** optional: on neither path (CPU path: [00](00_memory.ipynb) ...; GPU path: [13](13_threads_warps_memory.ipynb) ...)
# >
# > **Time:** 15 minutes to read, 10 for the exercises. **Before it:** [01](01_online_softmax.ipynb).
# >
# > **Terms:** [log sum exp](../docs/glossary.md#log-sum-exp), [ring](../docs/glossary.md#ring), [rank](../docs/glossary.md#rank), [causal](../docs/glossary.md#causal).
# >
# > **Papers:** [Ring attention](https://arxiv.org/abs/2310.01889).

# %% tags=["machine"]
from numflash.course import hint, machine, solution

machine()

# %%
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import numflash
from numflash.course import check, drawings, figure
from numflash.mpi import Split, causal_work, imbalance
from numflash.mpi.model import LINKS, Ring

rng = np.random.default_rng(0)
length, heads, head_dim, ranks = 512, 2, 32, 4
query, key, value = (rng.standard_normal((1, heads, length, head_dim), np.float32) for _ in range(3))
whole = numflash.attention(query, key, value, impl="reference")

# %% [markdown]
# ## The ring by hand
#
# Four ranks in a row; at step t rank r holds the keys of rank r - t (modulo 4). Each partial result comes with its log-sum-exp, and
# `merge_states` weighs the two by e^lse. Step through it; then the same in code. The state before the first step is that of no keys:
# output 0, log-sum-exp minus infinity.

# %% tags=["drawing"]
drawings.ring_of_ranks()

# %%
split = Split.plain(length, ranks)
q, k, v = ([split.shard(x, r) for r in range(ranks)] for x in (query, key, value))
shards = []
for r in range(ranks):
    out, lse = np.zeros_like(q[r]), np.full(q[r].shape[:3], -np.inf, np.float32)
    for t in range(ranks):
        owner = (r - t) % ranks
        part = numflash.attention(q[r], k[owner], v[owner], return_lse=True, impl="reference")
        out, lse = numflash.merge_states(out, lse, *part)
    shards.append(out)
difference = np.abs(split.join(shards) - whole).max()
print(f"largest difference from one process: {difference:.1e}")
assert difference < 1e-6

# %% [markdown]
# **Exercise 1.** Write the merge of two partial outputs (rows, D) with their log-sum-exps (rows,) (natural logarithm) yourself. Return the
# merged output only.

# %% tags=["exercise"]
def merge(out_a, lse_a, out_b, lse_b):
    return ...


check("21.1", merge)

# %% [markdown]
# ## Which ranks work, and which wait
#
# With a causal mask, a row attends only to the keys before it and its own. Work per rank (rows) and step (columns), in query-key pairs: with
# consecutive shards the first ranks soon have nothing left to do, and the last one decides the time. Zigzag gives each rank a chunk
# from the front and one from the back: in every column of its table all ranks have the same work.

# %%
for name in ("plain", "zigzag"):
    dealt = getattr(Split, name)(length, ranks)
    print(f"{name}: chunks {dealt.chunks}\n{causal_work(dealt)}\nbusiest over mean: {imbalance(dealt):.2f}\n")
assert imbalance(Split.plain(length, ranks)) > 1.7 and imbalance(Split.zigzag(length, ranks)) == 1.0

# %%
fig, axes = figure(2, width=9, height=3.0, sharey=True)
for ax, name in zip(axes, ("plain", "zigzag"), strict=True):
    dealt_work = np.asarray(causal_work(getattr(Split, name)(length, ranks)))
    ax.imshow(dealt_work, vmin=0, vmax=length**2 / ranks**2)
    for (r, t), pairs in np.ndenumerate(dealt_work):
        ax.text(t, r, pairs, ha="center", va="center", fontsize=9, color="white" if pairs < 9000 else "black")
    ax.set(title=f"{name}: query-key pairs", xlabel="step", ylabel="rank", xticks=range(ranks), yticks=range(ranks))

# %% [markdown]
# **Exercise 2.** All ranks meet after each step, so a step takes as long as its busiest rank. By what factor does zigzag shorten all
# steps together if the 512 tokens are divided among *eight* ranks? (`causal_work(Split.plain(512, 8))` is the table.)

# %% tags=["exercise"]
answer = ...
check("21.2", answer)

# %% [markdown]
# ## The same over MPI
#
# Each rank is a process of its own, started by `mpiexec`. It sends the block that it holds and receives the next one while
# its kernel runs. The script is what a user would write; rank 0 collects the shards to compare them. INT8 sends about a
# quarter of the bytes.

# %%
SCRIPT = '''
import pickle, sys
import numpy as np
from mpi4py import MPI
from numflash.mpi import Report, Split, ring_attention

comm = MPI.COMM_WORLD
query, key, value = pickle.load(open(sys.argv[1], "rb"))
found = {}
for name in ("plain", "zigzag"):
    split = getattr(Split, name)(query.shape[2], comm.size)
    mine = [split.shard(x, comm.rank) for x in (query, key, value)]
    for precision in ("float32", "int8"):
        report = Report()
        out = ring_attention(comm, *mine, split=name, is_causal=True, precision=precision, impl="reference", report=report)
        found[name, precision] = split.join(comm.allgather(out)), comm.allreduce(report.sent)
if comm.rank == 0:
    pickle.dump(found, open(sys.argv[2], "wb"))
'''
mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
found = {}
if mpiexec and find_spec("mpi4py"):
    with tempfile.TemporaryDirectory() as folder:
        script, given, result = (Path(folder) / name for name in ("ring.py", "given.pickle", "found.pickle"))
        script.write_text(SCRIPT)
        given.write_bytes(pickle.dumps((query, key, value)))
        environment = {**os.environ, "NUMBA_NUM_THREADS": "1", "PYTHONPATH": str(Path(numflash.__file__).parents[1])}
        subprocess.run([mpiexec, "-n", str(ranks), sys.executable, script, given, result], check=True, timeout=300, env=environment)
        found = pickle.loads(result.read_bytes())
else:
    print("no MPI here: pip install 'numflash[mpi]' mpich")

# %%
causal = numflash.attention(query, key, value, is_causal=True, impl="reference")
for (name, precision), (out, sent) in found.items():
    error = np.abs(out - causal).sum() / np.abs(causal).sum()
    print(f"{name:7s} {precision:8s} relative L1 {error:.1e}, {sent / 1e3:6.1f} kB sent by all ranks")
    assert error < (1e-6 if precision == "float32" else 0.03)
if found:
    assert found["plain", "int8"][1] / found["plain", "float32"][1] == (2 * head_dim + 4) / (8 * head_dim)

# %% [markdown]
# Zigzag sends more than plain. A rank passes on only keys that some rank after it attends to. With plain shards nobody but the last rank attends
# to the last keys, so they are not sent at all; with zigzag every shard has a chunk from the front, which all ranks need.
#
# ## When does the exchange hide?
#
# The kernel's time grows with the square of the shard, the message with its length. From some length on, the ring costs nothing. The speeds of
# the kernels are assumptions (1 TOP/s in float32, 4 in INT8), the links a line of TofuD, the network of the Fugaku computer, and 100 Gb/s:

# %%
for link in LINKS:
    for precision, rate in (("float32", 1e12), ("int8", 4e12)):
        ring = Ring(rate, link, heads=32, kv_heads=32, head_dim=128, precision=precision, causal=True)
        n = ring.hiding_length()
        print(f"{link.name:16s} {precision:8s} at {rate / 1e12:.0f} TOP/s: {n} tokens per rank")
        assert ring.kernel(n) >= ring.exchange(n)

# %% [markdown]
# **What you can do now**
#
# * merge two outputs by their log-sum-exp,
# * divide causal work so that all ranks finish together,
# * compute from which length on the exchange hides behind the arithmetic.
#
# **Next:** [22](22_invent_attention.ipynb). A score or a mask of your own is a function that is compiled into the existing kernel.
