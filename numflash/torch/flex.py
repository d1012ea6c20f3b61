"""FlexAttention on tensors: PyTorch's signature and block masks, numflash's kernels, gradients."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import _get_current_function_mode_stack

from ..api import attention_backward
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..flex import BlockMask, captured
from ..flex import flex_attention as attend
from ..interop.arguments import flag
from .checks import autocast, check_gradients, check_tensors
from .operator import no_second_derivatives, pytorch_threads
from .routing import use

_converted: WeakKeyDictionary[Any, BlockMask] = WeakKeyDictionary()


def _block_mask(given: Any) -> BlockMask | None:
    """A block mask of ours, or PyTorch's as one."""
    if given is None or isinstance(given, BlockMask):
        return given
    if not isinstance(given, torch_flex.BlockMask):
        raise ArgumentTypeError(
            f"block_mask: got {type(given).__name__}; allowed: a BlockMask of PyTorch or numflash, or None"
        )
    if given not in _converted:
        counts, indices, full_counts, full_indices = (
            None if x is None else x.cpu()
            for x in (
                given.kv_num_blocks,
                given.kv_indices,
                given.full_kv_num_blocks,
                given.full_kv_indices,
            )
        )
        made = BlockMask.from_kv_blocks(
            counts,
            indices,
            full_counts,
            full_indices,
            given.BLOCK_SIZE,
            given.mask_mod,
            given.seq_lengths,
        )
        made._by_function = True  # PyTorch's own code on the CPU uses nothing but the function
        _converted[given] = made
    return _converted[given]


class _Gradients(torch.autograd.Function):
    """Gradients of query, key and value; a function of its own, so that theirs are refused."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        functions: Any,
        options: Any,
    ) -> Any:
        score_mod, block_mask = functions
        options = {name: x for name, x in options.items() if name != "pv"}  # of "int8" only
        operands = (x.detach() for x in (grad_out, query, key, value, out, lse))
        with pytorch_threads():
            return attention_backward(
                *operands, score_mod=score_mod, block_mask=block_mask, **options
            )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return no_second_derivatives(ctx, *grads)


class _Flex(torch.autograd.Function):
    """out and lse; the lse is a by-product without a gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, functions: Any, options: Any
    ) -> Any:
        with pytorch_threads():
            q, k, v = (x.detach() for x in (query, key, value))
            score_mod, block_mask = functions
            out, lse = attend(q, k, v, score_mod, block_mask, return_lse=True, **options)
        ctx.functions, ctx.options = functions, options
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> Any:
        if torch._C._functorch.is_legacy_batchedtensor(grad_out):
            raise UnsupportedError(
                "grad_outputs: got a batch of gradients (is_grads_batched, vectorize); allowed: one at a time"
            )
        found = _Gradients.apply(grad_out, *ctx.saved_tensors, ctx.functions, ctx.options)
        return (*found, None, None)


@torch.compiler.disable
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    precision: str | None = None,
    pv: str | None = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention` by numflash's kernels, compiled without a
    C++ compiler.

    Parameters
    ----------
    query : (B, H, L, D) tensor;  key : (B, Hkv, S, D);  value : (B, Hkv, S, Dv)
        float32, float16 or bfloat16; may require gradients, on the CPU. On a card as
        `numflash.flex_attention` takes them.
    score_mod : function of (score, b, h, q_idx, kv_idx), or None
        Captured tensors are constants, on the CPU also where the query is on a card; one that
        requires a gradient is refused while gradients are on.
    block_mask : BlockMask of PyTorch or of numflash, or None
        PyTorch's is read once: a changed one has to be a new object.
    scale, enable_gqa, return_lse, return_aux
        As in PyTorch's; `max_scores` cannot be asked for. The lse has no gradient.
    kernel_options
        Taken and not used.
    precision, pv
        As `numflash.attention` takes them. "int8" is for inference.

    Returns
    -------
    out : (B, H, L, Dv), or (out, lse), or (out, AuxOutput) with `return_aux`

    Notes
    -----
    Inside `torch.compile` the call is a graph break; `torch.vmap` is refused.

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError
    """
    return_lse = flag("return_lse", return_lse)
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise ArgumentTypeError(
            f"return_aux: got {type(return_aux).__name__}; allowed: an AuxRequest of PyTorch, or None"
        )
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise UnsupportedError(
            "return_aux: max_scores is not computed; allowed: AuxRequest(lse=True)"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise ArgumentTypeError(
                f"{name}: got {type(x).__name__}; allowed: a tensor of 4 dimensions"
            )
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise UnsupportedError(
                f"{name}: a tensor inside torch.func cannot be read; allowed: outside"
            )
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value, None)
    check_gradients(precision, (query, key, value))
    mask = _block_mask(block_mask)
    if torch.is_grad_enabled():
        mask_mod = None if mask is None else mask.mask_mod
        if any(isinstance(x, Tensor) and x.requires_grad for x in captured(score_mod, mask_mod)):
            raise ArgumentError(
                "score_mod: a captured tensor requires a gradient, which is not computed; allowed: detach()"
            )
    options = {"scale": scale, "enable_gqa": enable_gqa, "precision": precision, "pv": pv}
    out, lse = _Flex.apply(query, key, value, (score_mod, mask), options)
    if return_aux is not None:
        return out, torch_flex.AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    precision: str | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention of grouped heads under a block mask, with gradients.

    `options` are scale, softcap, sinks and pv as `numflash.attention` takes them; sinks are constants.
    """
    query, key, value = autocast(query, key, value)
    asked = {**options, "enable_gqa": True, "precision": precision}
    out: Tensor = _Flex.apply(query, key, value, (None, block_mask), asked)[0]
    return out


_TORCH = torch_flex.flex_attention
LIBRARIES = ("torch.", "numpy.", "numba.", "llvmlite.", "scipy.", "sympy.")  # do not call it
_lock = threading.Lock()
_places: list[tuple[dict[str, Any], str]] = []  # where `_routed` replaces PyTorch's function
_inside = 0


@torch.compiler.disable
@functools.wraps(_TORCH)
def _routed(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's function while a thread is inside `use`, numflash's in that thread."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, use):
            return mode.answer(flex_attention, _TORCH, args, kwargs)
    return _TORCH(*args, **kwargs)


def route(on: bool) -> None:
    """Enter or leave a block in which `use` answers PyTorch's flex_attention.

    PyTorch calls no mode for this function, so its name is bound to ours in every module.
    """
    global _inside
    with _lock:
        _inside += 1 if on else -1
        if on and _inside == 1:
            for path, module in list(sys.modules.items()):
                names = getattr(module, "__dict__", None)
                library = path.startswith(LIBRARIES) and module is not torch_flex
                if library or not isinstance(names, dict) or names is globals():
                    continue
                for name in [n for n, x in list(names.items()) if x is _TORCH]:
                    names[name] = _routed
                    _places.append((names, name))
        elif not on and not _inside:
            for names, name in _places:
                if names.get(name) is _routed:
                    names[name] = _TORCH
            _places.clear()
