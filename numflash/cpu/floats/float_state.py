"""The named tuples of the float kernel: its operands, results, sizes, and what a worker keeps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..isa.strided import Strided


class Operands(NamedTuple):
    """Of N query heads and Nkv KV heads; a slot has the packed operands of one KV head.

    q, k, v : (B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv) float32, or bits of bfloat16: K and V as they
        are packed, in words of 32 bits where two numbers are one operand
    keys, values : (slots, ...) operands, or V itself (Nkv, S * Dv)
    magnitudes : (slots, panels) uint32 bits of the largest finite |k| of each panel
    limits : (slots,) float32 largest |q| whose scores stay finite
    stops : (B,) int64 keys of each batch that can be seen
    terms : products that a score adds up, times its scale where that is above 1
    """

    q: Strided
    k: Strided
    v: Strided
    keys: np.ndarray
    values: np.ndarray
    magnitudes: np.ndarray
    limits: np.ndarray
    stops: np.ndarray
    terms: float


class Results(NamedTuple):
    """out (B, H, L, Dv) float32, or bits of bfloat16 if `narrow`; lse (N, L) float32; redo (N, L) uint8: 1
    for a row float32 cannot hold.
    """

    out: Strided
    lse: np.ndarray
    redo: np.ndarray
    narrow: bool


class Sizes(NamedTuple):
    """What the arrays do not say.

    heads, kv_heads, keys : of a batch
    columns, value_row : of a row of V, without and with what is spare behind them
    block_q : rows of a query tile, whole groups
    workers : threads at most
    by_head : whether a worker packs the KV head whose tiles it computes, in the slot of its own
    in_place : whether `values` is V itself
    """

    heads: int
    kv_heads: int
    keys: int
    columns: int
    value_row: int
    block_q: int
    workers: int
    by_head: bool
    in_place: bool


class Tile(NamedTuple):
    """Query rows `row` to row + real - 1 of head h of batch b; the head is number n of all."""

    n: int
    b: int
    h: int
    row: int
    real: int


class Group(NamedTuple):
    """`rows` rows of a tile from row g on, and the keys `first` to `stop` - 1 of the block that
    begins at key `block`.
    """

    g: int
    rows: int
    first: int
    stop: int
    block: int


class State(NamedTuple):
    """What a worker keeps of one query tile; first, stop, skip are of its groups."""

    q: np.ndarray  # (block_q, channels) operands
    x: np.ndarray  # (block_q * (key_block + spare),) float32 scores
    p: np.ndarray  # the same number of weights as operands: x itself where these are float32
    o: np.ndarray  # (block_q, columns and what is spare) float32
    l: np.ndarray  # (block_q, lanes) float32 sums of the weights
    m: np.ndarray  # (block_q,) float32 maxima
    beyond: np.ndarray  # (block_q,) uint8: 1 where |q| is somewhere above the limit, or not finite
    lo: np.ndarray  # (block_q,) int64 first key that a row attends to
    hi: np.ndarray  # (block_q,) int64 the key after its last one
    first: np.ndarray  # int64 first key of a group in the present block
    stop: np.ndarray  # int64 the key after its last one
    skip: np.ndarray  # int64 scored keys before the first that any row attends to, in whole steps
