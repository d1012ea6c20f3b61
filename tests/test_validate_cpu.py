"""`numflash validate`: wrong bits are noticed, reported and fail the command.

The JSON holds everything.
"""

import json

import numpy as np
import pytest

from numflash.commands import validate
from numflash.commands.cli import main
from numflash.cpu import launch
from numflash.measure import roofline

GOOD = {"check": "accuracy", "precision": "int8", "error": 0.01, "allowed": 0.03, "ok": True}


@pytest.fixture
def quick(monkeypatch):
    """One check, and peaks and times that are not measured."""
    monkeypatch.setattr(validate, "_plan", lambda quick: iter([("one", lambda: dict(GOOD))]))
    monkeypatch.setattr(
        roofline, "measure", lambda n: roofline.Roof("avx2", n, 1e12, 1e11, 1e10, 1e10)
    )
    monkeypatch.setattr(validate, "_attention_seconds", lambda d, threads, repeats: 1e-2 / threads)


def test_the_report_and_its_json(quick, tmp_path, capsys):
    file = tmp_path / "found.json"
    assert main(["validate", "--to", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["ok"] and found["cpu"] and not found["quick"]
    kinds = [x["check"] for x in found["checks"]]
    assert kinds.count("accuracy") == 1 and {"peak", "efficiency", "scaling"} < set(kinds)
    assert "allowed 0.03" in capsys.readouterr().out


def test_what_is_wrong_fails_after_everything_ran(quick, monkeypatch, tmp_path, capsys):
    bad = {"check": "bits", "isa": "sve", "pv": "int8", "ok": False, "wrong": ["causal"]}
    monkeypatch.setattr(validate, "_plan", lambda quick: iter([("one", lambda: bad)]))
    file = tmp_path / "found.json"
    assert main(["validate", "--quick", "--to", str(file)]) == 1
    assert not json.loads(file.read_text())["ok"]
    said = capsys.readouterr()
    assert "DIFFERENT: differs in causal" in said.out and "1 checks failed" in said.err
    assert main(["validate", "--to", str(tmp_path / "no" / "file")]) == 1
    assert "to: cannot write" in capsys.readouterr().err


def test_one_wrong_bit_is_noticed(monkeypatch):
    """The comparison, with the model itself as the kernel, and with one bit of it changed."""
    from numflash import reference

    def exact(problem, isa):
        return reference.integer_model(problem)

    def wrong(problem, isa):
        out, lse = reference.integer_model(problem)
        flat = out.reshape(-1)
        flat[0] = np.nextafter(flat[0], np.float32(9))
        return out, lse

    monkeypatch.setattr(launch, "run", exact)
    assert validate.bits("avx2", "int8")["ok"]
    monkeypatch.setattr(launch, "run", wrong)
    found = validate.bits("avx2", "int8")
    assert not found["ok"] and found["wrong"] == list(validate.CASES)


@pytest.mark.slow  # compiles the best instruction set's kernels
def test_this_machine():
    assert validate.run(quick=True)["ok"]
