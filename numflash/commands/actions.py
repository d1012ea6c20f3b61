"""What the commands do: a function for each, from parsed arguments to what `--json` prints.

Modules are imported where they are used: `numflash info` does not load the kernels of a benchmark.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import ArgumentError

PACKAGES = ("torch", "ml_dtypes", "matplotlib", "rich")  # that are used where they are installed
IN_WORDS = {  # keys of --json, as text shows them
    "isa": "instruction sets",
    "cpu_quota": "CPU quota",
    "threading_layer": "threading layer",
    "cache_files": "kernel files",
    "cache": "their folders",
    "integer_divisions": "integer divisions",
    "lanes64": "64-bit lanes",
}


def demo(args: argparse.Namespace) -> Any:
    if args.dtype and args.what not in ("decode", "generate"):
        raise ArgumentError(
            "--dtype: got it without a cache; allowed: with `demo decode` and `demo generate`"
        )
    dtype = args.dtype or "int8"
    if args.what == "ring":
        from ..mpi import demo as ring

        return ring.run(args.threads)
    if args.what == "decode":
        from . import demo_decode

        return demo_decode.run(args.threads, dtype)
    if args.what == "generate":
        from . import demo_generate

        return demo_generate.run(args.threads, dtype)
    from . import demo as job

    return job.run(args.threads)


def info(args: argparse.Namespace) -> Any:
    import llvmlite
    import llvmlite.binding as llvm
    import numba
    import numpy

    from ..jit import target
    from ..jit.quota import cpu_quota
    from ..jit.threads import layer, most
    from ..tiling import Caches
    from ..tiling.tuned import file_of_choices

    caches = Caches.of_this_machine()
    stored = _stored()
    tilings = file_of_choices()
    found = {
        "numflash": __version__,
        "python": sys.version.split()[0],
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "llvm": ".".join(map(str, llvm.llvm_version_info)),
        "numpy": numpy.__version__,
        "cpu": target.cpu_name(),
        "isa": target.available(),
        "threads": most(),
        "cpu_quota": cpu_quota(),
        "threading_layer": layer(),
        "caches": dict(caches.levels()),
        "caches_from": caches.source,
        "cache_files": len(stored),
        "cache": sorted({str(path.parent) for path in stored}),
        "tilings": str(tilings) if tilings.is_file() else None,
    }
    for name in PACKAGES:
        found[name] = _version(name)
    roofs = []
    if args.roof:
        from ..measure import roofline

        roofs = [roofline.measure(n) for n in sorted({1, most()})]
        found["roof"] = [roof.as_dict() for roof in roofs]
    sizes = ", ".join(f"{level} {size // 1024} KiB" for level, size in caches.levels())
    shown: dict[str, Any] = found | {"caches": f"{sizes} ({caches.source})"}
    shown["cache"] = found["cache"] or "none yet"
    shown["cpu_quota"] = found["cpu_quota"] or "none"
    del shown["caches_from"]
    shown["tilings"] = found["tilings"] or "none kept"
    shown |= {name: found[name] or "not installed" for name in PACKAGES}
    shown.pop("roof", None)
    shown |= {f"roof, threads {roof.threads}": str(roof) for roof in roofs}
    _print_facts(shown)
    return found


def _print_facts(facts: dict[str, Any]) -> None:
    """A line each, its key in words; of several values, words with commas."""
    for key, value in facts.items():
        if isinstance(value, dict):
            value = [f"{name} {number}" for name, number in value.items()]
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        print(f"{IN_WORDS.get(key, key):<18} {value}")


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def warmup(args: argparse.Namespace) -> Any:
    from . import warmup as job

    if not args.list:
        return job.run(args.words, args.processes)
    if "processes" in args.given:
        raise ArgumentError(
            f"--processes: got {args.processes}, which --list does not use; allowed: words of a name"
        )
    known = [found.name for found in job.chosen(args.words)]
    print("\n".join(known))
    return known


# what each table of `bench` and `estimate` but the usual one uses, and a list of kernels, besides its
# own name; L of a plot is a place
USED = {
    **dict.fromkeys(("exp2", "unfused", "improvements", "attention", "check"), ("what", "cpu")),
    "list": (),
    "decode": ("length", "threads", "number_of_threads"),
    "plot": ("length", "head_dim", "iterations", "threads", "number_of_threads"),
    "short": ("threads", "number_of_threads"),
    "study": (),
}
TABLES = ("plot", "short", "study")  # of `bench`, that an option asks for
OPTIONS = (*TABLES, "list")
ALWAYS = ("command", "function", "defaults", "sub", "json")
PLACES = ("length", "head_dim", "iterations", "threads")


def _refuse_unused(args: argparse.Namespace, table: str) -> None:
    """Refuse what is given to a table of `bench` or `estimate`, or to --list, that does not use it."""
    for name in args.given:
        if name in (*ALWAYS, *USED[table], table):
            continue
        used = [x for x in USED[table] if x not in ("length", "number_of_threads", "what")]
        raise ArgumentError(
            f"{_shown(args, name)}: got {getattr(args, name)}, which "
            f"{'--' * (table in OPTIONS)}{table} does not use; allowed: "
            f"{', '.join(_shown(args, x) for x in used) or 'nothing beside it'}"
        )


def _shown(args: argparse.Namespace, name: str) -> str:
    """An argument as the command's help shows it."""
    if args.command == "bench" and name in PLACES:
        return "L" if name == "length" else name
    if name == "kernel":
        return name
    return "--threads" if name == "number_of_threads" else "--" + name.replace("_", "-")


def _threads(args: argparse.Namespace) -> int:
    """The number of `bench`, which may come at its place or by name."""
    place, named = args.threads, args.number_of_threads
    if named and "threads" in args.given and named != place:
        raise ArgumentError(f"--threads: got {named}, and threads {place}; allowed: one of the two")
    return named or place


def bench(args: argparse.Namespace) -> Any:
    from . import bench as job

    threads = _threads(args)
    tables = [f"--{name}" for name in TABLES if name in args.given]
    if args.length == "decode":
        tables.append("decode")
    if len(tables) > 1:
        raise ArgumentError(f"{tables[0]}: got it together with {tables[1]}; allowed: one table")
    if tables:
        _refuse_unused(args, tables[0].removeprefix("--"))
    if args.length == "decode":
        from . import bench_decode

        return bench_decode.run(threads)
    if args.plot is not None:
        from . import bench_plot

        return bench_plot.plot(args.plot, args.head_dim, threads, args.iterations)
    if args.short:
        from . import bench_short

        return bench_short.run(threads)
    if args.study:
        from . import bench_study

        return bench_study.run(args.study)
    from ..measure.contenders import Case

    case = Case(args.length, args.head_dim, args.causal, args.heads, args.batch)
    return job.run(case, args.iterations, threads, args.reference_threads)


def explain(args: argparse.Namespace) -> Any:
    import numflash

    shape = (args.batch, args.heads, args.length, args.head_dim)
    found = numflash.explain(shape, precision=args.precision, is_causal=args.causal)
    print(found)
    result = found.as_dict()
    if args.roof:
        from ..measure import roofline

        roof = roofline.measure(1)
        rate, limit = found.roof(roof.int8 if args.precision == "int8" else roof.float32, roof.read)
        print(
            f"  roof: {rate / 1e9:.0f} GOP/s on one thread of this machine, set by {limit}: "
            f"{1e3 * found.operations / rate:.3g} ms at best"
        )
        result |= {"roof": rate, "limited_by": limit}
    return result


def asm(args: argparse.Namespace) -> Any:
    from ..machinecode import codegen

    if args.list:
        _refuse_unused(args, "list")
        print("\n".join(codegen.KERNELS))
        return sorted(codegen.KERNELS)
    if args.listing:
        text = codegen.compile_kernel(args.kernel, args.cpu, args.features).assembly
        print(text, end="")
        return {"kernel": args.kernel, "cpu": args.cpu, "assembly": text}
    found = codegen.histogram(args.kernel, args.cpu, args.features)
    _print_facts({key: found[key] for key in found if key not in ("function", "depth")})
    return found


def export(args: argparse.Namespace) -> Any:
    from ..machinecode import export as job

    if args.list:
        _refuse_unused(args, "list")
        known = job.kernels()
        for name, text in known.items():
            print(f"{name:<18} {text}")
        return known
    for name, value in (("KERNEL", args.kernel), ("--to", args.to)):
        if not value:
            raise ArgumentError(
                f"{name}: got nothing; allowed: numflash export KERNEL --to FOLDER, or --list"
            )
    found = job.run(args.kernel, args.cpu, args.to)
    print(
        f"{found['kernel']} for {found['cpu']} ({found['isa']}): {found['instructions']} instructions"
    )
    print("\n".join(found["files"]))
    print(f"make -C {shlex.quote(args.to)} check")
    return found


def job(args: argparse.Namespace) -> Any:
    from .job import Request, run

    request = Request(
        args.nodes,
        args.groups,
        args.threads,
        args.time,
        args.account,
        args.queue,
        args.environment,
        args.words,
    )
    return run(args.scheduler, request)


def validate(args: argparse.Namespace) -> Any:
    from .validate import run

    return run(args.quick, args.to)


def tune(args: argparse.Namespace) -> Any:
    from .tune import run

    if args.model and args.measure:
        raise ArgumentError(
            f"--measure: got {args.measure} together with --model; allowed: one of the two"
        )
    measured = 0 if args.model else args.measure or 4
    length, head_dim = args.shape
    return run(length, head_dim, args.isa, measured, not args.dry_run, args.dtype, args.cpu)


def estimate(args: argparse.Namespace) -> Any:
    if args.what:
        _refuse_unused(args, args.what)
        job = importlib.import_module(f"..machinecode.estimate_{args.what}", __package__)
        return job.run(args.cpu or ("host" if args.what == "check" else "a64fx"))
    from ..machinecode import estimate as tiles

    return tiles.run(args.cpu or "a64fx", args.instructions, args.head_dim)


def _stored() -> list[Path]:
    """Files of compiled kernels: the CPU's, and CUDA's with what its validation keeps beside them."""
    from ..cuda.compile.stored import cached_files
    from ..jit import cache_files

    return [*cache_files.files(), *cached_files()]


def cache(args: argparse.Namespace) -> Any:
    from ..jit.cache_files import remove

    found = _stored()
    if not args.dry_run:
        remove(found)
    for path in found:
        print(path)
    done = "would be removed" if args.dry_run else "removed"
    print(f"{len(found)} files of compiled kernels, for the CPU and for CUDA, {done}")
    return {
        "removed": 0 if args.dry_run else len(found),
        "dry_run": args.dry_run,
        "files": [str(path) for path in found],
    }
