"""The command line: `numflash` or `python -m numflash`. What it takes, and how it ends.

What the commands do is in `actions`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import __version__
from ..errors import ArgumentError, NumflashError
from . import actions


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: an integer, 1 or more")
    return number


def positive_or_decode(text: str) -> int | str:
    """A number of tokens, or the word that asks for decoding's tables."""
    if text == "decode":
        return text
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or decode") from None


def option(*names: str, **given: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """One argument of a command, as `argparse` takes it."""
    return names, given


def flag(name: str, text: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    return option(name, action="store_true", help=text)


def count(name: str, default: int, text: str, **more: Any) -> Any:
    """A whole number, 1 or more."""
    return option(name, type=positive, default=default, help=f"{text} (default {default})", **more)


def length(kind: Callable = positive, more: str = "") -> Any:
    text = f"queries and keys (default 1024){more}"
    return option("length", nargs="?", type=kind, default=1024, metavar="L", help=text)


HEAD_DIM = count("head_dim", 128, "channels of a head", nargs="?")
CASE = (
    flag("--causal", "row i sees keys 0 to i"),
    count("--heads", 1, "heads, each with keys of its own"),
    count("--batch", 1, "sequences"),
)
CPU = option(
    "--cpu",
    default="host",
    help="host (default), or LLVM's name of another CPU, as a64fx, for which the kernel is compiled "
    "and not run; a name that is not known lists the others",
)
NAMES = flag("--list", "names of the kernels")

# (function, what it does, its arguments), in the order of the help
COMMANDS: tuple[tuple[Callable, str, tuple], ...] = (
    (
        actions.demo,
        "real attention end to end: errors, speed, where the time goes, caches",
        (
            option(
                "what",
                nargs="?",
                choices=["ring", "decode", "generate"],
                help="ring: one sequence over the ranks of `mpiexec -n 2 numflash demo ring`; "
                "decode: generation with a cache; generate: text from a model inside transformers",
            ),
            option(
                "--dtype",
                choices=["int8", "int4", "float32", "bfloat16", "float16"],
                help="storage of the KV cache of `demo decode` and `demo generate` (default int8)",
            ),
            count("--threads", 1, "threads of the kernels"),
        ),
    ),
    (
        actions.info,
        "versions, instruction sets, caches",
        (flag("--roof", "also measure the peaks of this machine"),),
    ),
    (
        actions.warmup,
        "compile kernels ahead of their first call",
        (
            option(
                "words",
                nargs="*",
                metavar="WORD",
                help="only those with all of these words in their names, as `cache int4 group 3` "
                "(default: attention, gradients, and KV caches of int8 and float32)",
            ),
            option(
                "--processes",
                type=positive,
                default=0,
                metavar="N",
                help="that compile at a time (default: as many as cores, up to 8); each takes 0.5 to "
                "1.2 GB of memory",
            ),
            NAMES,
        ),
    ),
    (
        actions.bench,
        "a benchmark: every contender checked against float64, then timed",
        (
            length(positive_or_decode, '; "decode": one token over a KV cache, by each storage'),
            HEAD_DIM,
            count("iterations", 5, "calls of each contender, at least", nargs="?"),
            count("threads", 1, "threads of the kernels", nargs="?"),
            option(
                "--threads",
                type=positive,
                dest="number_of_threads",
                metavar="N",
                help="the same by name",
            ),
            *CASE,
            option(
                "--plot",
                metavar="FILE",
                help="draw the sweep over L and the roofline (needs matplotlib); L is not used",
            ),
            flag(
                "--short",
                "what short calls cost, by arrays, tensors and numflash.torch, beside PyTorch; of the "
                "rest it takes threads only",
            ),
            option(
                "--study",
                choices=["exp2", "unfused", "improvements"],
                help="a benchmark of the A64FX notes, one thread, with its own shapes; "
                "it takes nothing else",
            ),
            option(
                "--reference-threads",
                type=positive,
                default=0,
                metavar="N",
                help="also the float32 reference on N threads, and the estimated speed-up over one "
                "of them",
            ),
        ),
    ),
    (
        actions.explain,
        "the tiling of a problem: blocks, bytes in each cache, operations",
        (
            length(),
            HEAD_DIM,
            *CASE,
            option(
                "--precision",
                default="int8",
                help="float32, bfloat16, float16 or int8 (default)",
            ),
            flag("--roof", "also measure the peaks of this machine, and say which one limits"),
        ),
    ),
    (
        actions.asm,
        "instructions in the hot loop of a kernel, for this CPU or another",
        (
            option(
                "kernel",
                nargs="?",
                default="int8-scores",
                help="a name from --list (default int8-scores, the products of a register tile)",
            ),
            CPU,
            option(
                "--features",
                default="",
                help="LLVM's feature list for a named --cpu, as +sve,-sve2; with =, if it begins with -",
            ),
            NAMES,
            flag("--listing", "the whole assembly text"),
        ),
    ),
    (
        actions.export,
        "a kernel for C: assembly, object, header, and a program that checks it",
        (
            option("kernel", nargs="?", metavar="KERNEL", help="a name from --list"),
            CPU,
            option("--to", metavar="FOLDER", help="where the files go"),
            NAMES,
        ),
    ),
    (
        actions.estimate,
        "instructions and modelled cycles of the INT8 kernels on an AArch64 CPU (needs llvm-mca)",
        (
            option(
                "what",
                nargs="?",
                choices=["exp2", "unfused", "improvements", "attention", "check"],
                help="exp2, unfused, improvements: the A64FX notes' kernels beside their figures; "
                "attention: with caches, memory and energy; check: the model of this machine "
                "against measured times (default: the register tiles and softmax)",
            ),
            option(
                "--cpu",
                default="",
                help="LLVM's name of an AArch64 CPU (default a64fx); of check, whose pipes to model",
            ),
            count("--head-dim", 128, "of the instruction counts"),
            flag("--instructions", "only the emulator's counts, without llvm-mca"),
        ),
    ),
    (
        actions.job,
        "a batch script for Fugaku or a SLURM cluster, printed; what it runs follows `--`",
        (
            option("scheduler", choices=["fugaku", "slurm"], help="whose script"),
            count("--nodes", 1, "of the job"),
            count("--groups", 4, "processes of a node, one per memory group"),
            count("--threads", 12, "of a process"),
            option("--time", default="00:30:00", help="hours:minutes:seconds (default 00:30:00)"),
            option("--account", default="", help="whose budget pays"),
            option("--queue", default="", help="partition, or Fugaku's resource group"),
            option(
                "--environment",
                default=".venv",
                help="folder of the Python environment (default .venv)",
            ),
        ),
    ),
    (
        actions.validate,
        "bits, accuracy, peaks, efficiency and scaling of this machine's CPU",
        (
            flag("--quick", "the best instruction set only, no scaling"),
            option("--to", metavar="FILE", help="also write everything as one JSON document"),
        ),
    ),
    (
        actions.tune,
        "the fastest tiling of a kernel here, kept for later calls",
        (
            option(
                "--shape",
                nargs=2,
                type=positive,
                default=(2048, 128),
                metavar=("L", "D"),
                help="queries and keys, head size (default 2048 128)",
            ),
            option(
                "--dtype",
                choices=["int8", "float32", "bfloat16"],
                default="int8",
                help="of the kernel's operands (default int8)",
            ),
            option("--cpu", help="with --model: LLVM's name of another CPU"),
            option("--isa", help="instruction set (default: the best here)"),
            flag("--model", "rank by the model only, measure nothing"),
            option("--measure", type=positive, metavar="N", help="measure N (default 4)"),
            flag("--dry-run", "keep nothing"),
        ),
    ),
    (
        actions.cache,
        "compiled kernels on disk",
        (
            option(
                "action",
                choices=["clear"],
                help="remove those of the CPU and of CUDA, in the folders that are in use",
            ),
            flag("--dry-run", "only list what would be removed"),
        ),
    ),
)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="numflash", description="FlashAttention in pure Python, at hardware speed."
    )
    top.add_argument("--version", action="version", version=f"numflash {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command")
    json_too = flag("--json", "print one JSON document instead of text")
    for function, text, arguments in COMMANDS:
        sub = commands.add_parser(function.__name__, help=text, description=text)
        defaults = {}
        for names, given in (json_too, *arguments):
            action = sub.add_argument(*names, **given)
            defaults[action.dest] = action.default
            action.default = None  # what is given may equal it
        sub.set_defaults(function=function, defaults=defaults, sub=sub)
    return top


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command, and in `given` the names of those that are not left out."""
    top = parser()
    args, rest = top.parse_known_args(argv)
    if rest:
        blamed = args.sub if args.command else top
        blamed.error(f"unrecognized arguments: {' '.join(rest)}")
    if not args.command:
        top.error("the following arguments are required: command")
    given = [name for name, value in vars(args).items() if value is not None]
    for name, value in args.defaults.items():
        if name not in given:
            setattr(args, name, value)
    args.given = given
    return args


def _check_environment() -> None:
    """Raise where Numba would refuse a number of threads at its import, without naming it."""
    text = os.environ.get("NUMBA_NUM_THREADS", "")
    try:
        good = int(text) > 0
    except ValueError:  # Numba warns, and takes all cores
        good = True
    if not good:
        raise ArgumentError(f"NUMBA_NUM_THREADS: got {text!r}; allowed: unset, or 1 or more")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0, 1 for an error that has a message, 2 for a wrong command line, 130 for an interrupt.
    """
    os.environ.setdefault(
        "OPENBLAS_NUM_THREADS", "1"
    )  # before NumPy is loaded: its BLAS threads would keep spinning
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    args, words = parsed(given[:end]), given[end + 1 :]
    if words and args.function is not actions.job:
        parser().error(f"got {' '.join(words)!r} after '--'; allowed: of `numflash job` only")
    if args.function is actions.job:
        args.words = words
    try:
        _check_environment()
        if args.json:
            with contextlib.redirect_stdout(io.StringIO()):
                result = args.function(args)
            print(json.dumps(result, indent=1, default=str))
        else:
            args.function(args)
    except KeyboardInterrupt:
        print("numflash: interrupted; kernels that are compiled stay on disk", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `numflash ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (NumflashError, ArithmeticError, MemoryError, OSError) as error:
        print(f"numflash: {error}", file=sys.stderr)
        return 1
    return 0
