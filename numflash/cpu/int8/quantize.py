"""Float query, key and value to the operands of the INT8 kernel, in one pass.

The fast way of `quantization.quantize_problem`.

KV heads are taken one by one, so that their rows are still in the cache when they are read again:

    statistics   sum of every channel of K, largest magnitude of V's, CHUNK rows at a time
    means        the mean of K is taken off its rows; V gets one scale for each channel
    keys         panel by panel: scales, int8 rows in L1, packed from there
    values       block by block likewise
    queries      int8 rows and scales of the query heads that belong to this KV head

A worker that attends to a head quantises it (`quantize_heads`). All heads come first (`quantize`) where
workers do not get equally many; where these are so few that threads do not share them evenly, a task
takes chunks of rows, and the statistics of all come first. The results are those of `quantize_problem`, to the bit, for input
whose magnitudes stay below `quantize_rows.PLAIN`, and heads as wide as a vector. Otherwise
(infinity, NaN, huge numbers, narrower heads) the caller uses `general_int8`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, separate
from ...jit.memory import arrays_together, reinterpret
from ...jit.parallel import over_tasks
from ...numerics.fixedpoint import FINER, FIRST_KEYS
from ...numerics.quantize_kernels import CHUNK, NO_SCALE
from ...tiling import KEY_BLOCK
from ..isa.isas import VECTOR_ISAS, running_lanes
from ..isa.strided import Strided, ask_for_rows, row_at
from ..isa.vectors import address
from .first_keys import FirstKeys
from .packing import PackedKeys, panel_packer
from .quantize_rows import PLAIN, ROWS, down_channels, quantize_rows, row_scales
from .quantize_values import float_blocks, value_blocks

F = np.float32
I = np.int32
PLAIN_BITS = int(F(PLAIN).view(I))
# rows of Q whose scales are all found before the first is rounded: the way from a row to its scale,
# with a division at its end, is long
TOGETHER = 4 * ROWS
AHEAD = 2 * ROWS  # so many rows ahead rows of Q are prefetched
EVEN = 4  # tasks for each thread from which on an uneven number of them is even enough


class Source(NamedTuple):
    """What is quantised.

    lengths : (B,) keys that count;  smooth : take the mean off K;  unit : float32, what turns
        scales of Q into cq
    """

    q: Strided
    k: Strided
    v: Strided
    lengths: np.ndarray
    smooth: bool
    unit: float


class Quantized(NamedTuple):
    """What the INT8 kernel works on, of N query heads and Nkv KV heads.

    q : (N, L, D) int8;  q_scale, cq : (N, L) float32, the scales, and these times `Source.unit`
    keys, values : as packed;  first : of every sequence;  v_scale : (Nkv, Dv) float32;  offset : (Nkv, D) float32, the mean of
        K or zeros
    """

    q: np.ndarray
    q_scale: np.ndarray
    cq: np.ndarray
    keys: PackedKeys
    values: np.ndarray
    first: FirstKeys
    v_scale: np.ndarray
    offset: np.ndarray


class Found(NamedTuple):
    """Channel sums of K and channel peaks of V (as bits) of every chunk of some KV heads.

    And the largest magnitude and scales of all. `take_part` makes one head's of it, without the first axis.
    """

    sums: np.ndarray  # (heads, chunks, D) float32
    peaks: np.ndarray  # (heads, chunks, Dv) int32
    top: np.ndarray  # (heads, chunks, 3) int32: of V, of K without its mean, of Q
    scales: np.ndarray  # (heads, chunks, 2) float32: of Q, of K


class Run(NamedTuple):
    """Parts of KV heads, numbered from the first head's on, and where their results go."""

    first: int
    stop: int
    parts: int  # of a head, whole chunks
    before: int  # heads before the first one of `Found`
    slot: int  # of its packed keys and values


class Room(NamedTuple):
    """What a task needs besides."""

    scales: np.ndarray  # float32, of the rows of a panel of keys, or TOGETHER queries
    factors: np.ndarray  # float32, of the same rows
    zero: np.ndarray  # (max(D, Dv),) float32, zeros: what is taken off Q
    mean: np.ndarray  # (D,) float32
    v_factor: np.ndarray  # (Dv,) float32
    fine_factor: np.ndarray  # (Dv,) float32, these times FINER
    panel: np.ndarray  # int32, the rows of a panel of keys
    block: np.ndarray  # int8, the rows of a block of values
    first: np.ndarray  # (FIRST_KEYS, Dv) int16, the first values in 1 / FINER of their steps


@bare
def largest_of(x):
    top = I(0)
    for e in range(x.size):
        top = max(top, x[e])
    return top


@bare
def take_mean(sums, count, mean):
    """mean = the sums of all chunks / count."""
    number, first = F(max(count, 1)), sums[0]
    if sums.shape[0] == 1:  # a loop that LLVM makes vectors of
        for e in range(mean.size):
            mean[e] = first[e] / number
        return
    for e in range(mean.size):
        total = 0.0
        for c in range(sums.shape[0]):
            total += sums[c, e]
        mean[e] = F(F(total) / number)


@bare
def channel_scales(peaks, scale, factor):
    """scale = peak / 127 and factor = 127 / peak of every channel, 1 and 0 for a channel of zeros."""
    bits, first = reinterpret(factor, I), peaks[0]
    for e in range(scale.size):
        bits[e] = first[e]
    for c in range(1, peaks.shape[0]):
        chunk = peaks[c]
        for e in range(scale.size):
            bits[e] = max(bits[e], chunk[e])
    for e in range(scale.size):
        peak = factor[e]
        usable = peak > NO_SCALE
        scale[e] = peak / F(127) if usable else F(1)
        factor[e] = F(127) / peak if usable else F(0)


@bare
def chunks_of(source, to):
    """Of CHUNK rows each, of all queries or keys of a head."""
    return (max(to.keys.start.shape[1], source.q.length) + CHUNK - 1) // CHUNK


@bare
def largest_found(heads, found):
    """The largest magnitude, as bits, and the largest scales of Q and of K of the first so many heads."""
    top, q_scale, k_scale = I(0), F(0), F(0)
    for n in range(heads):
        scales = found.scales[n]
        for c in range(scales.shape[0]):
            top = max(top, largest_of(found.top[n, c]))
            q_scale, k_scale = max(q_scale, scales[c, 0]), max(k_scale, scales[c, 1])
    return top, q_scale, k_scale


@functools.cache
def query_rows(kind: str):
    """f(x, n, first, stop, unit, to, room) -> (largest magnitude as bits, largest scale).

    Rows first to stop - 1 of query head n; `to.cq` becomes the scales times `unit`.
    """
    scales = row_scales(kind)
    to_int8 = quantize_rows(kind, False)
    size = 4 if kind == "float32" else 2

    @bare
    def run(x, n, first, stop, unit, to, room):
        top, largest, d = I(0), F(0), x.d
        zero, row_bytes = address(room.zero), d * size
        for i in range(first, stop, TOGETHER):
            count, here = min(TOGETHER, stop - i), row_at(x, n, i)
            for r in range(0, count, ROWS):
                # read for the first time, by eights
                ask_for_rows(x, n, i + r + AHEAD, ROWS, row_bytes)
                found = scales(
                    here + r * x.row, x.row, min(ROWS, count - r), d, zero,
                    address(room.scales) + 4 * r, address(room.factors) + 4 * r,
                )  # fmt: skip
                top = max(top, found)
            out = address(to.q) + (n * x.length + i) * d
            for r in range(0, count, ROWS):
                to_int8(
                    here + r * x.row, x.row, min(ROWS, count - r), d, zero,
                    address(room.factors) + 4 * r, out + r * d, d,
                )  # fmt: skip
            for r in range(count):
                scale = room.scales[r]
                to.q_scale[n, i + r], to.cq[n, i + r] = scale, F(scale * unit)
                largest = max(largest, scale)
        return top, largest

    return run


@functools.cache
def key_panels(isa_name: str, kind: str):
    """f(x, n, first, stop, length, keys, slot, room) -> (largest magnitude as bits, largest scale): keys
    first .. stop of head n to the slot of `keys`, their mean taken off.

    Those from `length` on are zeros.
    """
    isa = VECTOR_ISAS[isa_name]
    lanes = running_lanes(isa_name)
    panel = isa.nv * lanes
    group = isa.group
    column_of = np.argsort(isa.key_order(lanes))  # the column of each key of a panel
    scales = row_scales(kind)
    to_operand = quantize_rows(kind, False, 32 // group)
    pack_panel = panel_packer(isa_name, lanes)

    @bare
    def run(x, n, first, stop, length, keys, slot, room):
        words = room.panel.size // panel
        top, largest = I(0), F(0)
        for p in range(first, stop, panel):
            real = max(0, min(panel, length - p))
            if real < panel:
                room.panel[:] = I(0)
            here, mean = row_at(x, n, p), address(room.mean)
            for c in range(0, real, ROWS):
                found = scales(
                    here + c * x.row, x.row, min(ROWS, real - c), x.d, mean,
                    address(room.scales) + 4 * c, address(room.factors) + 4 * c,
                )  # fmt: skip
                top = max(top, found)
            for c in range(0, real, ROWS):
                to_operand(
                    here + c * x.row, x.row, min(ROWS, real - c), x.d, mean,
                    address(room.factors) + 4 * c, address(room.panel) + c * words * 4, words * 4,
                )  # fmt: skip
            for c in range(real):
                keys.scale[slot, p + column_of[c]] = room.scales[c]
                largest = max(largest, room.scales[c])
            for c in range(real, panel):
                keys.scale[slot, p + column_of[c]] = F(1) if p + c < x.length else F(0)
            pack_panel(room.panel, 0, words, keys.data, keys.start, slot, p)
        return top, largest

    return run


@functools.cache
def finer_rows(kind: str):
    """f(k, v, n, length, first, slot, room): the first keys of head n and their values to the slot of `first`.

    The mean of K and the factors of V are in `room`; rows from `length` on are zeros.
    """
    scales = row_scales(kind)
    to_keys, to_values = (quantize_rows(kind, by_channel, 16) for by_channel in (False, True))
    fine, step = F(FINER), F(1 / FINER)

    @bare
    def run(k, v, n, length, first, slot, room):
        keys, values, scale = first.keys[slot], first.values[slot], first.scale[slot]
        keys[:], values[:] = np.int16(0), F(0)
        count, mean, factors = min(FIRST_KEYS, length), address(room.mean), address(room.factors)
        for j in range(FIRST_KEYS):
            scale[j] = step if j < k.length else F(0)
        if count == 0:
            return
        here = row_at(k, n, 0)
        scales(here, k.row, count, k.d, mean, address(room.scales), factors)
        for j in range(count):
            scale[j] = room.scales[j] * step
        for r in range(ROWS):  # rows from `count` on are the last one again
            room.factors[r] = room.factors[r] * fine
        to_keys(here, k.row, count, k.d, mean, factors, address(keys), 2 * k.d)
        for t in range(v.d):
            room.fine_factor[t] = room.v_factor[t] * fine
        factors, out = address(room.fine_factor), address(room.first)
        to_values(row_at(v, n, 0), v.row, count, v.d, mean, factors, out, 2 * v.d)
        for j in range(count):
            for t in range(v.d):
                values[j, t] = F(room.first[j, t]) * step

    return run


@functools.cache
def make_quantize(isa_name: str, kind: str, form: str):
    """What quantises for one instruction set: (all heads, some heads, what these need).

    quantize(source, workers, to) -> (largest magnitude as bits, largest scale of Q, of K): all heads, on
        so many threads
    quantize_heads(first, stop, slot, source, to, needs) -> the same: KV heads `first` to stop - 1 and their
        query heads, by the thread that calls, packed from a slot on
    heads_need(heads, source, to) : memory for so many, (Found, Room)

    kind : "float32" or "bfloat16", what the rows of Q, K and V hold
    form : `value_form`; where the values stay floats, their scales are 1, and no first keys are
        written
    """
    isa = VECTOR_ISAS[isa_name]
    lanes = running_lanes(isa_name)
    panel = isa.nv * lanes
    group = isa.group
    step = isa.step
    sums = down_channels(kind, False)
    peaks = down_channels(kind, True)
    queries = query_rows(kind)
    keys = key_panels(isa_name, kind)
    floats = form != "integers"
    values = float_blocks(kind, form) if floats else value_blocks(isa_name, kind)
    first_rows = finer_rows(kind)

    @bare
    def look(n, c, length, source, found):
        """Statistics of chunk c of KV head n."""
        k, v, first = source.k, source.v, c * CHUNK
        count = max(0, min(CHUNK, length - first))
        if source.smooth:
            sums(row_at(k, n, first), k.row, count, k.d, address(found.sums[c]))
        channels = found.peaks[c]
        peaks(row_at(v, n, first), v.row, count, v.d, address(channels))
        found.top[c, 0] = largest_of(channels)

    @bare
    def finish_statistics(n, length, source, to, found, room):
        """Mean and channel scales of KV head n."""
        if source.smooth:
            take_mean(found.sums, length, room.mean)
        if floats:
            to.v_scale[n, :] = F(1)
        else:
            channel_scales(found.peaks, to.v_scale[n], room.v_factor)
        for e in range(room.mean.size):
            to.offset[n, e] = room.mean[e]

    @bare
    def write(n, slot, c, length, source, to, found, room):
        """Operands of chunk c of KV head n, and of the query heads that it serves."""
        first = c * CHUNK
        stop = min(first + CHUNK, to.keys.start.shape[1])
        bits, found.scales[c, 1] = keys(source.k, n, first, stop, length, to.keys, slot, room)
        found.top[c, 1] = bits
        values(source.v, n, first, stop, length, to.values, slot, room)
        if c == 0 and not floats:
            first_rows(source.k, source.v, n, length, to.first, slot, room)
        top, largest, serves = I(0), F(0), source.q.heads // source.k.heads
        stop = min(first + CHUNK, source.q.length)
        for g in range(n * serves, (n + 1) * serves):
            bits, scale = queries(source.q, g, first, stop, source.unit, to, room)
            top, largest = max(top, bits), max(largest, scale)
        found.top[c, 2], found.scales[c, 0] = top, largest

    @bare
    def take_part(n, place, slot, part, parts, steps, source, to, found, room):
        """Statistics, operands, or both, of one of the parts of KV head n; its place in `found`."""
        sums, peaks, top, scales = found
        own = Found(sums[place], peaks[place], top[place], scales[place])
        length = source.lengths[n // source.k.heads]
        share = own.sums.shape[0] // parts
        if steps[0]:
            for c in range(part * share, (part + 1) * share):
                look(n, c, length, source, own)
        if steps[1]:
            finish_statistics(n, length, source, to, own, room)
            for c in range(part * share, (part + 1) * share):
                write(n, slot, c, length, source, to, own, room)

    @separate(_nrt=False)
    def take_parts(run, steps, source, to, found, room):
        """Of a `Run`, one part after the other; steps : (take statistics, write operands)."""
        for i in range(run.first, run.stop):
            n, part = i // run.parts, i % run.parts
            place = n - run.before
            take_part(n, place, run.slot + place, part, run.parts, steps, source, to, found, room)

    @inline
    def new_room(source, to):
        d, dv = source.k.d, source.v.d
        columns = to.values.shape[1] // to.keys.start.shape[1]
        words = panel * ((d + step - 1) // step * step // group)
        room = Room(
            *arrays_together(
                (max(panel, TOGETHER),), F, "scales of rows",
                (max(panel, TOGETHER),), F, "factors of rows",
                (max(d, dv),), F, "what is taken off Q",
                (d,), F, "means of K's channels",
                (dv,), F, "factors of V's channels",
                (dv,), F, "finer factors of V's channels",
                (words,), I, "quantised keys",
                (KEY_BLOCK * columns,), np.int8, "quantised values",
                (FIRST_KEYS, dv), np.int16, "first values",
            )
        )  # fmt: skip
        room.zero[:], room.mean[:], room.panel[:], room.block[:] = F(0), F(0), I(0), np.int8(0)
        return room

    @inline
    def new_found(heads, source, to):
        chunks = chunks_of(source, to)
        return Found(
            *arrays_together(
                (heads, chunks, source.k.d), F, "sums of K's channels",
                (heads, chunks, source.v.d), I, "peaks of V's channels",
                (heads, chunks, 3), I, "largest bits",
                (heads, chunks, 2), F, "largest scales",
            )
        )  # fmt: skip

    @inline
    def heads_need(heads, source, to):
        return new_found(heads, source, to), new_room(source, to)

    @bare
    def quantize_heads(first, stop, slot, source, to, needs):
        found, room = needs
        take_parts(Run(first, stop, 1, first, slot), (True, True), source, to, found, room)
        return largest_found(stop - first, found)

    @inline
    def task(number, tasks, steps, parts, source, to, found):
        """Task `number` of `tasks`: an equal share of all parts, with one set of buffers."""
        count = found.sums.shape[0] * parts
        run = Run(number * count // tasks, (number + 1) * count // tasks, parts, 0, 0)
        take_parts(run, steps, source, to, found, new_room(source, to))

    @separate
    def quantize(source, workers, to):
        heads, chunks = to.keys.start.shape[0], chunks_of(source, to)
        found = new_found(heads, source, to)
        whole_heads = heads % workers == 0 or heads >= EVEN * workers
        parts = 1 if whole_heads else chunks
        tasks = min(workers, heads * parts)
        for n in range(1 if whole_heads else 2):
            steps = (n == 0, n == 1 or whole_heads)
            over_tasks(task, tasks, (tasks, steps, parts, source, to, found))
        return largest_found(heads, found)

    return quantize, quantize_heads, heads_need
