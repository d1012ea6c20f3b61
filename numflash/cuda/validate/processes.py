"""Children with a limit: a kernel that never ends cannot be interrupted, its process can."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

LAST_WORDS = 12  # lines of a child's standard error that are reported


def _rows(stream: IO[str], found: queue.Queue[str | None]) -> None:
    for line in stream:
        found.put(line)
    found.put(None)


def _words(stream: IO[str], words: list[str]) -> None:
    for line in stream:
        words.append(line)


def _kill(child: subprocess.Popen) -> None:
    """End the child and what it started; wait only so long for one that the driver holds."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5)


def _late(limit: float, last: float) -> str:
    """Why a child was killed."""
    if time.monotonic() >= last:
        return "no time left"
    return f"nothing within {limit:.0f} s"


def attend(
    command: Sequence[str],
    take: Callable[[dict[str, Any]], None],
    limit: float,
    altogether: float,
) -> tuple[str, str]:
    """Run a child, `take` each JSON object that it writes; "ended", "crashed" or "killed", and why.

    limit : seconds between two objects, until a "step" names another limit
    altogether : seconds of all
    """
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    found: queue.Queue[str | None] = queue.Queue()
    printed: list[str] = []  # lines of stdout that are no rows
    words: list[str] = []
    assert child.stdout is not None and child.stderr is not None
    readers = [
        threading.Thread(target=_rows, args=(child.stdout, found), daemon=True),
        threading.Thread(target=_words, args=(child.stderr, words), daemon=True),
    ]
    for reader in readers:
        reader.start()
    last = time.monotonic() + altogether

    def allowed() -> float:
        return max(0.0, min(limit, last - time.monotonic()))

    try:
        while True:
            try:
                line = found.get(timeout=allowed())
            except queue.Empty:
                return "killed", _late(limit, last)
            if line is None:
                break
            try:
                row = json.loads(line)
            except ValueError:
                printed.append(line)
                continue
            limit = row.get("step", {}).get("limit", limit)
            take(row)
        try:
            code = child.wait(max(1.0, allowed()))
        except subprocess.TimeoutExpired:
            return "killed", _late(limit, last)
    finally:
        _kill(child)
        for reader, stream in zip(readers, (child.stdout, child.stderr), strict=True):
            reader.join(1)
            if not reader.is_alive():  # else the driver holds the child, and its pipes stay open
                stream.close()
    if code == 0:
        return "ended", ""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    said = printed + words  # stderr, where the reason is, comes last
    return "crashed", f"{how}: {''.join(said[-LAST_WORDS:]).strip()}"
