"""What comes in goes out as its own kind."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import naive, qkv

import numflash
from numflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from numflash.interop import arrays as interop

Q, K, V = qkv(b=2, h=4, l=5, s=7, d=8)
EXACT, LSE = naive(Q, K, V)


def attend(*arrays, **options):
    return numflash.attention(*arrays, impl="reference", return_lse=True, **options)


@settings(deadline=None)  # the first call compiles
@given(st.floats(width=32))
def test_bfloat16_bits(x):
    x = np.array([x], np.float32)
    bits = interop.convert(x, "bfloat16")
    want = x.astype(ml_dtypes.bfloat16)
    assert bits.view(ml_dtypes.bfloat16)[0] == want[0] or (
        np.isnan(x[0]) and np.isnan(want[0].astype(np.float32))
    )
    np.testing.assert_array_equal(
        interop.widen(bits), bits.view(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_bfloat16_bits_of_what_rounds_badly():
    x = np.array(
        [
            np.nan,
            -np.nan,
            np.inf,
            -np.inf,
            3.4e38,
            -3.4e38,
            1e-45,
            0,
            -0.0,
            1 + 2**-8,
            1 + 3 * 2**-8,
        ],
        np.float32,
    )
    signalling = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    np.testing.assert_array_equal(
        interop.widen(interop.convert(x, "bfloat16")),
        x.astype(ml_dtypes.bfloat16).astype(np.float32),
    )
    assert np.isnan(interop.widen(interop.convert(signalling, "bfloat16"))).all()


HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_becomes_its_float32(dtype):
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits if dtype == "bfloat16" else bits.view(np.float16)
    found = interop.to_float32(halves)
    with np.errstate(invalid="ignore"):  # Arm's conversion tells of signalling NaN
        wanted = bits.view(HALVES[dtype]).astype(np.float32)
    nan = np.isnan(wanted)
    assert np.isnan(found[nan]).all()
    np.testing.assert_array_equal(found[~nan].view(np.uint32), wanted[~nan].view(np.uint32))


@pytest.mark.parametrize("dtype", HALVES)
def test_float32_rounds_to_the_nearest_half(dtype):
    """Each sign, exponent and upper fraction with lower bits below, at and above every tie."""
    high = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    for low in (0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (high | np.uint32(low)).view(np.float32)
        found = interop.convert(x, dtype).view(np.uint16)
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = x.astype(HALVES[dtype])
        nan = np.isnan(x)
        assert np.isnan(found[nan].view(HALVES[dtype]).astype(np.float32)).all()
        np.testing.assert_array_equal(found[~nan], wanted[~nan].view(np.uint16))


@pytest.mark.parametrize("forked", [False, True])
def test_halves_of_strided_arrays_of_several_tasks(forked, monkeypatch):
    if forked:  # threads would end the process
        monkeypatch.setattr(interop.halves, "refuse_after_fork", threads_refused)
    x = np.random.default_rng(0).standard_normal((3, 2 * interop.halves.PART + 5), np.float32).T
    assert not x.flags.c_contiguous
    for dtype, kind in HALVES.items():
        halves = interop.convert(x, dtype)
        np.testing.assert_array_equal(halves.view(np.uint16), x.astype(kind).view(np.uint16))
        back = interop.to_float32(np.asfortranarray(halves))
        np.testing.assert_array_equal(back, x.astype(kind).astype(np.float32))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(0, 3), (), (1,), (2, 3)])
def test_halves_of_few_numbers(dtype, shape):
    x = np.full(shape, 1.2345, np.float32)
    halves = interop.convert(x, dtype)
    want = x.astype(HALVES[dtype])
    assert halves.shape == shape
    np.testing.assert_array_equal(halves.view(np.uint16), want.view(np.uint16))
    back = interop.to_float32(halves)
    assert back.shape == shape and back.dtype == np.float32
    np.testing.assert_array_equal(back, want.astype(np.float32))


def threads_refused():
    raise UnsupportedError("forked")


def test_float64_is_rounded_to_float16_once():
    x = np.array([1 + 2**-11 + 2**-40, 65519.999999, 1e300])
    assert interop.convert(x, "float16").tolist() == [1 + 2**-10, 65504, np.inf]


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "tolerance"),
    [
        (np.float32, np.float32, 1e-6),
        (np.float64, np.float32, 1e-6),
        (np.float16, np.float16, 2e-3),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16, 2e-2),
        (">f4", np.float32, 1e-6),
    ],
)
def test_numpy_dtypes(dtype, out_dtype, tolerance):
    out, lse = attend(*(x.astype(dtype) for x in (Q, K, V)))
    assert type(out) is np.ndarray and out.dtype == out_dtype and lse.dtype == np.float32
    np.testing.assert_allclose(out.astype(float), EXACT, atol=tolerance)
    np.testing.assert_allclose(lse, LSE, atol=max(tolerance, 1e-6) * 3)


def test_bfloat16_as_bits():
    bits = [x.astype(ml_dtypes.bfloat16).view(np.uint16) for x in (Q, K, V)]
    out = attend(*bits, precision="bfloat16")[0]
    assert out.dtype == np.uint16
    np.testing.assert_array_equal(
        out, attend(*(x.astype(ml_dtypes.bfloat16) for x in (Q, K, V)))[0].view(np.uint16)
    )


def test_bfloat16_of_the_other_byte_order():
    native = [x.astype(ml_dtypes.bfloat16) for x in (Q, K, V)]
    swapped = [x.astype(x.dtype.newbyteorder("S")) for x in native]
    for arrays in ((swapped[0], *native[1:]), (*native[:2], swapped[2]), swapped):
        found = attend(*arrays)[0]
        assert found.dtype == ml_dtypes.bfloat16 and np.array_equal(found, attend(*native)[0])


def test_lists_and_subclasses():
    out = attend(Q[0, 0].tolist(), K[0, 0].tolist(), V[0, 0].tolist())[0]
    np.testing.assert_allclose(out, EXACT[0, 0], atol=1e-6)


def test_other_strides_and_read_only():
    q, k, v = (np.asfortranarray(x) for x in (Q, K, V))
    np.testing.assert_allclose(attend(q[:, :, ::-1][:, :, ::-1], k, v)[0], EXACT, atol=1e-6)
    for x in (q, k, v):
        x.flags.writeable = False
    np.testing.assert_allclose(attend(q, k, v)[0], EXACT, atol=1e-6)


class TestTorch:
    torch = property(lambda self: pytest.importorskip("torch", reason="PyTorch is not installed"))

    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)]
    )
    def test_kind_and_dtype(self, dtype, tolerance):
        torch = self.torch
        dtype = getattr(torch, dtype)
        q, k, v = (torch.from_numpy(x).to(dtype) for x in (Q, K, V))
        out, lse = attend(q, k, v)
        assert isinstance(out, torch.Tensor) and out.dtype == dtype and lse.dtype == torch.float32
        np.testing.assert_allclose(out.float().numpy(), EXACT, atol=tolerance)

    def test_masks_and_strides(self):
        torch = self.torch
        q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
        mask = torch.rand(5, 7) > 0.3
        out = numflash.attention(
            q.transpose(1, 2).contiguous().transpose(1, 2), k, v, mask, impl="reference"
        )
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        assert torch.allclose(out, torch.nan_to_num(want), atol=1e-6)
        bias = torch.randn(4, 5, 7)
        assert torch.allclose(
            numflash.attention(q, k, v, bias, impl="reference"),
            torch.nn.functional.scaled_dot_product_attention(q, k, v, bias),
            atol=1e-6,
        )

    def test_gradients_are_not_lost_silently(self):
        torch = self.torch
        q = torch.from_numpy(Q).requires_grad_()
        with pytest.raises(ArgumentError, match="requires grad"):
            attend(q, torch.from_numpy(K), torch.from_numpy(V))
        with torch.no_grad():
            attend(q, torch.from_numpy(K), torch.from_numpy(V))

    def test_bad_tensors(self):
        torch = self.torch
        with pytest.raises(ArgumentTypeError, match="query"):
            attend(torch.ones(2, 2, dtype=torch.int32), torch.ones(2, 2), torch.ones(2, 2))
        with pytest.raises(ArgumentTypeError, match="query"):
            attend(torch.eye(3).to_sparse(), torch.ones(3, 3), torch.ones(3, 3))
        with pytest.raises(UnsupportedError, match="device meta"):
            attend(torch.ones(3, 3, device="meta"), torch.ones(3, 3), torch.ones(3, 3))


class Foreign:
    """A library of its own that speaks DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return type(
            "namespace", (), {"from_dlpack": staticmethod(lambda x: Foreign(np.from_dlpack(x)))}
        )


def test_dlpack():
    out, lse = attend(Foreign(Q), Foreign(K), Foreign(V))
    assert type(out) is Foreign and type(lse) is Foreign
    np.testing.assert_allclose(out.array, EXACT, atol=1e-6)


def test_dlpack_of_another_device():
    far = Foreign(Q)
    far.__class__ = type("Far", (Foreign,), {"__dlpack_device__": lambda self: (2, 0)})
    with pytest.raises(UnsupportedError, match="query"):
        attend(far, K, V)


def test_cuda_array_interface_without_a_gpu():
    class Device:
        @property
        def __cuda_array_interface__(self):
            return {"shape": (5, 8), "typestr": "<f4", "data": (0, False), "version": 3}

    with pytest.raises(UnsupportedError, match="query"):
        attend(Device(), K, V)


def test_the_negative_bit_of_pytorch_is_named():
    torch = pytest.importorskip("torch")
    x = torch.ones(1, 1, 3, 4, dtype=torch.complex64).conj().imag
    with pytest.raises(ArgumentTypeError, match=r"query: .*; allowed: query\.resolve_neg\(\)"):
        attend(x, x, x)


def test_bits_of_bfloat16_are_no_integers():
    """Zeros in bfloat16 have the bits of a length that is allowed."""
    x = np.zeros((2, 1, 3, 4), np.float32)
    zeros = np.zeros(2, ml_dtypes.bfloat16)
    with pytest.raises(ArgumentTypeError, match=r"key_lengths: got dtype bfloat16; allowed: int"):
        numflash.attention(x, x, x, key_lengths=zeros)
    with pytest.raises(ArgumentTypeError, match="cu_seqlens_q: got dtype bfloat16; allowed: int"):
        numflash.attention_varlen(x[:0, 0], x[:0, 0], x[:0, 0], zeros, np.zeros(2, int))
