"""Adding tokens to a KV cache: what is checked, what is made room for, what is taken from the keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArgumentError, CacheFullError
from ..interop.eager import eager
from .arguments import floats, in_range, is_float32, token_counts
from .calls import MOST_CALLS
from .memory import Memory
from .sequences import Sequences
from .settings import INTEGERS, Settings
from .smoothing import offset_of


class Appending(Sequences):
    """A cache that takes tokens."""

    def __init__(self, settings: Settings, memory: Memory) -> None:
        super().__init__(settings, memory)
        self._plain = not settings.paged and not settings.smooth
        unpadded = settings.dtype == "float32" and not settings.value_in_key
        # float32 tokens need no conversion, but for those padded to whole vectors
        self._taken_as_is = settings.dtype in INTEGERS or unpadded

    @eager
    def append(self, key: Any, value: Any = None, *, counts: Any = None) -> None:
        """Add tokens to the end of every sequence, in O(tokens).

        Parameters
        ----------
        key : (B, Hkv, n, D) array of floats
        value : (B, Hkv, n, Dv); None with `value_in_key`
        counts : (B,) integers or None
            How many of the n tokens belong to each sequence (the first ones), 0 to n; all unless
            given.

        Raises
        ------
        CacheFullError
            A sequence would exceed `max_length`, or the pool of pages is used up.
        ArgumentError, ArgumentTypeError
            Also for a finite number that the storage would make infinite: 65520 or more in a
            float16 cache. Infinity and NaN are stored as such: rows that attend to such a token are
            NaN. Nothing is appended by a call that raises.
        """
        memory = self._memory or self._open()
        key, value, take, _ = self._admitted(memory, key, value, counts)
        memory.append(key, value, take, memory.store)

    def _admitted(
        self, memory: Memory, key: Any, value: Any, counts: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Key and value as the kernels take them, the tokens of each sequence, and the most of
        them.

        There is room for them.
        """
        shared = self.value_in_key
        if shared and value is not None:
            raise ArgumentError(
                f"value: got {type(value).__name__} with value_in_key; allowed: None, the value is in the key"
            )
        ready = is_float32(key) and (shared or is_float32(value))
        if not ready:
            key = floats("key", key).array
            value = value if shared else floats("value", value).array
        value = key if shared else value
        known = memory.calls.shapes.get((key.shape, value.shape))
        n, take = known or self._shapes(memory, key.shape, value.shape)
        if not (ready and self._taken_as_is):
            for name, x in (("key", key), ("value", value)):
                in_range(name, x, self.dtype)
            key = memory.layout.tokens(key)
            value = key if shared else memory.layout.tokens(value)
        if counts is not None:
            take = token_counts(counts, memory.batch, n)
        if self.window is None and memory.longest + n > memory.settings.max_length:
            self._check_room(memory, take)
        if not self._plain:
            self._prepare(memory, key, take)
        return key, value, take, n

    def _shapes(
        self, memory: Memory, key: tuple[int, ...], value: tuple[int, ...]
    ) -> tuple[int, np.ndarray]:
        """How many tokens arrays of these shapes hold, and the same for each sequence."""
        b = memory.batch
        heads = self.kv_heads
        dims = self.head_dim, self.head_dim if self.value_in_key else self.value_dim
        for name, shape, d in (("key", key, dims[0]), ("value", value, dims[1])):
            if len(shape) != 4 or shape[0] != b or shape[1] != heads or shape[3] != d:
                raise ArgumentError(
                    f"{name}: got shape {shape}; allowed: ({b}, {heads}, tokens, {d})"
                )
        if key[2] != value[2]:
            raise ArgumentError(f"value: got {value[2]} tokens; allowed: the key's, {key[2]}")
        shapes, found = memory.calls.shapes, (key[2], np.full(b, key[2], np.int64))
        if len(shapes) >= MOST_CALLS:  # prompts of many lengths
            shapes.clear()
        shapes[key, value] = found
        return found

    def _check_room(self, memory: Memory, take: np.ndarray) -> None:
        held = memory.store.lengths
        most = memory.settings.max_length
        over = held + take > most
        if over.any():
            b = int(np.argmax(np.where(over, held + take, 0)))
            raise CacheFullError(
                f"append: sequence {b} holds {held[b]} tokens and would get {take[b]} more; allowed: {most} "
                "in all, or more after reserve()"
            )

    def _prepare(self, memory: Memory, key: np.ndarray, take: np.ndarray) -> None:
        """Pages, and what `smooth` takes from the keys, for the tokens to come."""
        if memory.settings.paged:
            memory.grow(take)
        lengths = memory.store.lengths
        if self.smooth and np.count_nonzero(lengths) < lengths.size:
            for b in np.flatnonzero((lengths == 0) & (take > 0)):
                memory.offset[b] = offset_of(key[b, :, : take[b]], memory.settings)
