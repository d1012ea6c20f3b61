"""Timing tables on a busy machine.

What cannot be is marked, with the spread of the calls, and never printed as a result.
"""

import math

import pytest

from numflash.commands import bench, demo
from numflash.measure import phases, roofline, timing
from numflash.measure.console import Progress
from numflash.measure.contenders import Case, Contender, Result
from numflash.measure.metrics import Errors
from numflash.measure.timing import DISTURBED, Timing, explain_marks, percent, ratio, timed


class Clock:
    """A clock under which every call takes the next of given times, the last one for ever."""

    def __init__(self, *times):
        self.now, self.times, self.calls = 0.0, list(times), 0

    def __call__(self):
        return self.now

    def run(self):
        self.calls += 1
        self.now += self.times[0] if len(self.times) == 1 else self.times.pop(0)


def test_timings_know_their_spread(monkeypatch):
    clock = Clock(9.0, 1.0, 1.5, 2.0)  # the first is not counted
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    found = timed(clock.run, 3)
    assert found == Timing(1.5, 1.0) and found.spread == 0.5 and found.disturbed
    assert found.milliseconds(1) == "1500.0 (disturbed, +50 %)"
    quiet = Timing(0.0011, 0.001)
    assert not quiet.disturbed and quiet.milliseconds() == "1.100"
    assert ratio(quiet, quiet) == "1.00"
    assert ratio(found, quiet) == "(1363.64)" and ratio(quiet, found) == "(0.00)"
    assert Timing(0.0, 0.0).spread == 0


@pytest.mark.parametrize("part", [1.08, -0.001, math.nan, math.inf])
def test_impossible_shares(part):
    assert percent(part, 1.0) == DISTURBED and percent(1.0, 0.0) == DISTURBED
    assert percent(0.5, 1.0, 1) == "50.0 %" and percent(1.0, 1.0) == "100 %"
    assert "idle machine" in explain_marks([("a", DISTURBED)]) and not explain_marks(
        [("a", "50 %")]
    )


def test_parts_that_come_out_negative(monkeypatch):
    """Rescaling takes less than nothing in every attempt; the sum is still that of all parts."""
    times = iter([Timing(x, x) for x in (1.0, 2.0, 5.0, 4.0, 6.0)] * 3)
    monkeypatch.setattr(phases, "timed", lambda call, repeats: next(times))
    found = phases.fastest_times([lambda: None] * 5, 3)
    assert found == [1.0, 2.0, 5.0, 4.0, 6.0] and next(times, None) is None
    times = iter([Timing(x, x) for x in (1.0, 2.0, 5.0, 4.0, 6.0, 1.0, 2.0, 3.0, 4.0, 6.0)])
    assert phases.fastest_times([lambda: None] * 5, 3) == [1.0, 2.0, 3.0, 4.0, 6.0]


def test_the_table_of_parts(monkeypatch):
    found = {
        "packing": 1.0,
        "scores": 2.0,
        "softmax": 3.0,
        "rescaling": math.nan,
        "values": 2.0,
        "sum": 7.0,
    }
    monkeypatch.setattr(phases, "measure", lambda *arguments: found)
    with Progress("test", 1) as progress:
        table = demo.phase_table(progress, "avx2", 1e6, 4096, 128)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["rescaling"] == (DISTURBED,) * 3 and rows["softmax"][1] == "42.9 %"
    assert rows["sum"][:2] == ("7000.000", "100.0 %")
    assert rows["Q.K^T"][2] == DISTURBED, "above the peak"
    assert table.records[3]["seconds"] is None and "idle machine" in table.note
    assert "-" not in "".join(cell for row in table.rows for cell in row[1:])


def test_the_table_of_contenders(monkeypatch, capsys):
    """A rate above the peak makes the peak be measured again; what stays above it is marked."""
    case = Case(64, 64)
    peaks = iter([(case.operations / 2, 1.0), (case.operations / 1.5, 1.0)])
    monkeypatch.setattr(roofline, "measure_compute", lambda *arguments: next(peaks))
    monkeypatch.setattr(roofline, "measure_memory", lambda threads: (1.0, 1.0))
    monkeypatch.setattr(bench, "VECTOR_ISAS", {})
    found_here = [Contender(f"numflash int8 {n}", 1.0, None) for n in "ab"]
    times = {"a": Timing(1.0, 1.0), "b": Timing(4.0, 2.0)}
    errors = Errors(1.0, 0.0, 0.0, 0.0, 0.0)

    def compete(contender, case, threads, repeats):
        return Result(contender.name, case, threads, times[contender.name[-1]], errors)

    monkeypatch.setattr(bench, "contenders", lambda everybody: found_here)
    monkeypatch.setattr(bench, "compete", compete)
    found = bench.run(Case(64, 64), 3)
    assert next(peaks, None) is None, "measured twice"
    text = capsys.readouterr().out
    first, second = (next(x for x in text.splitlines() if f"int8 {n}" in x) for n in "ab")
    assert DISTURBED in first and "150.0" not in text
    assert "4000.000 (disturbed, +100 %)" in second and "37.5 %" in second
    assert "idle machine" in text and found["results"][1]["disturbed"]
    assert found["results"][1]["spread"] == 1.0
