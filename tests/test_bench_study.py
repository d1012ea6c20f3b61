"""`numflash bench --study` and the columns of `make bench`: what the tables make of given figures."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from numflash.commands import bench_study, cli
from numflash.cpu.study import exp2_benchmark, improvements, unfused_times
from numflash.cpu.study.unfused_times import Component, Times

CONFTEST = Path(__file__).parent / "benchmarks" / "conftest.py"


def as_json(capsys, *words):
    assert cli.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_improvements_show_their_spread(monkeypatch, capsys):
    gains = [
        improvements.Gain("even", (1.2, 1.3), 2.0, 1.0, "a: b", 0.1),
        improvements.Gain("uneven", (2, 2), 2.0, 1.0, "a: b", 0.4),
    ]
    monkeypatch.setattr(improvements, "measure", lambda length, head_dim: gains)
    table = bench_study.improvements_table()
    assert [row[2] for row in table.rows] == ["2.00", "(2.00) disturbed"]
    assert [row[5] for row in table.rows] == ["10 %", "40 %"] and "disturbed" in table.note
    found = as_json(capsys, "bench", "--study", "improvements")
    assert [r["measured"] for r in found["results"]] == [2, 2]


def test_the_exp2_table_has_a_column_for_every_length(monkeypatch):
    rows = [
        exp2_benchmark.Row(
            kernel, "fast", "register", 4, nc, 64, 1e-6, share, 0.5, 1e-3, 1e-3, 0.02
        )
        for kernel, share in (("fused", 0.25), ("exp2", 0.0))
        for nc in (64, 128)
    ]
    monkeypatch.setattr(exp2_benchmark, "measure", lambda rows_, keys: rows)
    table = bench_study.exp2_table((4,), (64, 128))
    assert table.rows[0][:6] == ("fused", "fast", "register", "4", "25.0 %", "25.0 %")
    assert table.rows[1][2:6] == ("", "4", "0.50", "0.50")


def test_the_unfused_table_compares_the_pipelines(monkeypatch):
    parts = [("three-pass", "product", 2.0), ("two-pass", "all", 1.0), ("strip", "all", 0.5)]
    components = tuple(Component(a, b, t, 1.0) for a, b, t in parts)
    times = Times(4096, 128, components, 0.6, 5e11, 4e11, 3e11, 2e11, 1e12, 1e9)
    monkeypatch.setattr(unfused_times, "measure", lambda length, head_dim: times)
    (row,) = bench_study.unfused_table((4096,)).rows
    assert row == (
        *("4096", "500", "50 %", "40 %", "20 %", "60 %"),
        *("2.00x", "4.00x", "70.8 %, softmax 64 %"),
    )


def test_the_console_has_efficiency_and_bandwidth_as_columns():
    spec = importlib.util.spec_from_file_location("columns", CONFTEST)
    columns = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(columns)
    info = {"scores_efficiency": 0.9, "effective_bandwidth": 2e9}
    benches = [
        {"name": "a", "min": 0.01, "median": 0.011, "extra_info": info},
        {"name": "b", "min": 0.01, "median": 0.02, "extra_info": {}},
    ]
    lines = []
    session = SimpleNamespace(groups=[("L=64", benches), ("none", benches[1:])])
    reporter = SimpleNamespace(
        config=SimpleNamespace(_benchmarksession=session), write_line=lines.append
    )
    columns.pytest_terminal_summary(reporter)
    assert lines[1] == "L=64: figures" and len(lines) == 6
    assert lines[2].split("  ")[-1] == "Q.K^T of peak" and "GB/s" in lines[2]
    assert lines[4].split() == ["a", "11.000", "10%", "2.00", "90.0%"]
    assert lines[5].split() == ["b", "20.000", "100%", "disturbed"]


def test_an_unknown_study_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--study", "exp3"])
    assert "invalid choice: 'exp3'" in capsys.readouterr().err
