"""What every rank runs under mpiexec: all cases of this number of ranks, in one process each.

Rank 0 writes what was found.

mpiexec -n N python worker.py results.pickle PART...
"""

import pickle
import random
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI
from oracles import qkv

import numflash
from mpi.problems import LONG, PROBLEMS, SMALL, SPLITS, splits
from numflash.errors import ArgumentError
from numflash.mpi import (
    Report,
    Split,
    all_gather_attention,
    attention,
    ring,
    ring_attention,
    split_kv_decode,
)

CALLS = {"ring": ring_attention, "gather": all_gather_attention}


def solve(comm, call, arrays, split_name, report=None, **options):
    """(out, lse) of the whole sequence, on every rank."""
    q, k, v = arrays
    (rows, split), (keys, split_kv) = (splits(split_name, x.shape[-2], comm.size) for x in (q, k))
    local = [rows.shard(q, comm.rank), keys.shard(k, comm.rank), keys.shard(v, comm.rank)]
    out, lse = CALLS[call](
        comm,
        *local,
        split=split,
        split_kv=split_kv,
        enable_gqa=True,
        return_lse=True,
        report=report,
        **options,
    )
    return rows.join(comm.allgather(out)), rows.join(comm.allgather(lse), -1)


def semantics(comm):
    """Every problem and precision.

    Every split over three ranks, two of them in turn over other numbers.
    """
    for at, (name, (shape, options)) in enumerate(PROBLEMS.items()):
        for call in CALLS:
            for split in (
                SPLITS if comm.size == 3 else [SPLITS[(at + comm.size + (call == "ring")) % 4]]
            ):
                for precision in ("float32", "int8"):
                    yield (
                        (name, split, call, precision),
                        solve(
                            comm,
                            call,
                            qkv(**shape),
                            split,
                            precision=precision,
                            impl="reference",
                            **options,
                        ),
                    )
    arrays = list(qkv(**SMALL))
    arrays[1][0, 0, 20], arrays[1][0, 1, 33], arrays[2][1, 0, 7] = np.nan, np.inf, np.inf
    for precision in ("float32", "int8"):
        yield (
            ("nonfinite", precision),
            solve(
                comm, "ring", arrays, "plain", precision=precision, impl="reference", is_causal=True
            ),
        )
    for pv in ("int16", "bf16", "fp32"):
        options = {"precision": "int8", "pv": pv, "impl": "reference"}
        yield ("pv", pv), solve(comm, "ring", qkv(**SMALL), "zigzag", **options)
    options = {"precision": "int8", "pv": "int16", "impl": "reference"}
    yield ("pv", "gather"), solve(comm, "gather", qkv(**SMALL), "zigzag", **options)


def interfaces(comm):
    """Layouts, dimensions and dtypes: what came back, gathered."""
    q, k, v = qkv(**SMALL)
    s = Split.plain(SMALL["l"], comm.size)
    local = [s.shard(x, comm.rank) for x in (q, k, v)]
    call = {"enable_gqa": True, "impl": "reference", "is_causal": True}
    out, lse = ring_attention(
        comm, *(x.swapaxes(1, 2) for x in local), layout="blhd", return_lse=True, **call
    )
    yield (
        "blhd",
        (
            s.join(comm.allgather(out), 1).swapaxes(1, 2),
            s.join(comm.allgather(lse), 1).swapaxes(1, 2),
        ),
    )
    yield "3d", s.join(comm.allgather(ring_attention(comm, *(x[0] for x in local), **call)))
    yield "2d", s.join(comm.allgather(ring_attention(comm, *(x[0, 0] for x in local), **call)))
    yield (
        "float64",
        s.join(
            comm.allgather(ring_attention(comm, *(x.astype(np.float64) for x in local), **call))
        ),
    )
    yield (
        "float16",
        s.join(
            comm.allgather(ring_attention(comm, *(x.astype(np.float16) for x in local), **call))
        ),
    )
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in map(np.ascontiguousarray, local)]
    yield (
        "bfloat16",
        s.join(comm.allgather(ring_attention(comm, *bits, precision="bfloat16", **call))),
    )


def repeats(comm):
    """The same call under other timings, and in small messages, must give the same bits."""
    rng = random.Random(comm.rank)
    arrays = qkv(**SMALL)
    usual = attention.solve
    largest = ring.LARGEST
    whole = []

    def late(*args):
        time.sleep(rng.random() * 0.01)
        return usual(*args)

    for i in range(4):
        attention.solve, ring.LARGEST = late if i else usual, 100 if i == 3 else largest
        whole.append(
            solve(
                comm, "ring", arrays, "zigzag", is_causal=True, precision="int8", impl="reference"
            )
        )
    attention.solve, ring.LARGEST = usual, largest
    yield "repeats", whole


def traffic(comm):
    for name, options in {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"window": (127, 0)},
    }.items():
        for split in ("plain", "zigzag"):
            for precision in ("float32", "float16", "int8"):
                arrays = [
                    x.astype(np.float16 if precision == "float16" else np.float32)
                    for x in qkv(**LONG)
                ]
                report = Report()
                result = solve(
                    comm,
                    "ring",
                    arrays,
                    split,
                    report,
                    precision=precision,
                    impl="reference",
                    **options,
                )
                yield (
                    (name, split, precision),
                    (result[0], [vars(r) for r in comm.allgather(report)]),
                )


class Odd(Exception):
    def __init__(self, a, b):
        super().__init__(a, b)


def mistakes(comm):
    """(type, message) on every rank of calls that must fail, each followed by one that must work."""
    q, k, v = qkv(h=2, l=3 * comm.size, d=8)
    s = Split.plain(q.shape[2], comm.size)
    good = [s.shard(x, comm.rank) for x in (q, k, v)]
    last = comm.rank == comm.size - 1

    def shard(*changes):
        return [change(x) if last else x for change, x in zip(changes, good, strict=True)]

    keep = lambda x: x  # noqa: E731
    wrong = {
        "dtype": (shard(lambda x: x.astype(int), keep, keep), {}),
        "head_dim": (shard(*[lambda x: x[..., :4]] * 3), {}),
        "key_heads": (shard(keep, *[lambda x: x[:, :1]] * 2), {"enable_gqa": True}),
        "batch": (shard(*[lambda x: np.concatenate([x, x])] * 3), {}),
        "value_length": (shard(keep, keep, lambda x: x[:, :, :1]), {}),
        "option": (good, {"is_causal": last}),
        "window": (good, {"window": (comm.rank, 0)}),
        "lengths": (good, {"key_lengths": [99]}),
        "padding": (good, {"key_lengths": [comm.rank]}),
        "precision": (good, {"precision": "int4"}),
        "split": (good, {"split": "striped"}),
        "zigzag": (shard(lambda x: x[:, :, :1], keep, keep), {"split": "zigzag"}),
        "ranks": (good, {"split": Split.plain(q.shape[2], comm.size + 1)}),
    }
    for name, (arrays, options) in wrong.items():
        yield (
            name,
            everywhere(
                comm, lambda a=arrays, o=options: ring_attention(comm, *a, impl="reference", **o)
            ),
        )
    usual = attention.solve
    for name, error in {
        "kernel": ValueError("no luck"),
        "odd": Odd(1, 2),
        "memory": MemoryError("full"),
    }.items():
        calls = []

        def solve_once(*args, calls=calls, error=error):
            calls.append(1)
            if last and len(calls) == min(2, comm.size):
                raise error
            return usual(*args)

        attention.solve = solve_once
        yield name, everywhere(comm, lambda: ring_attention(comm, *good, impl="reference"))
        attention.solve = usual
    for name, call in CALLS.items():
        module = {"ring": ring, "gather": attention}[name]
        allocate = module.allocate

        def full(nbytes, allocate=allocate):
            if last:
                raise MemoryError("full")
            return allocate(nbytes)

        module.allocate = full
        yield f"room, {name}", everywhere(comm, lambda c=call: c(comm, *good, impl="reference"))
        module.allocate = allocate
    yield "report", everywhere(comm, lambda: ring_attention(comm, *good, report=last or None))
    wrong = {"casual": True} if last else {}
    yield "unknown", everywhere(comm, lambda: all_gather_attention(comm, *good, **wrong))
    yield "comm", everywhere(comm, lambda: ring_attention(MPI.COMM_NULL, *good))
    yield "none", everywhere(comm, lambda: ring_attention(None, *good))
    yield "chunks", everywhere(comm, lambda: Split((((0, 3),), ((2, 5),))))
    yield "after", (s.join(comm.allgather(ring_attention(comm, *good, impl="reference"))), None)


def everywhere(comm, call):
    try:
        call()
        found = None
    except Exception as error:
        found = type(error).__name__, str(error), isinstance(error, ArgumentError)
    return comm.allgather(found)


class Cache:
    """The least that split_kv_decode asks for: keys and values in a list, attention over them."""

    def __init__(self, value_dim):
        self.keys, self.values, self.value_dim = [], [], value_dim

    def append(self, key, value):
        self.keys.append(key)
        self.values.append(value)

    def decode(self, query, *, scale, return_lse):
        if not self.keys:
            return np.zeros((*query.shape[:3], self.value_dim), np.float32), np.full(
                query.shape[:3], -np.inf, np.float32
            )
        key = np.concatenate(self.keys, 2)
        value = np.concatenate(self.values, 2)
        return numflash.attention(
            query.astype(np.float32),
            key,
            value,
            scale=scale,
            enable_gqa=True,
            impl="reference",
            return_lse=return_lse,
        )


class Broken(Cache):
    def decode(self, query, **options):
        raise ValueError("no cache")


def decoding(comm):
    """Nine tokens appended in turn, each attended to after it came; on every rank."""
    q, k, v = qkv(b=2, h=4, hkv=2, l=9, d=16, dv=8)
    cache = Cache(8)
    steps = []
    for i in range(9):
        if i % comm.size == comm.rank:
            cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        steps.append(split_kv_decode(comm, cache, q[:, :, i : i + 1], return_lse=True))
    yield "steps", [np.concatenate(x, 2) for x in zip(*steps, strict=True)]
    again = split_kv_decode(comm, cache, q[:, :, 8:9])
    yield "everywhere", comm.allgather(again.tobytes())
    half = split_kv_decode(comm, cache, q[:, :, 8:9].astype(np.float16))
    yield "float16", half
    last = comm.rank == comm.size - 1
    one = q[:, :, 8:9]
    yield (
        "two tokens",
        everywhere(comm, lambda: split_kv_decode(comm, cache, q[:, :, 7:9] if last else one)),
    )
    yield (
        "heads",
        everywhere(comm, lambda: split_kv_decode(comm, cache, one[:, :2] if last else one)),
    )
    yield (
        "scale",
        everywhere(comm, lambda: split_kv_decode(comm, cache, one, scale=0.5 if last else None)),
    )
    yield "width", everywhere(comm, lambda: split_kv_decode(comm, Cache(7) if last else cache, one))
    yield (
        "broken",
        everywhere(comm, lambda: split_kv_decode(comm, Broken(8) if last else cache, one)),
    )
    yield "no cache", everywhere(comm, lambda: split_kv_decode(comm, None, one))
    yield "flag", everywhere(comm, lambda: split_kv_decode(comm, cache, one, return_lse=1))
    yield "after", split_kv_decode(comm, cache, one)


def kernels(comm):
    """The compiled kernels, on a length with tails."""
    for precision in ("int8", "float32"):
        for call in CALLS:
            for split in ("plain", "zigzag"):
                arrays = qkv(h=2, hkv=1, l=1037, d=64)
                yield (
                    (precision, call, split),
                    solve(comm, call, arrays, split, precision=precision, is_causal=True),
                )
                if precision == "int8":
                    arrays = qkv(**LONG)
                    yield (
                        ("aligned", call, split),
                        solve(comm, call, arrays, split, precision=precision, is_causal=True),
                    )


def main(path, *parts):
    comm = MPI.COMM_WORLD
    found = {}
    for part in parts:
        found[part] = dict(globals()[part](comm))
    if comm.rank == 0:
        Path(path).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
