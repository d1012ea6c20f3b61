"""The chapters: where each is on the way, how long it takes, what it is about.

`tools/notebooks.py --maps` writes these facts below each chapter's title.
"""

from __future__ import annotations

from typing import NamedTuple


class Chapter(NamedTuple):
    """One chapter.

    minutes : to read, and to do the exercises
    idea : what to remember if only one sentence is kept
    needs : chapters to read before
    terms : anchors of docs/glossary.md
    papers : (name, address)
    """

    slug: str
    minutes: tuple[int, int]
    idea: str
    needs: tuple[str, ...]
    terms: tuple[str, ...]
    papers: tuple[tuple[str, str], ...] = ()


PATHS = {
    "CPU path": ("00", "01", "02", "03", "06", "07", "09", "24"),
    "GPU path": ("13", "14", "15", "16", "17", "23"),
}
AFTER = {"24": "13", "23": "18"}  # what to read when a path is done
_FA1 = ("FlashAttention", "https://arxiv.org/abs/2205.14135")
_FA2 = ("FlashAttention-2", "https://arxiv.org/abs/2307.08691")
_FA3 = ("FlashAttention-3", "https://arxiv.org/abs/2407.08608")
_ONLINE = ("Online normalizer calculation for softmax", "https://arxiv.org/abs/1805.02867")
_SAGE = ("SageAttention", "https://arxiv.org/abs/2410.02367")
_ATTENTION = ("Attention is all you need", "https://arxiv.org/abs/1706.03762")

CHAPTERS = {
    "00": Chapter(
        "00_memory",
        (35, 10),
        "The same arithmetic in another order moves several times fewer bytes.",
        (),
        ("head", "channel", "score", "softmax", "kernel", "cache-line", "tile", "rung", "peak"),
        (_ATTENTION, _FA1),
    ),
    "01": Chapter(
        "01_online_softmax",
        (20, 30),
        "Softmax needs no second pass: keep a maximum and a sum, and shrink them when the maximum grows.",
        ("00",),
        ("online-softmax", "running-state", "octave", "tile", "relative-l1"),
        (_ONLINE, _FA1),
    ),
    "02": Chapter(
        "02_tiling",
        (25, 35),
        "Add up what the inner loop touches: the largest tile that fits the cache moves the fewest bytes.",
        ("00", "01"),
        ("working-set", "cache-line", "cache-levels", "roofline", "gflops", "tile"),
        (("Roofline", "https://doi.org/10.1145/1498765.1498785"),),
    ),
    "03": Chapter(
        "03_int8",
        (30, 15),
        "An 8-bit number costs half a step of error, and the largest entry sets the step.",
        ("00",),
        (
            "activation",
            "quantisation",
            "scale",
            "rms",
            "relative-l1",
            "smoothing",
            "attention-sink",
        ),
        (_SAGE, ("StreamingLLM", "https://arxiv.org/abs/2309.17453")),
    ),
    "04": Chapter(
        "04_fixed_point",
        (35, 20),
        "2**x is a shift and a small polynomial, so softmax can run in integers.",
        ("01", "03"),
        ("fixed-point", "octave", "saturation"),
        (
            ("Q format", "https://en.wikipedia.org/wiki/Q_(number_format)"),
            ("I-BERT", "https://arxiv.org/abs/2101.01321"),
        ),
    ),
    "05": Chapter(
        "05_llvm",
        (40, 10),
        "A compiler vectorises a loop as it is written; it does not build a register tile.",
        ("02",),
        (
            "llvm",
            "vectorise",
            "hot-loop",
            "instruction-set",
            "vector",
            "fma",
            "dot-instruction",
            "register-tile",
        ),
        (("LLVM: auto-vectorization", "https://llvm.org/docs/Vectorizers.html"),),
    ),
    "06": Chapter(
        "06_register_tile",
        (30, 20),
        "Keep many sums in registers, so that each load serves several products.",
        ("02", "03"),
        (
            "instruction-set",
            "register",
            "vector",
            "lane",
            "broadcast",
            "packed",
            "register-tile",
            "dot-instruction",
            "latency",
            "spill",
        ),
        (
            (
                "Anatomy of high-performance matrix multiplication",
                "https://doi.org/10.1145/1356052.1356053",
            ),
        ),
    ),
    "07": Chapter(
        "07_fused",
        (25, 15),
        "Do all four steps for one tile before the next, so that its scores never leave the cache.",
        ("01", "02", "06"),
        ("fusion", "rung", "tile", "octave"),
        (_FA1, _FA2),
    ),
    "08": Chapter(
        "08_exp2_variants",
        (40, 15),
        "Optional study: what an exponential costs beside a product, on this machine.",
        ("04", "06"),
        ("fixed-point", "fma"),
        (
            (
                "A fast, compact approximation of the exponential function",
                "https://doi.org/10.1162/089976699300016467",
            ),
        ),
    ),
    "09": Chapter(
        "09_threads_causal_gqa",
        (15, 15),
        "Query tiles are independent tasks; start the longest first.",
        ("07",),
        ("causal", "mask", "gqa", "tile", "atomic"),
        (_FA2, ("GQA", "https://arxiv.org/abs/2305.13245")),
    ),
    "10": Chapter(
        "10_decode",
        (40, 25),
        "One new token reads the whole cache once: bytes decide, and the keys are what can be split.",
        ("01", "09"),
        ("prefill", "decode", "kv-cache", "split-kv", "log-sum-exp", "gqa", "rotation"),
        (
            ("QuaRot", "https://arxiv.org/abs/2404.00456"),
            ("Flash-Decoding", "https://pytorch.org/blog/flash-decoding/"),
            ("FlashDecoding++", "https://arxiv.org/abs/2311.01282"),
        ),
    ),
    "11": Chapter(
        "11_backward",
        (30, 15),
        "Keep one number per row and compute the weights again.",
        ("01", "07"),
        ("backward", "log-sum-exp"),
        (_FA1, _FA2),
    ),
    "12": Chapter(
        "12_claims",
        (45, 15),
        "Check a figure with the arithmetic that it rests on.",
        ("07", "10"),
        ("roofline", "fixed-point", "bank-conflict"),
        (("Twelve ways to fool the masses", "https://doi.org/10.1142/S0129626491000410"),),
    ),
    "13": Chapter(
        "13_threads_warps_memory",
        (30, 30),
        "32 threads move together, and memory is near (shared) or far (global).",
        ("00", "01"),
        (
            "ptx",
            "emulator",
            "block",
            "warp",
            "sector",
            "coalesced",
            "shared-memory",
            "barrier",
            "race",
        ),
        (("CUDA programming guide", "https://docs.nvidia.com/cuda/cuda-c-programming-guide/"),),
    ),
    "14": Chapter(
        "14_fragments",
        (25, 15),
        "The result of one tensor-core product is the operand of the next, without moving.",
        ("13",),
        ("tensor-core", "fragment", "ldmatrix", "warp", "half"),
        (("PTX manual", "https://docs.nvidia.com/cuda/parallel-thread-execution/"), _FA2),
    ),
    "15": Chapter(
        "15_bank_conflicts",
        (20, 25),
        "An XOR of the address puts a column into 32 different banks.",
        ("13", "14"),
        ("pass", "bank-conflict", "chunk", "swizzle", "shared-memory"),
        (
            ("CUDA: shared memory", "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/"),
            _FA2,
        ),
    ),
    "16": Chapter(
        "16_flash_attention_2",
        (35, 15),
        "Chapter 01's loop on tensor cores, one improvement per rung.",
        ("01", "14", "15"),
        (
            "rung",
            "tensor-core",
            "accumulator",
            "bank-conflict",
            "barrier",
            "named-barrier",
            "cp-async",
        ),
        (_FA2,),
    ),
    "17": Chapter(
        "17_hopper",
        (35, 30),
        "One warp copies tiles, the others multiply; barriers that count bytes say when a tile is ready.",
        ("16",),
        (
            "tma",
            "stage",
            "mbarrier",
            "phase",
            "parity",
            "fence",
            "wgmma",
            "warpgroup",
            "named-barrier",
            "descriptor",
            "warp-specialisation",
        ),
        (_FA3,),
    ),
    "18": Chapter(
        "18_int8_equal_bits",
        (20, 15),
        "Integer sums have one result in any order, so CPU and GPU give the same bits.",
        ("03", "16"),
        ("equal-bits", "tensor-core", "accumulator", "quantisation"),
        (_SAGE,),
    ),
    "19": Chapter(
        "19_decode_gpu",
        (25, 15),
        "A cache on the card: count every byte that a step moves.",
        ("10", "16"),
        ("decode", "kv-cache", "split-kv"),
        (("Flash-Decoding", "https://pytorch.org/blog/flash-decoding/"),),
    ),
    "20": Chapter(
        "20_backward_gpu",
        (30, 15),
        "Two passes, each sum with one owner: no atomics, the same bits every time.",
        ("11", "16"),
        ("backward", "log-sum-exp", "atomic", "equal-bits"),
        (_FA2,),
    ),
    "21": Chapter(
        "21_many_machines",
        (15, 10),
        "Keys travel around a ring; two partial results merge exactly.",
        ("01",),
        ("log-sum-exp", "ring", "rank", "causal"),
        (("Ring attention", "https://arxiv.org/abs/2310.01889"),),
    ),
    "22": Chapter(
        "22_invent_attention",
        (20, 15),
        "A score or a mask of your own is a function that is compiled into the existing kernel.",
        ("01", "02"),
        ("score", "softmax", "mask", "tile", "causal"),
        (
            ("FlexAttention", "https://arxiv.org/abs/2412.05496"),
            ("ALiBi", "https://arxiv.org/abs/2108.12409"),
            ("StreamingLLM", "https://arxiv.org/abs/2309.17453"),
        ),
    ),
    "23": Chapter(
        "23_broken_kernels",
        (35, 60),
        "Read what the emulator reports, then mend the kernel.",
        ("01", "13", "15", "17"),
        ("race", "barrier", "bank-conflict", "parity", "online-softmax"),
        (("compute-sanitizer", "https://docs.nvidia.com/compute-sanitizer/"),),
    ),
    "24": Chapter(
        "24_capstone",
        (20, 30),
        "Change a tile of the shipped kernel: other time, the same bits.",
        ("02", "03", "07"),
        ("tile", "working-set", "equal-bits", "register-tile"),
        (_FA1, ("FlexAttention", "https://arxiv.org/abs/2412.05496")),
    ),
}


def heading(number: str) -> str:
    """The map below a chapter's title, in Markdown: where it is, how long, what it needs."""
    chapter = CHAPTERS[number]
    lines = [f"> **The idea:** {chapter.idea}", ">"]
    lines.append(f"> **Where you are:** {_way(number)}")
    lines.append(">")
    needs = ", ".join(_link(n) for n in chapter.needs) or "NumPy"
    read, work = chapter.minutes
    lines.append(
        f"> **Time:** {read} minutes to read, {work} for the exercises. **Before it:** {needs}."
    )
    terms = ", ".join(
        f"[{term.replace('-', ' ')}](../docs/glossary.md#{term})" for term in chapter.terms
    )
    lines += [">", f"> **Terms:** {terms}."]
    if chapter.papers:
        papers = ", ".join(f"[{name}]({address})" for name, address in chapter.papers)
        lines += [">", f"> **Papers:** {papers}."]
    return "\n".join(lines)


def following(number: str) -> str:
    """The last line of a chapter: where its path goes on, or the next number beside the paths."""
    way = next((stops for stops in PATHS.values() if number in stops), tuple(CHAPTERS))
    after = way[way.index(number) + 1 :]
    if not after:  # a path ends: the other path, or what builds on both
        after = (AFTER[number],)
    return f"**Next:** {_link(after[0])}. {CHAPTERS[after[0]].idea}"


def _link(number: str) -> str:
    return f"[{number}]({CHAPTERS[number].slug}.ipynb)"


def _way(number: str) -> str:
    for name, stops in PATHS.items():
        if number in stops:
            way = " → ".join(f"**{n}**" if n == number else _link(n) for n in stops)
            return f"{name}, stop {stops.index(number) + 1} of {len(stops)}: {way}"
    side = "; ".join(f"{name}: {_link(stops[0])} ..." for name, stops in PATHS.items())
    return f"optional: on neither path ({side})"
