"""Who holds what: every token once, there and back, and the balance of causal work.

Needs no MPI.
"""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import qkv

from numflash.commands import cli
from numflash.errors import ArgumentError, NumflashError, UnsupportedError
from numflash.mpi import Split, causal_work, imbalance, ring_attention


@settings(deadline=None)
@given(st.integers(0, 70), st.integers(1, 9), st.sampled_from(["plain", "zigzag"]))
def test_every_token_once_and_back(length, ranks, name):
    split = getattr(Split, name)(length, ranks)
    x = np.arange(3 * length).reshape(length, 3)
    shards = [split.shard(x, r) for r in range(ranks)]
    assert (
        split.ranks == ranks
        and split.length == length
        and [len(s) for s in shards] == list(split.lengths)
    )
    np.testing.assert_array_equal(np.sort(split.permutation()), np.arange(length))
    np.testing.assert_array_equal(np.concatenate(shards), x[split.permutation()])
    np.testing.assert_array_equal(split.join(shards), x)
    assert max(split.lengths) - min(split.lengths) <= 2


def test_zigzag_deals_front_and_back():
    assert Split.zigzag(16, 4).chunks == (
        ((0, 2), (14, 16)),
        ((2, 4), (12, 14)),
        ((4, 6), (10, 12)),
        ((6, 8), (8, 10)),
    )
    assert Split.zigzag(3, 4).lengths == (1, 1, 1, 0)
    assert Split.of_lengths([2, 0, 3]).chunks == (((0, 2),), (), ((2, 5),))


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 6), st.sampled_from(["plain", "zigzag"]))
def test_causal_work_is_counted(length, ranks, name):
    split = getattr(Split, name)(length, ranks)
    work = causal_work(split)
    owner = np.empty(length, int)
    for r in range(ranks):
        owner[split.indices(r)] = r
    exact = np.zeros((ranks, ranks), int)
    for i in range(length):
        for j in range(i + 1):
            exact[owner[i], (owner[i] - owner[j]) % ranks] += 1
    np.testing.assert_array_equal(work, exact)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_balances_what_plain_does_not(ranks):
    length = 1024 * ranks
    assert imbalance(Split.plain(length, ranks)) == pytest.approx((2 * ranks - 1) / ranks, rel=1e-3)
    assert imbalance(Split.zigzag(length, ranks)) == 1.0
    assert (
        causal_work(Split.zigzag(length, ranks)).max(0).sum()
        <= 1.001 * length * (length + 1) / 2 / ranks
    )  # at every step
    assert imbalance(Split.plain(0, ranks)) == 1.0


@pytest.mark.parametrize(
    "chunks", [(((0, 3),), ((2, 5),)), (((0, 3),), ((4, 5),)), (((1, 3),),), (((3, 0),),)]
)
def test_a_split_that_is_none(chunks):
    with pytest.raises(
        ArgumentError, match=r"chunks: got a chunk .* allowed: each token exactly once"
    ):
        Split(chunks)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Split(None), "chunks: got None"),
        (lambda: Split((((0, 1.5),),)), "chunks: got"),
        (lambda: Split(((0, 3), (3, 5))), "chunks: got"),
        (lambda: Split.of_lengths([3.7, 2]), "lengths: got 3.7"),
        (lambda: Split.of_lengths([3, -2]), "lengths: got -2"),
        (lambda: Split.plain(10.5, 2), "length: got 10.5"),
        (lambda: Split.plain("10", 2), "length: got '10'"),
        (lambda: Split.plain(10, 0), "ranks: got 0; allowed: integers from 1 on"),
        (lambda: Split.zigzag(10, -1), "ranks: got -1"),
        (lambda: Split.plain(10, 2).indices(2), "rank: got 2; allowed: 0 to 1"),
        (lambda: Split.plain(10, 2).shard(np.zeros((10, 4)), -1), "rank: got -1"),
        (lambda: Split.zigzag(10, 2).shard(np.zeros((12, 4)), 0), r"x: got shape \(12, 4\)"),
        (lambda: Split.plain(10, 2).shard(np.zeros(10), 0), "x: got shape .* along axis -2"),
        (lambda: Split.plain(10, 2).shard(np.zeros((10, 4)), 0, "a"), "axis: got 'a'"),
        (lambda: Split.plain(10, 2).join(iter([np.zeros((10, 4))])), "shards: got 1; allowed: 2"),
        (
            lambda: Split.plain(10, 2).join([np.zeros((6, 4)), np.zeros((4, 4))]),
            r"shards\[0\]: got shape \(6, 4\); allowed: 5 tokens along axis -2",
        ),
    ],
)
def test_wrong_arguments(make, words):
    with pytest.raises(NumflashError, match=words):
        make()


def test_numflash_does_not_load_mpi():
    code = "import sys, numflash; numflash.attention; import numflash.mpi; assert 'mpi4py' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_mpi4py(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert cli.main(["demo", "ring"]) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith("numflash: demo ring: mpi4py cannot be loaded here")
        and "pip install 'numflash[mpi]'" in error
    )
    with pytest.raises(UnsupportedError, match="comm: mpi4py cannot be loaded here"):
        ring_attention(None, *qkv(l=2))
