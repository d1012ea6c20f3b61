"""Attention over many machines.

Sequences spread over the ranks of an MPI communicator (mpi4py, the extra `mpi`).

>>> from mpi4py import MPI
>>> from numflash.mpi import Split, ring_attention
>>> comm = MPI.COMM_WORLD
>>> split = Split.zigzag(q.shape[-2], comm.size)
>>> out = ring_attention(comm, *(split.shard(x, comm.rank) for x in (q, k, v)), split="zigzag", is_causal=True, precision="int8")
"""

from .attention import all_gather_attention, ring_attention
from .decode import split_kv_decode
from .ring import Report
from .splits import Split, causal_work, imbalance

__all__ = [
    "Report",
    "Split",
    "all_gather_attention",
    "causal_work",
    "imbalance",
    "ring_attention",
    "split_kv_decode",
]
