"""The split and the unified maximum in miniature against float64, where they must agree and where
one has to fall back.
"""

import numpy as np
import pytest
from oracles import draw, naive

from numflash.cpu.study.split_decode import HIGHEST, split_decode, unified_decode
from numflash.jit.threads import limit, most

pytestmark = pytest.mark.slow  # kernels that only the course runs

F = np.float32


def draw_case(h=3, s=700, d=16, dv=None, factor=1.0):
    return draw((h, d)) * F(factor), draw((h, s, d), 1), draw((h, s, dv or d), 2)


def exact(q, k, v, **options):
    return naive(q[None, :, None], k[None], v[None], **options)[0][0, :, 0]


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 40])
def test_any_number_of_splits_gives_attention(splits):
    for h, s, d, dv, scale in [
        (1, 1, 1, 1, None),
        (3, 700, 16, 5, None),
        (2, 127, 40, 40, 0.5),
        (2, 129, 64, 64, None),
        (1, 2500, 8, 8, 3.0),
    ]:
        q, k, v = draw_case(h, s, d, dv)
        wanted = exact(q, k, v, scale=scale)
        assert np.abs(split_decode(q, k, v, splits, scale) - wanted).max() < 2e-6
        out, unfit = unified_decode(q, k, v, np.zeros(h), splits, scale)
        assert np.abs(out - wanted).max() < 2e-6 and not unfit.any()


def test_a_score_far_above_or_below_phi_falls_back_and_only_its_row_does():
    q, k, v = draw_case()
    wanted = exact(q, k, v)
    for wrong in (-200, 200, -2.0 * HIGHEST, 90):
        out, unfit = unified_decode(q, k, v, np.array([0, wrong, 0]))
        assert unfit.tolist() == [False, True, False] and np.abs(out - wanted).max() < 2e-6
    q, k, v = draw_case(factor=300)  # scores of hundreds of octaves: no phi fits by chance
    out, unfit = unified_decode(q, k, v, np.zeros(3))
    assert unfit.all() and np.abs(out - exact(q, k, v)).max() < 2e-4
    one_high = k.copy()
    one_high[1, 650] = 40 * q[1] / 300  # a single key, in the last part
    _, unfit = unified_decode(q / 300, one_high, v, np.zeros(3))
    assert unfit.tolist() == [
        False,
        (q[1] / 300 @ one_high[1, 650]) / 4 * np.log2(np.e) > HIGHEST,
        False,
    ]


def test_no_keys_and_equal_bits_at_every_thread_count():
    q, k, v = draw_case(s=0)
    assert not split_decode(q, k, v).any() and not unified_decode(q, k, v, np.zeros(3))[0].any()
    q, k, v = draw_case()
    first = split_decode(q, k, v)
    for threads in (1, most()):
        with limit(threads):
            assert np.array_equal(first, split_decode(q, k, v))
