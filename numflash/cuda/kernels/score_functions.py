"""Score and mask functions in the float kernels: traced elsewhere, written into a kernel as LLVM IR.

A factory gets the name of a function's code, a hash of its content, and finds in `known` what
writes it. The kernel's pointers end in those of the functions: the frame of their constants and
array sizes, the batch entries as they see them, the listed tiles, then the captured arrays.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any, Protocol

from ..compile.target import cuda, device_function, intrinsic, signature, types
from ..instructions import ptx
from .scores import LOG2E
from .softmax import NEG_INF

i32, u64, f32 = types.int32, types.uint64, types.float32
FRAME, BATCHES, TILES, ARRAYS = range(4)  # places after the kernel's own pointers
KEPT = 256


class Code(Protocol):
    """What writes a score function, a mask function, or both."""

    changes: bool  # there is a score function
    masks: bool  # there is a mask function
    arrays: int  # captured arrays

    def write(self, builder: Any, root: str, values: Any, pointers: Any) -> Any:
        """The LLVM value of the root, "score" (float32) or "mask" (i1).

        `values` are the score, b, h, q and k, `pointers` the functions' own.
        """


class NoCode:
    """No function."""

    changes = masks = False
    arrays = -ARRAYS


_codes: OrderedDict[str, Code] = OrderedDict()


def keep(name: str, code: Code) -> None:
    """Make code known by a name that its content determines."""
    _codes[name] = code
    _codes.move_to_end(name)
    while len(_codes) > KEPT:
        _codes.popitem(last=False)


def known(name: str) -> Any:
    """The code of a name, or no code for ""."""
    return _codes[name] if name else NoCode


def pointers_of(own: int, name: str) -> Any:
    """The type of a kernel's pointers: its own and those of the functions."""
    return types.UniTuple(u64, own + ARRAYS + known(name).arrays)


@functools.cache
def make_root(own: int, name: str, root: str) -> Any:
    """f(score, b, h, q, k, pointers): the score function's value, or whether the mask function
    lets the key pass. Without such a function nobody may call it.
    """
    code = known(name)

    @intrinsic
    def value(typingctx, score, b, h, q, k, pointers):
        def lower(context, builder, sig, values):
            found = [builder.extract_value(values[5], n) for n in range(own, sig.args[5].count)]
            return code.write(builder, root, values[:5], found)

        given = types.float32 if root == "score" else types.boolean
        return signature(given, f32, i32, i32, i32, i32, pointers), lower

    return value


@functools.cache
def make_apply(own: int, name: str, root: str, key_tiles: int, part: int = 4) -> Any:
    """apply(s, first, rows: Rows, place: Place, scale, pointers).

    A function on a fragment of scores, as `make_adjust`. Root "score": scores times `scale` (natural
    units) become new ones in units of log2. Root "mask": hidden scores become -inf. Rows and keys
    beyond those of the problem count as its last ones: no index leaves an array.
    """
    part = min(part, key_tiles)
    turns, n_s, n_part = key_tiles // part, 4 * key_tiles, 4 * part
    code, changes = known(name), root == "score"

    @device_function
    def nothing(s, first, rows, place, scale, pointers):
        pass

    if not (code.changes if changes else code.masks):
        return nothing
    value = make_root(own, name, root)

    @device_function
    def apply(s, first, rows, place, scale, pointers):
        head, keys = rows.head, place.keys
        done, q = cuda.local.array(n_part, f32), cuda.local.array(2, i32)
        b = ptx.load_global_s32(pointers[own + BATCHES] + u64(place.batch * 4))
        for r in range(2):
            q[r] = ptx.imin(ptx.fresh(rows.query[r]), i32(place.queries - 1))
        for turn in range(turns):
            for n in range(part):
                for e in range(4):
                    j = ptx.imin(i32(first + 8 * (turn * part + n) + (e & 1)), i32(keys - 1))
                    x = s[4 * n + e]
                    if changes:
                        # rounded towards zero: only -infinity hides, not the lowest number
                        x = value(x * scale, b, head[e >> 1], q[e >> 1], j, pointers)
                        x = ptx.fma_toward_zero(x, LOG2E, f32(0))
                    elif not value(x, b, head[e >> 1], q[e >> 1], j, pointers):
                        x = NEG_INF
                    s[4 * n + e] = x
            if turns > 1:  # the fragment turns, a part at a time, and is never indexed
                for i in range(n_part):
                    done[i] = s[i]
                for i in range(n_s - n_part):
                    s[i] = s[i + n_part]
                for i in range(n_part):
                    s[n_s - n_part + i] = done[i]

    return apply


@functools.cache
def make_tile_list(own: int, listed: bool, block_k: int) -> tuple[Any, Any, Any, Any]:
    """The tiles of keys that a tile of rows visits: all of a range, or the listed ones in it.

    find(pointers, batch, heads, row, tile, tiles) gives an address and the range of numbers;
    start(at, n) the first key of tile number n; full(at, n) whether its mask hides nothing;
    within(at, tile, tiles, low, high) the range of numbers whose keys are all in [low, high). The
    list (int32) begins with its strides along batch and heads; a row has a count, then twice the
    number of each tile, plus 1 where it is full.
    """

    @device_function
    def find_all(pointers, batch, heads, row, tile, tiles):
        return u64(0), tile, tiles

    @device_function
    def start_all(at, n):
        return n * block_k

    @device_function
    def never_full(at, n):
        return False

    @device_function
    def entry(at, n):
        return ptx.load_global_s32(at + u64(n * 4))

    @device_function
    def find_listed(pointers, batch, heads, row, tile, tiles):
        base = pointers[own + TILES]
        place = i32(batch * entry(base, i32(0)) + heads * entry(base, i32(1)))
        at = base + u64((place + row * entry(base, i32(2)) + 3) * 4)
        count, n = entry(at, i32(0)), i32(0)
        at += u64(4)
        while n < count and entry(at, n) < 2 * tile:
            n += 1
        while n < count and entry(at, i32(count - 1)) >= 2 * tiles:
            count -= 1
        return at, n, i32(count)

    @device_function
    def start_listed(at, n):
        return i32((entry(at, n) >> 1) * block_k)

    @device_function
    def full_listed(at, n):
        return entry(at, n) & 1 != 0

    start = start_listed if listed else start_all

    @device_function
    def within(at, tile, tiles, low, high):
        while tile < tiles and start(at, tile) < low:
            tile += 1
        while tile < tiles and start(at, i32(tiles - 1)) + block_k > high:
            tiles -= 1
        return tile, i32(tiles)

    if listed:
        return find_listed, start, full_listed, within
    return find_all, start, never_full, within
