"""What the operators of `numflash.torch` refuse, and why: tensors, gradients, autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..interop.arguments import choice, mask_array
from ..validation.options import PRECISIONS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class SdpaError(ArgumentError, RuntimeError):
    """Raised where PyTorch's function raises a RuntimeError.

    It is one too, so code that catches a RuntimeError still works.
    """


def check_tensors(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> None:
    """Refuse what the kernels cannot detect themselves.

    Kinds of tensor that they do not read, and dtypes that they would compute less exactly.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(f"{name}: got {type(x).__name__}; allowed: a tensor")
        if x.layout != torch.strided or x.is_nested:
            kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
            raise SdpaError(
                f"{name}: got {kind}; allowed: dense tensors, with attn_mask for padding"
            )
        if x.dtype not in DTYPES:
            raise SdpaError(f"{name}: got dtype {x.dtype}; allowed: {', '.join(map(str, DTYPES))}")
        if x.dtype != query.dtype or x.device != query.device:
            raise SdpaError(
                f"{name}: got {x.dtype} on {x.device}; allowed: as the query, {query.dtype} on {query.device}"
            )
        if x.dim() < 2:
            raise SdpaError(f"{name}: got shape {tuple(x.shape)}; allowed: at least 2 dimensions")
    mask_array("attn_mask", attn_mask)
    check_constants(attn_mask=attn_mask)
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise SdpaError(
            f"attn_mask: got dtype {attn_mask.dtype}; allowed: bool, float32, or the query's {query.dtype}"
        )


def check_constants(**constants: Any) -> None:
    """Refuse what is neither a tensor nor left out."""
    for name, x in constants.items():
        if x is not None and not isinstance(x, Tensor):
            raise ArgumentTypeError(f"{name}: got {type(x).__name__}; allowed: a tensor, or None")


def _differentiated_otherwise(x: Tensor) -> bool:
    """Whether a tensor carries a tangent, or is what a transform of torch.func differentiates by."""
    functions = torch._C._functorch
    while functions.is_functorch_wrapped_tensor(x):
        if functions.is_gradtrackingtensor(x):
            return True
        x = functions.get_unwrapped(x)
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def check_gradients(
    precision: str | None, differentiable: tuple[Tensor | None, ...], **constants: Tensor | None
) -> None:
    """Refuse what would lose a gradient without a word.

    differentiable : query, key, value, and if there are any a mask and sinks
    constants : what has no gradient, by its name
    """
    if precision is not None:
        choice("precision", precision, PRECISIONS)
    transformed = (
        not torch.compiler.is_compiling()
        and (  # the compiler's own level is none of these
            forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None
        )
    )
    if transformed and any(
        _differentiated_otherwise(x)
        for x in (*differentiable, *constants.values())
        if isinstance(x, Tensor)
    ):
        raise UnsupportedError(
            "derivatives: got a tensor of forward-mode differentiation, or of torch.func's grad, jvp or jacrev; "
            "allowed: backward(), torch.autograd.grad()"
        )
    if not torch.is_grad_enabled():
        return
    for name, x in constants.items():
        if x is not None and x.requires_grad:
            raise ArgumentError(
                f"{name}: got a tensor that requires grad, and it would get no gradient; allowed: detach() it"
            )
    watched = [x for x in differentiable if x is not None and x.requires_grad]
    if precision == "int8" and watched:
        raise ArgumentError(
            "precision: got 'int8' with inputs that require grad, and rounding has no gradient; allowed: a call "
            "under torch.no_grad(), or another precision"
        )


def autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors as `torch.autocast` would pass them to PyTorch's function."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in DTYPES else x for x in tensors)
