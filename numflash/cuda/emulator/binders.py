"""What runs an instruction of PTX: a function for each, registered by its name.

A binder takes the machine and an instruction and returns `run(mask)`; `mask` is True or one boolean
per thread, and results are written in place (`out=`, `where=`), so a register is one array for the
whole run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .parse import Instruction

if TYPE_CHECKING:
    from .machine import Machine

DTYPES = {
    "u8": np.uint8,
    "s8": np.int8,
    "b8": np.uint8,
    "u16": np.uint16,
    "s16": np.int16,
    "b16": np.uint16,
    "f16": np.float16,
    "u32": np.uint32,
    "s32": np.int32,
    "b32": np.uint32,
    "f32": np.float32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
    "f64": np.float64,
    "pred": np.bool_,
    "bf16": np.uint16,
}
Run = Callable[[Any], Any]
BINDERS: dict[str, Callable[[Machine, Instruction], Run]] = {}


def binds(*names: str) -> Callable:
    def register(function: Callable) -> Callable:
        BINDERS.update(dict.fromkeys(names, function))
        return function

    return register


def write(target: np.ndarray, value: Any, mask: Any) -> None:
    np.copyto(target, value, where=mask)
