"""transformers' masks of long prompts as functions, on small models with random weights."""

import copy
import os

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")
transformers = pytest.importorskip(
    "transformers", reason="needs the transformers extra: pip install 'numflash[transformers]'"
)

import numflash.transformers as nt
from numflash.transformers import attention as ours
from numflash.transformers import function_mask as masks
from numflash.transformers.function_mask import FunctionMask, function_mask

nt.register()
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "head_dim": 16,
}  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, sliding_window=30, attn_logit_softcapping=5.0)
    ),
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **SIZES, sliding_window=30, num_local_experts=2, num_experts_per_tok=1
        )
    ),
}
ROWS = 300
TOKENS = torch.randint(1, 50, (2, ROWS), generator=torch.Generator().manual_seed(0))
LEFT = (torch.arange(ROWS) >= torch.tensor([[0], [45]])).long()
PACKED = torch.cat([torch.arange(n) for n in (100, 60, 140)])[None].expand(2, ROWS)


@pytest.fixture(autouse=True)
def from_few_rows_on(monkeypatch):
    monkeypatch.setattr(masks, "FEWEST_ROWS", 256)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


@pytest.mark.parametrize(
    "inputs",
    [{"attention_mask": LEFT}, {"position_ids": PACKED, "use_cache": False}],
    ids=["padded", "packed"],
)
def test_logits(model, inputs, monkeypatch):
    """As the eager implementation's; every mask is a function, and no dense one is made."""
    seen = LEFT.bool() if "attention_mask" in inputs else torch.ones_like(LEFT, dtype=torch.bool)
    kinds = []
    monkeypatch.setattr(
        ours, "blockwise", lambda *args, f=ours.blockwise: kinds.append(args[3]) or f(*args)
    )
    monkeypatch.setattr(FunctionMask, "dense", None)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(TOKENS, **inputs).logits
        model.set_attn_implementation("numflash")
        out = model(TOKENS, **inputs).logits
    # a full layer of gpt-oss does not look at packed positions
    assert len(kinds) >= (1 if "position_ids" in inputs else 2)
    assert all(x.shape == (2, 1, ROWS, ROWS) for x in kinds)
    torch.testing.assert_close(out[seen], want[seen], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_prompt_in_parts_and_gradients():
    """A prompt behind a cache, then the gradients of a packed batch."""
    torch.manual_seed(0)
    model = MODELS["llama"]()
    found = []
    for name in ("eager", "numflash"):
        model.set_attn_implementation(name)
        model.zero_grad()
        with torch.no_grad():
            first = model(TOKENS[:, :20], use_cache=True)
            part = model(TOKENS[:, 20:], **{nt.CACHE_ARGUMENT: first.past_key_values}).logits
        model(TOKENS, position_ids=PACKED, use_cache=False).logits.square().mean().backward()
        found.append((part, model.model.layers[0].self_attn.k_proj.weight.grad.clone()))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_generation_with_a_static_cache():
    torch.manual_seed(0)
    model = MODELS["gemma2"]().eval()
    options = {"attention_mask": LEFT, "max_new_tokens": 4, "do_sample": False}
    found = []
    for name in ("eager", "numflash"):
        model.set_attn_implementation(name)
        found.append(model.generate(TOKENS, cache_implementation="static", **options))
    assert torch.equal(*found)


def test_what_stays_dense():
    """A short prompt, a function that cannot be recorded, and short prompts in INT8."""

    def strange(b, h, q, k):
        return bool(q > k)

    causal = ours.masking_utils.causal_mask_function
    assert function_mask(1, 40, 40, causal, {}) is None
    assert function_mask(1, ROWS, ROWS, strange, {"allow_is_causal_skip": False}) is None
    assert function_mask(1, ROWS, ROWS, causal, {}) is None  # is_causal says it
    found = function_mask(2, ROWS, ROWS + 5, causal, {"q_offset": 5, "attention_mask": None})
    want = np.tril(np.ones((ROWS, ROWS + 5), bool), 5)
    assert np.array_equal(found.dense()[1, 0].numpy(), want) and found.shape[2:] == want.shape
    model = MODELS["llama"]().eval()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(TOKENS, attention_mask=LEFT).logits[LEFT.bool()]
        model.set_attn_implementation("numflash_int8")
        out = model(TOKENS, attention_mask=LEFT).logits[LEFT.bool()]
    assert (out - want).norm() < 0.02 * want.norm()


def t5gemma2():
    text = {**SIZES, "sliding_window": 30, "layer_types": ["sliding_attention", "full_attention"]}
    image = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    image |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 16}
    encoder = {"text_config": {**text, "model_type": "t5gemma2_text"}, "vision_config": image}
    config = transformers.T5Gemma2Config(encoder={**encoder, "image_token_index": 49}, decoder=text)
    return transformers.T5Gemma2ForConditionalGeneration(config)


def test_a_model_that_joins_the_mask_to_another():
    """T5Gemma 2's decoder attends to itself and to the encoder at once."""
    torch.manual_seed(0)
    model = t5gemma2().eval()
    inputs = {"input_ids": TOKENS[:, :20] % 49, "decoder_input_ids": TOKENS % 49}
    inputs["decoder_attention_mask"] = LEFT.flip(1)
    found = []
    for name in ("eager", "numflash"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found.append(model(**inputs).logits[inputs["decoder_attention_mask"].bool()])
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_a_model_computes_with_the_dense_mask():
    """As some do with any mask that they have made (Nemotron's streaming ASR)."""
    causal = ours.masking_utils.causal_mask_function
    options = {"q_offset": 5, "attention_mask": None}
    found = function_mask(2, ROWS, ROWS + 5, causal, options)
    dense = found.dense()
    none = torch.zeros(2, 1, ROWS, 3, dtype=torch.bool)
    assert found.dtype == torch.bool and torch.equal(~found, ~dense)
    assert torch.equal(torch.cat([none, found], dim=-1), torch.cat([none, dense], dim=-1))
    assert torch.equal(torch.where(found, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
    assert torch.equal(found == 0, ~dense) and torch.equal(
        found != 0, dense
    )  # where scores are -inf
    assert torch.equal(1.0 * found + 1, 1.0 * dense + 1)
    assert torch.equal(1.0 - found.to(torch.float32), 1.0 - dense.to(torch.float32))
    assert found.to("cpu") is found and found.to(dtype=torch.bool, device="cpu") is found
    assert {found: 1}[found] and found != None  # noqa: E711
    assert not hasattr(found, "no_such_name")
    assert torch.equal(copy.deepcopy(found).dense(), dense)
