"""`numflash estimate exp2|unfused|improvements|attention`: the notes' kernels as A64FX code, right and
in whole registers, and the model of caches and energy.
"""

import json
import shutil

import numba
import numpy as np
import pytest

pytest.importorskip("unicorn")
pytest.importorskip("elftools")

from numflash.commands import cli
from numflash.cpu.study import half_tiles, unfused
from numflash.errors import ArgumentError
from numflash.machinecode import (
    assembly,
    codegen,
    estimate_attention,
    estimate_check,
    estimate_exp2,
    estimate_improvements,
    estimate_unfused,
    machines,
    model,
)
from numflash.machinecode.emulator import Emulated
from numflash.numerics import fixedpoint

needs_mca = pytest.mark.skipif(not shutil.which("llvm-mca"), reason="needs llvm-mca")


def test_the_exp2_kernels_work_on_whole_registers():
    """Four keys at a time by FEXPA: 64 FMLA of 16 lanes for every four keys, a DUP for every four
    of them.
    """
    run = estimate_exp2.emulated("fused4", "fexpa", "register", "a64fx")
    lines = estimate_exp2.checked_trace(run, "fused4", "fexpa", 64)
    assert (
        sum(line.startswith("fmla\tz") or line.startswith("fmad\tz") for line in lines) >= 64 * 16
    )
    assert not any(line.split("\t")[0] == "fmla" and ".4s" in line for line in lines)
    assert sum(line.startswith("fexpa") for line in lines) == 64 / 4
    dups = sum(bool(estimate_exp2.DUP.match(line.replace("\t", " "))) for line in lines)
    assert dups == pytest.approx(64 * 4, abs=8)


def test_softmax_passes_stay_in_32_bit_lanes():
    """The weights are the fixed-point ones; 34 instructions for 16 scores (25 of them the exp2), where
    64-bit lanes take 60.
    """
    passes = estimate_unfused.softmax_passes("a64fx")
    run, (s, count, scale, top, e, l) = passes["exponential and sum"]
    run(s, count, scale, top, e, l, count=True)
    q8, top_q8 = (np.rint(x.astype(np.float32) * scale).astype(np.int64) for x in (s, top))
    below = np.minimum(top_q8[:, None] - q8, 65535).astype(np.uint32)
    np.testing.assert_array_equal(e, fixedpoint.exp2_quadratic(below).astype(np.int32))
    np.testing.assert_array_equal(l, e.sum(1, dtype=np.int64))
    assert run.instructions <= 36 * s.size / 16


@pytest.mark.parametrize("bits", [128, 512])
def test_values_in_halves(bits):
    """FP16 sums of one key block, as exact as such sums are, at the shortest and the longest
    vectors; two steps of FMLA for 32 lanes, none of float32.
    """
    tile, lanes = half_tiles.make_value_tile(), bits // 32
    columns = 8 * lanes

    @numba.njit(error_model="numpy")
    def values(p, v, o):
        tile(p, 0, p.shape[1], v, 0, v.shape[1], p.shape[1], o, 0, o.shape[1])

    signature = "void(uint16[:,::1], uint16[:,::1], float32[:,::1])"
    run = Emulated(values, signature, "a64fx", vector_bits=bits)
    rng = np.random.default_rng(0)
    p, v = rng.random((6, 64), np.float32), rng.standard_normal((64, columns), np.float32)
    o = np.ones((6, columns), np.float32)
    lines = run.trace(p.astype(np.float16).view(np.uint16), half_tiles.pack(v, lanes), o)
    wanted = 1 + p.astype(np.float64) @ v.astype(np.float64)
    error = np.abs(o - wanted).sum() / np.abs(wanted - 1).sum()
    assert error <= 1.5 * half_tiles.relative_error(p, v) < 4e-3
    assert sum("fmla" in x and ".h" in x for x in lines) == 64 * 24
    assert not any("fmla" in x and ".s" in x for x in lines)


def test_what_follows_from_cycles_of_a_block():
    cycles = {
        "the summary's": 2100.0,
        "vector exp2": 2000.0,
        "prefetching": 2100.0,
        "INT8 P.V": 1000.0,
    }
    found = {g.name: g for g in estimate_improvements.gains("a64fx", cycles, 600.0, 1200.0)}
    assert set(found) == set(estimate_improvements.PREDICTED)
    assert found["vector code for exp2"].low == pytest.approx(1.05)
    assert found["16-bit P.V"].low == pytest.approx(2000 / 1400) and found["INT8 P.V"].low == 2
    length, rows = estimate_improvements.LENGTH, 24  # the last tile has only 16 rows
    seen = np.tri(length, dtype=bool).reshape(length, -1, 128).any(2)
    tiles = sum(seen[at : at + rows].any(0).sum() for at in range(0, length, rows))
    assert found["causal skipping"].low == -(-length // rows) * seen.shape[1] / tiles
    assert found["prefetching"].low < 1 < found["prefetching"].high
    waiting = 81920 * 12 / 113.75  # cycles of 2 GHz for a block's bytes, 227.5 GB/s for 12 cores
    assert found["threads"].low == pytest.approx(12 * 2000 / waiting)
    assert found["threads"].high == 12
    assert all(0.9 < g.low <= g.high for g in found.values())


@needs_mca
@pytest.mark.slow
def test_a_block_of_the_whole_fused_kernel():
    """Held against float64 inside; 8,192 cycles of dot products alone."""
    model = estimate_improvements.Model("a64fx")
    cycles, instructions = estimate_improvements.block_cycles(
        model, "sve", "vectors", "int8", False
    )
    assert 6144 < cycles < 11000 and instructions > 2 * 6144


def test_reference_counts_are_left_out():
    found = model._ATOMICS
    assert all(map(found.match, ("ldadd\tx8, x8, [x0]", "swpal x1, x2, [x3]", "casa x1, x2, [x3]")))
    assert not any(map(found.match, ("ld1w { z0.s }, p0/z, [x1]", "str x1, [x2]", "ldr x1, [x2]")))


def test_bytes_that_instructions_move():
    lines = [
        "ld1b	{ z0.b }, p0/z, [x1]",
        "ld1rw	{ z1.s }, p0/z, [x2]",
        "st1w { z2.s }, p1, [x3]",
    ]
    lines += ["ldp	q0, q1, [x4]", "str	x5, [sp]", "add x1, x1, #1", "prfm pldl2strm, [x1]"]
    assert estimate_attention.moved_bytes(lines, 512) == 64 + 4 + 64 + 32 + 8
    block = estimate_attention.Block("b", 100.0, 10, 6400, 64, {})
    a64fx = machines.MACHINES["a64fx"]
    small = estimate_attention.time(a64fx, block, 24 * 16)
    assert small.home == "L1" and "L2" not in small.traffic and small.traffic["L1"] == 10 * 16 * 3
    large = estimate_attention.time(a64fx, block, 24 * 1280)
    assert large.home == "L2" and large.open > large.hidden
    shared = estimate_attention.time(a64fx, block, 24 * 1280, 12)
    assert shared.home == "memory" and shared.traffic["memory"] > large.traffic["memory"]


def test_the_loops_that_the_check_models():
    """Two stores of 16 weights, one product of a key with 64 columns (or 16 of narrower vectors)."""
    moved = "vmovaps %zmm6, %zmm5"  # no store
    exp2 = [".L1:", *("vmovdqu64 %zmm4, (%rax)", moved, "vmovups %zmm5, 64(%rax)", "jne .L1")]
    text = "\n".join(["f:", *exp2, "ret", ".Lfunc_end0:"])
    assert estimate_check.hot_loop("exp2", text)[1] == 32
    vectors = (
        estimate_check.exp2_values.COLUMNS
        * 4
        // (16 if estimate_check.exp2_values.COLUMNS > 16 else 8)
    )
    product = ["vfmadd231ps %zmm1, %zmm2, %zmm3"] * vectors
    text = "\n".join(["f:", ".L2:", *product, "jne .L2", *exp2, ".Lfunc_end0:"])
    body, keys = estimate_check.hot_loop("gemm", text)
    assert len(body) == vectors + 1 and keys == 1
    machine = estimate_check.this_machine(2e9, 1e10)
    assert machines.transfer(machine, 1 << 40, 5.0) == 1, "bytes of 10 GB/s at 2 GHz"


@needs_mca
@pytest.mark.slow
def test_attention_with_caches_and_energy(capsys):
    assert cli.main(["estimate", "attention", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    int8, float32 = found["blocks"]
    assert 2.5 < float32["cycles"] / int8["cycles"] < 4.5 and int8["streamed"] < float32["streamed"]
    for row in found["int8"]:
        hidden, plain = row["runs"][0]["rates"]
        assert 0.5 * 512e9 < plain <= hidden < 512e9
    watts = {(row["attention"], row["mode"]): row["watts"] for row in found["energy"]}
    assert watts["INT8", "eco"] < watts["INT8", "normal"] < watts["INT8", "boost"]
    assert "Green500" in found["sources"]


@needs_mca
@pytest.mark.slow
def test_the_model_of_this_machine(monkeypatch, capsys):
    monkeypatch.setattr(estimate_check, "CASES", estimate_check.CASES[:1])
    monkeypatch.setattr(estimate_check, "SIZES", estimate_check.SIZES[:2])
    if cli.main(["estimate", "check", "--json"]):
        pytest.skip(capsys.readouterr().err)  # this llvm-mca is older than the machine
    found = json.loads(capsys.readouterr().out)
    assert 0.1 < found["kernels"][0]["measured"] / found["kernels"][0]["modelled"] < 10
    assert len(found["memory"]) == 2


@pytest.mark.slow
def test_the_streaming_hint_of_the_unfused_product():
    code = codegen.compile_for(
        unfused.make_gemm("sve", ahead=True),
        "void(int8[:,::1], int8[::1], int32[::1], int32[:,::1], int32[::1])",
        codegen.Target.named("a64fx"),
    ).assembly
    assert "pldl2strm" in code and len(assembly.functions(code)) >= 1


def test_bytes_and_joules_of_the_machine_model():
    a64fx = machines.MACHINES["a64fx"]
    assert machines.home(a64fx, 60 << 10).name == "L1"
    assert machines.home(a64fx, 1 << 20).name == "L2" and machines.home(a64fx, 1 << 24) is None
    assert machines.transfer(a64fx, 60 << 10, 1 << 20) == 0
    assert machines.transfer(a64fx, 1 << 20, 6400) == 100
    alone, shared = (machines.transfer(a64fx, 1 << 24, 6400, n) for n in (1, 12))
    # cycles of 0.5 ns: a core by itself loads 17.85 bytes in one, each of twelve 9.48
    assert alone == pytest.approx(6400 / 17.85)
    assert shared == pytest.approx(6400 * 12 / 113.75)
    work = {"int8 to int32": 1e9}, {"L2": 1e6, "memory": 1e6}, 1e-3
    normal, boost, eco = (machines.energy(a64fx, *work, mode) for mode in a64fx.modes)
    assert normal.arithmetic == pytest.approx(1e-4)
    assert normal.levels["memory"] == pytest.approx(43.75e-6) == boost.levels["memory"]
    assert boost.rest / normal.rest == pytest.approx(1.17) and eco.rest < normal.rest
    assert 0.5 < machines.rest_watts(a64fx) / a64fx.node_watts < 1
    with pytest.raises(ArgumentError, match="cpu: got 'znver4'; allowed: 'a64fx'"):
        machines.known("znver4")


@needs_mca
@pytest.mark.slow
def test_the_tables_beside_the_documents(monkeypatch, capsys):
    """The product near the roof, exp2 by FEXPA below one cycle a score, 12 x 8 spilt."""
    few = [("gemm", "", "memory"), ("exp2", "fexpa", "")]
    few += [("fused4", "fexpa", way) for way in ("register", "memory")]
    monkeypatch.setattr(estimate_exp2, "combinations", lambda cpu: few)
    assert cli.main(["estimate", "exp2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    product, dup, load = found["kernels"]
    assert 8 * 64 <= product["cycles"]["64"] < 8 * 64 / 0.8 and product["spills"] == 0
    assert dup["dup"] >= 15 and load["ld1rw"] >= 14
    # a load that waits for its store costs more than DUP by the model of LLVM 22, as much by 14's
    assert load["cycles"]["512"] < dup["cycles"]["512"] < 1.01 * load["waiting"]["512"]
    (taller,) = found["taller"]  # M = 16: four tiles of 4 rows, the start of a call once
    assert taller["kernel"] == "gemm" and taller["m"] == 16
    assert 4 * 8 * 64 <= taller["cycles"]["64"] < 4.02 * product["cycles"]["64"]
    assert found["exp2"][0]["cycles_per_score"] < 1 and "DUP" in found["broadcast"]
    assert cli.main(["estimate", "unfused", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    tiles = {(row["mr"], row["nv"]): row for row in found["tiles"]}
    assert tiles[6, 4]["cycles"] < 0.6 and tiles[6, 4]["spills"] == 0
    assert tiles[12, 8]["cycles"] > 0.9 and tiles[12, 8]["spills"] > 50
    assert all(0.5 < row["one"]["share_with_memory"] < 1 for row in found["lengths"])
    assert all(0.4 < row["one"]["softmax_share"] < 0.8 for row in found["lengths"])
