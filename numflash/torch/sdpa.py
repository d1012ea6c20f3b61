"""The functions of `numflash.torch`: `attention`, and PyTorch's `scaled_dot_product_attention`."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError
from ..interop.arguments import flag, sides
from .checks import SdpaError, autocast, check_constants, check_gradients, check_tensors
from .nodes import attend, without_operator

PYTORCH = torch.nn.functional.scaled_dot_product_attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    alignment: str = "upper_left",
    key_lengths: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    precision: str | None = None,
    pv: str | None = None,
    return_lse: bool = False,
    impl: str = "auto",
) -> Any:
    """`numflash.attention` on tensors, with gradients of query, key, value, a float mask and sinks.

    Parameters
    ----------
    query : (B, H, L, D) tensor, float32, float16 or bfloat16, on the CPU or a CUDA device
    key : (B, Hkv, S, D) tensor
    value : (B, Hkv, S, Dv) tensor
    attn_mask, sinks : tensors that may require grad, a mask on a card not
        The gradient of a mask takes memory for B * H * L * S float32.
    key_lengths, alibi_slopes : tensors that do not require grad
    options
        As `numflash.attention` takes them. precision "int8" is for inference.

    Returns
    -------
    out : (B, H, L, Dv) tensor of the query's dtype and device
    lse : (B, H, L) float32 tensor, differentiable too; only with `return_lse`

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, what came and what is allowed.
    UnsupportedError
        What `impl` names cannot run here; tensors on a device that is neither a CPU nor a CUDA
        card.
    """
    if type(window) is tuple and len(window) == 2:  # its sides are checked where they are used
        left, right = window
    else:
        left, right = sides("window", window)
    options = (
        attn_mask,
        is_causal,
        scale,
        enable_gqa,
        left,
        right,
        alignment,
        key_lengths,
        softcap,
        alibi_slopes,
        sinks,
        precision,
        pv,
        impl,
    )
    if type(return_lse) is bool:
        found = without_operator(query, key, value, options, return_lse)
        if found is not None:
            return found if return_lse else found[0]
    return_lse = flag("return_lse", return_lse)
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    check_tensors(query, key, value, attn_mask)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ArgumentError(
                f"{name}: got shape {tuple(x.shape)}; allowed: 4 dimensions, (B, H, L, D)"
            )
    check_constants(key_lengths=key_lengths, alibi_slopes=alibi_slopes, sinks=sinks)
    inputs = query, key, value, attn_mask, sinks
    check_gradients(precision, inputs, **_of_card(attn_mask), alibi_slopes=alibi_slopes)
    out, lse = attend(query, key, value, attn_mask, *options[1:])
    return (out, lse) if return_lse else out


def _of_card(mask: Tensor | None) -> dict[str, Tensor]:
    """A mask without a gradient, as `check_gradients` takes constants: one on a card."""
    return {} if mask is None or mask.is_cpu else {"attn_mask": mask}


def _heads_of_batches(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, tuple[int, ...]]:
    """PyTorch's shapes as the kernels'.

    4-D tensors, the mask, whether heads are grouped, and the shape of the result.

    Broadcast dimensions are views; only five and more dimensions may have to be copied. One key
    head for many query heads is left as it is: the kernels read it once.
    """
    if (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
    ):
        return query, key, value, attn_mask, False, (*query.shape[:3], value.shape[3])
    dims = max(query.dim(), key.dim(), value.dim())
    n = max(dims, 4)
    q, k, v = (x[(None,) * (n - x.dim())] for x in (query, key, value))
    if enable_gqa and k.shape[-3] != v.shape[-3]:
        for name, x in (("key", key), ("value", value)):
            given = x.shape[-3] if x.dim() > 2 else 1
            if not given or q.shape[-3] % given:
                raise SdpaError(
                    f"{name}: got {given} heads, shape {tuple(x.shape)}; allowed: a divisor of the query's "
                    f"{q.shape[-3]} heads"
                )
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    grouped = enable_gqa or k.shape[-3] == v.shape[-3] == 1
    try:
        batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        heads = (
            q.shape[-3]
            if grouped
            else torch.broadcast_shapes(q.shape[-3], k.shape[-3], v.shape[-3])[0]
        )
    except RuntimeError:
        raise SdpaError(
            f"query, key, value: got shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}; "
            "allowed: leading dimensions that broadcast, or enable_gqa=True for fewer key heads"
        ) from None
    q, k, v = (
        x.expand(*batch, x.shape[-3] if grouped else heads, -1, -1).flatten(0, n - 4)
        for x in (q, k, v)
    )
    if attn_mask is not None and n > 4:
        mask = attn_mask[(None,) * (n - attn_mask.dim())]
        try:
            attn_mask = mask.expand(*batch, *mask.shape[-3:]).flatten(0, n - 4)
        except RuntimeError:
            whole = *batch, heads, q.shape[-2], k.shape[-2]
            raise SdpaError(
                f"attn_mask: got shape {tuple(attn_mask.shape)}; allowed: what broadcasts to {whole}"
            ) from None
    return q, k, v, attn_mask, grouped, (*batch, heads, q.shape[-2], v.shape[-1])[n - dims :]


# the operator's options that follow the scale, by whether heads are grouped
_SDPA_OPTIONS = {
    grouped: (grouped, None, None, "upper_left", None, 0.0, None, None) for grouped in (False, True)
}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: str | None = None,
    pv: str | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by numflash's kernels.

    Its signature, its shapes, its errors.

    Parameters
    ----------
    query : (N, ..., Hq, L, E) tensor, float32, float16 or bfloat16
    key : (N, ..., H, S, E) tensor
    value : (N, ..., H, S, Ev) tensor
        Leading dimensions broadcast. With `enable_gqa`, H divides Hq.
    attn_mask : bool (True = may attend) or float tensor (added to the scores), broadcastable to (N,
        ..., Hq, L, S)
        Or `torch.nn.attention.bias.causal_lower_right(L, S)`, whose diagonal ends at the last key.
    dropout_p : 0.0 only
    is_causal : bool
        Row i attends to keys 0 to i. Not together with `attn_mask`.
    scale : float
        1 / sqrt(E) unless given.
    precision : "int8", "float32", "bfloat16" or "float16"
        What to compute in: the query's dtype unless given. "int8" is for inference.
    pv : "int8", "int16", "bf16", "fp32" or None
        The weights of precision "int8", as `numflash.attention` takes them; of no other.

    Returns
    -------
    out : (N, ..., Hq, L, Ev) tensor of the query's dtype and device
        Rows that attend to no key are zero, as in PyTorch. NaN in a key or value reaches only the
        rows that attend to it; PyTorch's kernels may spread it to all rows.

    Raises
    ------
    SdpaError
        Where PyTorch raises a RuntimeError; and for what numflash lacks: dropout, float64, masks
        that require grad on a card, "int8" with inputs that require grad.
    ArgumentTypeError
        For what is not a tensor, a number or a flag, where PyTorch raises a TypeError.
    UnsupportedError
        Tensors on a device that is neither a CPU nor a CUDA card.
    """
    known = type(enable_gqa) is bool and type(dropout_p) is float and not dropout_p
    known = known and (attn_mask is None or (type(attn_mask) is Tensor and is_causal is False))
    grouped = _SDPA_OPTIONS[enable_gqa is True]
    options = attn_mask, is_causal, scale, *grouped, precision, pv, "auto"
    try:
        found = without_operator(query, key, value, options, False) if known else None
        if found is not None:
            return found[0]
        return _with_operator(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision, pv
        )
    except SdpaError:
        raise
    except ArgumentError as error:
        raise SdpaError(str(error)) from None


def _with_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    precision: str | None,
    pv: str | None,
) -> Tensor:
    """The same by the registered operator: masks, gradients, any number of dimensions."""
    if not isinstance(dropout_p, (int, float, Real)):
        raise ArgumentTypeError(f"dropout_p: got {dropout_p!r}; allowed: a number, 0.0")
    if dropout_p != 0.0:
        raise SdpaError(
            f"dropout_p: got {dropout_p}; allowed: 0.0 only (model.eval(), or no dropout in its configuration)"
        )
    enable_gqa = flag("enable_gqa", enable_gqa)
    mask, causal, alignment = _mask_of(bias, is_causal, query, key)
    query, key, value, mask = autocast(query, key, value, mask)
    check_tensors(query, key, value, mask)
    check_gradients(precision, (query, key, value, mask), **_of_card(mask))
    if _is_empty(query, key, value):  # PyTorch makes the empty result
        return PYTORCH(
            query, key, value, bias, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v, mask, grouped, shape = _heads_of_batches(query, key, value, mask, enable_gqa)
    options = causal, scale, grouped, None, None, alignment, None, 0.0, None, None
    out, _ = attend(q, k, v, mask, *options, precision, pv, "auto")
    return out if out.dim() == len(shape) else out.reshape(shape)


def _is_empty(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a size is zero, but for zero keys alone: of those PyTorch's float16 gradients on a CPU
    are memory that nobody has written.
    """
    sizes = *query.shape, *key.shape[:-2], *value.shape[:-2], key.shape[-1], value.shape[-1]
    no_keys = 0 in (key.shape[-2], value.shape[-2])
    return 0 in sizes or (no_keys and not query.is_cpu)


def _mask_of(
    bias: Any, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, bool, str]:
    """The mask, whether attention is causal, and how: a CausalBias gives the diagonal's position, and
    holds no numbers.
    """
    if bias is not None and is_causal:
        raise SdpaError("attn_mask: got one together with is_causal=True; allowed: one of the two")
    if bias is None or type(bias) is Tensor:
        return bias, is_causal, "upper_left"
    from torch.nn.attention.bias import CausalBias, CausalVariant  # takes 1 s: PyTorch's compiler

    if not isinstance(bias, CausalBias):
        return bias, is_causal, "upper_left"
    if (bias.seq_len_q, bias.seq_len_kv) != (query.shape[-2], key.shape[-2]):
        raise SdpaError(
            f"attn_mask: got a CausalBias for {bias.seq_len_q} queries and {bias.seq_len_kv} keys; allowed: "
            f"{query.shape[-2]} and {key.shape[-2]}"
        )
    lower = bias.variant == CausalVariant.LOWER_RIGHT
    return None, True, "lower_right" if lower else "upper_left"
