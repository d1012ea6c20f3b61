"""What only a card can show: that it gives what the emulator gives."""

import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

import numflash
from numflash.cuda.device import current_device
from numflash.cuda.validate import kernels
from numflash.cuda.validate.families import families

pytestmark = pytest.mark.gpu


@pytest.mark.slow
def test_every_case_of_the_emulator():
    device = current_device()
    steps = [step for x in families(device.arch) for step in kernels.checks(x, device.arch)]
    wrong = [step.name for step in steps for row in step.run(device) if not row["passed"]]
    assert steps and wrong == []


def test_attention_on_the_card():
    q, k, v = oracles.qkv(b=1, h=2, l=70, s=90, d=64, dtype=np.float16)
    out, lse = numflash.attention(q, k, v, is_causal=True, return_lse=True, impl="cuda")
    expected, expected_lse = oracles.naive(q, k, v, is_causal=True)
    assert np.allclose(out, expected, atol=2e-3) and np.allclose(lse, expected_lse, atol=1e-4)
