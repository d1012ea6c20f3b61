"""Attention of tensors over sequences packed one behind the other, with gradients."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import varlen
from ..dispatch.option_gradients import OPERANDS
from ..errors import ArgumentTypeError, UnsupportedError
from ..flex.attention import prepare
from ..interop.arguments import flag
from ..interop.arrays import import_integers
from ..interop.eager import eager
from ..validation.options import Options
from .checks import autocast, check_constants, check_gradients, check_tensors
from .flex import no_batch_of_gradients, refuse_changed
from .gradients import no_second_derivatives
from .threads import pytorch_threads


class Call(NamedTuple):
    """What a call is made of, beside tensors that may have a gradient.

    cu_seqlens : cumulative lengths of queries and of keys, copies of what was given
    functions : score_mod, mask_mod, and both as they were when the call was made, or None
    options : of `numflash.attention_varlen`, without sinks; slopes are a copy
    """

    cu_seqlens: tuple[np.ndarray, np.ndarray]
    functions: tuple[Any, Any, Any]
    options: dict[str, Any]

    def attend(self, query: Any, key: Any, value: Any, sinks: Any) -> tuple[Tensor, Tensor]:
        """out and lse of tensors that do not require grad."""
        score_mod, mask_mod, _ = self.functions
        options = {**self.options, "score_mod": score_mod, "mask_mod": mask_mod, "return_lse": True}
        if sinks is not None:
            options["sinks"] = sinks
        with pytorch_threads():
            out, lse = varlen.attention_varlen(query, key, value, *self.cu_seqlens, **options)
        return out, lse


class _Gradients(torch.autograd.Function):
    """The gradients of what `wrt` names; a function of its own, so that theirs are refused."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, wrt: tuple[str, ...], sinks: Tensor | None, *tensors: Tensor | None
    ) -> Any:
        refuse_changed(call.functions[2])
        asked = {name: x for name, x in call.options.items() if name != "pv"}  # of "int8" only
        impl = asked.pop("impl", "auto")
        own = None if sinks is None else sinks.detach()
        options = Options(sinks=own, layout="blhd", **asked)
        # a gradient may come with PyTorch's negative bit: imag of a conjugate
        arrays = tuple(None if x is None else x.detach().resolve_neg() for x in tensors)
        given = arrays, call.cu_seqlens, options, call.functions
        with pytorch_threads():
            return varlen.differentiate(*given, impl, wrt)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return no_second_derivatives(ctx, *grads)


class _Packed(torch.autograd.Function):
    """out and lse."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Any:
        given = (None if x is None else x.detach() for x in (query, key, value, sinks))
        out, lse = call.attend(*given)
        recorded = call.functions[2]
        constants = [] if recorded is None else recorded.tensors
        ctx.call = call
        # PyTorch refuses a gradient where one of these was changed in place
        ctx.save_for_backward(query, key, value, out, lse, sinks, *constants)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        if grad_out is grad_lse is None:  # nothing depends on the results
            return (None,) * 5
        no_batch_of_gradients(grad_out, grad_lse)
        saved = ctx.saved_tensors  # which may be read once: a checkpoint computes them then
        tensors, sinks = saved[:5], saved[5]
        if grad_out is None:
            grad_out = torch.zeros_like(tensors[3])
        wrt = (*OPERANDS, "sinks") if ctx.needs_input_grad[4] else OPERANDS
        found = _Gradients.apply(ctx.call, wrt, sinks, grad_out, *tensors, grad_lse)
        return None, *found, *(None,) * (4 - len(found))


@eager
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    is_causal: bool = False,
    return_lse: bool = False,
    sinks: Tensor | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    **options: Any,
) -> Any:
    """`numflash.attention_varlen` on tensors in host memory, with gradients of query, key, value and
    sinks.

    Parameters
    ----------
    query : (total_q, H, D) tensor;  key : (total_k, Hkv, D);  value : (total_k, Hkv, Dv)
        float32, float16 or bfloat16.
    cu_seqlens_q, cu_seqlens_k : (N + 1,) integers, a tensor or an array
        Cumulative lengths: sequence n is rows cu[n] to cu[n + 1].
    sinks : (H,) tensor that may require grad, or None
    score_mod, mask_mod : functions as for `flex_attention`, or None
        b is the number of the sequence, q_idx and kv_idx count from its first row and key. Captured
        tensors that require grad are refused: they would get none.
    is_causal, return_lse, options
        As `numflash.attention_varlen` takes them. precision "int8" is for inference.

    Returns
    -------
    out : (total_q, H, Dv) tensor of the query's dtype
    lse : (total_q, H) float32 tensor, differentiable too; only with `return_lse`

    Notes
    -----
    Inside `torch.compile` the call is a graph break.

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError
    """
    return_lse = flag("return_lse", return_lse)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(f"{name}: got {type(x).__name__}; allowed: a tensor")
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise UnsupportedError(
                f"{name}: a tensor inside torch.func cannot be read; allowed: outside"
            )
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value, None)
    check_constants(sinks=sinks)
    slopes = options.get("alibi_slopes")
    constants = {"alibi_slopes": slopes} if isinstance(slopes, Tensor) else {}
    check_gradients(options.get("precision"), (query, key, value, sinks), **constants)
    cuts = (
        import_integers("cu_seqlens_q", cu_seqlens_q).copy(),
        import_integers("cu_seqlens_k", cu_seqlens_k).copy(),
    )
    if slopes is not None:  # the gradients are computed with the numbers of this call
        own = slopes.detach().clone() if isinstance(slopes, Tensor) else copy.deepcopy(slopes)
        options["alibi_slopes"] = own
    plain = score_mod is mask_mod is None
    recorded = None if plain else prepare(score_mod, mask_mod)
    if recorded is not None:
        recorded.refuse_grad()
    call = Call(cuts, (score_mod, mask_mod, recorded), {"is_causal": is_causal, **options})
    out, lse = _Packed.apply(call, query, key, value, sinks)
    return (out, lse) if return_lse else out


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] | None = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Any = None,
    block_table: Any = None,
    num_splits: Any = None,
    precision: str | None = None,
    pv: str | None = None,
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn` by numflash's kernels, for `use`. PyTorch's own does not
    run on a CPU.

    Parameters
    ----------
    query : (T_q, H, D) tensor;  key : (T_k, Hkv, D);  value : (T_k, Hkv, Dv)
    cu_seq_q, cu_seq_k : (N + 1,) cumulative lengths
    max_q, max_k, num_splits
        Taken and not used.
    is_causal : of releases that have it
    window_size : (left, right)
        Keys on each side of the diagonal, -1 for no limit, None for none at all; (-1, 0) is causal.
        The diagonal ends in the lower right corner of each sequence, as in FlashAttention since 2.1,
        which PyTorch calls.
    seqused_k, block_table
        None: a cache is `numflash.KVCache`.
    return_aux, scale, enable_gqa
        As in PyTorch's.
    precision, pv
        As `numflash.attention` takes them.
    """
    for name, x in (("seqused_k", seqused_k), ("block_table", block_table)):
        if x is not None:
            raise UnsupportedError(f"{name}: got one; allowed: None (a cache is numflash.KVCache)")
    if window_size is None:  # which PyTorch takes, too
        window_size = (-1, -1)
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ArgumentTypeError(
            f"window_size: got {window_size!r}; allowed: (left, right), -1 for no limit"
        )
    left, right = (None if side == -1 else side for side in window_size)
    with_lse = bool(getattr(return_aux, "lse", False))
    return attention_varlen(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        is_causal=is_causal,
        return_lse=with_lse,
        window=(left, right),
        alignment="lower_right",
        scale=scale,
        enable_gqa=enable_gqa,
        precision=precision,
        pv=pv,
    )
