"""The operators of `numflash.torch`.

Attention on tensors, its gradient, and PyTorch's own function routed here.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from .. import api, plans, validation
from ..arguments import choice, mask_array
from ..errors import ArgumentError, ArgumentTypeError, NumflashError, UnsupportedError
from ..interop import Memory
from ..jit import threads
from ..jit.threads import one_at_a_time, refuse_after_fork
from ..options import IMPLS, Options

logger = logging.getLogger("numflash")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SDPA = torch.nn.functional.scaled_dot_product_attention
_MULTI_HEAD = torch.nn.functional.multi_head_attention_forward
_FUSED = (torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention)


class SdpaError(ArgumentError, RuntimeError):
    """What PyTorch's function answers with a RuntimeError.

    Code that catches that one still works.
    """


# ---- the operator
# --------------------------------------------------------------------------------------------------------------
OPTIONS = {
    "attn_mask": "Tensor?",
    "is_causal": "bool",
    "scale": "float?",
    "enable_gqa": "bool",
    "left": "int?",
    "right": "int?",
    "alignment": "str",
    "key_lengths": "Tensor?",
    "softcap": "float",
    "alibi_slopes": "Tensor?",
    "sinks": "Tensor?",
    "precision": "str?",
    "pv": "str?",
    "impl": "str",
}


def _schema(tensors: str, results: int) -> str:
    operands = [f"Tensor {name}" for name in tensors.split()]
    options = [f"{kind} {name}" for name, kind in OPTIONS.items()]
    return f"({', '.join(operands + options)}) -> ({', '.join(['Tensor'] * results)})"


def _key_lengths(mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """(B,) keys of each batch entry, where a mask is one row for all heads and queries that hides
    nothing but the last keys.
    """
    if (
        mask is None
        or mask.dtype != torch.bool
        or mask.dim() != 4
        or (mask.shape[0], mask.shape[3]) != (batch, keys)
        or 0 in mask.shape
    ):
        return None
    if any(
        size > 1 and step for size, step in zip(mask.shape[1:3], mask.stride()[1:3], strict=True)
    ):
        return None
    row = mask[:, 0, 0]
    lengths = row.sum(-1)
    return (
        lengths.cpu()
        if torch.equal(row, torch.arange(keys, device=row.device) < lengths[:, None])
        else None
    )


def _options(values: tuple, key: Tensor) -> tuple[Options, str]:
    """The operator's options as `numflash.attention` takes them, and which implementation is asked
    for.
    """
    given = dict(zip(OPTIONS, values, strict=True))
    window = (given.pop("left"), given.pop("right"))
    impl = given.pop("impl")
    if given["key_lengths"] is None and given["alignment"] == "upper_left":
        lengths = _key_lengths(given["attn_mask"], key.shape[0], key.shape[2])
        if lengths is not None:  # with another alignment the diagonal would move with them
            given["key_lengths"], given["attn_mask"] = lengths, None
    return Options(**given, window=window, return_lse=True), choice("impl", impl, IMPLS)


class _threads:
    """As many threads for a kernel as PyTorch would take."""

    def __enter__(self) -> None:
        self.wanted = torch.get_num_threads()
        self.before = threads.count()
        self.now = min(self.wanted, threads.most())
        if self.now != self.before:
            threads.set_num_threads(self.now)

    def __exit__(self, *error: object) -> None:
        if self.now != self.before:
            threads.set_num_threads(self.before)
        if torch.get_num_threads() != self.wanted:  # Numba's first parallel kernel changes it
            torch.set_num_threads(self.wanted)


def _array(x: Tensor) -> np.ndarray:
    """The memory of a contiguous float32 tensor.

    `x.numpy()` would forbid PyTorch ever to resize it.
    """
    return np.asarray(Memory(x.data_ptr() or 16, tuple(x.shape), None, "=f4", x))


def _plain(x: Any) -> bool:
    """Whether x is a tensor whose memory holds its numbers as the kernels take them."""
    return (
        type(x) is Tensor
        and x.dtype is torch.float32
        and x.is_cpu
        and x.is_contiguous()
        and not x.is_neg()
    )


def _runner(
    query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, ...]
) -> tuple[Any, Any | None]:
    """What equal calls of the operator have in common, and what computes them.

    None for tensors that are not `_plain` and options that hold tensors; None for calls that were
    not made before. Types count: 1 == True, and not both are allowed.
    """
    if not (_plain(query) and _plain(key) and _plain(value)):
        return None, None
    call = query.shape, key.shape, value.shape, options, tuple(map(type, options))
    if any(isinstance(x, Tensor) for x in options):
        return None, None
    try:
        return call, plans.runners.get(call)
    except TypeError:  # an option that cannot be hashed
        return None, None


def _run(
    runner: Any, query: Tensor, key: Tensor, value: Tensor, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The results of a call that was made before; lse only where it is wanted."""
    refuse_after_fork()
    rows = query.shape[:3]
    out = query.new_empty((*rows, value.shape[3]))
    lse = query.new_empty(rows) if with_lse else None
    places = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
    with _threads(), one_at_a_time():
        runner.run_at(*places, 0 if lse is None else lse.data_ptr(), with_lse)
    return out, lse


def _nobody_watches(*tensors: Tensor) -> bool:
    """Whether a call does the same with the operator and without it.

    No gradient is asked for; no mode, transform, tracer, compiler or profiler is to see it.
    """
    return not (
        torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cpu")
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
    )


def _without_operator(
    query: Any, key: Any, value: Any, options: tuple[Any, ...], with_lse: bool
) -> tuple[Tensor, Tensor | None] | None:
    """A call that was made before, without PyTorch's dispatch; None where that is not the same."""
    if torch.compiler.is_compiling():
        return None
    _, runner = _runner(query, key, value, options)
    if runner is None or not _nobody_watches(query, key, value):
        return None
    return _run(runner, query, key, value, with_lse)


@torch.library.custom_op(
    "numflash::attention", mutates_args=(), schema=_schema("query key value", 2)
)
def _attention(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, H, L, Dv) like query and lse (B, H, L) float32, of 4-D tensors.

    In memory of PyTorch's.
    """
    call, runner = _runner(query, key, value, options)
    if runner is not None:
        return _run(runner, query, key, value, True)
    asked, impl = _options(options, key)
    query, key, value = (x.detach() for x in (query, key, value))  # gradients are kept elsewhere
    if query.is_cuda:  # allocates through PyTorch, and gets the current stream
        return api.attend(query, key, value, asked, impl)
    problem = validation.problem(query, key, value, asked)
    out, lse = _results(query, value)
    written = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    with _threads():
        api.solve(problem, impl, (_array(written), _array(lse)))
    if call is not None:
        plans.keep_runner(call, problem, impl)
    return out if written is out else out.copy_(written), lse


def _results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous memory for the results, not written yet."""
    rows = query.shape[:3]
    return query.new_empty((*rows, value.shape[3])), query.new_empty(rows, dtype=torch.float32)


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _results(query, value)


@torch.library.custom_op(
    "numflash::attention_backward",
    mutates_args=(),
    schema=_schema("grad_out query key value out lse", 3),
)
def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, shaped like them; in memory of PyTorch's."""
    asked, impl = _options(options, key)
    asked = replace(asked, pv=None)  # of "int8" only, which has no gradient
    grad_out, query, key, value, out, lse = (
        x.detach() for x in (grad_out, query, key, value, out, lse)
    )
    if query.is_cuda:  # no card's kernel reads one number expanded, as the gradient of a sum is
        arrays = (grad_out.contiguous(), query, key, value, out, lse)
        return api.differentiate(arrays, asked, impl)
    problem = validation.problem(query, key, value, asked)
    operands = validation.gradient_operands(problem, tuple(query.shape), grad_out, out, lse, "bhld")
    found = [x.new_zeros(x.shape, dtype=torch.float32) for x in (query, key, value)]
    with _threads():
        api.solve_backward(problem, operands, impl, [_array(x) for x in found])
    dq, dk, dv = (x.to(query.dtype) for x in found)
    return dq, dk, dv


@_attention_backward.register_fake
def _(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward pass recomputes the weights from.

    The lse is a by-product without a gradient.
    """
    tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, Tensor)}
    ctx.rest, ctx.places = (
        [None if i in tensors else x for i, x in enumerate(inputs)],
        list(tensors),
    )
    ctx.save_for_backward(*output, *tensors.values())
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple:
    out, lse, *tensors = ctx.saved_tensors
    arguments = list(ctx.rest)
    for place, x in zip(ctx.places, tensors, strict=True):
        arguments[place] = x
    query, key, value, *options = arguments
    return (
        *_attention_backward(grad_out, query, key, value, out, lse, *options),
        *(None,) * len(options),
    )


def _second(ctx: Any, *grads: Any) -> tuple:
    raise UnsupportedError(
        "derivatives: got a gradient of a gradient; allowed: first derivatives only"
    )


_attention.register_autograd(_gradients, setup_context=_save)
_attention_backward.register_autograd(_second)


# ---- functions
# -----------------------------------------------------------------------------------------------------------------
def _check(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> None:
    """What the kernels do not see.

    Kinds of tensor, and dtypes that numflash would silently compute less exactly.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(f"{name}: got {type(x).__name__}; allowed: a tensor")
        if x.layout != torch.strided or x.is_nested:
            raise SdpaError(
                f"{name}: got a tensor of layout {x.layout}; allowed: dense tensors, with attn_mask for padding"
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
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise SdpaError(
            f"attn_mask: got dtype {attn_mask.dtype}; allowed: bool, float32, or the query's {query.dtype}"
        )


def _differentiated_otherwise(x: Tensor) -> bool:
    """Whether a tensor carries a tangent, or is what a transform of torch.func differentiates by."""
    functions = torch._C._functorch
    while functions.is_functorch_wrapped_tensor(x):
        if functions.is_gradtrackingtensor(x):
            return True
        x = functions.get_unwrapped(x)
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _check_gradients(
    precision: str | None, differentiable: tuple[Tensor, ...], **constants: Tensor | None
) -> None:
    """Refuse what would lose a gradient without a word."""
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
    if precision == "int8" and any(x.requires_grad for x in differentiable):
        raise ArgumentError(
            "precision: got 'int8' with inputs that require grad, and rounding has no gradient; allowed: a call "
            "under torch.no_grad(), or another precision"
        )


def _autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors as `torch.autocast` would pass them to PyTorch's function."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in DTYPES else x for x in tensors)


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
    """`numflash.attention` on tensors, with gradients of query, key and value.

    Parameters
    ----------
    query : (B, H, L, D) tensor, float32, float16 or bfloat16, on the CPU or a CUDA device
    key : (B, Hkv, S, D) tensor
    value : (B, Hkv, S, Dv) tensor
    attn_mask, key_lengths, alibi_slopes, sinks : tensors that do not require grad
    options
        As `numflash.attention` takes them. precision "int8" is for inference.

    Returns
    -------
    out : (B, H, L, Dv) tensor of the query's dtype and device
    lse : (B, H, L) float32 tensor without a gradient; only with `return_lse`

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, what came and what is allowed.
    UnsupportedError
        What `impl` names cannot run here; tensors on a device that is neither a CPU nor a CUDA
        card.
    """
    left, right = (None, None) if window is None else window
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
    found = _without_operator(query, key, value, options, return_lse)
    if found is not None:
        return found if return_lse else found[0]
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    _check(query, key, value, attn_mask)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ArgumentError(
                f"{name}: got shape {tuple(x.shape)}; allowed: 4 dimensions, (B, H, L, D)"
            )
    _check_gradients(
        precision, (query, key, value), attn_mask=attn_mask, alibi_slopes=alibi_slopes, sinks=sinks
    )
    out, lse = _attention(query, key, value, attn_mask, *options[1:])
    return (out, lse) if return_lse else out


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
    given = max(query.dim(), key.dim(), value.dim())
    n = max(given, 4)
    q, k, v = (x[(None,) * (n - x.dim())] for x in (query, key, value))
    if enable_gqa and k.shape[-3] != v.shape[-3]:
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
        attn_mask = mask.expand(*batch, *mask.shape[-3:]).flatten(0, n - 4)
    return q, k, v, attn_mask, grouped, (*batch, heads, q.shape[-2], v.shape[-1])[n - given :]


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

    Returns ------- (N, ..., Hq, L, Ev) tensor of the query's dtype and device. Rows that see no key
    are zero, as PyTorch has them; NaN in a key or value that a row does not see stays out of it,
    where PyTorch's kernels let it through.

    Raises
    ------
    SdpaError
        Where PyTorch raises a RuntimeError; and for what numflash lacks: dropout, float64, masks
        that require grad, "int8" with inputs that require grad.
    ArgumentTypeError
        For what is not a tensor.
    UnsupportedError
        Tensors on a device that is neither a CPU nor a CUDA card, and masks on a card.
    """
    if dropout_p == 0.0 and attn_mask is None:
        options = (
            None,
            is_causal,
            scale,
            *_SDPA_OPTIONS[enable_gqa is True],
            precision,
            None,
            "auto",
        )
        found = _without_operator(query, key, value, options, False)
        if found is not None:
            return found[0]
    try:
        if dropout_p != 0.0:
            raise SdpaError(
                f"dropout_p: got {dropout_p}; allowed: 0.0 only (model.eval(), or no dropout in its configuration)"
            )
        if attn_mask is not None and is_causal:
            raise SdpaError(
                "attn_mask: got one together with is_causal=True; allowed: one of the two"
            )
        bias = attn_mask
        alignment = "upper_left"
        if isinstance(bias, CausalBias):  # gives the diagonal's position, and holds no numbers
            if (bias.seq_len_q, bias.seq_len_kv) != (query.shape[-2], key.shape[-2]):
                raise SdpaError(
                    f"attn_mask: got a CausalBias for {bias.seq_len_q} queries and {bias.seq_len_kv} keys; allowed: "
                    f"{query.shape[-2]} and {key.shape[-2]}"
                )
            attn_mask = None
            is_causal = True
            alignment = "lower_right" if bias.variant == CausalVariant.LOWER_RIGHT else "upper_left"
        query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
        _check(query, key, value, attn_mask)
        _check_gradients(precision, (query, key, value), attn_mask=attn_mask)
        if (
            0 in query.shape or 0 in key.shape or 0 in value.shape
        ):  # nothing to compute: PyTorch makes the empty result
            return _SDPA(
                query,
                key,
                value,
                bias,
                is_causal=is_causal and bias is None,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        q, k, v, mask, grouped, shape = _heads_of_batches(query, key, value, attn_mask, enable_gqa)
        out, _ = _attention(
            q,
            k,
            v,
            mask,
            is_causal,
            scale,
            grouped,
            None,
            None,
            alignment,
            None,
            0.0,
            None,
            None,
            precision,
            None,
            "auto",
        )
    except SdpaError:
        raise
    except ArgumentError as error:
        raise SdpaError(str(error)) from None
    return out if out.dim() == len(shape) else out.reshape(shape)


# ---- routing
# -------------------------------------------------------------------------------------------------------------------
class use(TorchFunctionMode):
    """Inside this context, calls of `torch.nn.functional.scaled_dot_product_attention` and of
    `torch.nn.attention.flex_attention.flex_attention` are answered by numflash.

    However the model got hold of the function, and whatever calls it: `torch.nn.MultiheadAttention`
    without weights and `torch.nn.TransformerEncoder` do. It holds for the thread that enters it,
    nests (the innermost decides), and ends with the block, also by an exception. `flex_attention`
    is found by the name under which modules hold it; what `torch.compile(flex_attention)` has made
    is PyTorch's.

    Parameters
    ----------
    precision : "int8", "float32", "bfloat16", "float16" or None
        As `scaled_dot_product_attention` takes it.
    fallback : bool
        What numflash refuses goes to PyTorch instead of raising; each reason is logged once and
        counted.

    Attributes
    ----------
    calls : int
        Calls that numflash has answered.
    fallbacks : Counter
        Calls that went to PyTorch, by reason.
    """

    def __init__(self, precision: str | None = None, fallback: bool = False) -> None:
        super().__init__()
        self.precision, self.fallback = precision, fallback
        self.calls = 0
        self.fallbacks: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return self._answer(*args, **kwargs)
        if func is _MULTI_HEAD or func in _FUSED:
            return self._multi_head(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _multi_head(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's own, which a mode receives as one call, being off inside.

        Its body runs with two of its names bound to ours.
        """
        if func is not _MULTI_HEAD or torch.compiler.is_compiling():
            if self.fallback:
                return func(*args, **kwargs)
            raise UnsupportedError(
                "torch.nn.MultiheadAttention: not routed inside torch.compile; allowed: uncompiled, or "
                "use(fallback=True)"
            )
        names = {
            "has_torch_function": lambda tensors: False,
            "scaled_dot_product_attention": self._answer,
        }
        body = FunctionType(
            func.__code__, {**func.__globals__, **names}, func.__name__, func.__defaults__
        )
        return body(*args, **kwargs)

    def __enter__(self) -> Any:
        from .flex import route

        route(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        from .flex import route

        super().__exit__(*error)
        route(False)

    def _answer(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.answer(scaled_dot_product_attention, _SDPA, args, kwargs)

    def answer(self, ours: Any, theirs: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of PyTorch's function `theirs` by our function of the same signature."""
        try:
            out = ours(*args, **kwargs, precision=self.precision)
        except NumflashError as error:
            if not self.fallback:
                raise
            if str(error) not in self.fallbacks:
                logger.warning("PyTorch's attention takes over: %s", error)
            self.fallbacks[str(error)] += 1
            return theirs(*args, **kwargs)
        self.calls += 1
        return out
