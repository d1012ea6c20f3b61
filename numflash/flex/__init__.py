"""Score and mask functions written in Python, traced and fused into the kernels.

`tracing` records a function as a `graph`; `intervals` bounds its values, which gives block masks
and proves indices; `program` and `emit` make LLVM IR of it, `machine` keeps the machine code.
May import: `dispatch`, `validation`, `interop`, `jit`; of the kernels only how they call a tile
function, and the vectors' exp2.
"""

from .attention import flex_attention
from .listing import listing
from .masks import BlockMask, and_masks, create_block_mask, or_masks

__all__ = [
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "flex_attention",
    "listing",
    "or_masks",
]
