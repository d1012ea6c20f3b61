"""The operators' options: their types in PyTorch's schemas, and what `numflash.attention` makes of them."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import Any

from torch import Tensor

from ..interop.arguments import choice
from ..validation.options import ALIGNMENTS, IMPLS, OptionArrays, Options
from .padding import as_key_lengths

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
# where tensors and some others stand among them
TENSORS = [n for n, kind in enumerate(OPTIONS.values()) if kind == "Tensor?"]
tensors_of = itemgetter(*TENSORS)
MASK, SINKS, PRECISION, ALIGNMENT = (
    [*OPTIONS].index(name) for name in ("attn_mask", "sinks", "precision", "alignment")
)
TRAINED = MASK, SINKS  # which may require grad
CONSTANTS = [n for n in TENSORS if n not in TRAINED]
# After the options: which of their gradients are wanted, and the gradient of the LSE. Graphs that
# Inductor has kept on disk may call the operator without these.
LAST = {"of_mask": "bool", "of_sinks": "bool", "grad_lse": "Tensor?"}
DEFAULTS = {"of_mask": "=False", "of_sinks": "=False", "grad_lse": "=None"}
GRADIENT_TENSORS = "grad_out query key value out lse"
FIRST = len(GRADIENT_TENSORS.split())  # where the options stand
END = FIRST + len(OPTIONS)
LARGEST = (1 << 63) - 1  # of the schema's integers


def schema(tensors: str, options: dict[str, str], results: int) -> str:
    """An operator's schema: tensors by their names, options, and how many tensors it returns."""
    arguments = [f"Tensor {name}" for name in tensors.split()]
    arguments += [f"{kind} {name}{DEFAULTS.get(name, '')}" for name, kind in options.items()]
    return f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * results)})"


def _named(values: tuple) -> tuple[dict[str, Any], str]:
    """The operator's options by the names of `Options`, and which implementation is asked for."""
    given = dict(zip(OPTIONS, values, strict=True))
    given["window"] = given.pop("left"), given.pop("right")
    choice("alignment", given["alignment"], ALIGNMENTS)
    return given, choice("impl", given.pop("impl"), IMPLS)


def typed(values: tuple) -> tuple:
    """The options as the operator's schema wants them; what is wrong is refused in our words, not in
    those of PyTorch's dispatcher.
    """
    given, impl = _named(values)
    asked = Options(**given)
    left, right = (None if side is None else min(side, LARGEST) for side in asked.window)
    others = {"left": left, "right": right, "impl": impl}
    return tuple(others[x] if x in others else getattr(asked, x) for x in OPTIONS)


def asked_for(values: tuple, query: Tensor, key: Tensor) -> tuple[Options, str]:
    """The operator's options as `numflash.attention` takes them, and which implementation is asked
    for.
    """
    given, impl = _named(values)
    mask, lengths = given["attn_mask"], given["key_lengths"]
    given["attn_mask"], given["key_lengths"] = as_key_lengths(
        mask, lengths, given["alignment"], query, key
    )
    return Options(**given, return_lse=True), impl


def detached(asked: Options) -> Options:
    """The options with a mask and sinks that do not require grad."""
    given = {"attn_mask": asked.attn_mask, "sinks": asked.sinks}
    trained = {n: x.detach() for n, x in given.items() if x is not None and x.requires_grad}
    return replace(asked, **trained) if trained else asked


def hold_tensors(options: tuple[Any, ...]) -> bool:
    """Whether one of the options is a tensor, whose numbers are looked at in each call."""
    return OptionArrays(*tensors_of(options)).given()


def to_describe(
    options: tuple[Any, ...], query: Tensor, key: Tensor
) -> tuple[OptionArrays, str, tuple[int, int, int, int]]:
    """The options' tensors, the alignment, and (B, H, L, S): what `KernelPlan.for_arrays` takes."""
    mask, lengths, slopes, sinks = tensors_of(options)
    alignment = options[ALIGNMENT]
    mask, lengths = as_key_lengths(mask, lengths, alignment, query, key)
    b, h, length, _ = query.shape
    return OptionArrays(mask, lengths, slopes, sinks), alignment, (b, h, length, key.shape[2])


def parted(
    arguments: tuple[Any, ...],
) -> tuple[tuple[Tensor, ...], tuple[Any, ...], bool, bool, Tensor | None]:
    """The tensors, the options, whether gradients of mask and sinks are wanted, and that of the LSE:
    PyTorch leaves out last arguments that are the schema's defaults.
    """
    last = dict(zip(LAST, arguments[END:], strict=False))
    of_mask, of_sinks = last.get("of_mask", False), last.get("of_sinks", False)
    return arguments[:FIRST], arguments[FIRST:END], of_mask, of_sinks, last.get("grad_lse")
