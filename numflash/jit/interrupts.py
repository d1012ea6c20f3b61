"""Ctrl-C while a kernel is compiled: it takes effect as soon as that kernel is done.

An exception in the middle would leave Numba's tables half filled, and one in a callback from LLVM
is dropped by Python. Either way a later call would fail. Compiling a kernel takes seconds.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_deferring = False  # in the main thread, where Python handles signals


def _handlers() -> dict[int, Callable]:
    """What the program does at each signal that it handles in Python; that of Ctrl-C comes last."""
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handled: dict[int, Callable] = {n: handler for n, handler in found.items() if callable(handler)}
    if signal.SIGINT in handled:
        handled[signal.SIGINT] = handled.pop(signal.SIGINT)
    return handled


def uninterrupted(function: Callable, *args: Any) -> Any:
    """The result of function(*args), during which no signal is handled.

    Signals that arrive meanwhile are handled afterwards.
    """
    global _deferring
    if _deferring or threading.current_thread() is not threading.main_thread():
        return function(*args)
    handlers = _handlers()
    pending = []

    def note(number: int, frame: Any) -> Any:
        if _deferring:
            pending.append((number, frame))
            return None
        return handlers[number](number, frame)

    try:
        _deferring = True
        for number in handlers:
            signal.signal(number, note)
        return function(*args)
    finally:
        _deferring = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        with ExitStack() as turns:  # each handler has its turn, whatever another one raises
            for number, frame in reversed(pending):
                turns.callback(handlers[number], number, frame)
