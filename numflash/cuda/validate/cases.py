"""The problems of a validation: shapes, options and numbers."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from ... import reference, validation
from ...interop.arguments import EMULATED
from ...interop.arrays import convert
from ...numerics.quantization import quantize_problem
from ...validation.options import Options

# name, (B, H, Hkv, L, S, D), precision, options of `numflash.attention`; the arrays among them are
# named: attn_mask "bool" or "float", alibi_slopes, sinks and score_mod True
Case = tuple[str, tuple[int, ...], str, dict[str, Any]]
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_LENGTHS = (1024, 8192)
# query rows of a head and channels of all heads that fill a chip
ROWS = 16384
CHANNELS = 2048
PLAIN: dict[str, Any] = {
    "is_causal": False,
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
CASES: tuple[Case, ...] = (
    *(
        # 330 keys are two tiles of 176
        (f"{p} D={d}", (1, 2, 2, 130, 330 if d in (96, 128) else 200, d), p, {})
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
    *(
        (f"int8 pv int16 D={d}", (1, 2, 1, 130, 200, d), "int8", {"pv": "int16"})
        for d in (64, 128, 256)
    ),
    # on the card in parts of the keys
    *((f"{p} few rows", (1, 8, 2, 3, 1500, 64), p, {}) for p in ("float16", "bfloat16")),
    ("float16 few rows, window", (1, 2, 2, 40, 1500, 64), "float16", {"window": (900, None)}),
    ("float16 one key", (1, 1, 1, 1, 1, 64), "float16", {}),
    *(
        (f"{p} causal D={d}", (1, 2, 1, length, length, d), p, {"is_causal": True})
        for p, d, length in (
            ("float16", 128, 300),
            ("float16", 256, 150),
            ("int8", 128, 300),
            ("bfloat16", 128, 150),
        )
    ),
    *(
        (f"{p} {name}", (2, 4, 2, 150, 200, 64), p, options)
        for name, options in (
            ("mask", {"attn_mask": "bool"}),
            ("bias", {"attn_mask": "float"}),
            ("ALiBi", {"alibi_slopes": True}),
            ("sinks", {"sinks": True}),
        )
        for p in ("float16", "int8", "float32")
    ),
    *(
        (f"{p} score function", (1, 2, 2, 70, 150, 64), p, {"score_mod": True})
        for p in ("float16", "float32")
    ),
)
# Several turns of every persistent block and rings that are filled again and again: too long for the
# emulator, so these are compared with float64 and the integer model alone.
LONG_CASES: tuple[Case, ...] = (
    *(
        (
            f"{p} long D={d}{', causal' * causal}",
            # causal tiles of 192 rows are for more of them
            (2, 16, 16, *(2 * [1500 if causal and d == 64 else 1000]), d),
            p,
            {"is_causal": causal},
        )
        for p, dims in (("float16", (128, 64, 256)), ("bfloat16", (128,)))
        for d in dims
        for causal in (False, True)
    ),
    ("float16 long window", (2, 16, 16, 1000, 1000, 128), "float16", {"window": (300, 20)}),
    *(
        (
            f"int8 long D={d}{', causal' * causal}",
            (1, 4, 4, 1000, 1000, d),
            "int8",
            {"is_causal": causal},
        )
        for d in (128, 64, 256)
        for causal in (False, True)
    ),
)
LONG_GRADIENTS: tuple[Case, ...] = tuple(
    (
        f"gradient {p} long D={d}{', causal' * causal}",
        (1, 4, 4, 1000, 1000, d),
        p,
        {"is_causal": causal},
    )
    for p, d in (("float16", 128), ("float16", 64), ("bfloat16", 128))
    for causal in (False, True)
)
GRADIENTS: tuple[Case, ...] = (
    *(
        (f"gradient {p} D={d}", (1, 2, 2, 130, 200, d), p, {})
        for p in ("float16", "bfloat16")
        for d in (32, 64, 96, 128, 256)
    ),
    *(
        (f"gradient {p} causal, grouped, D={d}", (2, 4, 2, 150, 150, d), p, {"is_causal": True})
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


def distance(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """The score function of the problems that have one."""
    return score - 0.02 * abs(q - k)


def _arrays(shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The arrays that options name."""
    b, h, _, length, s, _ = shape
    rng, found = np.random.default_rng(2), dict(options)
    kind = options.get("attn_mask")
    if kind == "bool":
        found["attn_mask"] = rng.random((b, 1, length, s)) < 0.7
    elif kind == "float":
        found["attn_mask"] = rng.standard_normal((b, 1, length, s), np.float32)
    if "alibi_slopes" in options:
        found["alibi_slopes"] = (2.0 ** -np.arange(1, h + 1)).astype(np.float32)
    if "sinks" in options:
        found["sinks"] = rng.standard_normal(h, np.float32)
    return found


def floats_of(
    shape: tuple[int, ...], precision: str, options: dict[str, Any], seed: int = 0
) -> validation.Problem:
    """A validated problem on standard normal numbers; of float32 arrays for precision "int8"."""
    b, h, hkv, length, s, d = shape
    q, k, v = (
        _numbers(int(np.prod(n)), seed + 3 * i).reshape(n)
        for i, n in enumerate(((b, h, length, d), (b, hkv, s, d), (b, hkv, s, d)))
    )
    given = {**PLAIN, "precision": precision, **_arrays(shape, options)}
    function = given.pop("score_mod", None)
    problem = validation.problem(q, k, v, Options(enable_gqa=True, **given))
    if function is None:
        return problem
    # by name: `flex` stands above `cuda`, and only this problem needs it
    flex = importlib.import_module("numflash.flex.attention")
    return problem.changed(functions=flex.fuse(distance, None, problem))


def problem_of(
    shape: tuple[int, ...], precision: str, options: dict[str, Any], seed: int = 0
) -> validation.Problem:
    """The same, quantised for precision "int8"."""
    problem = floats_of(shape, precision, options, seed)
    return quantize_problem(problem) if precision == "int8" else problem


def emulated_as(arch: str) -> str:
    """The architecture whose kernels the emulator runs for one: Blackwell runs what sm_80 does."""
    return arch if arch in EMULATED else "sm_80"


def gradient_operands(
    problem: validation.Problem, seed: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dO of standard normal numbers.

    The output as the forward pass rounds it, and LSE, from the oracle.
    """
    out, lse = reference.oracle(problem)
    grad, rounded = (
        convert(x.astype(np.float32), problem.precision)
        for x in (np.random.default_rng(seed).standard_normal(out.shape), out)
    )
    return grad, rounded, lse.astype(np.float32)
