"""`check` accepts what is right, refuses what is wrong, says what is wrong with it, and gives
nothing away; hints come one by one, the solution only when asked.
"""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from numflash.course import drawings, exercises, lessons, moving, widgets
from numflash.course.answers import c10, c13, c15
from numflash.course.exercises import Exercise, answers, check, difference, hint, solution
from numflash.errors import ArgumentError


@pytest.fixture
def posed(monkeypatch):
    """Pose an exercise of number "99.1"."""

    def pose(**settings):
        asked = Exercise("it", ("first hint", "second hint"), **settings)
        monkeypatch.setattr(exercises, "find", lambda number: asked)
        monkeypatch.setattr(exercises, "_hinted", {})

    return pose


@pytest.mark.parametrize(
    ("got", "expected", "verdict"),
    [
        (..., 5, "open"),
        ((1, ...), (1, 2), "open"),
        (5, 5, "right"),
        (6, 5, "wrong"),
        (5.0, 5, "right"),
        (5.0000001, 5.0, "right"),
        (5.01, 5.0, "wrong"),
        ("memory", "memory", "right"),
        ("Memory ", "memory", "right"),
        ("compute", "memory", "wrong"),
        (None, 5, "wrong"),
        ((1, 2), (1, 2), "right"),
        ((1, 2), (1, 3), "wrong"),
        (1, (1, 2), "wrong"),
        (True, True, "right"),
        (False, True, "wrong"),
        (float("nan"), 1.0, "wrong"),
        (np.arange(3), np.arange(3), "right"),
        (np.arange(4), np.arange(3), "wrong"),
        ([0, 1, 2], np.arange(3), "right"),
        ("5", 5, "wrong"),
        ([1, [2]], np.arange(2), "wrong"),
    ],
)
def test_values(got, expected, verdict, posed, capsys):
    posed(expected=expected)
    check("99.1", got)
    assert answers[-1].verdict == verdict
    said = capsys.readouterr().out
    assert said.startswith("99.1 it: ") and ("hint 1 of 2" in said) == (verdict == "wrong")


def test_a_wrong_answer_is_told_what_is_wrong_and_not_what_is_right(posed, capsys):
    posed(expected=1234)
    check("99.1", 1000)
    check("99.1", 2000)
    said = capsys.readouterr().out
    assert "too small" in said and "too large" in said and "1234" not in said
    assert "3 of 4 entries differ, the first at [0, 1]" in difference(
        np.zeros((2, 2)), np.arange(4.0).reshape(2, 2)
    )
    assert "shape" in difference(np.zeros(3), np.zeros(4))
    assert "value 2 of 2" in difference((1, 2), (1, 3))


def test_hints_come_one_by_one(posed, capsys):
    posed(expected=1)
    for words in ("hint 1 of 2: first", "hint 2 of 2: second", "no more hints"):
        check("99.1", 2)
        assert words in capsys.readouterr().out
    hint("99.1")
    assert "no more hints" in capsys.readouterr().out


def test_functions(posed, capsys):
    posed(model=lambda x: x * x, cases=((2,), (3,)))
    for answer, verdict, words in (
        (lambda x: x + x, "wrong", "for (3) got 6, which is too small"),
        (lambda x: x * x, "right", "2 cases"),
        (lambda x: ..., "open", "not answered"),
        (lambda x: x[0], "wrong", "TypeError"),
        (lambda x: None, "wrong", "it returns None"),
        (4, "wrong", "got 4, which is not a function"),
    ):
        check("99.1", answer)
        assert answers[-1].verdict == verdict and words in capsys.readouterr().out
    assert "neither True nor False" in difference("True", True)
    assert difference(np.bool_(True), True) == ""


def test_judges(posed, capsys):
    posed(judge=lambda got, limit: "" if got < limit else "too much")
    check("99.1", 1, 2)
    assert answers[-1].verdict == "right" and answers[-1].given == (2,)
    check("99.1", 3, 2)
    assert answers[-1].words == "not yet: too much"
    check("99.1", "x", 2)
    assert answers[-1].verdict == "wrong" and "TypeError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sectors", "conflicts", "said"),
    [(128, 0, ""), (1024, 0, "1152 sectors of global memory"), (128, 992, "992 of 1056 passes")],
)
def test_a_transpose_is_judged_by_sectors_and_conflicts(sectors, conflicts, said, monkeypatch):
    """Right numbers are not enough: columns of global memory would do without shared memory."""
    report = SimpleNamespace(
        global_stored=4096,
        global_load_sectors=128,
        global_store_sectors=sectors,
        shared_conflicts=conflicts,
        shared_wavefronts=1056,
    )

    def ran(kernel, grid, block, args):
        args[1][...] = args[0].T
        return report, ""

    monkeypatch.setattr(c15, "emulated", ran)
    verdict = c15._transpose(None)
    assert said in verdict and bool(said) == bool(verdict)


def test_split_decode_must_split():
    """The same numbers from all keys at once are no answer; the solution is one."""

    def at_once(q, k, v, splits):
        s = k @ q
        p = 2.0 ** (s - s.max())
        return p @ v / p.sum()

    assert "a part has at most 16 keys" in c10._split_decode(at_once)
    names = {"np": np, "merge": c10.merge}
    exec(exercises.solution_text("10.3"), names)
    assert c10._split_decode(names["decode"]) == ""
    assert "return" in c10._split_decode(lambda q, k, v, splits: None)


def test_a_broken_program_gets_its_hint_after_the_reader_has_tried(posed, capsys, monkeypatch):
    posed(expected=1, broken=True)
    monkeypatch.setattr(exercises, "answers", [])
    check("99.1", 2)
    assert "hint 1" not in capsys.readouterr().out
    check("99.1", 2)
    assert "hint 1 of 2" in capsys.readouterr().out


def test_the_report_of_a_race_names_both_warps(capsys):
    """Chapter 23's second kernel: warp 0 overwrites words that warp 3 reads."""
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    from numba import cuda

    def running_sums(x, out):
        shared = cuda.shared.array(128, np.float32)
        t = cuda.threadIdx.x
        total = np.float32(0)
        for n in range(x.shape[0]):
            shared[t] = x[n, t]
            cuda.syncthreads()
            total += shared[127 - t]
        out[t] = total

    check("23.2", running_sums)
    said = re.search(r"overwritten by warp (\d) while warp (\d)", capsys.readouterr().out)
    assert said and int(said[1]) + int(said[2]) == 3


def test_a_kernel_written_like_numpy_is_told_so():
    """The compiler's own words for a row that is assigned are "NRT required but not enabled"."""
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    from numba import cuda

    def rows(q, k, out):
        shared = cuda.shared.array((64, 32), np.float32)
        shared[cuda.threadIdx.x] = k[cuda.threadIdx.x]

    def zeros(q, k, out):
        out[cuda.threadIdx.x, 0] = np.float32(0)

    def nothing(q, k, out):
        cuda.syncthreads()

    said = c13._scores(rows)
    assert "does not compile" in said and "shared[cuda.threadIdx.x] = k" in said
    assert "give every index" in said and "\x1b" not in said
    assert "numbers of out are wrong" in c13._scores(zeros)  # stored something: not open
    assert c13._scores(nothing) == "open"


def test_a_solution_is_printed_only_when_asked(capsys):
    solution("00.1")
    assert "4096" in capsys.readouterr().out
    for number in ("00.99", "77.1"):
        with pytest.raises(ArgumentError, match=r"number: got .*; allowed"):
            solution(number)


def test_frames_stand_for_themselves():
    """No other file and no script beside the slider's; every frame is drawn and captioned."""
    pictures = moving.Frames([(moving.box(0, 0, 9, 9, label="a<b"), f"step {n}") for n in range(3)])
    page = pictures._repr_html_()
    assert page.count("<animate ") == 3 and "a&lt;b" in page and "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert repr(pictures).splitlines() == ["1. step 0", "2. step 1", "3. step 2"]


MOVED = {  # drawing: its arguments, then what a slider is moved to
    "shapes": ((), {"length": 4}),
    "sweep": ((), {"block_q": 1}),
    "online_softmax": (((1.0, 3.0, 2.0, 6.0, 5.0, 6.0),), {"block": 3}),
    "tile_against_cache": ((64, 64, 48, (6, 48, 192)), {"cache_kib": 2048}),
    "register_tile": ((), {"mr": 8}),
    "fused_against_unfused": ((), {"blocks": 5}),
    "ring_of_stages": ((), {"stages": 1}),
    "race": ((), {"barrier": True}),
    "ring_of_ranks": ((), {"ranks": 2}),
}


@pytest.mark.parametrize("name", MOVED)
def test_sliders_move_the_same_picture(name):
    """The widgets show the frames that the page shows; a control draws them again."""
    pytest.importorskip("ipywidgets")
    draw, (given, change) = getattr(drawings, name), MOVED[name]
    frames = draw(*given)
    shown = widgets.under_sliders(frames)
    *controls, (_, step), picture = [getattr(x, "children", x) for x in shown.children]
    assert [x.description for x in controls] == [n.replace("_", " ") for n in frames.controls]
    assert picture.value == frames.svg(frames.drawing(0))
    step.value = len(frames.frames)
    assert picture.value == frames.svg(frames.drawing(len(frames.frames) - 1))
    ((control, value),) = change.items()
    dict(zip(frames.controls, controls, strict=True))[control].value = value
    moved = frames.redraw(**change)
    assert step.max == len(moved.frames) and moved.frames != frames.frames
    assert picture.value == moved.svg(moved.drawing(step.value - 1))


def test_every_moving_picture_is_tried():
    made = {n for n, f in vars(drawings).items() if getattr(f, "__wrapped__", None)}
    assert made == set(MOVED)


def test_widgets_are_for_a_live_jupyter_only(monkeypatch):
    """A page without one has the HTML alone; a live one has both, and HTML without ipywidgets."""
    pytest.importorskip("ipywidgets")
    picture = drawings.race()
    assert set(picture._repr_mimebundle_()) == {"text/plain", "text/html"}
    monkeypatch.setattr(widgets, "_in_jupyter", lambda: True)
    assert widgets.VIEW in picture._repr_mimebundle_()
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert set(picture._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_tiles_read_fewer_rows_than_rows_do():
    """The counts in the pictures are those of the definition."""
    last = drawings.sweep(block_q=4, block_k=2).frames[-1][0]
    assert "64 rows of K read" in last and "16 rows of K read" in last  # 8 rows x 8; 2 sweeps of 8
    assert (
        "wait for 10 in all" in drawings.ring_of_stages(stages=1).frames[0][1]
    )  # each of 5 copies
    assert "wait for 2 in all" in drawings.ring_of_stages(stages=2).frames[0][1]  # the first only
    softmax = drawings.online_softmax((1.0, 3.0, 2.0, 6.0, 5.0, 6.0), 2).frames[-1][0]
    assert "l = 2.719" in softmax and "m = 6" in softmax


def test_machine_names_the_machine_and_the_day(capsys):
    lessons.machine()
    said = capsys.readouterr().out
    assert "cores" in said and "Numba" in said and "20" in said


def test_card_says_whether_there_is_one(capsys):
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    lessons.card.cache_clear()
    found = lessons.card()
    assert ("No GPU here" in capsys.readouterr().out) == (found is None)
