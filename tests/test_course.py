"""`check` accepts what is right, refuses what is wrong, and says both in words."""

import numpy as np
import pytest

from numflash.course import lessons
from numflash.course.lessons import answers, check


@pytest.mark.parametrize(
    ("got", "expected", "verdict"),
    [
        (..., 5, "open"),
        ((1, ...), (1, 2), "open"),
        (5, 5, "right"),
        (6, 5, "wrong"),
        (5.0, 5, "right"),
        (5.0000001, 5.0, "right"),
        (5.01, 5.0, "wrong"),
        ("memory", "memory", "right"),
        ("Memory ", "memory", "right"),
        ("compute", "memory", "wrong"),
        (None, 5, "wrong"),
        ((1, 2), (1, 2), "right"),
        ((1, 2), (1, 3), "wrong"),
        (1, (1, 2), "wrong"),
        (True, True, "right"),
        (float("nan"), 1.0, "wrong"),
        (np.arange(3), np.arange(3), "right"),
        (np.arange(4), np.arange(3), "wrong"),
        ([0, 1, 2], np.arange(3), "right"),
        ("5", 5, "wrong"),
        ([1, [2]], np.arange(2), "wrong"),
    ],
)
def test_values(got, expected, verdict, capsys):
    check("it", got, expected)
    assert answers[-1].verdict == verdict
    said = capsys.readouterr().out
    assert said.startswith("it: ") and ("expected" in said and "got" in said) == (
        verdict == "wrong"
    )


def test_functions(capsys):
    def square(x):
        return x * x

    check("square", lambda x: x + x, square, (2,), (3,))
    assert (
        answers[-1].verdict == "wrong"
        and capsys.readouterr().out == "square: not yet: of (3) expected 9, got 6\n"
    )
    check("square", lambda x: x * x, square, (2,), (3,))
    assert answers[-1].verdict == "right"
    check("square", lambda x: ..., square, (2,))
    assert answers[-1].verdict == "open"
    check("square", lambda x: x[0], square, (2,))
    assert answers[-1].verdict == "wrong" and "TypeError" in capsys.readouterr().out


def test_tolerance():
    check("time", 1.04, 1.0, within=0.05)
    assert answers[-1].verdict == "right"
    check("time", 1.06, 1.0, within=0.05)
    assert answers[-1].verdict == "wrong"


def test_card_says_whether_there_is_one(capsys):
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    lessons.card.cache_clear()
    found = lessons.card()
    assert ("No GPU here" in capsys.readouterr().out) == (found is None)
