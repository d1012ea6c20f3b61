"""What mkdocs.yml cannot say.

The notebooks and the files of the repository's root become pages, and new pages find their place.

MkDocs calls the functions below (`hooks` in mkdocs.yml). Pages of docs/ that NAV does not name are
listed under "Guides".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
NAV: list[tuple[str, list[str]]] = [
    ("Start", ["index.md", "performance.md", "reliability.md"]),
    (
        "Guides",
        [
            "precision.md",
            "threads.md",
            "kvcache.md",
            "long_contexts.md",
            "pytorch.md",
            "flex.md",
            "jax-cupy.md",
            "mpi.md",
            "aarch64.md",
            "cuda.md",
            "compiled-kernels.md",
        ],
    ),
    ("Reference", ["reference/attention.md", "reference/kvcache.md", "reference/integrations.md"]),
    ("Course", ["course.md", "glossary.md"]),
    (
        "Background",
        [
            "design.md",
            "pitfalls.md",
            "finding-faults.md",
            "sources.md",
            "contributing.md",
            "changelog.md",
        ],
    ),
]
FROM_ROOT = {
    "design.md": "DESIGN.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}


def chapters() -> list[Path]:
    """The notebooks with their output, in order."""
    return sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def chapter_title(notebook: Path) -> str:
    """The title "03. INT8", from the first line of the chapter's source."""
    text = notebook.with_suffix(".py").read_text(encoding="utf-8")
    found = re.search(r"^# # (.*)$", text, re.MULTILINE)
    return found.group(1) if found else notebook.stem


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Build the navigation."""
    pages = {
        str(p.relative_to(config.docs_dir).as_posix()) for p in Path(config.docs_dir).rglob("*.md")
    }
    pages |= set(FROM_ROOT)
    named = {page for _, listed in NAV for page in listed}
    nav: list[dict[str, Any]] = []
    for section, listed in NAV:
        entries: list[Any] = [page for page in listed if page in pages]
        if section == "Guides":
            entries += sorted(page for page in pages - named if "/" not in page)
        elif section == "Reference":
            entries += sorted(page for page in pages - named if page.startswith("reference/"))
        elif section == "Course":
            entries += [{chapter_title(book): f"course/{book.name}"} for book in chapters()]
        nav.append({section: entries})
    config.nav = nav
    return config


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebooks, and the pages made from files of the root."""
    for book in chapters():
        files.append(File.generated(config, f"course/{book.name}", abs_src_path=str(book)))
    for page, source in FROM_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_relinked(text)))
    return files


def on_nav(nav: Any, files: Files, **_: Any) -> None:
    """Say again where the notebooks are: mkdocs-jupyter's own kind of file forgets it."""
    for file in files:
        if file.src_uri.endswith(".ipynb"):
            file.abs_src_path = str(ROOT / "notebooks" / Path(file.src_uri).name)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links out of docs/ lead to the pages made from those files.

    In the repository they lead to the files.
    """
    for page, source in FROM_ROOT.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
    return markdown.replace("](../notebooks/", "](course/")


def _relinked(text: str) -> str:
    """Links of a page in the root as links of a page in docs/."""
    text = re.sub(r"\]\(docs/", "](", text)
    for page, source in FROM_ROOT.items():
        text = text.replace(f"]({source}", f"]({page}")
    return re.sub(r"\]\(notebooks/", "](course/", text)


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw without a script; links of notebooks."""
    html = re.sub(r'href="\.\./docs/([\w-]+)\.md', r'href="../\1.html', html)
    html = re.sub(r'href="(\d\d_\w+)\.ipynb', r'href="\1.html', html)
    return re.sub(
        r"\$\$(.+?)\$\$",
        lambda found: convert(re.sub(r"<[^>]*>|&amp;", "", found.group(1)), display="block"),
        html,
        flags=re.DOTALL,
    )
