"""Which worker computes which heads.

A worker that prepares K and V of the heads whose query tiles it computes finds them in its own caches:
on two threads INT8 attention of 2,048 keys takes 0.92 times as long as where each thread prepares half
of them and takes every other tile (Intel Granite Rapids).
"""

from __future__ import annotations

from ..jit.compiler import bare

MANY_HEADS = 8  # for each thread, of any lengths: they are shared out evenly enough
# Instruction sets of processors whose cores may differ in speed (laptops): with one head for each thread the
# slowest core would decide.
UNEQUAL_CORES = ("avx2", "avx_vnni", "neon")


def least_heads(isa_name: str) -> int:
    """How many KV heads a thread gets at least where heads are shared out evenly."""
    return 2 if isa_name.startswith(UNEQUAL_CORES) else 1


@bare
def heads_are_shared_out(n_kv, workers, lengths, least):
    """Whether each worker takes whole KV heads: all get as many of the same length, or there are many.

    lengths : (B,) int64 keys of each sequence
    least : `least_heads`
    """
    if workers == 1 or n_kv >= MANY_HEADS * workers:
        return True
    for b in range(1, lengths.size):
        if lengths[b] != lengths[0]:
            return False
    return n_kv % workers == 0 and n_kv >= least * workers


@bare
def heads_together(n_kv, workers, tiles, enough):
    """How many KV heads with `tiles` query tiles each a worker takes at a time: so many that there are
    `enough` tiles, but no more than its share, in runs of about the same length.
    """
    share = (n_kv + workers - 1) // workers
    wanted = max(1, min(share, (enough + tiles - 1) // max(1, tiles)))
    runs = (share + wanted - 1) // wanted
    return max(1, (share + runs - 1) // max(1, runs))
