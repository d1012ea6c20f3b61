"""Pictures that move: numbered frames of one drawing, as one piece of HTML without other files.

`Frames` plays by itself (SVG's own animation, no script) and has a slider to step through: on the
site, in a stored page, in a mail. In Jupyter with ipywidgets the same frames get sliders that also
change what is drawn (`movable`, `widgets.py`).
"""

from __future__ import annotations

import functools
import html
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

from .widgets import view

_number = itertools.count()
P = ParamSpec("P")

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

    Attributes
    ----------
    controls : what a reader may change: name, then the values offered and the one that is drawn
    redraw : draws again with other values of the controls
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
        self.controls: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self.redraw: Callable[..., Frames] = lambda: self

    def __repr__(self) -> str:
        return "\n".join(f"{n + 1}. {words}" for n, (_, words) in enumerate(self.frames))

    def drawing(self, i: int) -> str:
        """The SVG elements of one frame with its caption."""
        drawing, words = self.frames[i]
        return drawing + text(8, self.height + 18, f"{i + 1}/{len(self.frames)}  {words}", size=13)

    def svg(self, elements: str) -> str:
        """An SVG image of the size of the drawing."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'viewBox="0 0 {self.width} {self.height + 28}" '
            f'style="width:100%;max-width:{self.width}px;background:white">{elements}</svg>'
        )

    def _repr_html_(self) -> str:
        name, n = f"nf-frames-{next(_number)}", len(self.frames)
        groups = []
        for i in range(n):
            hidden = "" if i == n - 1 else ' display="none"'
            groups.append(f"<g{hidden}>{self._animate(i) if n > 1 else ''}{self.drawing(i)}</g>")
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
            f"{self.svg(''.join(groups))}{slider if n > 1 else ''}</div>"
        )

    def _animate(self, i: int) -> str:
        """SVG's animation that shows frame i in its turn."""
        n = len(self.frames)
        times = [0.0, i / n, (i + 1) / n] if i else [0.0, 1 / n]
        values = ["none", "inline", "none"] if i else ["inline", "none"]
        return (
            f'<animate attributeName="display" calcMode="discrete" dur="{n * self.seconds:g}s" '
            f'repeatCount="indefinite" keyTimes="{";".join(f"{t:.4f}" for t in times)}" '
            f'values="{";".join(values)}"/>'
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """HTML for every page; in a live Jupyter with ipywidgets also the widgets."""
        return {"text/plain": repr(self), "text/html": self._repr_html_(), **view(self)}


def movable(
    **choices: Sequence[Any],
) -> Callable[[Callable[P, Frames]], Callable[P, Frames]]:
    """Let a reader change parameters of a drawing: name = the values offered.

    A value that the caller passed is offered as well.
    """

    def wrap(draw: Callable[P, Frames]) -> Callable[P, Frames]:
        signature = inspect.signature(draw)
        redraw: Callable[..., Frames] = draw

        @functools.wraps(draw)
        def drawn(*args: P.args, **options: P.kwargs) -> Frames:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            now: Mapping[str, Any] = dict(bound.arguments)
            frames = draw(*args, **options)
            for name, offered in choices.items():
                values = tuple(sorted({*offered, now[name]}))
                frames.controls[name] = values, now[name]
            frames.redraw = lambda **new: redraw(**{**now, **new})
            return frames

        return drawn

    return wrap


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
