"""What the two float32 kernels read of a query and a key: the mask, the bias, the slope of the head.

Their `strides` are bytes of the mask, then of the bias: batch, head, query, key.
"""

from __future__ import annotations

from ...tiling import tiling
from ..compile.target import device_function, types
from ..instructions import ptx
from .scores import LOG2E

u32, u64, f32 = types.uint32, types.uint64, types.float32
WARPS = tiling("sm_80", "float32").block_q  # rows of a block


@device_function
def mask_allows(at, strides, batch, head, query, key):
    """Whether the boolean mask at `at` lets a query attend to a key."""
    ahead = batch * strides[0] + head * strides[1] + query * strides[2] + key * strides[3]
    return ptx.load_global_u8(at + u64(ahead)) != u32(0)


@device_function
def bias_of(at, strides, batch, head, query, key):
    """What the bias at `at` adds to a score: -inf hides the key."""
    ahead = batch * strides[4] + head * strides[5] + query * strides[6] + key * strides[7]
    return ptx.load_global_f32(at + u64(ahead))


@device_function
def slope_of(slopes, batch, heads, head):
    """ALiBi's slope of a head, in units of log2."""
    return ptx.load_global_f32(slopes + u64((batch * heads + head) * 4)) * LOG2E
