"""The version of a kernel: a hash of its source file and of all that this imports of the package."""

from __future__ import annotations

import functools
import hashlib
import linecache
import os
import re
import time

IMPORTED = time.time()

# Names of files are text with slashes here: a Path takes twenty times as long.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))).replace(os.sep, "/")
ALWAYS = tuple(f"{ROOT}/jit/{name}.py" for name in ("disk_cache", "sources"))  # what entries are


@functools.cache
def _files() -> frozenset[str]:
    """The package's own source files."""
    return frozenset(
        f"{folder.replace(os.sep, '/')}/{name}"
        for folder, _, names in os.walk(ROOT)
        for name in names
        if name.endswith(".py")
    )


@functools.cache
def _source(path: str) -> str:
    if path in _files():  # in half of the time
        with open(path, encoding="utf-8") as file:
            return file.read()
    return "".join(linecache.getlines(path))  # which also handles the cells of a notebook


_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+)?import[ \t]+(\([^)]*\)|[^#\n]*)", re.MULTILINE
)


@functools.cache
def _imports(path: str) -> frozenset[str]:
    """The package's own files that a file imports, at any place in it."""
    found: set[str] = set()
    for dots, module, names in _IMPORT.findall(_source(path)):  # parsing takes eight times as long
        start = path.rsplit("/", len(dots))[0] if dots else os.path.dirname(ROOT)
        base = "/".join((start, *module.split("."))).rstrip("/")
        found.add(base)
        found.update(
            f"{base}/{words[0].replace('.', '/')}"
            for name in names.strip("()").split(",")
            if (words := name.split())
        )
    return _files() & {name + end for name in found for end in (".py", "/__init__.py")}


@functools.cache
def source_digest(path: str) -> str:
    """Hash of a source file and of all that it imports from the package, directly or not.

    It is the version of the file's kernels.
    """
    seen: set[str] = set()
    waiting = {path.replace(os.sep, "/"), *ALWAYS}
    while waiting:
        seen |= waiting
        waiting = {file for found in map(_imports, waiting) for file in found} - seen
    digest = hashlib.sha256()
    for file in sorted(seen):
        digest.update(f"{os.path.basename(file)}\n{_source(file)}\0".encode())
    if any(map(_changed_since_import, seen & _files())):
        digest.update(os.urandom(16))
    return digest.hexdigest()


def _changed_since_import(file: str) -> bool:
    """Whether a file was written or replaced while this process ran; a time to come says nothing."""
    found, now = os.stat(file), time.time()
    return any(IMPORTED < at <= now for at in (found.st_mtime, found.st_ctime))
