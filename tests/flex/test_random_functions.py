"""Random functions over the whole set of operations.

Tiles, slopes and block states against float64.
"""

import ctypes

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from numflash.flex import machine
from numflash.flex.evaluate import element, evaluate
from numflash.flex.gradient import derivative
from numflash.flex.graph import reachable
from numflash.flex.prepared import EMPTY, FULL, prepare
from numflash.flex.program import Program

SHAPE = B, H, L, S = 2, 3, 21, 43
rng = np.random.default_rng(3)
TABLES = {
    "by key": rng.standard_normal(S).astype(np.float32),
    "short": rng.standard_normal(9),
    "whole": rng.integers(-20, 60, 50).astype(np.int16),
    "flags": rng.random(S) < 0.5,
    "square": rng.standard_normal((H, 64)).astype(np.float16),
    "strided": rng.integers(0, 1000, (L, 2 * S))[:, ::2],
    "deep": rng.standard_normal((B, 4, 5, 6)).astype(np.float32),
}
EXAMPLES = settings(
    max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)

FLOAT_UNARY = [
    "tanh",
    "sin",
    "cos",
    "negative",
    "abs",
    "floor",
    "rint",
    "sqrt_abs",
    "log_abs",
    "exp_cut",
    "square",
]
FLOAT_BINARY = ["add", "subtract", "multiply", "minimum", "maximum", "safe_divide"]
INT_BINARY = [
    "add",
    "subtract",
    "multiply",
    "minimum",
    "maximum",
    "floor_divide",
    "remainder",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
]
COMPARE = ["less", "less_equal", "greater", "greater_equal", "equal", "not_equal"]

whole = st.deferred(
    lambda: st.one_of(
        st.sampled_from([("arg", name) for name in "bhqk"]),
        st.tuples(st.just("int"), st.integers(-9, 40)),
        st.tuples(st.sampled_from(INT_BINARY), whole, whole),
        st.tuples(st.just("shift"), whole, st.integers(0, 3)),
        st.tuples(st.just("where"), boolean, whole, whole),
        st.tuples(st.just("to int"), real),
        st.tuples(st.just("table"), st.just("whole"), st.tuples(whole)),
        st.tuples(st.just("table"), st.just("strided"), st.tuples(whole, whole)),
    )
)
boolean = st.deferred(
    lambda: st.one_of(
        st.tuples(st.sampled_from(COMPARE), whole, whole),
        st.tuples(st.sampled_from(COMPARE), real, real),
        st.tuples(st.sampled_from(["logical_and", "logical_or", "logical_xor"]), boolean, boolean),
        st.tuples(st.just("logical_not"), boolean),
        st.tuples(st.just("table"), st.just("flags"), st.tuples(whole)),
    )
)
real = st.deferred(
    lambda: st.one_of(
        st.just(("arg", "score")),
        st.tuples(st.just("float"), st.floats(-3, 3, width=32)),
        st.tuples(st.sampled_from(FLOAT_UNARY), real),
        st.tuples(st.sampled_from(FLOAT_BINARY), real, real),
        st.tuples(st.just("scaled"), whole),
        st.tuples(st.just("where"), boolean, real, real),
        st.tuples(st.just("table"), st.just("by key"), st.just((("arg", "k"),))),
        st.tuples(st.just("table"), st.just("short"), st.tuples(whole)),
        st.tuples(st.just("table"), st.just("square"), st.tuples(st.just(("arg", "h")), whole)),
        st.tuples(st.just("table"), st.just("deep"), st.tuples(whole, whole, whole, whole)),
    )
)
HELPERS = {
    "sqrt_abs": lambda x: np.sqrt(abs(x) + 0.25),
    "log_abs": lambda x: np.log(abs(x) + 0.25),
    "exp_cut": lambda x: np.exp(np.minimum(x, 2.0)),
    "square": lambda x: x * x,
    "safe_divide": lambda x, y: x / (abs(y) + 0.5),
    "scaled": lambda x: x * 0.01,
    "to int": lambda x: np.clip(x * 4.0, -50.0, 50.0).astype(np.int64),
    "shift": lambda x, n: x >> n,
    "floor_divide": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
}


def run(tree, arguments, look_up):
    """The value of a tree of operations, of traced values or of arrays."""
    op, *rest = tree
    if op == "arg":
        return arguments[rest[0]]
    if op in ("int", "float"):
        return rest[0]
    if op == "table":
        return look_up(rest[0], [run(x, arguments, look_up) for x in rest[1]])
    values = [run(x, arguments, look_up) if isinstance(x, tuple) else x for x in rest]
    if all(isinstance(x, (int, float)) for x in values):
        values = [np.asarray(x) for x in values]  # divides by 0 without an exception
    with np.errstate(all="ignore"):
        found = HELPERS[op](*values) if op in HELPERS else getattr(np, op)(*values)
    return found.item() if isinstance(found, (np.generic, np.ndarray)) and not found.ndim else found


def in_numpy(name, index):
    found = element(TABLES[name], [np.asarray(x) for x in np.broadcast_arrays(*index)])
    return found.astype({"b": bool, "i": np.int64, "f": np.float64}[found.dtype.kind])


def inside(name, index):
    """Numbers, also those that tracing has worked out, must be within the array."""

    def within(x, n):
        if hasattr(x, "graph") and x.node.op != "const":
            return x
        return int(np.clip(x.node.data if hasattr(x, "graph") else x, -n, n - 1))

    return [within(x, n) for x, n in zip(index, TABLES[name].shape, strict=True)]


def traced(tree):
    tables = TABLES
    by_key, short, whole_table, flags = (tables[n] for n in ("by key", "short", "whole", "flags"))
    square, strided, deep = (tables[n] for n in ("square", "strided", "deep"))

    def score_mod(score, b, h, q, k):
        own = {
            "by key": by_key, "short": short, "whole": whole_table, "flags": flags,
            "square": square, "strided": strided, "deep": deep,
        }  # fmt: skip

        def look_up(name, index):
            if not any(hasattr(x, "graph") for x in index):
                return in_numpy(name, index).item()
            index = inside(name, index)
            return own[name][tuple(index)] if len(index) > 1 else own[name][index[0]]

        return run(tree, {"score": score, "b": b, "h": h, "q": q, "k": k}, look_up)

    return score_mod


def call(program, x, double, gradient=False, rounded=False):
    """Change a tile x (rows, count) of batch entry 1, head 2, from query 3 and key 0 on.

    With the slopes for `gradient`; `rounded`: the changed tile as int16, less BASE.
    """
    tile = machine.tile(program, double, gradient)
    pointer = ctypes.c_void_p
    size = ctypes.c_int64
    real = ctypes.c_double if double else ctypes.c_float
    x = np.array(x, np.float64 if double else np.float32, order="C")
    slope = np.zeros_like(x, np.int16 if rounded else x.dtype)
    second = slope.ctypes.data if gradient or rounded else None
    base = BASE.ctypes.data if rounded else None
    function = ctypes.CFUNCTYPE(None, *[pointer] * 4, *[size] * 7, real, real)(tile.address)
    function(tile.data, x.ctypes.data, second, base, x.shape[1], *x.shape, 1, 2, 3, 0, 1.0, 1.0)
    return (x, slope) if gradient else slope if rounded else x


BASE = rng.integers(-(2**15), 2**15, L - 3).astype(np.int32) * 256
BASE[::3] = 0
Q = np.arange(3, L)[:, None]
K = np.arange(S)
SCORES = rng.standard_normal((L - 3, S)).astype(np.float32).astype(np.float64) * 2


def share_close(found, wanted, tolerance):
    with np.errstate(all="ignore"):
        near = np.abs(found - wanted) <= tolerance * (1 + np.abs(wanted))
    return np.mean(near | (np.isnan(found) & np.isnan(wanted)) | (found == wanted))


def value_of(tree, scores=SCORES):
    arguments = {"score": scores, "b": np.int64(1), "h": np.int64(2), "q": Q, "k": K}
    with np.errstate(all="ignore"):
        return np.broadcast_to(np.asarray(run(tree, arguments, in_numpy), np.float64), scores.shape)


@EXAMPLES
@given(real)
def test_tiles_give_what_numpy_gives(tree):
    prepared = prepare(traced(tree), None)
    program = Program(prepared.graph, prepared.score, None, None, SHAPE)
    wanted = value_of(tree)
    assert share_close(call(program, SCORES, True), wanted, 1e-9) > 0.995  # rounding at steps
    found = call(program, SCORES, False)
    assert share_close(found, wanted, 1e-3) > 0.85
    whole = np.rint(np.where(np.isnan(found), np.inf, found).astype(float)) - BASE[:, None]
    whole = np.clip(whole, -32767, 32767)
    rounded = call(program, SCORES, False, rounded=True)
    assert ((rounded == whole) | ((rounded == -32768) & (found == -np.inf))).all()


@EXAMPLES
@given(real)
def test_slopes_are_the_derivatives(tree):
    prepared = prepare(traced(tree), None)
    program = Program(prepared.graph, prepared.score, prepared.slope, None, SHAPE)
    step = 1e-6
    wanted = (value_of(tree, SCORES + step) - value_of(tree, SCORES - step)) / (2 * step)
    arguments = {"score": SCORES, "b": 1, "h": 2, "q": Q, "k": K}
    (slope,) = evaluate(prepared.graph, (prepared.slope,), arguments)
    slope = np.broadcast_to(slope, SCORES.shape)
    smooth = np.abs(wanted) < 1e4  # no step between the two
    assert share_close(slope[smooth], wanted[smooth], 1e-3) > 0.85
    tile, found = call(program, SCORES.T, False, gradient=True)
    assert share_close(found.T, slope, 1e-3) > 0.85
    assert share_close(tile.T, value_of(tree), 1e-3) > 0.85


@EXAMPLES
@given(st.sampled_from(FLOAT_BINARY), real, st.sampled_from(FLOAT_UNARY), whole)
def test_derivatives_by_a_table_are_what_changing_it_gives(binary, tree, unary, index):
    assume("short" not in repr((tree, index)))  # a constant index would be read while tracing
    tree = (unary, (binary, tree, ("table", "short", (("subtract", ("arg", "k"), index),))))
    prepared = prepare(traced(tree), None)
    graph, root, table = prepared.graph, prepared.score, TABLES["short"]
    loads = [x for x in reachable([root]) if x.op == "load" and graph.owners[x.data] is table]
    arguments = {"score": SCORES, "b": 1, "h": 2, "q": Q, "k": K}
    slopes = evaluate(graph, tuple(derivative(graph, root, x) for x in loads), arguments)
    found = np.broadcast_to(sum(slopes, np.zeros(())), SCORES.shape)
    step, values = 1e-6, []
    for by in (step, -2 * step):
        table += by
        values.append(value_of(tree))
    table += step
    wanted = (values[0] - values[1]) / (2 * step)
    smooth = np.abs(wanted) < 1e4  # no step between the two
    assert share_close(found[smooth], wanted[smooth], 1e-3) > 0.85


@settings(EXAMPLES, max_examples=50)
@given(boolean, st.integers(1, 20), st.integers(1, 20))
def test_block_states_are_never_wrong(tree, rows, keys):
    function = traced(tree)

    def mask_mod(b, h, q, k):
        return function(q * 0.25 - k * 0.5, b, h, q, k)

    prepared = prepare(None, mask_mod)
    states = prepared.block_states(SHAPE, (rows, keys))
    at = [
        np.arange(n).reshape([-1 if i == a else 1 for i in range(4)]) for a, n in enumerate(SHAPE)
    ]
    arguments = dict(zip("bhqk", at, strict=True))
    (seen,) = evaluate(prepared.graph, (prepared.mask,), arguments)
    seen = np.broadcast_to(seen, SHAPE)
    for b, h, i, j in np.ndindex(B, H, *states.shape[2:]):
        block = seen[b, h, i * rows : (i + 1) * rows, j * keys : (j + 1) * keys]
        state = states[min(b, len(states) - 1), min(h, states.shape[1] - 1), i, j]
        assert state != EMPTY or not block.any()
        assert state != FULL or block.all()
