"""The figures of one machine in docs/performance.md, as tables.

    python tools/machine.py                       # all of them, some minutes
    python tools/machine.py cases threads         # some: cases, threads, functions, masks, options

Medians of calls in turns. Outputs are compared before they are timed: with float64 (the last rows), of
two threads with those of one, and a function's gradients with those of the option that means the
same. One thread, unless a column says two. Needs PyTorch; `masks` also times
`torch.compile(flex_attention)` where a C++ compiler is installed. `numflash bench decode` and
`numflash bench --short` print the tables of decoding and of short calls.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# The checks multiply with NumPy, whose threads would keep a core for a while after each product:
# calls on two threads then took twice as long as on one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import numflash
from numflash.jit.threads import most
from numflash.measure import roofline
from numflash.measure.console import Progress, Table
from numflash.measure.contenders import Case, on_threads
from numflash.measure.metrics import errors
from numflash.measure.timing import Calls, in_turns

ROUNDS = 9
CHECKED = 32  # the last query rows are held against float64
SDPA = torch.nn.functional.scaled_dot_product_attention
# relative L1 against float64
LIMITS = {"float32": 2e-5, "bfloat16": 0.02, "int8": 0.03, "int4": 0.3}
CASES = (
    Case(4096, 128),
    Case(4096, 128, causal=True),
    Case(4096, 64),
    Case(4096, 128, heads=2),
    Case(512, 64, heads=8),
    Case(512, 64, causal=True, heads=8),
    Case(128, 64, heads=8),
    Case(1024, 128, heads=32),
    Case(2048, 64, heads=8),
)
THREADS = (CASES[6], CASES[4], CASES[7], CASES[3])
DECODE = ((14, 2, 1024, 64), (14, 2, 4096, 64), (32, 8, 8192, 128), (32, 8, 32768, 128))
GROUPS = ((32, 8), (8, 2))  # query heads and KV heads of decoding with functions
STORAGE = ("float32", "bfloat16", "int8", "int4")
PRECISIONS = ("float32", "bfloat16", "int8")
SLOPES = (2.0 ** -np.arange(1, 33)).astype(np.float32)
TABLE = np.random.default_rng(0).standard_normal((32, 1 << 14), np.float32)
CAP = 30.0
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "constant": lambda score, b, h, q, k: score + 0.5,
    "ALiBi": lambda score, b, h, q, k: score + SLOPES[h] * (k - q),
    "table": lambda score, b, h, q, k: score + TABLE[h, q - k + (1 << 13)],
    "softcap": lambda score, b, h, q, k: CAP * np.tanh(score / CAP),
    "sine": lambda score, b, h, q, k: score + np.sin((q - k) * 0.01),
}
TORCH_SLOPES = torch.from_numpy(SLOPES)
PEER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "constant": FUNCTIONS["constant"],
    "ALiBi": lambda score, b, h, q, k: score + TORCH_SLOPES[h] * (k - q),
    "softcap": lambda score, b, h, q, k: CAP * torch.tanh(score / CAP),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": CAP},
    "ALiBi": {"alibi_slopes": SLOPES[:2]},
}
LENGTH = 8192  # of block masks, and of the cache that is decoded with functions
DOCUMENT = np.repeat(np.arange(8), LENGTH // 8)
MASKS: dict[str, Callable[..., Any]] = {
    "eight documents": lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k],
    "causal": lambda b, h, q, k: q >= k,
    "causal window of 256": lambda b, h, q, k: (q >= k) & (q - k < 256),
}
COST: dict[str, dict[str, Any]] = {  # of INT8, at CASES[0]
    "none": {},
    "boolean mask": {"attn_mask": np.ones((1, 1, 4096, 4096), bool)},
    "bias": {"attn_mask": np.zeros((1, 1, 4096, 4096), np.float32)},
    "key lengths": {"key_lengths": np.array([4000])},
    "ALiBi": {"alibi_slopes": SLOPES[:1]},
    "softcap": {"softcap": CAP},
    "pv int16": {"pv": "int16"},
    "pv bf16": {"pv": "bf16"},
    "pv fp32": {"pv": "fp32"},
}
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
Row = Callable[[], Sequence[str]]


class Section(NamedTuple):
    """A table, and how each of its rows is measured: the row's name, and what gives its cells."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, Row]]


# ---- what is shared


def arrays(heads: int, kv_heads: int, queries: int, keys: int, d: int) -> Arrays:
    """Random query (1, H, L, D), key and value (1, Hkv, S, D), float32."""
    rng = np.random.default_rng(keys)
    shapes = ((1, heads, queries, d), (1, kv_heads, keys, d), (1, kv_heads, keys, d))
    query, key, value = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return query, key, value


def exact(operands: Arrays, score: Any = None, mask: Any = None) -> np.ndarray:
    """The last rows in float64, with a score and a mask function; the last query is at the last key."""
    query, key, value = (x[0].astype(np.float64) for x in operands)
    query = query[:, -CHECKED:]
    heads, rows, d = query.shape
    keys = key.shape[1]
    key, value = (np.repeat(x, heads // x.shape[0], 0) for x in (key, value))
    h, k = np.arange(heads)[:, None, None], np.arange(keys)
    q = np.arange(keys - rows, keys)[:, None]
    scores = query @ key.transpose(0, 2, 1) * d**-0.5
    if score is not None:
        scores = score(scores, 0, h, q, k)
    if mask is not None:
        scores = np.where(mask(0, h, q, k), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights @ value / weights.sum(-1, keepdims=True))[None]


def check(name: str, out: Any, wanted: np.ndarray, precision: str) -> None:
    """Raise where the last rows of an output (array or tensor) are too far from float64."""
    found = torch.as_tensor(out).float().numpy()[:, :, -wanted.shape[2] :]
    error = errors(found.astype(np.float64), wanted).relative_l1
    if not error <= LIMITS[precision]:
        raise ArithmeticError(f"{name}: relative L1 {error:.2g}; allowed: {LIMITS[precision]:g}")


def milliseconds(seconds: float) -> str:
    """In print, with its unit."""
    return f"{1e3 * seconds:.3g} ms"


def ratios(calls: Calls, rounds: int = ROUNDS) -> list[str]:
    """The first call's time, and the others' over it."""
    first, *others = in_turns(calls, rounds).values()
    return [milliseconds(first), *(f"{x / first:.3f}" for x in others)]


# ---- every precision beside PyTorch


class Contender(NamedTuple):
    """A call of one case, its precision, and the call of PyTorch that it is compared with."""

    precision: str
    call: Callable[[], Any]
    peer: str


def contenders(case: Case) -> dict[str, Contender]:
    """By the name of the column; PyTorch's own first."""
    causal = {"is_causal": case.causal}
    tensors = [torch.from_numpy(x) for x in case.arrays]
    halves = [x.bfloat16() for x in tensors]
    ready = numflash.quantize_qkv(*case.arrays)
    attend = functools.partial(numflash.attention, **causal)
    int8 = functools.partial(attend, *case.arrays, precision="int8")
    one, two = "PyTorch float32", "PyTorch bfloat16"
    operands = functools.partial(numflash.attention_int8, *ready, **causal)
    return {
        one: Contender("float32", functools.partial(SDPA, *tensors, **causal), one),
        two: Contender("bfloat16", functools.partial(SDPA, *halves, **causal), two),
        "float32": Contender("float32", functools.partial(attend, *case.arrays), one),
        "bfloat16": Contender("bfloat16", functools.partial(attend, *halves), two),
        "int8 operands": Contender("int8", operands, one),
        "int8": Contender("int8", int8, one),
        "int8, pv int16": Contender("int8", functools.partial(int8, pv="int16"), one),
        "int8, pv bf16": Contender("int8", functools.partial(int8, pv="bf16"), one),
    }


def case_row(case: Case) -> list[str]:
    """The times, in brackets over PyTorch's, and the share of the INT8 peak."""
    found = contenders(case)
    wanted = exact(case.arrays, mask=MASKS["causal"] if case.causal else None)
    for name, contender in found.items():
        check(f"{name} at {case}", contender.call(), wanted, contender.precision)
    times = in_turns({name: contender.call for name, contender in found.items()}, ROUNDS)
    cells = [
        milliseconds(times[name])
        if name == contender.peer
        else f"{milliseconds(times[name])} ({times[contender.peer] / times[name]:.2f}x)"
        for name, contender in found.items()
    ]
    rate = case.operations / times["int8 operands"]
    return [*cells, f"{100 * rate / roofline.measure_compute(1)[0]:.0f} %"]


def cases() -> list[Section]:
    """Every precision; "x" is over PyTorch of the same type, of INT8 over its float32."""
    columns = ("one thread", *contenders(Case(1, 64)), "operands, INT8 peak")
    rows = [(str(case), functools.partial(case_row, case)) for case in CASES]
    return [Section("cases", columns, rows)]


# ---- two threads over one


def attention_call(case: Case, precision: str) -> Callable[[], Any]:
    """`attention` of a case."""
    return functools.partial(numflash.attention, *case.arrays, precision=precision)


def operands_call(case: Case) -> Callable[[], Any]:
    """`attention_int8` of a case's quantised operands."""
    return functools.partial(numflash.attention_int8, *numflash.quantize_qkv(*case.arrays))


def backward_call(operands: Arrays, **options: Any) -> functools.partial[Any]:
    """Causal gradients."""
    out, lse = numflash.attention(*operands, is_causal=True, return_lse=True, **options)
    given = {"is_causal": True, **options}
    return functools.partial(numflash.attention_backward, out, *operands, out, lse, **given)


def packed_call() -> Callable[[], Any]:
    """Eight sequences of 512."""
    starts = np.arange(0, 4097, 512, dtype=np.int32)
    operands = [x[0].transpose(1, 0, 2).copy() for x in arrays(8, 8, 4096, 4096, 64)]
    return functools.partial(numflash.attention_varlen, *operands, starts, starts)


def decode_call(shape: tuple[int, int, int, int], dtype: str) -> Callable[..., Any]:
    """One token over a filled cache."""
    heads, kv_heads, tokens, d = shape
    operands = query, key, value = arrays(heads, kv_heads, 1, tokens, d)
    cache = numflash.KVCache(1, kv_heads, d, tokens, dtype)
    cache.append(key, value)
    check(f"decode {dtype} {shape}", cache.decode(query), exact(operands), dtype)
    return functools.partial(cache.decode, query)


def thread_row(make: Callable[[], Callable[[], Any]]) -> list[str]:
    """A call on one thread and on two, whose bits are the same."""
    call = make()

    def on_threads(n: int) -> Any:
        with numflash.num_threads(n):
            return call()

    for one, two in zip(np.atleast_1d(on_threads(1)), np.atleast_1d(on_threads(2)), strict=True):
        np.testing.assert_array_equal(one, two)
    one, two = in_turns({n: functools.partial(on_threads, int(n)) for n in "12"}, ROUNDS).values()
    return [milliseconds(one), milliseconds(two), f"{one / two:.2f}x"]


def threads() -> list[Section]:
    """Two threads over one, by every entry."""
    if most() < 2:
        return []
    found: dict[str, Callable[[], Callable[[], Any]]] = {}
    for case in THREADS:
        for precision in PRECISIONS:
            found[f"{precision} {case}"] = functools.partial(attention_call, case, precision)
        found[f"int8 operands {case}"] = functools.partial(operands_call, case)
        found[f"backward {case} causal"] = functools.partial(backward_call, case.arrays)
    found["eight packed sequences of 512"] = packed_call
    for shape in DECODE:
        for dtype in STORAGE:
            found[f"decode {dtype} {shape}"] = functools.partial(decode_call, shape, dtype)
    rows = [(name, functools.partial(thread_row, make)) for name, make in found.items()]
    return [Section("two threads over one", ("case", "one", "two", "ratio"), rows)]


# ---- score functions


def forward_row(precision: str) -> list[str]:
    """Functions over none, of one precision."""
    operands = arrays(2, 2, 4096, 4096, 64)
    attend = functools.partial(numflash.flex_attention, *operands, precision=precision)
    calls: Calls = {"none": attend}
    for name, function in FUNCTIONS.items():
        calls[name] = functools.partial(attend, score_mod=function)
        check(f"{name}, {precision}", calls[name](), exact(operands, function), precision)
    return ratios(calls, 5)


def decode_row(heads: int, kv_heads: int, dtype: str) -> list[str]:
    """Functions and options over none, in decoding."""
    shape = heads, kv_heads, LENGTH, 64
    call, operands = decode_call(shape, dtype), arrays(heads, kv_heads, 1, LENGTH, 64)
    calls: Calls = {"none": call}
    for name, function in FUNCTIONS.items():
        calls[name] = functools.partial(call, score_mod=function)
        check(f"{name}, decode {dtype}", calls[name](), exact(operands, function), dtype)
    calls["option softcap"] = functools.partial(call, softcap=CAP)
    calls["option ALiBi"] = functools.partial(call, alibi_slopes=SLOPES[:heads])
    return ratios(calls)


def gradient_row(name: str) -> list[str]:
    """A function's gradients over those of the option that means the same."""
    operands, option = arrays(2, 2, 2048, 2048, 64), OPTIONS[name]
    given = backward_call(operands, **option)
    plain = {n: x for n, x in given.keywords.items() if n not in option}
    called = functools.partial(given.func, *given.args, **plain, score_mod=FUNCTIONS[name])
    for x, y in zip(given(), called(), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-3)
    return ratios({"option": given, "function": called}, 5)


def functions() -> list[Section]:
    """Score functions over the plain kernel: forward, decoding, gradients."""
    forward = [(precision, functools.partial(forward_row, precision)) for precision in PRECISIONS]
    decoding = [
        (f"{dtype}, {heads}/{kv} heads", functools.partial(decode_row, heads, kv, dtype))
        for heads, kv in GROUPS
        for dtype in STORAGE
    ]
    gradients = [(name, functools.partial(gradient_row, name)) for name in OPTIONS]
    names = tuple(FUNCTIONS)
    decoded = ("storage", "none", *names, "option softcap", "option ALiBi")
    return [
        Section("functions over none, (1, 2, 4096, 64)", ("precision", "none", *names), forward),
        Section(f"decoding over {LENGTH} tokens, D = 64", decoded, decoding),
        Section(
            "causal gradients, (1, 2, 2048, 64)", ("", "option", "function over it"), gradients
        ),
    ]


# ---- block masks, and PyTorch's ways to functions


def mask_row(precision: str) -> list[str]:
    """Block masks over none."""
    operands = arrays(2, 2, LENGTH, LENGTH, 64)
    attend = functools.partial(numflash.flex_attention, *operands, precision=precision)
    calls: Calls = {"none": attend}
    for name, function in MASKS.items():
        blocks = numflash.create_block_mask(function, None, None, LENGTH, LENGTH)
        calls[name] = functools.partial(attend, block_mask=blocks)
        check(f"{name}, {precision}", calls[name](), exact(operands, mask=function), precision)
    return ratios(calls, 5)


def peer_row(name: str) -> list[str]:
    """PyTorch's SDPA with what the function adds as a dense bias, and flex_attention compiled."""
    operands = arrays(2, 2, 4096, 4096, 64)
    tensors, wanted = [torch.from_numpy(x) for x in operands], exact(operands, FUNCTIONS[name])
    calls: Calls = {
        "numflash": functools.partial(numflash.flex_attention, *tensors, score_mod=FUNCTIONS[name])
    }
    if name != "softcap":  # it is no sum
        h, q, k = np.ogrid[:2, :4096, :4096]
        bias = FUNCTIONS[name](np.zeros((2, 4096, 4096), np.float32), 0, h, q, k)
        mask = torch.from_numpy(bias.astype(np.float32))[None]
        calls["dense"] = functools.partial(SDPA, *tensors, attn_mask=mask)
    if shutil.which("g++") or shutil.which("clang++"):
        compiled = torch.compile(torch_flex)
        calls["compiled"] = functools.partial(compiled, *tensors, score_mod=PEER_FUNCTIONS[name])
    for peer, call in calls.items():
        check(f"{name}, {peer}", call(), wanted, "float32")
    times = dict(zip(calls, ratios(calls, 5), strict=True))
    return [times.get(column, "-") for column in ("numflash", "dense", "compiled")]


def masks() -> list[Section]:
    """Block masks over full attention, and PyTorch over numflash."""
    rows = [
        (precision, functools.partial(mask_row, precision)) for precision in ("float32", "int8")
    ]
    peers = [(name, functools.partial(peer_row, name)) for name in PEER_FUNCTIONS]
    columns = ("float32", "numflash", "dense bias over it", "torch.compile over it")
    return [
        Section(
            f"block masks over none, (1, 2, {LENGTH}, 64)", ("precision", "none", *MASKS), rows
        ),
        Section("PyTorch over numflash, (1, 2, 4096, 64)", columns, peers),
    ]


# ---- options


def option_row() -> list[str]:
    """What options of INT8 cost."""
    call = attention_call(CASES[0], "int8")
    return ratios({name: functools.partial(call, **given) for name, given in COST.items()}, 5)


def options() -> list[Section]:
    """Options of INT8 over none."""
    return [Section(f"options of INT8 over none, {CASES[0]}", ("", *COST), [("int8", option_row)])]


SECTIONS: dict[str, Callable[[], list[Section]]] = {
    "cases": cases,
    "threads": threads,
    "functions": functions,
    "masks": masks,
    "options": options,
}


def main() -> None:
    """Measure, and print each table when it is complete."""
    parser = argparse.ArgumentParser(description="figures of this machine, as tables")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    asked = parser.parse_args().sections or list(SECTIONS)
    if wrong := [name for name in asked if name not in SECTIONS]:
        parser.error(f"SECTION: got {wrong[0]!r}; allowed: {', '.join(SECTIONS)}")
    found = [section for name in asked for section in SECTIONS[name]()]
    steps = sum(len(section.rows) for section in found)
    with Progress("machine", steps) as progress, on_threads(1):
        for section in found:
            table = Table(section.title, section.columns)
            for name, measure in section.rows:
                progress.step(f"{section.title}: {name}")
                table.add(name, *measure())
            table.show()


if __name__ == "__main__":
    main()
