"""A KV cache for token-by-token generation.

Keys and values stay in the layout that the decode kernels read.

Contiguous, in pages that sequences may share, or as a ring that never grows (sliding window with
sinks); stored as float32, bfloat16, float16, INT8 or INT4. Append and decode are one compiled call each.
Different caches may be used from different threads, and `decode` of one cache on the CPU by several
at once. Otherwise a cache belongs to one thread at a time.

A call that raises or is interrupted (KeyboardInterrupt) leaves the cache as it was before the call,
or as it is after it.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import numpy as np

from ..errors import UnsupportedError
from ..interop.arguments import choice, flag
from ..interop.arrays import deliver, to_float32
from ..interop.eager import is_traced, untraced
from ..numerics.merge import apply_sinks
from .appending import Appending
from .arguments import FLOAT32, floats, integer, is_float32, output
from .calls import EqualSteps, LastCall
from .decode_options import NO_SOFTCAP, NOTHING, Asked, Changes, of_heads
from .decoding import cap_shift, lse_of, redo
from .memory import Memory, allocate
from .protocols import Backend, DecodePlan
from .settings import DEVICES, Settings, check_settings

F = np.float32


def _backend(device: str) -> Backend:
    """`cpu.launch_decode`, or its twin for cards."""
    name = "cpu" if choice("device", device, DEVICES) == "cpu" else "cuda"
    try:
        return cast(Backend, importlib.import_module(f"..{name}.launch_decode", __package__))
    except (ImportError, UnsupportedError) as error:
        raise UnsupportedError(
            f"device: got {device!r}, which cannot be loaded here ({error})"
        ) from error


def checked(batch: Any, **given: Any) -> tuple[Backend, Settings, int]:
    """All arguments of `KVCache`, checked.

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError
    """
    backend = _backend(given["device"])
    batch = integer("batch", batch, 0, backend.MAX_BATCH)
    return backend, check_settings(Settings(**given), backend), batch


def _place(
    out: np.ndarray | None, shape: tuple[int, ...], query: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where a result goes, new memory or `out`, and the query, which is read again after that is
    written.
    """
    if out is None:
        return np.empty(shape, FLOAT32), query
    result = output(out, shape)
    return result, query.copy() if np.may_share_memory(result, query) else query


class KVCache(Appending):
    """Keys and values of `batch` sequences, and attention of new tokens over them.

    Parameters
    ----------
    batch, kv_heads, head_dim, max_length : int
        Sequences; heads of K and V; channels, 1 to 576; tokens a sequence can hold (`reserve`
        raises it).
    dtype : "int8", "int4", "float32", "bfloat16" or "float16"
        Storage. INT8 has one scale per token and head for K and for V; the query is rounded to 14
        bits and a sign, weights to 15 bits, products are exact integers, and results have the bits
        of `reference.integer_decode`. INT4 is the same with rows rotated by a Hadamard matrix and
        rounded to 16 levels, and a query of 8 bits: half the memory, see `numflash.reference.int4`.
    page_size : int or None
        None: every sequence owns its memory. A power of two from 128 (on CUDA 16): pages from a
        common pool, taken as sequences grow, shared by `share`, `reorder` and `repeat`, returned by
        `reset` and `truncate`.
    device : "cpu", "cuda", "cuda-emulator", or the emulator with an architecture
        ("cuda-emulator:sm_75")
        Where keys and values are stored. The emulator runs the CUDA kernels without a card, slowly.
    pages : int or None
        Size of the pool; enough for every sequence unless given.
    value_dim : int or None
        Channels of V if not those of K.
    value_in_key : bool
        The value of a token is the first `value_dim` channels of its key, stored and read once:
        DeepSeek's absorbed attention over latents (head_dim 576, value_dim 512, one KV head, 16 to
        128 query heads). `append` and `step` take no values then. "float32", "bfloat16" and "int8"
        on the CPU. Of "bfloat16" on AMX, query and weights are rounded to bfloat16, too.
    window : int or None
        Each token attends to the last `window` tokens, itself included, and to the first `sinks`.
        The cache is then a ring that never grows and never fills (StreamingLLM, arXiv 2309.17453;
        positions are the caller's). `max_length` is not used.
    sinks : int
        First tokens that a ring keeps.
    smooth : bool
        INT8 and INT4: the channel means of a sequence's first append (16 tokens or more), moved so
        that its first key is stored without an error (`cache/smoothing.py`), are subtracted from
        all its keys before rounding, which leaves softmax unchanged. On for keys with a large
        bias per channel, as projections with a bias make them: 30 spreads in one channel cost 0.053
        relative L1, 0.005 with it. Off otherwise: on the activations of MiniLM-L6, whose channel
        means reach 3.8 spreads, it changes the error by 2 to 11 %
        (`tests/cpu/test_decode_smooth.py`).
    rotate : bool
        INT8: keys, values, queries and outputs are multiplied by a Hadamard matrix, as INT4 always
        does it, so that a few large channels do not take the digits of the others. For real models'
        keys: on SmolLM2 it halves what INT8 costs. On keys without large channels it changes
        nothing, for 0.1 to 0.3 us a query head and token.
    isa : str or None
        An instruction set of `numflash info` instead of the best one.
    unified_max : float or None
        On CUDA with 16-bit floats: FlashDecoding++'s constant in place of the running maximum, in
        units of scale * Q.K^T. Rows that leave the range in which weights relative to it are
        accurate are computed again with the maximum.

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
        value_in_key: bool = False,
        rotate: bool = False,
    ) -> None:
        backend, settings, batch = checked(
            batch,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            max_length=max_length,
            dtype=dtype,
            device=device,
            page_size=page_size,
            pages=pages,
            window=window,
            sinks=sinks,
            smooth=smooth,
            isa=isa,
            unified_max=unified_max,
            value_in_key=value_in_key,
            rotate=rotate,
        )
        super().__init__(settings, allocate(backend, settings, batch))

    def decode(
        self,
        query: Any,
        *,
        scale: float | None = None,
        splits: int | None = None,
        out: np.ndarray | None = None,
        return_lse: bool = False,
        softcap: float = NO_SOFTCAP,
        alibi_slopes: Any = None,
        sinks: Any = None,
        mask: Any = None,
        score_mod: Any = None,
        mask_mod: Any = None,
    ) -> Any:
        """Attention of the last L tokens of every sequence, which have been appended, over the
        whole cache.

        Parameters
        ----------
        query : (B, H, L, D) array of floats
            H a multiple of kv_heads. Row i is at position lengths[b] - L + i and attends to the
            tokens up to it (causal, lower right); a row at a negative position attends to nothing.
        scale : float or None
            Factor of Q.K^T, 1/sqrt(D) unless given.
        splits : int or None
            Parts of the keys that are computed on their own and merged in order; chosen by
            `split_count` unless given. Equal splits give equal bits at any number of threads; other
            splits agree to rounding.
        out : (B, H, L, Dv) float32, contiguous, or None
            Where to write, also over the query; a new array unless given.
        return_lse : bool
            Also return the log-sum-exp of each row's scores.
        softcap : float
            Scores become softcap * tanh(score / softcap); 0 for none.
        alibi_slopes : (H,) floats or None
            slope * distance is subtracted from the scores.
        sinks : (H,) floats or None
            As `numflash.attention` takes them: the score of one more key per head, of value 0. (The
            sinks of a ring are tokens.)
        mask : (L, L) or (B, L, L) bool or None
            Which new tokens a new token attends to, besides the rule above: trees of speculated
            tokens. Earlier tokens are attended to by all.
        score_mod, mask_mod : functions as for `flex_attention`, or None
            Of positions: q_idx is the new token's, kv_idx the cached one's, counted from the start
            of the sequence, in a ring too; b is the sequence. They come before the other options. Over
            integers c * tanh(score / c) alone runs as softcap=c, with its bits.

        Returns
        -------
        out : (B, H, L, Dv) of the query's kind and dtype (float32 for float64), or `out` itself; with
            return_lse also lse (B, H, L) float32, natural log. A row that attends to a token that was
            not finite is NaN.

        Raises
        ------
        ArgumentError, ArgumentTypeError
        UnsupportedError
            Functions on a card.
        """
        memory = self._memory or self._open()
        if (
            out is alibi_slopes is sinks is mask is score_mod is mask_mod is None
            and scale is splits is None
            and return_lse is False
            and softcap is NO_SOFTCAP
            and is_float32(query)
        ):
            last = memory.calls.last
            same = query.shape == last.shape and not last.changed
            if same and last.wanted and memory.longest <= last.most:
                return self._decode_again(memory, query, last)
        asked = Asked(
            scale, splits, out, return_lse, softcap, alibi_slopes, sinks, mask, score_mod, mask_mod
        )
        if type(query) is not np.ndarray and is_traced():
            return untraced(self._decode)(memory, query, asked)
        return self._decode(memory, query, asked)

    def _decode(self, memory: Memory, query: Any, asked: Asked) -> Any:
        """`decode` with options: by the plan of an equal call where it is plain but for these."""
        changed = asked.changes
        plain = asked.return_lse is False and asked.sinks is None and asked.mask is None
        plain = plain and not (changed and self.smooth)
        if plain and is_float32(query):
            wanted = memory.calls.results.get(query.shape)
            if wanted is not None:
                return self._equal_decode(memory, query, wanted, asked)
        return_lse, (query, taken) = flag("return_lse", asked.return_lse), self._query(query)
        shape = query.shape
        if len(shape) == 4 and shape[2] > 1:
            memory.refuse_dropped(shape[2])
        scale, sinks = asked.scale, asked.sinks
        plan, c, free = memory.calls.take(shape, scale, asked.splits, memory.longest, changed)
        try:
            changes = asked.changes_of(memory, shape)
            if sinks is not None:
                sinks = of_heads("sinks", sinks, shape[1])
            wanted = (*shape[:-1], self.value_dim)
            result, query = _place(asked.out, wanted, query)
            self._attend(memory, plan, c, query, scale, result, changes if changed else None)
            lse: Any = None
            if return_lse or sinks is not None:
                lse = lse_of(memory, plan, query, scale, changes)
        finally:
            free.append(plan)
        if sinks is not None:
            apply_sinks(result, lse, sinks)
        if plain and self.device == "cpu" and (shape[2] == 1 or self.window is None):
            memory.calls.succeeded(shape, wanted)
        exported: Any = result
        if taken is not None and asked.out is None:
            exported = deliver(result, None, taken, False)
        return (exported, lse) if return_lse else exported

    def _attend(
        self,
        memory: Memory,
        plan: DecodePlan,
        c: np.float32,
        query: np.ndarray,
        scale: Any,
        result: np.ndarray,
        changes: Changes | None,
    ) -> None:
        """Run a plan on a query (B, H, L, D) and write the result (B, H, L, Dv).

        changes : None for a plan that was made without options; others have those of their last call
        """
        rows = query.reshape(plan.shape)
        results = result.reshape((*plan.shape[:3], self.value_dim))
        if changes is not None:
            shift = None
            if self.smooth and changes.cap_or_functions:
                unit = 1.0 if changes.functions is not None else changes.softcap
                shift = cap_shift(query, memory.offset, memory.calls.factor(scale), unit)
            plan.change(changes, shift)
        plan(rows, c, memory.store, results)
        redo(memory, plan, query, scale, result, changes or NOTHING)

    @staticmethod
    def _decode_again(memory: Memory, query: np.ndarray, last: LastCall) -> np.ndarray:
        """`decode` of nothing but a query, of the same shape as in the last call, with the same plan.

        Skips the checks of options and two look-ups: 0.5 us, the time of 30 tokens.
        """
        c, free, make = last.made
        try:
            plan = free.pop()
        except IndexError:
            plan = make()
        try:
            result = np.empty(last.wanted, FLOAT32)
            plan(query, c, memory.store, result)
            if plan.again:
                redo(memory, plan, query, None, result, NOTHING)
        finally:
            free.append(plan)
        return result

    @staticmethod
    def _equal_decode(
        memory: Memory, query: np.ndarray, wanted: tuple[int, ...], asked: Asked
    ) -> np.ndarray:
        """A plain call like one before, but for functions, a soft cap and slopes: scale, splits and out
        are still to be checked.
        """
        changes = asked.changes_of(memory, query.shape)
        changed = changes is not NOTHING
        scale = asked.scale
        plan, c, free = memory.calls.take(query.shape, scale, asked.splits, memory.longest, changed)
        try:
            result, query = _place(asked.out, wanted, query)
            if changed:
                plan.change(changes, None)
            plan(query, c, memory.store, result)
            if plan.again:
                redo(memory, plan, query, scale, result, changes)
        finally:
            free.append(plan)
        return result

    @staticmethod
    def _query(query: Any) -> tuple[np.ndarray, Any]:
        """The query as contiguous float32, and what it came as where that was something else."""
        if is_float32(query):
            return query, None
        taken = floats("query", query)
        return to_float32(taken.array), taken

    def step(
        self,
        query: Any,
        key: Any,
        value: Any = None,
        *,
        scale: float | None = None,
        splits: int | None = None,
        out: np.ndarray | None = None,
    ) -> Any:
        """`append` and `decode` of one step in one call.

        On a card float32 NumPy arrays with as many new tokens as query rows go through a CUDA
        graph: captured at the first such call, launched again while the number of splits stays.

        Parameters
        ----------
        query : (B, H, n, D)
        key : (B, Hkv, n, D)
        value : (B, Hkv, n, Dv); None with `value_in_key`
        scale, splits, out
            As `decode` takes them.

        Returns
        -------
        out : (B, H, n, Dv) of the query's kind and dtype (float32 for float64), or `out` itself

        Raises
        ------
        CacheFullError, ArgumentError, ArgumentTypeError
            Nothing is appended by a call that raises one of these.
        """
        memory = self._memory or self._open()
        shared, equal = self.value_in_key, None
        plain = is_float32(query) and is_float32(key) and (shared or is_float32(value))
        if plain and not shared:
            equal = memory.calls.equal.get((query.shape, key.shape, value.shape))
        if equal is not None and out is None:
            result = self._equal_step(memory, equal, (query, key, value), scale, splits)
            if result is not None:
                return result
        asked = Asked(scale, splits, out)
        if not plain and is_traced():
            return untraced(self._step)(memory, query, key, value, asked)
        return self._step(memory, query, key, value, asked)

    def _step(self, memory: Memory, query: Any, key: Any, value: Any, asked: Asked) -> Any:
        """A step that is no equal one: in two calls, where `append` or `decode` have more to do."""
        given = (query, key) if self.value_in_key else (query, key, value)
        plain = all(is_float32(x) and x.ndim == 4 and x.size for x in given)
        scale, splits, out = asked.scale, asked.splits, asked.out
        if not plain or key.shape[2] != query.shape[2] or (self.device != "cpu" and self.smooth):
            rows, _ = self._query(query)
            # what it refuses is refused before a token is appended
            plan, _, free = memory.calls.take(rows.shape, scale, splits, memory.longest)
            free.append(plan)
            if out is not None:
                output(out, (*rows.shape[:-1], self.value_dim))
            key = floats("key", key).array if isinstance(key, (list, tuple)) else key
            if np.ndim(key) == 4:
                memory.refuse_dropped(rows.shape[2], key.shape[2])
            self.append(key, value)
            return self.decode(query, scale=scale, splits=splits, out=out)
        longest = memory.longest + key.shape[2]
        plan, c, free = memory.calls.take(query.shape, scale, splits, longest)
        try:
            shape = (*query.shape[:-1], self.value_dim)
            result, query = _place(out, shape, query)
            key, value, take, n = self._admitted(memory, key, value, None)
            if self.device == "cpu":
                memory.append(key, value, take, memory.store)
                plan(query, c, memory.store, result)
                if self._taken_as_is and not memory.settings.paged:
                    call = query.shape, key.shape, value.shape
                    memory.calls.equal[call] = EqualSteps(n, take, shape)
            else:
                self._captured_step(memory, plan, c, (key, value), query, take, result)
            redo(memory, plan, query, scale, result, NOTHING)
        finally:
            free.append(plan)
        return result

    @staticmethod
    def _captured_step(
        memory: Memory,
        plan: DecodePlan,
        c: np.float32,
        tokens: tuple[np.ndarray, np.ndarray],
        query: np.ndarray,
        take: np.ndarray,
        result: np.ndarray,
    ) -> None:
        """A step on a card: the captured one of this plan and factor."""
        steps = memory.calls.steps
        rows = query.reshape(plan.shape)
        results = result.reshape((*plan.shape[:3], -1))
        captured = steps.get((plan, float(c)))
        if captured is None:
            step = cast(Any, memory.backend).Step(memory.append, plan, c, memory.store)
            captured = steps[plan, float(c)] = step
        captured(*tokens, rows, take, results, memory.store)

    def _equal_step(
        self,
        memory: Memory,
        equal: EqualSteps,
        arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
        scale: Any,
        splits: Any,
    ) -> np.ndarray | None:
        """A step like one before; None where the tokens that are held make it another one."""
        query, key, value = arrays
        held = memory.store.lengths.tolist()
        longest = max(held) + equal.tokens
        full = longest > memory.settings.max_length and self.window is None
        if full or (self.smooth and not min(held)):
            return None
        plan, c, free = memory.calls.take(query.shape, scale, splits, longest)
        try:
            result = np.empty(equal.shape, F)
            memory.append(key, value, equal.take, memory.store)
            plan(query, c, memory.store, result)
            redo(memory, plan, query, scale, result, NOTHING)
        finally:
            free.append(plan)
        return result
