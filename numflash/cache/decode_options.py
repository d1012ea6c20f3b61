"""What decode does to scores besides scaling them.

Soft cap, ALiBi, the mask of the new tokens, sinks.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..interop.arguments import factor
from ..validation.option_arrays import per_head
from .arguments import plain_array
from .settings import INTEGERS

if TYPE_CHECKING:
    from ..flex.fused import InCache
    from .memory import Memory

F = np.float32


class Changes(NamedTuple):
    """Changes of scores inside the kernel.

    softcap : 0 for none, natural units
    slopes : (H,) float32 or None
    mask : (B, L, L) bool or None: whether new token i attends to new token j
    functions : score and mask functions, called before the other changes, or None
    """

    softcap: float = 0.0
    slopes: np.ndarray | None = None
    mask: np.ndarray | None = None
    functions: InCache | None = None

    @property
    def any(self) -> bool:
        """Whether the kernel has anything to change."""
        arrays = self.slopes is not None or self.mask is not None
        return self.functions is not None or self.softcap != 0 or arrays

    @property
    def cap_or_functions(self) -> bool:
        """Whether the kernel needs scores of keys before smoothing, and so adds what it took."""
        return bool(self.softcap) or self.functions is not None


NOTHING = Changes()
NO_SOFTCAP = 0.0  # the default, which `decode` compares by identity: the fastest test for it


def check_changes(softcap: Any, alibi_slopes: Any, mask: Any, shape: tuple[int, ...]) -> Changes:
    """The options of a decode call for a query of this shape, (B, H, L, D).

    Raises
    ------
    ArgumentError, ArgumentTypeError
    """
    softcap = factor("softcap", softcap, 0.0)
    if not softcap and alibi_slopes is None and mask is None:
        return NOTHING
    slopes = None if alibi_slopes is None else slopes_of(alibi_slopes, shape[1])
    return Changes(softcap, slopes, None if mask is None else _mask(mask, shape[0], shape[2]))


def with_functions(
    changes: Changes, score_mod: Any, mask_mod: Any, memory: Memory, shape: tuple[int, ...]
) -> Changes:
    """The changes with functions, for a query (B, H, L, D) over the sequences of a cache.

    A cache of integers has its own option in place of a function of the same meaning.

    Raises
    ------
    ArgumentTypeError
        A function that cannot be traced.
    ArgumentError
        A captured array that is too short for an index.
    """
    prepared = _flex("prepared").prepare(score_mod, mask_mod)
    prepared.refuse_grad()
    if memory.settings.dtype in INTEGERS and prepared.cap and not changes.softcap:
        return Changes(prepared.cap, changes.slopes, changes.mask)
    longest = memory.longest
    if prepared.shortest:
        prepared.check((*shape[:2], longest, longest))
    found = _flex("fused").in_cache(prepared, longest)
    return Changes(changes.softcap, changes.slopes, changes.mask, found)


@functools.cache
def _flex(name: str) -> Any:
    """A file of `flex`, loaded by the first call with functions: most caches see none."""
    return importlib.import_module(f"..flex.{name}", __package__)


class Asked(NamedTuple):
    """What a call of `decode` or `step` asks for, unchecked."""

    scale: Any = None
    splits: Any = None
    out: Any = None
    return_lse: Any = False
    softcap: Any = NO_SOFTCAP
    alibi_slopes: Any = None
    sinks: Any = None
    mask: Any = None
    score_mod: Any = None
    mask_mod: Any = None

    @property
    def calls_functions(self) -> bool:
        """Whether there is a score or a mask function."""
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def changes(self) -> bool:
        """Whether scores are changed, or a soft cap is no plain number."""
        cap = type(self.softcap) not in (float, int) or self.softcap != 0
        options = self.alibi_slopes is not None or self.mask is not None
        return cap or options or self.calls_functions

    def changes_of(self, memory: Memory, shape: tuple[int, ...]) -> Changes:
        """The changes of scores, checked, for a query of a shape."""
        changes = NOTHING
        if self.softcap is not NO_SOFTCAP or self.alibi_slopes is not None or self.mask is not None:
            changes = check_changes(self.softcap, self.alibi_slopes, self.mask, shape)
        if self.calls_functions:
            changes = with_functions(changes, self.score_mod, self.mask_mod, memory, shape)
        return changes


def slopes_of(x: Any, heads: int) -> np.ndarray:
    """ALiBi's slopes, (H,) float32: the same array for the same numbers, which `DecodePlan.change` then
    knows. A model passes them with every token.
    """
    if type(x) is np.ndarray and x.dtype == F and x.shape == (heads,):
        return _checked_slopes(x.tobytes())
    return of_heads("alibi_slopes", x, heads)


@functools.lru_cache(maxsize=64)
def _checked_slopes(numbers: bytes) -> np.ndarray:
    array = np.frombuffer(numbers, F)
    of_heads("alibi_slopes", array, array.size)
    return array


def of_heads(name: str, x: Any, heads: int) -> np.ndarray:
    """(H,) float32, one number for each query head."""
    return per_head(name, x, ((heads,),), "(H,)")


def _mask(mask: Any, batch: int, new: int) -> np.ndarray:
    array = plain_array("mask", mask)
    if array.dtype != bool:
        raise ArgumentTypeError(
            f"mask: got dtype {array.dtype}; allowed: bool, True where a new token attends"
        )
    if array.shape not in ((new, new), (batch, new, new)):
        raise ArgumentError(
            f"mask: got shape {array.shape}; allowed: ({new}, {new}) or ({batch}, {new}, {new})"
        )
    return np.array(np.broadcast_to(array, (batch, new, new)), order="C")
