"""Compiled kernels on disk: what identifies an entry, and how it is read and written.

Numba's own cache looks only at the file of the function itself: an edited helper in another file,
another option set of the same function, or a data file cut short by a full disk can each run the
wrong code. `_PackageCache` closes all three: the stamp is a hash of the kernel's source file and of
all files of the package that it imports, the key holds options and closure values, and each entry
carries its own key and checksum; anything that does not match is compiled again. A file that was
changed after the process had imported it is not the code that runs: its kernels match nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import llvmlite.binding as llvm
from numba.core import caching, codegen, config
from numba.core.runtime import _nrt_python

from . import guard, target
from .announcements import announce, elsewhere, logger, not_saved
from .closures import salt, shown, shown_name
from .sources import source_digest
from .trust import read, refused, trusted_folder
from .whole import new_file


class _CheckedFile(caching.IndexDataCacheFile):
    """Cache files whose entries carry their key and a checksum, verified when they are read."""

    def save(self, key: Any, data: Any) -> None:
        payload = pickle.dumps(data, protocol=-1)
        super().save(key, (repr(key), hashlib.sha256(payload).digest(), payload))

    def load(self, key: Any) -> Any:
        try:
            entry = super().load(key)
            if entry is None:
                return None
            owner, checksum, payload = entry
            if owner == repr(key) and checksum == hashlib.sha256(payload).digest():
                return pickle.loads(payload)
        except Exception as error:  # any damage at all: compile again
            logger.info("ignoring a damaged cache entry: %s", error)
        return None

    def _load_index(self) -> dict[Any, str]:
        """Names of the data files, by key.

        Numba's own, of a file that nobody else can have written.
        """
        try:
            stream = io.BytesIO(read(self._index_path))
            if pickle.load(stream) == self._version:
                stamp, overloads = pickle.loads(stream.read())
                if stamp == self._source_stamp:
                    return dict(overloads)
        except FileNotFoundError:
            pass
        except Exception as error:
            logger.info("ignoring a damaged cache index: %s", error)
        return {}

    def _load_data(self, name: str) -> Any:
        return pickle.loads(read(self._data_path(name)))

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[Any]:
        """Write a new file, which only its owner may change, and put it in the place of the old
        one.
        """
        with new_file(filepath) as file:
            yield file


class _TrustedLocator:
    """A folder for compiled kernels that only its owner may write to, or none."""

    get_cache_path: Callable[[], str]

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """The subfolder for a source file.

        Numba encodes the file's name, which may have bytes that are no text.
        """
        path = os.fsencode(os.path.abspath(py_file))
        readable = path.decode("utf-8", "backslashreplace")
        return super().get_suitable_cache_subpath(readable)  # type: ignore[misc]

    def ensure_cache_path(self) -> None:
        os.makedirs(self.get_cache_path(), mode=0o755, exist_ok=True)
        super().ensure_cache_path()  # type: ignore[misc]

    @classmethod
    def from_function(cls, py_func: Callable, py_file: str) -> Any:
        found = super().from_function(py_func, py_file)  # type: ignore[misc]
        if found is None or trusted_folder(found.get_cache_path()):
            return found
        # the user asked for this folder: no other one in its place
        if issubclass(cls, caching.UserProvidedCacheLocator):
            raise RuntimeError(f"{found.get_cache_path()} is not the user's own")
        return None


def _trusted(locator: type) -> Any:
    return type(f"Trusted{locator.__name__}", (_TrustedLocator, locator), {})


class _LoadedLibrary(codegen.JITCodeLibrary):
    """Machine code from the disk.

    Its LLVM IR, most of its size, is only read when a kernel that is compiled calls it.
    """

    bitcode: bytes
    _shared_module: Any

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None:
            self._shared_module = llvm.parse_bitcode(self.bitcode)
        return self._shared_module


def _names_of(module: Any) -> bytes:
    """LLVM IR in which all that a module defines is there by name alone, for Numba to look up."""
    values = (*module.functions, *module.global_variables)
    names = (value.name for value in values if not value.is_declaration)
    lines = (f'define void @"{name}"() {{ ret void }}' for name in names)
    return llvm.parse_assembly("\n".join(lines)).as_bitcode()


class _Entries(caching.CompileResultCacheImpl):
    """What is cached of a kernel.

    Numba's, names of what it defines, and the `separate` functions that must be there before it is
    loaded.
    """

    _locator_classes: ClassVar = [_trusted(x) for x in caching.CacheImpl._locator_classes]

    def reduce(self, cres: Any) -> Any:
        module = cres.library._final_module
        declared = (f.name for f in module.functions if f.is_declaration)
        called = tuple(symbols[name] for name in declared if name in symbols)
        return called, _names_of(module), super().reduce(cres)

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        called, names, ((library, kind, (code, bitcode)), *rest) = payload
        for name, args, symbol in called:
            separate_functions[name].provide(args, symbol)
        cres = super().rebuild(target_context, ((library, kind, (code, names)), *rest))
        loaded = cres.library
        loaded.__class__ = _LoadedLibrary
        loaded.bitcode, loaded._shared_module = bitcode, None
        return cres


@functools.cache
def _provide_allocation() -> None:
    """The C functions of Numba's runtime, by their symbols.

    All else that machine code needs of it is linked into it. Numba compiles that again, for what it
    compiles.
    """
    for name, at in _nrt_python.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", at)


class _PackageCache(caching.FunctionCache):
    _impl_class = _Entries

    def __init__(self, py_func: Callable, options: str) -> None:
        super().__init__(py_func)
        self._options = options
        del self._cache_file  # Numba's own

    @functools.cached_property
    def _cache_file(self) -> _CheckedFile:
        # it reads sources: done for kernels that are called, not for all that are imported
        return _CheckedFile(
            self._cache_path,
            self._impl.filename_base,
            source_digest(self._py_func.__code__.co_filename),
        )

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (
            str(sig),
            codegen.magic_tuple(),
            self._options,
            salt(self._py_func),
            guard.ON,
            target.EMULATES_AMX,
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # Numba would import and register all that it can compile first, which takes as long as the
        # rest of a first call. The compiler does that by itself; machine code from the disk needs
        # only the functions that allocate.
        _provide_allocation()
        with self._guard_against_spurious_io_errors():
            found = self._load_overload(sig, target_context)
        if found is None:
            chosen = config.CACHE_DIR
            if chosen and not Path(self._cache_path).is_relative_to(chosen):
                elsewhere(chosen, self._cache_path)
            announce(shown_name(self._py_func))
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save what has been compiled.

        It is ready to be called, so an error here is only reported.
        """
        try:
            super().save_overload(sig, data)
        except Exception as error:
            not_saved(self._cache_path, error)


def folder_of(file: Path) -> Path | None:
    """The folder in use for compiled kernels of a source file.

    None where there is none that is trusted.
    """
    made: dict[str, Any] = {}
    exec(compile("def function(): pass", str(file), "exec"), made)
    try:
        return Path(_Entries(made["function"]).locator.get_cache_path())
    except RuntimeError:
        return None


class _NoFolder(caching.NullCache):
    """Where no folder can be used: says so when a kernel is compiled."""

    def __init__(self, py_func: Callable) -> None:
        self._name = shown_name(py_func)

    def load_overload(self, sig: Any, target_context: Any) -> None:
        if not refused():  # else that has been said, with the folder and the reason
            not_saved(
                "any folder",
                "neither NUMBA_CACHE_DIR, nor __pycache__ beside the package, nor the user's cache folder can be written to",
            )
        announce(self._name, "")


def cached(dispatcher: Any, options: dict[str, Any]) -> Any:
    """Give a dispatcher the package's disk cache."""
    function = dispatcher.py_func
    try:
        dispatcher._cache = _PackageCache(function, shown(options))
    except RuntimeError:
        # a function typed at the prompt has no file, and nobody expects it to be cached
        if os.path.isfile(function.__code__.co_filename):
            dispatcher._cache = _NoFolder(function)
    return dispatcher


separate_functions: dict[str, Any] = {}


symbols: dict[
    str, tuple[str, tuple[Any, ...], str]
] = {}  # (name in separate_functions, types, symbol) of each symbol
