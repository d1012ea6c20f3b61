"""float32 forward for correctness, not for speed.

A warp per query row, no tensor cores, every option.

A lane holds the columns c with c % 32 = lane. Keys that a row does not attend to are never read, so
their values cannot matter.
"""

from __future__ import annotations

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .blocks import Call, make_find_block
from .float32_pairs import WARPS, bias_of, mask_allows, slope_of
from .score_functions import BATCHES, known, make_root, pointers_of
from .scores import LN2, LOG2E, add_bias, join_sink, tanh_accurate
from .softmax import NEG_INF, warp_sum

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
OWN = 11  # pointers before those of the functions

# pointers: q, k, v, o, lse, diagonal, key_lengths, mask, bias, slopes, sinks, then the functions'
# strides in bytes of the mask, then of the bias: batch, head, query, key
# sizes: queries, keys, d, dv, query heads, left, right
# factors: scale * log2(e), softcap * log2(e)
SIGNATURE = types.void(
    types.UniTuple(u64, OWN), types.UniTuple(i64, 8), types.UniTuple(i32, 7), types.UniTuple(f32, 2)
)


def flash_float32(
    d: int,
    dv: int,
    group: int = 1,
    mask: bool = False,
    bias: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    functions: str = "",
    folded: bool = False,
) -> Source:
    """The kernel for head sizes up to d and dv, multiples of 32; options as for `flash_float`."""
    changes, masks, hidden = known(functions).changes, known(functions).masks, bool(functions)
    new_score = make_root(OWN, functions, "score")
    lets_pass = make_root(OWN, functions, "mask")
    d_parts, dv_parts, find_block = d // 32, dv // 32, make_find_block(WARPS, folded=folded)

    @device_function
    def load_query(q_row, q, at, left, lane):
        """Row number `at` of q."""
        for i in range(d_parts):
            c = lane + 32 * i
            q_row[i] = (
                ptx.load_global_f32(q + (at * u64(left) + u64(c)) * u64(4)) if c < left else f32(0)
            )

    @device_function
    def multiply_key(q_row, k, at, left, lane):
        """The product of a query with row number `at` of k."""
        s = f32(0)
        for i in range(d_parts):
            c = lane + 32 * i
            if c < left:
                x = ptx.load_global_f32(k + (at * u64(left) + u64(c)) * u64(4))
                s = ptx.fma(q_row[i], x, s)
        return warp_sum(s)

    @device_function
    def attends(entry, batch, head, row, j, call):
        """Whether a row attends to key j, and what the bias adds to its score."""
        seen, added = True, f32(0)
        if mask:
            seen = mask_allows(call.pointers[7], call.strides, batch, head, row, j)
        if masks and seen:
            seen = lets_pass(f32(0), entry, head, row, i32(j), call.pointers)
        if bias:
            added = bias_of(call.pointers[8], call.strides, batch, head, row, j)
            seen = seen and added != NEG_INF
        return seen, added

    @device_function
    def apply_options(s, added, slope, away, entry, head, row, j, call):
        """What the call's options make of a score in units of log2; key j is `away` from the row's own."""
        cap = call.factors[1]
        if changes:
            s = new_score(s * LN2, entry, head, row, i32(j), call.pointers) * LOG2E
        if softcap:
            capped = cap * tanh_accurate(ptx.div(s, cap))
            s = NEG_INF if hidden and s == NEG_INF else capped  # as `make_adjust`
        if alibi:
            s -= slope * f32(abs(away))
        if bias:
            s = add_bias(s, added)
        return s

    @device_function
    def softmax(s, m, l):
        """m and l with one more score, what the output so far is multiplied by, and the score's weight."""
        top = ptx.fmax(m, s)
        safe = f32(0) if top == NEG_INF else top
        alpha, p = ptx.ex2(m - safe), ptx.ex2(s - safe)
        return top, l * alpha + p, alpha, p

    @device_function
    def add_value(o, alpha, p, v, at, left, lane):
        """O = O * alpha + p times row number `at` of v."""
        for i in range(dv_parts):
            c = lane + 32 * i
            if c < left:
                x = ptx.load_global_f32(v + (at * u64(left) + u64(c)) * u64(4))
                o[i] = ptx.fma(p, x, o[i] * alpha)

    @device_function
    def write(o, m, l, at, head, lane, call):
        """The row's output and LSE, with the head's sink; 0 and -inf of a row without keys."""
        o_out, lse_out, dv_left = call.pointers[3], call.pointers[4], call.sizes[3]
        share = f32(1)
        if sinks:
            sink = ptx.load_global_f32(call.pointers[10] + u64(head * 4)) * LOG2E
            m, l, share = join_sink(m, l, sink)
        share = f32(0) if l == f32(0) else share * ptx.rcp(l)
        for i in range(dv_parts):
            c = lane + 32 * i
            if c < dv_left:
                to = o_out + (at * u64(dv_left) + u64(c)) * u64(4)
                ptx.store_global_f32(to, o[i] * share)
        if lane == 0:
            lse = NEG_INF if l == f32(0) else (m + ptx.lg2(l)) * LN2
            ptx.store_global_f32(lse_out + at * u64(4), lse)

    def flash(pointers, strides, sizes, factors):
        call = Call(pointers, strides, sizes, factors)
        q, k, v = pointers[:3]
        queries, key_count, d_left, dv_left, heads, left, right = sizes
        lane, warp = i32(cuda.threadIdx.x) & 31, i32(cuda.threadIdx.x) >> 5
        first, head, batch = find_block(queries)
        row = first + warp
        if row < queries:
            at = u64((batch * heads + head) * queries + row)
            kv = u64((batch * (heads // group) + head // group) * key_count)
            q_row, o = cuda.local.array(d_parts, f32), cuda.local.array(dv_parts, f32)
            load_query(q_row, q, at, d_left, lane)
            for i in range(dv_parts):
                o[i] = f32(0)
            place = row + ptx.load_global_s32(pointers[5] + u64(batch * 4))
            keys = ptx.load_global_s32(pointers[6] + u64(batch * 4))
            slope = slope_of(pointers[9], batch, heads, head) if alibi else f32(0)
            entry = batch
            if changes or masks:
                entry = ptx.load_global_s32(pointers[OWN + BATCHES] + u64(batch * 4))
            m, l = NEG_INF, f32(0)
            for j in range(max(place - left, 0), min(keys, place + right + 1)):
                seen, added = attends(entry, batch, head, row, j, call)
                if seen:
                    s = multiply_key(q_row, k, kv + u64(j), d_left, lane) * factors[0]
                    s = apply_options(s, added, slope, place - j, entry, head, row, j, call)
                    m, l, alpha, p = softmax(s, m, l)
                    add_value(o, alpha, p, v, kv + u64(j), dv_left, lane)
            write(o, m, l, at, head, lane, call)

    own = types.void(pointers_of(OWN, functions), *SIGNATURE.args[1:])
    return Source(flash, own, 32 * WARPS)
