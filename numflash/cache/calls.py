"""Decode calls prepared for one cache.

Which plan serves a query, and the rows that a plan gives back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..interop.arguments import factor
from ..numerics import fixedpoint as fx
from .arguments import integer
from .exact import LOG2E
from .protocols import Backend, Layout, Plan
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


class LastCall(NamedTuple):
    """The last prepared call without `scale` and `splits`.

    shape : of the query;  changed : whether options change its scores
    most : tokens of the longest sequence up to which it is the same; -1 if it depends on them
    made : what `Calls.plan` returns
    """

    shape: tuple[int, ...] = ()
    changed: bool = False
    most: int = -1
    made: Any = None


class Calls:
    """Plans for one layout and batch, made when first needed.

    Attributes
    ----------
    shapes : shapes of key and value that `append` has accepted: their tokens
    steps : captured steps on a card, by plan and factor
    equal : what equal calls of `KVCache.step` have in common, by the shapes of query, key and value
    results : shape of the result of a plain `KVCache.decode`, by the query's; of calls that succeeded
    """

    def __init__(self, backend: Backend, layout: Layout, settings: Settings, batch: int) -> None:
        self.backend, self.layout, self.settings, self.batch = backend, layout, settings, batch
        self.shapes: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, np.ndarray]] = {}
        self.steps: dict[tuple[Plan, float], Any] = {}
        self.equal: dict[tuple[Any, ...], EqualSteps] = {}
        self.results: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._last = LastCall()
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._calls: dict[tuple[Any, ...], tuple[Plan, np.float32]] = {}

    def plan(
        self,
        shape: tuple[int, ...],
        scale: Any,
        splits: Any,
        longest: int,
        changed: bool = False,
    ) -> tuple[Plan, np.float32]:
        """The prepared call for a query of this shape, and the factor of its scores.

        Raises
        ------
        ArgumentError, ArgumentTypeError
        """
        alone, last = scale is None and splits is None, self._last
        if alone and longest <= last.most and shape == last.shape and changed is last.changed:
            return last.made
        workers, blocks = self.layout.call(longest, self.batch)
        made = self._find(
            (shape, scale, splits, workers, blocks, changed), type(scale), type(splits)
        )
        if alone:
            most = self.layout.serial_tokens(self.batch)
            self._last = LastCall(shape, changed, most if longest <= most else -1, made)
        return made

    def _find(self, call: tuple[Any, ...], *kinds: type) -> tuple[Plan, np.float32]:
        """The prepared call of these arguments; `kinds`: True equals 1, but is refused."""
        key = call, kinds
        try:
            return self._calls[key]
        except TypeError:  # an array of one number, or what is refused now
            return self._make(*call)
        except KeyError:
            made = self._make(*call)
        if len(self._calls) > MOST_CALLS:
            self.forget()
        self._calls[key] = made
        return made

    def forget(self) -> None:
        """Drop the prepared calls and their buffers."""
        for prepared in (self._plans, self._calls, self.steps, self.equal, self.results):
            prepared.clear()
        self._last = LastCall()

    def _make(
        self,
        shape: tuple[int, ...],
        scale: Any,
        splits: Any,
        workers: int,
        blocks: int,
        changed: bool,
    ) -> tuple[Plan, np.float32]:
        self._check(shape)
        c = self.factor(scale)
        group = shape[1] // self.settings.kv_heads
        if splits is None:
            splits = self.layout.splits(self.batch, group * shape[2], workers, blocks)
        else:
            splits = integer("splits", splits, 1, 1 << 16)
        plan = self._plans.get((shape, splits, workers, changed))
        if plan is None:
            sizes = self.batch, group, shape[2], splits, workers
            plan = self.backend.Plan(self.layout, *sizes, changed)
            self._plans[shape, splits, workers, changed] = plan
        return plan, F(c * LOG2E * (fx.ONE_Q8 if self.settings.dtype in INTEGERS else 1))

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
