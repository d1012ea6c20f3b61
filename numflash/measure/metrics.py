"""How far an output is from the exact one.

Always the same five figures, because each hides what another shows.

Cosine similarity is near 1 for every usable kernel; the largest absolute error and the worst row
show errors that the averages hide.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .. import validation
from ..dispatch.backends import solve
from ..errors import ArgumentError, ArgumentTypeError
from ..interop.arguments import choice, refuse_unknown
from ..interop.arrays import import_array, widen
from ..validation.operands import OWN_PRECISION
from ..validation.options import COMMON, IMPLS, Options

# name of a row of the table -> the options of `attention`
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "int8": {"precision": "int8", "pv": "int8"},
    "int8, pv int16": {"precision": "int8", "pv": "int16"},
    "int8, pv bf16": {"precision": "int8", "pv": "bf16"},
    "int8, pv fp32": {"precision": "int8", "pv": "fp32"},
}
NOT_ON_A_CARD = ("int8, pv bf16",)


@dataclass(frozen=True)
class Errors:
    """Distance of `out` from `exact`.

    Attributes
    ----------
    cosine : cosine similarity of the two as flat vectors
    relative_l1 : sum |out - exact| / sum |exact|
    rmse : root of the mean squared difference
    max_abs : largest |out - exact|
    worst_row : largest relative L1 error of a single row
    """

    cosine: float
    relative_l1: float
    rmse: float
    max_abs: float
    worst_row: float

    def as_dict(self) -> dict[str, float]:
        """The same as a dictionary, for --json."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"cosine {self.cosine:.6f}  relative L1 {self.relative_l1:.2e}  RMSE {self.rmse:.3g}  "
            f"max {self.max_abs:.3g}  worst row {self.worst_row:.4f}"
        )


class Accuracy(dict[str, Errors]):
    """Errors by variant; printed as a table."""

    def __repr__(self) -> str:
        return "\n".join(f"{name:14} {found}" for name, found in self.items())


def errors(out: Any, exact: Any) -> Errors:
    """The five figures of `out` (..., Dv) against `exact` of the same shape, both as float64.

    Rows that are zero in both count as exact.

    Raises
    ------
    ArgumentError, ArgumentTypeError
    """
    a, b = (
        widen(import_array(name, x).array).astype(np.float64)
        for name, x in (("out", out), ("exact", exact))
    )
    if not a.ndim or a.shape != b.shape:
        raise ArgumentError(
            f"exact: got shape {b.shape}; allowed: that of out, {a.shape}, with one dimension or more"
        )
    if not a.size:
        return Errors(1.0, 0.0, 0.0, 0.0, 0.0)
    a, b = (x.reshape(-1, x.shape[-1]) for x in (a, b))
    gap = np.abs(a - b)
    row_gap = gap.sum(1)
    row_size = np.abs(b).sum(1)
    total = row_size.sum()
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    with np.errstate(divide="ignore", invalid="ignore"):
        worst = np.where(row_gap == 0, 0, row_gap / row_size).max()
        return Errors(
            cosine=float((a * b).sum() / norms) if norms else float(not gap.any()),
            relative_l1=float(row_gap.sum() / total)
            if total
            else float(np.inf if gap.any() else 0),
            rmse=float(np.sqrt((gap**2).mean())),
            max_abs=float(gap.max()),
            worst_row=float(worst),
        )


def accuracy(
    query: Any, key: Any, value: Any, *, impl: str = "auto", variants: Any = None, **options: Any
) -> Accuracy:
    """The error of every precision on the caller's own tensors, against float64.

    Parameters
    ----------
    query, key, value : as `attention` takes them
    impl : str
        As `attention` takes it.
    variants : names of `numflash.measure.metrics.VARIANTS`
        All that `impl` has unless given: "float32", "bfloat16", "float16", "int8",
        "int8, pv int16", "int8, pv bf16" (not on a card), "int8, pv fp32".
    options
        Everything else that `attention` takes, but precision, pv, return_lse.

    Returns
    -------
    Accuracy
        A dict of `Errors` by variant, which prints as a table.

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError
    """
    from ..reference import oracle

    choice("impl", impl, IMPLS)
    refuse_unknown("accuracy", options, (*COMMON, "dropout_p", "layout", "impl", "variants"))
    asked = Options(**options)
    if not (variants is None or isinstance(variants, (list, tuple))):
        raise ArgumentTypeError(
            f"variants: got {variants!r}; allowed: a list of {', '.join(map(repr, VARIANTS))}"
        )
    names = (
        tuple(v for v in VARIANTS if v not in NOT_ON_A_CARD or not impl.startswith("cuda"))
        if variants is None
        else tuple(choice("variants", v, tuple(VARIANTS)) for v in variants)
    )
    operands = validation.import_operands(query, key, value)
    for name, x in zip(("query", "key", "value"), operands, strict=True):
        if x.dtype not in OWN_PRECISION:  # bits of bfloat16 would need a precision
            raise ArgumentTypeError(
                f"{name}: got dtype {x.dtype}; allowed: {', '.join(OWN_PRECISION)}"
            )
    exact = oracle(validation.problem_of(operands, asked, convert_operands=False))[0]
    found = Accuracy()
    for name in names:
        problem = validation.problem_of(operands, replace(asked, **VARIANTS[name]))
        found[name] = errors(solve(problem, impl)[0], exact)
    return found
