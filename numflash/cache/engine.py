"""A decode engine: a state machine over a KV cache.

After "API Usage Flow" of the T4 architecture (docs/sources.md):

    uninitialised                       -- init -->        initialised
    initialised, ready, output ready    -- load_qkv -->    ready
    ready                               -- decode -->      ready
    ready, output ready                 -- get_output -->  output ready
    initialised, ready, output ready    -- reset -->       initialised
    any                                 -- step -->        output ready
    any                                 -- cleanup -->     uninitialised

In the state ready `get_output` needs a `decode` before it. `step` is the one-call `decode` of that
architecture, which initialises by itself.
"""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

import numpy as np

from ..errors import ArgumentTypeError, StateError
from ..interop.arguments import refuse_unknown
from .kvcache import KVCache, checked


class State(Enum):
    """Where the engine is between two calls."""

    UNINITIALISED = "uninitialised"
    INITIALISED = "initialised"
    READY = "ready"
    OUTPUT_READY = "output ready"


class DecodeEngine:
    """Token-by-token attention of one model layer, with the states of the T4 architecture.

    Keys and values stay in a `KVCache`.

    Parameters
    ----------
    **options
        Of `KVCache`, for `init`: batch, kv_heads, head_dim, max_length, dtype, ...

    Attributes
    ----------
    state : State
    cache : KVCache or None

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError
        What `KVCache` would raise in `init`.
    """

    def __init__(self, **options: Any) -> None:
        taken = inspect.signature(KVCache).parameters
        refuse_unknown("DecodeEngine", options, taken)
        given = {name: options.get(name, x.default) for name, x in taken.items()}
        for name, value in given.items():
            if value is inspect.Parameter.empty:
                raise ArgumentTypeError(f"{name}: got nothing; allowed: an integer")
        checked(**given)
        self.options = options
        self.state = State.UNINITIALISED
        self.cache: KVCache | None = None
        self._query: Any = None
        self._output: Any = None
        self._buffer = np.empty(0, np.float32)

    def _allow(self, method: str, *states: State) -> None:
        if self.state not in states:
            first = "; init() comes first" if self.state is State.UNINITIALISED else ""
            raise StateError(
                f"{method}: the engine is {self.state.value}; allowed: when {' or '.join(s.value for s in states)}{first}"
            )

    def init(self) -> None:
        """Allocate the cache."""
        self._allow("init", State.UNINITIALISED)
        self.cache = KVCache(**self.options)
        self.state = State.INITIALISED

    def load_qkv(self, query: Any, key: Any, value: Any = None) -> None:
        """Append key and value to the cache and keep the query for the next `decode`.

        Parameters
        ----------
        query : (B, H, n, D) array of floats
            H a multiple of kv_heads. It is not copied, and checked by `decode`.
        key : (B, Hkv, n, D) array of floats
        value : (B, Hkv, n, Dv) array of floats; None with `value_in_key`

        Raises
        ------
        StateError
            `init` has not been called.
        CacheFullError, ArgumentError, ArgumentTypeError
            As `KVCache.append` raises them; the state stays as it was.
        """
        self._allow("load_qkv", State.INITIALISED, State.READY, State.OUTPUT_READY)
        self._cache.append(key, value)
        self._query, self._output, self.state = query, None, State.READY

    def decode(self) -> None:
        """Attention of the loaded query over the cache.

        Raises
        ------
        StateError
            No query is loaded.
        ArgumentError, ArgumentTypeError, UnsupportedError
            As `KVCache.decode` raises them; the state stays as it was.
        """
        self._allow("decode", State.READY)
        self._output = self._cache.decode(self._query, out=self._out(self._query))

    def _out(self, query: Any) -> np.ndarray | None:
        """Where the output of a query goes."""
        if not (isinstance(query, np.ndarray) and query.dtype == np.float32):
            return None
        shape = (*query.shape[:-1], self._cache.value_dim)
        if self._buffer.shape != shape:
            self._buffer = np.empty(shape, np.float32)
        return self._buffer

    def get_output(self) -> np.ndarray:
        """The output of the last `decode`.

        Returns
        -------
        out : (B, H, n, Dv) array of the query's kind and dtype (float32 for float64)
            For a float32 NumPy query the engine's own buffer, so that a step allocates nothing: the
            next `decode` writes over it.

        Raises
        ------
        StateError
            Nothing was decoded since `load_qkv`.
        """
        self._allow("get_output", State.READY, State.OUTPUT_READY)
        if self._output is None:
            raise StateError(
                "get_output: nothing was decoded since load_qkv; allowed: after decode"
            )
        self.state = State.OUTPUT_READY
        return self._output

    def reset(self) -> None:
        """Empty the cache for a new generation; its memory stays.

        Raises
        ------
        StateError
            `init` has not been called.
        """
        self._allow("reset", State.INITIALISED, State.READY, State.OUTPUT_READY)
        self._cache.reset()
        self._query, self._output, self.state = None, None, State.INITIALISED

    def cleanup(self) -> None:
        """Release everything; an engine that holds nothing stays as it is."""
        if self.cache is None:
            return
        self.cache.close()
        self.cache, self._query, self._output, self.state = None, None, None, State.UNINITIALISED
        self._buffer = np.empty(0, np.float32)

    def step(self, query: Any, key: Any, value: Any = None) -> np.ndarray:
        """load_qkv, decode and get_output in one call, on a card one CUDA graph.

        Initialises by itself.

        Parameters
        ----------
        query : (B, H, n, D) array of floats
            H a multiple of kv_heads.
        key : (B, Hkv, n, D) array of floats
        value : (B, Hkv, n, Dv) array of floats; None with `value_in_key`

        Returns
        -------
        out : (B, H, n, Dv) array of the query's kind and dtype (float32 for float64)
            As of `get_output`: for a float32 NumPy query the next step writes over it, so copy what
            you want to keep.

        Raises
        ------
        CacheFullError, ArgumentError, ArgumentTypeError, UnsupportedError
            As `KVCache` and `KVCache.step` raise them.
        """
        if self.state is State.UNINITIALISED:
            self.init()
        self._output = self._cache.step(query, key, value, out=self._out(query))
        self._query, self.state = query, State.OUTPUT_READY
        return self._output

    @property
    def _cache(self) -> KVCache:
        assert self.cache is not None
        return self.cache
