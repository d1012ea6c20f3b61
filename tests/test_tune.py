"""The tuner tries legal tilings only, checks their bits, and what it keeps is what calls take."""

import json

import numpy as np
import pytest

from numflash import reference, tiling
from numflash.commands import tune
from numflash.commands.cli import main
from numflash.cpu import launch
from numflash.errors import ArgumentError
from numflash.jit.target import cpu_name, require
from numflash.tiling import choice


@pytest.fixture
def file(monkeypatch, tmp_path):
    file = tmp_path / "folder" / "tilings.json"
    monkeypatch.setenv("NUMFLASH_TILINGS", str(file))
    choice.saved.cache_clear()
    yield file
    choice.saved.cache_clear()


def test_only_legal_tilings_are_tried():
    found = tune.candidates("avx512_vnni")
    assert {(t.mr, t.nv) for t in found} >= {(6, 4), (12, 2), (8, 2)}
    assert all(choice.legal(t) for t in found) and (12, 4) not in {(t.mr, t.nv) for t in found}
    assert {(t.mr, t.nv) for t in tune.candidates("amx_int8")} == {(32, 4)}
    caches = tiling.CACHES["a64fx"]
    sve = min(tune.candidates("sve"), key=lambda t: tune.modelled(t, 128, caches))
    assert sve.accumulators >= 18


def test_what_is_kept_is_what_calls_take(file):
    t = choice.changed(tiling.TILINGS["avx2-int8"], {"block_q": 48})
    assert choice.save(t) == file
    assert json.loads(file.read_text()) == {cpu_name(): {"avx2-int8": {"block_q": 48}}}
    assert tiling.in_use("avx2").block_q == 48 and tiling.chosen("avx2") == ("avx2", (48,))
    with tiling.using("avx2", block_q=12):
        assert tiling.in_use("avx2").block_q == 12
    choice.save(tiling.TILINGS["avx2-int8"])
    assert tiling.chosen("avx2") == ("avx2", ()) and not json.loads(file.read_text())[cpu_name()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a file of tilings"),
        ("[1]", "not a file of tilings"),
        ('{"CPU": {"mmx-int8": {}}}', "no tiling 'mmx-int8'"),
        ('{"CPU": {"avx2-int8": {"mr": 9}}}', "mr = 9 breaks a rule"),
    ],
)
def test_a_file_that_makes_no_sense_is_named(file, text, message):
    file.parent.mkdir()
    file.write_text(text.replace("CPU", cpu_name()))
    with pytest.raises(ArgumentError, match=message):
        tiling.in_use("avx2")


@pytest.mark.skipif(require(None) == "portable", reason="no register tiles here")
def test_the_fastest_is_kept_and_wrong_bits_are_refused(file, monkeypatch, capsys):
    clock = iter(range(10**6))
    speed = {}

    def run(problem, isa):
        t = tiling.in_use(isa)
        speed["now"] = t.block_q
        return reference.integer_model(problem)

    monkeypatch.setattr(launch, "run", run)
    # the taller the query tile, the shorter the time
    monkeypatch.setattr(tune.time, "perf_counter", lambda: next(clock) + 1.0 / speed.get("now", 1))
    found = tune.run(16, 16, measured=3)
    assert file.exists() and found["kept"] == str(file) and len(found["ranking"]) == 3
    assert main(["tune", "16", "16", "--model"]) == 0
    assert "modelled cost" in capsys.readouterr().out
    monkeypatch.setattr(launch, "run", lambda problem, isa: (np.zeros(3), None))
    with pytest.raises(ArithmeticError, match="has other bits"):
        tune.run(16, 16, measured=1)
    with pytest.raises(ArgumentError, match="fixed sizes"):
        tune.run(isa="portable")
