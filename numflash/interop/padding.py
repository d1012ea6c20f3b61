"""Whether a mask hides nothing but padding."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ..jit.compiler import kernel
from ..jit.memory import array_at

# dtypes of masks: unsigned integers of an element's size, and the bits of a seen key and of a hidden
# one, which are True and False, or 0 and -infinity
KINDS = {
    "bool": (np.uint8, 1, 0),
    "float16": (np.uint16, 0, 0xFC00),
    "bfloat16": (np.uint16, 0, 0xFF80),
    "float32": (np.uint32, 0, 0xFF800000),
}


@functools.cache
def make_count(bits: type, seen: int, hidden: int) -> Callable[..., bool]:
    """count(mask, heads, rows, keys, of_batch, of_heads, of_rows, lengths): whether a mask hides the last
    keys of each batch entry and no others, from all heads and queries alike; how many are seen is written
    to lengths (B,).

    mask : address of (B, heads, rows, keys) elements, whose steps in bytes follow; the keys are contiguous
    bits : the unsigned type of an element's size
    seen, hidden : what stands for such a key
    """

    @kernel
    def count(mask, heads, rows, keys, of_batch, of_heads, of_rows, lengths):
        for b in range(lengths.size):
            at = mask + b * of_batch
            first = array_at(at, (keys,), bits)
            length = 0
            for j in range(keys):
                length += first[j] == seen
            wrong = 0
            for j in range(keys):
                wrong += first[j] != (seen if j < length else hidden)
            for h in range(heads):
                for i in range(rows - 1, -1, -1):  # of causal masks the last differs most
                    if wrong > 0:
                        return False
                    row = array_at(at + h * of_heads + i * of_rows, (keys,), bits)
                    for j in range(keys):
                        wrong += row[j] != first[j]
            if wrong > 0:
                return False
            lengths[b] = length
        return True

    found: Callable[..., bool] = count
    return found
