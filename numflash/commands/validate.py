"""`numflash validate`: everything to check on a new machine, in one run and one JSON.

Bits of every instruction set against the integer model, accuracy against float64, measured peaks,
the kernels' times beside the peaks and a model, and how INT8 attention scales over threads and memory
groups. Every check is a record with "ok"; the command fails where one does not hold. Times never fail it.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import numflash

from .. import reference, validation
from ..cpu import launch
from ..errors import ArgumentError
from ..jit import target
from ..jit.system import memory_groups, scalable_bits
from ..jit.threads import most
from ..measure.console import Progress, Table
from ..measure.metrics import VARIANTS, errors
from ..numerics.quantization import quantize_problem
from ..validation.options import Options
from . import validate_groups, validate_kernels

F = np.float32
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "full": ({"l": 30, "s": 140, "d": 64}, {}),
    "causal": ({"l": 70, "s": 70, "d": 20, "dv": 36}, {"is_causal": True}),
    "window, softcap": ({"l": 9, "s": 200, "d": 16}, {"window": (40, 17), "softcap": 2.0}),
    "one key": ({"l": 1, "s": 1, "d": 1}, {}),
}
BUDGETS = {  # relative L1, by `VARIANTS`; pv "bf16" promises no bits, so it has an error here
    "float32": 2e-6,
    "float16": 2e-3,
    "bfloat16": 1.2e-2,
    "int8": 3e-2,
    "int8, pv bf16": 1.5e-2,
}


def _draw(l: int, d: int, s: int = 0, dv: int = 0, heads: int = 2) -> Any:
    rng = np.random.default_rng(0)
    shapes = (l, d), (s or l, d), (s or l, dv or d)
    return tuple(rng.standard_normal((1, heads, *shape), F) for shape in shapes)


def bits(isa: str, pv: str) -> dict[str, Any]:
    """INT8 attention of one instruction set against `reference.integer_model`.

    Equal bits; with float values their sums are rounded in another order.
    """
    wrong = []
    for name, (shape, options) in CASES.items():
        chosen = Options(precision="int8", pv=pv, return_lse=True, **options)
        q, k, v = _draw(**shape)
        problem = quantize_problem(validation.problem(q, k, v, chosen))
        exact, exact_lse = reference.integer_model(problem)
        out, lse = launch.run(problem, isa)
        worst = 2e-6 if pv == "fp32" else 0.0
        if not np.abs(out - exact).max() <= worst or not np.array_equal(lse, exact_lse):
            wrong.append(name)
    return {"check": "bits", "isa": isa, "pv": pv, "ok": not wrong, "wrong": wrong}


def decoding() -> dict[str, Any]:
    """Decoding of an INT8 cache against the integer model."""
    cache = numflash.KVCache(1, 2, 36, 300, value_dim=20)
    rng = np.random.default_rng(1)
    key, value, query = (
        rng.standard_normal(shape, F)
        for shape in ((1, 2, 150, 36), (1, 2, 150, 20), (1, 12, 1, 36))
    )
    cache.append(key, value)
    k, v = cache.quantized(0)
    seen = np.ones((1, 150), bool)
    exact = reference.integer_decode(reference.decode_query(query[0]), k, v, 36**-0.5, seen, 1)[0]
    equal = bool(np.array_equal(cache.decode(query, splits=1)[0], exact))
    return {"check": "bits", "isa": "decoding", "pv": "int8", "ok": equal, "wrong": []}


def accuracy(variant: str) -> dict[str, Any]:
    """Relative L1 error of one of `VARIANTS` against float64, and what is allowed."""
    q, k, v = _draw(200, 64)
    exact = reference.oracle(validation.problem(q, k, v, Options(is_causal=True)))[0]
    out = numflash.attention(q, k, v, is_causal=True, **VARIANTS[variant])
    found = errors(out, exact).relative_l1
    allowed = BUDGETS[variant]
    ok = bool(found <= allowed)
    return {
        "check": "accuracy",
        "precision": variant,
        "error": found,
        "allowed": allowed,
        "ok": ok,
    }


def scaling(budget: float) -> dict[str, Any]:
    """Speed-up of the INT8 kernel over one thread, at powers of two and at all threads."""
    counts = sorted({n for n in (1, 2, 4, 6, 8, 12, 24, 48) if n < most()} | {1, most()})
    call = validate_kernels.int8_call(128)
    seconds = {n: validate_kernels.seconds_of(call, n, budget) for n in counts}
    gain = {n: seconds[1] / s for n, s in seconds.items()}
    return {"check": "scaling", "seconds": seconds, "speedup": gain, "ok": True}


def _plan(quick: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    isas = target.available()
    for isa in isas[:1] if quick else isas:
        for pv in ("int8",) if quick else ("int8", "int16", "fp32"):
            yield f"bits: {isa} {pv}", partial(bits, isa, pv)
    yield "bits: decoding", decoding
    for variant in ("float32", "int8") if quick else BUDGETS:
        yield f"accuracy: {variant}", partial(accuracy, variant)


def _machine() -> dict[str, Any]:
    import llvmlite
    import numba

    return {
        "numflash": numflash.__version__,
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": target.cpu_name(),
        "isa": target.available(),
        "float_isa": target.available(target.FLOAT_ISAS),
        "vector_bits": scalable_bits(),
        "threads": most(),
        "memory_groups": memory_groups(),
    }


def _row(x: dict[str, Any]) -> tuple[str, str]:
    kind = x["check"]
    if kind == "bits":
        wrong = f": differs in {', '.join(x['wrong'])}" if x["wrong"] else ""
        return f"bits of the integer model, {x['isa']}, pv={x['pv']}", (
            "equal" if x["ok"] else "DIFFERENT"
        ) + wrong
    if kind == "accuracy":
        return (
            f"relative L1 error, {x['precision']}",
            f"{x['error']:.2g} (allowed {x['allowed']:.2g})",
        )
    if kind == "kernel":
        return validate_kernels.row(x)
    if kind == "memory groups":
        return validate_groups.row(x)
    if kind == "scaling":
        return "speed-up over threads", ", ".join(f"{n}: {g:.2f}" for n, g in x["speedup"].items())
    return f"peaks on {x['threads']} thread(s)", (
        f"INT8 {x['int8'] / 1e9:.0f} GOP/s, FP32 {x['float32'] / 1e9:.0f} GFLOP/s, "
        f"read {x['read'] / 1e9:.0f} GB/s, copy {x['copy'] / 1e9:.0f} GB/s"
        + (f", FEXPA {x['fexpa'] / 1e9:.0f} G/s" if x["fexpa"] else "")
    )


def _write(to: str, mode: str, text: str) -> None:
    try:
        with open(to, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ArgumentError(f"to: cannot write {to!r}: {error.strerror}; allowed: a file") from None


def run(quick: bool = False, to: str | None = None) -> dict[str, Any]:
    """Every check; prints the table, and returns what it found (written to `to` as JSON, too).

    quick : the best instruction set, two precisions, one head size, and no scaling

    Raises
    ------
    ArithmeticError
        If a result is wrong: after everything has run and the JSON is written.
    ArgumentError
        If `to` cannot be written.
    """
    from ..measure import roofline

    begin = time.perf_counter()
    if to is not None:
        _write(to, "a", "")  # what an earlier run wrote stays until there is something new
    plan = list(_plan(quick))
    seconds = 0.2 if quick else 0.5  # of each timed run: its least is taken
    found = []
    counts = [] if quick else list(range(1, len(validate_groups.usable()) + 1))
    counts = counts if len(counts) > 1 else []  # one group is the whole machine, measured above
    with Progress("validate", len(plan) + len(counts) + (2 if quick else 10)) as progress:
        for name, check in plan:
            progress.step(name)
            found.append(check())
        progress.step("peaks")
        roofs = [roofline.measure(n) for n in (1,) if quick] or [
            roofline.measure(n) for n in sorted({1, most()})
        ]
        for roof in roofs:
            powers = roofline.measure_fexpa(roof.threads)
            found.append({"check": "peak", **roof.as_dict(), "fexpa": powers, "ok": True})
        for name, record in validate_kernels.checks(quick, roofs[0], seconds):
            progress.step(f"time: {name}")
            found.append(record)
        if not quick:
            progress.step("threads")
            found.append(scaling(seconds))
        for count in counts:
            progress.step(f"memory groups: {count}")
            found.append(validate_groups.groups(count, seconds))
    result = {
        **_machine(),
        "quick": quick,
        "ok": all(x["ok"] for x in found),
        "seconds": time.perf_counter() - begin,
        "checks": found,
    }
    table = Table(f"{result['cpu']}: {', '.join(result['isa'])}", ("check", "result"))
    for x in found:
        table.add(*_row(x), **x)
    table.note = f"it took {result['seconds']:.0f} s"
    table.show()
    if to is not None:
        _write(to, "w", json.dumps(result, indent=1, default=str))
    if not result["ok"]:
        bad = [_row(x)[0] for x in found if not x["ok"]]
        raise ArithmeticError(f"validate: {len(bad)} checks failed: {'; '.join(bad)}")
    return result
