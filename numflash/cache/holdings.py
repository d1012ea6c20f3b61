"""What a KV cache holds: its sizes, and reading it back."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, NumflashError, UnsupportedError
from ..interop.arguments import emulated_arch
from ..numerics.quantization import QuantizedTensor
from . import contents
from .arguments import integer, output
from .exact import positions
from .memory import Memory
from .settings import INTEGERS, MAX_LENGTH, Settings


class Holdings:
    """The state of a cache: its fixed settings, and the `Memory` that every change replaces."""

    def __init__(self, settings: Settings, memory: Memory) -> None:
        self.device, self.dtype = settings.device, settings.dtype
        self.kv_heads = settings.kv_heads
        self.head_dim, self.value_dim = settings.head_dim, settings.value_dim
        self.window, self.sinks, self.smooth = settings.window, settings.sinks, settings.smooth
        self.value_in_key, self.rotate = settings.value_in_key, settings.rotate
        self._memory: Memory | None = memory

    def __repr__(self) -> str:
        """Storage, sizes and tokens; of a closed cache, that."""
        sizes = f"kv_heads={self.kv_heads}, head_dim={self.head_dim}"
        kept = "" if self.window is None else f", window={self.window}, sinks={self.sinks}"
        memory = self._memory
        held = "closed" if memory is None else f"tokens={memory.store.lengths.tolist()}"
        return f"{type(self).__name__}({self.dtype!r}, {sizes}{kept}, {held})"

    @property
    def batch(self) -> int:
        """Sequences."""
        return self._open().batch

    @property
    def max_length(self) -> int:
        """Tokens a sequence can hold; a ring has no limit."""
        return self._open().settings.max_length

    @property
    def page_size(self) -> int:
        """Slots of a page; without pages, all slots of a sequence."""
        return self._open().settings.page_size

    @property
    def pages(self) -> int:
        """Pages of the pool; without pages, one for each sequence."""
        return self._open().pages

    @property
    def lengths(self) -> np.ndarray:
        """(B,) int64: tokens of each sequence; a copy."""
        return self._open().store.lengths.copy()

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, values and scales."""
        return int(self._open().store.nbytes)

    @property
    def free_pages(self) -> int:
        """Pages of the pool that no sequence uses; 0 without pages."""
        memory = self._open()
        return memory.free_pages() if memory.settings.paged else 0

    @property
    def emulator(self) -> Any:
        """With device "cuda-emulator" its counters, `cuda.device.resident.Emulated`.

        Raises
        ------
        UnsupportedError
            On another device, which counts nothing.
        """
        if emulated_arch(self.device) is None:
            raise UnsupportedError(
                f"emulator: got a cache on {self.device!r}, which has none; allowed: device 'cuda-emulator'"
            )
        return cast(Any, self._open().layout).card

    def _open(self) -> Memory:
        if self._memory is None:
            raise NumflashError("KVCache: the cache is closed; create a new one")
        return self._memory

    def _sequence(self, memory: Memory, name: str, b: Any) -> int:
        if not memory.batch:
            raise ArgumentError(f"{name}: got {b!r}; the cache holds no sequence")
        return integer(name, b, 0, memory.batch - 1)

    def quantized(self, sequence: int) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Keys and values of one sequence as dtype "int8" or "int4" stores them, (Hkv, slots, D)
        and (Hkv, slots, Dv).

        In slot order; rows of a cache that rotates are those after it, `numflash.numerics.rotation`. A token
        that was not finite has zeros and is marked `nonfinite`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            `sequence` is not 0 to B - 1, or the cache has another dtype.
        NumflashError
            A closed cache.
        """
        memory = self._open()
        b = self._sequence(memory, "sequence", sequence)
        if self.dtype not in INTEGERS:
            raise ArgumentError(
                f"quantized: dtype is {self.dtype!r}; allowed: only 'int8' and 'int4'"
            )
        return contents.quantized(memory, b)

    def read(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one sequence as float32, (Hkv, slots, D) and (Hkv, slots, Dv), in slot
        order.

        Slots are positions, except in a ring, whose tokens behind the sinks start over. Tokens that
        were not finite are NaN.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            `sequence` is not 0 to B - 1.
        NumflashError
            A closed cache.
        """
        memory = self._open()
        return contents.read(memory, self._sequence(memory, "sequence", sequence))

    def tail(
        self,
        sequence: int,
        window: int | None = None,
        *,
        out: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the tokens that the next one attends to, (Hkv, n, D) and (Hkv, n, Dv)
        float32, in token order: the sinks of a ring, then those of the window.

        Parameters
        ----------
        sequence : int
            0 to B - 1.
        window : int, optional
            The next token's, itself included; None for the cache's own, or for all tokens. A larger
            one than the cache's own counts as that.
        out : pair of arrays, optional
            Contiguous float32 arrays (Hkv, n or more, D) and (Hkv, n or more, Dv) that are written
            from their first token on.

        Returns
        -------
        tuple
            Keys and values: views of `out`, or new arrays.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            A wrong argument, named in the message.
        NumflashError
            A closed cache.
        """
        memory = self._open()
        b = self._sequence(memory, "sequence", sequence)
        if out is None:
            return self._tail(memory, b, window)
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise ArgumentTypeError(f"out: got {out!r}; allowed: a pair of arrays, or None")
        n = int(memory.store.lengths[b])
        for x, d in zip(out, (self.head_dim, self.value_dim), strict=True):
            tokens = x.shape[1] if isinstance(x, np.ndarray) and x.ndim == 3 else n
            output(x, (self.kv_heads, tokens, d))
        if np.may_share_memory(*out):  # exact: both are contiguous
            raise ArgumentError(
                "out: got two arrays of the same memory; allowed: memory of its own for each"
            )
        room = min(x.shape[1] for x in out)
        if window is None and self.window is None and n <= room:
            contents.read_into(memory, b, *out)
            return out[0][:, :n], out[1][:, :n]
        found = self._tail(memory, b, window)
        n = found[0].shape[1]
        if n > room:
            raise ArgumentError(f"out: got room for {room} tokens; allowed: {n} or more")
        for x, y in zip(out, found, strict=True):
            x[:, :n] = y
        return out[0][:, :n], out[1][:, :n]

    def _tail(self, memory: Memory, b: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
        key, value = contents.read(memory, b)
        length = int(memory.store.lengths[b])
        used = key.shape[1]
        if used < length:
            order = np.argsort(positions(length, used, memory.layout.sinks, memory.layout.ring))
            key = key[:, order]
            value = value[:, order]
        most = MAX_LENGTH if window is None else integer("window", window, 1, MAX_LENGTH)
        first = max(0, used - min(most, self.window or MAX_LENGTH) + 1)
        sinks = min(memory.layout.sinks, first)
        if sinks:
            key, value = (np.concatenate((x[:, :sinks], x[:, first:]), 1) for x in (key, value))
            return key, value
        return key[:, first:], value[:, first:]

    def state(self) -> dict[str, np.ndarray]:
        """All that the cache stores as arrays on the host, for `load_state` and `np.savez`.

        The same for every device, instruction set and page size.
        """
        return contents.state(self._open())

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Fill an empty cache with the `state` of one of the same sizes, dtype, rotation, window and
        sinks.

        Parameters
        ----------
        state : dict of str to np.ndarray
            What `state` returned, or `np.load` of what `np.savez` stored of it.

        Raises
        ------
        ArgumentError
            The cache is not empty, or the state does not fit or is damaged. The cache stays empty
            then.
        ArgumentTypeError
            The state is no mapping.
        CacheFullError
            It holds more tokens than this cache's `max_length`, or than its pool has pages for.
        """
        memory = self._open()
        if memory.longest:
            raise ArgumentError("load_state: the cache holds tokens; reset it first")
        self._memory = contents.restore(memory, state)

    def close(self) -> None:
        """Release the memory; every later use raises."""
        self._memory = None
