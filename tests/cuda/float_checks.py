"""Float problems in the emulator against float64.

16-bit ones within twice the error of rounded attention.
"""

import ml_dtypes
import numpy as np
import oracles

from numflash import validation
from numflash.validation.options import Options

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
OPTIONS = {
    "window": None,
    "alignment": "upper_left",
    "key_lengths": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
    "precision": None,
    "pv": None,
    "layout": "bhld",
    "return_lse": True,
}
LOWEST_LSE = np.finfo(np.float32).min * np.log(
    2
)  # the kernels count in units of log2: no finite score goes below


def problem_of(q, k, v, attn_mask=None, is_causal=False, scale=None, **options):
    return validation.problem(
        q, k, v, Options(attn_mask, 0.0, is_causal, scale, True, **{**OPTIONS, **options})
    )


def budget(expected, v):
    """Twice the rounding of the output to the type of `v`, and for the rounded weights a unit of
    the largest value.
    """
    eps = float(ml_dtypes.finfo(v.dtype).eps)
    return 2 * np.abs(expected.astype(v.dtype).astype(np.float64) - expected).max(
        initial=0
    ) + eps * (np.abs(v.astype(np.float64)).max(initial=0) + 0.1)


def compare(out, lse, q, k, v, **options):
    """What a kernel gave for operands of a type in `DTYPES` against attention by its definition.

    A row that sees nothing is 0.
    """
    out = (out.view(ml_dtypes.bfloat16) if out.dtype == np.uint16 else out).astype(np.float64)
    expected, expected_lse = oracles.naive(q, k, v, **options)
    single = v.dtype == np.float32
    allowed = 3e-6 if single else budget(expected, v)
    assert out.shape == expected.shape and np.abs(out - expected).max() <= allowed
    assert (out[(expected == 0).all(-1)] == 0).all()
    seen = np.isfinite(expected_lse)
    assert np.array_equal(seen, np.isfinite(lse)) and (lse[~seen] == -np.inf).all()
    expected_lse = np.maximum(expected_lse[seen], LOWEST_LSE)
    assert np.allclose(
        lse[seen], expected_lse, atol=3e-6 if single else 3e-5, rtol=1e-6 if single else 1e-5
    )
