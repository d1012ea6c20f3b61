"""Float attention against PyTorch, ONNX Runtime and OpenVINO, one thread, each checked before it is
timed: `make bench`.

`python tests/benchmarks/bench_float.py` times everybody in turns and prints one table: turns,
because clocks drift over a run by more than contenders differ. Peers take part where they are
installed (`pip install torch onnx onnxruntime openvino`). Nothing here passes or fails by time.
"""

import sys
import time

import numpy as np
import pytest

from numflash import attention, reference, validation
from numflash.interop import arrays as interop
from numflash.measure.contenders import on_threads
from numflash.validation.options import Options

CASES = {
    f"L={l} D={d} H={h}{' causal' if causal else ''}": (h, l, d, causal)
    for h, l, d in ((1, 4096, 128), (8, 512, 64))
    for causal in (False, True)
}
BUDGET = {"float32": 1e-5, "bfloat16": 0.02}


def ours(precision, q, k, v, causal):
    q, k, v = (interop.convert(x, precision) for x in (q, k, v))
    return lambda: interop.widen(attention(q, k, v, is_causal=causal, precision=precision))


def pytorch(precision, q, k, v, causal):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).to(getattr(torch, precision)) for x in (q, k, v))

    def call():
        with torch.inference_mode():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return lambda: call().float().numpy()


def onnx_runtime(precision, q, k, v, causal):
    """MultiHeadAttention, which runs as flash attention on the CPU; layout (B, L, H * D)."""
    if precision != "float32":
        pytest.skip("ONNX Runtime's CPU attention has no bfloat16")
    ort = pytest.importorskip("onnxruntime")
    helper = pytest.importorskip("onnx.helper")
    b, h, length, d = q.shape
    # TensorProto.FLOAT
    kind = 1
    shape = [b, length, h * d]
    node = helper.make_node(
        "MultiHeadAttention",
        ["q", "k", "v"],
        ["o"],
        domain="com.microsoft",
        num_heads=h,
        unidirectional=int(causal),
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(n, kind, shape) for n in "qkv"],
        [helper.make_tensor_value_info("o", kind, shape)],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    )
    model.ir_version = 9
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feed = {
        n: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(shape)
        for n, x in zip("qkv", (q, k, v), strict=True)
    }
    return lambda: session.run(None, feed)[0].reshape(b, length, h, d).transpose(0, 2, 1, 3)


def openvino(precision, q, k, v, causal):
    ov = pytest.importorskip("openvino")
    ops = pytest.importorskip("openvino.opset13")
    parameters = [ops.parameter(list(x.shape), ov.Type.f32) for x in (q, k, v)]
    model = ov.Model(
        [ops.scaled_dot_product_attention(*parameters, causal=causal)], parameters, "attention"
    )
    hint = {"float32": "f32", "bfloat16": "bf16"}[precision]
    request = (
        ov.Core()
        .compile_model(
            model,
            "CPU",
            {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": hint},
        )
        .create_infer_request()
    )
    for i, x in enumerate((q, k, v)):
        request.set_input_tensor(i, ov.Tensor(x, shared_memory=True))

    def call():
        request.infer()
        return request.get_output_tensor(0).data

    return call


CONTENDERS = (ours, pytorch, onnx_runtime, openvino)


def checked(precision, case, prepare):
    """The call of a contender, whose result agrees with float64."""
    h, length, d, causal = CASES[case]
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, h, length, d), np.float32) for _ in range(3))
    call = prepare(precision, q, k, v, causal)
    tail = validation.problem(
        q[:, :, -64:], k, v, Options(is_causal=causal, alignment="lower_right")
    )
    want = reference.oracle(tail)[0]
    assert np.abs(call()[:, :, -64:] - want).max() <= BUDGET[precision] * np.abs(want).max(), (
        prepare.__name__
    )
    return call


def gflops(case, seconds):
    h, length, d, causal = CASES[case]
    return 4e-9 * h * d * (length * (length + 1) / 2 if causal else length**2) / seconds


@pytest.mark.parametrize("prepare", CONTENDERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def bench_float(benchmark, precision, case, prepare):
    with on_threads(1):
        call = checked(precision, case, prepare)
        benchmark.group = f"{precision} {case}"
        benchmark.pedantic(call, rounds=7, warmup_rounds=1)
    if benchmark.stats:
        benchmark.extra_info["gflops"] = gflops(case, benchmark.stats.stats.median)


def compare(precision, case, seconds=2.0):
    """Median time of everybody who can run the case, in turns: {name: seconds}."""
    calls = {}
    for prepare in CONTENDERS:
        try:
            calls[prepare.__name__] = checked(precision, case, prepare)
        except pytest.skip.Exception as reason:
            print(
                f"{precision} {case}: {prepare.__name__} takes no part ({reason})", file=sys.stderr
            )
    times = {name: [] for name in calls}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times["ours"]) < 3:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(t)) for name, t in times.items()}


def main(precisions):
    with on_threads(1):
        for precision in precisions:
            for case in CASES:
                found = compare(precision, case)
                base = found["ours"]
                shown = (
                    f"{name} {1e3 * t:.2f} ms, {gflops(case, t):.0f} GFLOP/s, {t / base:.2f}"
                    for name, t in found.items()
                )
                print(f"{precision:9}{case:24}" + "  ".join(shown), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["float32", "bfloat16"])
