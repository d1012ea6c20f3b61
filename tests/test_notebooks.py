"""The course: every notebook runs as shipped; each of its exercises is open (or visibly broken),
its solution right, its typical mistake refused; and no answer is visible before its question.
"""

import ast
import json
import linecache
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from numflash.course import exercises
from numflash.course.chapters import CHAPTERS, PATHS, heading

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
QUICK = {"00", "01"}  # run by default; the others are slow
GPU = {f"{n}" for n in (*range(13, 21), 23)}  # run through the emulator
each = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def text(cell):
    return "".join(cell["source"])


def cells(source):
    """(first line, header, text) of each cell of a percent-format source."""
    whole = source.read_text()
    starts = [m.start() for m in re.finditer(r"(?m)^# %%", whole)]
    for a, b in zip(starts, [*starts[1:], len(whole)], strict=True):
        header, _, body = whole[a:b].partition("\n")
        yield whole.count("\n", 0, a) + 2, header, body


def checked(body):
    """(number, source of the call) of the checks in a cell."""
    if "check(" not in body:
        return []
    found = []
    for node in ast.parse(body).body:
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "check":
            found.append((call.args[0].value, ast.get_source_segment(body, node)))
    return found


@each
def test_the_notebook_is_its_source(source):
    """A .ipynb is made by tools/notebooks.py from the .py beside it."""
    jupytext = pytest.importorskip("jupytext")
    known = jupytext.read(source, fmt="py:percent").cells
    book = source.with_suffix(".ipynb")
    made = json.loads(book.read_text())["cells"]
    assert [(c["cell_type"], c["source"], c["metadata"]) for c in known] == [
        (c["cell_type"], text(c), c["metadata"]) for c in made
    ]
    assert book.stat().st_size <= 300_000
    shown = json.dumps([c.get("outputs") for c in made])
    assert '"output_type": "error"' not in shown and str(Path.home()) not in shown


def test_every_notebook_has_a_source():
    assert [p.with_suffix(".py") for p in sorted(FOLDER.glob("*.ipynb"))] == SOURCES


def test_the_readme_lists_the_notebooks_in_order():
    listed = re.findall(
        r"\(../notebooks/(\w+)\.ipynb\)", (FOLDER.parent / "docs" / "course.md").read_text()
    )
    assert list(dict.fromkeys(listed)) == [p.stem for p in SOURCES]


@each
def test_a_chapter_has_its_map_and_its_terms_are_in_the_glossary(source):
    number = source.name[:2]
    assert CHAPTERS[number].slug == source.stem
    quoted = "\n".join(f"# {line}" for line in heading(number).splitlines())
    assert quoted in source.read_text(), "run tools/notebooks.py --maps"
    glossary = (FOLDER.parent / "docs" / "glossary.md").read_text()
    for term in CHAPTERS[number].terms:
        assert f"{{#{term}}}" in glossary, term
    assert {n for stops in PATHS.values() for n in stops} <= set(CHAPTERS)


def figures_of(asked):
    """An expected number in print, where it is long enough to be no accident."""
    try:
        expected = asked.expected() if callable(asked.expected) else asked.expected
    except TypeError:  # depends on what the chapter measures
        return []
    values = expected if isinstance(expected, tuple) else (expected,)
    shown = [f"{x:.6g}" for x in values if isinstance(x, (int, float))]
    return [x for x in shown if len(x.strip("0.")) >= 4]


@each
def test_no_answer_is_visible_before_its_question(source):
    """Neither the source nor the stored output of a cell above an exercise shows its solution."""
    made = json.loads(source.with_suffix(".ipynb").read_text())["cells"]
    above = ""
    for cell, (_, header, body) in zip(made, cells(source), strict=True):
        assert "solution" not in header and "model" not in header
        above += "\n" + body
        for number, _ in checked(body) if "exercise" in header else ():
            asked = exercises.find(number)
            for line in exercises.solution_text(number).splitlines():
                line = line.split("  #")[0].strip()
                if len(line) > 24 and not line.startswith(("def ", "for ", "#")):
                    assert line not in above or line in body or asked.broken, (number, line)
            assert asked.hints, number
            for value in figures_of(asked):
                assert value not in above, (number, value)
        above += "\n" + json.dumps(cell.get("outputs", ""))


def wrong(expected):
    """An answer that differs from `expected` and is of its kind."""
    if callable(expected):
        return lambda *case: wrong(expected(*case))
    if isinstance(expected, (tuple, list)):
        return tuple(map(wrong, expected))
    if isinstance(expected, str):
        return "no"
    return not expected if isinstance(expected, (bool, np.bool_)) else expected * 1.5 + 1


def answered(number, calls, names, source_text):
    """Run a text in place of an exercise's cell, then its checks; the last answer."""
    names, file = dict(names), f"<solution {number}>"
    linecache.cache[file] = len(source_text), None, source_text.splitlines(True), file
    exec(compile(source_text, file, "exec"), names)
    for call in calls:
        exec(call, names)
    return exercises.answers[-1]


def try_exercise(number, call, names):
    """The shipped cell has just run: it is open or broken; the solution is right.

    Mistakes are not.
    """
    asked, shipped = exercises.find(number), exercises.answers[-1]
    assert shipped.number == number
    assert shipped.verdict == ("wrong" if asked.broken else "open"), shipped.words
    right = answered(number, [call], names, exercises.solution_text(number))
    assert right.verdict == "right", (number, right.words)
    if asked.slip[0]:
        good = exercises.solution_text(number)
        assert asked.slip[0] in good, (number, asked.slip)
        mistaken = answered(number, [call], names, good.replace(*asked.slip, 1))
        assert mistaken.verdict == "wrong", (number, mistaken)
    if asked.judge is None:
        exercises.check(number, wrong(exercises.answer_of(number, *right.given)), *right.given)
        assert exercises.answers[-1].verdict == "wrong", number


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(path, id=path.stem, marks=() if path.name[:2] in QUICK else pytest.mark.slow)
        for path in SOURCES
    ],
)
def test_a_notebook_runs(source, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("cycler")
    if source.name[:2] in GPU:
        pytest.importorskip(
            "numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'"
        )
    matplotlib.use("agg")
    from matplotlib import pyplot

    monkeypatch.chdir(FOLDER)  # as Jupyter runs it
    exercises.answers.clear()
    before, names, seen = dict(os.environ), {"__name__": "__main__"}, 0
    try:
        with warnings.catch_warnings(), matplotlib.rc_context():
            warnings.simplefilter("error")  # a reader should not have to wonder about one
            warnings.filterwarnings("default", category=DeprecationWarning)
            for first, header, body in cells(source):
                if "[markdown]" in header:
                    continue
                exec(compile("\n" * (first - 1) + body, str(source), "exec"), names)
                for n, (number, call) in enumerate(reversed(checked(body))):
                    assert n == 0 or exercises.find(number).judge is None
                    if n:
                        exec(call, names)  # several in a cell: each once more, as the last one
                    try_exercise(number, call, names)
                    seen += 1
        pictures = len(pyplot.get_fignums())
    finally:
        pyplot.close("all")
    assert dict(os.environ) == before
    assert seen >= 2, "a chapter has two exercises or more"
    assert pictures or source.name[:2] == "23", "a chapter has a picture"
    assert re.search(r"^\s*assert ", source.read_text(), re.M), "a chapter asserts what it claims"
