"""Traced functions, kept as long as what they name stays the same, and the blocks that they see."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..interop.device_tensors import loses_grad
from .gradient import derivative
from .graph import INDICES, Graph, Node, Untraceable, reachable
from .identity import identity
from .intervals import Axis, Interval, Intervals, within
from .program import Program, readable
from .soft_cap import soft_cap
from .tracing import Capture, is_tensor, record

KEPT = 256  # traced functions, at most
KEPT_BYTES = 128 << 20  # of the arrays that these have captured, but for the newest function's
EMPTY = 0
PARTIAL = 1
FULL = 2


class Prepared:
    """A score function, a mask function, or both, as one graph.

    Attributes
    ----------
    score : Node or None
        The changed score, a float; None without a score function.
    mask : Node or None
        Whether a key is seen, a boolean; None without a mask function.
    """

    def __init__(self, score_mod: Callable | None, mask_mod: Callable | None) -> None:
        self.graph = Graph()
        capture = Capture(self.graph)
        self.score: Node | None = None
        self.mask: Node | None = None
        if score_mod is not None:
            arguments = [self.graph.score, *self.graph.indices]
            found = record("score_mod", self.graph, score_mod, arguments, capture)
            if found.kind == "b":
                raise ArgumentTypeError(
                    "score_mod: got a function that returns a condition; allowed: a changed score. "
                    "Conditions go to create_block_mask"
                )
            self.score = self.graph.cast(found, "f")
        if mask_mod is not None:
            found = record("mask_mod", self.graph, mask_mod, self.graph.indices, capture)
            if found.kind == "f":
                raise ArgumentTypeError(
                    "mask_mod: got a function that returns a float; allowed: a boolean"
                )
            if found.kind == "i" and found.op != "const":
                raise ArgumentTypeError(
                    "mask_mod: got a function that returns an integer; allowed: a boolean, as `!= 0` makes it"
                )
            self.mask = self.graph.cast(found, "b")
        made = any(id(owner) not in capture.arrays for owner in self.graph.owners)
        copied = any(readable(array) is not array for array in self.graph.arrays)
        if made or copied:  # an array that the function makes, or a copy of what may change
            capture.steady = False
        self.capture = capture
        self._slope: Node | None = None
        self.plans: dict[Any, Any] = {}
        self.assumed: dict[int, Interval] = {}  # of arrays, by their numbers: `Program.assumed`

    def program(
        self, score: Node | None, slope: Node | None, mask: Node | None, shape: Any
    ) -> Program:
        """Some of the values as a program; `current` sees to it that its assumptions hold."""
        made = Program(self.graph, score, slope, mask, shape)
        for n, x in (made.assumed or {}).items():
            y = self.assumed.get(n, x)
            self.assumed[n] = Interval(max(x.low, y.low), min(x.high, y.high), x.nan and y.nan)
        return made

    def current(self) -> bool:
        """Whether names have the values that were traced, and arrays still fit the code."""
        return self.capture.current() and self.fits()

    def fits(self) -> bool:
        """Whether the arrays hold what the code assumes of them."""
        if not self.assumed:
            return True
        arrays, assumed = self.graph.arrays, tuple(self.assumed.items())  # a thread may add some
        return all(within(arrays[n], x) for n, x in assumed)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the captured arrays."""
        return sum(x.nbytes for x in self.graph.arrays)

    @functools.cached_property
    def tensors(self) -> list[Any]:
        """The captured tensors of PyTorch."""
        return [x for x in self.graph.owners if is_tensor(x)]

    @functools.cached_property
    def _of_scores(self) -> list[Any]:
        """The captured tensors that a score depends on."""
        roots = [] if self.score is None else [self.score]
        owners = (self.graph.owners[x.data] for x in reachable(roots) if x.op == "load")
        return [x for x in owners if is_tensor(x)]

    def refuse_grad(self) -> None:
        """Raise where the gradient of a tensor that `score_mod` captures would be lost; a mask has none."""
        if self._of_scores and loses_grad(*self._of_scores):
            raise ArgumentError(
                "score_mod: captures a tensor that requires grad, which would be lost; allowed: detach() it, "
                "call under no_grad(), or numflash.torch.flex_attention, which has gradients"
            )

    @property
    def slope(self) -> Node:
        """d score_mod / d score, 0 where the mask hides."""
        if self._slope is None:
            score = self.graph.score if self.score is None else self.score
            try:
                found = derivative(self.graph, score)
            except Untraceable as error:
                raise ArgumentTypeError(
                    f"score_mod: {error}; allowed: differentiable operations"
                ) from None
            self._slope = found
        return self._slope

    @functools.cached_property
    def cap(self) -> float:
        """The cap where all that they do is a soft cap, else 0."""
        return soft_cap(self.score) if self.score is not None and self.mask is None else 0.0

    def roots(self) -> list[Node]:
        return [x for x in (self.score, self.mask) if x is not None]

    @functools.cached_property
    def shortest(self) -> dict[str, tuple[int, tuple[int, ...], int]]:
        """By the name of an index: the shortest captured axis that it indexes directly.

        Its size, the array's shape and the number of the axis.
        """
        found: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for x in reachable(self.roots()):
            if x.op != "load":
                continue
            sizes = self.graph.arrays[x.data].shape
            for axis, y in enumerate(x.args):
                if y.op in INDICES and (y.op not in found or sizes[axis] < found[y.op][0]):
                    found[y.op] = sizes[axis], sizes, axis
        return found

    def check(self, shape: tuple[int, int, int, int]) -> None:
        """Raise unless arrays that are indexed by b, h, q or k directly are long enough for (B, H,
        L, S).

        Raises
        ------
        ArgumentError
            Naming the array's shape and the index that leaves it.
        """
        names = (("score_mod", self.score), ("mask_mod", self.mask))
        given = " or ".join(name for name, x in names if x is not None)
        for name, (size, sizes, axis) in self.shortest.items():
            needed = shape[INDICES.index(name)]
            if size < needed:
                raise ArgumentError(
                    f"{given}: a captured array of shape {sizes} is indexed by {name} in axis {axis}; "
                    f"allowed: at least {needed} elements there"
                )

    def block_states(self, shape: tuple[int, int, int, int], block: tuple[int, int]) -> np.ndarray:
        """(B or 1, H or 1, blocks of L, blocks of S) uint8.

        EMPTY, PARTIAL or FULL, from interval arithmetic.

        EMPTY and FULL are certain. B and H are 1 where the mask does not depend on them.
        """
        assert self.mask is not None
        nb, nh, length, s = shape
        nb, nh = (n if name in self.mask.uses else 1 for n, name in ((nb, "b"), (nh, "h")))
        ranges = {}
        axes = {}
        for axis, (name, size, step) in enumerate(
            zip(INDICES, (nb, nh, length, s), (1, 1, *block), strict=True)
        ):
            starts = np.arange(0, size, step)
            along = [1] * 4
            along[axis] = len(starts)
            low = starts.astype(np.float64).reshape(along)
            high = low if step == 1 else np.minimum(low + step, size) - 1
            ranges[name] = Interval(low, high)
            axes[name] = Axis(starts, size, axis)
        found = Intervals(self.graph, ranges, axes=axes).of(self.mask)
        counts = nb, nh, -(-length // block[0]), -(-s // block[1])
        states = np.where(
            np.asarray(found.low) >= 1, FULL, np.where(np.asarray(found.high) <= 0, EMPTY, PARTIAL)
        )
        return np.broadcast_to(states, counts).astype(np.uint8)


_lock = threading.RLock()  # a signal handler may call as well
_known: OrderedDict[Any, tuple[Prepared, list[Any]]] = OrderedDict()  # the oldest first


def prepare(score_mod: Callable | None, mask_mod: Callable | None) -> Prepared:
    """The traced functions; functions that are the same (`identity`) are traced once.

    They are traced again where a name that they use has another value.
    """
    held: list[Any] = []
    key = identity(score_mod, held), identity(mask_mod, held)
    known = _known.get(key)
    if known is not None and known[0].current():
        return known[0]
    made = Prepared(score_mod, mask_mod)
    if not made.capture.steady:
        return made
    with _lock:
        _known[key] = made, held
        _known.move_to_end(key)
        room = KEPT_BYTES - sum(known.nbytes for known, _ in _known.values())
        while len(_known) > KEPT or (room < 0 and len(_known) > 1):
            _, (oldest, _) = _known.popitem(last=False)
            room += oldest.nbytes
    return made
