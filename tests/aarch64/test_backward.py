"""The tiled gradient in scalable vectors, executed by the emulator."""

import numba
import numpy as np
import pytest
from oracles import qkv

import numflash
from numflash.cpu.backward import flash_backward
from numflash.jit import target
from numflash.machinecode import assembly

pytest.importorskip("unicorn")
pytest.importorskip("elftools")
from numflash.machinecode.emulator import Emulated

CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": True},
    "softcap": {"softcap": 5.0},
}


@pytest.fixture(scope="module")
def kernels():
    """Kernels by instruction set and types of their arguments, kept for every case."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_by_scalable_tiles(case, kernels, monkeypatch):
    """dQ, dK, dV of an A64FX's code against float64; no multiply-add of NEON in any loop."""
    make = flash_backward.make_backward

    def emulated(isa):
        def call(*arguments):
            kinds = tuple(map(numba.typeof, arguments))
            if kinds not in kernels:
                kernels[kinds] = Emulated(make(isa), kinds, "a64fx", vector_bits=512)
            kernels[kinds](*arguments)

        return call

    monkeypatch.setattr(flash_backward, "make_backward", emulated)
    monkeypatch.setattr(target, "require", lambda isa, isas=None: "sve512")
    q, k, v = qkv(h=2, hkv=1, l=70, s=150, d=40)
    options = {**CASES[case], "enable_gqa": True}
    rng = np.random.default_rng(1)
    if "attn_mask" in options:
        options["attn_mask"] = rng.random((70, 150)) < 0.7
    grad = rng.standard_normal(q.shape, np.float32)
    out, lse = numflash.attention(q, k, v, return_lse=True, impl="reference", **options)
    found = numflash.attention_backward(grad, q, k, v, out, lse, impl="cpu", **options)
    exact = numflash.attention_backward(grad, q, k, v, out, lse, impl="reference", **options)
    for name, ours, theirs in zip(("dq", "dk", "dv"), found, exact, strict=True):
        assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max(), name
    (run,) = list(kernels.values())[:1]
    counts = [assembly.histogram(x.instructions) for x in assembly.loops(run.code.assembly)]
    assert max(x.get("fmla z.s", 0) for x in counts) >= 24
    assert not any("fmla v.4s" in x for x in counts)
