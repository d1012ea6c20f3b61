"""Compile every kernel ahead of its first call, by calling it on a small problem."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..api import attention, attention_backward
from ..cache.kvcache import KVCache
from ..errors import UnsupportedError
from ..jit import target
from ..jit.cache_files import files
from ..measure.console import Progress, Table

PRECISIONS: tuple[dict[str, Any], ...] = (
    {"precision": "int8"},
    {"precision": "int8", "pv": "int16"},
    {"precision": "int8", "pv": "bf16"},
    {"precision": "int8", "pv": "fp32"},
    {"precision": "float32"},
    {"precision": "bfloat16"},
    {"precision": "float16"},
)
MASKS = {
    "no mask": None,
    "bool mask": np.ones((3, 3), bool),
    "additive mask": np.zeros((3, 3), np.float32),
}

HEAD_DIMS = 8, 64  # rows that end within a vector, which go the general way in INT8, and whole ones
GROUPS = 1, 4, 7, 8  # query heads of a KV head in the models people run


def forward(impl: str, options: dict[str, Any], mask: np.ndarray | None) -> None:
    """One call for each kind of head size."""
    for head_dim in HEAD_DIMS:
        x = np.ones((1, 1, 3, head_dim), np.float32)
        attention(x, x, x, mask, impl=impl, **options)


def decode(dtype: str, group: int, batch: int) -> None:
    """One append and one decode.

    64 sequences are enough work for the kernels of several threads.
    """
    cache = KVCache(batch, 1, 64, 128, dtype)
    x = np.ones((batch, 1, 128, 64), np.float32)
    cache.append(x, x)
    cache.decode(np.ones((batch, group, 1, 64), np.float32))


def gradient(impl: str, mask: np.ndarray | None = None) -> None:
    """A forward and a backward pass; a key that is not finite is done again in float64."""
    x = np.ones((1, 1, 3, 8), np.float32)
    y = x.copy()
    y[0, 0, 2] = np.inf
    for key in (x, y):
        out, lse = attention(x, key, x, mask, return_lse=True, impl=impl)
        attention_backward(x, x, key, x, out, lse, attn_mask=mask, impl=impl)


def jobs() -> list[tuple[str, Callable[[], Any]]]:
    """(name, call) of everything that compiles; masks come as broadcast views, the usual case."""
    found: list[tuple[str, Callable[[], Any]]] = []
    for impl in ("cpu", "portable"):
        for options in PRECISIONS:
            for words, mask in MASKS.items():
                if impl == "portable" and mask is not None:
                    continue
                name = f"{' '.join(options.values())} {target.available()[0] if impl == 'cpu' else impl}, {words}"
                found.append((name, functools.partial(forward, impl, options, mask)))
    for impl in ("cpu", "portable"):
        found.append(
            (
                f"gradient {target.available(target.FLOAT_ISAS)[0] if impl == 'cpu' else impl}",
                functools.partial(gradient, impl),
            )
        )
    for words, mask in list(MASKS.items())[1:]:
        found.append((f"gradient, {words}", functools.partial(gradient, "cpu", mask)))
    for dtype in ("int8", "float32"):
        for group in GROUPS:
            for batch in (1, 64):
                name = f"KV cache {dtype}, {group} query heads each, {'one thread' if batch == 1 else 'threads'}"
                found.append((name, functools.partial(decode, dtype, group, batch)))
    return found


def run() -> dict[str, Any]:
    """Compile everything, with progress.

    Returns the seconds each took (near 0 where the disk cache had it).
    """
    table = Table("compiled", ("kernel", "s"))
    work = jobs()
    start = time.perf_counter()
    with Progress("warmup", len(work)) as progress:
        for name, call in work:
            progress.step(name)
            begin = time.perf_counter()
            try:
                call()
            except UnsupportedError as error:
                table.add(name, "not here", kernel=name, seconds=None, reason=str(error))
                continue
            seconds = time.perf_counter() - begin
            table.add(name, f"{seconds:.2f}", kernel=name, seconds=seconds)
    total = time.perf_counter() - start
    table.note = f"{total:.1f} s in all; {len(files())} files in the disk cache"
    table.show()
    return {"seconds": total, "kernels": table.records}
