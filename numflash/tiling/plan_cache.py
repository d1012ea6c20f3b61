"""What the first of equal calls leaves for the next: plans by key, not too many of them."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from .override import CHOSEN

MOST = 256  # plans kept; the oldest goes first
T = TypeVar("T")
_caches: WeakSet[PlanCache[Any]] = WeakSet()


def forget_plans() -> None:
    """Drop all plans: they hold the kernels of tilings that are no longer in use."""
    for cache in list(_caches):
        cache.plans.clear()


class PlanCache(Generic[T]):
    """At most `MOST` plans by key.

    Under `tiling.using` nothing is found and nothing kept: a plan holds the kernel of one tiling.
    """

    def __init__(self) -> None:
        self.plans: dict[Any, T] = {}
        self._lock = threading.RLock()  # a signal handler may call as well
        _caches.add(self)

    def get(self, key: Any) -> T | None:
        """The plan of a key."""
        return None if CHOSEN.get() else self.plans.get(key)

    def keep(self, key: Any, plan: T) -> None:
        """Keep a plan, instead of the oldest one where there are too many.

        None of a call whose options cannot be hashed: a list for the window, an array of one
        number.
        """
        if CHOSEN.get():
            return
        try:
            hash(key)
        except TypeError:
            return
        with self._lock:
            while len(self.plans) >= MOST:
                self.plans.pop(next(iter(self.plans), None), None)
            self.plans[key] = plan
