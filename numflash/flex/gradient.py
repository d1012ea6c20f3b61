"""The derivative of a traced score function by its score, or by an element of a captured array that
it reads, as nodes of the same graph.
"""

from __future__ import annotations

import math

from .graph import ROUNDINGS, Graph, Node, Untraceable, reachable

CHOICES = "where", "abs", "min", "max"
LINEAR = *CHOICES, "cast", "add", "sub", "neg"


def derivative(graph: Graph, root: Node, by: Node | None = None) -> Node:
    """d root / d score, or by a load; at kinks the side that PyTorch takes, through casts to integers
    0.
    """
    by = graph.score if by is None else by
    known: dict[int, Node] = {}
    chosen: set[int] = set()  # whose derivatives a choice may have made 0
    for x in reachable([root]):
        rules = _Rules(graph, x, [known[y.number] for y in x.args])
        found = rules.result(by)
        if any(y.number in chosen for y in x.args):
            chosen.add(x.number)
            found = rules.without_nan(found)
        if x.op in CHOICES:
            chosen.add(x.number)
        known[x.number] = found
    return known[root.number]


class _Rules:
    """The chain rule for one node `x` with operands x.args, whose derivatives are `d`."""

    def __init__(self, graph: Graph, x: Node, d: list[Node]) -> None:
        self.graph, self.x, self.d = graph, x, d
        self.zero, self.one = graph.constant(0.0), graph.constant(1.0)

    def result(self, by: Node) -> Node:
        x = self.x
        if x is by:
            return self.one
        constant = x.kind != "f" or x.op in ("load", "detach", *ROUNDINGS)
        if constant or all(d is self.zero for d in self.d):
            return self.zero
        rule = getattr(self, x.op, None)
        if rule is None:
            raise Untraceable(f"`{x.op}` has no derivative")
        return rule()

    def without_nan(self, found: Node) -> Node:
        """0 where all operands have the derivative 0: that of sqrt(where(s > 0, s, 0)) is 0 / 0 there,
        but 0 by PyTorch's chain rule, which goes from the result to the score.
        """
        moving = [d for d in self.d if d is not self.zero]
        if self.x.op in LINEAR or found is self.zero or not moving:
            return found
        still = self.op("eq", moving[0], self.zero)
        for d in moving[1:]:
            still = self.op("and", still, self.op("eq", d, self.zero))
        return self.graph.where(still, self.zero, found)

    def times(self, x: Node, y: Node) -> Node:
        if x is self.zero or y is self.zero:
            return self.zero
        return self.graph.make("mul", x, y)

    def where_moving(self, slope: Node, d: Node) -> Node:
        """slope * d, 0 where d is."""
        return self.graph.where(self.op("eq", d, self.zero), self.zero, self.times(slope, d))

    def plus(self, x: Node, y: Node) -> Node:
        return self.graph.make("add", x, y)

    def minus(self, x: Node, y: Node) -> Node:
        return x if y is self.zero else self.graph.make("sub", x, y)

    def number(self, value: float) -> Node:
        return self.graph.constant(value)

    def op(self, name: str, *args: Node) -> Node:
        return self.graph.make(name, *args)

    def cast(self) -> Node:
        return self.d[0]

    def add(self) -> Node:
        return self.plus(*self.d)

    def sub(self) -> Node:
        return self.minus(*self.d)

    def neg(self) -> Node:
        return self.op("neg", self.d[0])

    def mul(self) -> Node:
        u, v = self.x.args
        return self.plus(self.times(self.d[0], v), self.times(u, self.d[1]))

    def div(self) -> Node:
        u, v = self.x.args
        if self.d[1] is self.zero:
            return self.op("div", self.d[0], v)
        return self.op("div", self.minus(self.d[0], self.times(self.x, self.d[1])), v)

    def mod(self) -> Node:
        u, v = self.x.args
        whole = self.op("floor", self.op("div", u, v))
        return self.minus(self.d[0], self.times(whole, self.d[1]))

    def floordiv(self) -> Node:
        return self.zero

    def pow(self) -> Node:
        """By the base and by the exponent, each only where it depends on the score; both are 0, not
        NaN, where u ** (v - 1) or log(u) is infinite, or NaN, and nothing changes.
        """
        u, v = self.x.args
        found = self.zero
        if self.d[0] is not self.zero:
            slope = self.times(v, self.op("pow", u, self.minus(v, self.one)))
            if v.op != "const":
                slope = self.graph.where(self.op("eq", v, self.zero), self.zero, slope)
            found = self.where_moving(slope, self.d[0])
        if self.d[1] is not self.zero:
            grown = self.times(self.x, self.op("log", u))
            grown = self.graph.where(self.op("eq", u, self.zero), self.zero, grown)
            found = self.plus(found, self.where_moving(grown, self.d[1]))
        return found

    def tanh(self) -> Node:
        return self.times(self.minus(self.one, self.op("mul", self.x, self.x)), self.d[0])

    def exp(self) -> Node:
        return self.times(self.x, self.d[0])

    def exp2(self) -> Node:
        return self.times(self.op("mul", self.x, self.number(math.log(2))), self.d[0])

    def log(self) -> Node:
        return self.op("div", self.d[0], self.x.args[0])

    def log2(self) -> Node:
        return self.op("div", self.times(self.d[0], self.number(1 / math.log(2))), self.x.args[0])

    def sqrt(self) -> Node:
        return self.op("div", self.times(self.number(0.5), self.d[0]), self.x)

    def rsqrt(self) -> Node:
        u = self.x.args[0]
        return self.times(self.op("div", self.op("mul", self.number(-0.5), self.x), u), self.d[0])

    def sin(self) -> Node:
        return self.times(self.op("cos", self.x.args[0]), self.d[0])

    def cos(self) -> Node:
        return self.times(self.op("neg", self.op("sin", self.x.args[0])), self.d[0])

    def erf(self) -> Node:
        u = self.x.args[0]
        bell = self.op("exp", self.op("neg", self.op("mul", u, u)))
        return self.times(self.op("mul", bell, self.number(2 / math.sqrt(math.pi))), self.d[0])

    def sigmoid(self) -> Node:
        return self.times(self.op("mul", self.x, self.minus(self.one, self.x)), self.d[0])

    def abs(self) -> Node:
        d = self.d[0]
        u = self.x.args[0]
        falling = self.graph.where(self.op("lt", u, self.zero), self.op("neg", d), self.zero)
        return self.graph.where(self.op("gt", u, self.zero), d, falling)

    def extreme(self, closer: str) -> Node:
        """The derivative of the operand that is taken; of equal ones the mean."""
        u, v = self.x.args
        mean = self.times(self.number(0.5), self.plus(*self.d))
        taken = self.graph.where(self.op(closer, u, v), self.d[0], self.d[1])
        return self.graph.where(self.op("eq", u, v), mean, taken)

    def min(self) -> Node:
        return self.extreme("lt")

    def max(self) -> Node:
        return self.extreme("gt")

    def where(self) -> Node:
        return self.graph.where(self.x.args[0], self.d[1], self.d[2])
