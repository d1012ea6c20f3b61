"""The operators of `numflash.torch` as PyTorch registers them: attention and its gradient.

Calls equal to an earlier one run its kernel without PyTorch's dispatch, where nothing observes the
difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import api, validation
from ..dispatch import backends, plans
from ..dispatch.option_gradients import of_mask as of_mask_gradient
from ..errors import UnsupportedError
from ..interop import device_tensors
from ..interop.arguments import choice
from ..interop.arrays import Memory
from ..jit import threads
from ..jit.threads import one_at_a_time, refuse_after_fork
from ..numerics.merge import apply_sinks
from ..tiling import Store
from ..validation.options import ALIGNMENTS, IMPLS, OptionArrays, Options
from .batching import one_call

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
TENSORS = [n for n, kind in enumerate(OPTIONS.values()) if kind == "Tensor?"]
MASK, SINKS, PRECISION, ALIGNMENT = (
    [*OPTIONS].index(name) for name in ("attn_mask", "sinks", "precision", "alignment")
)
# Which gradients of options are wanted, after the options. Graphs that Inductor has kept on disk may
# call the operator without these.
WANTED = {"of_mask": "bool", "of_sinks": "bool"}
GRADIENT_TENSORS = "grad_out query key value out lse"
LARGEST = (1 << 63) - 1  # of the schema's integers


def _schema(tensors: str, options: dict[str, str], results: int) -> str:
    arguments = [f"Tensor {name}" for name in tensors.split()]
    arguments += [f"{kind} {name}{'=False' * (name in WANTED)}" for name, kind in options.items()]
    return f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * results)})"


def _key_lengths(mask: Tensor | None, batch: int, keys: int) -> Tensor | np.ndarray | None:
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
    if mask.is_cpu:
        seen = mask.numpy()[:, 0, 0]
        falling = (seen[:, 1:] <= seen[:, :-1]).all()
        return seen.sum(1) if falling else None
    row = mask[:, 0, 0]
    lengths = row.sum(-1)
    falling = torch.equal(row, torch.arange(keys, device=row.device) < lengths[:, None])
    return lengths.cpu() if falling else None


def _named(values: tuple) -> tuple[dict[str, Any], str]:
    """The operator's options by the names of `Options`, and which implementation is asked for."""
    given = dict(zip(OPTIONS, values, strict=True))
    given["window"] = given.pop("left"), given.pop("right")
    choice("alignment", given["alignment"], ALIGNMENTS)
    return given, choice("impl", given.pop("impl"), IMPLS)


def _typed(values: tuple) -> tuple:
    """The options as the operator's schema wants them; what is wrong is refused in our words, not in
    those of PyTorch's dispatcher.
    """
    given, impl = _named(values)
    asked = Options(**given)
    left, right = (None if side is None else min(side, LARGEST) for side in asked.window)
    others = {"left": left, "right": right, "impl": impl}
    return tuple(others[x] if x in others else getattr(asked, x) for x in OPTIONS)


def _options(values: tuple, key: Tensor) -> tuple[Options, str]:
    """The operator's options as `numflash.attention` takes them, and which implementation is asked
    for.
    """
    given, impl = _named(values)
    mask, lengths = given["attn_mask"], given["key_lengths"]
    given["attn_mask"], given["key_lengths"] = _padding(mask, lengths, given["alignment"], key)
    return Options(**given, return_lse=True), impl


def _padding(
    mask: Tensor | None, lengths: Tensor | None, alignment: str, key: Tensor
) -> tuple[Tensor | None, Tensor | np.ndarray | None]:
    """A mask and key lengths, the latter instead of a mask of nothing but padding."""
    if mask is None or lengths is not None or alignment != "upper_left":
        return mask, lengths  # with another alignment the diagonal would move with the lengths
    found = _key_lengths(mask, key.shape[0], key.shape[2])
    return (mask, None) if found is None else (None, found)


def _fields(options: tuple[Any, ...], query: Tensor, key: Tensor) -> dict[str, Any]:
    """The fields of a `Problem` that come from the options' tensors."""
    mask, lengths, slopes, sinks = (options[n] for n in TENSORS)
    mask, lengths = _padding(mask, lengths, options[ALIGNMENT], key)
    b, h, length = query.shape[:3]
    arrays = OptionArrays(mask, lengths, slopes, sinks)
    return validation.described(arrays, options[ALIGNMENT], (b, h, length, key.shape[2]))


def _detached(asked: Options) -> Options:
    """The options with a mask and sinks that do not require grad."""
    given = {"attn_mask": asked.attn_mask, "sinks": asked.sinks}
    trained = {n: x.detach() for n, x in given.items() if x is not None and x.requires_grad}
    return replace(asked, **trained) if trained else asked


class pytorch_threads:
    """As many threads for a kernel as PyTorch would take."""

    def __enter__(self) -> None:
        self.before = threads.count()
        self.now = min(torch.get_num_threads(), threads.most())
        if self.now != self.before:
            threads.set_num_threads(self.now)

    def __exit__(self, *error: object) -> None:
        if self.now != self.before:
            threads.set_num_threads(self.before)


def _array(x: Tensor) -> np.ndarray:
    """The memory of a contiguous float32 tensor as an array.

    After `x.numpy()` PyTorch would refuse to resize the tensor.
    """
    return np.asarray(Memory(x.data_ptr() or 16, tuple(x.shape), None, "=f4", x))


# dtypes that kernels read in place, as `plans.keep_runner` names them
READ = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def _plain(x: Any, dtype: torch.dtype) -> bool:
    """Whether x is a tensor of `dtype` whose memory holds its numbers as the kernels take them."""
    return (
        type(x) is Tensor and x.dtype is dtype and x.is_cpu and x.is_contiguous() and not x.is_neg()
    )


def _hold_tensors(options: tuple[Any, ...]) -> bool:
    """Whether one of the options is a tensor, whose numbers are looked at in each call."""
    return any(isinstance(options[n], Tensor) for n in TENSORS)


def _without_tensors(options: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...] | None:
    """The options with a tensor's dtype in its place; None where a call has to look at more than its
    numbers.
    """
    changed = list(options)
    for n in TENSORS:
        x = options[n]
        if x is None:
            continue
        dense = type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided
        if not dense or not x.is_cpu or x.is_neg():
            return None
        if n == MASK and x.dtype not in (torch.bool, torch.float32, dtype):
            return None
        changed[n] = x.dtype
    return tuple(changed)


def _runner(
    query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, ...]
) -> tuple[Any, Any | None]:
    """The key of equal calls of the operator, and the runner that computes them.

    The key is None for tensors that are not `_plain`; the runner is None for calls that were not
    made before. The key has the types of the options too: 1 == True, and only one of them may be
    allowed.
    """
    if type(query) is Tensor and query.is_cuda:
        return _on_card("attention", (query, key, value), options)
    return _known(plans.runners, query, key, value, options)


def _known(
    store: Store[Any], query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, ...]
) -> tuple[Any, Any | None]:
    """The key of equal calls on the CPU, and what they have in `store`."""
    dtype = query.dtype if type(query) is Tensor else None
    if dtype not in READ or not (
        _plain(query, dtype) and _plain(key, dtype) and _plain(value, dtype)
    ):
        return None, None
    asked = _without_tensors(options, dtype) if _hold_tensors(options) else options
    if asked is None:
        return None, None
    try:
        call = dtype, query.shape, key.shape, value.shape, asked, tuple(map(type, asked))
        return call, store.get(call)
    except TypeError:  # an option that cannot be hashed
        return None, None
    except RuntimeError:  # a nested tensor of the strided layout has no shape
        return None, None


def _on_card(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, Any]:
    """The key of equal calls on tensors on a card, and what computes them, as of `_runner`."""
    places = device_tensors.places(*tensors)
    if places is None or _hold_tensors(options):
        return None, None
    forms = tuple((x.shape, x.dtype) for x in tensors)
    call = name, forms, places, options, tuple(map(type, options))
    return call, plans.find(call)


def _with_tensors(
    runner: Any, query: Tensor, key: Tensor, options: tuple[Any, ...]
) -> tuple[Any, np.ndarray | None]:
    """What computes a call that was made before with the options' tensors, and its sinks.

    None where it takes more memory than the first call did.
    """
    if not _hold_tensors(options):
        return runner, None
    fields = _fields(options, query, key)
    return runner.for_options(fields), fields["sinks"]


def _run(
    runner: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    with_lse: bool,
    sinks: np.ndarray | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The results of a call that was made before; lse only where it is wanted."""
    if query.is_cuda:
        out, lse = runner(query, key, value)
        return out, lse
    refuse_after_fork()
    rows = query.shape[:3]
    out = query.new_empty((*rows, value.shape[3]), dtype=torch.float32)
    with_lse = with_lse or sinks is not None
    lse = query.new_empty(rows, dtype=torch.float32) if with_lse else None
    places = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
    with pytorch_threads(), one_at_a_time():
        runner.run_at(*places, 0 if lse is None else lse.data_ptr(), with_lse)
    if sinks is not None and lse is not None:
        apply_sinks(_array(out), _array(lse), sinks)
    return (out if query.dtype is torch.float32 else out.to(query.dtype)), lse


def unobserved(*tensors: Tensor) -> bool:
    """Whether the operator can be skipped without any difference.

    No gradient is asked for; no mode, transform, tracer, compiler, profiler or autocast is active.
    """
    return not (device_tensors.loses_grad(*tensors) or _is_seen(tensors[0]))


def _is_seen(query: Tensor) -> bool:
    """Whether more than a gradient's node has to see the operator."""
    return _is_traced() or torch.is_autocast_enabled("cuda" if query.is_cuda else "cpu")


def _is_traced() -> bool:
    """Whether a compiler, mode, transform, tracer or profiler has to see the operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
    )


def without_operator(
    query: Any, key: Any, value: Any, options: tuple[Any, ...], with_lse: bool
) -> tuple[Tensor, Tensor | None] | None:
    """A call that was made before, without PyTorch's dispatch; None where that is not the same."""
    if torch.compiler.is_compiling():
        return None
    _, runner = _runner(query, key, value, options)
    if runner is None or _is_seen(query):
        return None
    tensors = [x for n in TENSORS if (x := options[n]) is not None]
    watched = device_tensors.loses_grad(query, key, value, *tensors)
    if watched and (options[PRECISION] == "int8" or device_tensors.loses_grad(*tensors)):
        return None  # the operator's node has gradients of options, and refuses those of int8
    runner, sinks = _with_tensors(runner, query, key, options)
    if runner is None:
        return None
    if not watched:
        return _run(runner, query, key, value, with_lse, sinks)
    out, lse = _Known.apply((runner, sinks), query, key, value, options)
    return out, lse


def _attend(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, H, L, Dv) like query and lse (B, H, L) float32, of 4-D tensors.

    Both are tensors in memory that PyTorch has allocated.
    """
    call, runner = _runner(query, key, value, options)
    if runner is not None:
        runner, sinks = _with_tensors(runner, query, key, options)
    if runner is not None:
        return _run(runner, query, key, value, True, sinks)
    asked, impl = _options(options, key)
    query, key, value = (x.detach() for x in (query, key, value))  # gradients are kept elsewhere
    asked = _detached(asked)
    if query.is_cuda:  # allocates through PyTorch, and gets the current stream
        return api.attend(query, key, value, asked, impl, call)
    problem = validation.problem(query, key, value, asked)
    out, lse = _results(query, value)
    written = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    with pytorch_threads():
        backends.solve(problem, impl, (_array(written), _array(lse)))
    if call is not None:
        plans.keep_runner(call, problem, impl, READ[query.dtype])
    return out if written is out else out.copy_(written), lse


def _results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous memory for the results, not written yet."""
    rows = query.shape[:3]
    return query.new_empty((*rows, value.shape[3])), query.new_empty(rows, dtype=torch.float32)


attention_operator = torch.library.custom_op(
    "numflash::attention", _attend, mutates_args=(), schema=_schema("query key value", OPTIONS, 2)
)


@attention_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _results(query, value)


def _differentiate(*arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, a float mask and sinks, shaped like them; in memory of
    PyTorch's.

    arguments : grad_out, query, key, value, out and lse, the options, and whether the gradients of the
        mask and of the sinks are wanted; else they have size 0
    """
    tensors, options, of_mask, of_sinks = _parted(arguments)
    grad_out, query, _, _, out, lse = tensors
    sinks = query.new_empty(0)
    if of_sinks:
        sinks = _gradient_of_sinks(options[SINKS], grad_out, out, lse)
    *found, mask = _of_operands(tensors, options, of_mask)
    return *found, mask, sinks


def _parted(arguments: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], tuple[Any, ...], bool, bool]:
    """The tensors, the options, and whether gradients of mask and sinks are wanted: PyTorch leaves out
    last arguments that are the schema's defaults.
    """
    count = len(GRADIENT_TENSORS.split())
    end = count + len(OPTIONS)
    of_mask, of_sinks = (*arguments[end:], False, False)[:2]
    return arguments[:count], arguments[count:end], of_mask, of_sinks


def _gradient_of_sinks(sinks: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """(H,) like sinks (H,), from dO and O (B, H, L, Dv) and the LSE (B, H, L), on any device:
    `dispatch.option_gradients.of_sinks`.
    """
    delta = (grad_out.double() * out.double()).sum(-1)
    weights = torch.exp(torch.clamp(sinks.double()[:, None] - lse.double(), max=0))
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def _of_operands(
    tensors: tuple[Tensor, ...], options: tuple[Any, ...], of_mask: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and mask, the last of size 0 where it is not wanted."""
    grad_out, query, key, value, out, lse = tensors
    call = None
    if query.is_cuda:  # no card's kernel reads one number expanded, as the gradient of a sum is
        backends.refuse_gradient_of_mask("auto", of_mask)
        grad_out = grad_out.contiguous()
        call, again = _on_card("gradients", (query, key, value, grad_out, out, lse), options)
        if again is not None:
            dq, dk, dv = again(query, key, value, None, grad_out, out, lse)
            return dq, dk, dv, query.new_empty(0)
    grad_out, query, key, value, out, lse = (
        x.detach() for x in (grad_out, query, key, value, out, lse)
    )
    known = None
    if not query.is_cuda:
        call, known = _known(plans.problems, query, key, value, options)
    if known is None:
        asked, impl = _options(options, key)
        asked = replace(_detached(asked), pv=None)  # of "int8" only, which has no gradient
        if query.is_cuda:
            arrays = grad_out, query, key, value, out, lse
            dq, dk, dv = api.differentiate(arrays, asked, impl, call=call)
            return dq, dk, dv, query.new_empty(0)
        problem = validation.problem(query, key, value, asked)
    else:
        impl = options[-1]
        tensors = query, key, value
        whole = query.dtype is torch.float32  # NumPy has no bfloat16
        taken = [x.numpy() for x in tensors] if whole else plans.taken_in(*tensors)
        problem = known.with_operands(*plans.shaped(taken, "bhld", known.precision))
        if _hold_tensors(options):
            problem = problem.with_options(_fields(options, query, key))
    if known is not None and _are_results(grad_out, out, lse, query, value):
        operands = grad_out.numpy(), out.numpy(), lse.numpy()
    else:
        shape = tuple(query.shape)
        operands = validation.gradient_operands(problem, shape, grad_out, out, lse, "bhld")
    found = [x.new_empty(x.shape, dtype=torch.float32) for x in (query, key, value)]
    nb, nh, _, length, s, _, _ = problem.shape
    scores = np.zeros((nb, nh, length, s), np.float32) if of_mask else None
    with pytorch_threads():
        backends.solve_backward(problem, operands, impl, [_array(x) for x in found], scores)
    if call is not None and known is None:
        plans.keep_problem(call, problem)
    dq, dk, dv = (x.to(query.dtype) for x in found)
    if scores is None:
        return dq, dk, dv, query.new_empty(0)
    mask = options[MASK]
    return dq, dk, dv, torch.from_numpy(of_mask_gradient(scores, tuple(mask.shape))).to(mask.dtype)


def _are_results(grad_out: Tensor, out: Tensor, lse: Tensor, query: Tensor, value: Tensor) -> bool:
    """Whether these are contiguous float32 tensors of the shapes that belong to query and value."""
    rows, kind = query.shape[:3], torch.float32
    shape = (*rows, value.shape[3])
    return (
        _plain(out, kind)
        and _plain(grad_out, kind)
        and _plain(lse, kind)
        and out.shape == grad_out.shape == shape
        and lse.shape == rows
    )


attention_backward_operator = torch.library.custom_op(
    "numflash::attention_backward",
    _differentiate,
    mutates_args=(),
    schema=_schema(GRADIENT_TENSORS, {**OPTIONS, **WANTED}, 5),
)


@attention_backward_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, options, of_mask, of_sinks = _parted(arguments)
    _, query, key, value, _, _ = tensors
    found = [x.new_empty(x.shape) for x in (query, key, value)]
    for wanted, place in ((of_mask, MASK), (of_sinks, SINKS)):
        option = options[place]
        found.append(option.new_empty(option.shape) if wanted else query.new_empty(0))
    return tuple(found)


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


def _gradients(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
    if grad_out is None:  # nothing depends on the result
        return (None,) * len(ctx.rest)
    out, lse, *tensors = ctx.saved_tensors
    arguments = list(ctx.rest)
    for place, x in zip(ctx.places, tensors, strict=True):
        arguments[place] = x
    query, key, value, *options = arguments
    wanted = [ctx.needs_input_grad[3 + n] for n in (MASK, SINKS)]
    *found, mask, sinks = _differentiated(grad_out, query, key, value, out, lse, *options, *wanted)
    others: list[Tensor | None] = [None] * len(options)
    for of_option, place, x in zip(wanted, (MASK, SINKS), (mask, sinks), strict=True):
        if of_option:
            others[place] = x
    return (*found, *others)


def _differentiated(grad_out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """`_differentiate`, by its operator where something has to see that.

    Where a gradient of the gradient is asked for, the operator refuses it.
    """
    negated = any(x.is_neg() for x in rest[:3])  # which the dispatch computes
    if negated or torch.is_grad_enabled() or _is_traced() or not _is_direct(grad_out):
        found: tuple[Tensor, ...] = attention_backward_operator(grad_out, *rest)
        return found
    return _differentiate(grad_out, *rest)


def no_second_derivatives(ctx: Any, *grads: Any) -> tuple:
    """Refuse the backward pass of a backward pass."""
    raise UnsupportedError(
        "derivatives: got a gradient of a gradient; allowed: first derivatives only"
    )


attention_operator.register_autograd(_gradients, setup_context=_save)
attention_backward_operator.register_autograd(no_second_derivatives)
attention_operator.register_vmap(one_call(attention_operator, 3, [*OPTIONS]))
attention_backward_operator.register_vmap(
    one_call(attention_backward_operator, 6, [*OPTIONS, *WANTED])
)


def _is_direct(x: Any) -> bool:
    """Whether PyTorch's dispatch would hand x on as it is: no subclass, no lazy negation, no batch of
    gradients (`is_grads_batched` of torch.autograd.grad), which none of the levels of vmap shows.
    """
    plain = type(x) in (Tensor, torch.nn.Parameter) and not x.is_neg()
    return plain and not torch._C._functorch.is_legacy_batchedtensor(x)


class _Attention(torch.autograd.Function):
    """The operator and its gradient without PyTorch's dispatch, which takes 0.2 ms for both."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        found = _attend(*inputs)
        ctx.set_materialize_grads(False)
        _save(ctx, inputs, found)
        return found

    backward = staticmethod(_gradients)


class _Known(torch.autograd.Function):
    """The same for a call that was made before: what computes it, and its sinks.

    The options are one argument, because autograd's node takes time for each: none of their tensors
    requires grad.
    """

    @staticmethod
    def forward(
        ctx: Any, call: tuple[Any, Any], query: Tensor, key: Tensor, value: Tensor, options: tuple
    ) -> tuple[Tensor, Tensor | None]:
        runner, sinks = call
        out, lse = _run(runner, query, key, value, True, sinks)
        ctx.set_materialize_grads(False)
        ctx.options = list(options)
        ctx.places = [n for n in TENSORS if options[n] is not None]
        ctx.save_for_backward(query, key, value, out, lse, *(options[n] for n in ctx.places))
        for n in ctx.places:
            ctx.options[n] = None
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
        if grad_out is None:  # nothing depends on the result
            return (None,) * 5
        query, key, value, out, lse, *tensors = ctx.saved_tensors
        options = list(ctx.options)
        for n, x in zip(ctx.places, tensors, strict=True):
            options[n] = x
        found = _differentiated(grad_out, query, key, value, out, lse, *options, False, False)
        return None, *found[:3], None


def attend(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, H, L, Dv) like query and lse (B, H, L) float32 of 4-D tensors, with gradients.

    By the operator where something has to see it, and by a node of autograd's where a gradient is
    asked for.
    """
    direct = not _is_traced() and all(map(_is_direct, (query, key, value)))
    run = attention_operator
    if direct:
        inputs = query, key, value, options[MASK], options[SINKS]
        watched = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        run = _Attention.apply if watched else _attend
    if not direct and not torch.compiler.is_compiling():
        options = _typed(options)
    out, lse = run(query, key, value, *options)
    return out, lse
