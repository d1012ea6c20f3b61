"""Attention over a sequence that is spread over the ranks of an MPI communicator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dispatch.backends import solve
from ..errors import ArgumentTypeError
from ..interop.arguments import refuse_unknown
from ..interop.arrays import convert, deliver, import_array, restore, to_float32
from ..numerics.merge import apply_sinks, join, weights
from ..numerics.quantization import quantize_heads
from .agreement import agree, communicator
from .plan import RankPlan, make_plan
from .ring import Report, Route, allocate, rotate
from .shards import Agreed, Format, Shard, Statistics, decode, encode, operands, quantise_shard
from .splits import Split


@dataclass
class Job:
    """A plan with this rank's operands in the form in which they are computed with, and its result
    so far.

    query : (B, H, L, D) array or QuantizedTensor;  own : Shard;  agreed : Agreed, for "int8"
    room : memory for the messages
    out (B, H, L, Dv) float32, lse (B, H, L) float32
    error : the first that this rank met while others already relied on it
    """

    plan: RankPlan
    form: Format
    query: Any
    own: Shard
    agreed: Agreed | None
    impl: str
    room: Any
    out: np.ndarray
    lse: np.ndarray
    error: Exception | None = None

    def attempt(self, work: Callable[[], None]) -> None:
        """Keep an error of `work` for `finish`, and do nothing after one."""
        if self.error is None:
            try:
                work()
            except Exception as error:
                self.error = error

    def attend(self, shard: Shard) -> None:
        """Merge in the attention of every query chunk to every chunk of the shard that it attends
        to.
        """
        for c, keys in enumerate(shard.ranges):
            arrays = [field[c] for field in shard.arrays]
            for rows, start in self.plan.pieces():
                if self.plan.sees(rows, start, keys):
                    self._merge(rows, start, keys, arrays)

    def _merge(
        self, rows: slice, start: int, keys: tuple[int, int], arrays: list[np.ndarray]
    ) -> None:
        key, value = operands(self.plan.problem, arrays, self.agreed, keys)
        out, lse = solve(self.plan.part(self.query, rows, start, key, value, keys), self.impl)
        assert lse is not None
        mine, other, self.lse[:, :, rows] = weights(self.lse[:, :, rows], lse)
        self.out[:, :, rows] = join(self.out[:, :, rows], mine) + join(
            convert(out, "float32"), other
        )

    def finish(self, comm: Any) -> tuple[np.ndarray, np.ndarray]:
        """The result; an error of any rank on all."""

        def check() -> None:
            if self.error is not None:
                raise self.error

        agree(comm, check)
        sinks = self.plan.problem.sinks
        if sinks is not None:
            apply_sinks(self.out, self.lse, sinks)
        return self.out, self.lse


def prepare(
    comm: Any, plan: RankPlan, impl: str, make_room: Callable[[RankPlan, Format], Any]
) -> Job:
    """Quantise where that is asked for, and allocate, while an error is still raised on all ranks.

    Queries and keys once, by their owner, with the offset and scales of all ranks.
    """
    p = plan.problem
    ranges = plan.keys.chunks[plan.rank]
    b, h, hkv, length, _, d, dv = p.shape
    form = Format.of(p)
    agreed = None
    jobs = []
    if p.precision == "int8":

        def statistics() -> Statistics:
            place = plan.keys.indices(plan.rank)
            real = place < p.key_lengths[:, None]
            return Statistics.of(to_float32(p.key), to_float32(p.value), real, place)

        agreed = Agreed.of(Statistics.join(agree(comm, statistics)), p)

    def make() -> None:
        query = p.query
        own = Shard.of(ranges, p.key, p.value)
        if agreed is not None:
            rows = to_float32(p.query).reshape(b * h, length, d)
            query = quantize_heads(rows, "row", False).unfolded((b, h))
            own = quantise_shard(to_float32(p.key), to_float32(p.value), ranges, p, agreed)
        out = np.zeros((b, h, length, dv), np.float32)
        lse = np.full((b, h, length), -np.inf, np.float32)
        jobs.append(Job(plan, form, query, own, agreed, impl, make_room(plan, form), out, lse))

    agree(comm, make)
    return jobs[0]


def run(
    comm: Any,
    query: Any,
    key: Any,
    value: Any,
    make_room: Callable[[RankPlan, Format], Any],
    work: Callable[[Any, Job, Report], None],
    report: Report | None,
    options: dict[str, Any],
) -> Any:
    """What the public functions have in common: check, prepare, `work`, deliver."""
    started = time.perf_counter()

    def check() -> None:
        refuse_unknown("all_gather_attention", options, DEFAULTS)
        if not (report is None or isinstance(report, Report)):
            raise ArgumentTypeError(f"report: got {report!r}; allowed: a Report, or None")

    plan = make_plan(communicator(comm), query, key, value, options, check)
    report = Report() if report is None else report
    vars(report).update(vars(Report()))
    job = prepare(comm, plan, options["impl"], make_room)
    report.setup = time.perf_counter() - started
    work(comm, job, report)
    out, lse = job.finish(comm)
    taken = import_array("query", query)
    ndim = taken.array.ndim
    layout = options["layout"]
    result = deliver(
        restore(out, ndim, layout), restore(lse, ndim, layout), taken, plan.problem.return_lse
    )
    report.total = time.perf_counter() - started
    return result


def ring_attention(
    comm: Any,
    query: Any,
    key: Any,
    value: Any,
    *,
    split: str | Split = "plain",
    split_kv: str | Split | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: Any = None,
    alignment: str = "upper_left",
    key_lengths: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    precision: str | None = None,
    pv: str | None = None,
    layout: str = "bhld",
    return_lse: bool = False,
    impl: str = "auto",
    report: Report | None = None,
) -> Any:
    """`numflash.attention` over a sequence spread over ranks.

    Queries stay, keys and values are sent once round the ring.

    Every rank of `comm` calls it with its own shard of the sequence and the same options. It
    returns when the rank's own rows are done. Communication is non-blocking and runs while the
    kernel does; a message carries only keys that a later rank attends to.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    query : (B, H, L_r, D) array, the rank's rows of the whole (B, H, L, D); 2-D and 3-D arrays are
        promoted
    key, value : (B, Hkv, S_r, D) and (B, Hkv, S_r, Dv) arrays, the rank's keys
        L_r and S_r may differ between ranks and may be 0; everything else is equal on all ranks.
    split : "plain", "zigzag" or Split
        Which tokens of the whole sequence a rank's rows are. "plain": the ranks' shards follow one
        another, of any lengths. "zigzag": as `Split.zigzag(L, ranks)` deals them, so that causal
        work is balanced.
    split_kv : as split
        The same for the keys; `split` unless given.
    window, alignment, key_lengths, is_causal, alibi_slopes
        Count tokens of the whole sequences, as if one process held them.
    precision : "int8" and the others
        With "int8" each rank quantises its keys and values once and sends a quarter of the bytes of
        float32. The smoothing offset (the mean key), the scales of the value's channels and the
        first keys, which are finer, are those of the whole sequence.
    scale, enable_gqa, softcap, sinks, pv, layout, return_lse, impl
        As `numflash.attention` takes them.
    report : Report
        Filled with bytes and seconds of this call.

    Returns
    -------
    out : (B, H, L_r, Dv), the rank's rows, of the kind and dtype of query
    lse : (B, H, L_r) float32; only with `return_lse`

    Notes
    -----
    Equal calls give equal bits. Over another number of ranks or another split, partial results are
    rounded and merged in another order: float32 differs in its last bits; int8 by its own rounding,
    and by float32's where chunks start on a key block of 128.

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError
        The same on every rank, naming the rank that met it.
    """
    options = {
        "split": split,
        "split_kv": split_kv,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "window": window,
        "alignment": alignment,
        "key_lengths": key_lengths,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "precision": precision,
        "pv": pv,
        "layout": layout,
        "return_lse": return_lse,
        "impl": impl,
    }

    return run(comm, query, key, value, ring_room, ring_work, report, options)


def ring_room(plan: RankPlan, form: Format) -> Route:
    """The way of the keys round the ring."""
    return Route.of(form, plan.itinerary(), plan.rank, plan.keys.ranks)


def ring_work(comm: Any, job: Job, report: Report) -> None:
    """Compute this rank's rows while keys and values go round the ring."""

    def work(shard: Shard) -> None:
        job.attempt(lambda: job.attend(shard))

    rotate(comm, job.form, job.own, job.room, work, report)


def all_gather_attention(
    comm: Any, query: Any, key: Any, value: Any, *, report: Report | None = None, **options: Any
) -> Any:
    """As `ring_attention`, but every rank first collects all keys and values, then calls the kernel
    once per query chunk.

    For keys and values that are short or have few heads (GQA), where n messages cost more than
    their bytes: one collective, nothing to merge, but memory for all keys on every rank and no
    overlap. With "int8" the bits do not depend on how keys are split.

    Parameters
    ----------
    comm, query, key, value, report
        As in `ring_attention`.
    options
        Every other keyword of `ring_attention`.

    Returns
    -------
    out, lse
        As `ring_attention` returns them.

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError
        The same on every rank, naming the rank that met it.
    """
    return run(comm, query, key, value, gather_room, gather_work, report, {**DEFAULTS, **options})


def gather_room(plan: RankPlan, form: Format) -> tuple[np.ndarray, np.ndarray]:
    """Memory for this rank's keys and values, and for everybody's."""
    sizes = [form.nbytes(c) for c in plan.keys.chunks]
    return allocate(sizes[plan.rank]), allocate(sum(sizes))


def gather_work(comm: Any, job: Job, report: Report) -> None:
    """Compute this rank's rows after one all-gather of keys and values."""
    from mpi4py import MPI

    start = time.perf_counter()
    keys = job.plan.keys
    form = job.form
    sizes = [form.nbytes(c) for c in keys.chunks]
    mine, everything = job.room
    encode(form, job.own, mine)
    places = np.cumsum([0, *sizes])
    comm.Allgatherv([mine, MPI.BYTE], [everything, sizes, places[:-1].tolist(), MPI.BYTE])
    report.exchange = time.perf_counter() - start
    report.messages, report.sent, report.received = (
        comm.size - 1,
        mine.size * (comm.size - 1),
        everything.size - mine.size,
    )
    parts = [
        decode(form, c, everything[places[r] : places[r + 1]]) for r, c in enumerate(keys.chunks)
    ]
    job.attempt(lambda: job.attend(Shard.whole(parts)))
    report.kernel = time.perf_counter() - start - report.exchange


DEFAULTS = dict(ring_attention.__kwdefaults__ or {})
DEFAULTS.pop("report")
