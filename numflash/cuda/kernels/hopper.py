"""What the Hopper kernels share.

Matrix descriptors, and a product whose operands are in swizzled panels.
"""

from __future__ import annotations

import functools
from typing import Any

from ..compile.target import device_function, types
from ..instructions import ptx

i32, u32, u64 = types.int32, types.uint32, types.uint64
# a panel's rows are the span of the swizzle
PANEL_BYTES = 128
PANEL = PANEL_BYTES // 2  # its columns, of 16 bits
# matrix descriptors, 128-byte swizzle: 8 rows are 1024 bytes apart (PTX 9.7.15.5.1.2.2)
DESCRIPTOR = (1 << 62) | (64 << 32)
# by consumer warpgroups; 65536 registers: 128 x 24 + 256 x 240, or 128 x 24 + 384 x 160
MORE = {2: ptx.setmaxnreg_inc[240], 3: ptx.setmaxnreg_inc[160]}
FEWER = ptx.setmaxnreg_dec[24]


@device_function
def descriptor(constant, address):
    """A matrix descriptor for a tile at this shared address."""
    return u64(constant) | u64((address & u32(0x3FFFF)) >> u32(4))


@device_function
def ahead(d, pieces):
    """The descriptor of the data `pieces` times 16 bytes further.

    Only the lower word changes, which the compiler cannot distinguish from a sum of 64 bits: for
    each tile of Q two registers were kept from tile to tile.
    """
    return ptx.words(u32(u32(d) + u32(pieces)), u32(d >> u64(32)))


@functools.cache
def make_issue_scores(multiply: Any, steps: int, q_panel: int, k_panel: int) -> Any:
    """issue_scores(s, dq, dk): issues S = Q . K^T.

    dq, dk : descriptors of the first panels, which are `q_panel` and `k_panel` bytes
    """

    @device_function
    def issue_scores(s, dq, dk):
        for step in range(steps):
            panel, inside = step >> 2, (step & 3) * 2  # 32 bytes further in a panel of four steps
            multiply(
                s,
                0,
                ahead(dq, inside + panel * (q_panel >> 4)),
                ahead(dk, inside + panel * (k_panel >> 4)),
                i32(step != 0),
            )

    return issue_scores


@functools.cache
def make_issue_held(multiply: Any, steps: int, k_panel: int) -> Any:
    """issue_held(s, q, dk): issues S = Q . K^T with Q in registers.

    q : 4 words for each step;  dk : descriptor of the first panel, which is `k_panel` bytes
    """

    @device_function
    def issue_held(s, q, dk):
        for step in range(steps):
            panel, inside = step >> 2, (step & 3) * 2
            multiply(s, 0, q, 4 * step, ahead(dk, inside + panel * (k_panel >> 4)), i32(step != 0))

    return issue_held
