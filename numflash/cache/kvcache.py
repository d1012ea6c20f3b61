"""A KV cache for token-by-token generation: keys and values stay where the decode kernels read them.

Contiguous, in pages that sequences may share, or as a ring that never grows (sliding window with sinks); stored as float32,
bfloat16, float16 or INT8. Append and decode are one compiled call each. A cache belongs to one thread at a time; different caches
may be used from different threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from .. import fixedpoint as fx
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    CacheFullError,
    NumflashError,
    UnsupportedError,
)
from ..interop import convert, to_float32, widen
from ..quantization import QuantizedTensor
from ..tiling import KEY_BLOCK, MAX_HEAD_DIM
from ..validation import choice, factor, flag, real
from .arguments import floats, in_range, integer, output, token_counts
from .exact import LOG2E, attend, natural_lse, positions
from .pages import Pages

DEVICES = ("cpu", "cuda", "cuda-emulator")
DTYPES = ("int8", "float32", "bfloat16", "float16")
F = np.float32
FLOAT32 = np.dtype(np.float32)
SMOOTH_TOKENS = 16  # fewer first tokens say too little about the channel means


def _whole_blocks(slots: int) -> int:
    return -(-slots // KEY_BLOCK) * KEY_BLOCK


def _float32(x: Any) -> bool:
    """Whether kernels take x as it is: a contiguous float32 array."""
    return type(x) is np.ndarray and x.dtype is FLOAT32 and x.flags.carray


def _launch_decode(device: str) -> Any:
    """`cpu.launch_decode`, or its twin for cards."""
    try:
        return importlib.import_module(f".{device.partition('-')[0]}.launch_decode", "numflash")
    except (ImportError, UnsupportedError) as error:
        raise UnsupportedError(
            f"device: got {device!r}, which cannot be loaded here ({error})"
        ) from error


class KVCache:
    """Keys and values of `batch` sequences, and attention of new tokens over them.

    Parameters
    ----------
    batch, kv_heads, head_dim, max_length : int
        Sequences; heads of K and V; channels, 1 to 512; tokens a sequence can hold.
    dtype : "int8", "float32", "bfloat16" or "float16"
        Storage. INT8 has one scale per token and head for K and for V; products are exact integers, results have the bits of
        `reference.integer_decode`.
    page_size : int or None
        None: every sequence owns its memory. A power of two from 128 (on CUDA 16): pages from a common pool, taken as sequences
        grow, shared by `share`, returned by `reset`.
    device : "cpu", "cuda" or "cuda-emulator"
        Where keys and values stay. On a card: `cuda.launch_decode`; the emulator runs the same kernels without one, slowly.
    pages : int or None
        Size of the pool; enough for every sequence unless given.
    value_dim : int or None
        Channels of V if not those of K.
    window : int or None
        Each token sees the last `window` tokens, itself included, and the first `sinks`. The cache is then a ring that never
        grows and never fills (StreamingLLM, arXiv 2309.17453; positions are the caller's). `max_length` is not used.
    sinks : int
    smooth : bool
        INT8 only: the channel means of a sequence's first append (16 tokens or more) are taken from all its keys before
        rounding. Softmax does not see it. On for keys with a large bias per channel, as projections with a bias make them: 30
        spreads in one channel cost 0.057 relative L1, 0.015 with it. Off otherwise: on the activations of MiniLM-L6, whose channel
        means reach 3.8 spreads, it changes the error by no more than 3 % either way (`tests/cpu/test_decode_smooth.py`).
    isa : str or None
        An instruction set of `numflash info` instead of the best one.
    unified_max : float or None
        On CUDA with 16-bit floats: FlashDecoding++'s constant in place of the running maximum, in units of scale * Q.K^T. Rows that
        leave the range in which weights relative to it are accurate are done again with the maximum.

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        max_length: int,
        dtype: str = "int8",
        page_size: int | None = None,
        device: str = "cpu",
        *,
        pages: int | None = None,
        value_dim: int | None = None,
        window: int | None = None,
        sinks: int = 0,
        smooth: bool = False,
        isa: str | None = None,
        unified_max: float | None = None,
    ) -> None:
        choice("dtype", dtype, DTYPES)
        launch_decode = _launch_decode(choice("device", device, DEVICES))
        self.device = device
        self.batch = integer("batch", batch, 0, launch_decode.MAX_BATCH)
        self.kv_heads = integer("kv_heads", kv_heads, 1, 65535)
        self.head_dim = integer("head_dim", head_dim, 1, MAX_HEAD_DIM)
        self.value_dim = (
            self.head_dim if value_dim is None else integer("value_dim", value_dim, 1, MAX_HEAD_DIM)
        )
        self.max_length, self.dtype = integer("max_length", max_length, 1, 1 << 31), dtype
        self.smooth = flag("smooth", smooth)
        if self.smooth and dtype != "int8":
            raise ArgumentError(
                f"smooth: got True with dtype {dtype!r}; allowed: only with dtype 'int8'"
            )
        ring: dict[str, Any] = {}
        self.window, self.sinks = window, integer("sinks", sinks, 0, 1 << 20)
        if window is not None:
            if page_size is not None:
                raise ArgumentError("window: got a window and page_size; allowed: one of the two")
            slots = _whole_blocks(
                self.sinks + integer("window", window, 1, 1 << 29) + KEY_BLOCK // 2
            )
            ring = {"window": int(window), "sinks": self.sinks, "ring": slots - self.sinks}
        elif sinks:
            raise ArgumentError(f"sinks: got {sinks} without a window; allowed: 0")
        else:
            slots = _whole_blocks(self.max_length)
        if page_size is not None:
            smallest = launch_decode.MIN_PAGE
            integer("page_size", page_size, smallest, 1 << 20)
            if page_size & (page_size - 1):
                raise ArgumentError(
                    f"page_size: got {page_size}; allowed: a power of two, {smallest} or more"
                )
        elif pages is not None:
            raise ArgumentError("pages: got a number without page_size; allowed: None")
        self.page_size = slots if page_size is None else int(page_size)
        self._width = -(-slots // self.page_size)
        self.pages = (
            self.batch * self._width if pages is None else integer("pages", pages, 1, 1 << 30)
        )
        if unified_max is not None:
            if device == "cpu" or dtype not in ("float16", "bfloat16"):
                raise UnsupportedError(
                    f"unified_max: got {unified_max!r} with device {device!r} and dtype {dtype!r}; allowed: on "
                    "CUDA with float16 or bfloat16"
                )
            ring["unified"] = real("unified_max", unified_max) * LOG2E
        if isa is not None and device != "cpu":
            raise ArgumentError(f"isa: got {isa!r} with device {device!r}; allowed: None")
        self._layout: Any = launch_decode.make_layout(
            dtype,
            self.kv_heads,
            self.head_dim,
            self.value_dim,
            self.page_size,
            page_size is not None,
            isa if device == "cpu" else device,
            **ring,
        )
        self._store: Any = self._layout.allocate(self.pages, self.batch, self._width)
        self._offset = np.zeros((self.batch, self.kv_heads, self.head_dim), F)
        self._pool = Pages(self.pages, self.page_size, self._store.table, page_size is not None)
        self._backend, self._append = (
            launch_decode,
            launch_decode.Append(self._layout, self.batch, self._offset),
        )
        self._longest, self._plain = 0, page_size is None and not self.smooth
        self._seen: dict[
            tuple[tuple[int, ...], tuple[int, ...]], tuple[int, np.ndarray]
        ] = {}  # shapes taken: their tokens
        self._as_they_are = dtype in (
            "int8",
            "float32",
        )  # float32 tokens need no conversion for the append kernels
        self._plans: dict[Any, Any] = {}
        self._calls: dict[Any, tuple[Any, np.float32]] = {}
        self._steps: dict[Any, Any] = {}

    # ---- what it holds -----------------------------------------------------------------------------------------------------
    @property
    def lengths(self) -> np.ndarray:
        """(B,) int64: tokens appended to each sequence since its reset; a copy."""
        return self._open().lengths.copy()

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys, values and scales."""
        return int(self._open().nbytes)

    @property
    def free_pages(self) -> int:
        """Pages of the pool that no sequence uses."""
        self._open()
        return len(self._pool.free) if self._pool.paged else 0

    @property
    def emulator(self) -> Any:
        """With device "cuda-emulator" its counters, `cuda.resident.Emulated`: reports of the kernels launched, bytes that crossed.

        Raises
        ------
        UnsupportedError
            On another device, which counts nothing.
        """
        if self.device != "cuda-emulator":
            raise UnsupportedError(
                f"emulator: got a cache on {self.device!r}, which has none; allowed: device 'cuda-emulator'"
            )
        return self._layout.card

    def _open(self) -> Any:
        if self._store is None:
            raise NumflashError("KVCache: used after close(); allowed: a new cache")
        return self._store

    def _sequence(self, name: str, b: Any) -> int:
        if not self.batch:
            raise ArgumentError(f"{name}: got {b!r}; the cache holds no sequence")
        return integer(name, b, 0, self.batch - 1)

    def _slots(self, b: int) -> tuple[np.ndarray, int]:
        """The pages and the number of slots in use of sequence b."""
        used = min(int(self._store.lengths[b]), self._layout.sinks + self._layout.ring)
        return self._store.table[b, : -(-used // self.page_size)], used

    def quantized(self, sequence: int) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Keys and values of one sequence as they are stored by dtype "int8", (Hkv, slots, D) and (Hkv, slots, Dv), in slot order.

        A token that was not finite has zeros and is marked `nonfinite`.
        """
        store, b = self._open(), self._sequence("sequence", sequence)
        if self.dtype != "int8":
            raise ArgumentError(f"quantized: dtype is {self.dtype!r}; allowed: only 'int8'")
        keys, values, scales = self._stored(store, b)
        k_scale, v_scale = scales[..., None]
        v_scale = np.where(v_scale == F(fx.ZERO_VALUE_SCALE), F(1), v_scale)  # as `quantize` has it
        bad = np.isnan(k_scale[..., 0])
        key = QuantizedTensor(
            keys,
            np.where(bad[..., None], F(1), k_scale),
            "row",
            self._offset[b, :, None].copy(),
            bad if bad.any() else None,
        )
        return key, QuantizedTensor(values, v_scale, "row", None, key.nonfinite)

    def _stored(self, store: Any, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Stored elements of sequence b in slot order, (Hkv, slots, D) and (Hkv, slots, Dv), and scales (1 or 2, Hkv, slots)."""
        pages, n = self._slots(b)
        if not n:
            empty = np.zeros((self.kv_heads, 0, self.head_dim + self.value_dim), self._layout.bits)
            scales = np.zeros((1 + (self.dtype == "int8"), self.kv_heads, 0), F)
            return empty[..., : self.head_dim], empty[..., self.head_dim :], scales
        of = self._layout
        keys, values = of.keys(store, pages)[:, :n], of.values(store, pages)[:, :n]
        return keys, values, of.scales(store, pages)[..., :n]

    def read(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one sequence as float32, (Hkv, slots, D) and (Hkv, slots, Dv), in slot order.

        Slots are positions, but in a ring: there the tokens behind the sinks start over. Tokens that were not finite are NaN.
        """
        store, b = self._open(), self._sequence("sequence", sequence)
        if self.dtype == "int8":
            key, value = self.quantized(b)
            return key.dequantize(), value.dequantize()
        *stored, scales = self._stored(store, b)
        bad = np.isnan(scales[0, ..., None])
        name = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[self.dtype]
        found = (x.copy().view(name) for x in stored)
        k, v = (np.where(bad, F(np.nan), widen(x).astype(F)) for x in found)
        return k, v

    # ---- append ------------------------------------------------------------------------------------------------------------
    def append(self, key: Any, value: Any, *, counts: Any = None) -> None:
        """Add tokens to the end of every sequence, in O(tokens).

        Parameters
        ----------
        key : (B, Hkv, n, D) array of floats;  value : (B, Hkv, n, Dv)
        counts : (B,) integers or None
            How many of the n tokens belong to each sequence (the first ones), 0 to n; all unless given.

        Raises
        ------
        CacheFullError
            A sequence would exceed `max_length`, or the pool of pages is used up.
        ArgumentError, ArgumentTypeError
            Also for a finite number that the storage would make infinite: 65520 or more in a float16 cache. Infinity and NaN are
            taken: who sees such a token is NaN. Nothing is appended by a call that raises.
        """
        store = self._store or self._open()
        key, value, take, n = self._admitted(key, value, counts)
        self._append(key, value, take, store)
        self._longest = self._longest + n if counts is None else int(store.lengths.max(initial=0))

    def _admitted(
        self, key: Any, value: Any, counts: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Key and value as the kernels take them, the tokens of each sequence, and the most of them; there is room for them."""
        ready = _float32(key) and _float32(value)
        if not ready:
            key, value = floats("key", key).array, floats("value", value).array
        known = self._seen.get((key.shape, value.shape))
        n, take = known or self._shapes(key.shape, value.shape)
        if not (ready and self._as_they_are):
            for name, x in (("key", key), ("value", value)):
                in_range(name, x, self.dtype)
            key, value = self._layout.tokens(key), self._layout.tokens(value)
        if counts is not None:
            take = self._checked_counts(counts, n)
        elif self.window is None and self._longest + n > self.max_length and self.batch:
            raise self._full(take)
        if not self._plain:
            self._prepare(key, take)
        return key, value, take, n

    def _shapes(self, key: tuple[int, ...], value: tuple[int, ...]) -> tuple[int, np.ndarray]:
        """How many tokens arrays of these shapes hold, and the same for each sequence."""
        for name, shape, channels in (
            ("key", key, self.head_dim),
            ("value", value, self.value_dim),
        ):
            if (
                len(shape) != 4
                or shape[0] != self.batch
                or shape[1] != self.kv_heads
                or shape[3] != channels
            ):
                raise ArgumentError(
                    f"{name}: got shape {shape}; allowed: ({self.batch}, {self.kv_heads}, tokens, {channels})"
                )
        if key[2] != value[2]:
            raise ArgumentError(f"value: got {value[2]} tokens; allowed: the key's, {key[2]}")
        self._seen[key, value] = key[2], np.full(self.batch, key[2], np.int64)
        return self._seen[key, value]

    def _checked_counts(self, counts: Any, n: int) -> np.ndarray:
        take = token_counts(counts, self.batch, n)
        if self.window is None and (self._store.lengths + take > self.max_length).any():
            raise self._full(take)
        return take

    def _full(self, take: np.ndarray) -> CacheFullError:
        b = int(np.argmax(self._store.lengths + take))
        return CacheFullError(
            f"append: sequence {b} holds {self._store.lengths[b]} tokens and would get {take[b]} more; "
            f"allowed: {self.max_length} in all"
        )

    def _prepare(self, key: np.ndarray, take: np.ndarray) -> None:
        """Pages and channel means for the tokens to come."""
        if self._pool.paged:
            self._pool.grow(self._store.lengths, take)
        if self.smooth:
            self._set_offset(key, take)

    def _set_offset(self, key: np.ndarray, take: np.ndarray) -> None:
        for b in np.flatnonzero((self._store.lengths == 0) & (take >= SMOOTH_TOKENS)):
            tokens = widen(key[b, :, : take[b]]).astype(np.float64)
            finite = np.isfinite(tokens).all(2, keepdims=True)
            total = np.where(finite, tokens, 0).sum(1)
            self._offset[b] = total / np.maximum(finite.sum(1), 1)

    # ---- pages -------------------------------------------------------------------------------------------------------------
    def share(self, source: int, target: int, length: int | None = None) -> None:
        """Let an empty sequence start with the first `length` tokens of another (all unless given), without copying whole pages.

        Full pages are shared and read-only from then on (no append ever writes to a full page); the tokens of the last, partial
        page are copied.

        Raises
        ------
        CacheFullError, ArgumentError, ArgumentTypeError
        """
        store = self._open()
        if not self._pool.paged:
            raise ArgumentError("share: the cache has no pages; allowed: a cache with page_size")
        a, b = self._sequence("source", source), self._sequence("target", target)
        if a == b or store.lengths[b]:
            raise ArgumentError(
                f"target: got {b}; allowed: an empty sequence other than the source"
            )
        n = (
            int(store.lengths[a])
            if length is None
            else integer("length", length, 0, int(store.lengths[a]))
        )
        copied = self._pool.share(a, b, n)
        if copied is not None:
            self._layout.copy_page(store, *copied)
        store.lengths[b], self._offset[b] = n, self._offset[a]
        self._longest = max(self._longest, n)

    def reset(self, sequences: Any = None) -> None:
        """Empty the given sequences (all unless given) and return their pages; nothing is freed or cleared in memory."""
        store = self._open()
        if sequences is None:
            sequences = range(self.batch)
        elif isinstance(sequences, Integral):
            sequences = [sequences]
        elif not (
            isinstance(sequences, Sequence)
            or (isinstance(sequences, np.ndarray) and sequences.ndim)
        ):
            raise ArgumentTypeError(f"sequences: got {sequences!r}; allowed: an integer or several")
        for b in [self._sequence("sequences", b) for b in sequences]:
            self._pool.release(b)
            store.lengths[b], self._offset[b] = 0, 0
        self._longest = int(store.lengths.max(initial=0))

    def close(self) -> None:
        """Release the memory; every later use raises."""
        self._store = self._append = None
        self._forget()

    def _forget(self) -> None:
        """Drop the prepared calls and their buffers."""
        for prepared in (self._plans, self._calls, self._steps):
            prepared.clear()

    # ---- decode ------------------------------------------------------------------------------------------------------------
    def decode(
        self,
        query: Any,
        *,
        scale: float | None = None,
        splits: int | None = None,
        out: np.ndarray | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of the last L tokens of every sequence, whose keys and values have been appended, over the whole cache.

        Parameters
        ----------
        query : (B, H, L, D) array of floats
            H a multiple of kv_heads. Row i stands at position lengths[b] - L + i and sees the tokens up to it (causal, lower
            right); a row at a negative position sees nothing.
        scale : float or None
            Factor of Q.K^T, 1/sqrt(D) unless given.
        splits : int or None
            Parts of the keys that are computed on their own and merged in order; chosen by `split_count` unless given. Equal splits
            give equal bits whatever the number of threads; other splits agree to rounding.
        out : (B, H, L, Dv) float32, contiguous, or None
            Where to write, also over the query; a new array unless given.
        return_lse : bool

        Returns
        -------
        out : (B, H, L, Dv) of the query's kind and dtype, or `out` itself; with return_lse also lse (B, H, L) float32, natural
            log. A row that sees a token that was not finite is NaN.

        Raises
        ------
        ArgumentError, ArgumentTypeError
        """
        store = self._open()
        return_lse, (query, taken) = flag("return_lse", return_lse), self._query(query)
        shape = query.shape
        plan, c = self._plan(shape, scale, splits, self._longest)
        result = (
            np.empty((*shape[:-1], self.value_dim), F)
            if out is None
            else output(out, (*shape[:-1], self.value_dim))
        )
        if out is not None and np.may_share_memory(out, query):
            query = query.copy()  # it is read again after `out` is written
        rows, results = query.reshape(plan.shape), result.reshape((*plan.shape[:3], self.value_dim))
        plan(rows, c, store, results)
        self._redo(plan, rows, scale, results)
        exported = result
        if taken is not None and out is None:
            dtype = taken.dtype if taken.dtype in ("float16", "bfloat16") else "float32"
            exported = taken.export(convert(result, dtype), dtype)
        if not return_lse:
            return exported
        return exported, self._lse(plan, query, scale)

    @staticmethod
    def _query(query: Any) -> tuple[np.ndarray, Any]:
        """The query as contiguous float32, and what it came as where that was something else."""
        if type(query) is np.ndarray and query.dtype == FLOAT32 and query.flags.carray:
            return query, None
        taken = floats("query", query)
        return to_float32(taken.array), taken

    def _redo(self, plan: Any, query: np.ndarray, scale: float | None, out: np.ndarray) -> None:
        """The rows again in float64 whose scores or sums float32 cannot hold."""
        for b, g, r in plan.to_redo():
            key, value = self.read(b)
            queries, length = plan.sizes[0], int(self._store.lengths[b])
            held = positions(length, self._slots(b)[1], self.sinks, self._layout.ring)
            at = length - queries + r % queries
            seen = held <= at
            if self.window is not None:
                seen &= (held > at - self.window) | (held < self.sinks)
            with np.errstate(over="ignore"):
                out[b, g, r], plan.m[b, g, r], plan.l[b, g, r] = attend(
                    query[b, g, r], key[g, seen], value[g, seen], self._factor(scale)
                )

    def step(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        scale: float | None = None,
        splits: int | None = None,
        out: np.ndarray | None = None,
    ) -> Any:
        """`append` and `decode` of one step in one call.

        On a card float32 NumPy arrays with as many new tokens as query rows go through a CUDA graph: captured at the first such
        call, launched again while the number of splits stays.

        Parameters
        ----------
        query : (B, H, n, D);  key : (B, Hkv, n, D);  value : (B, Hkv, n, Dv)
        scale, splits, out
            As `decode` takes them.

        Returns
        -------
        out : (B, H, n, Dv) of the query's kind and dtype, or `out` itself

        Raises
        ------
        CacheFullError, ArgumentError, ArgumentTypeError
            Nothing is appended by a call that raises.
        """
        store = self._open()
        plain = all(
            type(x) is np.ndarray
            and x.dtype == FLOAT32
            and x.flags.carray
            and x.ndim == 4
            and x.size
            for x in (query, key, value)
        )
        if self.device == "cpu" or self.smooth or not plain or key.shape[2] != query.shape[2]:
            rows, _ = self._query(query)
            self._plan(
                rows.shape, scale, splits, self._longest
            )  # what it refuses is refused before a token is appended
            if out is not None:
                output(out, (*rows.shape[:-1], self.value_dim))
            self.append(key, value)
            return self.decode(query, scale=scale, splits=splits, out=out)
        plan, c = self._plan(query.shape, scale, splits, self._longest + key.shape[2])
        shape = (*query.shape[:-1], self.value_dim)
        result = np.empty(shape, F) if out is None else output(out, shape)
        if out is not None and np.may_share_memory(out, query):
            query = query.copy()  # it is read again after `out` is written
        key, value, take, n = self._admitted(key, value, None)
        whole = self._steps.get((plan, float(c)))
        if whole is None:
            whole = self._steps[plan, float(c)] = self._backend.Step(self._append, plan, c, store)
        rows, results = query.reshape(plan.shape), result.reshape((*plan.shape[:3], self.value_dim))
        whole(key, value, rows, take, results)
        self._longest += n
        self._redo(plan, rows, scale, results)
        return result

    def _factor(self, scale: float | None) -> float:
        return self.head_dim**-0.5 if scale is None else factor("scale", scale)

    def _plan(
        self, shape: tuple[int, ...], scale: float | None, splits: int | None, longest: int
    ) -> tuple[Any, np.float32]:
        """The prepared call for this query, and the factor of its scores."""
        workers, blocks = self._layout.call(longest, self.batch)
        call = shape, scale, splits, workers, blocks
        try:
            return self._calls[call]
        except TypeError:  # an array of one number, or what is refused now
            return self._make_plan(*call)
        except KeyError:
            made = self._make_plan(*call)
        if len(self._calls) > 64:
            self._forget()
        self._calls[call] = made
        return made

    def _make_plan(
        self,
        shape: tuple[int, ...],
        scale: float | None,
        splits: int | None,
        workers: int,
        blocks: int,
    ) -> tuple[Any, np.float32]:
        if (
            len(shape) != 4
            or shape[0] != self.batch
            or shape[1] < 1
            or shape[1] % self.kv_heads
            or shape[2] < 1
            or shape[3] != self.head_dim
        ):
            raise ArgumentError(
                f"query: got shape {shape}; allowed: ({self.batch}, heads, tokens, {self.head_dim}) with heads a "
                f"multiple of {self.kv_heads} and one token or more"
            )
        if self.window is not None and shape[2] > self._layout.ring - self.window + 1:
            raise ArgumentError(
                f"query: got {shape[2]} tokens; allowed: {self._layout.ring - self.window + 1} with this window"
            )
        c, group = self._factor(scale), shape[1] // self.kv_heads
        if splits is None:
            splits = self._layout.splits(self.batch, group * shape[2], workers, blocks)
        else:
            splits = integer("splits", splits, 1, 1 << 16)
        plan = self._plans.get((shape, splits, workers))
        if plan is None:
            plan = self._backend.Plan(self._layout, self.batch, group, shape[2], splits, workers)
            self._plans[shape, splits, workers] = plan
        unit = c * LOG2E * (fx.ONE_Q8 if self.dtype == "int8" else 1)
        return plan, F(unit)

    def _lse(self, plan: Any, query: np.ndarray, scale: float | None) -> np.ndarray:
        return natural_lse(
            plan.m,
            plan.l,
            query,
            self._offset if self.smooth else None,
            self._factor(scale),
            fx.P_ONE if self.dtype == "int8" else 1,
        )
