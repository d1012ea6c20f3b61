"""Make notebooks/NN_name.ipynb from notebooks/NN_name.py, run it, and keep its output.

`tools/notebooks.py [NN ...]`; `tools/notebooks.py --maps` writes the map below each title;
`tools/notebooks.py --text [NN ...]` puts edited text around the stored output, where no code has
changed: figures measured on a quiet machine stay as they are.

The percent-format source is what is edited and reviewed; the .ipynb is what readers open and GitHub
draws. Sources go one way.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode

from numflash.course import drawings
from numflash.course.chapters import CHAPTERS, following, heading
from numflash.course.exercises import find
from numflash.course.widgets import VIEW

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
LIMIT = 300_000  # bytes of a notebook with its pictures


def read(source: Path) -> NotebookNode:
    """The notebook of a percent-format source, without output, the same in every run."""
    book = jupytext.read(source, fmt="py:percent")
    for n, cell in enumerate(book.cells):
        cell["id"] = f"cell-{n}"
    book.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return book


def run(source: Path) -> NotebookNode:
    """The same with the output of every cell.

    What goes to stderr (compiling, progress) is left out.
    """
    from nbclient import NotebookClient

    book = read(source)
    NotebookClient(
        book, timeout=300, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]
            for output in cell.outputs:  # a stored widget shows nothing: its HTML does
                output.get("data", {}).pop(VIEW, None)
                if "text" in output:
                    output.text = without_path(output.text)
    book.metadata.pop("widgets", None)
    book.metadata["language_info"] = {"name": "python"}
    return book


def reworded(source: Path) -> NotebookNode:
    """The new text of a source with the stored output of the same code.

    The cell that names the machine may change: what it says of the stored figures stays true. A
    cell tagged "drawing" needs nothing of the cells before it, so it is drawn again. A cell that
    only prints the source of kernels needs their imports: it is printed again. An open exercise may
    change: it stays open. Comments and line breaks are text.
    """
    book, stored = read(source), nbformat.read(source.with_suffix(".ipynb"), 4)
    old = iter([c for c in stored.cells if c.cell_type == "code" and not tagged(c, "drawing")])
    for n, cell in enumerate([c for c in book.cells if c.cell_type == "code"], 1):
        if tagged(cell, "drawing"):
            before, _, last = cell.source.rpartition("\n")
            exec(before, names := {"drawings": drawings})
            picture = eval(last, names)
            shown = {"text/plain": repr(picture), "text/html": picture._repr_html_()}
            cell.outputs = [nbformat.v4.new_output("execute_result", shown)]
        else:
            made = next(old, None)
            asked = open_exercises(cell)
            same = made and (asked or tagged(cell, "machine") or same_code(made, cell))
            if made is None or not same:
                raise SystemExit(f"{source.name}: code has changed, so run it:\n{cell.source}")
            cell.outputs = made.outputs
            for output in cell.outputs if asked else ():
                output.text = renamed(output.text, asked)
            shown = listing(book, cell)
            if shown:
                cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=shown)]
        cell.execution_count = n
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = n
    if next(old, None) is not None:
        raise SystemExit(f"{source.name}: code was taken out, so run it")
    return book


def same_code(a: NotebookNode, b: NotebookNode) -> bool:
    """Whether two cells run the same, whatever their comments say."""
    return ast.dump(ast.parse(a.source)) == ast.dump(ast.parse(b.source))


def open_exercises(cell: NotebookNode) -> dict[str, str]:
    """{number: name} of the exercises of a cell, if all are open as they are shipped."""
    if not tagged(cell, "exercise"):
        return {}
    asked = {number: find(number) for number in re.findall(r'check\("(\d\d\.\d+)"', cell.source)}
    if any(exercise.broken for exercise in asked.values()):
        return {}
    return {number: exercise.name for number, exercise in asked.items()}


def renamed(text: str, asked: dict[str, str]) -> str:
    """What `check` printed of open exercises, with their names of today."""
    for number, name in asked.items():
        line = f"{number} {name}: not answered yet"
        text = re.sub(rf"(?m)^{re.escape(number)} .*$", line.replace("\\", r"\\"), text)
    return text


def without_path(text: str) -> str:
    """Printed text whose cells have no file of this machine: "/tmp/ipykernel_1/2.py" is a cell."""
    return re.sub(r"\S*/ipykernel_\d+/\d+\.py", "this cell", text)


def listing(book: NotebookNode, cell: NotebookNode) -> str:
    """What a cell prints that only prints sources, which the imports above it name; else ""."""
    lines = ast.parse(cell.source).body
    if not all(ast.unparse(line).startswith("print(inspect.getsource(") for line in lines):
        return ""
    names: dict[str, Any] = {}
    for above in book.cells[: book.cells.index(cell)]:
        for line in ast.parse(above.source).body if above.cell_type == "code" else ():
            if isinstance(line, (ast.Import, ast.ImportFrom)):
                exec(ast.unparse(line), names)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(cell.source, names)
    return printed.getvalue()


def tagged(cell: NotebookNode, tag: str) -> bool:
    """Whether a cell has a tag."""
    return tag in cell.metadata.get("tags", ())


def with_map(text: str, number: str) -> str:
    """The source with its chapter's map below the title, and the next chapter in its last line."""
    quoted = "\n".join(f"# {line}" for line in heading(number).splitlines())
    cell = f'# %% [markdown] tags=["map"]\n{quoted}\n\n# %% tags=["machine"]\n'
    cell += "from numflash.course import hint, machine, solution\n\nmachine()\n\n"
    text = re.sub(r'(?ms)^# %% \[markdown\] tags=\["map"\].*?^machine\(\)\n\n', "", text, count=1)
    first = re.search(r"(?m)^# %%(?! \[markdown\]\n# # )", text)
    if first is None:
        raise SystemExit(f"{number}: no cell after the title")
    text = text[: first.start()] + cell + text[first.start() :]
    return re.sub(r"(?m)^# \*\*Next:\*\* .*$", lambda _: f"# {following(number)}", text)


def maps() -> None:
    """Write the map of every chapter that `numflash.course.chapters` knows."""
    for number, chapter in CHAPTERS.items():
        source = FOLDER / f"{chapter.slug}.py"
        source.write_text(with_map(source.read_text(encoding="utf-8"), number), encoding="utf-8")


def main(numbers: list[str]) -> None:
    """Make the chapters with these numbers, or all."""
    if numbers == ["--maps"]:
        maps()
        return
    make = reworded if numbers[:1] == ["--text"] else run
    numbers = numbers[1:] if make is reworded else numbers
    if unknown := [number for number in numbers if number not in CHAPTERS]:
        raise SystemExit(f"{__doc__}\nNN: got {', '.join(unknown)}; allowed: {', '.join(CHAPTERS)}")
    for source in sorted(FOLDER.glob("[0-9][0-9]_*.py")):
        if not numbers or source.name[:2] in numbers:
            text = jupytext.writes(make(source), fmt="ipynb") + "\n"
            if len(text) > LIMIT:
                raise SystemExit(
                    f"{source.name}: the notebook has {len(text)} bytes; allowed: {LIMIT}"
                )
            source.with_suffix(".ipynb").write_text(text, encoding="utf-8")
            print(f"{source.with_suffix('.ipynb')}: {len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
