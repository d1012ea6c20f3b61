"""A page made from a validation's JSON.

`python -m numflash.cuda.validate.page FOUND.json PAGE.html`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .results import verdict

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 68em; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto }
th, td { border: 1px solid #8886; padding: .2em .6em; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.bad { font-weight: bold }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } }
"""


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def cell(x: Any) -> str:
        if isinstance(x, float):
            return f'<td class="number">{x:.4g}</td>'
        kind = ' class="bad"' if x in ("failed", "crashed", "killed", "not run", "no") else ""
        return f"<td{kind}>{escape('' if x is None else str(x))}</td>"

    lines = ["<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows]
    head = "".join(f"<th>{escape(x)}</th>" for x in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _families(found: dict[str, Any]) -> str:
    rows = [
        (
            family["family"],
            family["state"],
            f"{sum(case['passed'] for case in family['cases'])} of {len(family['cases'])}",
            len(family["timings"]),
            family.get("seconds"),
            (family.get("after") or {}).get("clocks.sm"),
            (family.get("after") or {}).get("power.draw"),
            family.get("why"),
        )
        for family in found["families"]
    ]
    return _table(
        ("family", "state", "problems that agree", "timings", "s", "MHz", "W", "why"), rows
    )


def _times(family: dict[str, Any]) -> str:
    rows = []
    for row in family["timings"]:
        place = ", ".join(f"{x} {row[x]}" for x in ("B", "H", "Hkv", "L", "S", "D") if x in row)
        place += ", causal" if row.get("causal") else ""
        share = row.get("share_of_products", row.get("share_of_copy"))
        seconds = row.get("seconds")
        kept = row.get("seconds_persisting")
        rows.append(
            (
                row["kernel"],
                place,
                None if seconds is None else 1e3 * seconds,
                row.get("tflops"),
                None if share is None else f"{100 * share:.0f} %",
                None if kept is None else 1e3 * kept,
                row.get("error"),
            )
        )
    heads = ("kernel", "shape", "ms", "TFLOP/s", "share of the rate", "ms, L2 window", "why not")
    return f"<h2>{escape(family['family'])}</h2>" + _table(heads, rows)


def page(found: dict[str, Any]) -> str:
    """The page: the card, the families, the targets, problems that failed, the times."""
    title = f"numflash {found['numflash']} on {found.get('device', 'no card')}"
    software = ", ".join(f"{k} {v}" for k, v in found.get("software", {}).items())
    about = (
        f"{found.get('arch')}, {found.get('multiprocessors')} multiprocessors, "
        f"{found.get('driver')}; {software}; {found.get('seconds', 0):.0f} s"
    )
    bad = [
        (family["family"], case["case"], json.dumps({k: v for k, v in case.items() if k != "case"}))
        for family in found["families"]
        for case in family["cases"]
        if not case["passed"]
    ]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(about)}</p>",
        f"<p class='bad'>Stopped: {escape(found['stopped'])}</p>" if "stopped" in found else "",
        _families(found),
        "<h2>Targets</h2><ul>",
        *(f"<li>{escape(verdict(goal))}</li>" for goal in found.get("targets", ())),
        "</ul>",
        "<h2>Problems that differ</h2>" + _table(("family", "problem", "found"), bad)
        if bad
        else "",
        *(_times(family) for family in found["families"] if family["timings"]),
        "</body></html>\n",
    ]
    return "".join(parts)


def main(arguments: list[str]) -> int:
    """Read the JSON file, write the page."""
    source, to = arguments
    Path(to).write_text(
        page(json.loads(Path(source).read_text(encoding="utf-8"))), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
