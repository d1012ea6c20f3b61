"""The course's plain backward kernel against float64; `test_backward` checks the one to use."""

import pytest
from gradient_checks import close
from oracles import draw, qkv

from numflash import attention
from numflash.cpu.study import backward_plain

pytestmark = pytest.mark.slow  # kernels that only the course runs


@pytest.mark.parametrize("causal", [False, True])
def test_the_plain_kernel(causal):
    for shape in [
        {"l": 1},
        {"l": 33, "s": 65, "d": 7},
        {"b": 2, "h": 4, "hkv": 2, "l": 70, "s": 31},
        {"l": 65, "s": 100, "d": 40, "dv": 3},
    ]:
        q, k, v = qkv(**shape)
        do = draw((*q.shape[:3], v.shape[3]), 9)
        out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, is_causal=causal)
        close(
            backward_plain.backward(do, q, k, v, out, lse, causal), (do, q, k, v), is_causal=causal
        )
