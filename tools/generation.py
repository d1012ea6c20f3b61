"""The table of docs/long_contexts.md.

Decoding and prefill inside transformers, with its caches and with ResidentCache.

    python tools/generation.py decode smollm2 7900          # a token after 7900, caches in turns
    python tools/generation.py decode qwen2 16384 --threads 2
    python tools/generation.py decode deepseek_v2_lite 4096 --layers 4      # latent attention
    python tools/generation.py prefill smollm2 8192 --layers 6 --rounds 3

Shapes have random weights, so that nothing is downloaded: a step's time does not depend on them.
Medians of runs in turns; attention and the cache's update are timed inside the step. `--json FILE`
adds the rows to a file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import cache_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import numflash.transformers as nt
from numflash.cache.kvcache import KVCache

KINDS = {  # the models of the shapes
    "smollm2": "Llama",
    "qwen2": "Qwen2",
    "minicpm3": "MiniCPM3",
    "deepseek_v2_lite": "DeepseekV2",
}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {  # SmolLM2-135M
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "qwen2": {  # Qwen2-0.5B, with a small vocabulary
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    },
    "minicpm3": {  # MiniCPM3-4B, with a small vocabulary
        "hidden_size": 2560,
        "intermediate_size": 6400,
        "num_hidden_layers": 62,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "vocab_size": 1000,
    },
    "deepseek_v2_lite": {  # with a small vocabulary, and the first layer's dense network in all
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 1000,
    },
}
CACHES = {  # name -> (attention implementation, kind of cache)
    "sdpa, dynamic": ("sdpa", "dynamic"),
    "sdpa, static": ("sdpa", "static"),
    "numflash, dynamic": ("numflash", "dynamic"),
    "resident float32": ("numflash", "float32"),
    "resident bfloat16": ("numflash", "bfloat16"),
    "resident int8": ("numflash", "int8"),
}


class Stopwatch:
    """Seconds spent in functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, on the watch."""

        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return run


def random_model(shape: str, layers: int | None) -> Any:
    """A model of this shape."""
    sizes = dict(SHAPES[shape])
    sizes["num_hidden_layers"] = layers or sizes["num_hidden_layers"]
    kind = KINDS[shape]
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **tokens, max_position_embeddings=65536
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def empty_cache(kind: str, config: Any, tokens: int) -> Any:
    """A cache with room for `tokens`."""
    if kind == "dynamic":
        return transformers.DynamicCache(config=config)
    if kind == "static":
        return transformers.StaticCache(config=config, max_cache_len=tokens)
    return nt.ResidentCache(config, kind, max_length=tokens)


def decode(model: Any, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step after `tokens` tokens, by cache."""
    config = model.config
    watch = Stopwatch()
    for name in ("sdpa", "numflash"):
        transformers.AttentionInterface.register(name, watch.timed(ALL_ATTENTION_FUNCTIONS[name]))
    cache_utils.Cache.update = watch.timed(cache_utils.Cache.update)
    nt.ResidentCache.update = watch.timed(nt.ResidentCache.update)
    prompt = torch.randint(0, config.vocab_size, (1, 32))
    caches = {}
    for name, (implementation, kind) in CACHES.items():
        model.set_attn_implementation(implementation)
        caches[name] = empty_cache(kind, config, tokens + rounds + 64)
        lengthen(caches[name], config, tokens)
        model(prompt[:, :1], past_key_values=caches[name])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CACHES}
    for _ in range(rounds):
        for name, (implementation, _) in CACHES.items():
            model.set_attn_implementation(implementation)
            watch.seconds, start = 0.0, time.perf_counter()
            model(prompt[:, :1], past_key_values=caches[name])
            times[name].append((time.perf_counter() - start, watch.seconds))
    return {
        name: {
            "step_ms": 1e3 * statistics.median(t for t, _ in runs),
            "attention_and_update_ms": 1e3 * statistics.median(a for _, a in runs),
            "spread": max(t for t, _ in runs) / min(t for t, _ in runs) - 1,
            "bytes": float(getattr(caches[name], "nbytes", 0)),
        }
        for name, runs in times.items()
    }


def lengthen(cache: Any, config: Any, tokens: int) -> None:
    """Random keys and values of `tokens` tokens in every layer, without running the model."""
    heads, d = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    channels = d, d
    if getattr(config, "kv_lora_rank", None):
        heads, channels = 1, (config.kv_lora_rank, config.qk_rope_head_dim)
    generator = torch.Generator().manual_seed(1)
    for n in range(config.num_hidden_layers):
        key, value = (torch.randn(1, heads, tokens, d, generator=generator) for d in channels)
        cache.update(key, value, n)
        if isinstance(cache, nt.ResidentCache):
            cache.layers[n].keep()


def prefill(model: Any, tokens: int, rounds: int, chunk: int) -> dict[str, dict[str, float]]:
    """Seconds of a prompt read in chunks, by cache, and those in which tokens were stored."""
    watch = Stopwatch()
    KVCache.append = watch.timed(KVCache.append)
    text = torch.randint(0, model.config.vocab_size, (1, tokens))
    names = ("sdpa, dynamic", "resident float32", "resident bfloat16", "resident int8")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names:
            implementation, kind = CACHES[name]
            model.set_attn_implementation(implementation)
            cache = empty_cache(kind, model.config, tokens)
            watch.seconds, start = 0.0, time.perf_counter()
            for ids in text[:, : 2 * chunk if turn == 0 else tokens].split(chunk, 1):
                model(ids, past_key_values=cache, logits_to_keep=1)
            if turn:
                times[name].append((time.perf_counter() - start, watch.seconds))
    return {
        name: {
            "seconds": statistics.median(t for t, _ in runs),
            "storing": statistics.median(a for _, a in runs),
        }
        for name, runs in times.items()
    }


def show(title: str, rows: dict[str, dict[str, float]], key: str) -> None:
    """A table with ratios to SDPA's caches."""
    print(title)
    for name, row in rows.items():
        ratios = [f"{row[key] / rows[x][key]:.2f} of {x}" for x in list(CACHES)[:2] if x in rows]
        more = ""
        if "attention_and_update_ms" in row:
            part = row["attention_and_update_ms"]
            more = f"  attention and update {part:7.1f} = {100 * part / row['step_ms']:3.0f} %"
        if row.get("storing"):
            more = f"  storing {row['storing']:.4f} = {100 * row['storing'] / row['seconds']:.1f} %"
        print(f"  {name:18s} {row[key]:8.2f}{more}  {', '.join(ratios)}")


def main() -> None:
    """Measure one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("decode", "prefill"))
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("tokens", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(asked.threads)
    nt.register()
    model = random_model(asked.shape, asked.layers)
    layers = model.config.num_hidden_layers
    title = f"{asked.what} {asked.shape}, {asked.tokens} tokens, {layers} layers, {asked.threads} threads"
    if asked.what == "decode":
        rows = decode(model, asked.tokens, asked.rounds)
        show(f"{title}: ms", rows, "step_ms")
    else:
        rows = prefill(model, asked.tokens, asked.rounds, asked.chunk)
        show(f"{title}, chunks of {asked.chunk}: s", rows, "seconds")
    if asked.json:
        held = json.loads(asked.json.read_text(encoding="utf-8")) if asked.json.exists() else {}
        held[title] = rows
        asked.json.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
