"""FlexAttention on tensors: PyTorch's signature and block masks, numflash's kernels, gradients."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from ..api import differentiate
from ..dispatch.option_gradients import OPERANDS
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..flex import BlockMask
from ..flex.attention import attend, recorded_of
from ..flex.captured_arrays import Captured
from ..flex.prepared import Prepared, prepare
from ..interop.arguments import flag
from ..interop.eager import eager
from ..validation.options import Options
from .checks import autocast, check_gradients, check_tensors
from .gradients import no_second_derivatives
from .threads import pytorch_threads

_converted: WeakKeyDictionary[Any, BlockMask] = WeakKeyDictionary()


def _block_mask(given: Any) -> BlockMask | None:
    """A block mask of ours, or PyTorch's as one."""
    if given is None or isinstance(given, BlockMask):
        return given
    if not isinstance(given, torch_flex.BlockMask):
        raise ArgumentTypeError(
            f"block_mask: got {type(given).__name__}; allowed: a BlockMask of PyTorch or numflash, or None"
        )
    known = _converted.get(given)
    if known is None or known.mask_mod is not given.mask_mod:
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
        made.by_function = True  # PyTorch's own code on the CPU uses nothing but the function
        known = _converted[given] = made
    return known


class Call(NamedTuple):
    """What a call is made of, beside tensors that may have a gradient.

    tables : the captured tensors that have one, as numflash's graph names them, or None
    recorded : both functions as they were when the call was made: what they name may change until the
        gradients are computed
    options : of `numflash.flex_attention`, without sinks
    """

    score_mod: Any
    block_mask: BlockMask | None
    tables: Captured | None
    recorded: Prepared | None
    options: dict[str, Any]

    @classmethod
    def of(
        cls, score_mod: Any, block_mask: Any, tables: Captured | None, options: dict[str, Any]
    ) -> Call:
        """A call that is made now."""
        recorded = None
        if score_mod is not None or block_mask is not None:
            recorded = recorded_of(score_mod, block_mask)
        return cls(score_mod, block_mask, tables, recorded, options)

    @property
    def functions(self) -> tuple[Any, Any, Prepared | None]:
        """As `flex.attention.attend` takes them."""
        return self.score_mod, self.block_mask, self.recorded

    def constants(self) -> list[Tensor]:
        """The captured tensors that get no gradient: the backward pass reads their numbers again."""
        found = [] if self.recorded is None else self.recorded.tensors
        trained = [] if self.tables is None else self.tables.owners()
        return [x for x in found if not any(x is y for y in trained)]


def refuse_changed(recorded: Prepared | None) -> None:
    """Raise where an array that functions have captured is another than when they were recorded."""
    if recorded is not None and not recorded.fits():
        raise ArgumentError(
            "score_mod: a captured array was changed before the gradients were computed; allowed: arrays that "
            "stay as they are until then"
        )


def no_batch_of_gradients(*gradients: Tensor | None) -> None:
    """Raise for gradients that PyTorch has put together to compute them at a time."""
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in gradients):
        raise UnsupportedError(
            "grad_outputs: got a batch of gradients (is_grads_batched, vectorize); allowed: one at a time"
        )


class _Gradients(torch.autograd.Function):
    """Gradients of query, key and value, of sinks if `wrt` names them, and of `tables`; a function of
    its own, so that theirs are refused.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        wrt: tuple[str, ...],
        tables: Captured | None,
        sinks: Tensor | None,
        *tensors: Tensor | None,
    ) -> Any:
        asked = {name: x for name, x in call.options.items() if name != "pv"}  # of "int8" only
        options = Options(sinks=None if sinks is None else sinks.detach(), **asked)
        # a gradient may come with PyTorch's negative bit: imag of a conjugate
        arrays = tuple(None if x is None else x.detach().resolve_neg() for x in tensors)
        refuse_changed(call.recorded)
        with pytorch_threads():
            found = differentiate(arrays, options, "auto", call.functions, wrt=wrt, tables=tables)
        return tuple(x if isinstance(x, Tensor) else torch.from_numpy(x) for x in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return no_second_derivatives(ctx, *grads)


class _Flex(torch.autograd.Function):
    """out and lse. `captured` are those of `call.tables`."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        *captured: Tensor,
    ) -> Any:
        q, k, v = (x.detach() for x in (query, key, value))
        options = {**call.options, "sinks": None if sinks is None else sinks.detach()}
        with pytorch_threads():
            out, lse = attend(q, k, v, Options(return_lse=True, **options), call.functions)
        ctx.call, ctx.trained = call, len(captured)
        # PyTorch refuses a gradient where one of these was changed in place
        ctx.save_for_backward(query, key, value, out, lse, sinks, *captured, *call.constants())
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        if grad_out is grad_lse is None:  # nothing depends on the results
            return (None,) * len(ctx.needs_input_grad)
        no_batch_of_gradients(grad_out, grad_lse)
        saved = ctx.saved_tensors  # which may be read once: a checkpoint computes them then
        tensors, sinks, captured = saved[:5], saved[5], saved[6 : 6 + ctx.trained]
        if grad_out is None:
            grad_out = torch.zeros_like(saved[3])
        of_sinks = ctx.needs_input_grad[4]
        wrt = (*OPERANDS, "sinks") if of_sinks else OPERANDS
        found = _Gradients.apply(
            ctx.call, wrt, ctx.call.tables, sinks, grad_out, *tensors, grad_lse
        )
        dq, dk, dv, *others = found
        ds = others.pop(0) if of_sinks else None
        return None, dq, dk, dv, ds, *(x.to(y.dtype) for x, y in zip(others, captured, strict=True))


def _trained(score_mod: Any) -> tuple[Captured | None, list[Tensor]]:
    """The captured tensors that a gradient is asked for."""
    if score_mod is None or not torch.is_grad_enabled():
        return None, []
    prepared = prepare(score_mod, None)
    owners = prepared.graph.owners
    numbers = [n for n, x in enumerate(owners) if isinstance(x, Tensor) and x.requires_grad]
    if not numbers:
        return None, []
    return Captured(prepared, numbers), [owners[n] for n in numbers]


@eager
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
        Captured tensors are on the CPU, also where the query is on a card, and get gradients where
        they require them and the query is on the CPU: memory for B * H * L * S float32.
    block_mask : BlockMask of PyTorch or of numflash, or None
        PyTorch's is read once: a changed one has to be a new object.
    scale, enable_gqa, return_lse, return_aux
        As in PyTorch's; `max_scores` cannot be asked for. The lse is differentiable, as PyTorch's.
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
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentTypeError(f"{name}: got {got}; allowed: a tensor of 4 dimensions")
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise UnsupportedError(
                f"{name}: a tensor inside torch.func cannot be read; allowed: outside"
            )
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value, None)
    tables, captured = _trained(score_mod)
    constants = {} if query.is_cpu else {"score_mod": next(iter(captured), None)}
    check_gradients(precision, (query, key, value, *captured), **constants)
    options = {"scale": scale, "enable_gqa": enable_gqa, "precision": precision, "pv": pv}
    call = Call.of(score_mod, _block_mask(block_mask), tables, options)
    out, lse = _Flex.apply(call, query, key, value, None, *captured)
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

    `options` are scale, softcap, sinks and pv as `numflash.attention` takes them.
    """
    query, key, value = autocast(query, key, value)
    asked = {**options, "enable_gqa": True, "precision": precision}
    sinks = asked.pop("sinks", None)
    call = Call.of(None, block_mask, None, asked)
    out: Tensor = _Flex.apply(call, query, key, value, sinks)[0]
    return out
