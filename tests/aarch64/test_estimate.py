"""`numflash estimate`.

Exact counts, the model's figures that the register tile was built for, and clear refusals.
"""

import json
import shutil

import pytest
from daily import of_today

pytest.importorskip("unicorn")
pytest.importorskip("elftools")

from numflash.commands import cli
from numflash.errors import ArgumentError, UnsupportedError
from numflash.machinecode import estimate

needs_mca = pytest.mark.skipif(not shutil.which("llvm-mca"), reason="needs llvm-mca")


@pytest.mark.parametrize(
    ("isa", "cpu", "bits"),
    [("sve", "a64fx", 128), ("sve", "a64fx", 512), ("neon_dot", "neoverse-n1", 128)],
)
@pytest.mark.parametrize("d", [64, *(pytest.param(d, marks=pytest.mark.slow) for d in (5, 128))])
def test_what_was_executed_is_known_to_the_instruction(isa, cpu, bits, d):
    parts = estimate.tile_parts(isa, cpu, bits, d)
    lanes = bits // 32
    groups = -(-d // 4)  # of four channels, the last one padded
    for part, dots in (("sums", 24 * groups), ("scores", 24 * 128 // lanes * groups)):
        emulated, arguments = parts[part]
        lines = emulated.trace(*arguments)
        assert estimate.dot_products(lines) == dots
        emulated(*arguments, count=True)
        assert 0 <= emulated.instructions - len(lines) < 64, (
            "only the padding of aligned labels is not in the text"
        )


@pytest.mark.slow
def test_longer_vectors_halve_the_instructions(capsys):
    found = estimate.run("a64fx", instructions_only=True)
    tiles = {row["bits"]: row for row in found["instructions"] if row["kernel"] == "sve"}
    assert sorted(tiles) == [128, 256, 512] and "cycles" not in found
    for shorter, longer in ((128, 256), (256, 512)):
        for part in ("scores", "values"):
            assert tiles[shorter][part] == pytest.approx(2 * tiles[longer][part], rel=0.02)
    assert all(
        row["scores"] > 2 * tiles[row["bits"]]["scores"]
        for row in found["instructions"]
        if row["kernel"] == "portable"
    )
    assert "portable" in capsys.readouterr().out


@needs_mca
@pytest.mark.slow
def test_the_model_of_the_a64fx(capsys):
    """What the tile was built for.

    0.52 in the loop and 0.62 for a whole D = 64 tile, where two pipes take 0.5.
    """
    assert cli.main(["estimate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cycles = {row["what"]: row["figure"] for row in found["cycles"]}
    assert cycles["SDOT that wait for nothing"] == pytest.approx(0.5, abs=0.01)
    assert 0.5 <= cycles["loop of the 6 x 4 tile"] <= 0.52
    assert 0.5 < cycles["6 x 4 tile to int32 sums in memory, D = 64"] <= 0.62
    for d in (64, 128):
        share = cycles[f"of the block's cycles not SDOT, D = {d}"]
        softmax = cycles[f"softmax, D = {d}"]
        products = cycles[f"both products, D = {d}"]
        assert share / 100 == pytest.approx(
            1 - 2 * d / 64 * 0.5 / (2 * d / 64 * products + softmax / 16), rel=0.02
        )
        # two pipes take 2.0 for float32, 128-bit vectors 8.0
        assert 2.0 <= cycles[f"float32 score tiles, sve512, D = {d}"] <= 2.0 / 0.9
        assert 2.0 <= cycles[f"float32 value tiles, sve512, D = {d}"] <= 2.0 / 0.9
        assert cycles[f"float32 value tiles, neon, D = {d}"] >= 8.0
    assert cycles["exp2 by fexpa"] < cycles["exp2 by fexpa-quadratic"] < 8
    assert found["limits"].startswith("a model, no hardware measured")


@needs_mca
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "limit"), of_today([("neoverse-v1", 1), ("neoverse-v2", 1), ("neoverse-n1", 2)], 3)
)
def test_other_cpus(cpu, limit):
    """limit : cycles that the pipes for dot products take for 64 multiply-adds."""
    try:
        found = estimate.run(cpu)
    except UnsupportedError as error:
        pytest.skip(f"this llvm-mca is older than {cpu}: {error}")
    alone, loop = (row["figure"] for row in found["cycles"][:2])
    assert alone >= 0.99 * limit and loop >= 0.99 * alone


def test_without_llvm_mca_there_is_one_clear_error(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert cli.main(["estimate"]) == 1
    said = capsys.readouterr()
    assert (
        said.out == ""
        and said.err.startswith("numflash: estimate: llvm-mca is not on PATH")
        and said.err.count("\n") == 1
    )


@pytest.mark.parametrize("cpu", ["znver4", "host", "a64"])
def test_other_machines_are_refused(cpu):
    with pytest.raises(ArgumentError, match=f"cpu: got '{cpu}'; allowed: 'a64fx', 'neoverse-v1'"):
        estimate.run(cpu)


@pytest.mark.parametrize(
    "complaint",
    [
        "echo error: unsupported instruction >&2; echo note: sdot >&2; exit 1",
        "echo \"'a64fx' is not a recognized processor for this target\" >&2",
    ],
)
def test_a_cpu_that_the_model_does_not_know(complaint, tmp_path, monkeypatch):
    broken = tmp_path / "llvm-mca-40"
    broken.write_text(
        f"#!/bin/sh\necho LLVM version 40.0\n[ $1 = --version ] || {{ {complaint}; }}\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    model = estimate.Model("a64fx")
    assert model.version == model.shown == "40.0"
    model.version = "14.0.6"
    assert model.shown.startswith("14.0.6 (take 19 or later")
    with pytest.raises(
        UnsupportedError,
        match=r"llvm-mca-40 cannot model 'a64fx', a newer LLVM may, .*(proc|instr)",
    ) as caught:
        model.cycles(["nop"])
    assert "\n" not in str(caught.value)
