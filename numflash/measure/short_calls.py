"""What a short call costs, by each way into numflash, beside PyTorch: medians of calls in turns.

The compiled part is timed by itself, on the operands of an equal call; the rest of a call is
Python.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..api import attention, attention_int8
from ..cpu import launch
from ..cpu.floats.call import addresses
from ..cpu.launch_int8 import Int8Plan
from ..jit.scratch import scratch
from ..numerics.quantization import quantize_qkv
from ..validation import problem
from ..validation.options import Options
from .timing import Calls, in_turns

SHAPES = (  # (B, H, L, D)
    (1, 1, 1, 16),
    (1, 1, 16, 64),
    (1, 1, 64, 64),
    (1, 8, 64, 64),
    (1, 8, 128, 64),
    (1, 8, 512, 64),
)
TOKENS = "by token"  # (B, L, H, D) in memory, as models have it
PEER = "PyTorch"
PEER_BFLOAT16 = "PyTorch bfloat16"
COMPILED = "compiled"
COMPILED_INT8 = "int8, compiled"
NAMES = (
    "arrays", "int8", "int8, ready", COMPILED, COMPILED_INT8, "tensors", "numflash.torch", TOKENS,
    PEER, PEER_BFLOAT16,
)  # fmt: skip
ROUNDS = 25


def _compiled(arrays: list[np.ndarray], precision: str) -> Callable[[], Any] | None:
    """The compiled function of a planned call; None where there is no plan."""
    query, key, value = arrays
    found = problem(query, key, value, Options(precision=precision))
    plan = launch.runner(found)
    if plan is None:
        return None
    q, k, v = plan.operands(*arrays)
    out = np.empty((*q.shape[:3], arrays[2].shape[3]), np.float32)
    plan.run(q, k, v, out, None)  # decides how much scratch memory there is
    room = scratch.take(plan.layout.nbytes)
    *at, out_at, _ = addresses(q, k, v, out, out)
    if isinstance(plan, Int8Plan):
        places = tuple(at)
        return lambda: (
            plan.call(places, out_at, room.address, plan.numbers, plan.strides, plan.factors),
            out,
            room,
        )
    lse = np.empty(q.shape[:3], np.float32)
    more = plan.numbers_of[False, plan.reads_in_place(at[2])], plan.strides, plan.factors
    lse_at = lse.ctypes.data
    return lambda: (plan.call(*at, out_at, lse_at, room.address, *more), out, lse)


def calls(shape: tuple[int, ...]) -> Calls:
    """Contenders by name, each a call without arguments, on the same numbers.

    PyTorch's are left out where it is not installed, the quantised operands' where D is too small
    for them.
    """
    rng = np.random.default_rng(0)
    query, key, value = arrays = [rng.standard_normal(shape, np.float32) for _ in range(3)]
    quantised = quantize_qkv(query, key, value)
    found: Calls = {
        "arrays": lambda: attention(query, key, value),
        "int8": lambda: attention(query, key, value, precision="int8"),
        "int8, ready": lambda: attention_int8(*quantised),
    }
    for name, precision in ((COMPILED, "float32"), (COMPILED_INT8, "int8")):
        call = _compiled(arrays, precision)
        if call is not None:
            found[name] = call
    if find_spec("torch"):
        import torch

        from ..torch import scaled_dot_product_attention as own

        tensors = [torch.from_numpy(x) for x in arrays]
        short = [x.bfloat16() for x in tensors]
        peer = torch.nn.functional.scaled_dot_product_attention
        found["tensors"] = lambda: attention(*tensors)
        found["numflash.torch"] = lambda: own(*tensors)
        tokens = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
        found[TOKENS] = lambda: own(*tokens)
        found[PEER] = lambda: peer(*tensors)
        found[PEER_BFLOAT16] = lambda: peer(*short)
    return found


def measure(shape: tuple[int, ...], rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of one call of each contender, the median of its turns."""
    return in_turns(calls(shape), rounds)
