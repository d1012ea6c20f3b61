"""The path to a card, driven against a driver that does nothing.

What reaches the driver, and what it costs on the host.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux", reason="needs a C compiler and Linux"
)

SOLVE = """
import numpy as np, numflash
q = np.zeros((1, 2, 70, {d}), np.float16)
out = numflash.attention(q, q, q, impl="cuda")
print(out.shape, out.dtype)
"""
# what stands before a program whose kernels are never run: no machine code is made
UNCOMPILED = """
from numflash.cuda.compile import compiler
from numflash.cuda.device import device as card

def uncompiled(factory, arch, kind, **constants):
    source = factory(**constants)
    return compiler.Compiled(factory.__name__, arch, repr((factory.__name__, constants)).encode(),
                             compiler.flat_parameters(source.signature), source.threads, source.shared_bytes)
card.compiled = uncompiled
"""
COST = """
import time
from numflash.cuda.device import current_device
from numflash.cuda.compile import compiled
from numflash.cuda.kernels.flash_float import flash_float
device = current_device()
kernel = device.kernel(compiled(flash_float, device.arch, "cubin", d=64, dv=64, block_q=64, block_k=64))
arguments = [0x700000000000] * 10 + [64] * 16 + [1024, 128, 128, 8, 0, 0, 1] + [0.1, 0.0, 0.0]
grid = (16, 8, 1)
best = 1.0
device.active().__enter__()
for _ in range(20):
    start = time.perf_counter()
    for _ in range(1000):
        kernel(grid, 0, *arguments)
    best = min(best, (time.perf_counter() - start) / 1000)
print(f"{best * 1e6:.2f} us per launch with {len(arguments)} parameters")
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stub")
    source = Path(__file__).with_name("stub_driver.c")
    subprocess.run(
        [
            COMPILER,
            "-O2",
            "-w",
            "-shared",
            "-fPIC",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            folder / "libcuda.so.1",
            source,
            "-ldl",
        ],
        check=True,
    )
    return folder


def run(driver, code, capability, **more):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "STUB_CC": capability, **more}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_launch_with_much_shared_memory(driver):
    done = run(driver, SOLVE.format(d=128), "80")
    assert "(1, 2, 70, 128) float16" in done.stdout
    assert "attribute 8 = 81920" in done.stderr  # beyond 48 KB the kernel must ask
    assert "launch grid 2 2 1 block 128 shared 81920 stream 0 first 7000" in done.stderr


BOTH_WAYS = """
import numpy as np, numflash
q, k = np.zeros((1, 2, 70, 64), np.float16), np.zeros((1, 2, 90, 64), np.float16)
out, lse = numflash.attention(q, k, k, return_lse=True, impl="cuda")
numflash.attention_backward(q, q, k, k, out, lse, impl="cuda")
numflash.attention(q, k, k, precision="int8", impl="cuda")
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_only_results_come_back_to_the_host(driver, capability):
    """Out and LSE; dk, dv and dq; out, octaves and totals. Not the operands, nor statistics."""
    done = run(driver, BOTH_WAYS, capability, STUB_TRACE="1")
    found = [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("back ")]
    rows, keys = 2 * 70, 2 * 90
    assert found == [
        rows * 64 * 2, rows * 4, keys * 64 * 2, keys * 64 * 2, rows * 64 * 2,
        rows * 64 * 4, rows * 4, rows * 4,
    ]  # fmt: skip


CLUSTER = """
import numpy as np
from numflash.cuda.device.device import Kernel, current_device
from numflash.cuda.compile.target import cuda, types
from numflash.cuda.compile import Source, compile_source

def fill(out):
    out[cuda.blockIdx.x] = cuda.threadIdx.x

source = Source(fill, types.void(types.int32[::1]), 32, cluster=2)
current_device().active().__enter__()
kernel = Kernel(current_device().driver, compile_source(source, "sm_90a", "cubin"))
kernel((4, 1, 1), 0, 0, 0, 4, 4, 0, 4, 4)
try:
    kernel((3, 1, 1), 0, 0, 0, 4, 4, 0, 4, 4)
except Exception as error:
    print(type(error).__name__)
"""


def test_clusters(driver):
    """CUlaunchAttributeID 4: the cluster's width, height and depth."""
    done = run(driver, CLUSTER, "90")
    lines = [line for line in done.stderr.splitlines() if "attribute" in line]
    assert lines == ["launch attribute 4 = 2 1 1"] * 2
    assert "launch grid 4 1 1 block 32" in done.stderr
    assert "a grid of 3 blocks in clusters of 2" in done.stderr and "DriverError" in done.stdout


@pytest.mark.slow
def test_wide_heads_are_launched_in_clusters(driver):
    """Two tiles of rows of two heads, on whole clusters of the stub's multiprocessors."""
    code = SOLVE.format(d=256).replace("1, 2, 70", "1, 2, 200")
    done = run(driver, code, "90")
    assert (
        "launch attribute 4 = 2 1 1" in done.stderr and "launch grid 2 1 1 block 384" in done.stderr
    )


RESIDENT = """
import numpy as np, numflash, sys
from numba import cuda
q = cuda.device_array((1, 70, 2, 64), np.float16)
k = cuda.device_array((1, 90, 2, 64), np.float16)
out = numflash.attention(q, k, k, layout="blhd", is_causal=True)
print(type(out).__name__, out.shape, out.dtype)
print(hex(q.__cuda_array_interface__["data"][0])[2:], hex(out.__cuda_array_interface__["data"][0]) != "0x0")
x = cuda.device_array((2, 40, 64), np.float32)
out, lse = numflash.attention(x, x, x, return_lse=True)
print(out.shape, out.dtype, lse.shape)
try:
    numflash.attention(q, k, k, impl="cpu")
except numflash.errors.UnsupportedError as error:
    print(error)
try:
    numflash.attention(q, np.zeros((1, 90, 2, 64), np.float16), k)
except numflash.errors.ArgumentTypeError as error:
    print(error)
"""
OPTIONS = """
import numpy as np, numflash
from numba import cuda
q = cuda.device_array((1, 2, 70, 64), np.float16)
k = cuda.device_array((1, 2, 90, 64), np.float16)
on_host = np.zeros(2, np.float32)
for mask in (cuda.device_array((2, 70, 90), np.bool_), cuda.device_array((70, 90), np.float32)):
    print(numflash.attention(q, k, k, attn_mask=mask, sinks=on_host).shape)
print(numflash.attention(q, k, k, sinks=cuda.device_array(2, np.float32)).shape)
for options in ({"attn_mask": np.ones((70, 90), bool)}, {"attn_mask": cuda.device_array((70, 90), np.float16)},
                {"sinks": cuda.device_array(3, np.float32)}, {"attn_mask": cuda.device_array((71, 90), np.bool_)}):
    try:
        numflash.attention(q, k, k, **options)
    except numflash.errors.NumflashError as error:
        print(error)
"""


def test_arrays_on_the_card_are_passed_by_address(driver):
    done = run(driver, UNCOMPILED + RESIDENT, "80")
    lines = done.stdout.splitlines()
    assert lines[0] == "DeviceNDArray (1, 70, 2, 64) float16"
    assert (
        f"first {lines[1].split()[0]}" in done.stderr
        and "launch grid 2 2 1 block 128" in done.stderr
    )
    assert lines[2] == "(2, 40, 64) float32 (2, 40)"
    assert "GPU memory" in lines[3] and "key: got ndarray in host memory" in lines[4]


MANY = """
import numpy as np, numflash
from numba import cuda
q, x = (cuda.device_array((65537, 3, 49, 32), dtype) for dtype in (np.float16, np.float32))
lse = cuda.device_array((65537, 3, 49), np.float32)
numflash.attention(q, q, q)
numflash.attention(x, x, x)
numflash.attention(q, q, q, precision="int8")
numflash.attention_backward(q, q, q, q, q, lse)
"""


@pytest.mark.slow
def test_more_batch_entries_than_a_grid_takes(driver):
    """Swin's windows, 49 rows each; the driver refuses no launch (it names the first eight)."""
    done = run(driver, MANY, "80")
    grids = [
        tuple(map(int, line.split()[2:5]))
        for line in done.stderr.splitlines()
        if line.startswith("launch grid")
    ]
    assert grids == [
        (65537, 3, 1), (65537 * 13, 3, 1),
        (65537, 6, 1), (65537, 6, 1), (65537, 3, 1), (65537, 3, 1),
        (65537 * 4, 3, 1), (65537, 3, 1),
    ]  # fmt: skip


LIBRARIES = """
import contextlib, sys, types
import numpy as np
import numflash

class Array:
    made = []
    is_cuda, is_cpu, device, requires_grad, ndim = True, False, "cuda:0", False, 4
    def __init__(self, shape, dtype, device=None):
        self.shape, self.dtype = tuple(shape), dtype
        self.at = 0x500000000000 + 0x100000 * len(Array.made)
        Array.made.append(self)
    def element_size(self):
        return np.dtype(str(self.dtype).removeprefix("torch.")).itemsize
    def stride(self, axis=None):
        return tuple(int(np.prod(self.shape[n + 1:])) for n in range(len(self.shape)))
    def data_ptr(self):
        return self.at
    def is_neg(self):
        return False
    def get_device(self):
        return 0
    def reshape(self, shape):
        return self

class CuPyArray(Array):
    device = types.SimpleNamespace(id=0)
    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": np.dtype(self.dtype).str, "data": (self.at, False), "strides": None, "version": 3}

cupy, torch = types.ModuleType("cupy"), types.ModuleType("torch")
cupy.ndarray, cupy.empty = CuPyArray, CuPyArray
cupy.cuda = types.SimpleNamespace(
    get_current_stream=lambda: types.SimpleNamespace(ptr=119), Device=contextlib.nullcontext)
torch.Tensor, torch.empty, torch.float16, torch.float32 = Array, Array, "torch.float16", "torch.float32"
torch.is_grad_enabled = lambda: False
torch.cuda = types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=235))
for module, kind, half in ((cupy, CuPyArray, "float16"), (torch, Array, "torch.float16")):
    sys.modules[module.__name__] = module
    q, k = kind((1, 2, 70, 64), half), kind((1, 2, 90, 64), half)
    made = len(Array.made)
    out, lse = numflash.attention(q, k, k, return_lse=True, is_causal=True)
    print(type(out).__name__, out.shape, out.dtype, lse.shape, lse.dtype, len(Array.made) - made, hex(q.at)[2:])
    del sys.modules[module.__name__]
"""


def test_arrays_of_cupy_and_pytorch(driver):
    """Stand-ins for both libraries.

    The same kind comes out, two results are all that is made, on the library's current stream.
    """
    done = run(driver, UNCOMPILED + LIBRARIES, "80")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [" ".join(line[:-1]) for line in lines] == [
        "CuPyArray (1, 2, 70, 64) float16 (1, 2, 70) float32 2",
        "Array (1, 2, 70, 64) torch.float16 (1, 2, 70) torch.float32 2",
    ]
    launches = [
        line.split("stream ")[1]
        for line in done.stderr.splitlines()
        if line.startswith("launch grid")
    ]
    assert launches == [
        f"{stream} first {line[-1]}" for stream, line in zip((119, 235), lines, strict=True)
    ]


GRADIENTS = """
import numpy as np, numflash
from numba import cuda
q = cuda.device_array((1, 70, 2, 64), np.float16)
k = cuda.device_array((1, 90, 1, 64), np.float16)
lse = cuda.device_array((1, 70, 2), np.float32)
options = dict(layout="blhd", is_causal=True, enable_gqa=True)
try:
    numflash.attention_backward(q, q, k, k, q, lse, **options)
except numflash.errors.UnsupportedError as error:
    print(error)
lse = cuda.device_array((1, 2, 70), np.float32)
x, y = cuda.device_array((1, 2, 70, 64), np.float16), cuda.device_array((1, 1, 90, 64), np.float16)
print(*((type(g).__name__, g.shape, g.dtype) for g in numflash.attention_backward(x, x, y, y, x, lse, enable_gqa=True)))
try:
    numflash.attention_backward(x, x, y, y, lse, lse, enable_gqa=True)
except numflash.errors.ArgumentTypeError as error:
    print(error)
a, b = np.zeros((1, 2, 70, 64), np.float16), np.zeros((1, 1, 90, 64), np.float16)
print(numflash.attention_backward(a, a, b, b, a, np.zeros((1, 2, 70), np.float32), enable_gqa=True, impl="cuda")[1].shape)
"""
GRADIENTS_WITH_MASKS = """
import numpy as np, numflash
from numba import cuda
x, lse = cuda.device_array((1, 2, 70, 64), np.float16), cuda.device_array((1, 2, 70), np.float32)
for dtype in (np.bool_, np.float32):
    mask = cuda.device_array((1, 1, 70, 70), dtype)
    print(numflash.attention_backward(x, x, x, x, x, lse, attn_mask=mask, sinks=np.zeros(2, np.float32))[0].shape)
"""


@pytest.mark.slow
def test_the_backward_pass_is_three_launches(driver):
    done = run(driver, GRADIENTS, "80")
    lines = done.stdout.splitlines()
    assert lines[0] == "lse: not contiguous (B, H, L) on the card" and lines[2].startswith(
        "out: got dtype float32"
    )
    assert lines[1].count("DeviceNDArray") == 3 and "(1, 1, 90, 64) dtype('float16')" in lines[
        1
    ].replace("),", ")")
    launches = [
        line.split(" stream")[0]
        for line in done.stderr.splitlines()
        if line.startswith("launch grid")
    ]
    assert launches == 2 * [
        "launch grid 8 2 1 block 128 shared 0",
        "launch grid 2 1 1 block 128 shared 50176",
        "launch grid 2 2 1 block 128 shared 49152",
    ]
    assert lines[3] == "(1, 1, 90, 64)"


@pytest.mark.slow
def test_the_backward_pass_with_masks_on_the_card(driver):
    """Their addresses cannot be read from the host, so nothing here has tried to."""
    assert run(driver, GRADIENTS_WITH_MASKS, "80").stdout.splitlines() == ["(1, 2, 70, 64)"] * 2


@pytest.mark.slow
def test_masks_and_sinks_on_the_card(driver):
    """Their addresses cannot be read from the host, so nothing here has tried to."""
    lines = run(driver, OPTIONS, "90").stdout.splitlines()
    assert lines[:3] == ["(1, 2, 70, 64)"] * 3
    assert (
        "attn_mask: got ndarray in host memory" in lines[3]
        and "attn_mask: got dtype float16" in lines[4]
    )
    assert "sinks: got shape (3,)" in lines[5] and "attn_mask: got shape (71, 90)" in lines[6]


DECODE = """
import numpy as np, sys
from numflash.cache.kvcache import KVCache
from numflash.cuda.device import resident
resident.compiled = uncompiled
cache = KVCache(1, 2, 64, 1000, "float16", device="cuda")
token = np.ones((1, 2, 1, 64), np.float32)
cache.append(np.ones((1, 2, 20, 64), np.float32), np.ones((1, 2, 20, 64), np.float32))
cache.decode(np.ones((1, 4, 1, 64), np.float32))
for n in range(3):
    print("step", n, file=sys.stderr)
    print(cache.step(np.ones((1, 4, 1, 64), np.float32), token, token).shape, cache.lengths)
print("end", file=sys.stderr)
cache.close()
"""


def test_a_decode_step_is_one_graph(driver):
    """Tokens and query in one copy, results in another, in the kernels' stream.

    A step is captured once and launched again. The prompt's copies have a stream of their own.
    """
    done = run(driver, UNCOMPILED + DECODE, "80", STUB_TRACE="1")
    assert done.stdout.splitlines() == [f"(1, 4, 1, 64) [{n}]" for n in (21, 22, 23)]
    said = "".join(
        line for line in done.stderr.splitlines(True) if not line.startswith("launch grid")
    )
    before, first, second, third = said.partition("end\n")[0].split("step ")
    compute, copies = (
        line.split()[-1] for line in before.splitlines() if line.startswith("new stream")
    )
    assert (
        "graph" not in before
        and f"kernel of 10 blocks on {compute}" in before
        and f"kernel of 2 blocks on {compute}" in before
    )
    lines = first.splitlines()
    captured = lines[lines.index(f"begin capture on {compute}") : lines.index("end capture")]
    wanted = [
        f"to the card 2048 on {compute}",
        f"kernel of 2 blocks on {compute}",
        f"kernel of 2 blocks on {compute}",
        f"from the card 1056 on {compute}",
    ]
    assert captured[1:] == wanted
    assert lines[-2:] == [f"graph on {compute}", f"wait for {compute}"]
    for part in (second, third):  # nothing but the graph, then the host waits
        assert part.splitlines()[1:] == lines[-2:]
    decoded = [line for line in before.splitlines() if line.split()[0] in ("to", "from", "kernel")]
    assert f"to the card 10240 on {copies}" in decoded  # the prompt's keys
    assert decoded[-3:] == [
        f"to the card 1024 on {compute}",
        f"kernel of 2 blocks on {compute}",
        f"from the card 1056 on {compute}",
    ]


@pytest.mark.parametrize(
    ("nbytes", "limit", "window"),
    [
        pytest.param(1 << 18, 1 << 18, f"{1 << 18} 0.5", marks=pytest.mark.slow),
        (1 << 20, 1 << 19, f"{1 << 19} 0.5"),
    ],
)
def test_l2_window(driver, nbytes, limit, window):
    """A range of any size.

    The driver refuses more than the card's largest window, 512 KB for the stub's.
    """
    code = f"""
from numflash.cuda.device import current_device
device = current_device()
with device.stream() as stream:
    device.persist(stream, 0x700000000000, {nbytes}, 0.5)
"""
    done = run(driver, code, "80")
    assert (
        f"limit 6 = {limit}\n" in done.stderr
        and f"stream attribute 1: 700000000000 {window}\n" in done.stderr
    )


CLOCK = """
from numflash.cuda import study
from numflash.cuda.device import current_device
device = current_device()
rung = study.LADDER[0]
q, k, v, expected = study.problem(128, 64, 0)
with device.stream() as stream:
    device.prepared(study.launch(rung, q, k, v, device.arch), lambda work: work(), persist=(k, v), stream=stream)
study.clock(128)
"""
DIVIDED = """
from numflash.cuda import study
study.validated = lambda *arguments: 0.0
print(study.clock_rung(study.LADDER[0], study.problem(128, 64, 0)))
"""


def test_a_card_that_sets_no_part_of_l2_aside(driver):
    """As a part of a divided card: the rung has one time instead of none."""
    code = UNCOMPILED + DIVIDED
    assert run(driver, code, "80").stdout == "(0.001, 0.001)\n"
    assert run(driver, code, "80", STUB_DIVIDED="1").stdout == "(0.001, None)\n"


GROUPS = """
from numflash.cuda.device import current_device, median_seconds
from numflash.cuda.device import device as module
device, made = current_device(), []
record = device.driver.cuEventRecord
def noted(event, stream):
    made.append("event")
    return record(event, stream)
device.driver.cuEventRecord = noted
module.GROUP = 4e-3  # each launch takes the stub a millisecond
def work():
    made.append("launch")
print(median_seconds(device, work), "".join(x[0] for x in made[-6:]), made.count("launch"))
"""


def test_groups_of_launches_are_timed(driver):
    """Nothing but launches stands between two events: what the host does there is not measured."""
    seconds, last, launches = run(driver, GROUPS, "80").stdout.split()
    # nothing is launched on the stub here, whose shortest time is a millisecond
    assert last == "elllle" and int(launches) == 3 + 4 * 20 and float(seconds) == 1e-3 / 4


FORKED = """
import os
from numflash.cuda.device import current_device
from numflash.cuda.device.resident import Card
device, there = current_device(), Card()
held = there.zeros((4,), "f4"), there.pinned((4,), "f4")
if os.fork() == 0:
    del held
    try:
        device.active().__enter__()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_forked_process_is_told_to_be_spawned(driver):
    """And drops what its parent has on the card without a word."""
    done = run(driver, FORKED, "80")
    said = done.stdout
    assert "Exception ignored" not in done.stderr, done.stderr
    assert said.startswith(
        "DriverError CUDA driver: it is not initialised in this process, which was"
    )
    assert "'spawn'" in said


def test_the_ladder_is_validated_on_a_card_before_it_is_timed(driver):
    """The window spans keys and values, is closed again, and the stub's zeros are refused."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "STUB_CC": "80"}
    done = subprocess.run(
        [sys.executable, "-c", CLOCK], capture_output=True, text=True, env=environment, timeout=300
    )
    window, closed = (
        line for line in done.stderr.splitlines() if line.startswith("stream attribute 1")
    )
    assert window.endswith(f" {65536 + 128 * 64 * 2} 1") and closed == "stream attribute 1: 0 0 1"
    assert done.returncode == 1 and "rung 1: relative error 1.00e+00" in done.stderr


def test_launch_on_hopper_encodes_tensor_maps(driver):
    done = run(driver, UNCOMPILED + SOLVE.format(d=64), "90")
    assert (
        done.stderr.count("tensor map of rank 5"),
        done.stderr.count("tensor map of rank 4"),
    ) == (1, 2)  # Q; K and V
    assert "launch grid 1 1 1 block 384" in done.stderr  # one multiprocessor takes both heads


REFUSED = """
from numflash.cuda.device import current_device
from numflash.cuda.validate import child, steps
from numflash.errors import DriverError, UnsupportedError
def raises(error):
    def run(*given):
        raise error
    return run
device, said, broken = current_device(), [], []
key = ("factory", "sm_80", ())
child.compiled, child.labels = (lambda *given, **constants: None), (lambda keys: ["its kernel"])
for kernels, run in (
    (raises(UnsupportedError("no kernel")), None),
    (lambda: [key], raises(UnsupportedError("no such cubin"))),
    (lambda: [key], raises(DriverError("refused"))),
):
    try:
        broken += child.run_step(steps.Step("one", kernels, run), "case", device, set(), said.append)
    except DriverError:
        print("the process ends")
for row in said:
    if "case" in row:
        print(row["case"]["passed"], row["case"].get("error"), row["case"].get("skipped"))
print(broken)
"""


def test_what_the_driver_refuses_is_a_failure(driver):
    """And what has no kernel is none, but a kernel that a folder lacks is one.

    The driver's error ends the process: nothing is run in a context that may be of no use.
    """
    assert run(driver, REFUSED, "80").stdout.splitlines() == [
        "the process ends",
        "True None no kernel",
        "False UnsupportedError: no such cubin None",
        "False DriverError: refused None",
        "['its kernel']",
    ]


@pytest.mark.slow
def test_host_time_is_reported(driver):
    """The figure goes to the output of `pytest -s`; there is no timed pass or fail."""
    done = run(driver, COST, "80")
    print(done.stdout)
    assert "us per launch" in done.stdout
