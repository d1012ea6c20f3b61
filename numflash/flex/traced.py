"""Values that represent a score or an index while a function is recorded.

They answer to Python's operators and to the protocols of NumPy (`__array_ufunc__`,
`__array_function__`) and PyTorch (`__torch_function__`), so that `np.where`, `torch.tanh` and
`doc[q] == doc[k]` run as they are. A function of one operation becomes a node here (`apply`); those
of several are in `formulas`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .graph import Graph, Node, Untraceable

LONGEST_ROW = 256  # values of an array's row that a function may use whole; each becomes code
CONTROL = (
    "a score or index has no value while the function is recorded; write where(condition, x, y) "
    "instead of `if`, `and`, `or`, `not`, chained comparisons, min() and max(): `&`, `|`, `~`, "
    "minimum, maximum"
)


class Values:
    """What traced scalars, rows of an array and lists of scalars have in common: operators."""

    __slots__ = ()
    __array_priority__ = 1000
    __hash__ = object.__hash__
    graph: Graph

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **options: Any) -> Any:
        if method != "__call__":
            raise Untraceable(f"np.{ufunc.__name__}.{method} cannot be recorded")
        return apply(self.graph, ufunc.__name__, args, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return apply(self.graph, function.__name__, args, options)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), options: Any = None
    ) -> Any:
        owner = next(x for x in flatten(args) if isinstance(x, Values))
        return apply(owner.graph, function.__name__, args, options or {})

    def __setitem__(self, index: Any, value: Any) -> None:
        raise Untraceable("values cannot be assigned in place; write where(condition, x, y)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in FUNCTIONS or name in SPECIAL or name in REDUCTIONS:
            return functools.partial(_method, self, name)
        raise Untraceable(f"`.{name}` of a traced value cannot be recorded")

    def __bool__(self) -> bool:
        raise Untraceable(CONTROL)

    def __int__(self) -> int:
        raise Untraceable("int() of a traced value: write .astype(int) or .to(torch.int32)")

    def __float__(self) -> float:
        raise Untraceable(
            "the math module and float() need numbers: use NumPy's or PyTorch's functions"
        )

    def __index__(self) -> int:
        raise Untraceable(
            "a traced index needs an array that the function itself names (a local of the enclosing "
            "function, a global, a default, an attribute of its object), and no range() or list"
        )

    def __iter__(self) -> Any:
        raise Untraceable("a traced value cannot be looped over")

    def __round__(self, digits: Any = None) -> Any:
        return apply(self.graph, "round", (self,), {"decimals": digits})

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __neg__(self) -> Any:
        return apply(self.graph, "neg", (self,), {})

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return apply(self.graph, "abs", (self,), {})

    def __invert__(self) -> Any:
        return apply(self.graph, "not", (self,), {})

    @property
    def device(self) -> Any:
        torch = sys.modules.get("torch")
        return "cpu" if torch is None else torch.device("cpu")

    requires_grad = False


def _method(self: Any, name: str, *args: Any, **options: Any) -> Any:
    return apply(self.graph, name, (self, *args), options)


def _operator(op: str, swapped: bool = False) -> Callable:
    def operator(self: Any, other: Any, *more: Any) -> Any:
        if more:
            raise Untraceable("pow() of three numbers cannot be recorded: write x ** y % z")
        return apply(self.graph, op, (other, self) if swapped else (self, other), {})

    return operator


for _name, _op in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv",
    "mod": "mod", "pow": "pow", "and": "and", "or": "or", "xor": "xor", "lshift": "shl",
    "rshift": "shr", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne",
}.items():  # fmt: skip
    setattr(Values, f"__{_name}__", _operator(_op))
    if len(_name) > 2 or _name == "or":
        setattr(Values, f"__r{_name}__", _operator(_op, swapped=True))


class Scalar(Values):
    """One traced number: a node that behaves like an array without dimensions."""

    __slots__ = ("graph", "node")
    shape: tuple[int, ...] = ()
    ndim = 0

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    @property
    def dtype(self) -> Any:
        torch = sys.modules.get("torch")
        names = {"f": "float32", "i": "int64", "b": "bool"}
        return getattr(torch, names[self.node.kind]) if torch else np.dtype(names[self.node.kind])

    def cast(self, kind: str) -> Scalar:
        return Scalar(self.graph, self.graph.cast(self.node, kind))

    def __getitem__(self, index: Any) -> Scalar:
        if index is None or index is Ellipsis or index == ():
            return self
        raise Untraceable("a traced score or index has no elements")

    def __repr__(self) -> str:
        return f"<traced {self.node}>"


class Several(Values):
    """A short list of traced numbers: elementwise operators, and reductions to one."""

    __slots__ = ("graph", "items")
    ndim = 1

    def __init__(self, graph: Graph, items: list[Scalar]) -> None:
        if len(items) > LONGEST_ROW:
            raise Untraceable(f"{len(items)} values at a time; allowed: up to {LONGEST_ROW}")
        self.graph, self.items = graph, items

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.items),)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        found = self.items[index]
        return Several(self.graph, found) if isinstance(found, list) else found

    def __iter__(self) -> Any:
        return iter(self.items)

    def __matmul__(self, other: Any) -> Any:
        return reduce_values(self.graph, "sum", self * other)

    def __rmatmul__(self, other: Any) -> Any:
        return reduce_values(self.graph, "sum", self * other)


class Row(Values):
    """A captured array, indexed by traced values in some of its dimensions."""

    __slots__ = ("array", "graph", "index", "owner")

    def __init__(self, graph: Graph, array: np.ndarray, owner: Any, index: tuple[Any, ...]) -> None:
        self.graph, self.array, self.owner, self.index = graph, array, owner, index

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape[len(self.index) :]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return indexed(self.graph, self.array, self.owner, (*self.index, *more))

    def __iter__(self) -> Any:
        return iter(self.values().items)

    def __matmul__(self, other: Any) -> Any:
        return self.values() @ other

    def values(self) -> Several:
        """All elements of a row."""
        if self.ndim != 1:
            raise Untraceable(
                f"an array of shape {self.array.shape} needs {self.array.ndim} indices, got {len(self.index)}"
            )
        return Several(self.graph, [self[n] for n in range(min(self.shape[0], LONGEST_ROW + 1))])


def indexed(graph: Graph, array: np.ndarray, owner: Any, index: tuple[Any, ...]) -> Any:
    """array[index] where some indices are traced."""
    index = tuple(x for x in index if x is not None)
    if Ellipsis in [x for x in index if x is Ellipsis]:
        at = next(n for n, x in enumerate(index) if x is Ellipsis)
        fill = array.ndim - len(index) + 1
        if at != len(index) - 1 and fill:
            raise Untraceable("`...` before other indices: index the array in all its dimensions")
        index = index[:at] + index[at + 1 :]
    if len(index) > array.ndim:
        raise Untraceable(f"{len(index)} indices of an array of shape {array.shape}")
    nodes = []
    for axis, x in enumerate(index):
        if isinstance(x, slice):
            raise Untraceable("slices beside traced indices: index the array in all its dimensions")
        x = x if isinstance(x, Node) else scalar(graph, x).node
        if x.kind == "f":
            raise Untraceable("a float as index: cast it to an integer first")
        if x.op == "const" and not -array.shape[axis] <= int(x.data) < array.shape[axis]:
            raise Untraceable(
                f"index {x.data} is outside of axis {axis} with size {array.shape[axis]}"
            )
        nodes.append(graph.cast(x, "i"))
    if len(nodes) < array.ndim:
        return Row(graph, array, owner, tuple(nodes))
    return Scalar(graph, graph.load(graph.array(array, owner), nodes))


def flatten(xs: Iterable[Any]) -> Iterable[Any]:
    """All that tuples, lists and dictionaries hold."""
    for x in xs:
        if isinstance(x, (tuple, list)):
            yield from flatten(x)
        elif isinstance(x, dict):
            yield from flatten(x.values())
        else:
            yield x


def host_array(x: Any) -> np.ndarray | None:
    """A NumPy array that shares the memory of a NumPy array or a PyTorch tensor.

    None of anything else.
    """
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return None
    if x.device.type != "cpu":
        raise Untraceable(f"a captured tensor lies on device {x.device}; allowed: CPU tensors")
    if x.is_neg():
        raise Untraceable(
            "a captured tensor has PyTorch's negative bit; allowed: resolve_neg() of it"
        )
    x = x.detach()
    if x.dtype == torch.bfloat16:
        import ml_dtypes

        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def owner_of(x: Any) -> Any:
    """The caller's array or tensor; of one that the function makes, itself."""
    owner = getattr(x, "owner", None)
    return x if owner is None else owner


def scalar(graph: Graph, x: Any) -> Any:
    """A number, traced or not, or an array without dimensions, as a traced one."""
    if isinstance(x, Scalar):
        return x
    if isinstance(x, Row):
        return (
            Scalar(graph, graph.load(graph.array(x.array, x.owner), x.index))
            if not x.shape
            else _one(x)
        )
    array = host_array(x)
    if array is not None:
        if array.ndim:
            raise Untraceable(
                f"an array of shape {array.shape} where one number is needed: index it"
            )
        return Scalar(graph, graph.load(graph.array(array, owner_of(x)), ()))
    if isinstance(x, Several):
        return _one(x)
    return Scalar(graph, graph.constant(x))


def _one(x: Any) -> Scalar:
    if len(x) != 1:
        raise Untraceable(
            f"{len(x)} values where one number is needed: index all dimensions of an array"
        )
    return x[0]


# names of NumPy's and PyTorch's functions of one operation, and of methods -> that operation of the graph
FUNCTIONS = {
    "add": "add", "sub": "sub", "subtract": "sub", "mul": "mul", "multiply": "mul",
    "floordiv": "floordiv", "floor_divide": "floordiv", "remainder": "mod", "mod": "mod", "pow": "pow",
    "power": "pow", "minimum": "min", "maximum": "max",
    "min": "min", "max": "max", "abs": "abs", "absolute": "abs", "fabs": "abs", "neg": "neg",
    "negative": "neg", "tanh": "tanh", "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sin", "cos": "cos", "erf": "erf",
    "sigmoid": "sigmoid", "expit": "sigmoid", "floor": "floor", "ceil": "ceil",
    "rint": "round", "trunc": "trunc", "fix": "trunc", "and": "and", "or": "or", "xor": "xor",
    "not": "not", "invert": "not", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor",
    "bitwise_not": "not", "lshift": "shl", "rshift": "shr", "left_shift": "shl",
    "right_shift": "shr", "bitwise_left_shift": "shl", "bitwise_right_shift": "shr",
    "shl": "shl", "shr": "shr", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq",
    "ne": "ne", "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
    "equal": "eq", "not_equal": "ne",
}  # fmt: skip
OPERATORS = (  # that have a form with operands swapped (r...), and one in place (i...)
    "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "remainder", "pow", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
REDUCTIONS = ("sum", "any", "all", "amin", "amax", "prod", "mean")
SPECIAL: dict[str, Callable] = {}  # name -> f(graph, *arguments): what `formulas` writes


def special(functions: dict[str, Callable]) -> None:
    """Add functions f(graph, *arguments) that `apply` finds by their names."""
    SPECIAL.update(functions)


def apply(graph: Graph, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Record a call of a function by its name."""
    name = name.strip("_") if name not in FUNCTIONS else name
    options = {key: value for key, value in options.items() if value is not None}
    if name == "getitem":
        array = host_array(args[0])
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if array is None:
            return args[0][args[1]]
        return indexed(graph, array, args[0], index)
    if name[1:] in OPERATORS and name not in FUNCTIONS and len(args) == 2:
        args = args[::-1] if name[0] == "r" else args
        name = name[1:] if name[0] in "ri" else name
    extreme = name in ("min", "max") and (len(args) == 1 or (_row(args[0]) and _axis(args[1])))
    if name in REDUCTIONS or extreme:
        _check_reduction(name, args[1:], options)
        return reduce_values(graph, name, args[0])
    if name in ("dot", "inner", "matmul", "vdot"):
        return reduce_values(graph, "sum", apply(graph, "mul", args, {}))
    if any(map(_row, args)):
        return _elementwise(graph, name, args, options)
    if name in SPECIAL:
        try:
            inspect.signature(SPECIAL[name]).bind(graph, *args, **options)
        except TypeError as error:
            raise Untraceable(
                f"{name}() cannot be recorded with these arguments: {error}"
            ) from None
        return SPECIAL[name](graph, *args, **options)
    if name not in FUNCTIONS:
        raise Untraceable(
            f"{name}() cannot be recorded; those that can are in the guide `Write your own attention` (docs/flex.md)"
        )
    op = FUNCTIONS[name]
    if op in ("add", "sub") and "alpha" in options:  # PyTorch's: x + alpha * y
        args = (args[0], apply(graph, "mul", (args[1], options.pop("alpha")), {}))
    if options:
        raise Untraceable(f"{name}() cannot be recorded with the option {next(iter(options))!r}")
    nodes = [scalar(graph, x).node for x in args]
    if op == "not" and nodes[0].kind == "f":
        raise Untraceable("`~` takes booleans or integers, not floats")
    return Scalar(graph, graph.make(op, *nodes))


def _row(x: Any) -> bool:
    """Whether a value is more than one number."""
    array = host_array(x)
    return isinstance(x, (Row, Several)) or (array is not None and array.ndim > 0)


def _axis(x: Any) -> bool:
    """Whether an argument is the axis of a row, and no operand: those are traced, or floats."""
    return isinstance(x, int) and not isinstance(x, bool)


def _check_reduction(name: str, more: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Refuse what a sum, ... takes besides the one axis of a row."""
    axes = [*more, *(options[key] for key in ("axis", "dim") if key in options)]
    wrong = set(options) - {"axis", "dim", "keepdim", "keepdims"}
    if wrong or any(x not in (None, 0, -1, (0,), (-1,)) for x in axes):
        raise Untraceable(
            f"{name}() of a row cannot be recorded with {', '.join([*sorted(wrong), *map(repr, axes)])}; "
            "allowed: its only axis"
        )


def _elementwise(
    graph: Graph, name: str, args: tuple[Any, ...], options: dict[str, Any]
) -> Several:
    columns = []
    size = 1
    for x in args:
        array = host_array(x)
        if isinstance(x, Row):
            x = x.values().items
        elif isinstance(x, Several):
            x = x.items
        elif array is not None and array.ndim == 1:
            owner, count = owner_of(x), min(len(array), LONGEST_ROW + 1)
            x = [indexed(graph, array, owner, (n,)) for n in range(count)]
        elif array is not None and array.ndim:
            raise Untraceable(f"an array of shape {array.shape} beside traced values: index it")
        if isinstance(x, list):
            size = max(size, len(x))
        columns.append(x)
    lists = [x if isinstance(x, list) else [x] for x in columns]
    if any(len(x) not in (1, size) for x in lists):
        raise Untraceable(f"rows of unlike lengths: {[len(x) for x in lists]}")
    filled = [x * size if len(x) == 1 else x for x in lists]
    return Several(
        graph, [apply(graph, name, items, options) for items in zip(*filled, strict=True)]
    )


def reduce_values(graph: Graph, name: str, x: Any) -> Any:
    """The sum, ... of a row; a single number is its own."""
    if isinstance(x, Row):
        x = x.values()
    if isinstance(x, Several):
        op = {
            "any": "or",
            "all": "and",
            "amin": "min",
            "amax": "max",
            "prod": "mul",
            "mean": "sum",
        }.get(name, name)
        kinds = {"any": "b", "all": "b", "sum": "i", "prod": "i", "mean": "i"}
        items = [
            y.cast(kinds[name]) if name in kinds and "b" in (kinds[name], y.node.kind) else y
            for y in x.items
        ]
        total: Any = functools.reduce(
            lambda u, v: apply(graph, {"sum": "add"}.get(op, op), (u, v), {}), items
        )
        return total / len(items) if name == "mean" else total
    found = scalar(graph, x)
    if name in ("any", "all"):
        return found.cast("b")
    return found.cast("i") if name in ("sum", "prod") and found.node.kind == "b" else found
