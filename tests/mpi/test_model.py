"""The model of scale against its own definition, and by hand. Needs no MPI."""

import pytest

from numflash.errors import ArgumentError
from numflash.mpi.model import LINKS, Link, Ring


@pytest.mark.parametrize("link", LINKS, ids=lambda x: x.name)
@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rate", [1e9, 1e11, 1e13])
def test_hiding_length_is_the_shortest_that_hides(link, precision, causal, rate):
    ring = Ring(rate, link, 32, 8, 128, precision, causal)
    n = ring.hiding_length()
    assert ring.kernel(n) >= ring.exchange(n) and ring.kernel(n - 1) < ring.exchange(n - 1)


@pytest.mark.parametrize(
    ("name", "wrong"), [("precision", "int4"), ("rate", 0), ("heads", -1), ("head_dim", 0)]
)
def test_no_ring(name, wrong):
    given = {"rate": 1e12, "link": LINKS[0], "heads": 8, "kv_heads": 2, "head_dim": 64}
    with pytest.raises(ArgumentError, match=f"{name}: got .*allowed"):
        Ring(**{**given, "precision": "int8", name: wrong})


def test_by_hand():
    ring = Ring(1e12, Link("a", 1e10, 1e-6, ""), 8, 2, 128, "int8")
    assert ring.token_bytes == 2 * (128 + 128 + 4) and ring.sent(1000, 5) == 4 * 1000 * 520
    assert ring.kernel(1000) == pytest.approx(4 * 8 * 128 * 1e6 / 1e12)
    causal = Ring(1e12, ring.link, 8, 2, 128, "int8", causal=True)
    assert causal.kernel(1000) == ring.kernel(1000) / 2 and causal.exchange(1000) == ring.exchange(
        1000
    )
    assert ring.exchange(1000) == pytest.approx(1e-6 + 520e3 / 1e10)
    assert ring.seconds(1000, 5) == pytest.approx(5 * ring.kernel(1000))  # hidden
    assert ring.seconds(10, 5) == pytest.approx(
        ring.kernel(10) + 4 * ring.exchange(10)
    )  # not hidden
    assert Ring(1e12, LINKS[0], 8, 8, 64, "float32").token_bytes == 8 * (64 + 64) * 4
