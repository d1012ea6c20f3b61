"""The software-pipelined stream of AMX.

The bits of the integer model where it runs, and that it stops where scores leave int16.
"""

import numpy as np
import pytest
from oracles import qkv

import numflash
from numflash import reference, tiling
from numflash.cpu import launch
from numflash.cpu.int8 import amx_stream
from numflash.jit import target
from numflash.numerics.quantization import quantize_problem
from numflash.validation import problem
from numflash.validation.options import Options

pytestmark = pytest.mark.skipif(
    "amx_int8" not in target.available(), reason="the machine has no AMX"
)
# head sizes of one, two and four steps; of two, four and eight blocks of values, and one of six
SIZES = [(64, 64), (128, 128), (80, 33), (33, 130), (256, 256), (200, 190)]
LONG = (amx_stream.TURNS // 3 + amx_stream.NEAR + 3) * 128 + 50  # keys: two tables of turns


@pytest.fixture(autouse=True)
def one_thread():
    """Tiles wait for each other where they are more than threads: on any machine."""
    with numflash.num_threads(1):
        yield


@pytest.fixture
def runs(monkeypatch):
    """The turns of every call of the stream."""
    found = []
    real = amx_stream.address_of

    def counted(*sizes):
        found.append(real(*sizes))
        return found[-1]

    monkeypatch.setattr(amx_stream, "address_of", counted)
    return found


def check(arrays, **options):
    p = quantize_problem(problem(*arrays, Options(precision="int8", return_lse=True, **options)))
    out, lse = launch.run(p, "amx_int8")
    want, want_lse = reference.integer_model(p)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)


@pytest.mark.parametrize("heads", [1, 3])  # a tile by itself; several in one run
@pytest.mark.parametrize(("d", "dv"), SIZES)
def test_every_head_size(d, dv, heads, runs):
    check(qkv(h=heads, l=40, s=400, d=d, dv=dv))
    assert runs and all(runs)


@pytest.mark.parametrize(("l", "s"), [(1, 128), (32, 256), (97, 129), (130, 700), (7, LONG)])
def test_lengths(l, s):
    check(qkv(h=2, l=l, s=s, d=64))


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"window": (200, 30)},
        {"is_causal": True, "alignment": "lower_right"},
        {"key_lengths": [290]},
        {"window": (5, 3)},
        {"key_lengths": [150], "window": (40, 0)},  # some rows see no key at all
    ],
)
def test_edges(options):
    """Edge blocks whose rows all see some key are streamed, others go block by block."""
    check(qkv(h=2, l=300, s=600, d=64), **options)


@pytest.mark.parametrize("where", [0, 130, 399])
def test_scores_that_leave_int16(where):
    """One huge key, or all of them: the tile is computed again, block by block."""
    q, k, v = qkv(h=2, l=70, s=400, d=64)
    k[:, 0, where] *= 1000
    check((q, k, v))
    check((q * 100, k, v))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("l", "s"), [(300, 300), (128, 128), (100, 1300), (260, 2700), (130, 8500)]
)
def test_tiles_in_one_run(l, s, threads):
    """Whole and partial tiles of several heads; a table of turns holds several, one, or not one."""
    with numflash.num_threads(threads):
        check(qkv(h=3, l=l, s=s, d=64))
        check(qkv(h=3, l=l, s=s, d=64), is_causal=True)


def test_tiles_that_see_nothing_among_others():
    check(qkv(h=3, l=600, s=200, d=64), is_causal=True, alignment="lower_right")


@pytest.mark.parametrize("heads", [[0], [2], [1, 4], [0, 1, 2, 3, 4]])
def test_one_of_several_tiles_leaves_int16(heads):
    """All tiles of that run are computed again, each by itself."""
    q, k, v = qkv(h=5, l=70, s=400, d=64)
    k[:, heads, 200] *= 1000
    check((q, k, v))


@pytest.mark.parametrize("head", [0, 1, 4])
def test_a_tile_by_itself_among_others(head):
    """A key that is not finite cuts the blocks of its head in two; tiles of other heads wait."""
    q, k, v = qkv(h=5, l=70, s=700, d=64)
    k[:, head, 300] = np.nan
    check((q, k, v), key_lengths=[690])


def test_octaves_that_grow_and_fall():
    q, k, v = qkv(h=2, l=70, s=900, d=64)
    steps = np.linspace(-2, 2, 900, dtype=np.float32)[:, None]
    k[:, 0] *= np.exp2(steps)
    k[:, 1] *= np.exp2(-steps)
    check((q, k, v))


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "alignment": "lower_right"}])
def test_a_key_that_is_not_finite(options):
    """Rows that attend to it, in whole blocks and at the diagonal, are NaN; the others are not."""
    q, k, v = qkv(h=2, l=70, s=900, d=64)
    k[0, 0, 860, 5] = np.nan
    v[0, 1, 300, 5] = np.inf
    check((q, k, v), **options)


@pytest.mark.parametrize("where", [None, 1])
def test_rows_that_attend_to_first_keys_only(where):
    """In a tile that is streamed: their block goes by itself, also where one of these keys is not finite."""
    q, k, v = qkv(h=1, l=400, s=400, d=64)
    if where is not None:
        k[0, 0, where, 5] = np.nan
    with tiling.using("amx_int8", "int8", block_q=384):
        check((q, k, v), is_causal=True)


def test_wider_heads_have_no_stream():
    assert amx_stream.address_of(300, 64) == amx_stream.address_of(64, 300) == 0
