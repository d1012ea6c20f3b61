"""Check a built site.

Every link and picture to a file of the site exists, every anchor too, and nothing asks another
host.

`tools/check_site.py build/site`
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what a browser loads for it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect from one tag."""
        found = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        if tag == "a" and found.get("href"):
            self.links.add(found["href"] or "")
        if tag in ("img", "script", "iframe") and found.get("src"):
            self.loaded.add(found["src"] or "")
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loaded.add(found.get("href") or "")


def problems(site: Path) -> list[str]:
    """One line for everything that is wrong."""
    pages = {file: Page(file) for file in sorted(site.rglob("*.html"))}
    found = []
    for file, page in pages.items():
        for url in sorted(page.links | page.loaded):
            parts = urlparse(url)
            if parts.scheme or parts.netloc:
                if url in page.loaded and parts.scheme != "data":
                    found.append(f"{file.relative_to(site)}: loads {url} from another host")
                continue
            path, anchor = urldefrag(url)
            if path.startswith("/"):  # 404.html is served from anywhere
                target = site / unquote(path).lstrip("/")
            else:
                target = (file.parent / unquote(path)).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{file.relative_to(site)}: no {url}")
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                found.append(f"{file.relative_to(site)}: no anchor {url}")
    return found


def main(folder: str) -> None:
    """Print what is wrong and exit with status 1, or say how much was checked."""
    site = Path(folder).resolve()
    found = problems(site)
    print(
        "\n".join(found) or f"{len(list(site.rglob('*.html')))} pages: every link leads somewhere"
    )
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
