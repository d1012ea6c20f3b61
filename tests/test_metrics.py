import numpy as np
import pytest
from oracles import draw, qkv

import numflash
from numflash.errors import ArgumentError, ArgumentTypeError
from numflash.measure.metrics import VARIANTS, Errors, errors


def test_the_five_figures_by_hand():
    exact = np.array([[1.0, -1.0], [2.0, 2.0]])
    out = np.array([[1.0, -1.5], [2.0, 2.25]])
    e = errors(out, exact)
    assert e.relative_l1 == pytest.approx(0.75 / 6)
    assert e.rmse == pytest.approx(np.sqrt((0.25 + 0.0625) / 4))
    assert e.max_abs == 0.5 and e.worst_row == 0.25
    assert e.cosine == pytest.approx((1 + 1.5 + 4 + 4.5) / np.sqrt(10 * (1 + 2.25 + 4 + 5.0625)))
    assert set(e.as_dict()) == {"cosine", "relative_l1", "rmse", "max_abs", "worst_row"}


def test_zeros():
    zero = np.zeros((3, 4))
    assert errors(zero, zero) == Errors(1.0, 0.0, 0.0, 0.0, 0.0)
    assert errors(zero + 1, zero).relative_l1 == np.inf
    assert errors(np.zeros((0, 4)), np.zeros((0, 4))).cosine == 1.0


def test_order_of_precisions():
    found = numflash.accuracy(*qkv(l=40, d=64), impl="reference", is_causal=True)
    assert list(found) == list(VARIANTS)
    size = {name: e.relative_l1 for name, e in found.items()}
    assert (
        size["float32"]
        < 1e-6
        < size["float16"]
        < size["bfloat16"]
        < size["int8, pv fp32"]
        < size["int8, pv bf16"]
        < size["int8, pv int16"]
        < size["int8"]
        < 0.02
    )
    assert all(e.worst_row >= e.relative_l1 and e.max_abs >= e.rmse for e in found.values())


def test_float64_inputs_are_the_truth():
    """Errors of float32 are seen against float64 inputs as they are, not against their roundings."""
    arrays = [draw((1, 1, 20, 8), i, np.float64) * (1 + 1e-9) for i in range(3)]
    found = numflash.accuracy(*arrays, impl="reference", variants=["float32"])
    assert 1e-9 < found["float32"].relative_l1 < 1e-6


def test_bad_arguments():
    with pytest.raises(ArgumentError, match="variants: got 'int4'"):
        numflash.accuracy(*qkv(), variants=["int4"])
    for variants in ("int8", 3):
        with pytest.raises(ArgumentTypeError, match=f"variants: got {variants!r}"):
            numflash.accuracy(*qkv(), variants=variants)
    for out, exact in (
        (np.ones((2, 6)), np.ones((3, 4))),
        (np.ones((2, 3, 4)), np.ones((3, 2, 4))),
        (np.float32(1), 1.0),
    ):
        with pytest.raises(ArgumentError, match="exact: got shape"):
            errors(out, exact)
    assert errors(np.ones((3, 0)), np.ones((3, 0))).max_abs == 0
