"""The float kernels of every instruction set here against the float64 oracle, within twice the
error of plain low precision.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from daily import between_slow
from numba import njit
from oracles import TAILS, draw, qkv

from numflash import reference, validation
from numflash.cpu import launch_float
from numflash.cpu.floats.float_isas import FLOAT_ISAS
from numflash.cpu.floats.float_packing import MANY_ROWS
from numflash.cpu.floats.float_rows import row_exp
from numflash.errors import ArgumentError, UnsupportedError
from numflash.interop.arrays import convert, widen
from numflash.jit import guard, target
from numflash.jit.memory import LINE
from numflash.jit.scratch import scratch
from numflash.validation.options import Options

F = np.float32
FLOATS = target.available(target.FLOAT_ISAS)
CASES = [("float32", isa) for isa in FLOATS] + [("float16", FLOATS[0]), ("bfloat16", FLOATS[0])]
CASES += [("bfloat16", isa) for isa in target.available(target.BFLOAT16_ISAS) if isa not in FLOATS]
BETWEEN = [("float32", isa) for isa in FLOATS[1:-1]]  # the widest vectors and plain loops
every_kernel = pytest.mark.parametrize(
    ("precision", "isa"),
    [pytest.param(*x, marks=pytest.mark.slow if x in BETWEEN else ()) for x in CASES],
)
ULP = {"float32": 2.0**-23, "float16": 2.0**-23, "bfloat16": 2.0**-8}


def make(query, key, value, precision="float32", attn_mask=None, **options):
    with np.errstate(invalid="ignore", over="ignore"):
        return validation.problem(
            query, key, value, Options(attn_mask, enable_gqa=True, precision=precision, **options)
        )


def plain(problem):
    """Attention written out in the problem's own precision.

    Float32 scores and sums, weights in the type of the operands.
    """
    nb, nh, nkv, length, s, _, dv = problem.shape
    q, k, v = (np.asarray(widen(x), F) for x in (problem.query, problem.key, problem.value))
    k, v = (np.repeat(x, nh // nkv, 1) for x in (k, v))
    scores = np.einsum("bhld,bhsd->bhls", q, k, dtype=F) * F(problem.scale)
    if problem.softcap:
        scores = F(problem.softcap) * np.tanh(scores / F(problem.softcap))
    if problem.alibi_slopes is not None:
        i = np.arange(length)[:, None] + problem.diagonal[:, None, None, None]
        j = np.arange(s)
        scores = scores - problem.alibi_slopes[:, :, None, None].astype(F) * np.abs(i - j).astype(F)
    if problem.bias is not None:
        scores = scores + problem.bias
    seen = np.stack(
        [np.stack([reference.visible(problem, b, h) for h in range(nh)]) for b in range(nb)]
    )
    scores = np.where(seen, scores, F(-np.inf))
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - np.where(np.isinf(top), F(0), top))
    l = p.sum(-1, keepdims=True)
    if problem.precision == "bfloat16":
        p = widen(convert(p, "bfloat16"))
    return np.where(
        l > 0, np.einsum("bhls,bhsd->bhld", p, v, dtype=F) / np.where(l > 0, l, F(1)), F(0)
    )


def largest_sum(problem):
    """No partial sum of q . k * scale is larger: |q| |k| of the finite rows."""
    norms = (
        np.sqrt(np.square(widen(x).astype(np.float64)).sum(-1))
        for x in (problem.query, problem.key)
    )
    return abs(problem.scale) * np.prod(
        [np.where(np.isfinite(x), x, 0).max(initial=0) for x in norms]
    )


def agrees(problem, isa, budget=2.0):
    out, lse = launch_float.run(problem, isa)
    want, want_lse = reference.oracle(replace(problem, sinks=None))
    assert out.dtype == lse.dtype == F
    empty = np.isinf(want_lse)
    # one rounding of a score of this size, or of the sums that lead to it, is a relative error of
    # p; a tanh rounds like its cap
    scores = max(np.abs(want_lse[~empty]).max(initial=0), largest_sum(problem), problem.softcap)
    allowed = budget * np.abs(plain(problem) - want).max()
    allowed += (4 * ULP[problem.precision] + 2.0**-23 * scores) * max(1.0, np.abs(want).max())
    assert np.abs(out - want).max() <= allowed
    assert np.array_equal(lse[empty], want_lse[empty])
    assert np.abs(lse[~empty] - want_lse[~empty]).max(initial=0) <= 2e-6 * max(
        1.0, np.abs(want_lse[~empty]).max(initial=0)
    )
    return out, lse


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_around_every_block_edge(precision, isa, causal):
    for length, s in [*TAILS, (300, 130), (97, 513)]:
        for alignment in ("upper_left", "lower_right"):
            agrees(
                make(
                    *qkv(h=2, l=length, s=s, d=24), precision, is_causal=causal, alignment=alignment
                ),
                isa,
            )


@every_kernel
def test_head_dims_and_groups_of_heads(precision, isa):
    for d, dv in [
        (1, 1),
        (2, 3),
        (7, 16),
        (16, 5),
        (40, 40),
        (64, 80),
        (72, 72),
        (96, 112),
        (100, 33),
        (128, 128),
        (256, 256),
        (576, 512),
        (80, 1),
    ]:
        agrees(
            make(
                *qkv(b=2, h=4, hkv=1 if d % 3 else 2, l=20, s=75, d=d, dv=dv),
                precision,
                is_causal=True,
            ),
            isa,
        )


SHAPES = [
    (1, 1, 70, 300),
    (2, 3, 70, 300),
    (2, 1, 1, 300),
    (70, 300),
    (300,),
    (2, 1, 70, 1),
    (1, 3, 70, 1),
]


@every_kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_masks_of_every_shape_that_broadcasts(precision, isa, shape):
    operands = qkv(b=2, h=3, l=70, s=300, d=16)
    seen = np.random.default_rng(5).random(shape) < 0.4
    agrees(make(*operands, precision, seen), isa)
    agrees(make(*operands, precision, np.where(seen, draw(shape), F(-np.inf)), is_causal=True), isa)
    blocks = seen.copy()
    blocks[..., 64:256] = False
    blocks[..., :3] &= seen[..., :3]
    agrees(make(*operands, precision, blocks), isa)


@every_kernel
def test_a_row_that_sees_nothing_is_zero(precision, isa):
    q, k, v = qkv(l=40, s=90, d=16)
    mask = np.ones((40, 90), bool)
    mask[7] = mask[21] = False
    for dense in (mask, np.where(mask, F(0), F(-np.inf))):
        out, lse = agrees(make(q, k, v, precision, dense), isa)
        assert not out[:, :, [7, 21]].any() and (lse[:, :, [7, 21]] == -np.inf).all()
    out, lse = agrees(
        make(q, k[:, :, :10], v[:, :, :10], precision, is_causal=True, alignment="lower_right"), isa
    )
    assert not out[:, :, :30].any() and (lse[:, :, :30] == -np.inf).all()


@every_kernel
def test_what_is_hidden_never_leaks(precision, isa):
    """NaN and infinity in keys and values that a row does not see, for every way of hiding them."""
    q, k, v = qkv(l=200, s=200, d=16)
    mask = np.random.default_rng(1).random((200, 200)) < 0.7
    mask[:, [3, 130]] = False
    ways = [
        {"attn_mask": mask},
        {"attn_mask": np.where(mask, F(0), F(-np.inf))},
        {"key_lengths": np.array([3])},
        {"is_causal": True},
        {"window": (2, 1)},
    ]
    for bad in (np.nan, np.inf, -np.inf, 3e38):
        for way in ways:
            dirty_k = k.copy()
            dirty_v = v.copy()
            dirty_k[:, :, [3, 130]], dirty_v[:, :, [3, 130]] = bad, bad
            problem = make(q, dirty_k, dirty_v, precision, **way)
            seen = reference.visible(problem, 0, 0)
            if problem.bias is not None:
                seen &= problem.bias[0, 0] == 0
            blind = ~(seen[:, [3, 130]].any(1))
            out, lse = launch_float.run(problem, isa)
            clean, clean_lse = launch_float.run(make(q, k, v, precision, **way), isa)
            assert (
                blind.any()
                and np.abs(out[:, :, blind] - clean[:, :, blind]).max() <= 8 * ULP[precision]
            )
            assert np.allclose(lse[:, :, blind], clean_lse[:, :, blind], atol=1e-5)
            if np.isnan(bad):
                assert np.isnan(out[:, :, ~blind]).all()


@every_kernel
def test_finite_inputs_never_give_nan(precision, isa):
    largest = {"float32": 3e38, "float16": 6e4, "bfloat16": 3e38}[precision]
    q, k, v = qkv(l=30, s=140, d=16)
    for factor in (1e4, 1e18, 1e25, largest):
        big = min(factor, largest)
        with np.errstate(over="ignore"):
            for operands in [
                (q * big, k, v),
                (q, k * big, v),
                (q * big, k * big, v),
                (q, k, np.sign(v) * big),
                (np.sign(q) * big, np.sign(k) * big, np.sign(v) * big),
            ]:
                operands = [np.clip(x, -largest, largest).astype(F) for x in operands]
                for options in (
                    {},
                    {"is_causal": True},
                    {"softcap": 30.0},
                    {"scale": 1e30},
                    {"scale": 1e-30},
                ):
                    out, lse = launch_float.run(make(*operands, precision, **options), isa)
                    assert not np.isnan(out).any() and not np.isnan(lse).any(), (factor, options)
    for bias in (np.finfo(F).min, -1e30, np.finfo(F).max):
        row = np.full((30, 140), bias, F)
        agrees(make(q, k, v, precision, row), isa, budget=4) if bias < 0 else None
        assert not np.isnan(launch_float.run(make(q, k, v, precision, row), isa)[0]).any()


@every_kernel
@pytest.mark.parametrize("place", [0, 140])
def test_a_score_whose_partial_sum_leaves_float32(precision, isa, place):
    """-4e38 + 4e38 is -inf in float32, which hides the key without a NaN."""
    size = 1e4 if precision == "float16" else 2e19
    q, k, v = qkv(h=1, l=7, s=150, d=16)
    k[...] = 0
    q[..., :2], k[:, :, place, :2] = size, (-size, size)
    problem = make(q, k, v, precision)
    assert np.abs(launch_float.run(problem, isa)[0] - reference.oracle(problem)[0]).max() < 1e-3


@every_kernel
def test_equal_bits_at_every_thread_count_and_run(precision, isa):
    import numba

    problem = make(*qkv(b=2, h=3, l=130, s=130, d=16), precision, is_causal=True)
    first = launch_float.run(problem, isa)
    for threads in (1, numba.config.NUMBA_NUM_THREADS):
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        again = launch_float.run(problem, isa)
        numba.set_num_threads(before)
        assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True))


def by_token(x):
    """The array with the rows of all heads beside each other."""
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def test_strides_of_every_kind():
    q, k, v = qkv(b=2, h=3, l=50, s=60, d=24)
    want, _ = launch_float.run(make(q, k, v))

    def twisted(x):
        wide = np.zeros((*x.shape[:3], 2 * x.shape[3]), F)
        wide[..., ::2] = x
        return wide[..., ::2]

    for change in (
        lambda x: np.asfortranarray(x),
        twisted,
        lambda x: np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1],
        by_token,
    ):
        assert np.array_equal(launch_float.run(make(change(q), change(k), change(v)))[0], want)


def at_byte(x, offset):
    """The array `offset` bytes after a cache line."""
    room = np.zeros(x.nbytes + 2 * LINE, np.uint8)
    start = -room.ctypes.data % LINE + offset
    placed = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    placed[...] = x
    return placed


@pytest.mark.parametrize("rows", [6, MANY_ROWS])
def test_values_in_place_and_packed_give_equal_bits(rows):
    """In place where they are one block that begins at a cache line, or anywhere for few queries."""
    q, k, v = qkv(b=2, h=2, l=rows, s=130, d=64)
    want, _ = launch_float.run(make(q, k, by_token(v)))
    by_batch, by_head = np.zeros((2, 3, 130, 64), F), np.zeros((2, 2, 140, 64), F)
    by_batch[:, :2], by_head[:, :, :130] = v, v
    for given in (at_byte(v, 0), at_byte(v, 4), by_batch[:, :2], by_head[:, :, :130]):
        assert np.array_equal(launch_float.run(make(q, k, given))[0], want)


@pytest.mark.skipif(guard.ON, reason="no memory is kept")
def test_only_packed_values_take_scratch_memory():
    q, k, v = qkv(h=2, l=6, s=130, d=64)

    def taken(value):
        launch_float.run(make(q, k, value))
        return scratch.room.nbytes

    def in_a_new_thread(value):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(taken, value).result()

    in_place, packed = in_a_new_thread(v), in_a_new_thread(by_token(v))
    assert k.nbytes <= in_place < k.nbytes + v.nbytes <= in_place + v.nbytes <= packed


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_heads_that_workers_pack_themselves(precision, heads):
    """Equal numbers of heads of one length are packed by the workers, others by all threads before.

    With two threads these are one batch of one or three heads, and two lengths.
    """
    q, k, v = qkv(b=2, h=2 * heads, hkv=heads, l=140, s=400, d=40)
    apart = [
        launch_float.run(make(q[:, 2 * h : 2 * h + 2], k[:, [h]], v[:, [h]], precision))
        for h in range(heads)
    ]
    want = [np.concatenate(x, 1) for x in zip(*apart, strict=True)]
    for _ in range(8):  # that two workers take both halves at once is up to the threads
        got = launch_float.run(make(q, k, v, precision))
        assert all(np.array_equal(x, y) for x, y in zip(got, want, strict=True))
    got = launch_float.run(make(q[:1], k[:1], v[:1], precision))
    assert all(np.array_equal(x, y[:1]) for x, y in zip(got, want, strict=True))
    got = launch_float.run(make(q, k, v, precision, key_lengths=[400, 33]))
    for b, length in enumerate((400, 33)):
        alone = q[[b]], k[[b], :, :length], v[[b], :, :length]
        want = launch_float.run(make(*alone, precision))
        assert all(np.array_equal(x[[b]], y) for x, y in zip(got, want, strict=True))


def test_bfloat16_rows_that_begin_within_words():
    """Packing reads two numbers at a time: such rows are copied before."""
    bits = [convert(x, "bfloat16") for x in qkv(b=1, h=2, l=50, s=60, d=40)]
    split = [np.pad(x, ((0, 0), (0, 0), (0, 0), (1, 0)))[..., 1:] for x in bits]
    (want, _), (got, _) = (launch_float.run(make(*x, "bfloat16")) for x in (bits, split))
    assert split[1].strides[2] % 4 and np.array_equal(got, want)


def test_an_instruction_set_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"isa.*mmx"):
        launch_float.run(make(*qkv()), "mmx")
    lacking = next(isa for isa in target.FLOAT_ISAS if target.missing(isa, target.FLOAT_ISAS))
    with pytest.raises(UnsupportedError, match=f"isa.*{lacking}"):
        launch_float.run(make(*qkv()), lacking)


@pytest.mark.parametrize("isa", [x for x in FLOATS if x in FLOAT_ISAS])
def test_weights_too_faint_for_normal_sums_are_zero(isa):
    """A product with a value down to 2**-14 is a normal number."""
    lanes = FLOAT_ISAS[isa].lanes
    row = row_exp(isa)
    x = np.linspace(-160, 0, 1600, dtype=F)
    x[:2] = -np.inf, np.nan
    p, l = np.empty_like(x), np.zeros(lanes, F)

    @njit
    def weigh(x, p, l):
        row(x, 0, x.size // lanes, F(0), p, 0, l, 0)

    weigh(x, p, l)
    assert np.isnan(p[1])
    assert p[0] == 0
    p, x = p[2:], x[2:]
    assert not p[x < -113].any()
    assert not ((p > 0) & (p < 2.0**-113)).any()
    kept = x > -111
    assert np.abs(p[kept] / np.exp2(x[kept].astype(np.float64)) - 1).max() < 2e-7


@pytest.mark.parametrize("isa", between_slow(FLOATS))
def test_steep_slopes(isa):
    """Every block is up to 200 octaves above the one before, and so is every row's last key."""
    for slope in (0.5, 0.7, 1.1):
        agrees(make(*qkv(h=1, l=40, s=700, d=16), alibi_slopes=np.full(1, slope)), isa)
