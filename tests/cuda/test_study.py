"""The ladder: every rung is right, and each claim that its sentence makes can be read off the
counters.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from sass_checks import resources

from numflash.cuda import cycles, emulate, study
from numflash.cuda.compile import compiled, sass
from numflash.cuda.device import operands
from numflash.cuda.emulator import EmulatorError
from numflash.cuda.study import specialised
from numflash.cuda.study.tensor_cores import register_blocks
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
    assert rows["7s"]["tensor_operations"] == rows["7a"]["tensor_operations"]
    # results leave in whole sectors of 32 bytes; 7a's lanes store 16 of them at a time
    assert rows["7a"]["global_moved"] - rows["7s"]["global_moved"] == 2 * 256 * 64
    assert rows["7s"]["warp_instructions"] > rows["7a"]["warp_instructions"]
    # five warps meet at each of: K and V, full and empty, per tile; the two buffers of each, empty
    # once more; Q full, empty and empty once more; results empty and full
    assert rows["7s"]["barriers"] == 4 * 5 * (4 * 4 + 2 * 2 + 3 + 2)
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


@pytest.mark.parametrize(
    ("arch", "rungs"), [("sm_75", "1 2 3 4 5a 5b 7a 7b"), ("sm_90a", "8 9a 9b")]
)
def test_rungs_of_an_architecture(arch, rungs):
    """Turing has neither cp.async nor k16 products that add up float16; Hopper alone has the last rungs."""
    found = {rung.number for rung in study.LADDER if rung.runs_on(arch)}
    assert found == {*rungs.split()} if arch == "sm_75" else {*rungs.split()} < found
    assert all(not rung.runs_on("sm_89") for rung in study.LADDER if rung.number[0] in "89")


@pytest.mark.slow
def test_the_rungs_of_a_t4():
    """Right in the emulator, and ptxas takes them for sm_75, without a stack or spills."""
    rows = {
        row["rung"]: row
        for row in study.climb(128, arch="sm_75", rungs=("3", "4", "5b", "7a", "7b"))
    }
    assert rows["4"]["tensor_flops"] == rows["7b"]["tensor_flops"] == 4 * 128 * 128 * 64
    assert (
        rows["7b"]["tensor_operations"]
        == rows["4"]["tensor_operations"]
        == 2 * 128 * 128 * 64 // (16 * 8 * 8)
    )
    assert {row["stack"] for row in rows.values()} | {row["spills"] for row in rows.values()} <= {
        0,
        None,
    }


def exact(q, k, v, causal):
    """Attention of heads (H, L, D) by its definition, in float64."""
    q, k, v = (x.astype(np.float64).repeat(q.shape[0] // x.shape[0], 0) for x in (q, k, v))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2])
    if causal:
        scores[:, np.arange(k.shape[1]) > np.arange(q.shape[1])[:, None]] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


# heads, key heads, L, S, D, causal, blocks that share a head's tiles
SPECIALISED = [
    pytest.param((1, 1, 1, 1, 64, True, None), marks=pytest.mark.slow),
    pytest.param((2, 1, 130, 200, 64, False, 2), marks=pytest.mark.slow),
    pytest.param((4, 2, 257, 257, 64, True, 2), marks=pytest.mark.slow),
    pytest.param((1, 1, 300, 70, 64, True, 1), marks=pytest.mark.slow),
    pytest.param((1, 1, 70, 300, 128, False, 1), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", SPECIALISED, ids=str)
def test_specialised_warps(case, seed):
    """Rung 7s: odd lengths, causal, grouped heads, several tiles per block, two schedules."""
    heads, groups, length, keys, d, causal, blocks = case
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.standard_normal((h, n, d)).astype(np.float16)
        for h, n in ((heads, length), (groups, keys), (groups, keys))
    )
    step = specialised.launch(q, k, v, causal=causal, blocks=blocks)
    out, _, report = operands.emulated(step, seed=seed)
    expected = exact(q, k, v, causal)
    assert np.abs(out - expected).max() < 2e-3
    assert np.linalg.norm(out - expected) < 1e-3 * np.linalg.norm(expected)
    assert report.shared_conflicts == 0


FORGOTTEN = {
    "the copies are not waited for": ("landed()", "pass", "pending"),
    "results are stored before they are all there": (
        "ptx.barrier(O_FULL, MEET)", "ptx.barrier_arrive(O_FULL, MEET)", "race uninitialised",
    ),
    "a tile of K is given back before it is read": (
        "scores(s, qf, sk + stage * tile, lane)\n" + 16 * " " + "ptx.barrier_arrive(K_EMPTY + stage, MEET)",
        "ptx.barrier_arrive(K_EMPTY + stage, MEET)\n" + 16 * " " + "scores(s, qf, sk + stage * tile, lane)",
        "race pending",
    ),
    "V is not waited for": (
        "ptx.barrier(V_FULL + stage, MEET)", "ptx.barrier_arrive(V_FULL + stage, MEET)",
        "race pending uninitialised",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FORGOTTEN)
def test_a_forgotten_wait_is_found(fault, tmp_path, monkeypatch):
    """The kernel with one line changed: the emulator names the fault."""
    there, instead, kinds = FORGOTTEN[fault]
    text = Path(specialised.__file__).read_text()
    assert text.count(there) == 1
    text = text.replace(there, instead).replace("from ...", "from numflash.")
    text = text.replace("from ..", "from numflash.cuda.").replace(
        "from .", "from numflash.cuda.study."
    )
    (tmp_path / "broken_rung.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_rung", raising=False)
    broken = importlib.import_module("broken_rung")
    q, k, v, _ = study.problem(256, 64, 0)
    step = broken.launch(q[None], k[None], v[None], blocks=2)
    source = step.factory(**step.constants)
    with pytest.raises(EmulatorError) as caught:
        emulate(source, step.grid, None, list(step.args), arch="sm_89")
    assert caught.value.kind in kinds.split(), caught.value


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
@pytest.mark.parametrize(("d", "causal"), [(64, False), (64, True), (128, True)])
def test_machine_code_of_specialised_warps(arch, d, causal):
    """No stack; no copy stands in the loop of the products, which is shorter than rung 7a's."""
    found = resources(specialised.specialised, arch, d=d, causal=causal, tails=causal)
    assert found.count("HMMA") == d and found.count("LDGSTS") == 3 * d // 4
    if not causal:
        loops = [
            [name for name, _ in cycles.main_loop(sass.instructions(compiled(*x).code)) if name]
            for x in ((specialised.specialised, arch, "cubin"), (register_blocks, arch, "cubin"))
        ]
        assert not any(x.startswith("LDGSTS") for x in loops[0]) and len(loops[0]) < len(loops[1])


def test_a_rung_that_is_wrong_is_not_counted():
    expected = study.problem(128, 64, 0)[3]
    with pytest.raises(NumflashError, match=r"rung 1: relative error 1\.00e\+00"):
        study.validated(study.LADDER[0], np.zeros_like(expected), expected)
