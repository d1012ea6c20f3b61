"""INT8 attention of causal language models rounds rotated queries and keys."""

import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")
pytest.importorskip("transformers", reason="needs the transformers extra")

from oracles import naive

from numflash.errors import NumflashError
from numflash.torch.rotated import rotate_operator, rotated
from numflash.transformers.attention import attend


def operands(dtype=torch.float32):
    """Keys as those of a language model: two channels are twenty times as large as the others."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, 200, 64) for _ in range(3))
    k[..., [5, 40]] *= 20
    q[..., [5, 40]] /= 20
    return [x.to(dtype) for x in (q, k, v)]


def error(q, k, v, causal, dtype=None):
    layer = types.SimpleNamespace(is_causal=causal)
    out, _ = attend(layer, q, k, v, None, precision="int8")
    want = naive(*(x.double().numpy() for x in (q, k, v)), is_causal=causal)[0]
    got = out.transpose(1, 2)
    assert got.dtype == q.dtype and got.shape == q.shape
    return np.abs(got.double().numpy() - want).mean() / np.abs(want).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_channels_of_keys_cost_no_digits(dtype):
    given = operands(dtype)
    assert error(*given, causal=True) < 0.026 < 0.035 < error(*given, causal=False)


def test_what_requires_grad_is_refused_as_ever():
    q, k, v = operands()
    q.requires_grad_()
    assert rotated(q, k, v)[0] is q
    with pytest.raises(NumflashError, match="precision"):
        attend(types.SimpleNamespace(is_causal=True), q, k, v, None, precision="int8")


def test_the_operator():
    x = operands()[1].transpose(1, 2)
    torch.library.opcheck(rotate_operator, (x,))
    half = np.array([[1]], np.float64)
    while half.shape[0] < 64:
        half = np.block([[half, half], [half, -half]])
    torch.testing.assert_close(
        rotate_operator(x).double(), x.double() @ torch.from_numpy(half / 8), atol=1e-5, rtol=0
    )
