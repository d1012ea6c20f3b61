"""The one-pass quantiser against the general way: `quantize_problem`, then packing.

All operands are compared for equality.
"""

import functools
import itertools

import numba
import numpy as np
import pytest
from oracles import draw, qkv

import numflash
from numflash import reference, tiling
from numflash.cpu import general_int8, head_shares, launch_int8
from numflash.cpu.int8 import by_head, call, flash_int8, quantize_rows
from numflash.cpu.isa.isas import VECTOR_ISAS
from numflash.jit import guard, scratch, target, threads
from numflash.numerics.fixedpoint import FLOAT_VALUES
from numflash.numerics.quantization import quantize_problem
from numflash.validation import problem
from numflash.validation.options import Options

ISAS = [isa for isa in target.available() if isa in VECTOR_ISAS]


@pytest.fixture(autouse=True)
def _threads_for_little_work(monkeypatch):
    monkeypatch.setitem(tiling.threads.THREAD_WORK, "int8", 1)


SHAPES = {
    "whole tiles": {"h": 4, "l": 128, "s": 128, "d": 64},
    "tails": {"h": 2, "l": 33, "s": 257, "d": 17, "dv": 130},
    "chunks": {"h": 3, "l": 1100, "s": 2100, "d": 80, "dv": 33},
    "grouped heads": {"h": 6, "hkv": 2, "l": 50, "s": 140, "d": 100, "dv": 72},
    "one row": {"h": 1, "l": 1, "s": 1, "d": 16},
}


def operands(x):
    """The arrays of `arguments.Operands`, by name."""
    keys = {f"keys.{name}": a for name, a in x.keys._asdict().items()}
    return {"q": x.q, "cq": x.cq, "values": x.values, "v_scale": x.v_scale, **keys}


def last_heads(p, isa):
    """The KV heads whose packed keys and values a plan leaves in scratch memory: those of the last run where one
    worker takes some heads at a time, none for several workers.
    """
    nb, nh, nkv, length = p.shape[:4]
    heads, workers = nb * nkv, threads.count()
    lengths = np.full(nb, p.shape[4]) if p.key_lengths is None else p.key_lengths
    least = head_shares.least_heads(isa)
    if not head_shares.heads_are_shared_out.py_func(heads, workers, lengths, least):
        return slice(0, heads)
    tiles = nh // nkv * -(-length // flash_int8.query_rows(isa, p.pv))
    together = head_shares.heads_together.py_func(heads, workers, tiles, by_head.ENOUGH_TILES)
    return slice((heads - 1) // together * together, heads) if workers == 1 else slice(0, 0)


# what a plan leaves in its scratch memory, by the names of `call.Numbers`
PLACES = {
    "q": "q",
    "cq": "scores_scale",
    "values": "packed_values",
    "keys.data": "packed_keys",
    "keys.start": "starts",
    "keys.scale": "key_scale",
    "keys.wide": "wide",
    "v_scale": "value_scale",
}


def check(p, isa):
    """The bits of both ways on as many threads as are allowed now.

    `p.pv` with float values: padding is zeros where the general way copies it.
    """
    if guard.ON:
        pytest.skip("reads one block of scratch memory; guard gives each array its own")
    plan, general = launch_int8.Int8Plan(p, isa), quantize_problem(p)
    packed, _ = general_int8.from_integers(general, isa)
    room = scratch.Room(plan.layout.nbytes)
    room.array[:] = 0xFF
    out = np.empty((*p.shape[:2], p.shape[3], p.shape[6]), np.float32)
    lse = np.empty(out.shape[:3], np.float32)
    scratch.scratch.give(room)
    plan.run(*plan.operands(p.query, p.key, p.value), out, lse)
    assert scratch.scratch.room is room
    at = call.Numbers(*plan.numbers[: call.NUMBERS].tolist())
    for name, x in operands(packed).items():
        place = room.address + getattr(at, PLACES[name])
        if name.startswith(("keys", "values")):
            x = x[last_heads(p, isa)]
        got = launch_int8.at_address(place, x.shape, x.dtype.str)
        np.testing.assert_array_equal(got, x, err_msg=name)
    want, want_lse = reference.integer_model(general)
    if p.pv in FLOAT_VALUES:  # the kernel's order of sums, on the general way's operands
        want, _ = launch_int8.run(general, isa)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)


def general_only(monkeypatch, p):
    """Out and lse of a plan that must go the general way."""
    ways = []
    general = launch_int8.run_general
    monkeypatch.setattr(launch_int8, "run_general", lambda *a: ways.append(a) or general(*a))
    found = launch_int8.run(p, ISAS[0])
    assert len(ways) == 1
    return found


@pytest.mark.parametrize(
    "isa", [*ISAS[:1], *(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[1:])]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_operands_are_those_of_the_general_way(isa, shape):
    arrays = list(qkv(**SHAPES[shape]))
    arrays[0][0, 0, 0] = 0  # nothing in a query, a key and a channel
    arrays[1][0, 0, -1] = 0
    arrays[2][..., 3] = 0
    check(problem(*arrays, Options(enable_gqa=True, precision="int8")), isa)


@pytest.mark.parametrize("pv", ["int8", pytest.param("bf16", marks=pytest.mark.slow), "fp32"])
def test_threads_change_no_bit(pv):
    """Whole heads on one thread; chunks of rows on two, which three heads do not share evenly."""
    arrays = qkv(**SHAPES["chunks"])
    for most in {1, min(2, numba.config.NUMBA_NUM_THREADS)}:
        with threads.limit(most):
            check(problem(*arrays, Options(precision="int8", pv=pv)), ISAS[0])


# (B, H, Hkv, L, key lengths): heads one by one and several at a time, shared out evenly or not, of one length or not
HEADS = [
    (1, 24, 12, 20, None),
    (2, 5, 5, 300, None),
    (4, 8, 4, 40, [70, 1, 0, 33]),
    (2, 2, 1, 520, [50, 70]),
    (3, 1, 1, 33, None),
]


@pytest.mark.parametrize(("b", "h", "hkv", "length", "lengths"), HEADS)
def test_heads_are_shared_out(b, h, hkv, length, lengths):
    """Every worker quantises the heads that it attends to, or all come first."""
    arrays = qkv(b=b, h=h, hkv=hkv, l=length, s=70, d=32)
    asked = {"enable_gqa": True, "key_lengths": lengths}
    ready = numflash.quantize_qkv(*arrays)
    for attend, operands in (
        (functools.partial(numflash.attention, precision="int8"), arrays),
        (numflash.attention_int8, ready),
    ):
        want = attend(*operands, impl="reference", **asked)
        for most in {1, min(2, numba.config.NUMBA_NUM_THREADS)}:
            with threads.limit(most):
                np.testing.assert_array_equal(attend(*operands, **asked), want)


def test_which_heads_are_shared_out():
    """Cores of one speed get one head and more, others two and more; where there are many, of any lengths."""
    shared = head_shares.heads_are_shared_out.py_func
    cases = (
        (8, 8, [5]),
        (16, 8, [5]),
        (12, 8, [5]),
        (64, 8, [5, 7]),
        (16, 8, [5, 7]),
        (3, 1, [5, 7]),
    )
    found = {
        isa: [shared(*n, np.array(lengths), head_shares.least_heads(isa)) for *n, lengths in cases]
        for isa in ("amx_int8", "sve", "avx512", "avx2", "avx_vnni", "neon_dot")
    }
    servers, laptops = (
        [True, True, False, True, False, True],
        [False, True, False, True, False, True],
    )
    assert list(found.values()) == 3 * [servers] + 3 * [laptops]


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_runs_of_heads_are_about_equal(workers):
    """As long as there are too few tiles, within a worker's share, which they divide as evenly as they can."""
    for heads, tiles in itertools.product(range(1, 40), (1, 2, 7, 8, 100)):
        together = head_shares.heads_together.py_func(heads, workers, tiles, 8)
        share = -(-heads // workers)
        runs = -(-share // together)
        assert 1 <= together <= share
        assert (together - 1) * tiles < 8
        assert runs * together - share < runs


@pytest.mark.parametrize(("which", "factor"), [(0, 1e17), (1, 1e17), (2, np.inf)])
@pytest.mark.parametrize("head", [0, 11])
@pytest.mark.parametrize("ready", [False, True])
def test_one_head_that_is_not_plain(which, factor, head, ready):
    """Infinity in it, or scores beyond int32, whatever the others hold."""
    arrays = list(qkv(h=12, l=20, s=70, d=32))
    arrays[which][0, head] *= np.float32(factor)
    with np.errstate(invalid="ignore", over="ignore"):
        quantised = numflash.quantize_qkv(*arrays)
        want = numflash.attention_int8(*quantised, impl="reference")
        for most in {1, min(2, numba.config.NUMBA_NUM_THREADS)}:
            with threads.limit(most):
                for _ in range(2):  # the second time by a plan
                    if ready:
                        got = numflash.attention_int8(*quantised)
                    else:
                        got = numflash.attention(*arrays, precision="int8")
                    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("pv", [pytest.param("bf16", marks=pytest.mark.slow), "fp32"])
@pytest.mark.parametrize(
    "isa", [*ISAS[:1], *(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[1:])]
)
def test_float_values_are_those_of_the_general_way(isa, pv):
    """Tails, an odd last key, grouped heads; padding."""
    asked = {"enable_gqa": True, "precision": "int8", "pv": pv}
    for shape in ("tails", "grouped heads", "one row"):
        check(problem(*qkv(**SHAPES[shape]), Options(**asked)), isa)
    q, k, v = qkv(b=2, l=40, s=200, d=32)
    v[0, :, 191:], v[1] = 0, 0  # the general way copies what no row sees
    check(problem(q, k, v, Options(key_lengths=[191, 0], **asked)), isa)


@pytest.mark.slow
@pytest.mark.parametrize("pv", ["bf16", "fp32"])
def test_float_values_of_bfloat16(pv):
    """Rows of bfloat16 apart."""
    import ml_dtypes

    arrays = [x.swapaxes(1, 2).astype(ml_dtypes.bfloat16) for x in qkv(b=2, l=40, s=200, d=32)]
    check(problem(*arrays, Options(precision="int8", pv=pv, layout="blhd")), ISAS[0])


@pytest.mark.parametrize("options", [{"key_lengths": [190, 0]}, {"softcap": 2.0}])
def test_padding_and_softcap(options):
    check(problem(*qkv(b=2, l=40, s=200, d=32), Options(precision="int8", **options)), ISAS[0])


def test_strides_and_bfloat16():
    import ml_dtypes

    arrays = [x.swapaxes(1, 2).copy() for x in qkv(b=2, l=40, s=70, d=32)]
    check(problem(*arrays, Options(precision="int8", layout="blhd")), ISAS[0])
    short = [x.astype(ml_dtypes.bfloat16) for x in arrays]
    check(problem(*short, Options(precision="int8", layout="blhd")), ISAS[0])


@pytest.mark.parametrize("value", [np.nan, 3e38])
def test_float_values_that_are_not_plain_go_the_general_way(value, monkeypatch):
    arrays = qkv(l=20, s=150, d=32)
    arrays[2][0, 1, 7, 5] = value
    p = problem(*arrays, Options(precision="int8", pv="fp32"))
    out, _ = general_only(monkeypatch, p)
    np.testing.assert_allclose(
        out, reference.integer_model(quantize_problem(p))[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_plain_goes_the_general_way(which, value, monkeypatch):
    arrays = qkv(l=20, s=150, d=32)
    arrays[which][0, 1, 7, 5] = value
    p = problem(*arrays, Options(precision="int8", return_lse=True))
    out, lse = general_only(monkeypatch, p)
    want, want_lse = reference.integer_model(quantize_problem(p))
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)


def test_padding_may_hold_anything():
    arrays = qkv(b=2, l=20, s=150, d=32)
    for x in arrays[1:]:
        x[:, :, 140:] = np.nan
    check(problem(*arrays, Options(precision="int8", key_lengths=[140, 3])), ISAS[0])


@pytest.mark.parametrize("d", [3, 16])
def test_attention_of_floats_is_attention_of_its_operands(d):
    arrays = qkv(l=70, s=200, d=d)
    got = numflash.attention(*arrays, precision="int8", is_causal=True)
    want = numflash.attention_int8(*numflash.quantize_qkv(*arrays), is_causal=True)
    np.testing.assert_array_equal(got, want)
    assert quantize_rows.LANES == 16


@pytest.mark.parametrize(
    ("scale", "powers"),
    [
        (1e29, (80, 80, 80)),
        (1e24, (20, -98, 0)),  # only the query's scale times the scores' unit is too large
    ],
)
def test_a_scale_without_bound_goes_the_general_way(scale, powers, monkeypatch):
    arrays = [draw((1, 1, 5, 16), n) * np.float32(2.0**power) for n, power in enumerate(powers)]
    p = problem(*arrays, Options(precision="int8", scale=scale))
    out, _ = general_only(monkeypatch, p)
    np.testing.assert_array_equal(out, reference.integer_model(quantize_problem(p))[0])
