"""What the driver forbids, against a stub that knows the rules.

Capture, contexts, devices, tensor maps, order of copies.
"""

import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from test_stub_driver import UNCOMPILED, driver, run  # noqa: F401
from test_stub_driver import pytestmark as needs_compiler

pytestmark = needs_compiler

# arrays of a stand-in for PyTorch on two devices, on a stream that does not wait for the default
# one; nothing is compiled
START = (
    UNCOMPILED
    + """
import ctypes, sys, types
import numpy as np
from cuda.bindings import driver as d
import numflash
from numflash.errors import DriverError

d.cuInit(0)

class Tensor:
    is_cuda, is_cpu, requires_grad = True, False, False
    def __init__(self, shape, dtype="torch.float16", device=0, strides=None):
        self.shape, self.dtype, self.device, self.ndim = tuple(shape), dtype, device, len(shape)
        self.strides = strides or tuple(int(np.prod(shape[n + 1:])) for n in range(len(shape)))
        _, context = d.cuDevicePrimaryCtxRetain(device)
        mode = d.cuThreadExchangeStreamCaptureMode(d.CUstreamCaptureMode(2))[1]
        d.cuCtxPushCurrent(context)
        self.at = int(d.cuMemAlloc(2 * int(np.prod(shape)) * 4)[1])
        d.cuCtxPopCurrent()
        d.cuThreadExchangeStreamCaptureMode(mode)
    def element_size(self):
        return np.dtype(self.dtype.removeprefix("torch.")).itemsize
    def stride(self, axis=None):
        return self.strides if axis is None else self.strides[axis]
    def data_ptr(self):
        return self.at
    def is_neg(self):
        return False
    def get_device(self):
        return self.device
    def reshape(self, shape):
        return self
    def contiguous(self):
        return self

torch = types.ModuleType("torch")
torch.Tensor, torch.float16, torch.float32 = Tensor, "torch.float16", "torch.float32"
torch.uint8, torch.bfloat16 = "torch.uint8", "torch.bfloat16"
torch.empty = lambda shape, dtype, device: Tensor(shape, dtype, device)
torch.is_grad_enabled = lambda: False
streams = {0: 0x77, 1: 0x99}
torch.cuda = types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=streams[device]))
sys.modules["torch"] = torch
q, k = Tensor((1, 2, 70, 64)), Tensor((1, 2, 90, 64))

def refused(work):
    try:
        work()
    except numflash.errors.NumflashError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
"""
)


def lines(driver, code, capability="90", **more):  # noqa: F811
    done = run(driver, START + code, capability, **more)
    return done.stdout.splitlines(), done.stderr


SIDE_STREAM = """
for n in range(1000):  # more contents than are kept
    numflash.attention(q, k, k, key_lengths=np.array([n % 90 + 1]), softcap=1 + n / 7, alibi_slopes=np.array([n, 1.0]))
streams[0] = 0x88
numflash.attention(q, k, k, alibi_slopes=np.array([999.0, 1]))
constants = card.current_device()._constants
print(len(constants._copies), sum(len(x) for x in constants._free.values()) + len(constants._copies))
"""


@pytest.mark.parametrize("capability", ["80", pytest.param("90", marks=pytest.mark.slow)])
def test_copies_come_before_the_launches_that_read_them(driver, capability):  # noqa: F811
    """On streams that do not wait for each other; slots are used again once nothing reads them: 256
    plans hold lengths and slopes of their own, 256 others may wait to be asked for again.
    """
    out, _ = lines(driver, SIDE_STREAM, capability)
    kept, slots = map(int, out[0].split())
    assert 2 * 256 < kept <= 3 * 256 + 3
    assert slots == 2048 + 512 * (capability == "90"), "one piece of the arena for each size"


CAPTURE = """
x, lse = Tensor((1, 2, 70, 64)), Tensor((1, 2, 70), "torch.float32")
options = dict(alibi_slopes=np.array([0.5, 0.25]))
for mode in range(3):
    d.cuStreamBeginCapture(0x77, d.CUstreamCaptureMode(mode))
    numflash.attention(q, k, k, key_lengths=np.array([50 + mode]), **options)
    numflash.attention(q, k, k, **options)
    numflash.attention_backward(x, x, x, x, x, lse, softcap=3.0 + mode)
    error, graph = d.cuStreamEndCapture(0x77)
    print(error.name)
    _, whole = d.cuGraphInstantiate(graph, 0)
    read = {n: c.address for n, c in card.current_device()._constants._copies.items() if c.captured}
    for n in range(300):
        numflash.attention(q, k, k, alibi_slopes=np.array([n, 1.0]))
    now = {n: c.address for n, c in card.current_device()._constants._copies.items()}
    held = np.array([50 + mode], np.int32).tobytes() in read
    print(held, all(now[n] == at for n, at in read.items()), d.cuGraphLaunch(whole, 0x77)[0].name)
card.current_device().release(x.at)
print(d.cuGraphLaunch(whole, 0x77)[0].name)
"""


@pytest.mark.slow
def test_forward_and_backward_are_captured(driver):  # noqa: F811
    """In each of the three modes.

    Kernels are loaded and constants made meanwhile, and what the graph reads is never touched.
    """
    out, said = lines(driver, CAPTURE)
    assert out[:-1:2] == ["CUDA_SUCCESS"] * 3
    assert out[1:-1:2] == ["True True CUDA_SUCCESS"] * 3
    assert out[-1] == "CUDA_ERROR_ILLEGAL_ADDRESS", "a gradient's operand was freed"
    assert "a graph that reads what is freed" in said and said.count("stub:") == 1, said


DECODE = """
from numflash.cuda.device import resident
resident.compiled = uncompiled
x = np.ones((1, 2, 1, 64), np.float32)
for mode in range(3):
    cache = numflash.KVCache(1, 2, 64, 100, "float16", device="cuda")
    d.cuStreamBeginCapture(0x77, d.CUstreamCaptureMode(mode))
    print(cache.step(x, x, x).shape, cache.step(x, x, x).shape, cache.decode(x).shape)
    print(d.cuStreamEndCapture(0x77)[0].name)
    cache.close()
"""


def test_a_decode_step_while_another_stream_is_captured(driver):  # noqa: F811
    """A step is a graph of its own: its first one loads kernels, captures and waits meanwhile."""
    out, said = lines(driver, DECODE, "80")
    assert "stub:" not in said, said
    assert out == ["(1, 2, 1, 64) (1, 2, 1, 64) (1, 2, 1, 64)", "CUDA_SUCCESS"] * 3


PINNED = """
from numflash.cuda.device import resident
resident.compiled = uncompiled
cache = numflash.KVCache(1, 2, 64, 100, "float16", device="cuda")
_, context = d.cuDevicePrimaryCtxRetain(0)
d.cuCtxPushCurrent(context)
at = int(d.cuMemHostAlloc(2 * 64 * 2, 0)[1])
token = np.frombuffer((ctypes.c_ubyte * 256).from_address(at), np.float16).reshape(1, 2, 1, 64)
for _ in range(2):
    print("append", file=sys.stderr)
    cache.append(token, token)
"""


def test_tokens_in_pinned_memory_may_change_after_an_append(driver):  # noqa: F811
    """The driver reads it when it comes to the copy, so the host waits for that."""
    _, said = lines(driver, PINNED, "80", STUB_TRACE="1")
    assert "stub:" not in said, said
    for part in said.split("append\n")[1:]:
        calls = part.splitlines()
        tokens = [n for n, call in enumerate(calls) if call.startswith("to the card 256 ")]
        stream = calls[tokens[-1]].split()[-1]
        assert len(tokens) == 2 and f"wait for {stream}" in calls[tokens[-1] :], part


INTERRUPTED = """
made, freed, copied = [], [], []
allocate, release, copy = d.cuMemAlloc, d.cuMemFree, d.cuMemcpyHtoD
def counted(n):
    result = allocate(n)
    made.append(int(result[1]))
    return result
def interrupted(*arguments):
    copied.append(arguments)
    if len(copied) == 2:
        raise KeyboardInterrupt
    return copy(*arguments)
d.cuMemAlloc, d.cuMemcpyHtoD = counted, interrupted
d.cuMemFree = lambda at: (freed.append(int(at)), release(at))[1]
try:
    numflash.attention(*(np.zeros((1, 1, 9, 64), np.float16),) * 3, impl="cuda")
except KeyboardInterrupt:
    print(len(made), made == freed)
"""


def test_an_interrupted_copy_leaves_nothing_on_the_card(driver):  # noqa: F811
    assert lines(driver, INTERRUPTED, "80")[0] == ["2 True"]


NUMBA = """
from numba import cuda
del sys.modules["torch"]
stream, other = cuda.stream(), cuda.stream()
q, k, v = (cuda.device_array((1, 2, n, 64), np.float16).bind(stream) for n in (70, 90, 90))
out, lse = numflash.attention(q, k, v, return_lse=True)
print(hex(int(stream))[2:], *(int(x.stream) == int(stream) for x in (out, lse)))
print("others", file=sys.stderr)
numflash.attention(q, k.bind(other), v.bind(other))
print(hex(int(other))[2:])
"""


def test_streams_of_numba(driver):  # noqa: F811
    """Results are on the one that computes them, for which `copy_to_host` and other libraries wait; and
    it waits for those of the other operands, which then wait for it.
    """
    out, said = lines(driver, NUMBA, "80", STUB_TRACE="1")
    stream, other = out[0].split()[0], out[1]
    first, second = said.split("others\n")
    assert out[0] == f"{stream} True True" and f"kernel of 4 blocks on {stream}" in first
    assert "waits for" not in first
    calls = [
        call
        for call in second.splitlines()
        if "record " in call or "waits for " in call or "kernel" in call
    ]
    event = calls[0].split()[1]
    assert calls == [
        f"record {event} on {other}", f"{stream} waits for {event}",
        f"kernel of 4 blocks on {stream}",
        f"record {event} on {stream}", f"{other} waits for {event}",
    ]  # fmt: skip


INT8 = """
import contextlib
@contextlib.contextmanager
def captured():
    d.cuStreamBeginCapture(0x77, d.CUstreamCaptureMode(0))
    yield
    error, graph = d.cuStreamEndCapture(0x77)
    print(error.name, d.cuGraphLaunch(d.cuGraphInstantiate(graph, 0)[1], 0x77)[0].name)
numflash.attention(q, k, k, precision="int8")
mask = Tensor((70, 90), "torch.float32")
with captured():
    print("captured", file=sys.stderr)
    numflash.attention(q, k, k, precision="int8", is_causal=True, attn_mask=mask, sinks=Tensor((2,), "torch.float32"))
numflash.attention(*(Tensor((1, 2, n, 64), "torch.bfloat16", strides=(0, -64, 128, 2)) for n in (9, 8, 8)), precision="int8")
print(refused(lambda: numflash.attention(q, k, k, precision="int8", pv="fp32")))
print(refused(lambda: numflash.attention(q, k, k, precision="int8", pv="bf16")))
print(refused(lambda: numflash.attention(q, k, k, precision="bfloat16")))
print(refused(lambda: numflash.attention(q, k, k, precision="int8", softcap=1e5)))
"""


@pytest.mark.parametrize(("capability", "rows"), [("80", 128), ("90", 512)])
def test_int8_is_four_launches_on_the_callers_stream(driver, capability, rows):  # noqa: F811
    """Statistics, operands, the kernel, results.

    Nothing but small constants comes from the host, and nothing goes back. Any strides are taken.
    """
    out, said = lines(driver, INT8, capability, STUB_TRACE="1")
    assert "stub:" not in said and "from the card" not in said, said
    plain, captured = said.split("captured\n")
    for part in (plain, captured.split("end capture")[0]):
        grids = [line.split("kernel of ")[1] for line in part.splitlines() if "kernel of" in line]
        assert grids == [f"{n} blocks on 77" for n in (4, 4, 4 if rows == 128 else 2, 4)]
        copies = [line.split()[3] for line in part.splitlines() if line.startswith("to the card")]
        assert all(int(n) <= 512 for n in copies), copies
    assert f"block {rows} shared" in plain
    assert out[0] == "CUDA_SUCCESS CUDA_SUCCESS"
    for pv, line in zip(("fp32", "bf16"), out[1:3], strict=True):
        assert f"pv: got '{pv}' for arrays on a card; allowed there: 'int8' and 'int16'" in line
    assert "allowed there: their own, 'int8'" in out[3]
    assert "softcap: got 100000 with precision 'int8'" in out[4]


DEVICES = """
a, b = Tensor((1, 2, 70, 64), device=1), Tensor((1, 2, 90, 64), device=1)
numflash.attention(a, b, b)
print(d.cuCtxGetCurrent()[1])
_, context = d.cuDevicePrimaryCtxRetain(0)
d.cuCtxPushCurrent(context)
numflash.attention(a, b, b, key_lengths=np.array([3]))
numflash.attention(q, k, k, key_lengths=np.array([3]))
print(int(d.cuCtxGetCurrent()[1]) == int(context))
print(refused(lambda: numflash.attention(q, b, k)))
print(refused(lambda: numflash.attention(q, k, k, attn_mask=Tensor((70, 90), "torch.float32", 1))))
g = Tensor((1, 2, 70, 64), device=1)
print(refused(lambda: numflash.attention_backward(g, q, k, k, q, Tensor((1, 2, 70), "torch.float32"))))
_, other = d.cuDevicePrimaryCtxRetain(1)
d.cuCtxPushCurrent(other)
print(card.current_device().ordinal, numflash.attention(*(np.zeros((1, 1, 9, 64), np.float16),) * 3, impl="cuda").shape)
d.cuCtxPopCurrent()
from numflash.cuda.device import resident
resident.compiled = uncompiled
cache = numflash.KVCache(1, 2, 64, 100, "float16", device="cuda")
d.cuCtxPushCurrent(other)
x = np.ones((1, 2, 1, 64), np.float32)
print(cache.step(x, x, x).shape, int(d.cuCtxGetCurrent()[1]) == int(other))
cache.close()
"""


def test_every_device(driver):  # noqa: F811
    """Launches go where the arrays lie; the caller's context is current again.

    Arrays of two devices are refused.
    """
    out, said = lines(driver, DEVICES, STUB_DEVICES="2")
    assert "stub:" not in said, said
    assert out[0].endswith("0x0>") or out[0] == "0" or "0x0" in out[0], out[0]
    assert out[1] == "True"
    assert (
        out[2]
        == "ArgumentError: key: got an array on CUDA device 1; allowed: device 0, where query lies"
    )
    assert "attn_mask: got an array on CUDA device 1" in out[3]
    assert "grad_out: got an array on CUDA device 1" in out[4]
    assert out[5] == "1 (1, 1, 9, 64)" and out[6] == "(1, 2, 1, 64) True"


STRIDES = """
one = Tensor((2, 1, 90, 64), strides=(90 * 64, 1, 64, 1))  # an axis of one element: its stride of 2 bytes says nothing
two = Tensor((2, 1, 70, 64))
numflash.attention(two, one, one)
print("broadcast", file=sys.stderr)
numflash.attention(Tensor((2, 2, 70, 64)), *(Tensor((2, 2, 90, 64), strides=(0, 64 * 90, 64, 1)) for _ in "kv"))
print("reversed", file=sys.stderr)
numflash.attention(q, *(Tensor((1, 2, 90, 64), strides=(64 * 180, -64 * 90, 64, 1)) for _ in "kv"))
print("odd", file=sys.stderr)
print(refused(lambda: numflash.attention(q, *(Tensor((1, 2, 90, 64), strides=(64 * 180, 64 * 90 + 1, 64, 1)) for _ in "kv"))))
"""


def test_strides(driver):  # noqa: F811
    """Tensor maps take multiples of 16 above 0.

    Broadcast and reversed axes go to the kernel without maps.
    """
    out, said = lines(driver, STRIDES)
    assert "stub:" not in said, said
    first, broadcast, reverse, odd = (
        said.replace("broadcast\n", "|").replace("reversed\n", "|").replace("odd\n", "|").split("|")
    )
    assert first.count("tensor map") == 3 and "block 384" in first
    assert "tensor map" not in broadcast + reverse and "block 128" in broadcast
    assert "block 128" in reverse
    assert "multiples of 16 bytes" in out[0] and "launch" not in odd


NO_KEYS = """
k = Tensor((1, 2, 0, 64), strides=(128, 64, 64, 1))
for options in {}, {"is_causal": True}, {"precision": "int8"}, {"precision": "int8", "is_causal": True}:
    for length in (5, 70):
        print(numflash.attention(Tensor((1, 2, length, 64)), k, k, **options).shape)
"""


@pytest.mark.parametrize("capability", [pytest.param("80", marks=pytest.mark.slow), "90"])
def test_nothing_to_attend_to(driver, capability):  # noqa: F811
    """Strides are PyTorch's; no tensor map describes such keys."""
    out, said = lines(driver, NO_KEYS, capability)
    assert "stub:" not in said and out == ["(1, 2, 5, 64)", "(1, 2, 70, 64)"] * 4


LADDER = """
from numflash.cuda import study
device = card.current_device()
q, k, v, _ = study.problem(128, 64, 0)
for rung in study.LADDER:
    if rung.runs_on(device.arch):
        with device.stream() as stream:
            device.prepared(
                study.launch(rung, q, k, v, device.arch), lambda work: work(), persist=(k, v), stream=stream
            )
        print(rung.number)
"""


@pytest.mark.parametrize(
    ("capability", "rungs"),
    [("90", 14), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("75", 8), ("89", 11)))],
)
def test_every_rung_is_launched_with_keys_and_values_in_l2(driver, capability, rungs):  # noqa: F811
    """What the ladder's timing does for each, whether the kernel takes arrays or tensor maps."""
    out, said = lines(driver, LADDER, capability)
    assert len(out) == rungs and "stub:" not in said, said
    windows = [x for x in said.splitlines() if x.startswith("stream attribute 1")]
    assert sum(x.endswith(f" {65536 + 128 * 64 * 2} 1") for x in windows) == rungs
    assert windows[1::2] == ["stream attribute 1: 0 0 1"] * rungs


def test_an_old_driver(driver):  # noqa: F811
    out, _ = lines(
        driver, "print(refused(lambda: numflash.attention(q, k, k)))", STUB_VERSION="12040"
    )
    assert out == [
        "UnsupportedError: impl: got 'cuda', but the driver here supports CUDA 12.4; allowed: CUDA 13.0 or later "
        "(driver 580 or later), because kernels are machine code of CUDA 13"
    ]


BROKEN = {
    "unaligned": (
        "def zeros(n, t):\n    x = np.zeros(n + 64, t)\n    return x[(16 - x.ctypes.data) % 64 :]\n"
        "drv.MAP_ALIGNMENT, drv.np = 1, types.SimpleNamespace(**{**vars(np), 'zeros': zeros})\n",
        "address that 64 does not divide",
    ),
    "pageable copy": (
        "con.Constants._made = lambda self, content, stream, at_once: (lambda a: (d.cuMemcpyHtoD(a, content, len(content)), "
        "con.Copy(a, 0, 128, None, True))[1])(int(d.cuMemAlloc(128)[1]))\n",
        "does not come after the copy",
    ),
    "no event": ("con.Constants._order = lambda *a: None\n", "does not come after the copy"),
    "no context": ("drv.Active.__enter__ = lambda self: None\n", "without a context"),
    "allocation": (
        "drv.Uncaptured.__enter__ = drv.Uncaptured.__exit__ = lambda *a: None\n",
        "while a stream is captured",
    ),
}
PLAIN = """
numflash.attention(q, k, k, alibi_slopes=np.array([1.0, 2]))
streams[0] = 0x88
numflash.attention(q, k, k, alibi_slopes=np.array([1.0, 2]))
d.cuStreamBeginCapture(0x88, d.CUstreamCaptureMode(0))
numflash.attention(q, k, k, alibi_slopes=np.array([2.0, 2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", BROKEN)
def test_the_stub_sees_broken_rules(driver, fault):  # noqa: F811
    change, wanted = BROKEN[fault]
    code = "from numflash.cuda.device import constants as con, driver as drv\n" + change
    _, said = lines(driver, code + f"print(refused(lambda: exec({PLAIN!r}, globals())))")
    assert wanted in said, said


FAULTY = """
from cuda.bindings import driver as d
d.cuPointerGetAttribute = lambda attribute, address: (d.CUresult.CUDA_SUCCESS, 0)
from numflash.cuda.device.driver import device_of, open_driver
print([device_of(open_driver(), 0x700000000000 + (n << 40)) for n in (0, 1)])
"""


def test_bindings_that_say_device_0_of_every_address(driver):  # noqa: F811
    """NVIDIA/cuda-python, issue 2928: the driver itself is asked."""
    assert run(driver, FAULTY, "80", STUB_DEVICES="2").stdout.strip() == "[0, 1]"
