"""`Frames` under sliders in Jupyter: step, play, and change what is drawn.

ipywidgets moves the frames that `Frames` draws; nothing is drawn here. Without a live Jupyter or
without ipywidgets (extra `notebooks`) a page shows the HTML of `Frames`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .moving import Frames

VIEW = "application/vnd.jupyter.widget-view+json"


def view(frames: Frames) -> dict[str, Any]:
    """What a Jupyter front end needs to show the widgets, or nothing outside of one."""
    if not _in_jupyter():
        return {}
    try:
        shown = under_sliders(frames)._repr_mimebundle_()
    except ImportError:
        return {}
    return {VIEW: shown[VIEW]} if VIEW in shown else {}


def _in_jupyter() -> bool:
    """Whether a Jupyter kernel runs this process; only that has a front end to talk to."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


def under_sliders(frames: Frames) -> Any:
    """A widget (`ipywidgets.VBox`): a slider for each control, play and step, the drawing.

    Raises
    ------
    ImportError
        ipywidgets is not installed.
    """
    import ipywidgets

    shown = [frames]
    picture = ipywidgets.HTML()
    step = ipywidgets.IntSlider(value=1, min=1, description="step", continuous_update=True)
    play = ipywidgets.Play(value=1, min=1, interval=round(1000 * frames.seconds))
    ipywidgets.jslink((play, "value"), (step, "value"))
    controls = {
        name: ipywidgets.SelectionSlider(
            options=[(_label(value), value) for value in values],
            value=chosen,
            description=name.replace("_", " "),
        )
        for name, (values, chosen) in frames.controls.items()
    }

    def draw(_: Any = None) -> None:
        now = shown[0]
        picture.value = now.svg(now.drawing(step.value - 1))

    def change(_: Any) -> None:
        shown[0] = frames.redraw(**{name: slider.value for name, slider in controls.items()})
        step.max = play.max = len(shown[0].frames)  # a step beyond the end becomes the last one
        draw()

    step.max = play.max = len(frames.frames)
    step.observe(draw, "value")
    for slider in controls.values():
        slider.observe(change, "value")
    draw()
    return ipywidgets.VBox([*controls.values(), ipywidgets.HBox([play, step]), picture])


def _label(value: Any) -> str:
    """A value of a control in few characters; a row of numbers with spaces between."""
    if isinstance(value, tuple):
        return " ".join(f"{x:g}" for x in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
