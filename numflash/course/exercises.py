"""Exercises: `check` an answer, ask for a `hint`, look at a `solution`.

What an exercise expects is in `answers/` (one module per chapter), its solution in a text file of
its own in `answers/solutions/`. A chapter shows neither before the reader asks. A wrong answer is
told what is wrong with it, the first one is given a hint as well; it stops nothing.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import linecache
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError

NO_RETURN = "it returns None; is there a `return`?"
SOLUTIONS = Path(__file__).parent / "answers" / "solutions"


@dataclass(frozen=True)
class Exercise:
    """What one exercise requires and how an answer is judged.

    `judge` decides if it is set, else `model`, else `expected`.

    Attributes
    ----------
    name : what the exercise requires
    hints : given one after another, the first with the first wrong answer
    expected : the value, or a function of what the chapter passes to `check` that returns it
    model : a function that the answer must agree with, on `cases`
    cases : arguments to call both with, a tuple for each call; or a function of what the chapter
        passes to `check`
    judge : function of (answer, *given), of an answer that is a function, that returns "" for a
        right one, else what is wrong
    within : relative tolerance of floats; integers, booleans and text must be equal
    allowed : the words that an answer may be, if it is a word
    slip : (old, new), a typical mistake in the solution; the tests check that it is noticed
    broken : the chapter shows a faulty program, so the answer as it is shipped is wrong, not open
    """

    name: str
    hints: tuple[str, ...]
    expected: Any = None
    model: Callable[..., Any] | None = None
    cases: Any = ()
    judge: Callable[..., str] | None = None
    within: float = 1e-6
    allowed: tuple[str, ...] = ()
    slip: tuple[str, str] = ("", "")
    broken: bool = False


@dataclass(frozen=True)
class Answer:
    """One call of `check`: the exercise's number, what came, and the verdict with its words.

    verdict : "open", "right", "wrong", or "raised" (an exception)
    """

    number: str
    got: Any
    given: tuple[Any, ...]
    verdict: str
    words: str


answers: list[Answer] = []  # of this process, in order
_hinted: dict[str, int] = {}  # hints shown so far


def find(number: str) -> Exercise:
    """The exercise of a number like "02.1".

    Raises
    ------
    ArgumentError
        There is no such exercise.
    """
    chapter = str(number).partition(".")[0]
    try:
        known = importlib.import_module(f".answers.c{chapter}", __package__).EXERCISES
    except ModuleNotFoundError as error:
        if not str(error.name).endswith(f"c{chapter}"):
            raise
        known = {}
    if number not in known:
        there = f"; chapter {chapter} has {', '.join(known)}" if known else ""
        raise ArgumentError(
            f"number: got {number!r}; allowed: the number of an exercise in quotes, "
            f'as in hint("01.3"){there}'
        )
    return known[number]


def check(number: str, got: Any, *given: Any) -> None:
    """Judge an answer and say what is wrong with it. A wrong answer stops nothing.

    Parameters
    ----------
    number : of the exercise, as "02.1"
    got : the answer; `...`, also within a tuple, is an exercise that is still open
    given : what the chapter measured, where the answer depends on it
    """
    exercise = find(number)
    as_shipped = exercise.broken and not any(x.number == number for x in answers)
    verdict, words = _judged(exercise, got, given)
    answers.append(Answer(number, got, given, verdict, words))
    print(f"{number} {exercise.name}: {words}")
    if verdict == "wrong" and as_shipped:
        print(f'   your turn: mend it; hint("{number}") helps')
    elif verdict == "wrong" and number not in _hinted:
        hint(number)


def hint(number: str) -> None:
    """Print the hints so far and the next one; after the last one, how to see a solution."""
    hints, n = find(number).hints, _hinted.get(number, 0)
    for k, text in enumerate(hints[: n + 1]):
        print(f"   hint {k + 1} of {len(hints)}: {text}")
    if n >= len(hints):
        print(f'   no more hints; solution("{number}") prints one way to do it')
    _hinted[number] = min(n + 1, len(hints))


def solution_text(number: str) -> str:
    """The source of one way to do it."""
    find(number)
    return (SOLUTIONS / f"{number.replace('.', '_')}.txt").read_text(encoding="utf-8")


def solution(number: str) -> None:
    """Print one way to do it."""
    print(solution_text(number), end="")


def answer_of(number: str, *given: Any) -> Any:
    """What an exercise expects, for the cells after it: the value, or the function."""
    exercise = find(number)
    return exercise.model or _expected(exercise, given)


def yours_or(number: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The reader's function if `check` has just found it right, else what `answer_of` gives."""
    last = next((x for x in reversed(answers) if x.number == number), None)
    yours = last is not None and last.verdict == "right" and last.got is function
    print(f"{number}: here runs {'your function' if yours else 'a function of the course'}")
    return function if yours else answer_of(number)


def _expected(exercise: Exercise, given: tuple[Any, ...]) -> Any:
    return exercise.expected(*given) if callable(exercise.expected) else exercise.expected


def _open(got: Any) -> bool:
    return got is ... or (isinstance(got, tuple) and any(x is ... for x in got))


def _judged(exercise: Exercise, got: Any, given: tuple[Any, ...]) -> tuple[str, str]:
    """The verdict and its words."""
    if _open(got):
        return "open", "not answered yet"
    if exercise.allowed and str(got).strip().lower() not in exercise.allowed:
        words = ", ".join(f'"{word}"' for word in exercise.allowed)
        return "wrong", f"not yet: got {show(got)}; allowed: {words}"
    of_a_function = exercise.model is not None or exercise.judge is not None
    if of_a_function and not callable(got):
        return "wrong", f"not yet: got {show(got)}, which is not a function"
    if exercise.judge is not None:
        try:
            fault = exercise.judge(got, *given)
        except Exception as error:
            if _none_returned(error):
                return "wrong", f"not yet: {NO_RETURN}"
            return "raised", f"not yet: {_raised(error, got)}"
        if fault.startswith("got None"):
            fault = NO_RETURN
        if fault == "open":
            return "open", "not answered yet"
        return ("wrong", f"not yet: {fault}") if fault else ("right", "right")
    if exercise.model is None:
        wish = _expected(exercise, given)
        fault = difference(got, wish, exercise.within)
        return ("wrong", f"not yet: {fault}") if fault else ("right", f"right: {show(wish)}")
    cases = exercise.cases(*given) if callable(exercise.cases) else exercise.cases
    for case in cases:
        shown = _named(got, case)
        try:
            came = got(*copy.deepcopy(case))  # an answer may change its arguments
        except Exception as error:
            return "raised", f"not yet: for ({shown}) it raises {_raised(error, got)}"
        if _open(came):
            return "open", "not answered yet"
        if came is None:
            return "wrong", f"not yet: for ({shown}) {NO_RETURN}"
        fault = difference(came, exercise.model(*copy.deepcopy(case)), exercise.within)
        if fault:
            return "wrong", f"not yet: for ({shown}) {fault}"
    return "right", f"right, on {len(cases)} case{'s' * (len(cases) > 1)}"


def _none_returned(error: Exception) -> bool:
    """Whether a judge, not the answer, could not compute with the None that it was given."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = frames[-1].f_globals.get("__package__", "") or ""
    return (
        isinstance(error, TypeError) and "NoneType" in str(error) and inside.startswith(__package__)
    )


def _named(function: Callable[..., Any], case: tuple[Any, ...]) -> str:
    """The arguments of a call with their names, each on its own line where one would be long."""
    try:
        names = inspect.signature(function).bind(*case).arguments
        shown = [f"{name} = {show(x)}" for name, x in names.items()]
    except (TypeError, ValueError):  # it takes other arguments
        shown = [show(x) for x in case]
    line = ", ".join(shown)
    return line if len(line) < 80 else "".join(f"\n      {x}" for x in shown)


def does_nothing(function: Callable[..., Any]) -> bool:
    """Whether the body of a function is empty, as an exercise's is before it is answered."""

    def empty() -> None: ...

    function = getattr(function, "py_func", function)  # what @kernel was given
    code = getattr(function, "__code__", None)
    return code is not None and code.co_code == empty.__code__.co_code


def _raised(error: Exception, got: Any) -> str:
    """What was raised, and the last line of the reader's own code on the way to it."""
    own = getattr(got, "__globals__", None)  # all cells of a notebook have these in common
    lines = [
        (frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if frame.f_globals is own
    ]
    return f"{type(error).__name__}: {error}" + (at_line(*lines[-1]) if lines else "")


def at_line(file: str, number: int) -> str:
    """A line of the reader's code, with its number."""
    return f"\n   at line {number}: " + linecache.getline(file, number).strip()


def difference(got: Any, expected: Any, within: float = 1e-6) -> str:
    """What is wrong with `got`, "" if they agree; of what is right at most one entry of an array."""
    if isinstance(expected, (tuple, list)):
        return _parts_differ(got, expected, within)
    if isinstance(expected, str):
        same = isinstance(got, str) and got.strip().lower() == expected.lower()
        return "" if same else f"it is not {show(got)}"
    try:
        a, b = np.asarray(got), np.asarray(expected)
    except (TypeError, ValueError):
        return f"got {show(got)}, which is not a number or an array"
    if b.dtype.kind == "b" and not b.ndim and a.dtype.kind != "b":
        return f"got {show(got)}, which is neither True nor False"
    if callable(got):
        return f"got {show(got)}; call it, and give what it returns"
    if a.dtype.kind not in "biuf":
        quoted = "; write numbers without quotes" * isinstance(got, str)
        return f"got {show(got)}, which is not a number or an array of numbers{quoted}"
    if a.ndim and not b.ndim:
        return f"got {show(got)}; give one number" + ", without brackets" * (a.size == 1)
    if a.shape != b.shape:
        return f"got {show(got)}; its shape must be {b.shape}, not {a.shape}"
    if b.dtype == np.int8 and a.dtype != b.dtype:
        return f"got {show(got)}; its dtype must be int8, not {a.dtype}"
    with np.errstate(invalid="ignore"):
        if b.dtype.kind == "f":
            # what sums to nearly 0 has an error of the size of its terms
            size = np.abs(b[np.isfinite(b)]).max(initial=1e-3) if b.ndim else 1e-3
            same = np.isclose(a, b, rtol=within, atol=within * size)
        else:
            same = a == b
    if same.all():
        return ""
    if b.ndim == 0:
        if b.dtype.kind == "b" or not np.isfinite(a):
            return f"it is not {show(got)}"
        return f"got {show(got)}, which is too {'large' if a > b else 'small'}"
    first = tuple(int(n) for n in np.argwhere(~same)[0])
    wish = f" where {show(b[first])} is expected" if b.dtype.kind == "f" else ""
    return (
        f"{(~same).sum()} of {b.size} entries differ, "
        f"the first at {list(first)}: {show(a[first])}{wish}"
    )


def _parts_differ(got: Any, expected: Sequence[Any], within: float) -> str:
    if not isinstance(got, (tuple, list)) or len(got) != len(expected):
        return f"got {show(got)}; it must be {len(expected)} values"
    for n, (a, b) in enumerate(zip(got, expected, strict=True)):
        fault = difference(a, b, within)
        if fault:
            return f"value {n + 1} of {len(expected)}: {fault}"
    return ""


def show(x: Any) -> str:
    """A value in few words."""
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(show, x))})"
    if isinstance(x, np.ndarray) and x.ndim:
        head = ", ".join(map(show, x.ravel()[:4]))
        return f"array {x.shape} {x.dtype} [{head}{', ...' if x.size > 4 else ''}]"
    if isinstance(x, (float, np.floating)):
        return f"{x:.6g}"
    if callable(x):
        return f"the function {getattr(x, '__name__', repr(x))}"
    return repr(x.item() if isinstance(x, np.generic) else x)
