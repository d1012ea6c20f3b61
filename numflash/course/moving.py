"""Pictures that move: numbered frames of one drawing, as one piece of HTML without other files.

`Frames` plays by itself (SVG's own animation, no script) and has a slider to step through. It is
the same in Jupyter and on the site; where a page shows no slider, it still plays.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Sequence

_number = itertools.count()

INK = "#1a1a1a"
SKY, BLUE, ORANGE, RED, GREY, YELLOW = (
    "#B7D3E8",
    "#0072B2",
    "#E69F00",
    "#D55E00",
    "#D8D8D8",
    "#F0E442",
)


class Frames:
    """An animation.

    Parameters
    ----------
    frames : (SVG elements as text, caption) of each frame
    width, height : of the drawing, in pixels
    seconds : of each frame
    """

    def __init__(
        self,
        frames: Iterable[tuple[str, str]],
        width: int = 640,
        height: int = 240,
        seconds: float = 1.5,
    ) -> None:
        self.frames = list(frames)
        self.width, self.height, self.seconds = width, height, seconds

    def __repr__(self) -> str:
        return "\n".join(f"{n + 1}. {words}" for n, (_, words) in enumerate(self.frames))

    def _repr_html_(self) -> str:
        name, n = f"nf-frames-{next(_number)}", len(self.frames)
        whole = n * self.seconds
        groups = []
        for i, (drawing, words) in enumerate(self.frames):
            times = [0.0, i / n, (i + 1) / n] if i else [0.0, 1 / n]
            values = ["none", "inline", "none"] if i else ["inline", "none"]
            animate = (
                f'<animate attributeName="display" calcMode="discrete" dur="{whole:g}s" '
                f'repeatCount="indefinite" keyTimes="{";".join(f"{t:.4f}" for t in times)}" '
                f'values="{";".join(values)}"/>'
            )
            hidden = "" if i == n - 1 else ' display="none"'
            caption = text(8, self.height + 18, f"{i + 1}/{n}  {words}", size=13)
            groups.append(f"<g{hidden}>{animate if n > 1 else ''}{drawing}{caption}</g>")
        step = (
            f"var s=document.getElementById('{name}');"
            "var g=s.querySelectorAll('svg > g');"
            "for(var i=0;i<g.length;i++){var a=g[i].querySelector('animate');"
            "if(a)a.remove();"
            "g[i].setAttribute('display',i==this.value-1?'inline':'none');}"
        )
        slider = (
            f'<input type="range" min="1" max="{n}" value="{n}" style="width:60%" '
            f'aria-label="frame" oninput="{html.escape(step)}">'
        )
        return (
            f'<div id="{name}" style="max-width:{self.width}px">'
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'viewBox="0 0 {self.width} {self.height + 28}" style="width:100%;background:white">'
            f"{''.join(groups)}</svg>{slider if n > 1 else ''}</div>"
        )


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start") -> str:
    """Words at a place."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-family="sans-serif" fill="{INK}" '
        f'text-anchor="{anchor}">{html.escape(words)}</text>'
    )


def box(
    x: float, y: float, width: float, height: float, fill: str = "white", label: str = ""
) -> str:
    """A rectangle, with a label in its middle."""
    shape = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
        f'stroke="{INK}" stroke-width="0.8"/>'
    )
    if label:
        shape += text(x + width / 2, y + height / 2 + 4, label, anchor="middle")
    return shape


def grid(x: float, y: float, cell: float, colours: Sequence[Sequence[str]], label: str = "") -> str:
    """A matrix of coloured cells with its name above."""
    parts = [text(x, y - 5, label)] if label else []
    for r, row in enumerate(colours):
        for c, colour in enumerate(row):
            parts.append(
                f'<rect x="{x + c * cell:g}" y="{y + r * cell:g}" width="{cell:g}" '
                f'height="{cell:g}" fill="{colour}" stroke="#777" stroke-width="0.4"/>'
            )
    return "".join(parts)
