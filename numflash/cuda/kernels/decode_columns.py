"""The products of integer decode, whose columns are the query rows.

S^T = K . Q^T and O^T = V^T . P^T: a tensor core multiplies 16 keys, or channels, by 8 columns. Four
query rows in two planes of bytes are 8: the high plane of a row has an even column, the low one the
next. So four heads of a group fill every column, and every lane: it holds row lane % 4 of each such
group of rows, both planes. INT4's query has one plane: the odd columns are the next group's rows,
zeros where there is none.

Of a warp's 32 keys a lane holds four neighbours, whose weights are a word of the second product's
operand; so the eight keys of a matrix are four apart, and lie in shared memory as
`make_place(fours=True)` has them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...tiling import KEY_BLOCK
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .decode_codes import NUMBER_BITS, make_read_keys, make_read_values
from .decode_pieces import make_finish, spread_of, store_state
from .tiles import swizzle_of

i32, u32, f32 = types.int32, types.uint32, types.float32
GROUP = 4  # query rows
COLUMNS = 8
P_GROUP = COLUMNS * KEY_BLOCK  # bytes of a group's weights: a row for each column
KEPT = 128  # channels times tiles of columns: a query of so many stays in registers


class Lane(NamedTuple):
    """Where a lane reads its part of fragments with ldmatrix.

    The address of a row, and the place of its first chunk of 16 bytes: the others are an XOR away.
    """

    q: Any
    q_chunk: Any
    k: Any  # of the first 16 keys
    k_next: Any  # of the other 16
    k_chunk: Any
    v: Any
    v_chunk: Any
    p: Any
    p_chunk: Any


def column_tiles(groups: int, packed: bool) -> int:
    """Tiles of 8 columns of the scores of so many groups of rows."""
    return (groups + 1) // 2 if packed else groups


@device_function
def row_of(lane, i):
    """A lane's row of group i."""
    return i32((lane & 3) + GROUP * i)


@device_function
def first_key(lane, warp):
    """The first of a lane's four keys in a tile."""
    return i32(32 * warp + 4 * (lane >> 2))


@device_function
def row_max(x):
    """Over the eight lanes of a row, int32."""
    for n in range(3):
        x = ptx.imax(x, ptx.shuffle_xor_i32(x, u32(4 << n)))
    return x


@device_function
def row_sum(x):
    for n in range(3):
        x = i32(x + ptx.shuffle_xor_i32(x, u32(4 << n)))
    return x


def make_find_lane(d: int, k_bytes: int, v_rows: int, packed: bool) -> Any:
    """find_lane(memory, lane, warp) -> Lane.

    k_bytes : of a key;  v_rows : stored channels of a warp
    """
    shift_q, xor_q = swizzle_of(d)
    turn, shift, xor = spread_of(k_bytes)
    # four matrices are 8 rows of 64 bytes, or 16 rows of 32
    v_row = 7 if packed else 15

    @device_function
    def find_lane(memory, lane, warp):
        row, matrix, half = lane & 7, lane >> 3, lane >> 4
        key = 32 * warp + 4 * row
        odd = (matrix & 1) ^ (row & turn)
        return Lane(
            memory.q + u32(row * d),
            u32(matrix ^ ((row >> shift_q) & xor_q)),
            memory.k + u32((key + odd) * k_bytes),
            memory.k + u32((key + (odd ^ 2)) * k_bytes),
            u32(half ^ ((key >> shift) & xor)),
            memory.v + u32((warp * v_rows + (lane & v_row)) * KEY_BLOCK),
            u32((matrix if packed else half) ^ row),
            memory.p + u32(row * KEY_BLOCK),
            u32(matrix ^ row),
        )

    return find_lane


def make_multiply_keys(d: int, groups: int, packed: bool, turing: bool) -> tuple[Any, Any, int]:
    """(load_queries, multiply_keys, words of `qf`): S^T = K . Q^T of a warp's 32 keys, exact.

    load_queries(qf, at: Lane), multiply_keys(s, qf, at: Lane): s takes the lane's four keys of a
    group's row, group after group. `qf` has the whole query where registers hold it, else it is
    room for a fragment.
    """
    tiles, pairs = column_tiles(groups, packed), d // 64
    keep = tiles * d <= KEPT
    words, n_acc = 4 * tiles * pairs if keep else 4, 4 * tiles
    read_keys = make_read_keys(packed)
    mma = ptx.mma_turing_s8 if turing else ptx.mma_s8

    @device_function
    def load_query(qf, place, at, n, pair):
        ptx.ldmatrix(
            qf, place, at.q + u32(n * COLUMNS * d) + ((at.q_chunk ^ u32(4 * pair)) << u32(4))
        )

    @device_function
    def load_queries(qf, at):
        if keep:
            for n in range(tiles):
                for pair in range(pairs):
                    load_query(qf, 4 * (n * pairs + pair), at, n, pair)

    @device_function
    def multiply_keys(s, qf, at):
        acc = cuda.local.array(n_acc, i32)
        ka = cuda.local.array(8, u32)
        for t in range(2):  # 16 keys
            for i in range(n_acc):
                acc[i] = i32(0)
            for pair in range(pairs):  # 64 channels
                read_keys(ka, at.k_next if t else at.k, at.k_chunk, pair)
                for n in range(tiles):
                    place = 4 * (n * pairs + pair) if keep else 0
                    if not keep:
                        load_query(qf, 0, at, n, pair)
                    mma(acc, 4 * n, ka, 0, qf, place)
                    mma(acc, 4 * n, ka, 4, qf, place + 2)
            for i in range(groups):
                for j in range(2):
                    if packed:
                        x = acc[4 * (i >> 1) + 2 * j + (i & 1)] >> NUMBER_BITS
                    else:
                        x = i32(i32(acc[4 * i + 2 * j] << 7) + acc[4 * i + 2 * j + 1])
                    s[4 * i + 2 * t + j] = x

    return load_queries, multiply_keys, words


def make_add_values(value_tiles: int, groups: int, packed: bool, turing: bool) -> Any:
    """add_values(o, alpha, weight, at: Lane).

    O = O * alpha + (P . V) * weight for this warp's channels, tiles of 16: the product exact, each
    float operation rounded once. The low plane's bytes are twice its numbers.
    """
    divide, n_acc = 1 + (NUMBER_BITS if packed else 0), 4 * groups
    read_values = make_read_values(packed)
    mma = ptx.mma_turing_s8u8 if turing else ptx.mma_s8u8

    @device_function
    def add_values(o, alpha, weight, at):
        acc = cuda.local.array(n_acc, i32)
        va = cuda.local.array(8, u32)
        pb = cuda.local.array(4, u32)
        for n in range(value_tiles):
            for e in range(n_acc):
                acc[e] = i32(0)
            for half in range(2):  # 64 keys
                read_values(va, at.v, at.v_chunk, n, half)
                for i in range(groups):
                    at_p = at.p + u32(i * P_GROUP) + ((at.p_chunk ^ u32(4 * half)) << u32(4))
                    ptx.ldmatrix(pb, 0, at_p)
                    mma(acc, 4 * i, va, 0, pb, 0)
                    mma(acc, 4 * i, va, 4, pb, 2)
            for i in range(groups):
                for e in range(2):
                    both = i32(i32(acc[4 * i + 2 * e] << 8) + acc[4 * i + 2 * e + 1]) >> divide
                    at_o = 2 * (n * groups + i) + e
                    o[at_o] = ptx.add(
                        ptx.mul(o[at_o], alpha[i]), ptx.mul(ptx.to_float(i32(both)), weight[i])
                    )

    return add_values


def make_store(value_tiles: int, groups: int, direct: bool, one: float) -> Any:
    """store(to: Results, o, m, l, warp, lane): a block's results as the threads hold them."""
    reciprocal_of, store_value = make_finish(direct, one)

    @device_function
    def store(to, o, m, l, warp, lane):
        for i in range(groups):
            r = row_of(lane, i)
            if warp == 0 and lane < GROUP:
                store_state(to, r, m[i], l[i])
            reciprocal = reciprocal_of(l[i])
            for n in range(value_tiles):
                for e in range(2):
                    c = 16 * (warp * value_tiles + n) + (lane >> 2) + 8 * e
                    store_value(to, r, c, o[2 * (n * groups + i) + e], reciprocal)

    return store
