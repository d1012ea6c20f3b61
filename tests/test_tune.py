"""The tuner tries legal tilings only, checks their bits, and what it keeps is what calls take."""

import json
import shutil

import numpy as np
import pytest

from numflash import reference, tiling
from numflash.commands import tune
from numflash.commands.cli import main
from numflash.cpu import launch
from numflash.errors import ArgumentError
from numflash.jit.target import FLOAT_ISAS, cpu_name, require
from numflash.tiling import rules, tuned


@pytest.fixture
def file(monkeypatch, tmp_path):
    file = tmp_path / "folder" / "tilings.json"
    monkeypatch.setenv("NUMFLASH_TILINGS", str(file))
    tuned.saved.cache_clear()
    yield file
    tuned.saved.cache_clear()


def test_only_legal_tilings_are_tried():
    found = tune.candidates("avx512_vnni")
    assert {(t.mr, t.nv) for t in found} >= {(6, 4), (12, 2), (8, 2)}
    assert all(rules.legal(t) for t in found) and (12, 4) not in {(t.mr, t.nv) for t in found}
    assert {(t.mr, t.nv) for t in tune.candidates("amx_int8")} == {(32, 4)}
    caches = tiling.CACHES["a64fx"]
    sve = min(tune.candidates("sve"), key=lambda t: tune.modelled(t, 128, caches))
    assert sve.accumulators >= 18


@pytest.mark.parametrize(
    ("isa", "dtype", "tiles"),
    [
        ("avx512", "float32", {(6, 4), (8, 3), (14, 2)}),
        ("avx2", "float32", {(6, 2), (4, 3), (12, 1)}),
        ("sve512", "float32", {(6, 4), (12, 2)}),
        ("avx512_bf16", "bfloat16", {(6, 4), (8, 3)}),
        ("amx_bf16", "bfloat16", {(32, 4)}),
    ],
)
def test_legal_tilings_of_floats_are_tried(isa, dtype, tiles):
    found = tune.candidates(isa, dtype)
    assert {(t.mr, t.nv) for t in found} >= tiles and len({tune.sizes(t) for t in found}) > 20
    assert {t.key_block > 128 for t in found} == {False, True}
    assert all(rules.legal(t).dtype == dtype for t in found)
    assert (12, 4) not in {(t.mr, t.nv) for t in found}
    if isa == "amx_bf16":
        assert {(t.mr, t.nv) for t in found} == tiles


def test_what_is_kept_of_a_float_kernel_is_what_calls_take(file):
    t = rules.changed(tiling.TILINGS["avx512-float32"], {"mr": 8, "nv": 3})
    assert (t.block_q, t.key_block) == (192, 240), "whole tiles, as near as they come"
    tuned.save(t)
    kept = {"mr": 8, "nv": 3, "key_block": 240}
    assert json.loads(file.read_text()) == {cpu_name(): {"avx512-float32": kept}}
    assert tiling.chosen_float("avx512", "float32") == ("avx512:8x3", (240,), 192)
    with tiling.using("avx512", "float32", block_q=96):
        assert tiling.chosen_float("avx512", "float32") == ("avx512", (), 96)
    tuned.save(tiling.TILINGS["avx512-float32"])
    assert tiling.chosen_float("avx512", "float32") == ("avx512", (), 192)


def test_what_is_kept_is_what_calls_take(file):
    t = rules.changed(tiling.TILINGS["avx2-int8"], {"block_q": 48})
    assert tuned.save(t) == file
    assert json.loads(file.read_text()) == {cpu_name(): {"avx2-int8": {"block_q": 48}}}
    assert tiling.in_use("avx2").block_q == 48 and tiling.chosen("avx2") == ("avx2", (48,))
    with tiling.using("avx2", block_q=12):
        assert tiling.in_use("avx2").block_q == 12
    tuned.save(tiling.TILINGS["avx2-int8"])
    assert tiling.chosen("avx2") == ("avx2", ()) and not json.loads(file.read_text())[cpu_name()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a file of tilings"),
        ("[1]", "not a file of tilings"),
        ('{"CPU": {"avx2-int8": 3}}', "not a file of tilings"),
        ('{"CPU": {"mmx-int8": {}}}', "no tiling 'mmx-int8'"),
        ('{"CPU": {"avx2-int8": {"mr": 9}}}', "mr = 9 breaks a rule"),
        ('{"CPU": {"avx2-int8": {"mr": "6"}}}', "mr: got '6'"),
        ("\xff", "not a file of tilings"),
        ("[" * 100_000, "not a file of tilings"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(file, text, message):
    file.parent.mkdir()
    file.write_text(text.replace("CPU", cpu_name()), encoding="latin-1")
    with pytest.raises(ArgumentError, match=message) as caught:
        tiling.in_use("avx2")
    assert str(file) in str(caught.value)


def test_a_user_without_a_home_folder(monkeypatch):
    """As in a container: no HOME, and a user who is in no list."""
    for name in ("NUMFLASH_TILINGS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what Python's own one does then
    tuned.saved.cache_clear()
    assert tiling.in_use("avx2") is tiling.TILINGS["avx2-int8"]
    with pytest.raises(
        ArgumentError, match=r"cannot be written: .*; allowed: another file, by NUMFLASH"
    ):
        tuned.save(tiling.TILINGS["avx2-int8"])
    tuned.saved.cache_clear()


@pytest.mark.skipif(require(None) == "portable", reason="no register tiles here")
def test_a_file_that_cannot_be_written_is_an_error_before_measuring(file, monkeypatch):
    file.parent.write_text("a file, and no folder")
    monkeypatch.setattr(tune, "_times", lambda *given: pytest.fail("measured"))
    with pytest.raises(ArgumentError, match="cannot be written"):
        tune.run(length=128, head_dim=32)


@pytest.mark.skipif(require(None) == "portable", reason="no register tiles here")
def test_the_fastest_is_kept_and_wrong_bits_are_refused(file, monkeypatch, capsys):
    clock, cost = [0.0], {}

    def run(problem, isa):
        t = tiling.in_use(isa, problem.precision)
        exact = reference.integer_model if problem.precision == "int8" else reference.oracle
        clock[0] += cost["of"](t)
        return exact(problem)

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(tune.time, "perf_counter", lambda: clock[0])
    cost["of"] = lambda t: 1 / t.block_q  # the taller the query tile, the shorter the time
    found = tune.run(16, 16, measured=3)
    assert file.exists() and found["kept"] == str(file) and len(found["ranking"]) == 3
    tallest = max(r["block_q"] for r in found["ranking"])
    assert found["best"]["block_q"] == tallest == tiling.in_use(found["isa"]).block_q
    cost["of"] = lambda t: 1 + 1e-6 * t.block_q  # no difference that counts
    assert tune.run(16, 16, measured=3)["best"]["block_q"] == tallest
    assert "in use, is the fastest" in capsys.readouterr().out
    in_use = tiling.in_use(require(None, FLOAT_ISAS), "float32")

    def rank(mr, nv, key_block):  # the tile in use comes last, whichever this machine has
        return float(key_block) + 1e6 * ((mr, nv) == (in_use.mr, in_use.nv))

    cost["of"] = lambda t: rank(t.mr, t.nv, t.key_block)
    found = tune.run(16, 16, measured=4, dtype="float32")
    best = min(found["ranking"], key=lambda r: rank(r["mr"], r["nv"], r["key_block"]))
    assert len({(r["mr"], r["nv"]) for r in found["ranking"]}) > 2, "other register tiles"
    assert [found["best"][x] for x in ("mr", "nv", "key_block")] == [
        best[x] for x in ("mr", "nv", "key_block")
    ]
    name, changed, _ = tiling.chosen_float(found["isa"], "float32")
    assert changed == (best["key_block"],) and name == f"{found['isa']}:{best['mr']}x{best['nv']}"
    assert main(["tune", "--shape", "16", "16", "--model"]) == 0
    assert "modelled cost" in capsys.readouterr().out
    off = reference.oracle
    monkeypatch.setattr(launch, "run", lambda problem, isa: (off(problem)[0] * 1.00001, None))
    with pytest.raises(ArithmeticError, match=r"key_block .* is off by 1e-05; allowed: 2e-06"):
        tune.run(16, 16, measured=1, dtype="float32")
    monkeypatch.setattr(launch, "run", lambda problem, isa: (np.zeros(3), None))
    with pytest.raises(ArithmeticError, match="has other bits"):
        tune.run(16, 16, measured=1)
    with pytest.raises(ArgumentError, match="isa: 'portable' has fixed sizes"):
        tune.run(isa="portable")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype: got 'float16'; allowed: 'int8', 'float32', 'bfloat16'"),
        ({"cpu": "a64fx"}, "cpu: got 'a64fx', which is not measured; allowed: with --model"),
        ({"cpu": "z80", "measured": 0}, "cpu: got 'z80'; allowed: 'host'"),
        (
            {"cpu": "a64fx", "measured": 0, "isa": "sve256", "dtype": "float32"},
            "isa: got 'sve256'; allowed for 'a64fx' and 'float32': 'sve512', 'neon'",
        ),
        (
            {"cpu": "a64fx", "measured": 0, "dtype": "bfloat16"},
            "dtype: got 'bfloat16', of which 'a64fx' has no tiles; allowed: another dtype or cpu",
        ),
    ],
)
def test_what_cannot_be_tuned(options, message):
    with pytest.raises(ArgumentError, match=message):
        tune.run(**options)


def test_the_model_alone_measures_nothing(capsys):
    assert main(["tune", "--model", "--measure", "2"]) == 1
    assert "--measure: got 2 together with --model" in capsys.readouterr().err


def test_the_shape_is_2048_by_128_unless_given(capsys):
    assert main(["tune", "--model"]) == 0
    usual = capsys.readouterr().out
    assert main(["tune", "--shape", "2048", "128", "--model"]) == 0
    assert usual == capsys.readouterr().out


def test_other_cpus_are_modelled(file, capsys):
    assert main(["tune", "--shape", "256", "64", "--model", "--cpu", "a64fx"]) == 0
    out = capsys.readouterr().out
    assert "a64fx, sve, int8" in out and not file.exists()
    assert "modelled cost: of a dot instruction" in out and "spread" not in out, (
        "nothing is measured"
    )


@pytest.mark.slow  # eight register tiles are compiled
def test_float_tiles_of_the_a64fx_are_ranked_by_their_instructions(file):
    pytest.importorskip("unicorn")
    if not shutil.which("llvm-mca"):
        pytest.skip("needs llvm-mca")
    found = tune.run(256, 128, measured=0, dtype="float32", cpu="a64fx")
    assert found["isa"] == "sve512" and not file.exists()
    cycles = {(r["mr"], r["nv"]): r["cycles"] for r in found["ranking"]}
    assert list(cycles.values()) == sorted(cycles.values())
    # two pipes of 16 lanes: 2 cycles per 64 products of float32 if nothing waits
    assert 1.99 < cycles[6, 4] < 2.5, cycles
