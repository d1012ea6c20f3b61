"""The planted faults, as data.

Where, what stands there, what is put in its place, and the tests that must notice.

A fault that no test can notice carries the reason why it changes nothing that matters.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One planted fault; `tests` are pytest's arguments."""

    file: str
    old: str
    new: str
    tests: str
    equivalent: str = ""


INT8 = "tests/cpu/test_combinations.py -k test_int8_by_pairs"
FLOATS = "tests/cpu/test_combinations.py -k test_floats_by_pairs"
PLANNED_INT8 = "tests/test_plans.py tests/cpu/test_quantize.py"
FLOAT_VALUES = "tests/cpu/test_int8_float_values.py"
BACKWARD = "tests/cpu/test_backward.py tests/cpu/test_backward_arrays.py"
OF_LSE = "tests/cpu/test_option_gradients.py -k lse"
PACKED_GRADIENTS = "tests/cpu/test_packed_gradients.py"
UNSEEN = "tests/cpu/test_unseen.py"
OVERFLOW = "tests/test_overflow.py"
VALIDATION = "tests/test_validation.py"
WRONG = "tests/test_wrong_arguments.py"
QUANTIZATION = "tests/test_quantization.py"
SCORES = "tests/test_scores.py"
MERGE = "tests/test_merge.py"
CACHE = "tests/cpu/test_decode_cache.py"
STATES = "tests/cpu/test_cache_sequences.py -k state_and_back"
RINGS = "tests/cpu/test_cache_sequences.py -k ring"
DECODE = "tests/cpu/test_decode_bits.py"
TORCH = "tests/pytorch/test_torch_operator.py tests/pytorch/test_sdpa.py"
MPI = "tests/mpi"
CUDA_FLOAT = "tests/cuda/test_flash_halves.py"
CUDA_INT8 = "tests/cuda/test_flash_int8.py"
CUDA_INT4 = "tests/cuda/test_decode_int4_cuda.py"
CUDA_QUANTIZED = "tests/cuda/test_quantized.py"
DECODE_FUNCTIONS = "tests/flex/test_decode_functions.py"
INT8_FUNCTIONS = "tests/flex/test_int8_functions.py"
ARGUMENTS = f"{VALIDATION} {WRONG}"

FLASH_INT8, FLOAT_WEIGHTS = "cpu/int8/flash_int8.py", "cpu/int8/float_weights.py"
BEGIN_ROWS, BLOCK_SCORES = "cpu/int8/begin_rows.py", "cpu/int8/block_scores.py"
FIRST_KEYS = "cpu/int8/first_keys.py"
WIDE_SCORES, HIDDEN_BLOCKS = "cpu/int8/wide_scores.py", "cpu/int8/hidden_blocks.py"
GROUP_WEIGHTS = "cpu/floats/group_weights.py"
FUNCTION_SCORES = "cpu/int8/function_scores.py"
CALL_INT8, BY_HEAD = "cpu/int8/call.py", "cpu/int8/by_head.py"
LAUNCH_INT8, GENERAL_INT8 = "cpu/launch_int8.py", "cpu/general_int8.py"
STREAM, STREAM_TESTS = "cpu/int8/amx_stream.py", "tests/cpu/test_amx_stream.py"
STREAM_PIECES = "cpu/int8/amx_stream_pieces.py"
QUANTISER, QUANTISER_TESTS = "cpu/int8/quantize.py", "tests/cpu/test_quantize.py"
QUANTISE_VALUES = "cpu/int8/quantize_values.py"
LAUNCH_FLOAT = "cpu/launch_float.py"
FEW_PRODUCTS = "cpu/floats/few_products.py"
FEW_GRADIENTS, FEW_GRADIENTS_TESTS = (
    "cpu/backward/few_gradients.py",
    "tests/cpu/test_few_gradients.py",
)
FEW_ROWS, FEW_ROWS_TESTS = "cpu/floats/few_rows.py", "tests/cpu/test_few_rows.py"

MUTANTS = [
    # ---- the INT8 kernel
    Mutant(FLASH_INT8, "min(stop, tile.real) - 1] - block.first", "i] - block.first", INT8),
    Mutant(
        BEGIN_ROWS,
        "state.l[i], state.m[i] = F(0), I(UNSEEN)",
        "state.l[i], state.m[i] = F(1), I(UNSEEN)",
        INT8,
    ),
    Mutant(BEGIN_ROWS, "    state.o[first:stop] = F(0)", "    state.o[:1] = F(0)", INT8),
    Mutant(
        WIDE_SCORES,
        "(octave[i] > HIGHEST) |",
        "(octave[i] > HIGHEST + 1) |",
        "tests/cpu/test_int8_bits.py",
    ),
    Mutant(
        HIDDEN_BLOCKS, "seen |= dense.mask[at + j] != 0", "seen |= dense.mask[at + j] == 0", INT8
    ),
    Mutant(FLASH_INT8, "h * sizes.kv_heads // sizes.heads", "h % sizes.kv_heads", INT8),
    Mutant(
        WIDE_SCORES,
        "wide[i, j] = HIDDEN_WIDE\n                for j in range(tile.hi",
        "pass\n                for j in range(tile.hi",
        INT8,
    ),
    Mutant(
        BLOCK_SCORES,
        "changes = job.options_end",
        "changes = job.options",
        "tests/cpu/test_combinations.py -k test_int8_by_pairs",
        equivalent="What is read of mask and bias behind the last key is hidden afterwards by the row's bounds.",
    ),
    Mutant(WIDE_SCORES, "state.spoiled[i] = 1", "state.spoiled[i] = 0", INT8),
    Mutant(
        "cpu/int8/blocks.py",
        "return wide_rows.floats_of(isa_name, pv).rows",
        "return VECTOR_ISAS[isa_name].rows[-1]",
        FLOAT_VALUES,
    ),
    Mutant(FLOAT_WEIGHTS, "SIXTEEN = 16 << 8", "SIXTEEN = 12 << 8", FLOAT_VALUES),
    Mutant(FLOAT_WEIGHTS, '"usub.sat", bits, below', '"usub.sat", bits, word(0)', FLOAT_VALUES),
    Mutant(GENERAL_INT8, "ck = np.where(bad, F(np.nan), ck)", "pass", INT8),
    Mutant(GENERAL_INT8, "one = fx.WEIGHT_ONE[problem.pv]", "one = fx.P_ONE", INT8),
    Mutant(
        "cpu/int8/microkernels.py",
        "b.shl(x, isa.fill(b, i32s, 8)) for row in high",
        "b.shl(x, isa.fill(b, i32s, 7)) for row in high",
        "tests/cpu/test_combinations.py -k test_int8_by_pairs",
    ),
    # ---- the stream of AMX
    Mutant(STREAM_PIECES, "constant(eight, 255))", "constant(eight, 254))", STREAM_TESTS),
    Mutant(
        STREAM_PIECES,
        "b.lshr(y, word(8))), word(128))",
        "b.lshr(y, word(8))), word(127))",
        STREAM_TESTS,
    ),
    Mutant(STREAM_PIECES, "b.fadd(b.fmul(l, shrink), ", "b.fadd(l, ", STREAM_TESTS),
    Mutant(
        STREAM,
        "            if tile.hi[r] <= tile.lo[r]:",
        "            if False:",
        STREAM_TESTS,
        equivalent="A row without keys has the octave of hidden scores, which ends the stream: slower, same bits.",
    ),
    Mutant(STREAM, "        if kv.wide[c // KEY_BLOCK] != 0:", "        if False:", STREAM_TESTS),
    Mutant(STREAM, "address(scratch)) == count", "address(scratch)) >= 0", STREAM_TESTS),
    Mutant(STREAM, "BEFORE + count\n    for near", "BEFORE\n    for near", STREAM_TESTS),
    Mutant(FLASH_INT8, "sizes, scratch.turns[1]", "sizes, scratch.turns[0]", STREAM_TESTS),
    Mutant(FLASH_INT8, "again, slots = waiting, 1", "again, slots = 0, 1", STREAM_TESTS),
    Mutant(
        FLASH_INT8, "first, stop = 0, max(stop, waiting)", "first, stop = 0, waiting", STREAM_TESTS
    ),
    Mutant(FLASH_INT8, " or turns + most > TURNS", "", STREAM_TESTS),
    Mutant(FLASH_INT8, "and most_turns(block_q, sizes.keys) <= TURNS", "", STREAM_TESTS),
    Mutant(
        FLASH_INT8,
        "if may_wait and stop >= span.stop:",
        "if may_wait:",
        STREAM_TESTS,
    ),
    Mutant(
        FIRST_KEYS,
        "I64(r), last) for r in range(rows)",
        "I64(r), I64(r)) for r in range(rows)",
        "tests/cpu/test_arrays_at_the_end.py",
    ),
    Mutant(
        STREAM, "                if sight == EDGE or", "                if False and", STREAM_TESTS
    ),
    Mutant(STREAM, "FIRST_EDGE if c < tile.first_keys else NO_EDGE", "NO_EDGE", STREAM_TESTS),
    Mutant(BLOCK_SCORES, "            hide_first(x, tile, block)", "            pass", INT8),
    Mutant(
        "cpu/int8/softmax_vectors.py",
        "store(b, b.fmul(power_of_two(b, above), own), ps, i, 4)",
        "store(b, power_of_two(b, above), ps, i, 4)",
        INT8,
    ),
    Mutant(
        "cpu/int8/softmax_vectors.py",
        "factor(1, fx.EIGHTH_OCTAVE))",
        "factor(1, 1.0))",
        INT8,
    ),
    Mutant(
        "cpu/int8/portable.py",
        "scale = F(scale * below_octave(top))",
        "scale = F(scale)",
        INT8,
    ),
    Mutant(
        "numerics/fixedpoint.py",
        "return EIGHTHS[-(top >> 5) & 7]",
        "return EIGHTHS[(top >> 5) & 7]",
        "tests/test_fixedpoint.py",
    ),
    Mutant(
        FLASH_INT8,
        "lo[i] = max(start[i], first_keys)",
        "lo[i] = start[i]",
        INT8,
    ),
    Mutant(
        STREAM,
        "min(stop, near + NEAR * KEY_BLOCK)",
        "min(stop, near + (NEAR - 1) * KEY_BLOCK)",
        STREAM_TESTS,
    ),
    Mutant(
        FLASH_INT8,
        "min(first_keys.number, sizes.keys)",
        "first_keys.number",
        "tests/flex/test_tracing.py -k beyond and int8",
    ),
    # ---- the one-pass quantiser
    Mutant(QUANTISER, "total += sums[c, e]", "total = sums[c, e]", QUANTISER_TESTS),
    Mutant(QUANTISER, "F(max(count, 1))", "F(count + 1)", QUANTISER_TESTS),
    Mutant(QUANTISER, "max(bits[e], chunk[e])", "chunk[e]", QUANTISER_TESTS),
    Mutant(QUANTISER, "usable = peak > NO_SCALE", "usable = True", QUANTISER_TESTS),
    Mutant(QUANTISER, "= F(1) if p + c < x.length else F(0)", "= F(0)", QUANTISER_TESTS),
    Mutant(QUANTISER, "source.lengths[n // source.k.heads]", "source.lengths[0]", QUANTISER_TESTS),
    Mutant(QUANTISE_VALUES, "if count == 2 else U(0xFFFF)", "", QUANTISER_TESTS),
    Mutant(
        CALL_INT8,
        "q_most * abs(unit) >= LIMIT",
        "False",
        QUANTISER_TESTS,
    ),
    Mutant("numerics/quantization.py", "HUGE = F(2.0**96)", "HUGE = F(np.inf)", FLOAT_VALUES),
    # ---- planned INT8 calls
    Mutant(CALL_INT8, "if top >= PLAIN_BITS or", "if", PLANNED_INT8),
    Mutant(CALL_INT8, "    counter[0] = 0\n", "", PLANNED_INT8),
    Mutant(CALL_INT8, "    counter[1] = 0\n", "", PLANNED_INT8),
    Mutant(CALL_INT8, "        wide[:] = 0\n", "", PLANNED_INT8),
    Mutant(CALL_INT8, "if max(top_q * abs(f.unit), top_k) >= LIMIT:", "if False:", PLANNED_INT8),
    # ---- a worker makes the operands of the heads that it attends to
    Mutant(BY_HEAD, "softcap, most >= MOST)", "softcap, False)", PLANNED_INT8),
    Mutant(BY_HEAD, "if most >= TOO_LARGE:", "if False:", QUANTISER_TESTS),
    Mutant(BY_HEAD, "min(first + together, n_kv)", "first + together", QUANTISER_TESTS),
    Mutant(BY_HEAD, "1, first - slot)", "1, first)", QUANTISER_TESTS),
    Mutant(FLASH_INT8, "v_scale[n_kv + part.before]", "v_scale[n_kv]", QUANTISER_TESTS),
    Mutant(QUANTISER, "place = n - run.before", "place = 0", QUANTISER_TESTS),
    Mutant(QUANTISER, "run.slot + place", "place", QUANTISER_TESTS),
    Mutant("cpu/head_shares.py", " and n_kv >= least * workers", "", QUANTISER_TESTS),
    Mutant("cpu/head_shares.py", "min(share, (enough", "max(share, (enough", QUANTISER_TESTS),
    Mutant(
        "cpu/plan.py",
        "return addresses(*turned, last), strides",
        "return addresses(*turned, last), None",
        "tests/cpu/test_flash_float.py -k strides",
    ),
    # ---- what both share
    Mutant(
        "cpu/semantics.py",
        "max(0, centre - left)",
        "max(0, centre - left + 1)",
        INT8,
    ),
    Mutant("cpu/semantics.py", "centre + right + 1)", "centre + right)", INT8),
    Mutant(
        "cpu/semantics.py",
        "semantics.right, min(semantics.key_lengths[b], s)",
        "semantics.right, s",
        INT8,
    ),
    Mutant(
        "cpu/semantics.py",
        "centre = i + semantics.diagonal[b]",
        "centre = i + semantics.diagonal[0]",
        INT8,
    ),
    Mutant(
        "cpu/semantics.py",
        "return x.shape[3] if x.shape[2] > 1 else 0",
        "return x.shape[3]",
        "tests/cpu/test_flash_float.py -k masks_of_every_shape",
    ),
    # ---- the float kernels
    Mutant(
        LAUNCH_FLOAT,
        "(strides[OF_VALUES] == self.strides[OF_VALUES]).all()",
        "True",
        "tests/cpu/test_flash_float.py -k values_in_place",
    ),
    Mutant(
        LAUNCH_FLOAT,
        "nbytes = self.bytes_in_place if choice[1] else self.layout.nbytes",
        "nbytes = self.layout.nbytes if choice[1] else self.bytes_in_place",
        "tests/cpu/test_flash_float.py -k take_scratch",
    ),
    Mutant(
        "cpu/floats/flash_float.py",
        "x.values[n_kv if sizes.in_place else slot]",
        "x.values[slot]",
        "tests/cpu/test_flash_float.py -k values_in_place",
    ),
    Mutant(
        "cpu/floats/flash_float.py",
        "slot = worker\n",
        "slot = 0\n",
        "tests/cpu/test_flash_float.py -k heads_that_workers",
    ),
    Mutant(
        "cpu/floats/float_packing.py",
        "top = max(top, magnitudes[p])",
        "top = magnitudes[p]",
        "tests/cpu/test_flash_float.py -k partial_sum",
    ),
    Mutant(
        "cpu/isa/dot_loop.py",
        "first = b.mul(turns, I64(unroll))",
        "first = b.mul(b.add(turns, I64(1)), I64(unroll))",
        FLOATS,
    ),
    Mutant(GROUP_WEIGHTS, "row[t] = row[t] * shrink", "row[t] = row[t]", FLOATS),
    Mutant(GROUP_WEIGHTS, "sums[t] = sums[t] * shrink", "sums[t] = sums[t]", FLOATS),
    Mutant(
        GROUP_WEIGHTS,
        "lanes, seen, end - at)",
        "lanes, seen - 1, end - at)",
        FLOATS,
    ),
    Mutant(
        GROUP_WEIGHTS,
        "0, seen_stop - inner)",
        "0, seen_stop + 1 - inner)",
        FLOATS,
    ),
    Mutant(
        GROUP_WEIGHTS,
        "fits = bias_at + some * lanes <= bias.size",
        "fits = True",
        "tests/cpu/test_arrays_at_the_end.py",
    ),
    Mutant(
        GROUP_WEIGHTS,
        "bias_end[j] = bias[bias_at + whole * lanes + j]",
        "bias_end[j] = bias[bias_at + j]",
        FLOATS,
    ),
    Mutant(
        GROUP_WEIGHTS,
        "mask_end[j] = mask[mask_at + whole * lanes + j]",
        "mask_end[j] = mask[mask_at + j]",
        FLOATS,
    ),
    Mutant(
        GROUP_WEIGHTS, "slope = semantics.slopes[b, h]", "slope = semantics.slopes[b, 0]", FLOATS
    ),
    Mutant(
        "cpu/floats/query_rows.py",
        "state.q[tile.real : groups] = operand(0)",
        "pass",
        FLOATS,
        equivalent="Rows behind the last one are computed from old operands and stored by nobody.",
    ),
    Mutant(LAUNCH_FLOAT, " | may_overflow(problem)", "", OVERFLOW),
    Mutant(
        LAUNCH_FLOAT,
        'todo = np.flatnonzero(at_address(redo, (nb * nh * length,), "|u1"))',
        "todo = np.zeros(0, np.intp)",
        OVERFLOW,
    ),
    # ---- gradients
    Mutant(
        "cpu/backward/held.py",
        "delta -= np.float64(given.grad_lse[n, i])",
        "delta += np.float64(given.grad_lse[n, i])",
        OF_LSE,
    ),
    Mutant("dispatch/option_gradients.py", "delta -= grad_lse", "delta += grad_lse", OF_LSE),
    Mutant(
        "cuda/kernels/backward_rows.py",
        "total -= ptx.load_global_f32(pointers[4] + place)",
        "total += ptx.load_global_f32(pointers[4] + place)",
        "tests/cuda/test_flash_backward.py -k computed_from_the_lse",
    ),
    Mutant(
        "torch/nodes.py",
        "*options, *wanted, grad_lse)",
        "*options, *wanted, None)",
        "tests/pytorch/test_torch_gradients.py -k computed_from_the_lse",
    ),
    Mutant(
        "torch/flex.py",
        "grad_out, *tensors, grad_lse",
        "grad_out, *tensors, None",
        "tests/pytorch/test_torch_gradients.py -k computed_from_the_lse",
    ),
    Mutant(
        "dispatch/packed.py",
        "return problem.changed(query=own(problem.query, 0)), (",
        "return problem, (",
        PACKED_GRADIENTS,
    ),
    Mutant(
        "cuda/arrays/calls.py",
        "(*results, stats), *others)",
        "(*results, stats))",
        "tests/cuda/test_equal_device_calls.py -k launches_what",
    ),
    Mutant(
        "torch/gradients.py",
        "again(query, key, value, None, grad_out, out, lse, grad_lse)",
        "again(query, key, value, None, grad_out, out, lse, lse)",
        "tests/pytorch/test_equal_calls.py -k of_a_card",
    ),
    Mutant("cpu/backward/held.py", "abs(lse) < LARGEST_LSE", "abs(lse) <= np.inf", BACKWARD),
    Mutant("cpu/backward/tiled.py", "return max(1.0, abs(problem.scale))", "return 0.0", BACKWARD),
    Mutant(
        "cpu/backward/head_rows.py",
        "array_at(start + r * out.row, (out.d,), np.float32), parts[n, 0, r]",
        "array_at(start + r * out.d * 4, (out.d,), np.float32), parts[n, 0, r]",
        "tests/pytorch/test_equal_gradients.py",
    ),
    Mutant(
        "cpu/backward/head_rows.py",
        "for p in range(1, parts.shape[1]):",
        "for p in range(2, parts.shape[1]):",
        BACKWARD,
    ),
    Mutant(
        "cpu/backward/head_rows.py",
        "if i < length and not is_skipped(skip, n, i):",
        "if i < length:",
        BACKWARD,
    ),
    Mutant(
        "cpu/backward/held.py",
        "found.hidden[n, j] = j >= length or of_key >= INFINITE or of_value >= INFINITE",
        "found.hidden[n, j] = j >= length or of_key >= INFINITE",
        BACKWARD,
    ),
    Mutant(
        "cpu/backward/flash_backward.py",
        "take(x.k, x.hidden, n_kv",
        "take(x.k, x.hidden[:0], n_kv",
        BACKWARD,
    ),
    Mutant(
        "cpu/backward/flash_backward.py",
        "            head.dq[: length + mr] = F(0)\n",
        "",
        BACKWARD,
    ),
    Mutant(
        "cpu/backward/flash_backward.py",
        "at % panel * group",
        "at % half * group",
        BACKWARD,
    ),
    Mutant(
        "torch/gradients.py",
        "    return held\n",
        "    return True\n",
        "tests/pytorch/test_equal_calls.py -k gradients_of_equal",
    ),
    Mutant(
        "torch/gradients.py",
        "like if x.is_cpu and like.stride(3) == 1 else",
        "like if x.is_cpu else",
        "tests/pytorch/test_equal_gradients.py -k lie_as_their",
    ),
    Mutant(
        "torch/gradients.py",
        "found = [_memory_for(x) for x in (query, key, value)]\n    scores",
        "found = [x.new_empty(x.shape) for x in (query, key, value)]\n    scores",
        "tests/pytorch/test_equal_gradients.py -k lie_as_their",
    ),
    Mutant(
        "dispatch/plan_store.py",
        "if problem.precision != given or not _runs_on_cpu(problem, impl):",
        "if not _runs_on_cpu(problem, impl):",
        "tests/pytorch/test_torch_operator.py -k have_equal_bits",
    ),
    Mutant(
        "cpu/backward/call.py",
        "strided_at(strides, 3, do,",
        "strided_at(strides, 4, do,",
        "tests/pytorch/test_equal_gradients.py -k change_bits",
    ),
    Mutant(
        "cpu/launch_backward.py",
        "if options is not None:",
        "if options is None:",
        "tests/pytorch/test_equal_calls.py -k follow_the_options",
    ),
    Mutant(
        "cpu/launch_backward.py",
        "self.plans.get(threads)",
        "next(iter(self.plans.values()), None)",
        "tests/pytorch/test_equal_calls.py -k gradients_of_equal",
    ),
    # ---- quantisation and scales
    Mutant(
        "numerics/quantize_kernels.py",
        "NO_SCALE = F(2.0**-100)",
        "NO_SCALE = F(0)",
        f"{QUANTIZATION} tests/cpu/test_quantize.py",
    ),
    Mutant(
        "numerics/quantize_kernels.py",
        "CHUNK = 1024",
        "CHUNK = 512",
        QUANTIZATION,
        equivalent="Statistics are per chunk: sums of another order, within the tests' and the definition's freedom.",
    ),
    Mutant(
        "numerics/quantize_kernels.py",
        "if top < INFINITE:\n            for d in range(row.size):\n                total[d]",
        "if top <= INFINITE:\n            for d in range(row.size):\n                total[d]",
        QUANTIZATION,
    ),
    Mutant(
        "numerics/quantization.py",
        "np.repeat(per_row, self.block, -1)[..., :length]",
        "np.repeat(per_row, KEY_BLOCK, -1)[..., :length]",
        f"{QUANTIZATION} tests/test_api.py",
    ),
    Mutant(
        "numerics/quantization.py",
        "x[self.nonfinite] = np.nan",
        "pass",
        f"{QUANTIZATION} tests/test_api.py",
    ),
    Mutant(
        "numerics/quantization.py",
        "(low is None or low.flags.carray)",
        "True",
        "tests/test_plans.py -k strided",
    ),
    Mutant("numerics/scores.py", "cq = np.where(q.nonfinite, F(np.nan), cq)", "pass", SCORES),
    Mutant(
        "numerics/scores.py", "np.clip(cq * F(unit), F(-LIMIT), F(LIMIT))", "cq * F(unit)", SCORES
    ),
    Mutant(
        "numerics/scores.py",
        "return scale / softcap if softcap else",
        "return scale if softcap else",
        SCORES,
    ),
    Mutant(
        "numerics/scores.py", "[:, :, 0]) * q.row_scale() * scale", "[:, :, 0]) * scale", SCORES
    ),
    Mutant(
        "numerics/scores.py",
        "np.where(lse == -np.inf, lse, np.maximum(lse, LOWEST))",
        "np.maximum(lse, LOWEST)",
        SCORES,
    ),
    Mutant(
        "numerics/fixedpoint.py",
        "P_ONE = 255",
        "P_ONE = 256",
        "tests/test_fixedpoint.py tests/test_scores.py",
    ),
    # ---- merging
    Mutant(
        "numerics/merge.py",
        "shift = np.where(top == -np.inf, 0, top)",
        "shift = np.where(top == np.inf, 0, top)",
        MERGE,
    ),
    Mutant(
        "numerics/merge.py",
        "np.where(total == 0, 0, b / total)",
        "np.where(total == 0, 0, a / total)",
        MERGE,
    ),
    Mutant(
        "numerics/merge.py",
        "np.where(share[..., None] == 0, 0, weighted)",
        "weighted",
        f"{MERGE} {OVERFLOW}",
    ),
    Mutant(
        "numerics/merge.py",
        "np.where((x == top) & (top == np.inf), 1, np.exp(x - shift))",
        "np.exp(x - shift)",
        OVERFLOW,
    ),
    Mutant(
        "cpu/int8/tile_scratch.py",
        "ROWS = 8 ",
        "ROWS = 1 ",
        "tests/test_tiling.py -k changes_the_kernel_and_no_bit",
    ),
    Mutant(
        "cache/damage.py",
        "_check_values(settings, given)\n    lengths",
        "lengths",
        "tests/cpu/test_cache_sequences.py -k values_elsewhere",
    ),
    # ---- few rows
    Mutant(FEW_ROWS, "spoiled[r] = np.uint8(1)", "pass", FEW_ROWS_TESTS),
    Mutant(FEW_ROWS, "return HIDDEN, redo or uncertain", "return HIDDEN, redo", FEW_ROWS_TESTS),
    Mutant(
        FEW_ROWS, "begin + (part + 1) * share)", "begin + (part + 1) * share - 1)", FEW_ROWS_TESTS
    ),
    Mutant(FEW_PRODUCTS, "for j in range(at, at + seen):", "for j in range(0):", FEW_ROWS_TESTS),
    Mutant(
        FEW_PRODUCTS,
        "at + max(seen, seen_stop), at + end",
        "at + max(seen, seen_stop), at + count",
        FEW_ROWS_TESTS,
    ),
    Mutant(FEW_ROWS, "l[t] = l[t] * shrink", "pass", FEW_ROWS_TESTS),
    Mutant(
        FEW_ROWS,
        "out[t] += few.out[n, part, r, t] * factor",
        "out[t] += few.out[n, part, r, t]",
        FEW_ROWS_TESTS,
    ),
    Mutant(FEW_PRODUCTS, "return Block(room, nbytes)", "return Block(room, k.row)", FEW_ROWS_TESTS),
    # ---- gradients of few rows
    Mutant(FEW_GRADIENTS, "spoiled |= leaves(", "leaves(", FEW_GRADIENTS_TESTS),
    Mutant(FEW_GRADIENTS, "spoiled |= times(", "times(", FEW_GRADIENTS_TESTS),
    Mutant(
        FEW_GRADIENTS,
        "spoiled |= not abs(out[e]) <= LARGEST",
        "spoiled |= False",
        FEW_GRADIENTS_TESTS,
    ),
    Mutant(
        FEW_GRADIENTS, "unchanged = slope if sloped else dp", "unchanged = dp", FEW_GRADIENTS_TESTS
    ),
    Mutant(FEW_GRADIENTS, "clear(out, n, last, block_stop)", "pass", FEW_GRADIENTS_TESTS),
    Mutant(
        FEW_GRADIENTS,
        "for part in range(1, parts):",
        "for part in range(2, parts):",
        FEW_GRADIENTS_TESTS,
    ),
    Mutant(
        FEW_GRADIENTS,
        " and given.lse[n, i] != F(-np.inf)",
        "",
        f"{FEW_GRADIENTS_TESTS} -k see_nothing",
    ),
    Mutant(
        "cpu/backward/plans.py",
        "problem.functions is not None or ",
        "",
        f"{FEW_GRADIENTS_TESTS} -k which_gradients",
    ),
    # ---- arguments
    Mutant(
        "validation/operands.py",
        "if k[1] != q[1]:\n        if not enable_gqa:",
        "if k[1] > q[1]:\n        if not enable_gqa:",
        ARGUMENTS,
    ),
    Mutant(
        "validation/option_arrays.py",
        "if not (np.abs(array) <= LARGEST_PER_HEAD).all():",
        "if (np.abs(array) > LARGEST_PER_HEAD).any():",
        ARGUMENTS,
    ),
    Mutant(
        "validation/option_arrays.py",
        "if array.shape != (batch,):",
        "if array.shape[0] != batch:",
        ARGUMENTS,
    ),
    Mutant(
        "validation/operands.py", "if not 2 <= x.ndim <= 4:", "if not 2 <= x.ndim <= 5:", ARGUMENTS
    ),
    Mutant(
        "validation/operands.py",
        'for axis, word in ((0, "batch"), (1, "heads")):',
        'for axis, word in ((0, "batch"),):',
        ARGUMENTS,
    ),
    Mutant(
        "interop/arguments.py",
        "if not isinstance(value, (bool, np.bool_)):",
        "if not isinstance(value, (bool, np.bool_, int)):",
        ARGUMENTS,
    ),
    Mutant(
        "interop/arguments.py",
        "if not (np.isfinite(number) and number >= low):",
        "if not number >= low:",
        ARGUMENTS,
    ),
    Mutant(
        "interop/arguments.py",
        "if isinstance(value, NOT_MASKS):",
        "if isinstance(value, (int, float)) and not isinstance(value, bool):",
        f"{ARGUMENTS} tests/test_api.py",
    ),
    # ---- the KV cache
    Mutant(
        "cache/appending.py",
        "over = held + take > most",
        "over = held + take > most + 1",
        "tests/cpu/test_decode_arguments.py",
    ),
    Mutant(
        "cache/appending.py",
        "        if self.window is None and memory.longest + n > memory.settings.max_length:",
        "        if False:",
        "tests/cpu/test_decode_arguments.py",
    ),
    Mutant(
        "cache/appending.py",
        "offset_of(key[b, :, : take[b]], memory.settings)",
        "offset_of(key[b], memory.settings)",
        f"{UNSEEN} tests/cpu/test_decode_smooth.py",
    ),
    Mutant(
        "cache/smoothing.py",
        "moved = means + (first - _storable(first, settings))",
        "moved = means - (first - _storable(first, settings))",
        "tests/cpu/test_decode_smooth.py",
    ),
    Mutant("cache/pages.py", "if total > free.size:", "if total > free.size + 1:", CACHE),
    Mutant(
        "cache/pages.py",
        "table[b, before[b] : after[b]] = free[start : start + need[b]]\n        start += int(need[b])",
        "table[b, before[b] : after[b]] = free[start : start + need[b]]",
        CACHE,
    ),
    Mutant(
        "cache/pages.py",
        "row = table[source, : whole + (rest > 0)].copy()",
        "row = table[source, : whole + (rest > 0)]",
        "tests/cpu/test_decode_cache.py tests/cpu/test_cache_sequences.py",
    ),
    Mutant(
        "cache/pages.py",
        "partial = lengths[index] % size > 0",
        "partial = lengths[index] % size > 1",
        "tests/cpu/test_cache_sequences.py",
    ),
    Mutant(
        "cpu/decode/register_tiles.py",
        "high, low = _planes(b, tile, operands, [zero, last]",
        "low, high = _planes(b, tile, operands, [zero, last]",
        DECODE,
    ),
    Mutant(
        "cpu/decode_layout.py",
        "self.slot_bytes * self.tile.packed",
        "self.slot_bytes",
        "tests/cpu/test_decode_calls.py -k plans_of_one_thread",
    ),
    Mutant(
        "torch/routing.py",
        "precision=self.precision, pv=self.pv)",
        "precision=self.precision)",
        "tests/pytorch/test_routing.py",
    ),
    Mutant(
        "cpu/decode/append_int4.py",
        "k_scale, v_scale = F(np.nan), F(0)",
        "k_scale, v_scale = F(0), F(0)",
        "tests/cpu/test_decode_int4.py -k finite",
    ),
    Mutant(
        "cpu/decode/append_int4.py",
        "if won > gain:",
        "if won < gain:",
        "tests/cpu/test_decode_int4.py -k storage",
    ),
    Mutant(
        "cpu/decode/tile_rows.py",
        "query.options.mask.size > 0",
        "query.options.mask.size < 0",
        "tests/cpu/test_decode_options.py -k attends_to_nothing",
    ),
    Mutant("cache/memory.py", "oldest[chosen] = 0", "pass", RINGS),
    Mutant(
        "cpu/decode/row_changes.py",
        "x = b.fadd(b.fmul(x, inverse), shift)",
        "x = b.fmul(x, inverse)",
        "tests/cpu/test_decode_options.py -k bits",
    ),
    Mutant(
        "cpu/decode/integer_blocks.py",
        "fx.QUERY_ONE if packed == 1 else fx.CODE_QUERY_ONE",
        "fx.QUERY_ONE",
        "tests/cpu/test_decode_int4.py -k eight",
    ),
    Mutant(
        "cache/decode_options.py",
        " and not changes.softcap",
        "",
        "tests/flex/test_decode_functions.py -k soft_cap",
    ),
    Mutant(
        "machinecode/codegen.py",
        "types.pop(reference, None)",
        "pass",
        "tests/test_codegen.py -k typed_where",
    ),
    Mutant(
        "cpu/isa/transpose.py",
        "shuffle(b, x, y, low), shuffle(b, x, y, high)",
        "shuffle(b, x, y, high), shuffle(b, x, y, low)",
        "tests/cpu/test_decode_latent.py",
    ),
    Mutant("cache/damage.py", ".any(-1) & ~bad).any()", ".any(-1) & bad).any()", STATES),
    Mutant("cache/damage.py", "(oldest > lengths)", "(oldest < 0)", STATES),
    Mutant("cache/damage.py", "and (rest >= 0).all()", "", STATES),
    Mutant(
        "cache/contents.py",
        'oldest=np.array(given["oldest"])',
        "oldest=memory.oldest",
        RINGS,
    ),
    Mutant("cache/exact.py", "    if not s.size:", "    if False:", UNSEEN),
    Mutant("cache/exact.py", "max(top * LOG2E, LOWEST)", "top * LOG2E", OVERFLOW),
    Mutant(
        "cache/decoding.py",
        "seen &= (held > at - window)",
        "seen &= (held >= at - window)",
        f"{UNSEEN} {CACHE} tests/cpu/test_decode_options.py",
    ),
    Mutant(
        "cpu/decode/append.py",
        "return position if behind < ring else sinks + behind % ring",
        "return position if behind < ring else behind % ring",
        CACHE,
    ),
    Mutant(
        "cpu/decode/append.py",
        "return largest / most if usable else scale_of_zeros",
        "return largest / most if usable else F(1)",
        UNSEEN,
    ),
    Mutant(
        "cpu/decode/append.py",
        "    out[x.size :] = 0\n    return largest",
        "    return largest",
        DECODE,
        equivalent="The padding of a block is written with zeros at allocation, and nothing else writes it.",
    ),
    # ---- compiled kernels on disk
    Mutant(
        "jit/disk_cache.py",
        "if owner == repr(key) and checksum == hashlib.sha256(payload).digest():",
        "if owner == repr(key):",
        "tests/test_disk_cache.py tests/test_robust.py -k damaged or cache",
    ),
    Mutant(
        "jit/closures.py",
        'return function.__qualname__ + shown(getattr(value, "targetoptions", {}))',
        "return function.__qualname__",
        "tests/test_robust.py -k options",
    ),
    Mutant(
        "jit/closures.py",
        'return f"{value.dtype.str}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"',
        "return repr(value)",
        "tests/test_robust.py -k long_arrays",
    ),
    # ---- the guard itself
    Mutant(
        "jit/guard.py",
        "changed = np.flatnonzero(now != then)",
        "changed = np.flatnonzero(now[:0])",
        "tests/test_guard.py",
    ),
    Mutant(
        "jit/guard.py",
        "            if bits != want:",
        "            if False:",
        "tests/test_guard.py",
    ),
    # ---- PyTorch
    Mutant(
        "torch/padding.py",
        "if mask.dim() != 4 or any(x not in y for x, y in zip(mask.shape, sizes, strict=True)):",
        "if mask.dim() != 4 or mask.shape[3] != keys:",
        "tests/pytorch/test_torch_operator.py -k does_not_fit",
    ),
    Mutant(
        "torch/padding.py",
        'if mask is None or lengths is not None or alignment != "upper_left":',
        "if mask is None or lengths is not None:",
        TORCH,
    ),
    Mutant(
        "torch/nodes.py",
        "ctx.save_for_backward(out, lse, query, key, value, *",
        "ctx.save_for_backward(query, key, value, out, lse, *",
        "tests/pytorch/test_torch_gradients.py -k first_call_in_a_checkpoint",
    ),
    Mutant(
        "torch/flex.py",
        'found = differentiate(arrays, options, "auto", call.functions, wrt=wrt, tables=tables)',
        'found = differentiate(arrays, options, "auto", call.functions[:2], wrt=wrt, tables=tables)',
        "tests/pytorch/test_flex_torch.py -k as_it_was_called",
    ),
    Mutant(
        "torch/flex.py",
        "*captured, *call.constants())",
        "*captured)",
        "tests/pytorch/test_flex_torch.py -k may_not_change",
    ),
    Mutant(
        "flex/masks.py",
        "if capture.steady and not capture.names_hold():",
        "if False:",
        "tests/flex/test_masks.py -k names_that_change",
    ),
    Mutant(
        "torch/rebinding.py",
        "return made is self.theirs",
        "return False",
        "tests/pytorch/test_routing.py -k compile_has_made",
    ),
    Mutant(
        "interop/eager.py",
        "return check is not None and check()",
        "return False",
        "tests/pytorch/test_torch_compile.py -k own_functions",
    ),
    Mutant(
        "cache/holdings.py",
        "sinks = min(memory.layout.sinks, first)",
        "sinks = 0",
        "tests/cpu/test_decode_arguments.py -k tail",
    ),
    Mutant(
        "cpu/plan.py",
        "if len(self.others) >= MOST_OTHERS:",
        "if False:",
        "tests/test_masks_in_place.py -k bounded",
    ),
    Mutant(
        "cpu/backward/few_gradients.py",
        "results.scores[:] = F(0)",
        "pass",
        "tests/cpu/test_few_gradients.py -k never_leaks",
    ),
    Mutant(
        "cpu/backward/flash_backward.py",
        "hi = min(hi, max(0, sizes.length - tile.query))",
        "pass",
        "tests/cpu/test_unseen.py -k no_row_sees",
    ),
    Mutant(
        "cpu/plan.py",
        "place = place_of(arrays)",
        "place = None",
        "tests/test_masks_in_place.py",
    ),
    Mutant(
        "cpu/backward/dense_tiles.py",
        "min(stop, s - key)",
        "stop",
        "tests/cpu/test_dense_tiles.py",
    ),
    Mutant(
        "cpu/backward/dense_tiles.py",
        "QUERIES, last - row)",
        "QUERIES, side)",
        "tests/cpu/test_dense_tiles.py",
    ),
    Mutant(
        "cpu/backward/dense_tiles.py",
        "not any_seen(x, stop - rows, columns, hidden)",
        "any_seen(x, stop - rows, columns, hidden)",
        "tests/cpu/test_dense_tiles.py",
    ),
    Mutant(
        "cpu/array_places.py",
        "return *place[1:], memory_of(name, x).tobytes()",
        "return place[1:]",
        "tests/test_masks_in_place.py",
    ),
    Mutant(
        "cpu/plan.py",
        "and plan.mask_at() == at:",
        "and True:",
        "tests/test_masks_in_place.py -k copy",
    ),
    Mutant(
        "cpu/array_places.py",
        "fields[name] = lent(fields[name])",
        "pass",
        "tests/test_masks_in_place.py -k holds_no_mask",
    ),
    Mutant(
        "interop/padding.py",
        "wrong += first[j] != (seen if j < length else hidden)",
        "wrong += first[0] != seen",
        "tests/pytorch/test_torch_operator.py -k trailing",
    ),
    Mutant(
        "torch/equal_calls.py",
        "if n == MASK and x.dtype not in (torch.bool, torch.float32, dtype):",
        "if False:",
        "tests/pytorch/test_equal_calls.py",
    ),
    Mutant(
        "torch/tensors.py",
        "steps = None if x.is_contiguous() else tuple(",
        "steps = None if x.numel() else tuple(",
        "tests/pytorch/test_equal_calls.py -k any_layout",
    ),
    Mutant(
        "torch/tensors.py",
        "split = size < WORD and (batch | head | row) * size % WORD",
        "split = False",
        "tests/pytorch/test_equal_calls.py -k any_layout",
    ),
    Mutant(
        "cpu/isa/strided.py",
        "split = dtype.itemsize < WORD and any(step % WORD for step in x.strides[:3])",
        "split = False",
        "tests/cpu/test_flash_float.py -k within_words",
    ),
    Mutant(
        LAUNCH_FLOAT,
        'out[...] = halves.narrow(rows, "bfloat16") if narrow else rows\n',
        "pass\n",
        "tests/pytorch/test_equal_calls.py -k does_not_hold",
    ),
    Mutant(
        LAUNCH_FLOAT,
        "self.narrow_strides[-3:] //= 2",
        "self.narrow_strides[-3:] //= 1",
        "tests/test_plans.py -k those_of_float32_rounded",
    ),
    Mutant(
        LAUNCH_FLOAT,
        "rows = widen(out) if narrow else",
        "rows = np.zeros(out.shape, F) if narrow else",
        "tests/test_plans.py -k those_of_float32_rounded",
    ),
    Mutant(
        "cpu/int8/begin_rows.py",
        " and tile.hi[0] >= FIRST_KEYS\n",
        "\n",
        "tests/cpu/test_int8_bits.py",
    ),
    Mutant(
        "dispatch/plan_store.py",
        "launch.runner(problem.changed(**NO_ARRAYS | lengths))",
        "launch.runner(problem)",
        "tests/test_plans.py",
    ),
    Mutant(
        "dispatch/call_keys.py",
        "isinstance(array, NOT_MASKS) else AN_ARRAY",
        "False else AN_ARRAY",
        "tests/test_plans.py",
    ),
    # ---- MPI
    Mutant(
        "mpi/attention.py",
        "mine, other, self.lse[:, :, rows] = weights(self.lse[:, :, rows], lse)",
        "other, mine, self.lse[:, :, rows] = weights(self.lse[:, :, rows], lse)",
        MPI,
    ),
    Mutant(
        "mpi/plan.py",
        "return max(first, keys[0]) < min(stop, keys[1])",
        "return max(first, keys[0]) + 1 < min(stop, keys[1])",
        MPI,
    ),
    Mutant("mpi/plan.py", "max(FIRST_KEYS - keys[0], 0)", "FIRST_KEYS", MPI),
    Mutant("mpi/plan.py", "max(FIRST_KEYS - keys[0], 0)", "0 if keys[0] else FIRST_KEYS", MPI),
    Mutant("mpi/shards.py", "if first >= FIRST_KEYS:", "if True:", MPI),
    Mutant(
        "mpi/plan.py",
        "lo = np.where(lo < hi, lo - (lo - start) % KEY_BLOCK, start)",
        "lo = np.where(lo < hi, lo, start)",
        MPI,
    ),
    # ---- CUDA, in the emulator
    Mutant(
        "cuda/kernels/flash_float.py",
        "high[r] = i32(min(keys, query[r] + diagonal + right + 1))",
        "high[r] = i32(min(keys, query[r] + diagonal + right))",
        CUDA_FLOAT,
    ),
    Mutant(
        "cuda/kernels/flash_float.py",
        "low[r] = i32(query[r] + diagonal - left)",
        "low[r] = i32(query[r] - left)",
        CUDA_FLOAT,
    ),
    Mutant(
        "cuda/kernels/flash_float.py",
        "head[r] = i32(kv_head * group + (row + 8 * r - query[r] * group))",
        "head[r] = i32(kv_head * group)",
        CUDA_FLOAT,
    ),
    Mutant(
        "cuda/kernels/int8_weights.py",
        "(173.3475, -10.0244, 346.692)",
        "(173.3475, -10.0244, 346.7)",
        CUDA_INT8,
    ),
    Mutant(
        "cuda/kernels/int8_softmax.py",
        "else i32(i32(top + 255) >> i32(8))",
        "else i32(i32(top + 254) >> i32(8))",
        CUDA_INT8,
    ),
    Mutant(
        "cuda/kernels/int8_softmax.py",
        "own = ptx.mul(own, below_octave(rounded_up(top[r], step)))",
        "own = ptx.mul(own, below_octave(top[r]))",
        CUDA_INT8,
    ),
    Mutant(
        "cuda/kernels/int8_softmax.py",
        "return x if seen else NEG_INF",
        "return x",
        CUDA_INT8,
    ),
    Mutant(
        "cuda/kernels/int8_softmax.py",
        "& (abs(most[r]) <= NEAR)",
        "& (abs(most[r]) >= 0)",
        CUDA_INT8,
    ),
    Mutant(
        "cuda/kernels/int8_softmax.py",
        "& (stop[r] > last) &",
        "&",
        CUDA_INT8,
    ),
    Mutant(
        "cuda/kernels/int8_softmax.py",
        "(alpha[0] == f32(1)) & (alpha[1] == f32(1))",
        "(alpha[0] == f32(1))",
        CUDA_INT8,
    ),
    Mutant(
        "cuda/kernels/int8_softmax.py",
        "total[r] + (high[r] << 8)",
        "total[r]",
        f"{CUDA_INT8} -k two_bytes",
    ),
    Mutant(
        "cuda/kernels/int8_values.py",
        "i32((acc[i] << 8) +",
        "i32((acc[i] << 7) +",
        f"{CUDA_INT8} -k two_bytes",
    ),
    Mutant(
        "cuda/kernels/int8_weights.py",
        "quadratic(u32(y + OCTAVE), P_WIDE, P_A, P_B)",
        "u32(u32(quadratic(y, P_WIDE, P_A, P_B) + u32(1)) >> u32(1))",
        f"{CUDA_INT8} -k two_bytes",
    ),
    # ---- score functions of INT8, rotation, threads, tilings, the resident cache, arrays on a card
    Mutant(
        "flex/emit.py",
        "b.fsub(one.number(MAGIC), base),",
        "one.number(MAGIC),",
        "tests/flex/test_int8_functions.py",
    ),
    Mutant(
        "flex/emit_cached.py",
        'b.add(args["h"], row.index)',
        'args["h"]',
        f"{DECODE_FUNCTIONS} -k one_head",
    ),
    Mutant(
        "flex/emit_cached.py",
        "b.or_(raw, b.load(self._place(self.not_finite)))",
        "raw",
        f"{DECODE_FUNCTIONS} -k one_head",
    ),
    Mutant(
        "flex/emit_cached.py",
        'args["shift"], [row.index]',
        'args["shift"], [I64(0)]',
        f"{DECODE_FUNCTIONS} -k whole_blocks",
    ),
    Mutant("flex/emit_cached.py", "if x is not None}", "if x is None}", DECODE_FUNCTIONS),
    Mutant(
        "cpu/decode/functions.py",
        "found |= of_run << r",
        "found = of_run << r",
        f"{DECODE_FUNCTIONS} -k whole_blocks",
    ),
    Mutant(
        "cpu/launch_decode.py",
        "changes.softcap, id(changes.slopes)",
        "changes.softcap, 0",
        "tests/cpu/test_decode_options.py -k own_options",
    ),
    Mutant(
        "flex/identity.py",
        "return known, tuple(captured), ",
        "return known, ",
        "tests/flex/test_tracing.py -k new_function",
    ),
    Mutant(
        GROUP_WEIGHTS,
        "for key, stop in ((group.first, full), (full_stop, group.stop)):",
        "for key, stop in ((group.first, full),):",
        "tests/flex/test_flex_attention.py",
    ),
    Mutant(
        "cpu/backward/row_gradients.py",
        'isa.choose(b, "==", p, zero, zero, ds)',
        "ds",
        "tests/flex/test_gradients.py -k infinite",
    ),
    Mutant(FUNCTION_SCORES, "called.h, called.row + i)", "called.h, called.row)", INT8_FUNCTIONS),
    Mutant(
        "cpu/floats/float_exp2.py",
        "FLOOR = -112",
        "FLOOR = -126",
        "tests/cpu/test_flash_float.py -k faint",
    ),
    Mutant(
        "cpu/decode/append.py",
        "rotate_row(rest, rotation)",
        "pass",
        "tests/cpu/test_decode_rotated.py",
    ),
    Mutant(
        "jit/threads.py",
        "runtime.omp_set_num_threads(threads)",
        "runtime.omp_get_max_threads()",
        "tests/pytorch/test_torch_memory.py -k stay_as_they_are",
    ),
    Mutant(
        "jit/threads.py",
        "omp_set_max_active_levels(1)",
        "omp_set_max_active_levels(9)",
        "tests/test_threads.py -k openmp",
    ),
    Mutant("tiling/rules.py", "if registers(t) > most:", "if False:", "tests/test_tiling.py"),
    Mutant(
        "transformers/latent_layer.py",
        "rope / self._balance",
        "rope",
        "tests/pytorch/test_resident_latents.py -k any_size",
    ),
    Mutant(
        "transformers/latent_layer.py",
        "None if constant.any() else made.T",
        "made.T",
        "tests/pytorch/test_resident_latents.py -k other_projections",
    ),
    Mutant(
        "transformers/resident.py",
        "self._moving = n > 0",
        "self._moving = True",
        "tests/pytorch/test_resident.py -k refused",
    ),
    Mutant(
        "transformers/resident.py",
        'stored.bound("tokens_to_remove", tokens_to_remove, -held, 0)',
        "int(tokens_to_remove)",
        "tests/pytorch/test_resident.py -k refused",
    ),
    Mutant(
        "cuda/launch_decode.py",
        "            yield _rotation(card, out)",
        "            pass",
        "tests/cuda/test_decode_rotated_cuda.py",
    ),
    Mutant(
        "cuda/kernels/decode_codes.py",
        "if lane + 32 * t < channels:",
        "if True:",
        f"{CUDA_INT4} -k channels",
    ),
    Mutant(
        "cuda/kernels/decode_append.py",
        "code = codes_k[t] if good else i32(0)",
        "code = codes_k[t]",
        f"{CUDA_INT4} -k finite",
    ),
    Mutant(
        "cuda/kernels/decode_append.py",
        "scale_v if good else f32(0)",
        "scale_v",
        f"{CUDA_INT4} -k finite",
    ),
    Mutant(
        "cuda/kernels/decode_columns.py",
        "acc[4 * (i >> 1) + 2 * j + (i & 1)] >> NUMBER_BITS",
        "acc[4 * (i >> 1) + 2 * j + (i & 1)]",
        f"{CUDA_INT4} -k bits_of_the_model",
    ),
    Mutant(
        "cuda/kernels/decode_int8.py",
        "numbers != numbers",
        "False",
        "tests/cuda/test_decode_cuda.py -k not_finite",
    ),
    Mutant(
        "cuda/launch_decode.py",
        "        self._prepared = Prepared()\n\n    @property",
        "\n    @property",
        "tests/cuda/test_decode_options_cuda.py",
    ),
    Mutant(
        "cuda/decode_layout.py",
        "from_pairs(x, self.head_dim, KEY_PAIR)",
        "from_pairs(x, self.head_dim, VALUE_PAIR)",
        f"{CUDA_INT4} -k storage",
    ),
    Mutant(
        "cuda/kernels/int8_quantize.py",
        "u32(finer(key) - whole * fx.FINER)",
        "u32(0)",
        CUDA_QUANTIZED,
    ),
    Mutant(
        "cuda/kernels/int8_statistics.py",
        "kept &= is_finite(ptx.load_shared_s32(tops + u32(4 * r)))",
        "pass",
        CUDA_QUANTIZED,
    ),
]
