"""The options of one attention call.

One frozen `Options`, built and checked once, then passed whole.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ..errors import ArgumentError
from ..interop.arguments import Window, choice, factor, flag, mask_array, real, sides

PRECISIONS = ("float32", "bfloat16", "float16", "int8")
PV = ("int8", "int16", "bf16", "fp32")
LAYOUTS = ("bhld", "blhd")
ALIGNMENTS = ("upper_left", "lower_right")
IMPLS = ("auto", "reference", "portable", "cpu", "cuda", "cuda-emulator")


def check_weights(pv: str, precision: str | None) -> None:
    """Raise where `pv` is given to another precision than "int8"."""
    if precision != "int8":
        raise ArgumentError(
            f"pv: got {pv!r} with precision {precision!r}; allowed: None, or precision 'int8'"
        )


class OptionArrays(NamedTuple):
    """The options whose numbers are looked at in every call, as they came; None where not given."""

    attn_mask: Any = None
    key_lengths: Any = None
    alibi_slopes: Any = None
    sinks: Any = None

    def given(self) -> bool:
        """Whether there are any."""
        return not self.attn_mask is self.key_lengths is self.alibi_slopes is self.sinks is None


@dataclass(frozen=True, eq=False)
class Options:
    """The options of `numflash.attention`, in its order. Those that need no array are checked here.

    Those of `arrays` stay as they came: `validation.describe` checks them against the shapes.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, what came and what is allowed.
    """

    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    window: Window = (None, None)
    alignment: str = "upper_left"
    key_lengths: Any = None
    softcap: float = 0.0
    alibi_slopes: Any = None
    sinks: Any = None
    precision: str | None = None
    pv: str | None = None
    layout: str = "bhld"
    return_lse: bool = False

    def __post_init__(self) -> None:
        mask_array("attn_mask", self.attn_mask)
        choice("layout", self.layout, LAYOUTS)
        if self.precision is not None:
            choice("precision", self.precision, PRECISIONS)
        if real("dropout_p", self.dropout_p) != 0:
            raise ArgumentError(f"dropout_p: got {self.dropout_p}; allowed: 0.0 only")
        checked = {
            "enable_gqa": flag("enable_gqa", self.enable_gqa),
            "softcap": factor("softcap", self.softcap, 0.0),
            "alignment": choice("alignment", self.alignment, ALIGNMENTS),
            "pv": None if self.pv is None else choice("pv", self.pv, PV),
            "window": sides("window", self.window),
            "is_causal": flag("is_causal", self.is_causal),
            "scale": None if self.scale is None else factor("scale", self.scale),
            "return_lse": flag("return_lse", self.return_lse),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def arrays(self) -> OptionArrays:
        """The options that are arrays."""
        return OptionArrays(self.attn_mask, self.key_lengths, self.alibi_slopes, self.sinks)

    def limits(self, reach: int) -> Window:
        """Window and causality as (left, right), at most `reach`.

        Beyond it every key is visible on that side.
        """
        left, right = (None if side is None else min(side, reach) for side in self.window)
        return left, 0 if self.is_causal else right


DEFAULT = Options()
NAMES = tuple(field.name for field in fields(Options))
# What every function on attention takes; the others depend on what it computes with and returns.
COMMON = tuple(
    name for name in NAMES if name not in ("dropout_p", "precision", "pv", "layout", "return_lse")
)
