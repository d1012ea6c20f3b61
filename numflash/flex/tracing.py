"""A Python function of a score and indices, called once with traced values: its expression graph.

Captured NumPy arrays are found in closures, globals, defaults and attributes, and put before the
function as arrays that accept traced indices; PyTorch's tensors are intercepted by a function mode.
"""

from __future__ import annotations

import dis
import functools
import linecache
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, NumflashError
from .formulas import FORMULAS
from .graph import Graph, Node, Untraceable
from .identity import EMPTY, same
from .traced import Scalar, Values, apply, flatten, indexed, scalar, special

LIBRARIES = ("numpy", "torch", "numba", "math", "builtins")
FIXED = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, np.ufunc)
# What may be asked of a captured array without its contents. The first five follow from what
# `Capture.current` compares; numflash itself asks for the others.
FORM = frozenset(("shape", "ndim", "size", "dtype", "strides", "view", "capture", "owner"))
# Names by which a function reads what nothing here sees: an array's memory, namespaces, settings.
UNSEEN = frozenset(
    ("array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "frombuffer", "memoryview", "view",
     "eval", "exec", "globals", "locals", "vars", "environ", "getenv")
)  # fmt: skip
special(FORMULAS)


class Captured(np.ndarray):
    """A captured array inside the function: NumPy's in all, but for traced indices.

    What the function computes of its contents by itself becomes a constant of the graph, which
    therefore holds for this call alone.
    """

    capture: Any
    owner: Any

    def __array_finalize__(self, source: Any) -> None:
        self.capture, self.owner = getattr(source, "capture", None), None

    def __getattribute__(self, name: str) -> Any:
        if name not in FORM and not name.startswith("__"):
            self.capture.steady = False
        return super().__getattribute__(name)

    def __array_function__(self, *args: Any) -> Any:
        self.capture.steady = False
        return super().__array_function__(*args)

    def __getitem__(self, index: Any) -> Any:
        given = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(x, Values) for x in given):
            self.capture.steady = False
            return super().__getitem__(index)
        owner = self if self.owner is None else self.owner
        return indexed(self.capture.graph, np.asarray(self), owner, given)


def _read_once(name: str) -> Callable:
    def read(self: Captured, *args: Any) -> Any:
        self.capture.steady = False
        return getattr(super(Captured, self), name)(*args)

    return read


for _name in (
    "__float__", "__int__", "__index__", "__bool__", "__iter__", "__complex__", "__str__", "__repr__", "__format__",
):  # fmt: skip
    setattr(Captured, _name, _read_once(_name))


class Capture:
    """The functions and arrays that a traced function names, and whether they are still the same.

    name : the argument that is recorded, for errors
    names : (how to read it, what was there) of each cell and global that was looked at
    steady : all that the function can reach was looked at: if `names` hold, so does the graph
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.steady = graph, True
        self.name = ""
        self.names: list[tuple[Callable[[], Any], Any]] = []
        self.shapes: list[tuple[np.ndarray, tuple, tuple, Any]] = []  # array, shape, strides, dtype
        self.places: list[tuple[Any, int, Any, tuple]] = []  # tensor, address, shape, strides
        self.arrays: set[int] = set()
        self.done: dict[int, Any] = {}

    def current(self) -> bool:
        """Whether every name still has the value that was traced."""
        if not self.steady:
            return False
        for array, shape, strides, dtype in self.shapes:
            same_form = array.shape == shape and array.strides == strides
            if not same_form or array.dtype is not dtype:
                return False
        for x, at, shape, strides in self.places:  # `.data` gives a tensor other memory
            if x.data_ptr() != at or x.shape != shape or x.stride() != strides:
                return False
        return self.names_hold()

    def names_hold(self) -> bool:
        """Whether all that was looked at by name is the same."""
        try:
            for read, value in self.names:
                found = read()
                if found is not value and not same(found, value):
                    return False
            return True
        except (KeyError, ValueError):  # a name was deleted
            return False

    def look(self, read: Callable[[], Any]) -> Any:
        """The value of a name as the traced function shall see it."""
        value = read()
        self.names.append((read, value))
        return self.swap(value)

    def swap(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self.array(value)
        if _is_jax(value):  # it never changes, and its memory is the CPU's
            return self.array(np.asarray(value), value)
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, functools.partial):
            self.steady = False
            options = {k: self.swap(v) for k, v in value.keywords.items()}
            return functools.partial(self.swap(value.func), *map(self.swap, value.args), **options)
        if isinstance(value, types.MethodType):
            self.steady = False
            return types.MethodType(self.swap(value.__func__), self.object(value.__self__))
        named = isinstance(value, tuple) and hasattr(value, "_make")
        if type(value) in (list, tuple) or named:
            if type(value) is list or any(isinstance(x, (list, dict)) for x in value):
                self.steady = False
            make = type(value)._make if named else type(value)
            return make(map(self.swap, value))
        if type(value) is dict:
            self.steady = False
            return {k: self.swap(v) for k, v in value.items()}
        if is_tensor(value):
            if id(value) not in self.arrays:
                self.arrays.add(id(value))
                self.places.append((value, value.data_ptr(), value.shape, value.stride()))
            return value
        if not _constant(value):
            self.steady = False  # an object, a class or a module whose attributes may change
            return self.object(value)
        return value

    def array(self, value: np.ndarray, owner: Any = None) -> Captured:
        """What the function sees of an array, which is `owner`'s memory if that is another object."""
        if isinstance(value, np.ma.MaskedArray):
            raise ArgumentTypeError(
                f"{self.name}: a captured masked array cannot be read; allowed: plain arrays, as .filled() makes them"
            )
        owner = value if owner is None else owner
        if id(owner) not in self.done:
            view = np.asarray(value).view(Captured)
            view.capture, view.owner = self, owner
            self.arrays.add(id(owner))
            self.shapes.append((value, value.shape, value.strides, value.dtype))
            self.done[id(owner)] = view
        return self.done[id(owner)]

    def object(self, value: Any) -> Any:
        """A copy of an object that holds arrays in attributes; any other is what it was."""
        if isinstance(value, type) or not hasattr(value, "__dict__") or is_tensor(value):
            return value
        if _of_library(type(value).__module__):
            return value
        held = {k: v for k, v in value.__dict__.items() if _is_plain_array(v)}
        if id(value) in self.done or not held or any(_slots(x) for x in type(value).__mro__):
            return self.done.get(id(value), value)
        space = isinstance(value, types.SimpleNamespace)
        try:
            copy = (types.SimpleNamespace if space else object).__new__(type(value))
        except TypeError:  # of a class that is not written in Python
            return value
        copy.__dict__.update(value.__dict__ | {k: self.swap(v) for k, v in held.items()})
        self.done[id(value)] = copy
        return copy

    def function(self, f: types.FunctionType) -> Any:
        if _of_library(f.__module__ or ""):
            return f
        if id(f) in self.done:
            return self.done[id(f)]
        cells = tuple(types.CellType() for _ in f.__closure__ or ())
        names = dict(f.__globals__)
        new = types.FunctionType(f.__code__, names, f.__name__, None, cells)
        self.done[id(f)] = new
        for name in f.__dict__:
            new.__dict__[name] = self.look(functools.partial(f.__dict__.__getitem__, name))
        if f.__defaults__:
            self.names.append((functools.partial(getattr, f, "__defaults__"), f.__defaults__))
            new.__defaults__ = tuple(map(self.swap, f.__defaults__))
        if named := f.__kwdefaults__:
            new.__kwdefaults__ = {k: self.look(functools.partial(named.get, k)) for k in named}
        for mine, cell in zip(cells, f.__closure__ or (), strict=True):
            if cell == EMPTY:  # a name that is bound later
                self.steady = False
            else:
                mine.cell_contents = self.look(functools.partial(getattr, cell, "cell_contents"))
        read = _names(f.__code__)
        if read & UNSEEN or any(not _of_library(name) for name in _imported(f.__code__)):
            self.steady = False
        for name in read:
            if name in names:
                names[name] = self.look(functools.partial(f.__globals__.__getitem__, name))
        return new


def _is_plain_array(x: Any) -> bool:
    """Whether x can be put before a function as `Captured`; masked arrays are refused if they are used."""
    return isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray)


def _slots(kind: type) -> Any:
    """The attributes of a class that a copy by `__dict__` would lose."""
    return vars(kind).get("__slots__")


def _is_jax(value: Any) -> bool:
    """Whether a value is an array of JAX, not one of the tracers that `jax.jit` passes."""
    jax = sys.modules.get("jax")
    return (
        jax is not None and isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    )


def _names(code: types.CodeType) -> set[str]:
    """Global names of a function and of those written inside it."""
    inner = [_names(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return set(code.co_names).union(*inner)


def _imported(code: types.CodeType) -> Iterator[str]:
    """Modules that a function, or one written inside it, imports."""
    for x in dis.get_instructions(code):
        if x.opname == "IMPORT_NAME":
            yield x.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _imported(inner)


def _of_library(module: str) -> bool:
    return module.split(".")[0] in LIBRARIES


def _constant(x: Any) -> bool:
    """Whether nothing that a function reads of a value can change."""
    if isinstance(x, FIXED):
        return True
    if isinstance(x, types.ModuleType):
        return _of_library(x.__name__)
    if isinstance(x, types.BuiltinFunctionType):  # a method of an object may read what changes
        return x.__self__ is None or isinstance(x.__self__, (types.ModuleType, type))
    return isinstance(x, type) and _of_library(x.__module__)


def is_tensor(x: Any) -> bool:
    """Whether x is a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


@functools.cache
def _mode_class() -> type:
    import torch
    from torch.overrides import TorchFunctionMode

    form = torch.Tensor, tuple, torch.dtype, torch.device, types.NoneType

    class Recording(TorchFunctionMode):
        """PyTorch's functions of traced values are recorded, all others run."""

        def __init__(self, capture: Capture) -> None:
            super().__init__()
            self.capture = capture

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), options: Any = None
        ) -> Any:
            options = options or {}
            if any(isinstance(x, Values) for x in flatten([*args, *options.values()])):
                return apply(self.capture.graph, function.__name__, args, options)
            found = function(*args, **options)
            if not isinstance(found, form):
                self.capture.steady = False  # what a tensor holds now: a number, an array, ...
            return found

    return Recording


def record(
    name: str, graph: Graph, function: Callable, arguments: list[Node], capture: Capture
) -> Node:
    """Call a function with traced arguments; its result as a node.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the line that cannot be recorded, and what to write instead; an exception of the
        function's own is its cause.
    """
    if not callable(function):
        raise ArgumentTypeError(f"{name}: got {type(function).__name__}; allowed: a function")
    given = [Scalar(graph, x) for x in arguments]
    capture.name = name
    try:
        if isinstance(function, (types.FunctionType, types.MethodType, functools.partial)):
            swapped = capture.swap(function)
        else:
            capture.steady = False
            swapped = capture.object(function)
            method = type(function).__call__
            if isinstance(method, types.FunctionType):
                swapped = types.MethodType(capture.swap(method), swapped)
        if "torch" in sys.modules:
            with _mode_class()(capture):
                found = swapped(*given)
        else:
            found = swapped(*given)
        if found is None:
            raise Untraceable("the function returned nothing; is a `return` missing?")
        return scalar(graph, found).node
    except Untraceable as error:
        where = _where(error) or _definition(function)
        raise ArgumentTypeError(f"{name}: {where}{error}{_of_jax(error)}") from None
    except (TypeError, IndexError) as error:
        if isinstance(error, NumflashError):
            raise
        if str(error).startswith("only integers, slices"):  # NumPy's, of an array as it came
            raise ArgumentTypeError(
                f"{name}: {_where(error)}an array is indexed that recording does not find, as in __slots__ or in an "
                "attribute of an attribute; allowed: arrays that are variables, as `table = x.table` before the function"
            ) from error
        raise ArgumentTypeError(
            f"{name}: {_where(error)}{error}; allowed: {len(given)} arguments ({_argument_names(len(given))}), "
            f"arrays made outside of the function, operations of single numbers{_of_jax(error)}"
        ) from error
    except (NumflashError, MemoryError):
        raise
    except Exception as error:
        raise ArgumentError(
            f"{name}: {_where(error)}{type(error).__name__}: {error}; allowed: a function that runs through "
            "when it is called once to record it"
        ) from error


def _argument_names(count: int) -> str:
    """What a function of so many arguments gets: a score function's five, a mask function's four."""
    return ", ".join(("score", "b", "h", "q_idx", "kv_idx")[-count:])


def _definition(function: Callable) -> str:
    """Where a function is written, for an error in what it returns."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}: "


def _of_jax(error: Exception) -> str:
    """A hint where the traced function names something of JAX, which removes its own frames from errors."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = [frame.f_globals.get(name) for name in frame.f_code.co_names]
        values += [frame.f_locals.get(name) for name in frame.f_code.co_freevars]
        for value in values:
            module = getattr(value, "__name__", None)
            if isinstance(module, str) and module.split(".")[0] == "jax":
                return ". Functions of JAX cannot be recorded; allowed: those of NumPy, as np.where for jnp.where"
    return ""


def _where(error: Exception) -> str:
    """The last line outside numflash and the libraries that an error came through."""
    ours = __name__.rsplit(".", 1)[0].split(".")[0]
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_globals.get("__name__", "").split(".")[0]
        if module in (ours, "torch", "numpy", "jax") and frame.f_code.co_filename != "<stdin>":
            continue
        file = frame.f_code.co_filename
        line = linecache.getline(file, number).strip()
        return f"{file}:{number}: `{line}`: " if line else f"{file}:{number}: "
    return ""
