"""Files that are whole: a reader sees the old one or the new one, and never a part."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def new_file(path: str | Path) -> Iterator[BinaryIO]:
    """A new file to write to, which only its owner may change.

    It takes the place of the one at `path` when it is complete, and is removed when writing fails.
    """
    temporary = f"{path}.tmp.{uuid.uuid4().hex[:16]}"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file at once."""
    with new_file(path) as file:
        file.write(data)
