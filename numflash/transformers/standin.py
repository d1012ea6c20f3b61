"""What a resident cache passes to the attention function in place of keys and values.

Their shape, and where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, UnsupportedError

MOST_BLANKS = 16
INQUIRIES = ("__get__", "__len__", "__repr__", "dim", "numel", "size", "stride", "is_contiguous")
TRACING = (
    "_is_view",
    "untyped_storage",
    "is_inference",
)  # the first thing torch.compile reads of a tensor


# Layers of a pass ask for the same blank; a dictionary, which torch.compile traces without a word.
_blanks: dict[tuple[Any, ...], Tensor] = {}


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor on the meta device; those of inference mode are not for use outside."""
    kind = shape, dtype, torch.is_inference_mode_enabled()
    found = _blanks.get(kind)
    if found is None:
        if len(_blanks) >= MOST_BLANKS:
            _blanks.clear()
        found = _blanks[kind] = torch.empty(shape, dtype=dtype, device="meta")
    return found


class StandIn(Tensor):
    """A tensor on the meta device. Anything but asking for its shape, dtype or device is refused.

    So an attention implementation that does not support the cache fails instead of computing with
    nothing.
    """

    layer: Any

    @staticmethod
    def of(x: Tensor, tokens: int, layer: Any) -> StandIn:
        """For keys or values (B, Hkv, n, D) of which the cache holds `tokens`."""
        return StandIn.shaped((*x.shape[:2], tokens, x.shape[3]), x.dtype, layer)

    @staticmethod
    def shaped(shape: tuple[int, ...], dtype: torch.dtype, layer: Any) -> StandIn:
        """Of this shape (B, Hkv, tokens, D)."""
        made = _blank(shape, dtype).as_subclass(StandIn)
        made.layer = layer
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse all that computes."""
        name = getattr(func, "__name__", str(func))
        if name in INQUIRIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in TRACING:
            raise UnsupportedError(
                "torch.compile: got a model with a ResidentCache, which cannot be compiled; allowed: the model as it is"
            )
        raise ArgumentError(
            f"past_key_values: got a ResidentCache, whose keys and values stay in the cache, and {name!r} of them "
            "was asked for; allowed: model.set_attn_implementation('numflash'), on models that pass keys and "
            "values from the cache to attention unchanged"
        )
