"""Make notebooks/NN_name.ipynb from notebooks/NN_name.py, run it, and keep its output.

`tools/notebooks.py [NN ...]`.

The percent-format source is what is edited and reviewed; the .ipynb is what readers open and GitHub
draws. Sources go one way.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode

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
    book = read(source)
    NotebookClient(
        book, timeout=300, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]
    book.metadata["language_info"] = {"name": "python"}
    return book


def main(numbers: list[str]) -> None:
    """Make the chapters with these numbers, or all."""
    for source in sorted(FOLDER.glob("[0-9][0-9]_*.py")):
        if not numbers or source.name[:2] in numbers:
            text = jupytext.writes(run(source), fmt="ipynb") + "\n"
            if len(text) > LIMIT:
                raise SystemExit(
                    f"{source.name}: the notebook has {len(text)} bytes; allowed: {LIMIT}"
                )
            source.with_suffix(".ipynb").write_text(text)
            print(f"{source.with_suffix('.ipynb')}: {len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
