"""PTX text to a list of instructions.

What NVVM writes for our kernels, inline assembly and `.loc` lines included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import EmulatorError

_LABEL = re.compile(r"([$\w]+):(?!:)")
_SHARED = re.compile(
    r"^\s*(?:\.extern\s+|\.visible\s+)*\.(shared|local)\s+\.align\s+(\d+)\s+\.b8\s+(\w+)(?:\[(\d*)\])?\s*;",
    re.M,
)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.S)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\s+[^%\s]*\s*)*([\w$]+)(?:\[(\d+)\])?"
)


_NAME = re.compile(r"%?[A-Za-z_$][\w$.]*")
NO_RESULT = ("st", "bra", "bar", "barrier", "cp", "red", "ret", "exit", "fence", "membar")


@dataclass
class Instruction:
    """One statement: `ld.shared.v4.b32` is op "ld" with modifiers ("shared", "v4", "b32").

    results : registers that it writes
    reads : registers that it reads, its predicate left out; a product's accumulators are none:
        with scale-d 0 they are not read
    """

    op: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    line: int
    source: tuple[str, int] | None
    text: str
    results: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)

    @property
    def type(self) -> str:
        return self.modifiers[-1]

    @property
    def is_product(self) -> bool:
        return self.op == "wgmma" and "mma_async" in self.modifiers

    def name_registers(self, known: dict[str, str]) -> None:
        """Set `results` and `reads` to those names in the operands that are `known` registers."""
        silent = self.op == "mbarrier" and "try_wait" not in self.modifiers
        silent = silent or self.op in NO_RESULT or not self.operands
        named = [[name for name in names_in(x) if name in known] for x in self.operands]
        self.results = [] if silent else named[0]
        first = 1 if self.results or self.is_product else 0
        self.reads = [name for names in named[first:] for name in names]


def names_in(operand: str) -> list[str]:
    """The names in `{%r1, %r2}`, `[%rd1+16]`, `%p1|%p2` or `%r1`."""
    return _NAME.findall(operand)


def vector(operand: str) -> list[str]:
    """`{a, b}` as a list, a single operand as a list of one."""
    return [x.strip() for x in operand.strip("{}").split(",")]


@dataclass
class Program:
    """A parsed kernel.

    Instructions, labels, register types, parameters and shared or local arrays.
    """

    name: str
    parameters: list[tuple[str, str]]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    # name -> (bytes, alignment); 0 bytes is dynamic
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    local: dict[str, tuple[int, int]] = field(default_factory=dict)
    unset: dict[int, frozenset[str]] | None = None  # found by `rules.unset_reads`


def parse(ptx: str) -> Program:
    """Parse the (only) entry of a PTX text."""
    text = re.sub(r"//[^\n]*", "", ptx)
    entry = _ENTRY.search(text)
    if entry is None:
        raise EmulatorError("unsupported", "the PTX text has no .entry", 0, "", None)
    parameters = [(m.group(2), m.group(1)) for m in _PARAM.finditer(entry.group(2))]
    program = Program(entry.group(1), parameters)
    for space, align, name, size in _SHARED.findall(text):
        getattr(program, space)[name] = (int(size or 0), int(align))
    files = {int(n): path for n, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    _Body(program, text, entry.end(), files).read()
    for i in program.code:
        i.name_registers(program.registers)
    return program


class _Body:
    """Reads the statements of an entry's body.

    `{ }` scopes rename the registers and labels that inline assembly declares.
    """

    def __init__(self, program: Program, text: str, start: int, files: dict[int, str]) -> None:
        self.program, self.text, self.position, self.files = program, text, start, files
        self.scopes: list[dict[str, str]] = [{}]
        self.unique = 0
        self.source: tuple[str, int] | None = None
        self.line = text.count("\n", 0, start) + 1

    def _advance(self, to: int) -> None:
        self.line += self.text.count("\n", self.position, to)
        self.position = to

    def read(self) -> None:
        text = self.text
        end = len(self.text)
        while self.position < end:
            i = self.position
            c = text[i]
            if c.isspace():
                self._advance(i + 1)
            elif c == "{":
                self.scopes.append({})
                self._advance(i + 1)
            elif c == "}":
                self.scopes.pop()
                self._advance(i + 1)
                if not self.scopes:
                    break
            elif text.startswith((".loc ", ".loc\t"), i):
                stop = text.index("\n", i)
                parts = text[i:stop].replace(",", " ").split()
                self.source = (self.files.get(int(parts[1]), "?"), int(parts[2]))
                self._advance(stop)
            elif label := _LABEL.match(text, i):
                self.program.labels[label.group(1)] = len(self.program.code)
                self._advance(label.end())
            else:
                stop = text.index(";", i)
                self._statement(" ".join(text[i:stop].split()))
                self._advance(stop + 1)

    def _statement(self, s: str) -> None:
        if s.startswith(".reg"):
            return self._declare(s)
        if not s or s.startswith("."):
            return None
        names: dict[str, str] = {}
        for scope in self.scopes:
            names.update(scope)
        if names:
            s = re.sub(
                r"(?<![\w%.$])([A-Za-z_]\w*)(?![\w])",
                lambda m: names.get(m.group(1), m.group(1)),
                s,
            )
        predicate = None
        negated = False
        rest = s
        if s.startswith("@"):
            guard, rest = s.split(None, 1)
            negated = guard[1] == "!"
            predicate = guard.lstrip("@!")
        head, _, tail = rest.partition(" ")
        op, *modifiers = head.split(".")
        modifiers = [m for m in modifiers if m]
        self.program.code.append(
            Instruction(
                op,
                tuple(modifiers),
                tuple(_split(tail)),
                predicate,
                negated,
                self.line,
                self.source,
                s,
            )
        )
        return None

    def _declare(self, s: str) -> None:
        kind, names = re.match(r"\.reg\s*\.(\w+)\s+(.*)", s).groups()  # type: ignore[union-attr]
        for name in (n.strip() for n in names.split(",")):
            counted = re.match(r"(%?\w+)<(\d+)>", name)
            if counted:
                self.program.registers.update(
                    (f"{counted.group(1)}{k}", kind) for k in range(int(counted.group(2)))
                )
            elif name.startswith("%"):
                self.program.registers[name] = kind
            else:
                self.unique += 1
                self.scopes[-1][name] = f"{name}__{self.unique}"
                self.program.registers[f"{name}__{self.unique}"] = kind


def _split(tail: str) -> list[str]:
    """Operands: commas outside of `{}`, `[]` and `()`."""
    found = []
    depth = 0
    current = ""
    for c in tail:
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += c
    return [*found, current.strip()] if current.strip() else found
