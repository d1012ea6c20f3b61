"""INT8 kernels, and float32's, for every combination of options, in every case.

The integer model's bits, and float64.
"""

import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from combinations import check_all, parameters


@pytest.mark.parametrize(
    ("family", "one", "dealt"),
    parameters(
        "int8 sm_80",
        "int8 sm_75",
        "int8 sm_90a",
        "int8-int16 sm_80",
        "int8-fp32 sm_80",
        "float32 sm_80",
    ),
)
def test_combination(family, one, dealt):
    check_all(family, one, dealt)
