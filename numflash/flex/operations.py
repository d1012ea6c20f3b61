"""The operations of a graph as LLVM IR: arithmetic, comparisons, logic, division, casts.

Of vectors or of scalars (`Lanes`); integers never trap, whatever their values.
"""

from __future__ import annotations

from typing import Any

from .graph import COMPARISONS, Node
from .lanes import I32, I64, Lanes

TESTS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
LOGIC = {"and": "and_", "or": "or_", "xor": "xor"}


def cast(lanes: Lanes, kind: str, source: str, x: Any) -> Any:
    """A value of kind `source` as `kind`."""
    b = lanes.b
    if kind == "b":
        if source == "i":
            return b.icmp_signed("!=", x, lanes.integer(0))
        return b.fcmp_unordered("!=", x, lanes.number(0.0))
    if source == "b":
        yes, no = (
            (lanes.integer(1), lanes.integer(0))
            if kind == "i"
            else (lanes.number(1.0), lanes.number(0.0))
        )
        return b.select(x, yes, no)
    if kind == "f":
        return b.sitofp(x, lanes.of(lanes.real))
    x = lanes.to_integer(x)
    return x if lanes.whole == I32 else b.sext(x, lanes.of(I64))


def operation(lanes: Lanes, x: Node, args: list[Any]) -> Any:
    """The value of a node, of those of its operands."""
    b = lanes.b
    op = x.op
    if op in COMPARISONS:
        if x.args[0].kind == "f":
            compare = b.fcmp_unordered if op == "ne" else b.fcmp_ordered
        else:
            compare = b.icmp_unsigned if x.args[0].kind == "b" else b.icmp_signed
        return compare(TESTS[op], *args)
    if op in LOGIC:
        return getattr(b, LOGIC[op])(*args)
    if op == "not":
        return b.not_(args[0])
    return _integers(lanes, x, args) if x.kind == "i" else _floats(lanes, x, args)


def _floats(lanes: Lanes, x: Node, args: list[Any]) -> Any:
    b = lanes.b
    op = x.op
    if op in ("add", "sub", "mul", "div"):
        plain = {"add": b.fadd, "sub": b.fsub, "mul": b.fmul, "div": b.fdiv}[op]
        return plain(*args, flags=("contract",) if "score" in x.uses else ())
    if op == "detach":
        return args[0]
    if op == "neg":
        return b.fneg(args[0])
    if op == "abs":
        return lanes.magnitude(args[0])
    if op in ("min", "max"):
        return lanes.extreme(args[0], args[1], "<" if op == "min" else ">")
    if op in ("floordiv", "mod"):
        whole = lanes.intrinsic("floor", b.fdiv(*args))
        return whole if op == "floordiv" else b.fsub(args[0], b.fmul(whole, args[1]))
    return lanes.function(op)(*args)


def _integers(lanes: Lanes, x: Node, args: list[Any]) -> Any:
    b = lanes.b
    op = x.op
    if op in ("add", "sub", "mul"):
        return getattr(b, op)(*args)
    if op == "neg":
        return b.neg(args[0])
    if op == "abs":
        return b.select(b.icmp_signed("<", args[0], lanes.integer(0)), b.neg(args[0]), args[0])
    if op in ("min", "max"):
        return b.select(b.icmp_signed("<" if op == "min" else ">", *args), *args)
    if op in ("shl", "shr"):
        return _shift(lanes, op, *args)
    return _divide(lanes, op, args[0], args[1], x.args[1])


def _shift(lanes: Lanes, op: str, x: Any, amount: Any) -> Any:
    """Shifts by an integer's bits or more give 0, or the sign; LLVM leaves them undefined."""
    b = lanes.b
    last = lanes.integer((32 if lanes.whole == I32 else 64) - 1)
    inside = b.icmp_unsigned("<=", amount, last)
    if op == "shr":
        return b.ashr(x, b.select(inside, amount, last))
    zero = lanes.integer(0)
    return b.select(inside, b.shl(x, b.select(inside, amount, zero)), zero)


def _divide(lanes: Lanes, op: str, x: Any, y: Any, divisor: Node) -> Any:
    """`//` and `%` that round down; by 0 they give 0."""
    b = lanes.b
    value = divisor.data if divisor.op == "const" else 0
    if value > 0 and value & (value - 1) == 0:
        bits = value.bit_length() - 1
        return (
            b.ashr(x, lanes.integer(bits))
            if op == "floordiv"
            else b.and_(x, lanes.integer(value - 1))
        )
    zero = lanes.integer(0)
    one = lanes.integer(1)
    by_zero = b.icmp_signed("==", y, zero)
    by_minus = b.icmp_signed("==", y, lanes.integer(-1))  # the smallest number / -1 would trap
    safe = y if value > 0 else b.select(b.or_(by_zero, by_minus), one, y)
    quotient = b.sdiv(x, safe)
    rest = b.sub(x, b.mul(quotient, safe))
    signs = b.icmp_signed("<", b.xor(rest, safe), zero)
    down = b.and_(signs, b.icmp_signed("!=", rest, zero))
    if op == "mod":
        found = b.select(down, b.add(rest, safe), rest)
        return found if value > 0 else b.select(b.or_(by_zero, by_minus), zero, found)
    found = b.select(down, b.sub(quotient, one), quotient)
    return found if value > 0 else b.select(by_zero, zero, b.select(by_minus, b.neg(x), found))
