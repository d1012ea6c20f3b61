"""Make notebooks/NN_name.ipynb from notebooks/NN_name.py, run it, and keep its output.

`tools/notebooks.py [NN ...]`; `tools/notebooks.py --maps` writes the map below each title.

The percent-format source is what is edited and reviewed; the .ipynb is what readers open and GitHub
draws. Sources go one way.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode

from numflash.course.chapters import CHAPTERS, heading

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


def with_map(text: str, number: str) -> str:
    """The source with its chapter's map below the title."""
    quoted = "\n".join(f"# {line}" for line in heading(number).splitlines())
    cell = f'# %% [markdown] tags=["map"]\n{quoted}\n\n# %% tags=["machine"]\n'
    cell += "from numflash.course import machine\n\nmachine()\n\n"
    text = re.sub(r'(?ms)^# %% \[markdown\] tags=\["map"\].*?^machine\(\)\n\n', "", text, count=1)
    first = re.search(r"(?m)^# %%(?! \[markdown\]\n# # )", text)
    if first is None:
        raise SystemExit(f"{number}: no cell after the title")
    return text[: first.start()] + cell + text[first.start() :]


def maps() -> None:
    """Write the map of every chapter that `numflash.course.chapters` knows."""
    for number, chapter in CHAPTERS.items():
        source = FOLDER / f"{chapter.slug}.py"
        source.write_text(with_map(source.read_text(), number))


def main(numbers: list[str]) -> None:
    """Make the chapters with these numbers, or all."""
    if numbers == ["--maps"]:
        maps()
        return
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
