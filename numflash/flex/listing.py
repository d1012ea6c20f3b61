"""What becomes of a function: the recorded instructions, and the machine code of its tile."""

from __future__ import annotations

from collections.abc import Callable

from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from ..errors import ArgumentError
from .machine import compile_program, lanes_of_target
from .masks import whole
from .prepared import prepare
from .program import Program
from .tile_memory import Form


def listing(
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    shape: tuple[int, int, int, int] = (1, 1, 1024, 1024),
    assembly: bool = False,
) -> str:
    """The code that is made of a score function, a mask function, or both.

    Parameters
    ----------
    score_mod, mask_mod : functions as for `flex_attention`
    shape : (B, H, L, S), the ranges of the indices
    assembly : the machine code of this CPU instead of the recorded instructions

    Returns
    -------
    str
        One instruction a line: its number, operation, kind (f, i or b) and operands by number; or
        the assembly of the tile function, which changes rows of scores in place.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A function that cannot be traced, a captured array that is too short, or a wrong shape.
    """
    if not (whole(shape, 4) and min(shape) > 0):
        raise ArgumentError(f"shape: got {shape!r}; allowed: four positive integers (B, H, L, S)")
    prepared = prepare(score_mod, mask_mod)
    prepared.check(shape)
    program = Program(prepared.graph, prepared.score, None, prepared.mask, shape)
    if not assembly:
        first, *lines, roots = program.text.splitlines()
        numbered = [f"{n:3}  {line.rstrip()}" for n, line in enumerate(lines)]
        return "\n".join([first, *numbered, roots])
    codegen = cpu_target.target_context.codegen()
    with global_compiler_lock:
        library = compile_program(codegen, program, Form(False, lanes_of_target()), "tile")
    return str(library.get_asm_str())
