"""Chapter 23: broken kernels.

Each judge runs the kernel in the emulator under several schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..exercises import Exercise
from .kernels import emulated, nothing_stored, wrong_numbers

_rng = np.random.default_rng(0)
_x = _rng.standard_normal(128).astype(np.float32)
_q, _k, _v = (_rng.standard_normal((32, 16)).astype(np.float32) for _ in range(3))


def _weights(causal: bool, shift: float = 0.0) -> np.ndarray:
    """softmax in powers of two of the test's scores, float64."""
    s = _q.astype(float) @ _k.T.astype(float) + shift
    if causal:
        s[np.triu_indices(32, 1)] = -np.inf
    p = np.exp2(s - s.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def _judge(
    inputs: Callable[[], tuple[np.ndarray, ...]],
    exact: Callable[[], np.ndarray],
    block: int,
    grid: int = 1,
    needs: Callable[[Any], str] = lambda report: "",
) -> Callable[[Any], str]:
    """A judge of kernels f(*inputs, out); `needs` says what a report lacks, of right numbers."""

    def judge(kernel: Any) -> str:
        wish = exact()
        out = np.zeros(wish.shape, np.float32)
        given = (np.copy(x) for x in inputs())  # a kernel may write to them
        report, fault = emulated(kernel, grid, block, (*given, out))
        if fault:
            return fault
        fault, lacks = wrong_numbers(out, wish, "out"), needs(report)
        return fault or (lacks and f"the numbers are right, but {lacks}")

    return judge


def _by_shared_memory(report: Any) -> str:
    """Task 1: the numbers come by way of shared memory."""
    return "" if report.shared_loaded else "they do not come by way of shared memory"


def _no_conflict(report: Any) -> str:
    """Task 7: no bank conflict, and no column of global memory instead."""
    if report.global_load_sectors > 128:
        return (
            f"{report.global_load_sectors} sectors are loaded from global memory; "
            "with every row read once it is 128"
        )
    if report.shared_conflicts:
        return (
            f"{report.shared_conflicts} of {report.shared_wavefronts} passes over the banks are "
            "conflicts"
        )
    return ""


def _shifted(kernel: Any) -> str:
    """Task 5: scores near -400, by the shift and by the products."""
    q, k = _q.copy(), _k.copy()
    q[:, 0], k[:, 0] = 20, -20
    s = q.astype(float) @ k.T.astype(float)
    p = np.exp2(s - s.max(1, keepdims=True))
    low = p @ _v.astype(float) / p.sum(1, keepdims=True)
    for where, a, b, shift, exact in (
        ("", _q, _k, -400, _weights(False) @ _v.astype(float)),
        ("with shift 0 and products near -400: ", q, k, 0, low),
    ):
        given = a, b, _v, np.full(1, shift, np.float32)
        fault = _judge(lambda: given, lambda: exact, 32)(kernel)  # noqa: B023
        if fault:
            return where + fault
    return ""


def pipeline(kernel: Any, rows: int = 8, stages: int = 2) -> str:
    """A ring: 8 consumers for each row of a tile add up the tiles that one producer thread brings."""
    from ...cuda.compile import Source
    from ...cuda.compile.target import types
    from ...cuda.emulator import TensorMap

    tiles, consumers = 2 * stages + 1, 8 * rows  # each stage is used twice, one three times
    keys = np.random.default_rng(1).standard_normal((1, 1, rows * tiles, 64)).astype(np.float16)
    out = np.zeros(consumers, np.uint32)
    u64, i32 = types.uint64, types.int32
    signature = types.void(u64, types.Array(types.uint32, 1, "C"), i32)
    source = Source(kernel, signature, consumers + 32, 1024 * stages + 2048)
    maps = [TensorMap(keys, (1, 1, rows, 64))]
    report, fault = emulated(source, 1, None, (maps, out, np.int32(tiles)), seeds=2, arch="sm_90a")
    fault = fault or nothing_stored(report)
    if fault:
        return fault
    row, place = np.arange(consumers) // 8, np.arange(consumers) % 8  # of a consumer's 16 bytes
    chunks = keys.view(np.uint32).reshape(tiles, rows, 8, 4)
    exact = chunks[:, row, place ^ row].sum((0, 2), dtype=np.uint32)
    wrong = np.nonzero(out != exact)[0]
    if not wrong.size:
        return ""
    return (
        f"no rule is broken, but {wrong.size} of {consumers} sums are wrong, "
        f"the first is out[{wrong[0]}]"
    )


def _warpgroup(kernel: Any) -> str:
    """Scores of 64 queries and 64 keys by wgmma, from tensor maps of both."""
    from ...cuda.compile import Source
    from ...cuda.compile.target import types
    from ...cuda.emulator import TensorMap

    rng = np.random.default_rng(4)
    q, k = (rng.standard_normal((1, 1, 64, 64)).astype(np.float16) for _ in range(2))
    out = np.zeros((64, 64), np.float32)
    signature = types.void(types.uint64, types.Array(types.float32, 2, "C"))
    source = Source(kernel, signature, 128, 2 * 64 * 128 + 2048)
    maps = [TensorMap(x, (1, 1, 64, 64)) for x in (q, k)]
    _, fault = emulated(source, 1, None, (maps, out), seeds=1, arch="sm_90a")
    return fault or wrong_numbers(out, q[0, 0].astype(float) @ k[0, 0].T.astype(float), "out")


EXERCISES = {
    "23.1": Exercise(
        "reverse",
        (
            'Read the report: "uninitialised" is a read of shared memory that no thread has written '
            "yet. Which thread writes the word that thread t reads?",
            "Another warp writes it. All writes must come before any read: cuda.syncthreads().",
        ),
        judge=_judge(lambda: (_x,), lambda: _x[::-1].astype(float), 128, needs=_by_shared_memory),
        slip=("    cuda.syncthreads()\n", ""),
        broken=True,
    ),
    "23.2": Exercise(
        "running sums",
        (
            '"race": one warp writes what another one may not have read yet. Follow two turns of '
            "the loop.",
            "A fast warp comes to the store of the next turn while a slow one still reads. The "
            "loop needs a second barrier, after the read.",
        ),
        judge=_judge(
            lambda: (_rng_tiles(),),
            lambda: _rng_tiles().astype(float)[:, ::-1].sum(0),
            128,
        ),
        slip=("        cuda.syncthreads()                             # all have read it\n", ""),
        broken=True,
    ),
    "23.3": Exercise(
        "scale",
        (
            '"out-of-bounds": 4 blocks of 32 threads are 128 threads for 100 numbers.',
            "Threads without a number must do nothing: if i < x.size.",
        ),
        judge=_judge(lambda: (_x[:100],), lambda: 2 * _x[:100].astype(float), 32, 4),
        slip=("    if i < x.size:\n        ", "    if i <= x.size:\n        "),
        broken=True,
    ),
    "23.4": Exercise(
        "attention, a thread per row",
        (
            "No rule of the machine is broken, so only the numbers tell. Are the first rows wrong, "
            "or those whose maximum grows late?",
            "When the maximum grows, everything that was summed must shrink: l does. What else was "
            "summed?",
        ),
        judge=_judge(lambda: (_q, _k, _v), lambda: _weights(False) @ _v.astype(float), 32),
        slip=("o[c] = o[c] * shrink + ", "o[c] += "),
        broken=True,
    ),
    "23.5": Exercise(
        "attention with shifted scores",
        (
            "All scores of this test are far below zero. What is 2**(score - m) if m is 0?",
            "The maximum of nothing is minus infinity, not 0: a large negative number will do.",
        ),
        judge=_shifted,
        slip=("np.float32(-1e30)", "np.float32(0)"),
        broken=True,
    ),
    "23.6": Exercise(
        "causal attention",
        (
            "Which rows are wrong? Row i attends to keys 0 to i, itself included.",
            "range(row) ends at row - 1.",
        ),
        judge=_judge(lambda: (_q, _k, _v), lambda: _weights(True) @ _v.astype(float), 32),
        slip=("range(row + 1)", "range(row)"),
        broken=True,
    ),
    "23.7": Exercise(
        "sums of rows without a conflict",
        (
            "A row has 32 words, so all lanes of a read down their own row hit one bank. "
            "How long would a row have to be?",
            "33 words per row: word (r, c) is then in bank (r + c) % 32.",
        ),
        judge=_judge(
            lambda: (_square(),), lambda: _square().astype(float).sum(1), 32, needs=_no_conflict
        ),
        slip=("(32, 33)", "(32, 32)"),
        broken=True,
    ),
    "23.8": Exercise(
        "sum of a block",
        (
            "A barrier waits for every thread of the block. Which threads come to this one?",
            "Move cuda.syncthreads() out of the if: all threads come, only some add.",
        ),
        judge=_judge(lambda: (_x,), lambda: np.full(1, _x.astype(float).sum()), 128),
        slip=("        cuda.syncthreads()\n", "            cuda.syncthreads()\n"),
        broken=True,
    ),
    "23.9": Exercise(
        "a ring of two stages",
        (
            "Tile n is the (n // 2)-th use of its stage. Each use ends one phase of its barrier, "
            "and phases alternate between parity 0 and 1.",
            "The consumers wait for phase n // 2 of `full`: parity (n >> 1) & 1. n & 1 is the stage.",
        ),
        judge=pipeline,
        slip=(
            "u32((n >> 1) & 1))                  # consumers",
            "u32(n & 1))                  # consumers",
        ),
        broken=True,
    ),
    "23.10": Exercise(
        "scores by wgmma",
        (
            '"protocol": the tensor core reads and writes registers on its own. What tells it that '
            "ordinary instructions are done with them?",
            "ptx.wgmma_fence() belongs before the first product of a group.",
        ),
        judge=_warpgroup,
        slip=("    ptx.wgmma_fence()\n", ""),
        broken=True,
    ),
    "23.11": Exercise(
        "a ring with a fast producer",
        (
            "The producer overwrites a stage. What tells it that the consumers are done?",
            "Before it uses a stage again it must wait for `empty`. Its first use is n // 3 = 0 and must "
            "not wait: ask for the parity of the phase before.",
            "ptx.mbarrier_wait(empty, u32((use & 1) ^ 1)) with use = n // 3.",
        ),
        judge=functools.partial(pipeline, stages=3),
        slip=("                ptx.mbarrier_wait(empty, u32((use & 1) ^ 1))\n", ""),
        broken=True,
    ),
    "23.12": Exercise(
        "a ring that stops",
        (
            '"deadlock": the consumers wait for a phase that never ends. `full` counts bytes.',
            "How many bytes does the producer announce, and how many does a tile have?",
        ),
        judge=functools.partial(pipeline, rows=4),
        slip=("u32(512))", "u32(1024))"),
        broken=True,
    ),
}


def _rng_tiles() -> np.ndarray:
    return np.random.default_rng(2).standard_normal((4, 128)).astype(np.float32)


def _square() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((32, 32)).astype(np.float32)
