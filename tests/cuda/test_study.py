"""The ladder: every rung is right, and each claim that its sentence makes can be read off the
counters.
"""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from numflash.cuda import study
from numflash.errors import NumflashError


@pytest.fixture(scope="module")
def rows():
    return {row["rung"]: row for row in study.climb()}


@pytest.mark.slow
def test_what_each_rung_claims(rows):
    assert list(rows) == [rung.number for rung in study.LADDER]
    assert (
        rows["1"]["global_moved"] > 10 * rows["2"]["global_moved"]
    )  # tiles are read once per block
    assert rows["1"]["tensor_flops"] == rows["2"]["tensor_flops"] == 0
    assert (
        rows["3"]["tensor_flops"] * 2 == rows["4"]["tensor_flops"] == 4 * 256 * 256 * 64
    )  # half, then all of the products
    assert rows["3"]["warp_instructions"] > 10 * rows["4"]["warp_instructions"]
    assert rows["4"]["shared_conflicts"] == 7 * (
        rows["4"]["shared_wavefronts"] - rows["4"]["shared_conflicts"] - copies(rows["4"])
    )
    assert (
        rows["5a"]["shared_conflicts"] == rows["5b"]["shared_conflicts"] == 0
    )  # both layouts, without and with padding
    assert rows["5a"]["shared_bytes"] == rows["5b"]["shared_bytes"] + 3 * 64 * 16
    assert rows["6"]["barriers"] < 0.6 * rows["5b"]["barriers"]  # one per tile instead of two
    assert rows["7a"]["shared_bytes_read"] < rows["6"]["shared_bytes_read"]
    tiles = 2 * 256 * 64 * 2  # a pass over K and V
    assert (
        rows["7a"]["global_moved"] - rows["7b"]["global_moved"] == 2 * tiles
    )  # four blocks read them, then two
    assert rows["7b"]["tensor_operations"] == rows["7a"]["tensor_operations"]
    assert rows["7b"]["shared_bytes_read"] < 0.55 * rows["7a"]["shared_bytes_read"]
    assert rows["7h"]["error"] > rows["7a"]["error"]
    assert rows["9a"]["warp_instructions"] < rows["7a"]["warp_instructions"]
    turns = 2 * 2 * 2 * 4  # blocks, tiles, warpgroups, warps
    ends = 2 * 2 * 4  # in each block one warpgroup gives the first turn, the other takes the last
    assert (
        rows["9b"]["barriers"] - rows["9a"]["barriers"] == 2 * turns + ends
        and rows["9b"]["error"] == rows["9a"]["error"]
    )


def copies(row):
    """Wavefronts of rung 4's 16-byte stores, which do not conflict.

    Q once, K and V once per block of 64 queries.
    """
    return (256 + 4 * 2 * 256) * 128 // 128


@pytest.mark.slow
def test_machine_code_keeps_fragments_in_registers(rows):
    if rows["1"]["stack"] is None:
        pytest.skip("needs cuobjdump and nvdisasm: pip install 'numflash[sass]'")
    assert (
        {row["stack"] for row in rows.values()} == {row["spills"] for row in rows.values()} == {0}
    )
    assert rows["7b"]["registers"] > rows["7a"]["registers"]


@pytest.mark.slow
def test_the_table_shows_every_rung(rows):
    text = study.table(list(rows.values()))
    assert (
        text.count("\n") == 2 * (len(study.LADDER) + 2)
        and "softmax beside the products" in text
        and "us" not in text.split()
    )
    timed = study.table(list(rows.values()), {"1": (2e-3, 1e-3)})
    assert "| 2000.0 | 1000.0 |" in timed and timed.count("| - | - |") >= len(study.LADDER) - 1


def test_a_rung_that_is_wrong_is_not_counted():
    expected = study.problem(128, 64, 0)[3]
    with pytest.raises(NumflashError, match=r"rung 1: relative error 1\.00e\+00"):
        study.validated(study.LADDER[0], np.zeros_like(expected), expected)
