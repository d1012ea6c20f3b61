"""INT8 problems in the emulator against the integer model, bit by bit."""

import numpy as np

from numflash import reference, validation
from numflash.cuda import launch_int8
from numflash.cuda.device import operands
from numflash.numerics.quantization import quantize_problem
from numflash.validation.options import Options

OPTIONS = {
    "window": None,
    "alignment": "upper_left",
    "key_lengths": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
    "precision": "int8",
    "pv": "int8",
    "layout": "bhld",
    "return_lse": True,
}


def problem_of(q, k, v, attn_mask=None, is_causal=False, scale=None, **options):
    return quantize_problem(
        validation.problem(
            q, k, v, Options(attn_mask, 0.0, is_causal, scale, True, **{**OPTIONS, **options})
        )
    )


def solve(problem, arch, seed):
    """out, lse and the report of the kernel; out and lse of the integer model."""
    return *operands.emulated(
        launch_int8.int8_forward(problem, arch), seed=seed
    ), *reference.integer_model(problem)


def same_bits_of(problem, arch, seed=0):
    out, lse, report, expected, expected_lse = solve(problem, arch, seed)
    for a, b in ((out, expected), (lse, expected_lse)):
        assert np.array_equal(np.isnan(a), np.isnan(b))
        assert np.array_equal(np.nan_to_num(a).view(np.int32), np.nan_to_num(b).view(np.int32))
    return report


def same_bits(q, k, v, seed=0, arch="sm_80", **options):
    return same_bits_of(problem_of(q, k, v, **options), arch, seed)


def near_the_model(problem, arch="sm_80", seed=0):
    """pv "fp32": octaves, weights and sums are integers and agree.

    The sums of P.V are rounded in an order of their own.

    Of what the largest value of a channel could give: low times low, which is left out, is 2**-20
    at most, since parts are cut and not rounded; the bits that a value's low part loses 2**-21, and
    additions in another order less than that.
    """
    out, lse, report, expected, expected_lse = solve(problem, arch, seed)
    assert out.shape == expected.shape and np.array_equal(
        lse.view(np.int32), expected_lse.view(np.int32)
    )
    assert np.array_equal(np.isnan(out), np.isnan(expected))
    finite = np.where(np.isfinite(problem.value), problem.value, 0)
    largest = np.abs(finite).max((0, 1, 2), initial=0)
    assert (np.abs(np.nan_to_num(out) - np.nan_to_num(expected)) <= 2.0**-19 * largest).all()
    return report
