"""The attention function of `numflash.transformers`.

From transformers' interface to `numflash.torch.attention`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import masking_utils
from transformers.utils import generic

from ..errors import ArgumentError
from ..torch.flex import blockwise
from ..torch.rotated import rotated
from ..torch.sdpa import attention
from .by_name import register_caches
from .eager_models import as_padding, eager_only, float_padding, prepare
from .function_mask import FEWEST_ROWS_INT8, FunctionMask, function_mask
from .standin import StandIn

# name -> options of `attend`
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "numflash": {},
    "numflash_int8": {"precision": "int8"},
    "numflash_int8_pv_int16": {"precision": "int8", "pv": "int16"},
}
# What some models pass beside a mask, and put into the mask itself only for 'sdpa' and 'eager': keys of each
# query, and a sink of each query.
CHOSEN_KEYS = {
    "indices": "'eager', or 'sdpa' where the model has it",
    "block_indices": "'eager', or 'sdpa' where the model has it",
    "sinks": "'eager'",
}  # and what computes them
# Models that change a float mask between transformers and the attention function, and what computes them.
OWN_MASKS = {"deepseek_v4": "'eager'", "doge": "'sdpa' or 'eager'"}


def register() -> None:
    """Add the names of `IMPLEMENTATIONS` to those that `attn_implementation` takes.

    "numflash", "numflash_int8", and "numflash_int8_pv_int16" with weights of 15 bits. May be called
    again.

    And "numflash", "numflash_bfloat16", "numflash_float16", "numflash_int8" and "numflash_int4" to
    those that `cache_implementation` takes, each a `ResidentCache`.

    Every process needs it: one that loads a model from a pickle as well, or a worker.
    """
    for name, options in IMPLEMENTATIONS.items():
        transformers.AttentionInterface.register(name, functools.partial(attend, **options))
        transformers.AttentionMaskInterface.register(name, mask)
    _tell_from_flash_attention()
    _check_models()
    register_caches(tuple(IMPLEMENTATIONS))


def _tell_from_flash_attention() -> None:
    """Keep transformers from taking our names for Dao's FlashAttention.

    Since version 5 any name with "flash" in it is (`is_flash_attention_requested`): it would be
    looked for on the hub, packed without padding, and refused a static cache. The function is
    imported by name all over, so it is replaced wherever it has arrived; modules loaded later find
    the replacement.
    """
    name = "is_flash_attention_requested"
    original = getattr(generic, name, None)
    if original is None or original.__module__ == __name__:
        return

    def requested(
        config: Any = None,
        requested_attention_implementation: str | None = None,
        version: Any = None,
    ) -> bool:
        asked = (
            requested_attention_implementation if config is None else config._attn_implementation
        )
        return asked not in IMPLEMENTATIONS and original(
            config, requested_attention_implementation, version
        )

    for path, module in list(sys.modules.items()):
        if path.startswith("transformers") and vars(module).get(name) is original:
            setattr(module, name, requested)


def _check_models() -> None:
    """Let models that have an attention of their own refuse our names, as they refuse "sdpa".

    transformers checks only the names that it knows: such a model would be built, and run its own
    attention with masks of another kind.
    """
    original = transformers.PreTrainedModel.get_correct_attn_implementation
    if original.__module__ == __name__:
        return

    def checked(self: Any, requested_attention: str | None, *rest: Any, **options: Any) -> Any:
        if requested_attention in IMPLEMENTATIONS and not self._can_set_attn_implementation():
            parts = ""
            if self.config.sub_configs:  # a language model in it may take them: Granite Speech
                name = repr(requested_attention)
                parts = (
                    f", and parts of this one by model.set_attn_implementation({name}) afterwards"
                )
            raise ArgumentError(
                f"attn_implementation: got {requested_attention!r} for {type(self).__name__}, which has an attention of its "
                f"own; allowed: models that take transformers' attention functions{parts}"
            )
        if requested_attention in IMPLEMENTATIONS:
            prepare(self, requested_attention)
        return original(self, requested_attention, *rest, **options)

    transformers.PreTrainedModel.get_correct_attn_implementation = checked


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | FunctionMask | None,
    *,
    precision: str | None = None,
    pv: str | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function.

    Parameters
    ----------
    module : the layer; its `is_causal` decides where the argument does not
    query : (B, H, L, D);  key : (B, Hkv, S, D);  value : (B, Hkv, S, Dv)
    attention_mask : (B, 1 or H, L, S) bool or float, a `FunctionMask`, or None, with which a causal
        layer is causal from key 0 on
    precision, pv : as `numflash.attention` takes them; a `ResidentCache` takes them for prompts
    s_aux : (H,)
        Sinks.
    position_bias : float, broadcastable to (B, H, L, S), added to the scores
    others
        What the mask says already, as `sliding_window`, and what is no business of attention's.

    Returns
    -------
    out : (B, L, H, Dv) contiguous tensor
    None : there are no weights
    """
    if dropout or output_attentions or cache is not None:
        _refuse(dropout, output_attentions, cache)
    _refuse_models(module, others)
    _refuse_packed(others.get("cu_seq_lens_q"), attention_mask)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if eager_only(getattr(module, "config", None)):
        if attention_mask is None:
            causal = False
        elif not isinstance(attention_mask, FunctionMask):
            attention_mask = as_padding(attention_mask)
    operands = (query, key, value)
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "pv": pv,
    }
    if causal and precision == "int8" and not isinstance(key, StandIn):
        operands = rotated(*operands)
    if isinstance(attention_mask, FunctionMask):
        slower = precision == "int8" and (softcap or query.shape[2] < FEWEST_ROWS_INT8)
        if isinstance(key, StandIn) or position_bias is not None or slower:
            attention_mask = attention_mask.dense()
        else:
            out = blockwise(*operands, attention_mask.blocks, precision, options).to(query.dtype)
            return out.transpose(1, 2).contiguous(), None
    if isinstance(key, StandIn):
        out = _resident(query, key, attention_mask, bool(causal), precision, position_bias, options)
        return out.transpose(1, 2).contiguous(), None
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    if position_bias is not None:
        attention_mask = _biased(position_bias, attention_mask)
    if causal and getattr(module, "is_kv_shared_layer", False):
        options["alignment"] = "lower_right"  # it may be asked for the last rows alone (Gemma 4)
    out = attention(
        *operands, attention_mask, causal, enable_gqa=True, precision=precision, **options
    )
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def _refuse(dropout: float, output_attentions: bool, cache: Any) -> None:
    for name, given, words in (
        (
            "dropout",
            dropout,
            "0 (model.eval(), or no attention dropout in its configuration); 'sdpa' or 'eager' train with it",
        ),
        ("output_attentions", output_attentions, "False, the weights are never stored; or 'eager'"),
        ("cache", cache is not None, "the caches of generate(); continuous batching needs 'sdpa'"),
    ):
        if given:
            raise ArgumentError(
                f"{name}: got {given}; allowed with attn_implementation 'numflash': {words}"
            )


def _refuse_models(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """Raise where a model would get a wrong result."""
    for name, instead in CHOSEN_KEYS.items():
        if others.get(name) is not None:
            raise ArgumentError(
                f"{name}: got one; allowed with attn_implementation 'numflash': None. This model chooses keys, or has a "
                f"sink, for each query by itself: take {instead}"
            )
    kind = getattr(getattr(module, "config", None), "model_type", None)
    if kind in OWN_MASKS:
        raise ArgumentError(
            f"attn_implementation: got 'numflash' for a model of type {kind!r}, which changes its mask by itself; "
            f"allowed: {OWN_MASKS[kind]}"
        )


def _refuse_packed(lengths: Tensor | None, attention_mask: Tensor | FunctionMask | None) -> None:
    """Raise for sequences in one row that only `cu_seq_lens_q` tells apart, which is FlashAttention's
    way: they would be mixed.
    """
    if lengths is None or len(lengths) < 3:
        return
    nothing = isinstance(attention_mask, Tensor) and attention_mask.stride()[2:] == (0, 0)
    if attention_mask is None or nothing:
        raise ArgumentError(
            f"cu_seq_lens_q: got {len(lengths) - 1} sequences in a row and no mask that separates them; allowed with "
            "attn_implementation 'numflash': position_ids that start at 0 in each, and use_cache=False"
        )


def _resident(
    query: Tensor,
    key: StandIn,
    mask: Tensor | None,
    causal: bool,
    precision: str | None,
    position_bias: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention over the layer of a `ResidentCache`."""
    if position_bias is not None:
        raise ArgumentError("position_bias: got one with a ResidentCache; allowed: None")
    sinks = options["sinks"]
    if sinks is not None and sinks.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "sinks: got a tensor that requires grad with a ResidentCache, where it would get no gradient; allowed: "
            "use_cache=False, requires_grad_(False) or torch.no_grad()"
        )
    if not causal and mask is None and query.shape[2] > 1:
        raise ArgumentError("is_causal: got False with a ResidentCache; allowed: causal layers")
    out: Tensor = key.layer.attend(query, mask, precision, **options)
    return out


def _biased(bias: Tensor, attention_mask: Tensor | None) -> Tensor:
    """A float mask of a position bias and a mask of either kind."""
    if attention_mask is None:
        return bias
    if attention_mask.dtype == torch.bool:
        return torch.where(attention_mask, bias, -torch.inf)
    return bias + attention_mask


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    mask_function: Any = masking_utils.causal_mask_function,
    **options: Any,
) -> Tensor | FunctionMask | None:
    """transformers' `sdpa_mask`, except for padding alone and for long prompts.

    Padding alone stays one row for all queries, a view with stride 0; so does "all keys", since None
    would be causal in models that do not say `is_causal`. Masks of long prompts that are more than
    causal stay functions.

    `numflash.torch` reads trailing padding in such a row as key lengths, and keys beyond are not
    looked at.
    """
    bidirectional = mask_function is masking_utils.bidirectional_mask_function
    sizes: dict[str, Any] = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    where: dict[str, Any] = {"kv_offset": kv_offset, "attention_mask": attention_mask}
    if eager_only(options.get("config")):
        skip = masking_utils._ignore_bidirectional_mask_sdpa(attention_mask, kv_length)
        if bidirectional and attention_mask is not None and not skip:
            return float_padding(_padding(**sizes, **where), options["dtype"])
        return masking_utils.eager_mask(**sizes, **where, mask_function=mask_function, **options)
    if not bidirectional:
        options |= where
        if q_length not in (1, kv_length) and _shares_keys(options.get("config")):
            options["allow_is_causal_skip"] = False
        found = function_mask(batch_size, q_length, kv_length, mask_function, options)
        if found is not None:
            return found
        return masking_utils.sdpa_mask(**sizes, mask_function=mask_function, **options)
    if attention_mask is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(batch_size, 1, q_length, kv_length)
    return _padding(**sizes, **where)


def _shares_keys(config: Any) -> bool:
    """Whether a model has layers that attend to keys of earlier ones.

    It may drop their first rows and cut the mask; where that is None, nothing would say which rows
    of a static cache are left.
    """
    return "reuse" in (getattr(config, "kv_sharing_modes", None) or ())


def _padding(
    batch_size: int, q_length: int, kv_length: int, kv_offset: int, attention_mask: Tensor
) -> Tensor:
    """Padding as a mask of one row for all queries, a view."""
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)[
        :, kv_offset : kv_offset + kv_length
    ]
    return padding[:, None, None].expand(batch_size, 1, q_length, kv_length)
