"""INT8 problems in the emulator against the integer model, bit by bit."""
import numpy as np

from numflash import reference, validation
from numflash.cuda import forward
from numflash.quantization import quantize_problem

OPTIONS = {"window": None, "alignment": "upper_left", "key_lengths": None, "softcap": 0.0, "alibi_slopes": None, "sinks": None,
           "precision": "int8", "pv": "int8", "layout": "bhld", "return_lse": True}


def problem_of(q, k, v, attn_mask=None, is_causal=False, scale=None, **options):
    return quantize_problem(validation.problem(q, k, v, attn_mask, 0.0, is_causal, scale, True, **{**OPTIONS, **options}))


def same_bits(q, k, v, seed=0, arch="sm_80", **options):
    problem = problem_of(q, k, v, **options)
    out, lse, report = forward.emulated(forward.int8_forward(problem, arch), seed=seed)
    expected, expected_lse = reference.integer_model(problem)
    for a, b in ((out, expected), (lse, expected_lse)):
        assert np.array_equal(np.isnan(a), np.isnan(b))
        assert np.array_equal(np.nan_to_num(a).view(np.int32), np.nan_to_num(b).view(np.int32))
    return report
