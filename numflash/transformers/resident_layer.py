"""One layer of a `ResidentCache`: keys and values in a `numflash.KVCache`, and attention over them.

transformers' attention interface passes keys and values, not the cache. So `update` keeps the new
tokens and returns placeholders, and the attention function calls `attend` of the layer they name:
only there is the mask known, which says what is padding. The cache stores no padding: a sequence's
tokens are its first ones, whatever the padding of the batch.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..cache.kvcache import KVCache
from ..cache.settings import INTEGERS
from ..errors import ArgumentError, ArgumentTypeError, CacheFullError
from ..torch.rotated import rotated
from ..torch.sdpa import attention
from ..torch.threads import pytorch_threads
from .masks import PLAIN, Reading, gathered, scattered, to_back, to_front
from .standin import StandIn

# Query rows of a KV head (new tokens times heads of its group) up to which the decode kernel serves
# them: it reads the cache once for every 8 rows, while the attention kernel takes keys and values
# out of the cache first.
DECODE_ROWS = 64
FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # as attention takes them
FIRST = 256  # tokens that are allocated at least; then powers of two


class Over(NamedTuple):
    """What a chunk attends to: keys and values, and the options of attention that limit it."""

    keys: Tensor
    values: Tensor
    limits: dict[str, Any]


class Pass(NamedTuple):
    """What later layers need that share a layer's keys and values.

    valid : (B, n) bool, False for padding; None where there is none
    over : None where the decode kernel reads the store
    """

    valid: np.ndarray | None
    over: Over | None

    def of_rows(self, rows: int) -> Pass:
        """The same for the last `rows` of the n tokens."""
        valid, over = self.valid, self.over
        if over is not None and "attn_mask" in over.limits:
            over = over._replace(limits={"attn_mask": over.limits["attn_mask"][:, :, -rows:]})
        return Pass(None if valid is None else valid[:, -rows:], over)


class ResidentLayer(CacheLayerMixin):
    """Keys and values of one attention layer.

    Attributes
    ----------
    store : KVCache or None before the first tokens
    seen : tokens of the layer, padding included
    shared : whether later layers of the model attend to the same keys and values (Gemma 3n and 4)
    """

    is_compileable = False
    is_croppable = True
    latent = False  # whether the store's values are in its keys, see `LatentLayer`

    def __init__(self, cache: Any, window: int | None, shared: bool = False) -> None:
        super().__init__()
        # not a cycle: the memory of a cache that nobody holds is free at once, as of transformers' own
        self.cache: Any = weakref.proxy(cache)
        self.window, self.is_sliding = window, window is not None
        self.shared = shared
        self.seen = 0
        self.store: KVCache | None = None
        self._fits: tuple[Any, Any] | None = None  # shapes of tokens that it has taken
        self._new: tuple[Tensor, Tensor] | None = None
        self._last: Pass | None = None  # of a shared layer, until the next one begins

    # ---- transformers' interface
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the new tokens (B, Hkv, n, D) for `attend`.

        Returns placeholders of the shape of all keys and values.
        """
        shapes = key_states.shape, value_states.shape
        if shapes != self._fits or not (self._as_before(key_states, value_states)):
            self._check(key_states, value_states)
            self.lazy_initialization(key_states, value_states)
        self._check_room(key_states.shape[2])
        self._new, self._last = (key_states, value_states), None
        keys = self.get_mask_sizes(key_states.shape[2])[0]
        key = StandIn.of(key_states, keys, self)
        if shapes[0] == shapes[1]:
            return key, key
        return key, StandIn.of(value_states, keys, self)

    def _as_before(self, key: Tensor, value: Tensor) -> bool:
        """Whether tensors are of the kind that `_check` has accepted, on the CPU."""
        return (
            key.is_cpu
            and value.is_cpu
            and key.dtype is value.dtype is self.dtype
            and not (key.requires_grad or value.requires_grad)
        )

    def _check(self, key: Tensor, value: Tensor) -> None:
        for name, x in (("key_states", key), ("value_states", value)):
            if x.device.type != "cpu" or x.dtype not in FLOATS:
                raise ArgumentTypeError(
                    f"{name}: got {x.dtype} on {x.device}; allowed with a ResidentCache: float32, float16 or bfloat16 "
                    "on the CPU"
                )
            if x.requires_grad and torch.is_grad_enabled():
                raise ArgumentError(
                    f"{name}: got a tensor that requires grad, and the cache would lose the gradient; allowed: a call "
                    "under torch.no_grad()"
                )
        b, heads, n, d = key.shape
        sizes = (heads, d, value.shape[3])
        held = self.store
        if held is not None and sizes != self._held_sizes(held):
            raise ArgumentError(
                f"key_states: got {heads} heads of {d} and {value.shape[3]} channels; allowed: {self._held_sizes(held)}, "
                "the tokens that the cache holds are of another model"
            )
        if held is not None and held.batch != b:
            raise ArgumentError(
                f"key_states: got {b} sequences; allowed: {held.batch}, or after reset()"
            )

    def _held_sizes(self, held: KVCache) -> tuple[int, int, int]:
        """KV heads, and channels of keys and of values as `update` takes them."""
        return held.kv_heads, held.head_dim, held.value_dim

    def _check_room(self, n: int) -> None:
        most = self.cache.max_length
        if most is not None and self.seen + n > most:
            raise CacheFullError(
                f"past_key_values: {self.seen} tokens are cached and {n} more would come; allowed: {most} in all, as "
                "max_length says"
            )

    def get_seq_length(self) -> int:
        """Tokens, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """The limit that was given, or -1."""
        return -1 if self.cache.max_length is None else int(self.cache.max_length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask for so many new tokens has, and the first of them."""
        return self.mask_sizes(self.seen, query_length)

    def mask_sizes(self, seen: int, query_length: int) -> tuple[int, int]:
        """The same with `seen` tokens in the cache."""
        past = seen if self.window is None else min(seen, self.window - 1)
        return past + query_length, seen - past

    def reset(self) -> None:
        """Remove all tokens."""
        self.seen, self._new = 0, None
        self.store = self._fits = self._last = None

    @property
    def unfinished(self) -> bool:
        """Whether new tokens wait for attention, or a call was interrupted while it appended them."""
        return self._new is not None

    def reorder(self, index: np.ndarray) -> None:
        """Make sequence i a copy of sequence index[i]; there may be more or fewer than before."""
        if self.store is not None:
            self.store.reorder(index)
        self._fits = self._last = None

    def truncate(self, seen: int, lengths: np.ndarray) -> None:
        """Keep `seen` tokens, of which `lengths` (B,) are stored."""
        if self.store is not None:
            self.store.truncate(np.minimum(lengths, self.store.lengths))
        self.seen, self._new, self._last = seen, None, None

    # ---- attention
    def attend(
        self, query: Tensor, mask: Tensor | None, precision: str | None, **options: Any
    ) -> Tensor:
        """Append the tokens that `update` kept and compute their attention.

        Parameters
        ----------
        query : (B, H, n, D)
        mask : (B, 1, n, S) or None, S as `get_mask_sizes` says
        precision : of prefill; None for the cache's own
        options : scale, softcap, sinks (H,), and of prefill pv

        Returns
        -------
        (B, H, n, Dv) of the query's dtype
        """
        if self._new is None:
            return self._attend_again(query, precision, options)
        key, value = self._new
        b, _, n, _ = key.shape
        reading = self.cache.reading(self, mask, b, n)
        if self.store is None:
            self.store = self._create(key, value, bool(options.get("softcap")))
        if not self.store.lengths.any():
            self._begin(key, value, reading.valid)
        self._reserve(n)
        if reading.standard and self._suits_decode(n, query.shape[1] // key.shape[1]):
            out = self._decode(query, key, value, reading, options)
        else:
            out = self._prefill(query, key, value, reading, precision, options)
        if self.shared and self._last is None:
            self._last = Pass(reading.valid, None)
        self.seen, self._new, self._fits = self.seen + n, None, (key.shape, value.shape)
        self.cache.attended(self, reading, b, n)
        return out

    def _attend_again(
        self, query: Tensor, precision: str | None, options: dict[str, Any]
    ) -> Tensor:
        """Attention of a later layer that shares this one's keys and values.

        query : (B, H, k, D) of the last k of the pass's tokens: a model leaves out the rows that
        nobody asked for
        """
        if self._last is None:
            raise ArgumentError(
                "past_key_values: attention was called twice for one update of the cache"
            )
        last = self._last.of_rows(query.shape[2])
        if last.over is None:
            return self._decoded(query, last.valid, options)
        return self._attended(query, last, precision, options)

    def _suits_decode(self, n: int, group: int) -> bool:
        """Whether the decode kernel is the faster one for n new tokens of `group` heads of a KV head."""
        return n * group <= DECODE_ROWS

    def keep(self) -> None:
        """Append the tokens that `update` kept, without attention.

        Keys and values that were computed elsewhere.
        """
        if self._new is None:
            raise ArgumentError("past_key_values: there are no new tokens; call update first")
        key, value = self._new
        if self.store is None:
            self.store = self._create(key, value, False)
        if not self.store.lengths.any():
            self._begin(key, value, None)
        self._reserve(key.shape[2])
        with pytorch_threads():
            self._append(key, value, PLAIN)
        self.seen, self._new = self.seen + key.shape[2], None
        self.cache.attended(self, PLAIN, key.shape[0], key.shape[2])

    def _create(self, key: Tensor, value: Tensor, capped: bool) -> KVCache:
        b, heads, n, d = key.shape
        rounded = self.cache.dtype in INTEGERS
        return self._store((b, heads, d, value.shape[3]), n, rounded and not capped, rounded)

    def _begin(self, key: Tensor, value: Tensor, valid: np.ndarray | None) -> None:
        """Look at the first tokens before they are stored; those of padding are not `valid`."""

    def _store(
        self, shape: tuple[int, int, int, int], tokens: int, smooth: bool, rotate: bool
    ) -> KVCache:
        """An empty cache.

        `smooth` and `rotate` each take half of the divergence that rounding costs on a real model
        (docs/precision.md); keys of biased projections need the first, under a soft cap it costs
        more than it gives.
        """
        most = self.cache.max_length or _capacity(tokens)
        pages = None if self.window is not None else self.cache.page_size
        dtype = self.cache.dtype
        window = self.window
        b, heads, d, dv = shape
        return KVCache(
            b,
            heads,
            d,
            most,
            dtype,
            pages,
            value_dim=dv,
            window=window,
            smooth=smooth,
            rotate=rotate,
            value_in_key=self.latent,
        )

    # ---- in a file
    def describe(self) -> dict[str, Any]:
        """Window, tokens, and the arguments of the store."""
        store = self.store
        about = {"window": self.window, "seen": self.seen}
        if store is None:
            return about
        shape = [store.batch, store.kv_heads, store.head_dim, store.value_dim]
        return {**about, "shape": shape, "smooth": store.smooth, "rotate": store.rotate}

    def state(self) -> dict[str, np.ndarray]:
        """The arrays of the store."""
        return {} if self.store is None else self.store.state()

    def restore(self, about: dict[str, Any], state: dict[str, np.ndarray]) -> None:
        """Take over what `describe` and `state` gave."""
        if "shape" in about:
            b, heads, d, dv = about["shape"]
            tokens = int(state["lengths"].max(initial=0))
            rotate = about.get("rotate", False)  # files of before have none
            store = self._store((b, heads, d, dv), tokens, about["smooth"], rotate)
            store.load_state(state)
            self.store = store
        self.seen = about["seen"]

    def _reserve(self, n: int) -> None:
        assert self.store is not None
        if self.window is not None or self.seen + n <= self.store.max_length:
            return
        needed = int(self.store.lengths.max(initial=0)) + n
        if needed > self.store.max_length:
            self.store.reserve(max(_capacity(needed), 2 * self.store.max_length))

    def _append(self, key: Tensor, value: Tensor, reading: Reading) -> None:
        assert self.store is not None
        if reading.valid is not None:
            order = to_front(reading.valid)
            key = gathered(key, order)
            value = gathered(value, order)
        self.store.append(*self._tokens(key, value), counts=reading.counts)

    def _tokens(self, key: Tensor, value: Tensor) -> tuple[np.ndarray, np.ndarray | None]:
        """New tokens as the store takes them."""
        return as_numpy(key), as_numpy(value)

    def _decode(
        self, query: Tensor, key: Tensor, value: Tensor, reading: Reading, options: dict[str, Any]
    ) -> Tensor:
        """Attention by the decode kernel, whose rows are a sequence's last tokens.

        Hence padding rows are moved to the front.
        """
        assert self.store is not None
        sinks = options["sinks"]
        if reading.valid is None and sinks is None and not options["softcap"]:
            with pytorch_threads():
                out = self.store.step(
                    as_numpy(query), *self._tokens(key, value), scale=options["scale"]
                )
            result = torch.from_numpy(out)
            return result if query.dtype is torch.float32 else result.to(query.dtype)
        with pytorch_threads():
            self._append(key, value, reading)
        return self._decoded(query, reading.valid, options)

    def _decoded(self, query: Tensor, valid: np.ndarray | None, options: dict[str, Any]) -> Tensor:
        """The same of tokens that have been appended."""
        assert self.store is not None
        sinks = options["sinks"]
        order = None if valid is None else to_back(valid)
        rows = as_numpy(query if order is None else gathered(query, order))
        with pytorch_threads():
            out = self.store.decode(
                rows,
                scale=options["scale"],
                softcap=options["softcap"],
                sinks=None if sinks is None else as_numpy(sinks),
            )
        result = torch.from_numpy(out).to(query.dtype)
        return result if order is None else scattered(result, order)

    def _prefill(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        reading: Reading,
        precision: str | None,
        options: dict[str, Any],
    ) -> Tensor:
        """By the attention kernel, over what the cache holds and the new tokens as they came."""
        if not self.seen and reading.valid is None:
            keys = key
            values = value
            lengths = None
        else:
            keys, values, lengths = self._with_past(key, value, reading)
        keys, values = self._expanded(keys, values)
        limits: dict[str, Any] = {"is_causal": True, "alignment": "lower_right"}
        if self.window is not None:
            limits["window"] = (self.window - 1, None)
        if lengths is not None:
            limits["key_lengths"] = lengths
        if reading.mask is not None:
            limits = {"attn_mask": self.cache.physical_mask(self, reading, keys.shape[2])}
        this = Pass(reading.valid, Over(keys, values, limits))
        out = self._attended(query, this, precision, options)
        with pytorch_threads():
            self._append(key, value, reading)
        if self.shared:
            self._last = this
        return out

    def _attended(
        self, query: Tensor, this: Pass, precision: str | None, options: dict[str, Any]
    ) -> Tensor:
        """By the attention kernel, whose last row of a sequence is its last token."""
        assert this.over is not None
        rows, (keys, values, limits) = query, this.over
        order = None if this.valid is None or "attn_mask" in limits else to_back(this.valid)
        if order is not None:
            rows = gathered(rows, order)
        precision = precision or self.cache.precision
        if precision == "int8":
            rows, keys, values = rotated(rows, keys, values)
        out = attention(
            rows, keys, values, enable_gqa=True, precision=precision, **limits, **options
        )
        out = out.to(query.dtype)
        return out if order is None else scattered(out, order)

    def _with_past(
        self, key: Tensor, value: Tensor, reading: Reading
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of all that the new tokens can attend to, without padding.

        The stored ones, then the new.

        Returns (B, Hkv, S, D), (B, Hkv, S, Dv) and, where sequences differ, (B,) how many of the S
        are theirs.
        """
        assert self.store is not None
        b = key.shape[0]
        n = key.shape[2]
        if reading.valid is not None:
            order = to_front(reading.valid)
            key = gathered(key, order)
            value = gathered(value, order)
        take = np.full(b, n) if reading.counts is None else reading.counts
        held = self.store.lengths
        if self.window is not None:
            held = np.minimum(held, self.window - 1)
        lengths = held + take
        longest = int(lengths.max(initial=0))
        equal = bool((lengths == longest).all())
        allocate = torch.empty if equal else torch.zeros
        heads = key.shape[1]
        keys, values = (
            allocate((b, heads, longest, x.shape[3]), dtype=torch.float32) for x in (key, value)
        )
        for i in range(b):
            at = int(held[i])
            self._read(i, keys[i].numpy(), values[i].numpy())
            keys[i, :, at : lengths[i]] = key[i, :, : take[i]]
            values[i, :, at : lengths[i]] = value[i, :, : take[i]]
        dtype = key.dtype
        return keys.to(dtype), values.to(dtype), None if equal else torch.from_numpy(lengths)

    def _read(self, i: int, keys: np.ndarray, values: np.ndarray) -> None:
        """What the next token of sequence i attends to, into the first rows of keys and values."""
        assert self.store is not None
        self.store.tail(i, self.window, out=(keys, values))

    def _expanded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as the attention kernel takes them."""
        return keys, values

    def twin(self, cache: Any) -> ResidentLayer:
        """The same tokens in a layer of another cache."""
        new = type(self)(cache, self.window, self.shared)
        new.seen = self.seen
        new.store = None if self.store is None else self.store.copy()
        return new


def _capacity(tokens: int) -> int:
    """How many tokens to allocate where so many are stored.

    A power of two, so that growing copies each token once on average.
    """
    return max(FIRST, 1 << (tokens + 32 - 1).bit_length())


def as_numpy(x: Tensor) -> np.ndarray:
    """A tensor as contiguous float32."""
    if x.dtype is not torch.float32 or x.requires_grad:
        x = x.detach().float()
    found: np.ndarray = (x if x.is_contiguous() else x.contiguous()).numpy()
    return found
