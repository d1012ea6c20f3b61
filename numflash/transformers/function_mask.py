"""transformers' masks of long prompts as functions: blocks that no row attends to are skipped, and
the dense mask is never made unless something asks for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._pytree import tree_map
from transformers import masking_utils

from ..errors import NumflashError
from ..flex import BlockMask, create_block_mask

# below so many rows the dense mask costs no more than what a function saves; in INT8, whose plain
# blocks are faster, later
FEWEST_ROWS = 512
FEWEST_ROWS_INT8 = 2048


class FunctionMask(torch_flex.BlockMask):
    """A mask (B, 1, L, S) given as a function of indices.

    A BlockMask of PyTorch by type, which transformers hands on as it is; its fields are not filled.

    Attributes
    ----------
    blocks : the function and the blocks that it lets pass
    """

    def __init__(self, blocks: BlockMask, arguments: dict[str, Any]) -> None:
        self.blocks, self._arguments = blocks, arguments
        self._dense: Tensor | None = None
        self.seq_lengths = blocks.seq_lengths

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, 1, L, S)."""
        return self.blocks.shape

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def dense(self) -> Tensor:
        """The same mask as a bool tensor, made once."""
        if self._dense is None:
            self._dense = masking_utils.sdpa_mask(**self._arguments, allow_is_causal_skip=False)
        return self._dense

    def to(self, *args: Any, **options: Any) -> FunctionMask | Tensor:
        """The mask itself, which is on the CPU; of another dtype what the dense one gives."""
        given = (*args, *options.values())
        if any(isinstance(x, (torch.dtype, Tensor)) and x is not torch.bool for x in given):
            return self.dense().to(*args, **options)
        return self

    def contiguous(self) -> FunctionMask:
        """The mask itself."""
        return self

    # ---- a few models compute with the mask by themselves: they get what the dense one gives
    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """PyTorch's functions of it (T5Gemma 2 joins it to another mask)."""

        def dense(x: Any) -> Any:
            return x.dense() if isinstance(x, FunctionMask) else x

        args, kwargs = tree_map(dense, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what Python asks for by itself, before there are fields
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Any:
        return self.dense()[index]

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return repr(self.blocks)

    __str__ = __repr__


def _of_dense(name: str) -> Any:
    def operator(self: FunctionMask, *others: Any) -> Any:
        return getattr(self.dense(), name)(*others)

    return operator


# Python looks for operators at the type
for _name in (
    "invert", "and", "or", "xor", "rand", "ror", "rxor", "add", "radd", "sub", "rsub", "mul", "rmul",
    "eq", "ne", "lt", "le", "gt", "ge",
):  # fmt: skip
    setattr(FunctionMask, f"__{_name}__", _of_dense(f"__{_name}__"))


def function_mask(
    batch: int, rows: int, keys: int, function: Any, options: dict[str, Any]
) -> FunctionMask | None:
    """A mask of transformers as a function; None where a dense one is as fast, or the only way.

    Parameters
    ----------
    batch, rows, keys : of the mask;  function : transformers' mask function
    options : the other arguments of `sdpa_mask`
    """
    padding = options.get("attention_mask")
    device = torch.device(options.get("device", "cpu"))
    if rows < FEWEST_ROWS or device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if _left_out(rows, keys, options):
        return None
    q_offset, kv_offset = (int(options.get(name, 0)) for name in ("q_offset", "kv_offset"))
    seen = function
    if padding is not None and not padding.all():
        padding = masking_utils.prepare_padding_mask(padding, keys, kv_offset)
        seen = masking_utils.and_masks(seen, masking_utils.padding_mask_function(padding))
    seen = masking_utils.add_offsets_to_mask_function(seen, q_offset, kv_offset)
    try:
        blocks = create_block_mask(seen, batch, None, rows, keys)
    except NumflashError:  # a function that has to be called with tensors
        return None
    sizes = {"batch_size": batch, "q_length": rows, "kv_length": keys}
    left_out = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
    arguments = {name: x for name, x in options.items() if name not in left_out}
    return FunctionMask(blocks, {**sizes, "mask_function": function, **arguments})


def _left_out(rows: int, keys: int, options: dict[str, Any]) -> bool:
    """Whether `sdpa_mask` gives None: `is_causal`, or no mask at all, says everything."""
    offset, size = options.get("kv_offset", 0), options.get("local_size")
    padding = masking_utils.prepare_padding_mask(options.get("attention_mask"), keys, offset)
    causal = options.get("allow_is_causal_skip", True) and masking_utils._ignore_causal_mask_sdpa(
        padding, rows, keys, options.get("q_offset", 0), offset, size
    )
    return causal or (
        options.get("allow_is_bidirectional_skip", False)
        and masking_utils._ignore_bidirectional_mask_sdpa(padding, keys, size)
    )
