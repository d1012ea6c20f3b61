"""The pages: their Python runs, their figures come from one file, what they link to and name
exists.
"""

import importlib.util
import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import numflash

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]
NEEDS = {"gpu": None, "cuda": "numba_cuda", "jax": "jax", "torch": "torch", "mpi": "mpi4py"}
# they compile much of their own
SLOW = {
    "precision",
    "performance",
    "pitfalls",
    "pytorch",
    "long_contexts",
    "cuda",
    "kvcache",
    "flex",
    "index",
}


def available(need):
    return NEEDS[need] is not None and importlib.util.find_spec(NEEDS[need]) is not None


def program(page):
    """The Python of a page as one file with the page's line numbers, without blocks whose "#
    needs:" is not met.
    """
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for found in BLOCK.finditer(text):
        needs = re.match(r"# needs: (\w+)", found[1])
        if needs is None or available(needs[1]):
            first = text[: found.start(1)].count("\n")
            block = found[1].splitlines()
            lines[first : first + len(block)] = block
    return "\n".join(lines)


def identifier(page):
    return page.relative_to(ROOT).with_suffix("").as_posix()


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] if p.stem in SLOW else []) for p in WITH_CODE],
    ids=identifier,
)
def test_the_python_of_a_page_runs(page, tmp_path):
    if page.stem == "pitfalls" and platform.machine() != "x86_64":
        pytest.skip("the assembly shown is that of x86-64")
    for module, stem in (
        ("torch", "pytorch"),
        ("torch", "flex"),
        ("transformers", "pytorch"),
        ("transformers", "long_contexts"),
        ("mpi4py", "mpi"),
    ):
        if page.stem == stem:
            pytest.importorskip(module)
    script = tmp_path / "page.py"
    script.write_text(program(page), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{page}:\n{done.stderr}"


def figures():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_show_the_figures_of_the_file():
    """After a change of docs/figures.json: `python tools/figures.py write`."""
    tool = figures()
    marked = [page for page in PAGES if "<!-- table:" in page.read_text(encoding="utf-8")]
    assert {page.name for page in marked} >= {"README.md", "performance.md", "precision.md"}
    for page in marked:
        assert tool.filled(page) == page.read_text(encoding="utf-8"), page


def anchors(text):
    """As GitHub and MkDocs make them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_links_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        if link.startswith(("http", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_files_that_a_page_names_exist(page):
    """`numflash/cpu/...`, `tests/...`, `tools/...` in backquotes."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for name in re.findall(r"`((?:numflash|tests|tools|docs|notebooks|\.ci)/[\w./-]+)`", text):
        assert "NN_" in name or (ROOT / name).exists(), f"{page.name}: {name}"
    for name in re.findall(
        r"`((?:cpu|cuda|jit|cache|measure|machinecode|torch|mpi)/[\w./-]+)`", text
    ):
        assert "NAME" in name or (ROOT / "numflash" / name).exists(), f"{page.name}: {name}"


PITFALL = re.compile(r"pitfalls\.md, \"([^\"]+)\"")
SOURCES = [
    *(ROOT / "numflash").rglob("*.py"),
    *(ROOT / "tests").rglob("*.py"),
    *(ROOT / "tools").rglob("*.py"),
    ROOT / "pyproject.toml",
]


def test_comments_that_cite_a_pitfall_name_one():
    """`docs/pitfalls.md, "Negative indices"` is a heading of that page."""
    headings = set(re.findall(r"^### (.*)$", (ROOT / "docs/pitfalls.md").read_text(), re.M))
    for file in SOURCES:
        if file != Path(__file__):
            for cited in PITFALL.findall(
                re.sub(r"\n\s*#?\s*", " ", file.read_text(encoding="utf-8"))
            ):
                assert cited in headings, f"{file}: {cited}"


def test_public_names_are_listed_once_and_documented():
    pages = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "docs/reference").glob("*.md"))
    assert sorted(numflash.__all__) == sorted([*numflash._PUBLIC, "__version__"])
    for name, module in numflash._PUBLIC.items():
        assert re.search(rf"::: numflash\.{module}\.{name}$|members: .*\b{name}\b", pages, re.M), (
            name
        )


def test_environment_variables_are_listed():
    """Each `NUMFLASH_...` that the package reads is in the table of docs/index.md, and no other."""
    read = re.compile(r"environ(?:\.get\(|\[)\"(NUMFLASH_\w+)\"")
    sources = (p.read_text(encoding="utf-8") for p in (ROOT / "numflash").rglob("*.py"))
    known = {name for source in sources for name in read.findall(source)}
    table = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert known == set(re.findall(r"^\| `(NUMFLASH_\w+)", table, re.M))


def test_one_version():
    declared = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    assert declared == cited
    bare = "import sys; sys.path[:0] = ['.']; import numflash; print(numflash._version())"
    command = [sys.executable, "-I", "-S", "-c", bare]  # -S: without installed packages
    assert subprocess.check_output(command, cwd=ROOT, text=True).strip() == declared
    assert numflash.__version__


def test_figures_name_what_they_depend_on():
    found = json.loads((ROOT / "docs" / "figures.json").read_text())
    assert {"cpu", "isa", "numba", "torch", "date"} <= set(found["machine"])
    assert len(found["speed"]) == 5
    assert [p["length"] for p in found["sweep"]] == [2**n for n in range(4, 15)]


def test_no_comment_cites_what_is_not_in_the_repository():
    """Findings about Numba are in docs/pitfalls.md under headings, the notes in docs/sources.md
    under names.
    """
    for file in SOURCES:
        text = file.read_text(encoding="utf-8")
        found = re.findall(r"(?:\(|# |PITFALLS )P\d+[a-d]?\b", text)
        assert not found or file == Path(__file__), f"{file}: {found}"
