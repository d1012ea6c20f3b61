"""The public functions: check, choose a backend, convert arrays. Nothing is computed here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import validation
from .dispatch import call_keys, plan_store
from .dispatch.backends import solve, solve_backward
from .dispatch.option_gradients import OPERANDS, of_mask, of_sinks, refuse_on_card, split_wrt
from .errors import UnsupportedError
from .interop.arguments import choice, refuse_unknown
from .interop.arrays import deliver, import_array, on_device, restore
from .interop.eager import eager, is_traced, untraced
from .validation.options import COMMON, IMPLS, Options


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: Any = None,
    alignment: str = "upper_left",
    key_lengths: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    precision: str | None = None,
    pv: str | None = None,
    layout: str = "bhld",
    return_lse: bool = False,
    impl: str = "auto",
) -> Any:
    """Scaled dot-product attention, softmax(query . key^T * scale + mask) . value.

    The score matrix is never stored.

    Parameters
    ----------
    query : (B, H, L, D) array, 2-D and 3-D arrays are promoted
        float32, float64 (computed in float32, where more than 3.4e38 is infinite), float16, bfloat16
        (ml_dtypes, torch, or uint16 bits with precision "bfloat16"). NumPy array, PyTorch CPU
        tensor, or any object that supports DLPack.
    key : (B, Hkv, S, D) array
    value : (B, Hkv, S, Dv) array; D and Dv from 1 to 576
    attn_mask : broadcastable to (B, H, L, S)
        bool (True = may attend), or float, added to the scaled scores as float32: float64 beyond
        3.4e38 counts as infinite.
    dropout_p : float
        0.0 only.
    is_causal : bool
        Row i attends to no key beyond its diagonal.
    scale : float
        1 / sqrt(D) unless given; 0, or magnitudes from 1e-30 to 1e30.
    enable_gqa : bool
        Allow fewer key heads than query heads; Hkv divides H.
    window : (left, right)
        Keys a row attends to before and after its diagonal, None for no limit.
    alignment : "upper_left" or "lower_right"
        Whether the diagonal begins at key 0 (PyTorch) or ends at the last valid key (FlashAttention
        2, decoding).
    key_lengths : (B,) integers
        Valid keys of each batch entry; the rest is padding.
    softcap : float
        Scores become softcap * tanh(score / softcap), before masks; 0 is none. From 1e-30 to 1e30,
        to 1e4 with "int8".
    alibi_slopes : (H,) or (B, H)
        Adds -slope * |distance to the diagonal|; magnitudes up to 1e20.
    sinks : (H,)
        One extra score per head that takes part in the denominator only.
    precision : "float32", "bfloat16", "float16" or "int8"
        The inputs' own unless given. "int8" clips scores at +-7.2e5.
    pv : "int8", "int16", "bf16" or "fp32"
        With precision "int8": the weights have 8 bits, or 15 ("int16": also exact integers, equal
        bits on every device, 1.1 to 1.5 times the time on a CPU), or weights and values are
        floats: bfloat16 ("bf16": 1.4 times the time where the CPU multiplies bfloat16, that of
        "fp32" elsewhere; not on a card) or float32 ("fp32"; not for arrays on a card, nor on
        sm_75). With floats the output's last digits depend on the CPU.
    layout : "bhld" or "blhd"
        The order of query's, key's and value's dimensions, and of the results': "blhd" is
        (B, L, H, D), as FlashAttention 2's.
    return_lse : bool
        Also return the log-sum-exp of each row.
    impl : "auto", "cpu", "portable", "reference", "cuda" or "cuda-emulator"
        The emulator takes an architecture: "cuda-emulator:sm_75", sm_80 (unless given), sm_86,
        sm_89 or sm_90a. An explicit choice never falls back to another.

    Returns
    -------
    out : (B, H, L, Dv) in the layout, kind and dtype of query (float32 for float64)
    lse : (B, H, L) float32 in the layout of query, natural log; only with `return_lse`

    Notes
    -----
    Rows that attend to no key give 0 and -inf. NaN or infinity in a key or value reaches only the
    rows that attend to it.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, what came and what is allowed.
    UnsupportedError
        What `impl` names cannot run here.
    """
    given = (
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window,
        alignment,
        key_lengths,
        softcap,
        alibi_slopes,
        sinks,
        precision,
        pv,
        layout,
        return_lse,
    )
    if type(query) is not np.ndarray and is_traced():
        return untraced(_attention)(query, key, value, given, impl)
    return _attention(query, key, value, given, impl)


def _attention(query: Any, key: Any, value: Any, given: tuple[Any, ...], impl: str) -> Any:
    """`attention` by the plan of an equal call, if there is one; `given` are the values of `Options`."""
    call = call_keys.key_of(query, key, value, given, impl)
    plan = plan_store.find(call)
    if plan is not None:
        found = plan(query, key, value, call_keys.arrays_of(given))
        if found is not None:
            return found
    return attend(query, key, value, Options(*given), impl, call)


def attend(
    query: Any, key: Any, value: Any, options: Options, impl: str, call: call_keys.Key = None
) -> Any:
    """`attention` with its options checked.

    It leaves a plan for the next call with the key `call`, if there is one.
    """
    choice("impl", impl, IMPLS)
    if impl in ("auto", "cuda") and on_device(query):
        from .cuda import arrays

        return arrays.attention(query, key, value, options, keep=_kept(call))
    taken = validation.import_operands(query, key, value)
    problem = validation.problem_of(taken, options)
    out, lse = (restore(x, taken[0].array.ndim, options.layout) for x in solve(problem, impl))
    if call is not None:
        plan_store.keep(call, problem, taken, options, impl)
    return deliver(out, lse, taken[0], options.return_lse)


def _kept(call: call_keys.Key) -> Any:
    """What keeps the plan of a call on a card; None for a call that leaves none."""
    return None if call is None else functools.partial(plan_store.keep_made, call)


@eager
def attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    *,
    grad_lse: Any = None,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: Any = None,
    alignment: str = "upper_left",
    key_lengths: Any = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    precision: str | None = None,
    layout: str = "bhld",
    score_mod: Any = None,
    block_mask: Any = None,
    impl: str = "auto",
    wrt: Sequence[Any] = OPERANDS,
) -> tuple[Any, ...]:
    """The gradients of `attention` with respect to query, key and value, or to what `wrt` names.

    Recomputed tile by tile; no matrix of scores is stored unless `wrt` needs it.

    FlashAttention 2, algorithm 2 (Dao 2023). Equal inputs give equal bits on every run and at every
    thread count.

    Parameters
    ----------
    grad_out : (B, H, L, Dv) array
        Gradient of the output; any float dtype, as `out`.
    query, key, value
        What `attention` was given.
    out : (B, H, L, Dv) array
    lse : (B, H, L) float32 array, natural log
        What `attention` returned with `return_lse=True` and the same options. With out and lse over
        more keys than these (from `merge_states`), the result is what these keys add to the
        gradients.
    grad_lse : (B, H, L) float32 array or None
        Gradient of the lse, where something was computed from it (a z-loss, `merge_states`); None
        is 0.
    options
        attn_mask, ..., sinks, precision, layout: as for `attention`. ALiBi's slopes are constants.
    score_mod, block_mask : as for `flex_attention`
    precision : "float32", "bfloat16" or "float16"
        What the operands are rounded to; sums are float32. "int8" has no gradient.
    impl : "auto", "cpu", "portable", "reference", "cuda" or "cuda-emulator"
        As `attention` takes it. Device arrays are computed on the card that holds them.
    wrt : sequence of names and captured arrays
        What gradients are returned of, in this order: "query", "key", "value", "attn_mask" (a float
        mask or position bias), "sinks", "scores" (those that the softmax takes), and float arrays
        that `score_mod` has captured, as objects. Masks, scores and captured arrays take memory for
        B * H * L * S float32 and are not differentiated on a card; nor are sinks of device arrays.

    Returns
    -------
    dq, dk, dv : as query, key and value: shape, layout, kind and dtype (float32 for float64)
        Or what `wrt` names, each as what was given; scores (B, H, L, S) float32, of the query's kind.

    Notes
    -----
    Rows that attend to no key, and keys that no row attends to, have gradient 0. NaN or infinity in
    a key or value reaches only the gradients of rows that attend to it, and of the keys that these
    rows attend to.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, what came and what is allowed.
    UnsupportedError
        precision "int8", an `impl` without gradients, or what cannot run here.
    """
    given = (
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window,
        alignment,
        key_lengths,
        softcap,
        alibi_slopes,
        sinks,
        precision,
        None,
        layout,
        False,
    )
    functions = (score_mod, block_mask)
    arrays = (grad_out, query, key, value, out, lse, grad_lse)
    if wrt is OPERANDS:
        call = None
        if score_mod is block_mask is None:
            call = call_keys.key_of_gradients(arrays, given, impl)
        plan = plan_store.find(call)
        found = None if plan is None else plan(arrays, call_keys.arrays_of(given))
        return found or differentiate(arrays, Options(*given), impl, functions, call)
    options = Options(*given)
    names, captured = split_wrt(wrt, options)
    tables = None
    if captured:
        from .flex.captured_arrays import captured_by

        tables = captured_by(score_mod, captured)
    gradients = differentiate(arrays, options, impl, functions, wrt=names, tables=tables)
    by_name = dict(zip(names, gradients, strict=False))
    others = iter(zip(captured, gradients[len(names) :], strict=True))
    return tuple(by_name[x] if isinstance(x, str) else _as_given(*next(others)) for x in wrt)


def _as_given(x: Any, gradient: np.ndarray) -> Any:
    """The gradient of a captured array as what was captured."""
    return deliver(gradient, None, import_array("wrt", x), False)


def differentiate(
    arrays: tuple[Any, ...],
    options: Options,
    impl: str,
    functions: tuple[Any, ...] = (None, None),
    call: call_keys.Key = None,
    wrt: Sequence[str] = OPERANDS,
    tables: Any = None,
) -> tuple[Any, ...]:
    """`attention_backward` with its options checked.

    Arrays are grad_out, query, key, value, out, lse and grad_lse or None.

    functions : score_mod and block_mask, and what `flex.attention.recorded_of` made of them, if they
        are recorded
    call : key of the next calls, for which it leaves a plan
    tables : `flex.captured_arrays.Captured` or None; gradients of its arrays follow those of `wrt`
    """
    grad_out, query, key, value, out, lse, grad_lse = arrays
    choice("impl", impl, IMPLS)
    there = impl in ("auto", "cuda") and on_device(query)
    plain = functions[0] is functions[1] is None
    if not plain and (there or impl.startswith("cuda")):
        raise UnsupportedError(
            f"impl: got {impl!r} with functions, of which CUDA has no gradients; allowed: 'auto' "
            "with arrays in host memory, 'cpu', 'portable', 'reference'"
        )
    if there:
        from .cuda.arrays import attention_backward

        refuse_on_card(wrt)
        on_card = attention_backward(
            grad_out, query, key, value, out, lse, grad_lse, options, _kept(call)
        )
        return tuple(on_card[OPERANDS.index(name)] for name in wrt)
    taken = validation.import_operands(query, key, value)
    layout = options.layout
    problem = validation.problem_of(taken, options)
    if not plain:
        from .flex.attention import with_functions

        score_mod, block_mask, recorded = (*functions, None)[:3]
        problem = with_functions(problem, score_mod, block_mask, impl, recorded)
    shape = taken[0].array.shape
    operands = validation.gradient_operands(problem, shape, grad_out, out, lse, grad_lse, layout)
    scores = None
    if tables is not None or not {"attn_mask", "scores"}.isdisjoint(wrt):
        nb, nh, _, rows, keys, _, _ = problem.shape
        scores = np.zeros((nb, nh, rows, keys), np.float32)
    found = solve_backward(problem, operands, impl, scores=scores)
    if call is not None:
        plan_store.keep_array_gradients(call, problem, len(shape), options, impl)
    gradients = {
        name: deliver(restore(x, len(shape), layout), None, t, False)
        for name, x, t in zip(OPERANDS, found, taken, strict=True)
    }
    if problem.sinks is not None and "sinks" in wrt:
        sinks = import_array("sinks", options.sinks)
        gradients["sinks"] = deliver(of_sinks(problem.sinks, *operands), None, sinks, False)
    if scores is None:
        return tuple(gradients[name] for name in wrt)
    gradients["scores"] = taken[0].export(scores, "float32")
    if "attn_mask" in wrt:
        mask = import_array("attn_mask", options.attn_mask)
        gradients["attn_mask"] = deliver(of_mask(scores, mask.array.shape), None, mask, False)
    others = [] if tables is None else tables.gradients(problem, scores)
    return (*(gradients[name] for name in wrt), *others)


@eager
def attention_int8(query: Any, key: Any, value: Any, *, impl: str = "auto", **options: Any) -> Any:
    """`attention` on operands that are quantised already: nothing is quantised inside.

    Parameters
    ----------
    query : QuantizedTensor (B, H, L, D), granularity "row", "block" or "tensor"; 2-D and 3-D data
        are promoted
    key : QuantizedTensor (B, Hkv, S, D), granularity "row", "block" or "tensor", smoothed or not
    value : QuantizedTensor (B, Hkv, S, Dv), granularity "channel" or "tensor"; any with pv="bf16" or "fp32"
    impl : "auto", "cpu", "portable", "reference", "cuda" or "cuda-emulator"
        As `attention` takes it.
    attn_mask, is_causal, scale, enable_gqa, window, alignment, key_lengths
        Which keys a row attends to, and the scale: as `attention` takes them.
    softcap, alibi_slopes, sinks
        Changes of the scores, as `attention` takes them.
    pv : "int8", "int16", "bf16" or "fp32"
        The weights, as `attention` takes them.
    return_lse : bool

    Returns
    -------
    out : (B, H, L, Dv) float32 array
    lse : (B, H, L) float32; only with `return_lse`

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, what came and what is allowed.
    UnsupportedError
        What `impl` names cannot run here.
    """
    call = call_keys.key_of_quantized(query, key, value, options, impl)
    plan = plan_store.find(call)
    if plan is not None:
        return plan(query, key, value, options)
    choice("impl", impl, IMPLS)
    refuse_unknown("attention_int8", options, (*COMMON, "pv", "return_lse", "impl"))
    asked = Options(**options)
    problem = validation.quantized_problem(query, key, value, asked)
    ndim = query.data.ndim
    out, lse = solve(problem, impl)
    if call is not None:
        plan_store.keep_quantized(call, problem, ndim, asked, impl)
    return (
        (restore(out, ndim, "bhld"), restore(lse, ndim, "bhld"))
        if problem.return_lse
        else restore(out, ndim, "bhld")
    )


@eager
def explain(query: Any, key: Any = None, value: Any = None, **options: Any) -> Any:
    """What `attention` would do for a problem.

    Tiling, bytes in each cache, operations, and the hardware limit (roofline) that bounds it.

    Parameters
    ----------
    query, key, value : arrays as `attention` takes them, or shapes (tuples or lists of integers)
        Shapes are taken as float32; key and value are like query unless given.
    options
        As `attention` takes them.

    Returns
    -------
    Explanation
        `print` it, or read its fields.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As `attention`.
    UnsupportedError
        `impl` "cuda" without a card, or a problem that cards have no kernel for.
    """
    from .dispatch.explanation import explain_problem

    return explain_problem(query, key, value, **options)
