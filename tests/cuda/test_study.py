"""The ladder: every rung is right, and each claim that its sentence makes can be read off the counters."""
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from numflash.cuda import study


@pytest.fixture(scope="module")
def rows():
    return {row["rung"]: row for row in study.climb()}


@pytest.mark.slow
def test_what_each_rung_claims(rows):
    assert list(rows) == [rung.number for rung in study.LADDER]
    assert rows["1"]["global_bytes"] > 50 * rows["2"]["global_bytes"]              # tiles are read once per block
    assert rows["1"]["tensor_operations"] == rows["2"]["tensor_operations"] == 0
    assert rows["3"]["tensor_operations"] * 2 == rows["4"]["tensor_operations"]    # half, then all of the products
    assert rows["3"]["warp_instructions"] > 10 * rows["4"]["warp_instructions"]
    assert rows["4"]["shared_conflicts"] > 0
    assert rows["5a"]["shared_conflicts"] == rows["5b"]["shared_conflicts"] == 0   # both layouts, without and with padding
    assert rows["5a"]["shared_bytes"] > rows["5b"]["shared_bytes"]
    assert rows["7"]["shared_bytes_read"] < rows["6"]["shared_bytes_read"]
    assert rows["7h"]["error"] > rows["7"]["error"]
    assert rows["9"]["warp_instructions"] < rows["7"]["warp_instructions"]


@pytest.mark.slow
def test_machine_code_keeps_fragments_in_registers(rows):
    if rows["1"]["stack"] is None:
        pytest.skip("needs cuobjdump and nvdisasm: pip install 'numflash[sass]'")
    assert {row["stack"] for row in rows.values()} == {0}


@pytest.mark.slow
def test_the_table_shows_every_rung(rows):
    text = study.table(list(rows.values()))
    assert text.count("\n") == len(study.LADDER) + 1 and "softmax beside the products" in text
