"""`flex_attention`: attention whose scores and mask are functions written in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import validation
from ..dispatch.backends import solve
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..interop.arguments import choice, refuse_unknown
from ..interop.arrays import deliver, on_device, restore
from ..interop.eager import eager
from ..validation import Problem
from ..validation.options import IMPLS, NAMES, Options
from .fused import Fused, fused_of
from .masks import BlockMask
from .prepared import Prepared, prepare

ScoreFunction = Callable[[Any, Any, Any, Any, Any], Any]
OPTIONS = tuple(
    name for name in NAMES if name not in ("dropout_p", "scale", "enable_gqa", "return_lse")
)


def recorded_of(score_mod: ScoreFunction | None, block_mask: Any) -> Prepared:
    """The functions of a call, recorded as they are now."""
    if block_mask is None:
        return prepare(score_mod, None)
    if not isinstance(block_mask, BlockMask):
        raise ArgumentTypeError(
            f"block_mask: got {type(block_mask).__name__}; allowed: a BlockMask of numflash.create_block_mask "
            "(numflash.torch.flex_attention takes PyTorch's)"
        )
    block_mask.check_names()
    return prepare(score_mod, block_mask.mask_mod)


def fuse(
    score_mod: ScoreFunction | None,
    block_mask: Any,
    problem: Problem,
    recorded: Prepared | None = None,
) -> Fused | None:
    """The functions of a problem, as they are now or as they were `recorded`; None where there are
    none.
    """
    if block_mask is None and score_mod is None:
        return None
    if recorded is None:
        recorded = recorded_of(score_mod, block_mask)
    if block_mask is None:
        return fused_of(recorded)
    nb, nh, length, s = block_mask.shape
    entries, heads, _, *lengths, _, _ = problem.shape
    if [length, s] != lengths or nb not in (1, entries) or nh not in (1, heads):
        shape = entries, heads, *lengths
        raise ArgumentError(
            f"block_mask: got one for (B, H, L, S) = {block_mask.shape}; allowed: {shape}, B and H may be 1"
        )
    return block_mask._fused(recorded, entries, heads)


def of_sequences(
    score_mod: ScoreFunction | None,
    mask_mod: Any,
    whole: Problem,
    impl: str,
    recorded: Prepared | None = None,
) -> Callable[[Problem, list[int]], Problem]:
    """What gives the problem of some sequences, by their numbers, its functions: as they are now, or
    as they were `recorded`.
    """
    _supported(whole, impl)
    if mask_mod is None:
        whole, score_mod = _with_option(whole, score_mod)
    prepared = prepare(score_mod, mask_mod) if recorded is None else recorded
    prepared.refuse_grad()

    def functions(problem: Problem, numbers: list[int]) -> Problem:
        problem = problem.changed(softcap=whole.softcap)
        if score_mod is None and mask_mod is None:
            return problem
        return problem.changed(functions=Fused(prepared, batch=np.array(numbers, np.int64)))

    return functions


def with_functions(
    problem: Problem,
    score_mod: ScoreFunction | None,
    block_mask: Any,
    impl: str,
    recorded: Prepared | None = None,
) -> Problem:
    """The problem with its functions.

    recorded : the two of them by `recorded_of`, where they are not to be recorded as they are now
    """
    if score_mod is None and block_mask is None:
        return problem
    _supported(problem, impl)
    if block_mask is None:
        problem, score_mod = _with_option(problem, score_mod)
    return problem.changed(functions=fuse(score_mod, block_mask, problem, recorded))


def _with_option(
    problem: Problem, score_mod: ScoreFunction | None
) -> tuple[Problem, ScoreFunction | None]:
    """An INT8 problem with its own option in place of a score function of the same meaning."""
    if score_mod is None or problem.precision != "int8":
        return problem, score_mod
    cap = prepare(score_mod, None).cap
    return (problem.changed(softcap=cap), None) if cap else (problem, score_mod)


def _supported(problem: Problem, impl: str) -> None:
    if problem.precision == "int8":
        if impl.startswith("cuda"):
            raise UnsupportedError(
                f"impl: got {impl!r} with precision 'int8' and functions; allowed: 'auto', 'cpu', "
                "'portable', or the float precisions"
            )
        _supported_in_integers(problem, impl)


def _supported_in_integers(problem: Problem, impl: str) -> None:
    options = {
        "attn_mask": problem.mask is not None or problem.bias is not None,
        "softcap": bool(problem.softcap),
        "alibi_slopes": problem.alibi_slopes is not None,
    }
    for name, given in options.items():
        if given:
            raise UnsupportedError(
                f"{name}: got one with precision 'int8' and functions; allowed: in the function, or "
                "the float precisions"
            )
    if impl == "reference":
        raise UnsupportedError(
            "impl: got 'reference' with precision 'int8' and functions; allowed: 'auto', 'cpu', "
            "'portable'"
        )


@eager
def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: ScoreFunction | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    impl: str = "auto",
    **options: Any,
) -> Any:
    """Attention with a score function and a mask function of your own, fused into the kernels.

    softmax(score_mod(query . key^T * scale, b, h, q_idx, kv_idx)) . value over the keys that the
    mask lets pass; neither scores nor mask are stored. The functions are called once, with symbolic
    arguments, and compiled to machine code (0.1 s at first, then kept on disk); no C++ compiler is
    needed. Names and meaning are those of PyTorch's FlexAttention.

    Parameters
    ----------
    query : (B, H, L, D) array;  key : (B, Hkv, S, D);  value : (B, Hkv, S, Dv)
        As `attention` takes them.
    score_mod : function of (score, b, h, q_idx, kv_idx), or None
        The new score, of the scaled one, batch entry, head, query and key number. Written with
        operators, NumPy's or PyTorch's functions, and captured arrays, tensors and numbers. An
        index beyond a captured array is clamped, a negative one counts from the end.
    block_mask : BlockMask or None
        From `create_block_mask`.
    scale : float
        1 / sqrt(D) unless given.
    enable_gqa : bool
        Allow fewer key heads than query heads; Hkv divides H. `h` is the query's head.
    return_lse : bool
        Also return the log-sum-exp of each row.
    impl : "auto", "reference", "portable", "cpu", "cuda", "cuda-emulator" or
        "cuda-emulator:sm_90a"
        As for `attention`: arrays on a card are computed there, float precisions only.
    options
        attn_mask, is_causal, window, alignment, key_lengths, softcap, alibi_slopes, sinks,
        precision ("float32", "bfloat16", "float16", "int8"), pv, layout, as for `attention`; they
        come after the functions.

    Returns
    -------
    out : (B, H, L, Dv) in the kind and dtype of query (float32 for float64)
    lse : (B, H, L) float32, natural log; only with `return_lse`

    Notes
    -----
    With precision "int8" the functions get scores in float32 of the integer products, and give
    scores that are rounded to 1/256 octave; keys are not smoothed if there is a `score_mod`. One
    that is exactly c * tanh(score / c), without a mask function, runs as `attention(softcap=c)`, with its bits.

    Rows that see no key give 0 and -inf. NaN or infinity in a key or value that is not seen never
    reaches the output.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, what came and what is allowed; of a function that cannot be traced, the
        line and what to write instead.
    UnsupportedError
        precision "int8" on CUDA, or with attn_mask, softcap or alibi_slopes.
    """
    named = ("score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "impl")
    if "mask_mod" in options:
        raise ArgumentTypeError(
            "mask_mod: flex_attention does not take it; allowed: "
            "block_mask=numflash.create_block_mask(mask_mod, None, None, L, S)"
        )
    refuse_unknown("flex_attention", options, (*OPTIONS, *named))
    choice("impl", impl, IMPLS)
    asked = Options(scale=scale, enable_gqa=enable_gqa, return_lse=return_lse, **options)
    return attend(query, key, value, asked, (score_mod, block_mask), impl)


def attend(
    query: Any, key: Any, value: Any, asked: Options, functions: tuple[Any, ...], impl: str = "auto"
) -> Any:
    """`flex_attention` with its options checked.

    functions : score_mod and block_mask, and what `recorded_of` made of them if they are recorded
    """
    score_mod, block_mask, recorded = (*functions, None)[:3]

    def prepared(problem: Problem, impl: str) -> Problem:
        found = with_functions(problem, score_mod, block_mask, impl, recorded)
        if recorded is None and found.functions is not None:
            found.functions.prepared.refuse_grad()
        return found

    if impl in ("auto", "cuda") and on_device(query):
        from ..cuda import arrays

        return arrays.attention(query, key, value, asked, lambda p: prepared(p, "cuda"))
    taken = validation.import_operands(query, key, value)
    problem = prepared(validation.problem_of(taken, asked), impl)
    ndim = taken[0].array.ndim
    out, lse = (restore(x, ndim, asked.layout) for x in solve(problem, impl))
    return deliver(out, lse, taken[0], asked.return_lse)
