"""Attention over sequences packed one behind the other, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from . import validation
from .dispatch import call_keys, plan_store
from .dispatch.option_gradients import OPERANDS, of_sinks, split_wrt
from .dispatch.packed import differentiate_packed, solve_packed
from .errors import ArgumentError
from .interop.arguments import choice, refuse_unknown
from .interop.arrays import deliver, import_array
from .interop.eager import eager
from .validation import Problem
from .validation.options import IMPLS, Options

Functions = Callable[[Problem, list[int]], Problem]

OPTIONS = (
    "scale",
    "enable_gqa",
    "window",
    "alignment",
    "softcap",
    "alibi_slopes",
    "sinks",
    "precision",
    "pv",
)
NAMED = ("is_causal", "impl", "score_mod", "mask_mod")


@eager
def attention_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    is_causal: bool = False,
    return_lse: bool = False,
    impl: str = "auto",
    score_mod: Any = None,
    mask_mod: Any = None,
    **options: Any,
) -> Any:
    """Attention over sequences packed one behind the other, each on its own.

    Parameters
    ----------
    query : (total_q, H, D) array
        Of the kinds and dtypes that `attention` takes.
    key, value : (total_k, Hkv, D) and (total_k, Hkv, Dv) arrays
    cu_seqlens_q, cu_seqlens_k : (N + 1,) integers
        Cumulative lengths: sequence n is rows cu[n] to cu[n + 1]; the first is 0, the last the
        total.
    is_causal : bool
        A row attends to no key of its sequence beyond its diagonal.
    return_lse : bool
        Also return the log-sum-exp of each row.
    impl : "auto", "cpu", "portable", "reference", "cuda" or "cuda-emulator"
        As `attention` takes it.
    scale, enable_gqa, window, alignment, softcap, sinks, precision, pv
        As `attention` takes them.
    alibi_slopes : (H,) or (1, H)
        As `attention` takes them, the same for all sequences.
    score_mod, mask_mod : functions as for `flex_attention`, or None
        b is the number of the sequence, q_idx and kv_idx count from its first row and key.

    Returns
    -------
    out : (total_q, H, Dv), of the kind and dtype of query (float32 for float64)
    lse : (total_q, H) float32, natural log; only with `return_lse`

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError
    """
    call = None
    if score_mod is mask_mod is None:
        given = (is_causal, return_lse, *options.items())
        call = call_keys.key_of_packed(
            (query, key, value), (cu_seqlens_q, cu_seqlens_k), given, impl
        )
        plan = plan_store.find(call)
        if plan is not None:
            return plan(query, key, value)
    refuse_unknown("attention_varlen", options, (*OPTIONS, *NAMED, "return_lse"))
    choice("impl", impl, IMPLS)
    asked = Options(is_causal=is_causal, return_lse=return_lse, layout="blhd", **options)
    operands = validation.import_operands(query, key, value)
    cuts = validation.cuts_of(operands, cu_seqlens_q, cu_seqlens_k)
    whole = validation.problem_of(operands, asked)
    functions = _functions((score_mod, mask_mod), whole, impl)
    out, lse, parts = solve_packed(whole, cuts, asked.alignment, functions, impl)
    if call is not None:
        plan_store.keep_packed(call, parts, cuts, operands[0], asked, impl)
    return deliver(out, lse, operands[0], return_lse)


@eager
def attention_varlen_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    grad_lse: Any = None,
    is_causal: bool = False,
    impl: str = "auto",
    score_mod: Any = None,
    mask_mod: Any = None,
    wrt: Sequence[str] = OPERANDS,
    **options: Any,
) -> tuple[Any, ...]:
    """The gradients of `attention_varlen` with respect to query, key and value, or to what `wrt` names.

    Parameters
    ----------
    grad_out : (total_q, H, Dv) array
        Gradient of the output; any float dtype, as `out`.
    query, key, value, cu_seqlens_q, cu_seqlens_k
        What `attention_varlen` was given.
    out : (total_q, H, Dv) array
    lse : (total_q, H) float32 array
        What it returned with `return_lse=True` and the same options.
    grad_lse : (total_q, H) float32 array or None
        Gradient of the lse; None is 0.
    is_causal, impl, score_mod, mask_mod, options
        As `attention_varlen` takes them, but for precision "int8", which has no gradient, and `pv`.
    wrt : sequence of "query", "key", "value" and "sinks"
        What gradients are returned of, in this order.

    Returns
    -------
    dq, dk, dv : as query, key and value: shape, kind and dtype (float32 for float64)
        Or what `wrt` names.

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError
    """
    refuse_unknown("attention_varlen_backward", options, (*OPTIONS, *NAMED, "grad_lse", "wrt"))
    choice("impl", impl, IMPLS)
    asked = Options(is_causal=is_causal, layout="blhd", **options)
    arrays = grad_out, query, key, value, out, lse, grad_lse
    cuts = cu_seqlens_q, cu_seqlens_k
    return differentiate(arrays, cuts, asked, (score_mod, mask_mod), impl, wrt)


def differentiate(
    arrays: tuple[Any, ...],
    cu_seqlens: tuple[Any, Any],
    asked: Options,
    functions: tuple[Any, ...],
    impl: str = "auto",
    wrt: Sequence[str] = OPERANDS,
) -> tuple[Any, ...]:
    """`attention_varlen_backward` with its options checked.

    arrays : grad_out, query, key, value, out, lse and grad_lse or None
    functions : score_mod and mask_mod, and what `flex.prepare` made of them if they are recorded
    """
    _of_packed(wrt, asked)
    grad_out, query, key, value, out, lse, grad_lse = arrays
    operands = validation.import_operands(query, key, value)
    cuts = validation.cuts_of(operands, *cu_seqlens)
    whole = validation.problem_of(operands, asked)
    shape = operands[0].array.shape
    given = validation.gradient_operands(whole, shape, grad_out, out, lse, grad_lse, "blhd")
    of_sequences = _functions(functions, whole, impl)
    found = differentiate_packed(whole, given, cuts, asked.alignment, of_sequences, impl)
    named = zip(OPERANDS, found, operands, strict=True)
    gradients = {name: deliver(x, None, t, False) for name, x, t in named}
    if whole.sinks is not None and "sinks" in wrt:
        sinks = import_array("sinks", asked.sinks)
        gradients["sinks"] = deliver(of_sinks(whole.sinks, *given), None, sinks, False)
    return tuple(gradients[name] for name in wrt)


def _of_packed(wrt: Any, asked: Options) -> None:
    """Refuse what packed sequences have no gradients of."""
    allowed = (*OPERANDS, "sinks")
    given = wrt if isinstance(wrt, Sequence) and not isinstance(wrt, str) else ()
    for x in given:
        if not (isinstance(x, str) and x in allowed):
            got = repr(x) if isinstance(x, str) else f"an object of type {type(x).__name__}"
            raise ArgumentError(
                f"wrt: got {got}; allowed of packed sequences: {', '.join(map(repr, allowed))}"
            )
    split_wrt(wrt, asked)


def _functions(functions: tuple[Any, ...], whole: Problem, impl: str) -> Functions | None:
    """What gives a batch of sequences its score and mask functions; None where there are none."""
    if functions[0] is functions[1] is None:
        return None
    from .flex.attention import of_sequences

    score_mod, mask_mod, recorded = (*functions, None)[:3]
    return of_sequences(score_mod, mask_mod, whole, impl, recorded)
