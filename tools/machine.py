"""The figures of one machine in docs/performance.md, as tables.

    python tools/machine.py                       # all of them, some minutes
    python tools/machine.py cases threads         # some: cases, threads, functions, masks, options

Medians of calls in turns, each checked before it is timed: against float64, or a function against the
option that means the same. One thread, unless a column says two. Needs PyTorch; `masks` also times
`torch.compile(flex_attention)` where a C++ compiler is installed. `numflash bench decode` and
`numflash bench --short` print the tables of decoding and of short calls.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import numflash
from numflash.jit import target
from numflash.measure import roofline
from numflash.measure.console import Progress, Table
from numflash.measure.contenders import Case
from numflash.measure.short_calls import in_turns

Calls = dict[str, Callable[[], Any]]
ROUNDS = 9
SDPA = torch.nn.functional.scaled_dot_product_attention
LIMITS = {"float32": 2e-5, "bfloat16": 0.02, "int8": 0.03}  # relative L1 against float64
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
THREADS = (
    Case(128, 64, heads=8),
    Case(512, 64, heads=8),
    Case(1024, 128, heads=32),
    Case(4096, 128, heads=2),
)
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
LENGTH = 8192  # of block masks
DOCUMENT = np.repeat(np.arange(8), LENGTH // 8)
MASKS = {
    "eight documents": lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k],
    "causal": lambda b, h, q, k: q >= k,
    "causal window of 256": lambda b, h, q, k: (q >= k) & (q - k < 256),
}


def normal(*shape: int) -> np.ndarray:
    """Random float32 numbers, the same in every run."""
    return np.random.default_rng(shape[-2]).standard_normal(shape, np.float32)


def times(calls: Calls, rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of each call on one thread, medians."""
    with numflash.num_threads(1):
        return in_turns(calls, rounds)


def milliseconds(seconds: float) -> str:
    """In print, with its unit."""
    return f"{1e3 * seconds:.3g} ms"


def checked(case: Case, calls: Calls) -> Calls:
    """The calls of a case, by "precision, words", after each was compared with float64."""
    for name, call in calls.items():
        out = call()
        found = case.check(np.asarray(out.float() if hasattr(out, "float") else out, np.float32))
        limit = LIMITS[name.split(",")[0]]
        if not found.relative_l1 <= limit:
            raise ArithmeticError(f"{name} at {case}: relative L1 {found.relative_l1:.2g}")
    return calls


def cases(progress: Progress) -> list[Table]:
    """Every precision beside PyTorch's float32 and bfloat16."""
    isa = target.available()[0]
    peak, float_peak = roofline.measure_compute(1, isa)
    columns = ("case", "PyTorch float32", "PyTorch bfloat16", "float32", "bfloat16", "int8 operands", "INT8 peak",
        "int8", "int8, pv int16", "int8, pv bf16")  # fmt: skip
    shown = Table(f"cases, one thread, {isa}", columns)
    peaks = f"peaks {peak / 1e9:.0f} GOP/s, {float_peak / 1e9:.0f} GFLOP/s"
    shown.note = f"in brackets over PyTorch of the same type, INT8 over its float32; {peaks}"
    for case in CASES:
        progress.step(f"cases {case}")
        causal = {"is_causal": case.causal}
        tensors = [torch.from_numpy(x) for x in case.arrays]
        halves = [x.bfloat16() for x in tensors]
        ready = numflash.quantize_qkv(*case.arrays)
        int8 = functools.partial(numflash.attention, *case.arrays, precision="int8", **causal)
        calls: Calls = {
            "float32, PyTorch": functools.partial(SDPA, *tensors, **causal),
            "bfloat16, PyTorch": functools.partial(SDPA, *halves, **causal),
            "float32": functools.partial(numflash.attention, *case.arrays, **causal),
            "bfloat16": functools.partial(numflash.attention, *halves, **causal),
            "int8, operands": functools.partial(numflash.attention_int8, *ready, **causal),
            "int8": int8,
            "int8, pv int16": functools.partial(int8, pv="int16"),
            "int8, pv bf16": functools.partial(int8, pv="bf16"),
        }
        t = times(checked(case, calls))
        peers = t["float32, PyTorch"], t["bfloat16, PyTorch"]
        cells = [
            f"{milliseconds(t[name])} ({peers[name == 'bfloat16'] / t[name]:.2f}x)"
            for name in list(calls)[2:]
        ]
        share = case.operations / t["int8, operands"] / peak
        cells.insert(3, f"{100 * share:.0f} %")
        shown.add(str(case), *map(milliseconds, peers), *cells)
    return [shown]


def threads(progress: Progress) -> list[Table]:
    """Two threads over one, by every entry."""
    shown = Table("two threads over one", ("case", "one", "two", "ratio"))

    def add(name: str, call: Callable[[], Any]) -> None:
        progress.step(f"threads {name}")

        def with_threads(n: int) -> Any:
            with numflash.num_threads(n):
                return call()

        t = in_turns({str(n): functools.partial(with_threads, n) for n in (1, 2)}, ROUNDS)
        ratio = f"{t['1'] / t['2']:.2f}x"
        shown.add(name, milliseconds(t["1"]), milliseconds(t["2"]), ratio)

    for case in THREADS:
        for precision in PRECISIONS:
            add(f"{precision} {case}", functools.partial(numflash.attention, *case.arrays, precision=precision))  # fmt: skip
        ready = numflash.quantize_qkv(*case.arrays)
        add(f"int8 operands {case}", functools.partial(numflash.attention_int8, *ready))
        out, lse = numflash.attention(*case.arrays, is_causal=True, return_lse=True)
        backward = functools.partial(numflash.attention_backward, out, *case.arrays, out, lse)
        add(f"backward {case} causal", functools.partial(backward, is_causal=True))
    packed = [normal(4096, 8, 64) for _ in range(3)]
    starts = np.arange(0, 4097, 512, dtype=np.int32)
    add("eight packed sequences of 512", functools.partial(numflash.attention_varlen, *packed, starts, starts))  # fmt: skip
    for shape in DECODE:
        for dtype in STORAGE:
            add(f"decode {dtype} {shape}", decoding(shape, dtype)[0])
    return [shown]


def decoding(shape: tuple[int, int, int, int], dtype: str) -> tuple[Callable[..., Any], Any]:
    """Decoding one token from a filled cache, with what options are given; and the cache."""
    heads, kv_heads, tokens, d = shape
    cache = numflash.KVCache(1, kv_heads, d, tokens, dtype)
    cache.append(normal(1, kv_heads, tokens, d), normal(1, kv_heads, tokens, d))
    return functools.partial(cache.decode, normal(1, heads, 1, d)), cache


def ratios(name: str, calls: Calls, rounds: int = ROUNDS) -> tuple[str, ...]:
    """A row: the first call's time, and the others' over it."""
    t = times(calls, rounds)
    first = t[next(iter(calls))]
    return name, milliseconds(first), *(f"{x / first:.3f}" for x in list(t.values())[1:])


def functions(progress: Progress) -> list[Table]:
    """Score functions over the plain kernel: forward, decoding, gradients."""
    forward = Table(
        "score functions over none, (1, 2, 4096, 64)", ("precision", "none", *FUNCTIONS)
    )
    query, key, value = (normal(1, 2, 4096, 64) for _ in range(3))
    for precision in PRECISIONS:
        progress.step(f"functions {precision}")
        attend = functools.partial(numflash.flex_attention, query, key, value, precision=precision)
        calls: Calls = {"none": attend}
        calls |= {n: functools.partial(attend, score_mod=f) for n, f in FUNCTIONS.items()}
        option = numflash.attention(query, key, value, softcap=CAP, precision=precision)
        assert np.abs(calls["softcap"]() - option).mean() < LIMITS[precision]
        forward.add(*ratios(precision, calls, 5))
    columns = ("storage", "none", *FUNCTIONS, "option softcap", "option ALiBi")
    decode = Table("decoding over 8192 tokens, D = 64", columns)
    for heads, kv_heads in GROUPS:
        for dtype in STORAGE:
            progress.step(f"functions, decoding {dtype}")
            call, _ = decoding((heads, kv_heads, 8192, 64), dtype)
            calls = {"none": call}
            calls |= {n: functools.partial(call, score_mod=f) for n, f in FUNCTIONS.items()}
            calls["option"] = functools.partial(call, softcap=CAP)
            calls["slopes"] = functools.partial(call, alibi_slopes=SLOPES[:heads])
            decode.add(*ratios(f"{dtype}, {heads}/{kv_heads} heads", calls))
    backward = Table("causal gradients, (1, 2, 2048, 64): a function over the option", ("", "option", "function"))  # fmt: skip
    arrays = [normal(1, 2, 2048, 64) for _ in range(3)]
    for name, given in OPTIONS.items():
        progress.step(f"functions, gradients of {name}")
        given = {"is_causal": True, **given}
        out, lse = numflash.attention(*arrays, return_lse=True, **given)
        call = functools.partial(
            numflash.attention_backward, out, *arrays, out, lse, is_causal=True
        )
        pair: Calls = {
            "option": functools.partial(call, **given),
            "function": functools.partial(call, score_mod=FUNCTIONS[name]),
        }
        for x, y in zip(pair["option"](), pair["function"](), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-3)
        backward.add(*ratios(name, pair, 5))
    return [forward, decode, backward]


def masks(progress: Progress) -> list[Table]:
    """Block masks over full attention, and PyTorch's ways to the same."""
    arrays = [normal(1, 2, LENGTH, 64) for _ in range(3)]
    shown = Table(f"block masks over none, (1, 2, {LENGTH}, 64)", ("precision", "none", *MASKS))
    made = {n: numflash.create_block_mask(f, None, None, LENGTH, LENGTH) for n, f in MASKS.items()}
    for precision in ("float32", "int8"):
        progress.step(f"masks {precision}")
        attend = functools.partial(numflash.flex_attention, *arrays, precision=precision)
        calls: Calls = {"none": attend}
        calls |= {n: functools.partial(attend, block_mask=m) for n, m in made.items()}
        shown.add(*ratios(precision, calls, 5))
    tensors = [torch.from_numpy(x[:, :, :4096].copy()) for x in arrays]
    columns = ("function", "numflash", "dense bias", "torch.compile")
    peers = Table("PyTorch over numflash, float32, (1, 2, 4096, 64)", columns)
    bias = torch.zeros(1, 1, 4096, 4096)
    for name, peer in PEER_FUNCTIONS.items():
        progress.step(f"masks, PyTorch's {name}")
        attend = functools.partial(numflash.flex_attention, *tensors, score_mod=FUNCTIONS[name])
        calls = {"numflash": attend, "dense": functools.partial(SDPA, *tensors, attn_mask=bias)}
        if shutil.which("g++") or shutil.which("clang++"):
            compiled = functools.partial(torch.compile(torch_flex), *tensors, score_mod=peer)
            torch.testing.assert_close(compiled(), attend(), atol=1e-3, rtol=0)
            calls["compiled"] = compiled
        row = ratios(name, calls, 5)
        peers.add(*row, *["no compiler"] * (4 - len(row)))
    return [shown, peers]


def options(progress: Progress) -> list[Table]:
    """What options of INT8 cost at L=4096, D=128."""
    case = Case(4096, 128)
    bias = np.zeros((1, 1, 4096, 4096), np.float32)
    given: dict[str, dict[str, Any]] = {
        "none": {},
        "boolean mask": {"attn_mask": bias == 0},
        "bias": {"attn_mask": bias},
        "key lengths": {"key_lengths": np.array([4000])},
        "ALiBi": {"alibi_slopes": SLOPES[:1]},
        "softcap": {"softcap": CAP},
        "pv int16": {"pv": "int16"},
        "pv bf16": {"pv": "bf16"},
        "pv fp32": {"pv": "fp32"},
    }
    progress.step("options")
    attend = functools.partial(numflash.attention, *case.arrays, precision="int8")
    shown = Table(f"options of INT8 over none, {case}", ("", *given))
    shown.add(*ratios("", {name: functools.partial(attend, **x) for name, x in given.items()}, 5))
    return [shown]


SECTIONS = {f.__name__: f for f in (cases, threads, functions, masks, options)}
STEPS = {
    "cases": len(CASES),
    "threads": 5 * len(THREADS) + 1 + len(DECODE) * len(STORAGE),
    "functions": len(PRECISIONS) + len(GROUPS) * len(STORAGE) + len(OPTIONS),
    "masks": 2 + len(PEER_FUNCTIONS),
    "options": 1,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="figures of this machine, as tables")
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="default: all")
    asked = parser.parse_args().sections or list(SECTIONS)
    torch.set_num_threads(1)
    with Progress("machine", sum(STEPS[name] for name in asked)) as progress:
        for name in asked:
            for shown in SECTIONS[name](progress):
                shown.show()


if __name__ == "__main__":
    sys.exit(main())
