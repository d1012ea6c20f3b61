"""The figures that README.md and docs/ show.

Measured, drawn, and written into the pages from one file, docs/figures.json.

`tools/figures.py measure`  time every case on this machine (a minute), write docs/figures.json
`tools/figures.py draw`     docs/assets/ratio-light.svg and ratio-dark.svg from it
`tools/figures.py write`    the tables and values between "<!-- table: NAME -->" and "<!-- end -->"

`make figures` does all three. A test compares the pages with the file.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "figures.json"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = re.compile(r"(<!-- (table|value|figure): (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)

PEER = "PyTorch float32"
INT8 = "numflash int8"
FLOAT32 = "numflash float32"
PEER16 = "PyTorch bfloat16"
NAMES = (PEER, INT8, FLOAT32, PEER16)
CASES = [
    {"name": "1 head, L = 4096, D = 128", "heads": 1, "length": 4096, "head_dim": 128},
    {
        "name": "the same, causal",
        "heads": 1,
        "length": 4096,
        "head_dim": 128,
        "causal": True,
    },
    {"name": "8 heads, L = 512, D = 64", "heads": 8, "length": 512, "head_dim": 64},
    {"name": "the same, causal", "heads": 8, "length": 512, "head_dim": 64, "causal": True},
]
DECODE = "one token, cache of 32768, 32/8 heads, D = 128"
SWEEP = {"heads": 2, "head_dim": 64}
LENGTHS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
READY = "int8 operands"  # `attention_int8`: nothing is quantised inside
VECTORS = "int8 operands, vectors"
READY_CASES = [
    *CASES[:2],
    {"name": "1 head, L = 4096, D = 64", "heads": 1, "length": 4096, "head_dim": 64},
    *CASES[2:],
]
SECONDS = 0.3  # of each case, for each contender
LIMITS = {PEER: 1e-5, PEER16: 0.02, FLOAT32: 1e-5, INT8: 0.03}  # relative L1 against float64


def in_turns(calls: dict[str, Callable[[], Any]], most: int = 400) -> dict[str, float]:
    """Least seconds of each call, all of which have run before.

    They take turns, so that the clock changes for all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    rounds = 3
    while len(times[PEER]) < rounds:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        if len(times[PEER]) == 1:
            slowest = max(found[0] for found in times.values())
            rounds = int(min(most, max(3, SECONDS / slowest)))
    return {name: min(found) for name, found in times.items()}


def calls_of(case: Any) -> dict[str, Callable[[], Any]]:
    """Public functions on float32 arrays (bfloat16 tensors for PyTorch's own 16 bits).

    Each returns its output.
    """
    import torch

    import numflash

    q, k, v = case.arrays
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    halves = [x.to(torch.bfloat16) for x in tensors]
    attend = torch.nn.functional.scaled_dot_product_attention

    def peer(x: list[Any]) -> Any:
        with torch.inference_mode():
            return attend(*x, is_causal=case.causal)

    return {
        PEER: lambda: peer(tensors),
        PEER16: lambda: peer(halves),
        FLOAT32: lambda: numflash.attention(q, k, v, is_causal=case.causal),
        INT8: lambda: numflash.attention(q, k, v, is_causal=case.causal, precision="int8"),
    }


def checked(case: Any) -> dict[str, Callable[[], Any]]:
    """The calls, after each has been compared with float64."""
    calls = calls_of(case)
    for name, call in calls.items():
        out = call()
        found = case.check(out.float().numpy() if hasattr(out, "float") else out)
        if not found.relative_l1 <= LIMITS[name]:
            raise ArithmeticError(f"{name} at {case}: relative L1 {found.relative_l1:.2g}")
    return calls


def decode_calls() -> dict[str, Callable[[], Any]]:
    """One new token over a cache of 32768.

    PyTorch with the query heads of a KV head folded into rows, its fastest form.
    """
    import numpy as np
    import torch

    import numflash

    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((1, 8, 32768, 128), np.float32) for _ in range(2))
    query = rng.standard_normal((1, 32, 1, 128), np.float32)
    calls: dict[str, Callable[[], Any]] = {}
    for name, dtype in ((FLOAT32, "float32"), (INT8, "int8")):
        cache = numflash.KVCache(1, 8, 128, 32768, dtype=dtype)
        cache.append(keys, values)
        calls[name] = lambda cache=cache: cache.decode(query)
    for name, kind in ((PEER, torch.float32), (PEER16, torch.bfloat16)):
        q, k, v = (
            torch.from_numpy(x).to(kind) for x in (query.reshape(1, 8, 4, 128), keys, values)
        )

        def peer(q: Any = q, k: Any = k, v: Any = v) -> Any:
            with torch.inference_mode():
                return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        calls[name] = peer
    theirs = calls[PEER]().numpy().reshape(1, 32, 1, 128)
    for name in (FLOAT32, INT8):
        error = np.abs(calls[name]() - theirs).sum() / np.abs(theirs).sum()
        if not error <= LIMITS[name]:
            raise ArithmeticError(f"{name}, decoding: relative L1 {error:.2g} from PyTorch")
    return calls


def ready_calls(case: Any) -> dict[str, Callable[[], Any]]:
    """The same and `attention_int8`, on the machine's best instructions and on vectors alone."""
    import numflash
    from numflash.cpu import launch
    from numflash.jit import target
    from numflash.numerics.quantization import quantize_problem
    from numflash.validation import problem
    from numflash.validation.options import Options

    calls = checked(case)
    operands = numflash.quantize_qkv(*case.arrays)
    described = problem(*case.arrays, Options(is_causal=case.causal, precision="int8"))
    described = quantize_problem(described)
    isas = [isa for isa in target.available() if isa not in ("amx_int8", "portable")]
    found = {
        PEER: calls[PEER],
        INT8: calls[INT8],
        READY: lambda: numflash.attention_int8(*operands, is_causal=case.causal),
    }
    if isas:
        found[VECTORS] = lambda: launch.run(described, isa=isas[0])[0]
    for name, call in found.items():
        if not case.check(call()).relative_l1 <= LIMITS.get(name, LIMITS[INT8]):
            raise ArithmeticError(f"{name} at {case}: too far from float64")
    return found


def measure_ready(found: dict[str, Any]) -> None:
    """Times of ready INT8 operands, on one thread and on all, and the peaks of this machine."""
    from numflash.jit import threads
    from numflash.measure import roofline
    from numflash.measure.contenders import Case, on_threads

    found["ready"] = {"rows": [], "peaks": {}}
    for case in READY_CASES:
        options = {k: v for k, v in case.items() if k != "name"}
        times = in_turns(ready_calls(Case(**options)))
        found["ready"]["rows"].append({"case": case["name"], "seconds": times})
        print(case["name"], times, flush=True)
    for isa in (None, "avx512_vnni"):
        int8, float32 = roofline.measure_compute(1, isa)
        found["ready"]["peaks"]["int8" if isa is None else "vectors"] = int8
        found["ready"]["peaks"]["float32"] = float32
    with on_threads(threads.most()):
        calls = ready_calls(Case(4096, 128))
        found["ready"]["threads"] = {"count": threads.most(), "seconds": in_turns(calls)}


def machine() -> dict[str, str]:
    """What the figures depend on."""
    import numba
    import torch

    from numflash.jit import system, target

    cpu = system.cpu_model() or platform.processor() or platform.machine()
    return {
        "cpu": cpu,
        "isa": target.available()[0],
        "python": platform.python_version(),
        "numba": numba.__version__,
        "torch": torch.__version__.split("+")[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def measure(what: str = "all") -> None:
    """Time everything, or only "accuracy" or "ready", or "warm": compile what the others call."""
    from numflash.measure.contenders import Case, on_threads
    from numflash.measure.data import minilm
    from numflash.measure.metrics import accuracy

    found = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    with on_threads(1):
        if what == "warm":
            for causal in (False, True):
                for head_dim in (64, 128):
                    for call in ready_calls(Case(64, head_dim, causal, 8)).values():
                        call()
                    for call in calls_of(Case(64, head_dim, causal, 8)).values():
                        call()
            decode_calls()
            return
        if what in ("all", "ready"):
            measure_ready(found)
        if what == "all":
            found["machine"] = machine()
            found["speed"] = []
            for case in CASES:
                options = {k: v for k, v in case.items() if k != "name"}
                times = in_turns(checked(Case(**options)))
                found["speed"].append({"case": case["name"], "seconds": times})
                print(case["name"], times, flush=True)
            times = in_turns(decode_calls())
            found["speed"].append({"case": DECODE, "seconds": times})
            print(DECODE, times, flush=True)
            found["sweep"] = []
            for length in LENGTHS:
                times = in_turns(checked(Case(length, **SWEEP)))
                found["sweep"].append({"length": length, "seconds": times})
                print(length, times, flush=True)
    if what != "ready":
        found["accuracy"] = {name: e.as_dict() for name, e in accuracy(*minilm()).items()}
    DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def draw() -> None:
    """Speed relative to PyTorch's float32 over L, one picture for each scheme."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = json.loads(DATA.read_text(encoding="utf-8"))
    lengths = [point["length"] for point in found["sweep"]]
    styles = {INT8: ("o-", 2.6), FLOAT32: ("s-", 2.0), PEER16: ("^--", 1.6)}
    pyplot.rcParams |= {"svg.hashsalt": "numflash", "svg.fonttype": "path", "font.size": 11}
    for scheme, ink, colors in (
        ("light", "#24292f", {INT8: "#00796b", FLOAT32: "#5e35b1", PEER16: "#757575"}),
        ("dark", "#e6edf3", {INT8: "#4db6ac", FLOAT32: "#b39ddb", PEER16: "#9e9e9e"}),
    ):
        figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
        for name, (style, width) in styles.items():
            ratios = [p["seconds"][PEER] / p["seconds"][name] for p in found["sweep"]]
            axes.plot(lengths, ratios, style, color=colors[name], linewidth=width, label=name)
        axes.axhline(1, color=ink, linewidth=1)
        axes.text(lengths[-1], 0.96, PEER, color=ink, fontsize=9, ha="right", va="top")
        axes.set(xscale="log", yscale="log", xlabel="queries and keys (L)")
        axes.set_title(
            "Speed relative to PyTorch's float32 attention, one thread", color=ink, fontsize=12
        )
        axes.set_xticks(lengths, [str(n) if n < 1024 else f"{n // 1024}k" for n in lengths])
        ticks = [t for t in (0.125, 0.25, 0.5, 1, 2, 4, 8, 16) if _near(t, axes.get_ylim())]
        axes.set_yticks(ticks, [f"{t:g}x" for t in ticks])
        axes.minorticks_off()
        axes.tick_params(colors=ink)
        axes.xaxis.label.set_color(ink)
        for side in axes.spines.values():
            side.set_color(ink)
            side.set_alpha(0.4)
        axes.grid(alpha=0.25, color=ink)
        axes.legend(frameon=False, labelcolor=ink, loc="upper left")
        path = ROOT / "docs" / "assets" / f"ratio-{scheme}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})
        text = path.read_text(encoding="utf-8")
        path.write_text(
            "\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8"
        )
        pyplot.close(figure)


def _near(tick: float, limits: tuple[float, float]) -> bool:
    return limits[0] / 1.3 <= tick <= limits[1] * 1.3


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _stamp(found: dict[str, Any]) -> str:
    """The machine, its software, and how the times were taken."""
    m = found["machine"]
    return (
        f"{m['cpu']}, one thread, {m['date']}; PyTorch {m['torch']}, numba {m['numba']}, instruction set `{m['isa']}`. A shared "
        "machine: least times of calls that take turns"
    )


def _speed(found: dict[str, Any], _: bool) -> str:
    lines = [f"| milliseconds | {' | '.join(NAMES)} |", "|---" * (len(NAMES) + 1) + "|"]
    for row in found["speed"]:
        seconds = row["seconds"]
        cells = [_milliseconds(seconds[PEER])]
        for name in NAMES[1:]:
            ratio = seconds[PEER] / seconds[name]
            text = f"{_milliseconds(seconds[name])} ({ratio:.1f}x)"
            cells.append(f"**{text}**" if name == INT8 else text)
        lines.append(f"| {row['case']} | {' | '.join(cells)} |")
    lines += [
        "",
        f"{_stamp(found)}. numflash takes float32 arrays: INT8 quantises inside the timing. Decoding: "
        "PyTorch with the query heads of a KV head folded into rows, its fastest form. Command: "
        "`make figures`.",
    ]
    return "\n".join(lines)


def _ready(found: dict[str, Any], _: bool) -> str:
    ready = found["ready"]
    names = list(ready["rows"][0]["seconds"])
    lines = [f"| milliseconds | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    threads = ready["threads"]
    last = {"case": f"the first, {threads['count']} threads", "seconds": threads["seconds"]}
    for row in [*ready["rows"], last]:
        seconds = row["seconds"]
        cells = [
            _milliseconds(x) + ("" if name == PEER else f" ({seconds[PEER] / x:.1f}x)")
            for name, x in seconds.items()
        ]
        lines.append(f"| {row['case']} | {' | '.join(cells)} |")
    peaks = ready["peaks"]
    first = ready["rows"][0]["seconds"]
    share = 4 * 4096 * 4096 * 128 / first[READY] / peaks["int8"]
    lines += [
        "",
        f"{_stamp(found)}. Peaks in the same run: INT8 {peaks['int8'] / 1e12:.1f} TOP/s, with vectors alone "
        f"{peaks['vectors'] / 1e9:.0f} GOP/s; FP32 {peaks['float32'] / 1e9:.0f} GFLOP/s. The first case reaches "
        f"{share:.0%} of the INT8 peak. Command: `make figures`.",
    ]
    return "\n".join(lines)


def _accuracy(found: dict[str, Any], _: bool) -> str:
    lines = [
        "| precision | cosine | relative L1 | RMSE | max abs | worst row |",
        "|---|---|---|---|---|---|",
    ]
    for name, e in found["accuracy"].items():
        cells = [f"{e[key]:.1e}" for key in ("relative_l1", "rmse", "max_abs", "worst_row")]
        lines.append(f"| {name} | {e['cosine']:.6f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(found: dict[str, Any], readme: bool) -> str:
    last = found["sweep"][-1]
    alt = (
        f"Speed over PyTorch float32 from L = {LENGTHS[0]} to {LENGTHS[-1]}, {SWEEP['heads']} heads, D = {SWEEP['head_dim']}: "
        f"numflash int8 reaches {last['seconds'][PEER] / last['seconds'][INT8]:.1f}x"
    )
    if readme:
        return (
            '<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="docs/assets/ratio-dark.svg">\n'
            f'  <img alt="{alt}" src="docs/assets/ratio-light.svg">\n</picture>'
        )
    return f"![{alt}](assets/ratio-light.svg#light)\n![{alt}](assets/ratio-dark.svg#dark)"


def _int8_range(found: dict[str, Any], _: bool) -> str:
    ratios = [row["seconds"][PEER] / row["seconds"][INT8] for row in found["speed"]]
    return f"{min(ratios):.0f} to {max(ratios):.0f} times"


def _break_even(found: dict[str, Any], _: bool) -> str:
    slower = [p["length"] for p in found["sweep"] if p["seconds"][INT8] > p["seconds"][PEER]]
    return str(2 * max(slower, default=LENGTHS[0] // 2))


BLOCKS: dict[str, Callable[[dict[str, Any], bool], str]] = {
    "speed": _speed,
    "ready": _ready,
    "accuracy": _accuracy,
    "ratio": _ratio,
    "int8_range": _int8_range,
    "break_even": _break_even,
}


def filled(page: Path) -> str:
    """The text of a page with its figures as the file has them."""
    found = json.loads(DATA.read_text(encoding="utf-8"))

    def block(match: re.Match[str]) -> str:
        text = BLOCKS[match[3]](found, page.name == "README.md")
        return (
            f"{match[1]}{text}{match[5]}"
            if match[2] == "value"
            else f"{match[1]}\n{text}\n{match[5]}"
        )

    return MARKED.sub(block, page.read_text(encoding="utf-8"))


def write() -> None:
    """Bring every page up to date."""
    for page in PAGES:
        text = filled(page)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    jobs = {"measure": measure, "draw": draw, "write": write}
    if len(sys.argv) < 2 or sys.argv[1] not in jobs:
        sys.exit(__doc__)
    jobs[sys.argv[1]](*sys.argv[2:])
