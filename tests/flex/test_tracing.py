"""Recording functions: styles, captured values, errors; and the memory that tiles touch."""

import ctypes
import functools
import gc
import mmap
import sys
import types
import warnings
import weakref
from collections import OrderedDict, namedtuple

import numpy as np
import pytest

import numflash
from flex import gallery as g
from numflash.errors import ArgumentError, ArgumentTypeError
from numflash.flex import prepared
from numflash.flex.graph import expression
from numflash.flex.prepared import Prepared, prepare

TABLE = np.arange(300.0)


def text(score_mod=None, mask_mod=None):
    prepared = prepare(score_mod, mask_mod)
    return expression(prepared.score or prepared.mask)


def test_numpy_torch_and_plain_styles_give_one_graph():
    torch = pytest.importorskip("torch")
    plain = text(lambda score, b, h, q, k: score * 2.0 + TABLE[q - k])
    assert plain == "((score * 2.0) + t0[(q - k)])"
    assert text(lambda score, b, h, q, k: np.add(np.multiply(score, 2), TABLE[q - k])) == plain
    table = torch.arange(300.0)
    assert text(lambda score, b, h, q, k: torch.add(score.mul(2.0), table[q - k])) == plain


def test_arrays_are_found_wherever_a_function_may_have_them():
    class Biased:
        def __init__(self):
            self.table = TABLE

        def __call__(self, score, b, h, q, k):
            return score + self.table[k]

        def method(self, score, b, h, q, k):
            return score + self.table[k]

    def inner(k):
        return TABLE[k]

    def with_array(table, score, b, h, q, k):
        return score + table[k]

    def with_default(score, b, h, q, k, table=TABLE):
        return score + table[k]

    held = [TABLE, TABLE * 2]
    for function in (
        lambda score, b, h, q, k: score + inner(k),
        functools.partial(with_array, TABLE),
        with_default,
        Biased(),
        Biased().method,
        lambda score, b, h, q, k: score + held[0][k],
        lambda score, b, h, q, k: score + held[1][k],
        lambda score, b, h, q, k: score + (TABLE * 3)[k],
    ):
        assert text(function) == "(score + t0[k])"


def test_short_rows_may_be_used_whole():
    codes = np.arange(40).reshape(10, 4)
    found = prepare(None, lambda b, h, q, k: (codes[q] == codes[k]).any())
    from numflash.flex.evaluate import evaluate

    q = np.arange(10)[:, None]
    k = np.arange(10)[None]
    (seen,) = evaluate(found.graph, (found.mask,), {"b": 0, "h": 0, "q": q, "k": k})
    assert np.array_equal(seen, q == k)


def branch(score, b, h, q, k):
    if q > k:
        return score
    return score * 2


CANNOT = [
    (branch, "where"),
    (lambda score, b, h, q, k: score + max(q, k), "where"),
    (lambda score, b, h, q, k: score if (q > k and k > 3) else 0, "where"),
    (lambda score, b, h, q, k: score if 0 < q < 5 else 0, "where"),
    (lambda score, b, h, q, k: score + __import__("math").exp(score), "NumPy's or PyTorch's"),
    (lambda score, b, h, q, k: score + sum(range(q)), "range"),
    (lambda score, b, h, q, k: score + [1, 2, 3][k], "traced index"),
    (lambda score, b, h, q, k: score + np.linalg.norm(score), "norm"),
    (lambda score, b, h, q, k: score + TABLE[q, k], "2 indices"),
    (lambda score, b, h, q, k: score + TABLE[score], "float as index"),
    (lambda score, b, h, q, k: score.unknown(), "unknown"),
    (lambda score, b, h, q, k: score & 1, "not floats"),
    (lambda score, b, h, q, k: "text", "str"),
    (lambda score, b, h, q, k: score + TABLE, "where one number|of 300|300 values"),
]


@pytest.mark.parametrize(("function", "message"), CANNOT)
def test_what_cannot_be_recorded_names_its_line_and_what_to_write(function, message):
    with pytest.raises(ArgumentTypeError, match=message) as error:
        prepare(function, None)
    assert str(error.value).startswith("score_mod: ")


def test_the_error_shows_the_line():
    with pytest.raises(ArgumentTypeError, match=r"test_tracing.py:\d+: `if q > k:`: "):
        prepare(branch, None)


def test_an_error_of_the_functions_own_is_the_cause():
    with pytest.raises(
        ArgumentError, match=r"score_mod: .*test_tracing.py:\d+: .*ZeroDivision"
    ) as error:
        numflash.flex_attention(
            *[np.ones((1, 1, 4, 8), np.float32)] * 3, lambda s, b, h, q, k: 1 / 0
        )
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    for kind in (KeyboardInterrupt, MemoryError):  # not of the function's making

        def stopped(b, h, q, k, kind=kind):
            raise kind

        with pytest.raises(kind):
            numflash.create_block_mask(stopped, None, None, 8, 8)


def test_a_float_mask_is_refused():
    with pytest.raises(ArgumentTypeError, match="mask_mod: got a function that returns a float"):
        numflash.create_block_mask(lambda b, h, q, k: q * 1.0, None, None, 8, 8)


def test_a_known_function_is_not_traced_again(monkeypatch):
    first = prepare(g.t5_bias, g.documents)
    monkeypatch.setattr("numflash.flex.prepared.Prepared", lambda *_: pytest.fail("traced again"))
    assert prepare(g.t5_bias, g.documents) is first


def fresh(c, table, scale=1.0, *, shift=0.0):
    """A new function of the same code at every call, and a helper that is new, too."""

    def biased(score, k):
        return score * c + table[k]

    def function(score, b, h, q, k, scale=scale, *, shift=shift):
        return biased(score, k) * scale + shift

    return function


def test_arrays_of_functions_that_are_gone_are_not_kept_without_end(monkeypatch):
    """A table for each step: the newest and as many as there is room for."""
    table_bytes = 40 * 40 * 4
    monkeypatch.setattr(prepared, "KEPT_BYTES", 3 * table_bytes)
    monkeypatch.setattr(prepared, "_known", OrderedDict())
    alive = []
    for n in range(8):
        table = np.full((40, 40), n, np.float32)
        alive.append(weakref.ref(table))
        prepare(lambda score, b, h, i, j, table=table: score + table[i, j], None)
    del table
    gc.collect()
    assert [x() is not None for x in alive] == [False] * 5 + [True] * 3
    large = np.zeros((400, 400), np.float32)

    def score_mod(score, b, h, i, j):
        return score + large[i, j]

    assert prepare(score_mod, None) is prepare(score_mod, None)
    assert len(prepared._known) == 1


def test_a_new_function_of_the_same_code_and_values_is_known():
    first = prepare(fresh(0.5, TABLE), None)
    assert prepare(fresh(0.5, TABLE), None) is first
    assert prepare(fresh(1, TABLE), None) is not prepare(fresh(True, TABLE), None)
    assert prepare(fresh(np.float32(3), TABLE), None) is prepare(fresh(np.float32(3), TABLE), None)


@pytest.mark.parametrize(
    ("c", "table", "scale", "shift"),
    [
        (0.25, TABLE, 1.0, 0.0),
        (1, TABLE, 1.0, 0.0),
        (True, TABLE, 1.0, 0.0),
        (np.float32(0.5), TABLE, 1.0, 0.0),
        (0.5, TABLE.copy(), 1.0, 0.0),
        (0.5, TABLE, 2.0, 0.0),
        (0.5, TABLE, 1.0, -0.0),
        (0.5, TABLE, 1.0, 3.0),
    ],
)
def test_a_new_function_with_another_value_is_traced_again(c, table, scale, shift):
    first = prepare(fresh(0.5, TABLE), None)
    function = fresh(c, table, scale, shift=shift)
    second = prepare(function, None)
    assert second is not first
    assert expression(second.score) == expression(Prepared(function, None).score)
    assert second.graph.owners[0] is table
    assert prepare(fresh(0.5, TABLE), None) is first


def test_attributes_of_a_function_are_what_it_finds():
    def made(scale):
        def function(score, b, h, q, k):
            return score * function.scale + function.table[k]

        function.scale, function.table = scale, TABLE
        return function

    first = made(2.0)
    assert text(first) == "((score * 2.0) + t0[k])" and prepare(first, None) is prepare(first, None)
    assert text(made(3.0)) == "((score * 3.0) + t0[k])"
    first.scale = 4.0
    assert text(first) == "((score * 4.0) + t0[k])"

    def inner(score, b, h, q, k):
        return score

    def decorated(scale):
        wrapped = functools.wraps(inner)(lambda *args: inner(*args) * scale)
        wrapped.scale = scale
        return wrapped

    assert prepare(decorated(2.0), None) is prepare(decorated(2.0), None)


def test_names_that_are_bound_later_and_lists_that_hold_themselves():
    def function(score, b, h, q, k):
        return later(score) if ready else score * 2.0

    ready, endless = False, []
    assert text(function) == "(score * 2.0)"
    ready = True
    with pytest.raises(ArgumentError, match=r"score_mod: .*later"):
        prepare(function, None)

    def later(score):
        return score * 3.0

    assert text(function) == "(score * 3.0)"
    endless.append(endless)
    with pytest.raises(ArgumentError, match=r"score_mod: .*RecursionError"):
        prepare(lambda score, b, h, q, k: score * len(endless), None)


def changed_in_place(change):
    """What prepare() gives of one function before and after something that it names has changed."""
    held = types.SimpleNamespace(c=2.0)
    c, table = 2.0, TABLE

    def helper(k, d=2.0):
        return table[k] * d

    def function(score, b, h, q, k, *, e=2.0):
        return score * c + helper(k) + e + g.WIDTH + held.c

    def cell(value):
        nonlocal c, table
        c, table = value, table * 1

    before = prepare(function, None)
    change(cell, helper, function, held)
    return before, prepare(function, None)


def test_what_changes_in_a_known_function_is_seen(monkeypatch):
    changes = {
        "cell": lambda cell, helper, function, held: cell(3.0),
        "default": lambda cell, helper, function, held: setattr(helper, "__defaults__", (3.0,)),
        "option": lambda cell, helper, function, held: function.__kwdefaults__.update(e=3.0),
        "module": lambda cell, helper, function, held: monkeypatch.setattr(g, "WIDTH", 11),
        "attribute": lambda cell, helper, function, held: setattr(held, "c", 3.0),
    }
    for name, change in changes.items():
        before, after = changed_in_place(change)
        wanted = {
            "cell": "3.0)",
            "default": "3.0)",
            "option": "3.0",
            "module": "11",
            "attribute": "3.0",
        }
        assert wanted[name] in expression(after.score), name
        assert wanted[name] not in expression(before.score), name


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect")
@pytest.mark.parametrize(
    ("size", "precision"), [(5, "float32"), (16, "float32"), (37, "float32"), (2, "int8")]
)
@pytest.mark.parametrize("way", ["forward", "backward", "computed", "leaving", "near"])
def test_no_tile_reads_beyond_an_array(size, precision, way):
    """The array ends, and another begins, where a page without access does."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(start, page, 0) == 0
    assert protect(start + 2 * page, page, 0) == 0
    everything = np.frombuffer(memory, np.float32)
    first = everything[page // 4 :][:size]
    last = everything[2 * page // 4 - size :][:size]
    first[:] = last[:] = np.arange(size) / size
    length = 48 if way in ("leaving", "near") else size
    q, k, v = g.operands(length=length, s=length)
    functions = {
        "forward": lambda score, b, h, q, k: score + first[k] * last[k],
        "backward": lambda score, b, h, q, k: score + first[size - 1 - k] * last[size - 1 - k],
        "computed": lambda score, b, h, q, k: score + first[k * 7 - q] * last[(k * k) % size],
        "leaving": lambda score, b, h, q, k: score + first[q + k - 9] * last[q - k + 3],
        "near": lambda score, b, h, q, k: score + first[abs(q - k) // 2] * last[~(abs(q - k) // 3)],
    }
    found = numflash.flex_attention(q, k, v, functions[way], precision=precision)
    wanted = numflash.flex_attention(q, k, v, functions[way], impl="reference")
    assert np.abs(found - wanted).max() < {"float32": 1e-5, "int8": 0.04}[precision]
    assert protect(start, 3 * page, 3) == 0


class Holder:
    def __init__(self, t):
        self.t = t


class Slotted:
    __slots__ = ("t",)

    def __init__(self, t):
        self.t = t


@pytest.mark.parametrize("kind", [types.SimpleNamespace, Holder, namedtuple("Named", "t")])
def test_arrays_in_attributes(kind):
    """Also after they are changed and, where that can be, replaced."""
    q, k, v = (np.random.default_rng(n).standard_normal((1, 1, 8, 4), np.float32) for n in range(3))
    held = kind(t=np.linspace(-1, 1, 8, dtype=np.float32))

    def check():
        found = numflash.flex_attention(q, k, v, lambda s, b, h, i, j: s + held.t[j])
        weights = np.exp(q[0, 0] @ k[0, 0].T / 2 + held.t)
        wanted = weights @ v[0, 0] / weights.sum(1, keepdims=True)
        np.testing.assert_allclose(found[0, 0], wanted, atol=1e-5)

    check()
    held.t[:] *= -2
    check()
    if not isinstance(held, tuple):
        held.t = np.ones(8, np.float32) * np.arange(8) / 4
        check()


def test_errors_of_captured_arrays_name_the_function():
    slotted, masked, x = (
        Slotted(TABLE),
        np.ma.masked_array(np.zeros(8)),
        np.zeros((1, 1, 8, 4), np.float32),
    )
    short = np.zeros(3)
    for wrong, words in (
        (
            lambda s, b, h, i, j: s + slotted.t[j],
            ".*__slots__.*; allowed: arrays that are variables",
        ),
        (lambda s, b, h, i, j: s + masked[j], "a captured masked array"),
        (lambda s, b, h, i, j: s + short[j], r"a captured array of shape \(3,\)"),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=f"^score_mod: {words}"):
            numflash.flex_attention(x, x, x, wrong)


def test_what_a_function_returns_is_named_with_its_place():
    def nothing(score, b, h, q, k):
        score + 1

    table = np.ones((4, 4), np.float32)
    for wrong, words in (
        (nothing, r"test_tracing\.py:\d+: the function returned nothing; is a `return` missing"),
        (
            lambda s, b, h, q, k: table[h],
            r"test_tracing\.py:\d+: 4 values where one number is needed",
        ),
    ):
        with pytest.raises(ArgumentTypeError, match=f"score_mod: .*{words}"):
            prepare(wrong, None)
    with pytest.raises(ArgumentTypeError, match=r"sinh\(\) cannot be recorded; those that can are"):
        prepare(lambda s, b, h, q, k: np.sinh(s), None)
    with pytest.raises(ArgumentTypeError, match="mask_mod: got None; allowed: a function"):
        numflash.create_block_mask(None, None, None, 8, 8)


def test_arrays_of_jax_are_read_and_its_functions_refused():
    jnp = pytest.importorskip("jax.numpy")
    x = np.random.default_rng(0).standard_normal((1, 2, 16, 8), np.float32)
    table = np.random.default_rng(1).standard_normal((2, 64), np.float32)
    given = jnp.asarray(table)
    found, wanted = (
        numflash.flex_attention(x, x, x, lambda s, b, h, i, j, t=t: s + t[h, i - j + 32])
        for t in (given, table)
    )
    assert np.array_equal(found, wanted)
    out, lse = numflash.attention(x, x, x, return_lse=True)
    mine, right = (
        numflash.attention_backward(
            out, x, x, x, out, lse, score_mod=lambda s, b, h, i, j, t=t: s + t[h, j], wrt=(t,)
        )[0]
        for t in (given, table)
    )
    assert isinstance(mine, type(given)) and np.array_equal(mine, right)
    for wrong in (
        lambda s, b, h, i, j: jnp.where(i >= j, s, -jnp.inf),
        lambda s, b, h, i, j: jnp.tanh(s),
    ):
        with pytest.raises(ArgumentTypeError, match=r"Functions of JAX .* np\.where"):
            numflash.flex_attention(x, x, x, wrong)


def test_strides_of_a_captured_array_that_change_in_place():
    base = np.arange(80.0)
    table = base[:40]

    def score_mod(score, b, h, q, k):
        return score + table[k]

    traced = prepare(score_mod, None)
    assert prepare(score_mod, None) is traced
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        table.strides = (16,)
    again = prepare(score_mod, None)
    assert again is not traced and np.array_equal(again.graph.arrays[0], base[::2])
