"""One PTX statement as an intrinsic that kernels call like a function.

Operands are named in the text: `<a>`. An operand is a scalar type, passed by value, or a
`Fragment`: n registers held in a `cuda.local.array`, passed as (array, first index) and updated in
place. libNVVM scalarises such arrays when every index is a constant after unrolling, so a fragment
is kept in registers (docs/pitfalls.md, "Local arrays need constant loops").
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..compile.target import intrinsic, signature, types


@dataclass(frozen=True)
class Immediate:
    """A number in the text of the instruction, constant once libNVVM has unrolled the loops."""

    type: Any


@dataclass(frozen=True)
class Fragment:
    """n registers of one type in a local array.

    `out` are written, `inout` read and written by the same registers.
    """

    n: int
    type: Any
    mode: str = "in"


def out(n: int, t: Any) -> Fragment:
    return Fragment(n, t, "out")


def inout(n: int, t: Any) -> Fragment:
    return Fragment(n, t, "inout")


def _constraint(t: Any) -> str:
    if t == types.float32:
        return "f"
    return {16: "h", 32: "r", 64: "l"}[t.bitwidth]


def _filled_in(asm: str, ret: Any, memory: bool, operands: dict[str, Any]) -> tuple[str, str]:
    """The statement with the numbers of its registers, and LLVM's constraints; see `op`."""
    number: dict[str, str] = {}
    out_constraints: list[str] = []

    def registers(name: str, start: int, n: int, braces: bool) -> None:
        text = ", ".join(f"${i}" for i in range(start, start + n))
        number[name] = f"{{{text}}}" if braces else text
        number.update((f"{name}.{i}", f"${start + i}") for i in range(n))

    if ret is not None:
        registers("r", 0, 1, False)
        out_constraints.append("=" + _constraint(ret))
    tied: list[str] = []
    for name, spec in operands.items():
        if isinstance(spec, Fragment) and spec.mode != "in":
            start = len(out_constraints)
            registers(name, start, spec.n, True)
            out_constraints += ["=" + _constraint(spec.type)] * spec.n
            if spec.mode == "inout":
                tied += [str(start + i) for i in range(spec.n)]
    constraints = out_constraints + tied
    for name, spec in operands.items():
        if not isinstance(spec, Fragment):
            registers(name, len(constraints), 1, False)
            constraints.append("n" if isinstance(spec, Immediate) else _constraint(spec))
        elif spec.mode == "in":
            registers(name, len(constraints), spec.n, True)
            constraints += [_constraint(spec.type)] * spec.n
    # `$` of the text itself is doubled; LLVM writes a unique number for ${:uid}
    text = re.sub(r"<([\w.]+)>", lambda m: number[m.group(1)], asm).replace("%=", "${:uid}")
    return text, ",".join(constraints + (["~{memory}"] if memory else []))


def op(
    asm: str, ret: Any = None, *, memory: bool = False, pure: bool = False, **operands: Any
) -> Any:
    """Make an intrinsic from one PTX statement.

    Parameters
    ----------
    asm : PTX with `<name>` for each operand (`<name.0>` for one register of a fragment) and `<r>`
        for the returned value;
        `%=` gives a number unique to the place
    ret : scalar type returned, or None
    memory : the statement reads or writes memory, so nothing may move across it
    pure : no side effect, may be removed or moved (arithmetic)
    operands : name=scalar type or Fragment, in the order of the call
    """
    text, shown = _filled_in(asm, ret, memory, operands)
    attributes = ("convergent",) if re.search(r"\.sync|\bbar\.|barrier\.", asm) else ()

    def typer(typingctx: Any, *given: Any) -> Any:
        argument_types: list[Any] = []
        position = 0
        for spec in operands.values():
            if isinstance(spec, Fragment):
                argument_types += [given[position], types.intp]
                position += 2
            else:
                argument_types.append(spec.type if isinstance(spec, Immediate) else spec)
                position += 1

        def lower(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            supply = iter(zip(values, sig.args, strict=True))
            tied_values = []
            inputs = []
            targets = []
            for spec in operands.values():
                value, value_type = next(supply)
                if not isinstance(spec, Fragment):
                    inputs.append(value)
                    continue
                first, _ = next(supply)
                data = context.make_array(value_type)(context, builder, value).data
                places = [
                    builder.gep(data, [builder.add(first, ir.Constant(first.type, i))])
                    for i in range(spec.n)
                ]
                if spec.mode == "in":
                    inputs += [builder.load(p) for p in places]
                    continue
                targets += places
                if spec.mode == "inout":
                    tied_values += [builder.load(p) for p in places]
            results = [context.get_value_type(ret)] if ret is not None else []
            results += [p.type.pointee for p in targets]
            result = (
                ir.VoidType()
                if not results
                else results[0]
                if len(results) == 1
                else ir.LiteralStructType(results)
            )
            arguments = tied_values + inputs
            kind = ir.FunctionType(result, [a.type for a in arguments])
            call = builder.call(
                ir.InlineAsm(kind, text, shown, not pure), arguments, attrs=attributes
            )
            parts = (
                [builder.extract_value(call, i) for i in range(len(results))]
                if len(results) > 1
                else [call]
            )
            for place, part in zip(
                targets, parts[len(results) - len(targets) :], strict=bool(targets)
            ):
                builder.store(part, place)
            return parts[0] if ret is not None else context.get_dummy_value()

        return signature(types.none if ret is None else ret, *argument_types), lower

    names = ["typingctx"]
    for name, spec in operands.items():
        names += [name, name + "_first"] if isinstance(spec, Fragment) else [name]
    parameter = inspect.Parameter
    shown_parameters = [parameter(n, parameter.POSITIONAL_OR_KEYWORD) for n in names]
    typer.__signature__ = inspect.Signature(shown_parameters)  # type: ignore[attr-defined]
    typer.__name__ = re.sub(r"\W+", "_", asm.split("<")[0].strip("{ \n"))[:60] or "registers"
    return intrinsic(typer)
