"""Decode calls prepared for one cache.

Which plan serves a query, and the rows that a plan gives back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..interop.arguments import factor
from ..numerics import fixedpoint as fx
from .arguments import integer
from .exact import LOG2E
from .protocols import Backend, DecodePlan, Layout
from .settings import INTEGERS, Settings

F = np.float32
MOST_CALLS = 64  # prepared calls kept; a generation with varied shapes does not collect buffers


class EqualSteps(NamedTuple):
    """Steps of float32 arrays of the same shapes, of which one has succeeded.

    tokens : new ones of each sequence, and the same as an array (B,)
    shape : of the result (B, H, n, Dv)
    """

    tokens: int
    take: np.ndarray
    shape: tuple[int, ...]


class Prepared(NamedTuple):
    """Decode calls of one kind.

    A plan has the scratch memory of one call, so each of the calls that run at the same time, in
    several threads or in a signal handler, takes a plan of its own.

    c : factor of the scores
    free : plans that no call has now; `pop` and `append` of a list are atomic
    make : another plan
    """

    c: np.float32
    free: list[DecodePlan]
    make: Callable[[], DecodePlan]


class LastCall(NamedTuple):
    """The last prepared call without `scale` and `splits`.

    shape : of the query;  changed : whether options change its scores
    most : tokens of the longest sequence up to which it is the same; -1 if it depends on them
    made : what `Calls.take` takes from
    wanted : shape of the result of a plain call, once one has succeeded; () before
    """

    shape: tuple[int, ...] = ()
    changed: bool = False
    most: int = -1
    made: Any = None
    wanted: tuple[int, ...] = ()


class Calls:
    """Plans for one layout and batch, made when first needed.

    Attributes
    ----------
    shapes : shapes of key and value that `append` has accepted: their tokens
    steps : captured steps on a card, by plan and factor
    equal : what equal calls of `KVCache.step` have in common, by the shapes of query, key and value
    results : shape of the result of a plain `KVCache.decode`, by the query's; of calls that succeeded
    last : the last call that `take` prepared
    """

    def __init__(self, backend: Backend, layout: Layout, settings: Settings, batch: int) -> None:
        self.backend, self.layout, self.settings, self.batch = backend, layout, settings, batch
        self.shapes: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, np.ndarray]] = {}
        self.steps: dict[tuple[DecodePlan, float], Any] = {}
        self.equal: dict[tuple[Any, ...], EqualSteps] = {}
        self.results: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.last = LastCall()
        self._plans: dict[tuple[Any, ...], tuple[list[DecodePlan], Callable[[], DecodePlan]]] = {}
        self._calls: dict[tuple[Any, ...], Prepared] = {}

    def take(
        self,
        shape: tuple[int, ...],
        scale: Any,
        splits: Any,
        longest: int,
        changed: bool = False,
    ) -> tuple[DecodePlan, np.float32, list[DecodePlan]]:
        """The prepared call for a query of this shape, the factor of its scores, and where the caller
        gives the plan back after it has read its results.

        Raises
        ------
        ArgumentError, ArgumentTypeError
        """
        alone, last = scale is None and splits is None, self.last
        if alone and longest <= last.most and shape == last.shape and changed is last.changed:
            c, free, make = last.made
        else:
            workers, blocks = self.layout.call(longest, self.batch)
            call = shape, scale, splits, workers, blocks, changed
            made = c, free, make = self._find(call, type(scale), type(splits))
            if alone:
                most = self.layout.serial_tokens(self.batch)
                wanted = () if changed else self.results.get(shape, ())
                self.last = LastCall(shape, changed, most if longest <= most else -1, made, wanted)
        try:
            return free.pop(), c, free
        except IndexError:
            return make(), c, free

    def succeeded(self, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        """A plain call on a query of this shape has given a result of shape `wanted`."""
        self.results[shape] = wanted
        last = self.last  # another thread may set it between two looks
        if last.shape == shape and not last.changed:
            self.last = last._replace(wanted=wanted)

    def _find(self, call: tuple[Any, ...], *kinds: type) -> Prepared:
        """The prepared calls of these arguments.

        kinds : the types of scale and splits, part of the key: True == 1, and is still to be refused
        """
        key, kept = (call, kinds), True
        try:
            return self._calls[key]
        except TypeError:  # an array of one number, or what is refused now
            kept = False
        except KeyError:
            pass
        made = self._make(*call)
        if max(len(self._calls), len(self._plans)) > MOST_CALLS:
            self.forget()
        if kept:
            self._calls[key] = made
        return made

    def forget(self) -> None:
        """Drop the prepared calls and their buffers."""
        kept = self._plans, self._calls, self.steps, self.equal, self.results, self.shapes
        for prepared in kept:
            prepared.clear()
        self.last = LastCall()

    def _make(
        self,
        shape: tuple[int, ...],
        scale: Any,
        splits: Any,
        workers: int,
        blocks: int,
        changed: bool,
    ) -> Prepared:
        self._check(shape)
        c = self.factor(scale)
        group = shape[1] // self.settings.kv_heads
        if splits is None:
            splits = self.layout.splits(self.batch, group * shape[2], workers, blocks)
        else:
            splits = integer("splits", splits, 1, 1 << 16)
        plans = self._plans.get((shape, splits, workers, changed))
        if plans is None:
            sizes = self.batch, group, shape[2], splits, workers
            make = functools.partial(self.backend.DecodePlan, self.layout, *sizes, changed)
            plans = self._plans[shape, splits, workers, changed] = [], make
        c = F(c * LOG2E * (fx.ONE_Q8 if self.settings.dtype in INTEGERS else 1))
        return Prepared(c, *plans)

    def _check(self, shape: tuple[int, ...]) -> None:
        kv_heads = self.settings.kv_heads
        head_dim = self.settings.head_dim
        window = self.settings.window
        good = len(shape) == 4 and shape[0] == self.batch and shape[3] == head_dim
        if not good or shape[1] < 1 or shape[1] % kv_heads or shape[2] < 1:
            raise ArgumentError(
                f"query: got shape {shape}; allowed: ({self.batch}, heads, tokens, {head_dim}) with heads a "
                f"multiple of {kv_heads} and one token or more"
            )
        if window is not None and shape[2] > self.layout.ring - window + 1:
            most = self.layout.ring - window + 1
            raise ArgumentError(f"query: got {shape[2]} tokens; allowed: {most} with this window")

    def factor(self, scale: Any) -> float:
        """The factor of Q.K^T."""
        return self.settings.head_dim**-0.5 if scale is None else factor("scale", scale)
