"""The course: every notebook runs as shipped, its exercises are open, their solutions right, and
wrong answers are refused.
"""

import json
import os
import re
import runpy
import warnings
from pathlib import Path

import pytest

from numflash.course import lessons

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
QUICK = {"00", "01"}  # run by default; the others are slow
GPU = {f"{n}" for n in range(13, 21)}  # run through the emulator
each = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def text(cell):
    return "".join(cell["source"])


@each
def test_the_notebook_is_its_source(source):
    """A .ipynb is made by tools/notebooks.py from the .py beside it."""
    jupytext = pytest.importorskip("jupytext")
    cells = jupytext.read(source, fmt="py:percent").cells
    book = source.with_suffix(".ipynb")
    made = json.loads(book.read_text())["cells"]
    assert [(c["cell_type"], c["source"], c["metadata"]) for c in cells] == [
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
    assert listed == [p.stem for p in SOURCES]


def wrong(expected):
    """An answer that differs from `expected` and is of its kind."""
    if callable(expected):
        return lambda *case: wrong(expected(*case))
    if isinstance(expected, (tuple, list)):
        return tuple(map(wrong, expected))
    return (
        "no"
        if isinstance(expected, str)
        else not expected
        if isinstance(expected, bool)
        else expected * 1.5 + 1
    )


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
    lessons.answers.clear()
    before = dict(os.environ)
    try:
        with warnings.catch_warnings(), matplotlib.rc_context():
            warnings.simplefilter("error")  # a reader should not have to wonder about one
            warnings.filterwarnings("default", category=DeprecationWarning)
            runpy.run_path(str(source))
        pictures = len(pyplot.get_fignums())
    finally:
        pyplot.close("all")
    assert dict(os.environ) == before
    found = {}
    for answer in lessons.answers:
        found.setdefault(answer.name, []).append(answer)
    for name, (shipped, *solutions) in found.items():
        assert shipped.verdict == "open" and [x.verdict for x in solutions] == ["right"], (
            name,
            shipped.words,
            solutions,
        )
        for answer in solutions:
            lessons.check(
                name, wrong(answer.expected), answer.expected, *answer.cases, within=answer.within
            )
            assert lessons.answers[-1].verdict == "wrong", name
    assert len(found) >= 2, "a chapter has two exercises or more"
    assert pictures, "a chapter has a picture"
    assert re.search(r"^\s*assert ", source.read_text(), re.M), "a chapter asserts what it claims"
