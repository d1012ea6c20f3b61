"""How work is cut for threads and blocks: how many of them pay, and into how many parts keys go."""

from __future__ import annotations

# Multiplications from which on a thread of its own pays: 0.05 to 0.1 ms. A thread that waits for
# work starts in 0.007 ms (GNU OpenMP, Zen 5). After 20 ms without a call it sleeps and starts in 0.05
# ms: the smallest problems then take as long on two threads as on one.
THREAD_WORK = {"float32": 4 << 20, "bfloat16": 8 << 20, "int8": 8 << 20, "few rows": 1 << 20}


def workers(kind: str, multiplications: int) -> int:
    """The most threads that a problem of so many multiplications uses.

    Each thread gets at least `THREAD_WORK` multiplications: with fewer, another thread does not
    make the call faster.
    """
    from ..jit.threads import least_work  # loads Numba, which asking for a tiling does not

    return max(1, multiplications // (THREAD_WORK[kind] * least_work()))


# Float attention with so many rows of a query head, and at least so many keys, reads keys and values where
# they are. A register tile has six rows of one head: with one row of each of 1 to 16 heads of a group the
# other way takes 0.3 to 0.7 of the time, with two 0.7 to 1, with four as long (Zen 4). Fewer keys are packed
# sooner than the parts of their heads are put together.
FEW_ROWS = {1: 32, 2: 256}
# Three or four are as well where keys and values are so large that their packed copies do not stay in the last
# cache with them, and at most so many rows share a KV head: 0.65 to 0.95 of the time of packing where a head's
# keys are contiguous, 0.5 to 0.9 where they are beside those of other heads, whose values have to be packed too.
FEW_OF_LARGE, LARGE_BYTES, FEW_OF_GROUP = 4, 10 << 20, 16
FEW_KEYS, FEW_TASKS = 256, 8  # parts of at least so many keys, up to so many tasks


def few_parts(length: int, heads: int, keys: int, group: int = 1, nbytes: int = 0) -> int:
    """How many parts of the keys the kernel of few rows takes; 0 for more rows or few keys, which register tiles
    compute.

    As many for every number of threads: the parts are put together in order.

    Parameters
    ----------
    length : rows of a query head
    heads, group : KV heads of all batches, and query heads that share one
    nbytes : of all keys and values in float32, 0 for another dtype
    """
    large = nbytes >= LARGE_BYTES and group * length <= FEW_OF_GROUP
    if large and 2 < length <= FEW_OF_LARGE:
        return _key_parts(heads, keys)
    if length not in FEW_ROWS or keys < FEW_ROWS[length]:
        return 0
    return _key_parts(heads, keys)


# Gradients of at most so many rows of a query head, and of at least so many keys, read keys and values where
# they are. A register tile has 16 queries: one row in place takes 0.1 to 0.35 of its time, eight 0.45 to 0.7,
# twelve 0.6 to 1, sixteen 0.75 to 1.25, the most where the head size is 16 or 32 (Zen 4).
FEW_GRADIENT_ROWS, FEW_GRADIENT_KEYS = 12, 32


def few_gradient_parts(length: int, heads: int, keys: int) -> int:
    """How many parts of the keys the gradient of few rows takes, as `few_parts`; 0 where register tiles compute
    it.
    """
    if length > FEW_GRADIENT_ROWS or keys < FEW_GRADIENT_KEYS:
        return 0
    return _key_parts(heads, keys)


def _key_parts(heads: int, keys: int) -> int:
    return max(1, min(keys // FEW_KEYS, -(-FEW_TASKS // heads)))


def split_count(units: int, blocks: int, workers: int) -> int:
    """How many splits of `blocks` key blocks keep `workers` busy with `units` query tiles.

    FlashAttention 2's rule.

    The smallest number whose last wave is filled at least 85 % as well as the best number's; counts
    that do not change the blocks of a split are left out. 14 heads on the T4's 40 multiprocessors
    (80 workers, blocks of 256 keys) at 1024 keys give 4, as in the T4 architecture
    (docs/sources.md).
    """
    fill = {}
    for n in range(1, min(blocks, 128) + 1):
        if n == 1 or -(-blocks // n) != -(-blocks // (n - 1)):
            waves = units * n / workers
            fill[n] = waves / -(-units * n // workers)
    enough = 0.85 * max(fill.values(), default=0)
    return min((n for n in fill if fill[n] >= enough), default=1)
