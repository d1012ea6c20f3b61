"""The course: every notebook runs as shipped; each of its exercises is open (or visibly broken),
its solution right, its typical mistake refused; and no answer is visible before its question.
"""

import ast
import contextlib
import importlib
import importlib.util
import io
import json
import linecache
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from numflash.course import exercises, widgets
from numflash.course.chapters import CHAPTERS, PATHS, following, heading
from numflash.measure import timing

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
QUICK = {"01"}  # run by default; the others are slow
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


def modules_of(tree):
    """{name: module} of the modules of numflash that a notebook imports."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("numflash"):
            for x in node.names:
                path = f"{node.module}.{x.name}"
                if importlib.util.find_spec(node.module) and _is_module(path):
                    found[x.asname or x.name] = importlib.import_module(path)
    return found


def _is_module(path):
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:  # its parent is none
        return False


@each
def test_names_of_modules_exist(source):
    """Of numflash's modules, in cells that need a card as well, which no test runs."""
    if source.stem[:2] in GPU:
        pytest.importorskip("numba_cuda", reason="needs the cuda extra")
    tree = ast.parse(
        "\n".join(body for _, header, body in cells(source) if "[markdown]" not in header)
    )
    modules = modules_of(tree)
    missing = [
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
        and not hasattr(modules[node.value.id], node.attr)
    ]
    assert missing == []


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
    assert '"output_type": "error"' not in shown and "ipykernel_" not in shown
    assert str(Path.home()) not in shown


@each
def test_a_stored_listing_is_the_source_of_today(source):
    """Where it is not: `python tools/notebooks.py --text NN`."""
    pytest.importorskip("jupytext")
    if source.name[:2] in GPU:
        pytest.importorskip("numba_cuda")
    path = FOLDER.parent / "tools" / "notebooks.py"
    spec = importlib.util.spec_from_file_location("notebooks", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    book = made.nbformat.read(source.with_suffix(".ipynb"), 4)
    for cell in (c for c in book.cells if c.cell_type == "code"):
        shown = made.listing(book, cell)
        assert shown in ("", "".join(out.get("text", "") for out in cell.outputs))


@each
def test_a_stored_exercise_has_its_name_of_today(source):
    """Where it has not: `python tools/notebooks.py --text NN`."""
    made = json.loads(source.with_suffix(".ipynb").read_text())["cells"]
    for cell, (_, _, body) in zip(made, cells(source), strict=True):
        printed = "".join("".join(out.get("text", ())) for out in cell.get("outputs", ()))
        for number, _ in checked(body):
            assert f"{number} {exercises.find(number).name}: not " in printed, number


def test_the_drawn_cache_is_the_one_that_the_page_prints():
    """Both are of the machine of the stored page."""
    book = (FOLDER / "02_tiling.ipynb").read_text()
    assert re.search(r"'L1': '(\d+) KiB'", book)[1] == re.search(r"cache: (\d+) KiB", book)[1]


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


@each
def test_a_chapter_is_complete(source):
    """One idea, times, papers, the machine and day of its figures, a picture, titles that tell."""
    chapter, book = CHAPTERS[source.name[:2]], json.loads(source.with_suffix(".ipynb").read_text())
    assert chapter.idea.endswith(".") and chapter.idea.count(".") <= 2 and len(chapter.idea) < 120
    assert min(chapter.minutes) > 0 and chapter.papers and chapter.terms
    (machine,) = [c for c in book["cells"] if "machine" in c["metadata"].get("tags", ())]
    said = "".join(x for out in machine["outputs"] for x in out["text"])
    assert re.fullmatch(r"All figures of this page: .+ cores .+, 20\d\d-\d\d-\d\d\.\n+", said)
    kinds = {k for c in book["cells"] for out in c.get("outputs", ()) for k in out.get("data", {})}
    assert kinds & {"image/png", "text/html"} and widgets.VIEW not in kinds
    results = [
        out for c in book["cells"] for out in c.get("outputs", ()) if "execution_count" in out
    ]
    assert all("text/html" in out["data"] for out in results), "no repr of an object"
    words = [text(c) for c in book["cells"] if c["cell_type"] == "markdown"]
    assert "After this chapter you can" in words[0]
    assert book["cells"][-1]["cell_type"] == "markdown"
    pattern = r"\*\*What you can do now\*\*\n\n(\* .+\n){3}\n"
    end = re.fullmatch(pattern + r"(\*\*Next:.+)", words[-1])
    assert end and end[2] == following(source.name[:2]), "run tools/notebooks.py --maps"
    code = [n for n, c in enumerate(book["cells"]) if c["cell_type"] == "code"]
    if source.name[:2] not in {"21", "22", "23"}:  # the others end with their asserts
        assert text(book["cells"][code[-1] - 1]).endswith("You can skip it.")


@each
def test_the_minutes_are_those_of_its_length(source):
    """Reading: 100 words of text or 12 lines of code and output a minute, to 5 minutes."""
    book = json.loads(source.with_suffix(".ipynb").read_text())
    words = sum(len(text(c).split()) for c in book["cells"] if c["cell_type"] == "markdown")
    lines = sum(text(c).count("\n") + 1 for c in book["cells"] if c["cell_type"] == "code")
    for cell in book["cells"]:
        lines += sum("".join(out.get("text", ())).count("\n") for out in cell.get("outputs", ()))
    minutes = words / 100 + lines / 12
    assert abs(CHAPTERS[source.name[:2]].minutes[0] - minutes) < 6, round(minutes)


@each
def test_exercises_have_the_numbers_of_their_checks(source):
    """A reader types hint("06.2") for exercise 2 of chapter 06."""
    asked, checks = [], []
    for _, header, body in cells(source):
        if "[markdown]" in header:
            pattern = r"\*\*Exercise (\d+)\.\*\*|^# ## (\d+)\. "
            asked += [a or b for a, b in re.findall(pattern, body, re.M)]
        checks += [number for number, _ in checked(body)]
    assert checks == [f"{source.name[:2]}.{n}" for n in asked]
    assert checks == [f"{source.name[:2]}.{n}" for n in range(1, len(checks) + 1)]


def test_the_documents_are_in_two_chapters_only():
    """A lesson stands on its own; 12 checks the documents, 08 is optional."""
    named = re.compile(r"(?i)\bthe (documents?|status note)\b|\bdocument's\b|sources\.md")
    assert [p.name[:2] for p in SOURCES if named.search(p.read_text())] == ["08", "12"]


@each
def test_named_files_exist(source):
    """A chapter that sends the reader to a file names one that is there."""
    named = re.findall(
        r"`((?:numflash|cpu|cuda|kernels|study|docs)/[\w/]+(?:\.\w+)?)`", source.read_text()
    )
    roots = [FOLDER.parent, FOLDER.parent / "numflash", *(FOLDER.parent / "numflash").glob("c*")]
    assert [x for x in named if not any((root / x).exists() for root in roots)] == []


def test_the_times_of_the_paths_are_the_sums_of_their_chapters():
    page = (FOLDER.parent / "docs" / "course.md").read_text()
    for name, stops in PATHS.items():
        sums = [sum(CHAPTERS[n].minutes[k] for n in stops) for k in (0, 1)]
        said = re.search(
            rf"\| {name.split()[0]}.*?\|.*?\| (\d) h (\d+) min \| (\d) h (\d+) min", page
        )
        times = [60 * int(said[1]) + int(said[2]), 60 * int(said[3]) + int(said[4])]
        assert times == sums, (name, sums)


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


def counted(printed):
    """The whole numbers of a text, as counters print them."""
    return re.findall(r"(?<![\w.:-])\d{2,}(?![\w.:%-])", printed)


def compare_counters(source, printed):
    """What the emulator counts is on the stored page; registers, at a cell's end, need a tool."""
    made = json.loads(source.with_suffix(".ipynb").read_text())["cells"]
    for n, now in printed.items():
        stored = counted("".join("".join(o.get("text", ())) for o in made[n]["outputs"]))
        assert stored[: len(counted(now))] == counted(now), f"run tools/notebooks.py:\n{now}"


TIMES = timing._times


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(path, id=path.stem, marks=() if path.name[:2] in QUICK else pytest.mark.slow)
        for path in SOURCES
    ],
)
def test_a_notebook_runs(source, monkeypatch):
    """As Jupyter runs it, but that what is timed is called once and not for a while."""
    monkeypatch.setattr(timing, "_times", lambda run, repeats, seconds: TIMES(run, 1, 0))
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
    before, names, seen, printed = dict(os.environ), {"__name__": "__main__"}, 0, {}
    try:
        with warnings.catch_warnings(), matplotlib.rc_context():
            warnings.simplefilter("error")  # a reader should not have to wonder about one
            warnings.filterwarnings("default", category=DeprecationWarning)
            for cell, (first, header, body) in enumerate(cells(source)):
                if "[markdown]" in header:
                    continue
                with contextlib.redirect_stdout(io.StringIO()) as shown:
                    exec(compile("\n" * (first - 1) + body, str(source), "exec"), names)
                if "tags" not in header:
                    printed[cell] = shown.getvalue()
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
    if source.name[:2] in GPU and names.get("device") is None:
        compare_counters(source, printed)
    if source.name[:2] == "23":
        assert seen == 12, "its claim: every kernel is judged, and can be mended"
    else:
        assert re.search(r"^\s*assert ", source.read_text(), re.M), (
            "a chapter asserts what it claims"
        )
