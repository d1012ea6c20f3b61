"""`python -m numflash.cuda.validate`: run the emulator's list of problems on a card, compare, then time the shipped kernels.

Writes one JSON object: the card, one row per problem (equal bits with the emulator for INT8, errors against float64 for the rest),
and one row per timing with TFLOP/s, next to PyTorch's scaled_dot_product_attention backends where PyTorch sees the same card, and
to the kernel of Triton's tutorial where Triton is installed and `--triton` names the tutorial's file (06-fused-attention.py; the
wheel does not hold it).
"""
from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from .. import reference, validation
from ..errors import UnsupportedError
from ..interop import convert, widen
from ..quantization import quantize_problem
from . import backward, launch, validate_decode
from .forward import emulated

PLAIN: dict[str, Any] = {"window": None, "alignment": "upper_left", "key_lengths": None, "softcap": 0.0, "alibi_slopes": None,
                         "sinks": None, "pv": None, "layout": "bhld", "return_lse": True}
# name, (B, H, Hkv, L, S, D), precision, options
CASES: tuple[tuple[str, tuple[int, ...], str, dict[str, Any]], ...] = (
    *((f"{p} D={d}", (1, 2, 2, 130, 200, d), p, {}) for p in ("float16", "bfloat16", "int8") for d in (32, 64, 96, 128, 256)),
    *((f"{p} causal", (1, 2, 1, 150, 150, 64), p, {"is_causal": True}) for p in ("float16", "bfloat16", "int8", "float32")),
    *((f"{p} lower right", (2, 2, 2, 70, 190, 64), p, {"is_causal": True, "alignment": "lower_right"}) for p in ("float16",
                                                                                                                 "int8")),
    *((f"{p} window", (1, 2, 2, 150, 300, 64), p, {"window": (40, 3)}) for p in ("float16", "int8")),
    *((f"{p} softcap", (1, 2, 2, 70, 150, 64), p, {"softcap": 2.0}) for p in ("float16", "int8", "float32")),
    *((f"{p} lengths", (2, 2, 2, 40, 150, 64), p, {"key_lengths": np.array([17, 150])}) for p in ("float16", "int8")),
    *((f"{p} grouped decode", (2, 8, 2, 1, 300, 128), p, {}) for p in ("float16", "int8")),
    ("float16 one key", (1, 1, 1, 1, 1, 64), "float16", {}),
)
GRADIENTS: tuple[tuple[str, tuple[int, ...], str, dict[str, Any]], ...] = (
    *((f"gradient {p} D={d}", (1, 2, 2, 130, 200, d), p, {}) for p in ("float16", "bfloat16") for d in (32, 64, 96, 128, 256)),
    *((f"gradient {p} causal, grouped", (2, 4, 2, 150, 150, d), p, {"is_causal": True}) for p in ("float16", "bfloat16")
      for d in (64, 128)),
    ("gradient float16 lower right", (2, 2, 2, 70, 190, 64), "float16", {"is_causal": True, "alignment": "lower_right"}),
    ("gradient float16 window", (1, 2, 2, 150, 300, 64), "float16", {"window": (40, 3)}),
    ("gradient float16 softcap", (1, 2, 2, 70, 150, 64), "float16", {"softcap": 2.0}),
    ("gradient float32 causal, grouped", (1, 4, 2, 70, 90, 64), "float32", {"is_causal": True}),
    ("gradient float16 lengths", (2, 2, 2, 40, 150, 64), "float16", {"key_lengths": np.array([17, 150])}),
)


def problem_of(shape: tuple[int, ...], precision: str, options: dict[str, Any], seed: int = 0) -> validation.Problem:
    """A validated problem on standard normal numbers; quantised for precision "int8"."""
    b, h, hkv, length, s, d = shape
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(n).astype(np.float32) for n in ((b, h, length, d), (b, hkv, s, d), (b, hkv, s, d)))
    given = {**PLAIN, "precision": precision, **options}
    causal = given.pop("is_causal", False)
    problem = validation.problem(q, k, v, None, 0.0, causal, None, True, **given)
    return quantize_problem(problem) if precision == "int8" else problem


def compare(precision: str, problem: validation.Problem, card: tuple, emulator: tuple) -> dict[str, Any]:
    """Card against emulator (equal bits for INT8), and both against the oracle."""
    if precision == "int8":
        equal = all(np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in zip(card, emulator, strict=True))
        return {"equal_bits": equal, "passed": equal}
    plain = replace(problem, query=widen(problem.query), key=widen(problem.key), value=widen(problem.value))
    expected, _ = reference.oracle(plain)
    scale = float(np.linalg.norm(expected)) or 1.0
    errors = [float(np.linalg.norm(widen(out) - expected)) / scale for out in (card[0], emulator[0])]
    # the card adds in another order and keeps fewer bits than the emulator: the same size of error, not the same bits
    return {"card_error": errors[0], "emulator_error": errors[1], "passed": errors[0] <= 2 * errors[1] + 1e-6}


def gradient_operands(problem: validation.Problem, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dO of standard normal numbers; the output as the forward pass rounds it, and LSE, from the oracle."""
    out, lse = reference.oracle(replace(problem, query=widen(problem.query), key=widen(problem.key), value=widen(problem.value)))
    grad, rounded = (convert(x.astype(np.float32), problem.precision)
                     for x in (np.random.default_rng(seed).standard_normal(out.shape), out))
    return grad, rounded, lse.astype(np.float32)


def gradient_row(device: launch.Device, problem: validation.Problem) -> dict[str, Any]:
    """dq, dk and dv of card and emulator against float64; the card twice, for equal bits."""
    grad, out, lse = gradient_operands(problem)
    card, again = (backward.run(problem, grad, out, lse) for _ in range(2))
    emulator, _ = backward.emulated(backward.plan(problem, grad, out, lse, device.arch))
    expected = reference.gradients(problem, widen(grad), widen(out), lse)
    errors = [[float(np.linalg.norm(widen(x) - right)) / (float(np.linalg.norm(right)) or 1.0)
               for x, right in zip(found, expected, strict=True)] for found in (card, emulator)]
    equal = all(a.tobytes() == b.tobytes() for a, b in zip(card, again, strict=True))
    close = all(mine <= 2 * theirs + 1e-6 for mine, theirs in zip(*errors, strict=True))
    return {"card_error": errors[0], "emulator_error": errors[1], "equal_bits": equal, "passed": equal and close}


def correctness(device: launch.Device) -> Iterator[dict[str, Any]]:
    """One row per case of `CASES` and `GRADIENTS`."""
    for name, shape, precision, options in CASES:
        problem = problem_of(shape, precision, options)
        row: dict[str, Any] = {"case": name, "arch": device.arch}
        try:
            card = launch.run(problem)
            row |= compare(precision, problem, card, emulated(launch.plan(problem, device.arch))[:2])
        except UnsupportedError as error:
            row |= validate_decode.refused(error)
        yield row
    for name, shape, precision, options in GRADIENTS:
        row = {"case": name, "arch": device.arch}
        try:
            row |= gradient_row(device, problem_of(shape, precision, options))
        except UnsupportedError as error:
            row |= validate_decode.refused(error)
        yield row


def timings(device: launch.Device, lengths: tuple[int, ...], triton: Callable | None = None) -> Iterator[dict[str, Any]]:
    """B x H sized so that 16384 query rows times heads of 2048 channels are in flight, D 64 and 128, full and causal."""
    for length in lengths:
        for d in (64, 128):
            for causal in (False, True):
                b, h = max(1, 16384 // length), 2048 // d
                flop = 4 * b * h * length * length * d * (0.5 if causal else 1.0)
                for precision in ("float16", "int8"):
                    problem = problem_of((b, h, h, length, length, d), precision, {"is_causal": causal})
                    seconds = device.prepared(launch.plan(problem, device.arch), lambda work: launch.median_seconds(device, work))
                    yield {"kernel": f"numflash {precision}", "L": length, "D": d, "B": b, "H": h, "causal": causal,
                           "seconds": seconds, "tflops": flop / seconds / 1e12}
                for name, seconds in peers(b, h, length, d, causal, triton=triton):
                    yield {"kernel": name, "L": length, "D": d, "B": b, "H": h, "causal": causal, "seconds": seconds,
                           "tflops": flop / seconds / 1e12}
                # gradients: five products count, the two that are computed twice do not
                for name, seconds in (*gradient_times(device, (b, h, h, length, length, d), causal),
                                      *peers(b, h, length, d, causal, gradients=True)):
                    yield {"kernel": f"{name}, backward", "L": length, "D": d, "B": b, "H": h, "causal": causal, "seconds": seconds,
                           "tflops": 2.5 * flop / seconds / 1e12}


def gradient_times(device: launch.Device, shape: tuple[int, ...], causal: bool) -> Iterator[tuple[str, float]]:
    """All launches of the backward pass; LSE and output are made up, which changes no time."""
    problem = problem_of(shape, "float16", {"is_causal": causal})
    lse = np.full(problem.query.shape[:3], np.log(shape[4]), np.float32)
    work = backward.float_backward(problem, problem.query, problem.query, lse, device.arch)
    yield "numflash float16", device.prepared(work.launches, lambda run: launch.median_seconds(device, run))


def tutorial(path: str) -> Callable | None:
    """`attention(q, k, v, causal, scale)` of the tutorial's file; None, and why on standard error, if it cannot be loaded."""
    try:
        spec = importlib.util.spec_from_file_location("triton_tutorial", path)
        module = importlib.util.module_from_spec(spec)                              # type: ignore[arg-type]
        spec.loader.exec_module(module)                                             # type: ignore[union-attr]
        return module.attention
    except (ImportError, OSError, AttributeError, RuntimeError) as error:         # the last: Triton has no driver for the card
        print(f"triton tutorial: {error}", file=sys.stderr)
        return None


def peers(b: int, h: int, length: int, d: int, causal: bool, gradients: bool = False, triton: Callable | None = None
          ) -> Iterator[tuple[str, float]]:
    """PyTorch's flash and cuDNN backends, and Triton's tutorial, on the same shape; nothing where PyTorch sees no card."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    q, k, v = (torch.randn(b, h, length, d, device="cuda", dtype=torch.float16, requires_grad=gradients) for _ in range(3))
    grad = torch.randn_like(q, requires_grad=False)

    def forward() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def seconds(work: Callable[[], Any]) -> float:
        times = []
        for n in range(25):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            out = forward() if gradients else None
            start.record()
            if out is None:
                work()
            else:
                torch.autograd.grad(out, (q, k, v), grad)
            stop.record()
            stop.synchronize()
            if n >= 5:
                times.append(start.elapsed_time(stop) / 1e3)
        return statistics.median(times)

    for name, backend in (("torch flash", SDPBackend.FLASH_ATTENTION), ("torch cudnn", SDPBackend.CUDNN_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                yield name, seconds(forward)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
    if triton is not None and not gradients:
        try:
            if torch.allclose(triton(q, k, v, causal, d**-0.5), forward(), atol=1e-2):        # nothing wrong is ever timed
                yield "triton tutorial", seconds(lambda: triton(q, k, v, causal, d**-0.5))
            else:
                print("triton tutorial: wrong", file=sys.stderr)
        except Exception as error:                     # its compiler has errors of its own, for sizes that it does not take
            print(f"triton tutorial: {error}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """0 if every case agrees and all timings were taken, 1 if not, 2 without a card."""
    parser = argparse.ArgumentParser(prog="python -m numflash.cuda.validate", description=__doc__.split("\n")[0])
    parser.add_argument("--json", default="-", help="file to write (default: standard output)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192, 16384],
                        help="L of the timings; none: no timings")
    parser.add_argument("--triton", help="Triton's tutorial 06-fused-attention.py, to time its kernel too")
    chosen = parser.parse_args(arguments)
    try:
        device = launch.current_device()
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 2
    found: dict[str, Any] = {"device": device.name, "arch": device.arch, "cases": [], "timings": []}
    for row in itertools.chain(correctness(device), validate_decode.correctness()):
        found["cases"].append(row)
        print("ok " if row["passed"] else "BAD", row["case"], file=sys.stderr)
    agreed = all(row["passed"] for row in found["cases"])
    triton = tutorial(chosen.triton) if chosen.triton else None
    try:
        if agreed and chosen.lengths:                              # nothing wrong is ever timed
            for row in itertools.chain(timings(device, tuple(chosen.lengths), triton), validate_decode.timings(device)):
                found["timings"].append(row)
    except Exception as error:                                     # what was found until then is written all the same
        found["stopped"] = f"{type(error).__name__}: {error}"
        print("stopped:", found["stopped"], file=sys.stderr)
    text = json.dumps(found, indent=1)
    if chosen.json == "-":
        print(text)
    else:
        with open(chosen.json, "w") as file:
            file.write(text + "\n")
    return 0 if agreed and "stopped" not in found else 1


if __name__ == "__main__":
    sys.exit(main())
