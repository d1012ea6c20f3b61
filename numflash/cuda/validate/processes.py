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


def attend(
    command: Sequence[str],
    take: Callable[[dict[str, Any]], None],
    limit: float,
    timing_limit: float,
) -> tuple[str, str]:
    """Run a child, `take` each JSON object that it writes; "ended", "crashed" or "killed", and why.

    limit : seconds until its timings begin; timing_limit : seconds from there
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
    words: list[str] = []
    assert child.stdout is not None and child.stderr is not None
    readers = [
        threading.Thread(target=_rows, args=(child.stdout, found), daemon=True),
        threading.Thread(target=_words, args=(child.stderr, words), daemon=True),
    ]
    for reader in readers:
        reader.start()
    allowed, end = limit, time.monotonic() + limit
    try:
        while True:
            try:
                line = found.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return "killed", f"no end within {allowed:.0f} s"
            if line is None:
                break
            try:
                row = json.loads(line)
            except ValueError:
                words.append(line)
                continue
            if "phase" in row:
                allowed, end = timing_limit, time.monotonic() + timing_limit
            else:
                take(row)
        try:
            code = child.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "killed", f"no end within {allowed:.0f} s"
    finally:
        _kill(child)
        for reader, stream in zip(readers, (child.stdout, child.stderr), strict=True):
            reader.join(1)
            if not reader.is_alive():  # else the driver holds the child, and its pipes stay open
                stream.close()
    if code == 0:
        return "ended", ""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return "crashed", f"{how}: {''.join(words[-LAST_WORDS:]).strip()}"
