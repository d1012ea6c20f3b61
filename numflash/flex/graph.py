"""The expression graph of a traced function: immutable nodes, equal expressions are one node.

Three kinds of values: "b" booleans, "i" integers, "f" floats. Indices are integers, the score is a
float. Arithmetic promotes as NumPy and PyTorch do: integers beside floats become floats, `/` gives
a float, `//` and `%` round down.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

INDICES = ("b", "h", "q", "k")
ARGUMENTS = ("score", *INDICES)


class Untraceable(Exception):
    """The function does what cannot be recorded; `tracing` adds the line to the message."""


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[float])(x)


def _sigmoid(x: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(x, float)))


def _shifted(shift: Callable) -> Callable:
    """A shift of 64-bit integers that takes amounts below 0 and above 63 as a very far shift."""

    def shifted(x: Any, n: Any) -> Any:
        far = (np.asarray(n) < 0) | (np.asarray(n) > 63)
        if shift is np.left_shift:
            return np.where(far, 0, shift(x, np.where(far, 0, n)))
        return shift(x, np.where(far, 63, n))

    return shifted


# operation -> (rule for the result's kind, NumPy function); rules: "arith" the widest operand's,
# at least an integer; "float"; "compare" boolean; "logic" boolean of booleans, else integer
OPERATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "add": ("arith", np.add),
    "sub": ("arith", np.subtract),
    "mul": ("arith", np.multiply),
    "floordiv": ("arith", np.floor_divide),
    "mod": ("arith", np.mod),
    "min": ("arith", np.minimum),
    "max": ("arith", np.maximum),
    "neg": ("arith", np.negative),
    "abs": ("arith", np.abs),
    "shl": ("logic", _shifted(np.left_shift)),
    "shr": ("logic", _shifted(np.right_shift)),
    "div": ("float", np.true_divide),
    "pow": ("float", lambda x, y: np.power(np.asarray(x, float), y)),
    "tanh": ("float", np.tanh),
    "exp": ("float", np.exp),
    "exp2": ("float", np.exp2),
    "log": ("float", np.log),
    "log2": ("float", np.log2),
    "sqrt": ("float", np.sqrt),
    "rsqrt": ("float", lambda x: 1 / np.sqrt(x)),
    "sin": ("float", np.sin),
    "cos": ("float", np.cos),
    "erf": ("float", _erf),
    "sigmoid": ("float", _sigmoid),
    "floor": ("float", np.floor),
    "ceil": ("float", np.ceil),
    "round": ("float", np.rint),
    "trunc": ("float", np.trunc),
    "detach": ("float", np.asarray),  # its derivative is 0
    "lt": ("compare", np.less),
    "le": ("compare", np.less_equal),
    "gt": ("compare", np.greater),
    "ge": ("compare", np.greater_equal),
    "eq": ("compare", np.equal),
    "ne": ("compare", np.not_equal),
    "and": ("logic", np.bitwise_and),
    "or": ("logic", np.bitwise_or),
    "xor": ("logic", np.bitwise_xor),
    "not": ("logic", np.invert),
}
UNARY = (
    "neg", "abs", "not", "tanh", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf",
    "sigmoid", "floor", "ceil", "round", "trunc", "detach",
)  # fmt: skip
OF_BOOLEANS = {"add": "or", "max": "or", "mul": "and", "min": "and"}  # as NumPy and PyTorch do
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ROUNDINGS = ("floor", "ceil", "round", "trunc")
WIDTH = {"b": 0, "i": 1, "f": 2}


class Node:
    """One operation of a graph.

    Attributes
    ----------
    op : a name of `OPERATIONS`, "where", "cast", "load", "const", or an argument's name
    args : its operands
    kind : "b", "i" or "f"
    data : value of a constant, number of the array of a load
    uses : the arguments that it depends on
    number : place in the graph; operands come before what uses them
    """

    __slots__ = ("args", "data", "kind", "number", "op", "uses")

    def __init__(self, op: str, args: tuple[Node, ...], kind: str, data: Any, number: int) -> None:
        self.op, self.args, self.kind, self.data, self.number = op, args, kind, data, number
        own = frozenset((op,)) if op in ARGUMENTS else frozenset()
        self.uses: frozenset[str] = own.union(*(x.uses for x in args))

    def __repr__(self) -> str:
        return expression(self)


class Graph:
    """Nodes of one or two traced functions, and the arrays that they index.

    arrays : the captured arrays, as NumPy arrays that share their owners' memory
    owners : what keeps that memory (the caller's arrays)
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.arrays: list[np.ndarray] = []
        self.owners: list[Any] = []
        self._known: dict[tuple, Node] = {}
        self._lock = threading.RLock()  # derivatives are added to it while others may read it
        self.score = self._node("score", (), "f")
        self.indices = [self._node(name, (), "i") for name in INDICES]

    def _node(self, op: str, args: tuple[Node, ...], kind: str, data: Any = None) -> Node:
        label = (type(data), repr(data)) if op == "const" else data
        key = (op, tuple(x.number for x in args), kind, label)
        with self._lock:
            if key not in self._known:
                self._known[key] = Node(op, args, kind, data, len(self.nodes))
                self.nodes.append(self._known[key])
        return self._known[key]

    def constant(self, value: Any) -> Node:
        """A Python number as a node."""
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, bool):
            return self._node("const", (), "b", value)
        if isinstance(value, int):
            if not -(1 << 63) <= value < 1 << 63:
                raise Untraceable(f"the integer {value} does not fit 64 bits")
            return self._node("const", (), "i", value)
        if isinstance(value, float):
            return self._node("const", (), "f", value)
        raise Untraceable(f"a value of type {type(value).__name__} cannot be used")

    def array(self, x: np.ndarray, owner: Any) -> int:
        """The number of a captured array."""
        for number, known in enumerate(self.owners):
            if known is owner:
                return number
        if x.dtype.kind not in "biuf" and x.dtype.name != "bfloat16":
            raise Untraceable(
                f"an array of dtype {x.dtype} cannot be indexed; allowed: bool, integers, floats"
            )
        if x.size == 0:
            raise Untraceable(f"an empty array of shape {x.shape} cannot be indexed")
        self.arrays.append(x)
        self.owners.append(owner)
        return len(self.arrays) - 1

    def load(self, number: int, index: Iterable[Node]) -> Node:
        """One element of a captured array; `index` has one node for each dimension."""
        dtype = self.arrays[number].dtype
        kind = {"b": "b", "i": "i", "u": "i"}.get(dtype.kind, "f")
        return self._node("load", tuple(self.cast(x, "i") for x in index), kind, number)

    def cast(self, x: Node, kind: str) -> Node:
        """`x` as another kind; floats are cut towards zero, numbers become booleans by `!= 0`."""
        if x.kind == kind:
            return x
        if x.op == "const":
            if kind == "i" and x.kind == "f" and not math.isfinite(x.data):
                infinite = -(1 << 31) if x.data < 0 else (1 << 31) - 1
                return self.constant(0 if math.isnan(x.data) else infinite)
            return self.constant({"b": bool, "i": int, "f": float}[kind](x.data))
        return self._node("cast", (x,), kind)

    def where(self, condition: Node, x: Node, y: Node) -> Node:
        """x where the condition holds, else y; both are evaluated."""
        kind = max(x.kind, y.kind, key=WIDTH.__getitem__)
        condition = self.cast(condition, "b")
        x = self.cast(x, kind)
        y = self.cast(y, kind)
        if condition.op == "const":
            return x if condition.data else y
        return x if x is y else self._node("where", (condition, x, y), kind)

    def make(self, op: str, *args: Node) -> Node:
        """The node of an operation on operands of any kind."""
        wanted = 1 if op in UNARY else 2
        if len(args) != wanted:
            raise Untraceable(
                f"`{op}` of {len(args)} operands cannot be recorded; allowed: {wanted}"
            )
        rule = OPERATIONS[op][0]
        kind = max((x.kind for x in args), key=WIDTH.__getitem__)
        if rule == "arith" and kind == "b":
            if op in OF_BOOLEANS:
                return self.make(OF_BOOLEANS[op], *args)
            if op == "sub":
                raise Untraceable("`-` of booleans: write `^`, or cast them to integers")
            kind = "i"
        if op == "pow" and kind != "f":
            return self._power_of_integers(*args)
        if rule == "logic":
            if kind == "f":
                raise Untraceable(f"`{op}` takes booleans or integers, not floats")
            if op in ("shl", "shr"):
                kind = "i"
        if rule == "float":
            if op in (*ROUNDINGS, "detach") and kind != "f":
                return args[0]
            args = tuple(self.cast(x, "f") for x in args)
            kind = "f"
        else:
            if rule == "compare" and op not in ("eq", "ne") and kind == "b":
                kind = "i"
            args = tuple(self.cast(x, kind) for x in args)
        if rule == "compare":
            kind = "b"
        if op == "pow":
            simple = self._power(*args)
            if simple is not None:
                return simple
        folded = self._fold(op, args, kind)
        return folded if folded is not None else self._node(op, args, kind)

    def _power_of_integers(self, x: Node, y: Node) -> Node:
        """x ** y of integers with a constant exponent, exact as far as 64 bits go."""
        if y.op != "const" or y.data < 0:
            raise Untraceable(
                "a power of integers, whose exponent is not a number from 0 on: make one of them a "
                "float, as in 2.0 ** x, or write 1 << x"
            )
        out, x = self.constant(1), self.cast(x, "i")
        for bit in f"{int(y.data):b}":
            out = self.make("mul", out, out)
            out = self.make("mul", out, x) if bit == "1" else out
        return out

    def _power(self, x: Node, y: Node) -> Node | None:
        """x ** y of a small constant exponent, or of a constant base, in simpler operations."""
        if y.op == "const" and y.data in (0.5, -0.5):
            return self.make("sqrt" if y.data > 0 else "rsqrt", x)
        if y.op == "const" and float(y.data).is_integer() and 1 <= abs(y.data) <= 8:
            out = x
            for _ in range(int(abs(y.data)) - 1):
                out = self.make("mul", out, x)
            return out if y.data > 0 else self.make("div", self.constant(1.0), out)
        if x.op == "const" and 0 < x.data < math.inf:
            return self.make("exp2", self.make("mul", y, self.constant(math.log2(x.data))))
        return None

    def _fold(self, op: str, args: tuple[Node, ...], kind: str) -> Node | None:
        """The result where it is known now, or one operand where the operation changes nothing."""
        if all(x.op == "const" for x in args):
            wide = {"b": np.bool_, "i": np.int64, "f": np.float64}
            with np.errstate(all="ignore"):
                value = OPERATIONS[op][1](*(wide[x.kind](x.data) for x in args))
            return self.constant(wide[kind](value).item())
        one = args[-1].data if args[-1].op == "const" else None
        if one is not None and len(args) == 2:
            if (op in ("add", "sub") and one == 0) or (op in ("mul", "div") and one == 1):
                return args[0]
            if kind == "b" and op in ("and", "or"):
                return args[0] if bool(one) == (op == "and") else args[1]
        if args[0].op == "const" and len(args) == 2:
            first = args[0].data
            if (op == "add" and first == 0) or (op == "mul" and first == 1):
                return args[1]
            if kind == "b" and op in ("and", "or"):
                return args[1] if bool(first) == (op == "and") else args[0]
        if op in ("not", "neg") and args[0].op == op:
            return args[0].args[0]
        return args[0] if len(args) == 2 and args[0] is args[1] and op in ("min", "max") else None


SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
NAMES = {"i": "int", "f": "float", "b": "bool"}


def expression(x: Node) -> str:
    """The graph below a node as one line of Python, arrays as t0, t1, ..."""
    inner = [expression(y) for y in x.args]
    if x.op in ARGUMENTS:
        return x.op
    if x.op == "const":
        return repr(x.data)
    if x.op == "load":
        return f"t{x.data}[{', '.join(inner) or '()'}]"
    if x.op in SYMBOLS:
        return f"({inner[0]} {SYMBOLS[x.op]} {inner[1]})"
    if x.op in ("not", "neg"):
        return ("~" if x.op == "not" else "-") + inner[0]
    return f"{NAMES[x.kind] if x.op == 'cast' else x.op}({', '.join(inner)})"


def reachable(roots: Iterable[Node]) -> list[Node]:
    """All nodes that the roots need, operands first."""
    found: dict[int, Node] = {}
    waiting = list(roots)
    while waiting:
        x = waiting.pop()
        if x.number not in found:
            found[x.number] = x
            waiting.extend(x.args)
    return [found[number] for number in sorted(found)]
