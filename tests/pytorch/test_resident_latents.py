"""`ResidentCache` for models that cache latents, beyond what `test_resident` does with every model."""

import copy
import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")
transformers = pytest.importorskip(
    "transformers", reason="needs the transformers extra: pip install 'numflash[transformers]'"
)

import numflash.transformers as nt
from numflash.errors import ArgumentError
from numflash.transformers import latent_layer

nt.register()
HEADS, RANK, ROPE, NOPE, VALUE = 4, 32, 8, 16, 20
TOKENS = torch.randint(1, 97, (2, 300), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.MiniCPM3Config(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=24, kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    made = transformers.MiniCPM3ForCausalLM(config).eval()
    for name, weight in made.named_parameters():  # far from uniform attention
        if "_b_proj.weight" in name:
            weight.data.mul_(8)
    return made


def logits(model, implementation, cache, pieces, mask=None):
    """Of all tokens, read in pieces."""
    model.set_attn_implementation(implementation)
    found, seen = [], 0
    for piece in pieces:
        seen += piece.shape[1]
        options = {} if mask is None else {"attention_mask": mask[:, :seen]}
        with torch.no_grad():
            out = model(piece, **{nt.CACHE_ARGUMENT: cache}, use_cache=True, **options)
        found.append(out.logits)
    return torch.cat(found, 1)


def dynamic(model):
    return transformers.DynamicCache(config=model.config)


@pytest.mark.parametrize("padded", [False, True])
def test_a_past_is_attended_to_as_it_is_or_expanded(model, padded):
    """The third and the last pieces are absorbed, the second is long enough to be expanded."""
    pieces = TOKENS.split([100, 1 + latent_layer.FEW_TOKENS, 20, *[1] * 51], 1)
    mask = (torch.arange(300) >= torch.tensor([0, 37])[:, None]).long() if padded else None
    wanted = logits(model, "eager", dynamic(model), pieces, mask)
    found = logits(model, "numflash", nt.ResidentCache(model.config, "float32"), pieces, mask)
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(found[real], wanted[real], atol=1e-3, rtol=1e-4)


def test_pieces_of_nothing_but_padding(model):
    """Of every sequence, at the start: there is no latent to expand, or to absorb, then."""
    pieces = TOKENS[:, :60].split([1, 20, 1, 30, *[1] * 8], 1)
    mask = (torch.arange(60) >= torch.tensor([22, 37])[:, None]).long()
    wanted = logits(model, "eager", dynamic(model), pieces, mask)
    found = logits(model, "numflash", nt.ResidentCache(model.config, "float32"), pieces, mask)
    real = mask.bool()
    torch.testing.assert_close(found[real], wanted[real], atol=1e-3, rtol=1e-4)


def test_a_file_and_a_copy_go_on_with_the_same_bits(model, tmp_path):
    cache = nt.ResidentCache(model.config, "int8")
    logits(model, "numflash", cache, [TOKENS[:, :60]])
    cache.save(tmp_path / "latents.npz")
    others = cache.copy(), nt.ResidentCache.load(tmp_path / "latents.npz", model.config)
    wanted = logits(model, "numflash", cache, TOKENS[:, 60:66].split(1, 1))
    for each in others:
        found = logits(model, "numflash", each, TOKENS[:, 60:66].split(1, 1))
        assert torch.equal(found, wanted)


def test_what_is_stored(model):
    cache = nt.ResidentCache(model.config, "float32", max_length=512)
    logits(model, "numflash", cache, [TOKENS])
    store = cache.layers[0].store
    assert (store.kv_heads, store.head_dim, store.value_dim) == (1, RANK + ROPE, RANK)
    assert cache.nbytes <= 2 * 2 * 512 * 4 * (RANK + ROPE + 8)


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.05), ("int8", 0.15)])
def test_other_storage(model, dtype, limit):
    pieces = TOKENS.split([280, *[1] * 20], 1)
    wanted = logits(model, "eager", dynamic(model), pieces)
    found = logits(model, "numflash", nt.ResidentCache(model.config, dtype), pieces)
    assert 1e-4 < float((found - wanted).norm() / wanted.norm()) < limit


def test_a_model_in_bfloat16(model):
    pieces = TOKENS.split([290, *[1] * 10], 1)
    wanted = logits(model, "eager", dynamic(model), pieces)
    half = transformers.MiniCPM3ForCausalLM(model.config).eval()
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    errors = []
    for implementation, cache in (
        ("eager", dynamic(half)),
        ("numflash", nt.ResidentCache(half.config, "bfloat16")),
    ):
        found = logits(half, implementation, cache, pieces).float()
        errors.append(float((found - wanted).norm() / wanted.norm()))
    assert errors[1] < 1.5 * errors[0]


def test_int8_keeps_latents_and_rotated_keys_of_any_size(model):
    """Rotated keys 256 times as large and their queries as small: the same attention."""
    pieces = TOKENS.split([1, 100, 100, 79, *[1] * 20], 1)  # all absorbed
    wanted = logits(model, "eager", dynamic(model), pieces)
    errors = []
    for factor in (1, 256, 1 / 256):
        other = transformers.MiniCPM3ForCausalLM(model.config).eval()
        other.load_state_dict(model.state_dict())
        for layer in other.model.layers:
            attention = layer.self_attn
            attention.kv_a_proj_with_mqa.weight.data[RANK:] *= factor
            rows = attention.q_b_proj.weight.data.view(HEADS, NOPE + ROPE, -1)
            rows[:, NOPE:] /= factor
        found = logits(other, "numflash", nt.ResidentCache(other.config, "int8"), pieces)
        errors.append(float((found - wanted).norm() / wanted.norm()))
    assert max(errors) < 1.3 * min(errors)


@pytest.mark.parametrize("chunk", [50, 20])
def test_padding_does_not_say_how_large_latents_are(model, chunk):
    """Most of the first piece is padding, or all of it; rotated keys are 16 times as large."""
    other = transformers.MiniCPM3ForCausalLM(model.config).eval()
    other.load_state_dict(model.state_dict())
    for layer in other.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.weight.data[RANK:] *= 16
    tokens = TOKENS[:1, :60]
    padding = torch.zeros(1, 40, dtype=tokens.dtype)
    mask = torch.cat((torch.zeros_like(padding), torch.ones_like(tokens)), 1)
    found = []
    for ids, given in ((tokens, None), (torch.cat((padding, tokens), 1), mask)):
        cache = nt.ResidentCache(other.config, "int8")
        logits(other, "numflash", cache, ids.split(chunk, 1), given)
        found.append([layer._balance for layer in cache.layers])
    assert found[0] == found[1] and max(found[0]) < 1


class Adapted(torch.nn.Linear):
    """A projection whose weight alone does not say what it computes."""

    factor = 1.5

    def forward(self, x):
        return self.factor * super().forward(x)


@pytest.mark.parametrize("kind", [Adapted, torch.nn.Linear])
@pytest.mark.parametrize("bias", [False, True])
def test_other_projections(model, kind, bias):
    """What adds something to what it makes of a latent is not absorbed: the past is expanded."""
    other = transformers.MiniCPM3ForCausalLM(model.config).eval()
    other.load_state_dict(model.state_dict())
    for layer in other.model.layers:
        plain = layer.self_attn.kv_b_proj
        made = kind(plain.in_features, plain.out_features, bias=bias)
        made.weight = plain.weight
        if bias:
            torch.nn.init.normal_(made.bias)
        layer.self_attn.kv_b_proj = made
    pieces = TOKENS.split([290, *[1] * 10], 1)
    wanted = logits(other, "eager", dynamic(other), pieces)
    found = logits(other, "numflash", nt.ResidentCache(other.config, "float32"), pieces)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-4)
    if bias or kind is Adapted:
        assert not torch.allclose(wanted, logits(model, "eager", dynamic(model), pieces), atol=0.1)


@pytest.mark.parametrize("way", ["hook", "hook before", "forward"])
def test_a_projection_that_something_else_changes(model, way):
    """By a hook, or with a `forward` of its own, as accelerate's offloading gives it."""
    other = transformers.MiniCPM3ForCausalLM(model.config).eval()
    other.load_state_dict(model.state_dict())
    for layer in other.model.layers:
        projection = layer.self_attn.kv_b_proj
        if way == "hook":
            projection.register_forward_hook(lambda module, inputs, output: 1.5 * output)
        elif way == "hook before":
            projection.register_forward_pre_hook(lambda module, inputs: (1.5 * inputs[0],))
        else:
            projection.forward = lambda x, plain=projection.forward: 1.5 * plain(x)
    pieces = TOKENS[:, :40].split([30, *[1] * 10], 1)
    wanted = logits(other, "eager", dynamic(other), pieces)
    found = logits(other, "numflash", nt.ResidentCache(other.config, "float32"), pieces)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-4)


def test_an_adapter_that_is_switched_off_before_a_reset(model):
    """What a cache has made of an adapted projection is not that of the projection without it."""
    other = transformers.MiniCPM3ForCausalLM(model.config).eval()
    other.load_state_dict(model.state_dict())
    for layer in other.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Adapted
    pieces = TOKENS[:, :40].split([30, *[1] * 10], 1)
    cache = nt.ResidentCache(other.config, "float32")
    logits(other, "numflash", cache, pieces)
    for layer in other.model.layers:
        layer.self_attn.kv_b_proj.factor = 1
    cache.reset()
    found = logits(other, "numflash", cache, pieces)
    wanted = logits(other, "eager", dynamic(other), pieces)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-4)


def test_other_caches_go_on_as_before(model):
    """After a resident cache has replaced `expand_kv`."""
    logits(model, "numflash", nt.ResidentCache(model.config, "float32"), [TOKENS[:, :20]])
    pieces = TOKENS[:, :40].split([30, *[1] * 10], 1)
    wanted = logits(model, "eager", dynamic(model), pieces)
    torch.testing.assert_close(
        logits(model, "numflash", dynamic(model), pieces), wanted, atol=1e-3, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", ["int4", "float16"])
def test_storage_that_latents_do_not_have(model, dtype):
    with pytest.raises(
        ArgumentError, match=f"dtype: got '{dtype}' for a model that caches latents"
    ):
        logits(model, "numflash", nt.ResidentCache(model.config, dtype), [TOKENS[:, :5]])


@pytest.mark.parametrize("n", [30, 3])
def test_a_model_that_expands_before_it_caches(model, n):
    """As transformers did: keys and values of every head come to the cache."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    cache = nt.ResidentCache(config, "float32")
    layer = cache.layers[0]
    key, value = torch.randn(1, HEADS, 50, NOPE + ROPE), torch.randn(1, HEADS, 50, VALUE)
    query = torch.randn(1, HEADS, 50, NOPE + ROPE)
    found = []
    for piece in (slice(0, n), slice(n, 50)):
        cache.update(key[:, :, piece], value[:, :, piece], 0)
        options = {"scale": None, "softcap": 0.0, "sinks": None, "pv": None}
        found.append(layer.attend(query[:, :, piece], None, None, **options))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(torch.cat(found, 2), wanted, atol=1e-5, rtol=1e-5)
    assert not layer.latent and layer.store.kv_heads == HEADS
