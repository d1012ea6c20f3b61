"""OpenVINO as a peer for decoding: one token over keys and values that stay in its runtime.

Its CPU plugin fuses the state of a model, the concatenation of the new token and the attention
into one node, with keys and values of 8 bits unless another KV_CACHE_PRECISION is asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo


def token_call(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, threads: int
) -> Callable[[], np.ndarray]:
    """A call that appends one token and attends to all, (1, H, 1, D) float32.

    The first call has the last token of key and value (1, Hkv, S, D) as its new one; every further
    call appends it again, so that the state grows by one token a call.
    """
    _, kv_heads, length, d = key.shape
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "KV_CACHE_PRECISION": "u8",
        "INFERENCE_PRECISION_HINT": "f32",  # 10 % faster than its choice of bfloat16 with AMX
    }
    model = _model(query.shape[1], kv_heads, d)
    request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
    stored = {"key": key, "value": value}
    for state in request.query_state():
        state.state = ov.Tensor(np.ascontiguousarray(stored[state.name][:, :, : length - 1]))
    feed = {name: np.ascontiguousarray(x[:, :, length - 1 :]) for name, x in stored.items()}
    feed |= {"query": query, "beam": np.zeros(1, np.int32)}
    return lambda: np.asarray(request.infer(feed)[0])


def _model(heads: int, kv_heads: int, d: int) -> ov.Model:
    """Attention of new tokens over a state, in the form that the plugin fuses."""
    query = ops.parameter([1, heads, -1, d], ov.Type.f32, name="query")
    beam = ops.parameter([-1], ov.Type.i32, name="beam")
    inputs, updates, operands = [query], [], []
    for name in ("key", "value"):
        new = ops.parameter([1, kv_heads, -1, d], ov.Type.f32, name=name)
        stored, update = _appended(new, name, beam, kv_heads, d)
        inputs.append(new)
        updates.append(update)
        operands.append(_repeated(stored, heads, kv_heads, d))
    out = ops.scaled_dot_product_attention(query, *operands, causal=False)
    return ov.Model([ops.result(out)], updates, [*inputs, beam], "decode")


def _appended(
    new: ov.Node, name: str, beam: ov.Node, kv_heads: int, d: int
) -> tuple[ov.Node, ov.Node]:
    """What a state holds with new tokens behind it, and the node that stores it."""
    info = VariableInfo()
    info.data_shape = ov.PartialShape([-1, kv_heads, -1, d])
    info.data_type, info.variable_id = ov.Type.f32, name
    state = Variable(info)
    empty = ops.constant(np.zeros((1, kv_heads, 0, d), np.float32))
    past = ops.gather(ops.read_value(empty, state), beam, ops.constant(0))
    now = ops.concat([past, new], 2)
    return now, ops.assign(now, state)


def _repeated(stored: ov.Node, heads: int, kv_heads: int, d: int) -> ov.Node:
    """Each KV head for all query heads of its group."""
    group = heads // kv_heads
    if group == 1:
        return stored
    sizes = ops.gather(ops.shape_of(stored), ops.constant(np.array([2, 3])), ops.constant(0))
    shape = ops.concat([ops.constant(np.array([1, kv_heads, group])), sizes], 0)
    wide = ops.broadcast(
        ops.unsqueeze(stored, ops.constant(2)), shape, broadcast_spec="BIDIRECTIONAL"
    )
    return ops.reshape(wide, ops.constant(np.array([0, heads, -1, d])), True)
