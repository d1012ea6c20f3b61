"""`python -m numflash.cuda.validate`.

Run the emulator's list of problems on a card, compare, then time the shipped kernels.

Writes one JSON object: the card and the software, one row per problem (equal bits with the emulator
for INT8, errors against float64 for the rest), one per timing with TFLOP/s, next to PyTorch's
backends where PyTorch sees the same card and to the kernel of Triton's tutorial where `--triton`
names its file (06-fused-attention.py), and whether the targets are met.

Kernels are compiled ahead by all cores, into the cache; `--compile ARCH` does only that, and needs
no card. What is then left (the emulator's side of the list on one core, the timings) is meant to
take some ten minutes on an H200, `--quick` two or three: estimates, nothing here has run on a card.
With `--json FILE` the file holds every row as soon as it is there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__, reference, validation
from ...errors import UnsupportedError
from ...interop import convert, widen
from ...options import Options
from ...quantization import quantize_problem
from .. import launch, launch_backward
from ..compile import ARCHITECTURES, compiled
from ..device import Device, current_device, median_seconds
from ..launch_forward import float_forward
from ..operands import Launch, emulated
from . import decode, peers

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_LENGTHS = (1024, 8192)
# query rows of a head and channels of all heads that fill a chip
ROWS = 16384
CHANNELS = 2048
OLDER = "numflash float16, sm_80 code"  # on a Hopper card, beside the kernel of its own
PLAIN: dict[str, Any] = {
    "window": None,
    "alignment": "upper_left",
    "key_lengths": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
    "pv": None,
    "layout": "bhld",
    "return_lse": True,
}
# name, (B, H, Hkv, L, S, D), precision, options
CASES: tuple[tuple[str, tuple[int, ...], str, dict[str, Any]], ...] = (
    *(
        (f"{p} D={d}", (1, 2, 2, 130, 200, d), p, {})
        for p in ("float16", "bfloat16", "int8")
        for d in (32, 64, 96, 128, 256)
    ),
    *(
        (f"{p} causal", (1, 2, 1, 150, 150, 64), p, {"is_causal": True})
        for p in ("float16", "bfloat16", "int8", "float32")
    ),
    *(
        (
            f"{p} lower right",
            (2, 2, 2, 70, 190, 64),
            p,
            {"is_causal": True, "alignment": "lower_right"},
        )
        for p in ("float16", "int8")
    ),
    *(
        (f"{p} window", (1, 2, 2, 150, 300, 64), p, {"window": (40, 3)})
        for p in ("float16", "int8")
    ),
    *(
        (f"{p} softcap", (1, 2, 2, 70, 150, 64), p, {"softcap": 2.0})
        for p in ("float16", "int8", "float32")
    ),
    *(
        (f"{p} lengths", (2, 2, 2, 40, 150, 64), p, {"key_lengths": np.array([17, 150])})
        for p in ("float16", "int8")
    ),
    *((f"{p} grouped decode", (2, 8, 2, 1, 300, 128), p, {}) for p in ("float16", "int8")),
    ("float16 one key", (1, 1, 1, 1, 1, 64), "float16", {}),
)
GRADIENTS: tuple[tuple[str, tuple[int, ...], str, dict[str, Any]], ...] = (
    *(
        (f"gradient {p} D={d}", (1, 2, 2, 130, 200, d), p, {})
        for p in ("float16", "bfloat16")
        for d in (32, 64, 96, 128, 256)
    ),
    *(
        (f"gradient {p} causal, grouped", (2, 4, 2, 150, 150, d), p, {"is_causal": True})
        for p in ("float16", "bfloat16")
        for d in (64, 128)
    ),
    (
        "gradient float16 lower right",
        (2, 2, 2, 70, 190, 64),
        "float16",
        {"is_causal": True, "alignment": "lower_right"},
    ),
    ("gradient float16 window", (1, 2, 2, 150, 300, 64), "float16", {"window": (40, 3)}),
    ("gradient float16 softcap", (1, 2, 2, 70, 150, 64), "float16", {"softcap": 2.0}),
    ("gradient float32 causal, grouped", (1, 4, 2, 70, 90, 64), "float32", {"is_causal": True}),
    (
        "gradient float16 lengths",
        (2, 2, 2, 40, 150, 64),
        "float16",
        {"key_lengths": np.array([17, 150])},
    ),
)


@functools.lru_cache(3)
def _numbers(count: int, seed: int) -> np.ndarray:
    """Standard normal float32 numbers; all timings have as many of them, and draw them once."""
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def problem_of(
    shape: tuple[int, ...], precision: str, options: dict[str, Any], seed: int = 0
) -> validation.Problem:
    """A validated problem on standard normal numbers; quantised for precision "int8"."""
    b, h, hkv, length, s, d = shape
    q, k, v = (
        _numbers(int(np.prod(n)), seed + 3 * i).reshape(n)
        for i, n in enumerate(((b, h, length, d), (b, hkv, s, d), (b, hkv, s, d)))
    )
    given = {**PLAIN, "precision": precision, **options}
    causal = given.pop("is_causal", False)
    problem = validation.problem(q, k, v, Options(None, 0.0, causal, None, True, **given))
    return quantize_problem(problem) if precision == "int8" else problem


def compare(
    precision: str, problem: validation.Problem, card: tuple, emulator: tuple
) -> dict[str, Any]:
    """Card against emulator (equal bits for INT8), and both against the oracle."""
    if precision == "int8":
        equal = all(
            np.array_equal(a.view(np.int32), b.view(np.int32))
            for a, b in zip(card, emulator, strict=True)
        )
        return {"equal_bits": equal, "passed": equal}
    plain = replace(
        problem, query=widen(problem.query), key=widen(problem.key), value=widen(problem.value)
    )
    expected, _ = reference.oracle(plain)
    scale = float(np.linalg.norm(expected)) or 1.0
    errors = [
        float(np.linalg.norm(widen(out) - expected)) / scale for out in (card[0], emulator[0])
    ]
    # the card adds in another order and keeps fewer bits than the emulator: the same size of error,
    # not the same bits
    return {
        "card_error": errors[0],
        "emulator_error": errors[1],
        "passed": errors[0] <= 2 * errors[1] + 1e-6,
    }


def gradient_operands(
    problem: validation.Problem, seed: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dO of standard normal numbers.

    The output as the forward pass rounds it, and LSE, from the oracle.
    """
    out, lse = reference.oracle(
        replace(
            problem, query=widen(problem.query), key=widen(problem.key), value=widen(problem.value)
        )
    )
    grad, rounded = (
        convert(x.astype(np.float32), problem.precision)
        for x in (np.random.default_rng(seed).standard_normal(out.shape), out)
    )
    return grad, rounded, lse.astype(np.float32)


def gradient_row(device: Device, problem: validation.Problem) -> dict[str, Any]:
    """dq, dk and dv of card and emulator against float64; the card twice, for equal bits."""
    grad, out, lse = gradient_operands(problem)
    card, again = (launch_backward.run(problem, grad, out, lse) for _ in range(2))
    emulator, _ = launch_backward.emulated(
        launch_backward.plan(problem, grad, out, lse, device.arch)
    )
    expected = reference.gradients(problem, widen(grad), widen(out), lse)
    errors = [
        [
            float(np.linalg.norm(widen(x) - right)) / (float(np.linalg.norm(right)) or 1.0)
            for x, right in zip(found, expected, strict=True)
        ]
        for found in (card, emulator)
    ]
    equal = all(a.tobytes() == b.tobytes() for a, b in zip(card, again, strict=True))
    close = all(mine <= 2 * theirs + 1e-6 for mine, theirs in zip(*errors, strict=True))
    return {
        "card_error": errors[0],
        "emulator_error": errors[1],
        "equal_bits": equal,
        "passed": equal and close,
    }


def correctness(
    device: Device, cases: Iterable = CASES, gradients: Iterable = GRADIENTS
) -> Iterator[dict[str, Any]]:
    """One row per case."""
    for name, shape, precision, options in cases:
        problem = problem_of(shape, precision, options)
        row: dict[str, Any] = {"case": name, "arch": device.arch}
        try:
            card = launch.run(problem)
            row |= compare(
                precision, problem, card, emulated(launch.plan(problem, device.arch))[:2]
            )
        except UnsupportedError as error:
            row |= decode.refused(error)
        yield row
    for name, shape, precision, options in gradients:
        row = {"case": name, "arch": device.arch}
        try:
            row |= gradient_row(device, problem_of(shape, precision, options))
        except UnsupportedError as error:
            row |= decode.refused(error)
        yield row


def launches(
    arch: str, cases: Iterable, gradients: Iterable, lengths: Iterable[int]
) -> Iterator[tuple[str, Launch]]:
    """(kind of code, launch) of what `correctness` and `timings` will compile, the same kernel many
    times.
    """
    for _, shape, precision, options in cases:
        try:
            work = launch.plan(problem_of(shape, precision, options), arch)
        except UnsupportedError:
            continue
        yield from (("cubin", work), ("ptx", work))
    for _, shape, precision, options in gradients:
        try:
            problem = problem_of(shape, precision, options)
            steps = launch_backward.plan(problem, *gradient_operands(problem), arch).launches
        except UnsupportedError:
            continue
        yield from ((kind, work) for work in steps for kind in ("cubin", "ptx"))
    for d, causal in itertools.product((64, 128), (False, True)) if lengths else ():
        for precision in (
            "float16",
            "int8",
        ):  # as many rows as it takes to get the kernels of long problems
            problem = problem_of((1, 1, 1, 256, 256, d), precision, {"is_causal": causal})
            yield "cubin", launch.plan(problem, arch)
            if precision == "float16":
                yield "cubin", float_forward(problem, arch)
                lse = np.zeros(problem.query.shape[:3], np.float32)
                steps = launch_backward.float_backward(
                    problem, problem.query, problem.query, lse, arch
                ).launches
                yield from (("cubin", step) for step in steps)


def _compile(kind: str, factory: Callable, arch: str, constants: tuple) -> None:
    compiled(factory, arch, kind, **dict(constants))


def compile_ahead(arch: str, cases: Iterable, gradients: Iterable, lengths: Iterable[int]) -> int:
    """Compile what the list needs into the cache on disk, one process per core.

    How many kernels that were.
    """
    wanted = {
        (kind, work.factory, work.arch, tuple(sorted(work.constants.items())))
        for kind, work in launches(arch, cases, gradients, lengths)
    }
    with ProcessPoolExecutor(
        os.cpu_count(), get_context("spawn")
    ) as pool:  # a fork would share the driver's state
        for n, done in enumerate(as_completed(pool.submit(_compile, *item) for item in wanted)):
            done.result()
            _say(f"compiled {n + 1} of {len(wanted)}")
    return len(wanted)


def timings(
    device: Device, lengths: Iterable[int], triton: Callable | None = None
) -> Iterator[dict[str, Any]]:
    """B x H sized so that 16384 query rows times heads of 2048 channels are in flight, D 64 and
    128, full and causal.
    """
    for length, d, causal in itertools.product(lengths, (64, 128), (False, True)):
        b = max(1, ROWS // length)
        h = CHANNELS // d
        flop = 4 * b * h * length * length * d * (0.5 if causal else 1.0)
        place = {"L": length, "D": d, "B": b, "H": h, "causal": causal}

        def row(
            name: str, found: float | str, flop: float = flop, place: dict[str, Any] = place
        ) -> dict[str, Any]:
            took = (
                {"error": found}
                if isinstance(found, str)
                else {"seconds": found, "tflops": flop / found / 1e12}
            )
            return {"kernel": name, **place, **took}

        for name, found in itertools.chain(
            forward_times(device, (b, h, h, length, length, d), causal),
            peers.times(b, h, length, d, causal, triton=triton),
        ):
            yield row(name, found)
        # gradients: five products count, the two that are computed twice do not
        for name, found in itertools.chain(
            gradient_times(device, (b, h, h, length, length, d), causal),
            peers.times(b, h, length, d, causal, gradients=True),
        ):
            yield row(f"{name}, backward", found, 2.5 * flop)


def forward_times(
    device: Device, shape: tuple[int, ...], causal: bool
) -> Iterator[tuple[str, float]]:
    """What ships for the card, and on Hopper the float16 kernel that it replaces."""
    for precision in ("float16", "int8"):
        problem = problem_of(shape, precision, {"is_causal": causal})
        kernels = {f"numflash {precision}": launch.plan(problem, device.arch)}
        if device.arch == "sm_90a" and precision == "float16":
            kernels[OLDER] = float_forward(problem, device.arch)
        for name, work in kernels.items():
            yield name, device.prepared(work, lambda run: median_seconds(device, run))


def gradient_times(
    device: Device, shape: tuple[int, ...], causal: bool
) -> Iterator[tuple[str, float]]:
    """All launches of the backward pass; LSE and output are made up, which changes no time."""
    problem = problem_of(shape, "float16", {"is_causal": causal})
    lse = np.full(problem.query.shape[:3], np.log(shape[4]), np.float32)
    work = launch_backward.float_backward(problem, problem.query, problem.query, lse, device.arch)
    yield (
        "numflash float16",
        device.prepared(work.launches, lambda run: median_seconds(device, run)),
    )


def targets(rows: Iterable[dict[str, Any]], arch: str) -> list[dict[str, Any]]:
    """What is to be reached.

    The median over the shapes that both took, of the peer's time over ours, or of the share of a
    copy.
    """
    rows = list(rows)
    hopper = arch == "sm_90a"
    times = {
        (row["kernel"], tuple(row[x] for x in ("L", "D", "causal"))): row["seconds"]
        for row in rows
        if "L" in row and "seconds" in row
    }
    goals = [
        (OLDER if hopper else "numflash float16", "torch flash", 0.9),
        ("numflash int8", "numflash float16", 1.5),
    ]
    if hopper:
        goals += [
            ("numflash float16", "torch flash", 1.0),
            ("numflash float16", "torch cudnn", 0.85),
        ]
    found = [
        (
            own,
            peer,
            wanted,
            [
                times[peer, place] / mine
                for (name, place), mine in times.items()
                if name == own and (peer, place) in times
            ],
        )
        for own, peer, wanted in goals
    ]
    found += [
        (row["kernel"], "a copy's rate", 0.8, [row["share_of_copy"]])
        for row in rows
        if "share_of_copy" in row
    ]
    return [
        {
            "kernel": own,
            "against": peer,
            "wanted": wanted,
            "shapes": len(ratios),
            "median": statistics.median(ratios) if ratios else None,
            "worst": min(ratios, default=None),
            "met": statistics.median(ratios) >= wanted if ratios else None,
        }
        for own, peer, wanted, ratios in found
    ]


def shown(row: dict[str, Any]) -> str:
    """A row in one line."""
    if "case" in row:
        why = row.get("error") or row.get("skipped") or ""
        return f"{'ok ' if row['passed'] else 'BAD'} {row['case']}{why and ': '}{why}"
    place = ", ".join(f"{x} {row[x]}" for x in ("L", "S", "D", "causal") if x in row)
    if "error" in row:
        return f"{row['kernel']}, {place}: {row['error']}"
    rate = f"{row['tflops']:.1f} TFLOP/s" if "tflops" in row else ""
    rate = (
        f"{100 * row['share_of_copy']:.0f} % of a copy's rate" if "share_of_copy" in row else rate
    )
    return f"{row['kernel']}, {place}: {1e3 * row['seconds']:.3f} ms {rate}"


def verdict(goal: dict[str, Any]) -> str:
    """A target in one line."""
    what = f"{goal['kernel']} against {goal['against']}, {goal['wanted']:g} wanted"
    if goal["met"] is None:
        return f"{what}: no shape that both took"
    return f"{what}: {goal['median']:.2f} (worst {goal['worst']:.2f} of {goal['shapes']}), {'met' if goal['met'] else 'NOT MET'}"


_STARTED = time.monotonic()


def _say(text: str) -> None:
    print(f"{time.monotonic() - _STARTED:6.0f} s  {text}", file=sys.stderr, flush=True)


def _write(found: dict[str, Any], path: str) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    if path != "-":
        new = Path(path + ".new")
        new.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(new, path)


def main(arguments: list[str] | None = None) -> int:
    """0 if every case agrees and all timings were taken, 1 if not, 2 without a card."""
    parser = argparse.ArgumentParser(
        prog="python -m numflash.cuda.validate", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--json",
        default="-",
        help="file to write after every row (default: standard output, at the end)",
    )
    parser.add_argument("--quick", action="store_true", help="every third problem, two lengths")
    parser.add_argument(
        "--lengths", type=int, nargs="*", help="L of the timings, powers of two; none: no timings"
    )
    parser.add_argument(
        "--triton", help="Triton's tutorial 06-fused-attention.py, to time its kernel too"
    )
    parser.add_argument(
        "--compile",
        choices=ARCHITECTURES,
        metavar="ARCH",
        help="only compile what this architecture will need",
    )
    chosen = parser.parse_args(arguments)
    lengths = (
        (QUICK_LENGTHS if chosen.quick else LENGTHS)
        if chosen.lengths is None
        else tuple(chosen.lengths)
    )
    every = 3 if chosen.quick else 1
    cases = CASES[::every]
    gradients = GRADIENTS[::every]
    decoding = decode.CASES[::every]
    if chosen.compile:
        _say(
            f"{compile_ahead(chosen.compile, cases, gradients, lengths)} kernels for {chosen.compile} are in the cache"
        )
        return 0
    try:
        device = current_device()
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 2
    found: dict[str, Any] = {
        "device": device.name,
        "arch": device.arch,
        "multiprocessors": device.multiprocessors,
        "numflash": __version__,
        "software": peers.software(),
        "cases": [],
        "timings": [],
    }
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # killed: what was found until then is written
    try:
        measure(found, device, (cases, gradients, decoding), lengths, chosen)
    except (Exception, KeyboardInterrupt) as error:
        found["stopped"] = f"{type(error).__name__}: {error}"
        _say(f"stopped: {found['stopped']}")
    found["seconds"] = time.monotonic() - _STARTED
    _write(found, chosen.json)
    if chosen.json == "-":
        print(json.dumps(found, indent=1))
    return 0 if "stopped" not in found and all(row["passed"] for row in found["cases"]) else 1


def measure(
    found: dict[str, Any],
    device: Device,
    lists: tuple,
    lengths: tuple[int, ...],
    chosen: argparse.Namespace,
) -> None:
    """Fill `found`: compile, then compare, then, if all agrees, time."""
    cases, gradients, decoding = lists

    def take(rows: Iterable[dict[str, Any]], into: str, count: int) -> None:
        for n, row in enumerate(rows):
            found[into].append(row)
            _write(found, chosen.json)
            _say(f"{n + 1}/{count} {shown(row)}")

    _say(
        f"{device.name}, {device.arch}: {len(cases) + len(gradients) + len(decoding)} problems, lengths {lengths}"
    )
    compile_ahead(device.arch, cases, gradients, lengths)
    take(
        itertools.chain(correctness(device, cases, gradients), decode.correctness(decoding)),
        "cases",
        len(cases) + len(gradients) + len(decoding),
    )
    if not lengths or not all(
        row["passed"] for row in found["cases"]
    ):  # nothing wrong is ever timed
        return
    triton = None
    if chosen.triton:
        try:
            triton = peers.tutorial(chosen.triton)
        except peers.Missing as error:
            found["timings"].append({"kernel": "triton tutorial", "error": str(error)})
            _say(f"triton tutorial: {error}")
    take(
        timings(device, lengths, triton),
        "timings",
        len(lengths) * 4 * (9 if device.arch == "sm_90a" else 8),
    )
    take(decode.timings(device), "timings", 4)
    found["targets"] = targets(found["timings"], device.arch)
    for goal in found["targets"]:
        _say(verdict(goal))


if __name__ == "__main__":
    sys.exit(main())
