"""Which compiled kernels are safe to load: those that nobody else can have written.

Loading a kernel runs what is in the file, so a folder of compiled kernels is as sensitive as one of
programs. Files and folders are used if they belong to the user or to root, and nobody else may
write to them. On Windows nothing is checked: it has no such permissions, and the folders are in the
user's profile.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger("numflash")


class UntrustedError(OSError):
    """A file or folder that somebody else may have written."""


def distrust(found: os.stat_result) -> str | None:
    """Why the file or folder is not to be used; None where it is."""
    if os.name != "posix":
        return None
    if found.st_uid not in (os.geteuid(), 0):
        return f"owned by user {found.st_uid}"
    if found.st_mode & stat.S_IWOTH:
        return "others may write to it"
    if found.st_mode & stat.S_IWGRP and not _own_group(found.st_gid, os.geteuid()):
        return f"others may write to it: members of group {found.st_gid}"
    return None


@functools.cache
def _own_group(gid: int, uid: int) -> bool:
    """Whether a group is a user's alone.

    Their login group, of the same name, without further members.

    Many distributions give every user such a group, and files that it may write (umask 002).
    """
    import grp
    import pwd

    try:
        user = pwd.getpwuid(uid)
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return (
        user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
    )


@functools.cache
def trusted_folder(folder: str) -> bool:
    """Whether files of a folder may be read; says once why not."""
    try:
        reason = distrust(os.stat(folder))
    except OSError:
        return False
    if reason:
        _refuse(folder, reason)
    return reason is None


_refused: list[str] = []  # the first folder that was not used: it is said once


def _refuse(folder: str, reason: str) -> None:
    if not _refused:
        _refused.append(folder)
        logger.warning(
            "compiled kernels in %s are not used: %s. Every process compiles its own. "
            "Remove that permission, or set NUMBA_CACHE_DIR to a folder of your own",
            folder,
            reason,
        )


def refused() -> bool:
    """Whether a folder was not used because others may write to it, which has been logged."""
    return bool(_refused)


def read(path: str | Path) -> bytes:
    """The content of a file, whose owner is looked at after it has been opened.

    Nobody can exchange it meanwhile.

    Raises
    ------
    UntrustedError
        Somebody else may have written it.
    OSError
    """
    with open(path, "rb") as file:
        reason = distrust(os.fstat(file.fileno()))
        if reason:
            folder, name = os.path.split(path)
            _refuse(folder, f"{name}: {reason}")
            raise UntrustedError(f"{path}: {reason}")
        return file.read()
