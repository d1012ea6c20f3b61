"""The tiled gradient in scalable vectors, executed by the emulator."""

import numpy as np
import pytest
from oracles import qkv

import numflash
from numflash.cpu.backward import call, flash_backward, tiled
from numflash.cpu.backward.held import Found, Given
from numflash.cpu.backward.operands import Factors, Gradients, Prepared, Scratch, Sizes
from numflash.cpu.isa.strided import strided
from numflash.cpu.problem_arrays import at_address
from numflash.jit import target
from numflash.machinecode import assembly, kernel_types

pytest.importorskip("unicorn")
pytest.importorskip("elftools")
from numflash.machinecode.emulator import Emulated

ISA = "sve512"
F = np.float32
CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": True},
    "softcap": {"softcap": 5.0},
}


@pytest.fixture(scope="module")
def kernel():
    """The kernel, for every case."""
    made = flash_backward.make_backward(ISA)
    return Emulated(made, kernel_types.backward(), "a64fx", vector_bits=512)


def arguments_of(plan, operands):
    """What a plan's call gives the kernel, with arrays for addresses: the emulated memory is elsewhere.

    Several query heads share keys here, and several workers a head's.
    """
    p = call.Numbers(*map(int, plan.numbers[: call.NUMBERS]))
    nb, nh, nkv, length, s, d, dv = plan.shape
    n = nb * nh
    of_q, of_k, of_v = (nb, nh, length, d), (nb, nkv, s, d), (nb, nkv, s, dv)
    of_out = nb, nh, length, dv
    rows, none = (n, length), np.zeros((0, length), F)
    shapes = of_q, of_k, of_v, of_out, of_out, rows, rows, of_q, of_k, of_v, (n, length, s)
    arrays = [
        at_address(x, shape, "=f4") if x else none
        for x, shape in zip(operands, shapes, strict=True)
    ]
    *found, counter = zeros(tiled.found_kinds(plan.shape, p.high))
    copies = [np.zeros((nb, nh, *x.shape[2:]), F) for x in arrays[:3]]
    no_scores = np.zeros((0, 0, 0), F)
    tiles = tiled.scratch_kinds(ISA, (p.wide, p.columns), p.workers)
    factors, largest = plan.reals[:3], float(plan.reals[3])
    return (
        Given(
            *map(in_place, arrays[:5]),
            *arrays[5:7],
            plan.arrays.key_lengths,
            largest,
            bool(p.bounds),
        ),
        Found(*found),
        Factors(*map(F, factors)),
        plan.arrays,
        Sizes(nh, nkv, length, s, p.splits, p.workers),
        counter,
        Scratch._make(zeros(tiles | tiled.dense_kinds(p.workers))),
        Prepared._make(zeros(tiled.prepared_kinds(ISA, (p.high, p.wide, p.columns), n, p.splits))),
        Gradients(*map(in_place, copies), arrays[10]),
        Gradients(*map(in_place, arrays[7:10]), no_scores),
    )


def in_place(x):
    """`strided`, with the array for its address."""
    return strided(x)._replace(start=x)


def zeros(kinds):
    return [np.zeros(shape, dtype) for dtype, shape in kinds.values()]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_by_scalable_tiles(case, kernel, monkeypatch):
    """dQ, dK, dV of an A64FX's code against float64; no multiply-add of NEON in any loop."""

    def run(plan, operands, strides=None):
        kernel(*arguments_of(plan, operands))

    monkeypatch.setattr(tiled, "make_call", lambda isa: None)
    monkeypatch.setattr(tiled.GradientPlan, "run", run)
    monkeypatch.setattr(target, "require", lambda isa, isas=None: ISA)
    q, k, v = qkv(h=2, hkv=1, l=70, s=150, d=40)
    options = {**CASES[case], "enable_gqa": True}
    rng = np.random.default_rng(1)
    if "attn_mask" in options:
        options["attn_mask"] = rng.random((70, 150)) < 0.7
    grad = rng.standard_normal(q.shape, np.float32)
    out, lse = numflash.attention(q, k, v, return_lse=True, impl="reference", **options)
    options["wrt"] = ("query", "key", "value", "scores")
    found = numflash.attention_backward(grad, q, k, v, out, lse, impl="cpu", **options)
    exact = numflash.attention_backward(grad, q, k, v, out, lse, impl="reference", **options)
    for name, ours, theirs in zip(options["wrt"], found, exact, strict=True):
        assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max(), name
    counts = [assembly.histogram(x.instructions) for x in assembly.loops(kernel.code.assembly)]
    assert max(x.get("fmla z.s", 0) for x in counts) >= 24
    assert not any("fmla v.4s" in x for x in counts)
