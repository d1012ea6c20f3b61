"""numflash.transformers against the eager implementation, on small models with random weights."""

import copy
import doctest
import os
import pickle
import subprocess
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")
transformers = pytest.importorskip(
    "transformers", reason="needs the transformers extra: pip install 'numflash[transformers]'"
)

import numflash.transformers as nt
from numflash.cpu import launch
from numflash.dispatch import plan_store
from numflash.errors import ArgumentError, UnsupportedError
from numflash.transformers.attention import attend
from numflash.transformers.release import check_release

nt.register()
SMALL = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
CAUSAL = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GROUPED)),
    "mistral, window 12": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**GROUPED, sliding_window=12)
    ),
    "gemma2, soft cap, window 12": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **GROUPED,
            head_dim=16,
            sliding_window=12,
            attn_logit_softcapping=5.0,
            query_pre_attn_scalar=1,
        )
    ),
    "gpt-oss, sinks, window 12": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **GROUPED, head_dim=16, sliding_window=12, num_local_experts=2, num_experts_per_tok=2
        )
    ),
}
TOKENS = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=CAUSAL)
def model(request):
    torch.manual_seed(0)
    made = CAUSAL[request.param]().eval()
    for name, weight in made.named_parameters():  # far from uniform attention: scores of some units
        if "q_proj.weight" in name or "k_proj.weight" in name:
            weight.data.mul_(12)
        if name.endswith("sinks"):
            weight.data.normal_()
    return made


def padded(side, lengths=(40, 27)):
    """Attention mask with padding on one side."""
    at = torch.arange(40)
    n = torch.tensor(lengths)[:, None]
    return (at < n if side == "right" else at >= 40 - n).long()


def both(model, run, name="numflash"):
    """What a run gives with the eager implementation, and with this one.

    And how often numflash's kernels ran.
    """
    calls = []
    kernels = launch.run
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = run()
        model.set_attn_implementation(name)
        with pytest.MonkeyPatch.context() as patch:
            # a prepared call does not come by `launch.run`
            patch.setattr(plan_store.runners, "get", lambda call: None)
            patch.setattr(
                launch,
                "run",
                lambda problem, **options: calls.append(problem) or kernels(problem, **options),
            )
            out = run()
    return out, want, calls


def test_an_older_release_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.19.3")
    with pytest.raises(
        UnsupportedError, match=r"transformers: got release 5\.19\.3; allowed: 5\.20"
    ):
        check_release()


@pytest.mark.parametrize("absent", ["torch", "transformers"])
def test_a_missing_package_names_the_extra(absent):
    code = f"import sys; sys.modules[{absent!r}] = None; import numflash.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ModuleNotFoundError: numflash.transformers: " in done.stderr
    assert absent in done.stderr and "pip install 'numflash[transformers]'" in done.stderr


def test_the_docstring_of_the_module():
    assert doctest.testmod(nt).failed == 0


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_logits(model, side):
    mask = None if side == "none" else padded(side)
    out, want, calls = both(model, lambda: model(TOKENS, attention_mask=mask).logits)
    seen = torch.ones(2, 40, dtype=torch.bool) if mask is None else mask.bool()
    assert len(calls) == 2 and all(p.precision == "float32" and p.key.shape[1] == 2 for p in calls)
    torch.testing.assert_close(out[seen], want[seen], atol=1e-4, rtol=1e-4)


def test_int8_logits(model):
    out, want, calls = both(model, lambda: model(TOKENS).logits, "numflash_int8")
    assert len(calls) == 2 and all((p.precision, p.pv) == ("int8", "int8") for p in calls)
    difference = (out - want).norm() / want.norm()
    # sharpened scores: 0.026 to 0.030 measured; gpt-oss 0.048, whose router weighs its experts by them
    assert 0.01 < difference < (0.07 if model.config.model_type == "gpt_oss" else 0.04)


def test_weights_of_15_bits_by_name():
    """Of a prompt, also over a cache of numflash's own."""
    torch.manual_seed(0)
    llama = CAUSAL["llama"]().eval()
    for cached in (False, True):

        def run(cached=cached):
            given = cached and llama.config._attn_implementation != "eager"
            cache = nt.ResidentCache(llama.config, "int8") if given else None
            return llama(TOKENS, **{nt.CACHE_ARGUMENT: cache}, use_cache=given).logits

        out, want, calls = both(llama, run, "numflash_int8_pv_int16")
        assert [(p.precision, p.pv) for p in calls] == [("int8", "int16")] * 2
        assert 0 < (out - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("padding", [False, True])
def test_generation_with_a_cache(model, padding):
    """Greedy: equal tokens, one layer call per layer and token."""
    options = {
        "max_new_tokens": 20,
        "do_sample": False,
        "attention_mask": padded("left") if padding else torch.ones_like(TOKENS),
    }
    out, want, calls = both(model, lambda: model.generate(TOKENS, **options))
    assert out.shape == (2, 60) and len(calls) == 40
    assert torch.equal(out, want)


@pytest.mark.parametrize("padding", [False, True])
def test_static_cache(model, padding):
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": "static",
        "disable_compile": True,
        "attention_mask": padded("left") if padding else torch.ones_like(TOKENS),
    }
    out, want, calls = both(model, lambda: model.generate(TOKENS, **options))
    assert calls and torch.equal(out, want)


def test_beams_and_packed_sequences():
    """Caches that are reordered.

    Several sequences in one row, told apart by their positions alone.
    """
    torch.manual_seed(0)
    model = CAUSAL["llama"]().eval()
    out, want, _ = both(
        model,
        lambda: model.generate(
            TOKENS, max_new_tokens=6, do_sample=False, num_beams=3, attention_mask=padded("left")
        ),
    )
    assert torch.equal(out, want)
    positions = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, -1)
    out, want, calls = both(model, lambda: model(TOKENS, position_ids=positions).logits)
    assert len(calls) == 2
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_autocast_copies_and_saved_models(tmp_path):
    torch.manual_seed(0)
    model = CAUSAL["llama"]().eval()

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(TOKENS).logits.float()

    out, want, calls = both(model, run)
    assert all(p.precision == "bfloat16" for p in calls)
    torch.testing.assert_close(out, want, atol=0.03, rtol=0.03)
    with torch.no_grad():
        logits = model(TOKENS).logits
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="numflash"
        ).eval()
        for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
            assert same.config._attn_implementation == "numflash" and torch.equal(
                same(TOKENS).logits, logits
            )


def test_training(model):
    """Gradients of every parameter, gpt-oss' sinks among them."""

    def step(name):
        model.set_attn_implementation(name)
        model.zero_grad()
        model(
            TOKENS,
            attention_mask=padded("right"),
            labels=TOKENS.where(padded("right").bool(), -100),
        ).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want = step("eager")
    for mine, right in zip(step("numflash"), want, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-4 * right.abs().max().item() + 1e-6, rtol=0)


def bert(**options):
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SMALL, **options)).eval()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["numflash", "numflash_int8"])
def test_bidirectional_padding(side, name):
    """Trailing padding arrives at the kernels as key lengths, leading padding as a mask of one row."""
    encoder = bert()
    out, want, calls = both(
        encoder, lambda: encoder(TOKENS, attention_mask=padded(side)).last_hidden_state, name
    )
    seen = padded(side).bool()
    torch.testing.assert_close(
        out[seen], want[seen], atol=1e-5 if name == "numflash" else 0.05, rtol=0
    )
    assert len(calls) == 2
    for problem in calls:
        if side == "right":
            assert problem.mask is None and problem.key_lengths.tolist() == [40, 27]
        else:
            assert problem.mask.strides[1:3] == (0, 0)


def test_position_biases():
    """T5 adds a learned bias to the scores of encoder and decoder, whose cross attention sees
    padding.
    """
    torch.manual_seed(0)
    model = transformers.T5Model(
        transformers.T5Config(
            vocab_size=97, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4
        )
    ).eval()

    def run():
        return model(
            input_ids=TOKENS, attention_mask=padded("right"), decoder_input_ids=TOKENS[:, :9]
        ).last_hidden_state

    out, want, calls = both(model, run)
    assert len(calls) == 6
    torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)

    def step(name):
        model.set_attn_implementation(name)
        model.zero_grad()
        (run() * torch.linspace(-1, 1, 64)).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    wanted, found = step("eager"), step("numflash")
    assert sum("relative_attention_bias" in name and x.any() for name, x in found.items()) == 2
    for name, right in wanted.items():
        torch.testing.assert_close(
            found[name], right, atol=1e-4 * right.abs().max().item() + 1e-6, rtol=0
        )


def test_half_precision():
    torch.manual_seed(0)
    model = CAUSAL["llama"]().eval().bfloat16()
    out, want, calls = both(model, lambda: model(TOKENS).logits)
    assert all(p.precision == "bfloat16" for p in calls)
    torch.testing.assert_close(out.float(), want.float(), atol=0.05, rtol=0.05)


def test_what_is_refused():
    encoder = bert()
    encoder.set_attn_implementation("numflash")
    with pytest.raises(ArgumentError, match=r"dropout.*'sdpa' or 'eager' train with it"):
        encoder.train()(TOKENS)
    encoder.set_attn_implementation("numflash_int8")
    with pytest.raises(ArgumentError, match=r"int8.*grad"):
        encoder.eval()(TOKENS)
    layer = torch.nn.Module()
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(ArgumentError, match="output_attentions"):
        attend(layer, x, x, x, None, output_attentions=True)
    with pytest.raises(ArgumentError, match="cache"):
        attend(layer, x, x, x, None, cache=object())


@pytest.mark.parametrize(
    ("name", "instead"),
    [("indices", "'eager', or 'sdpa'"), ("block_indices", "or 'sdpa'"), ("sinks", "'eager'$")],
)
def test_keys_or_sinks_of_each_query_are_refused(name, instead):
    """Models that choose keys put them into the mask for 'eager' and 'sdpa' only."""
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ArgumentError, match=f"{name}: got one.*take .*{instead}"):
        attend(torch.nn.Identity(), x, x, x, None, **{name: torch.zeros(1, 2, 4, 1)})


def test_models_that_change_their_mask_are_refused():
    layer, x = torch.nn.Identity(), torch.randn(1, 2, 4, 8)
    layer.config = transformers.DogeConfig()
    with pytest.raises(ArgumentError, match=r"'doge', which changes its mask .*'sdpa' or 'eager'"):
        attend(layer, x, x, x, None)


def test_sequences_that_lengths_alone_tell_apart_are_refused():
    """FlashAttention's way of packing; with positions there is a mask."""
    torch.manual_seed(0)
    model = CAUSAL["llama"]().eval()
    lengths = torch.tensor([0, 15, 40], dtype=torch.int32)
    packed = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    packed |= {"max_length_q": 25, "max_length_k": 25}
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    ids = TOKENS[:1]

    def run():
        return model(ids, position_ids=positions, use_cache=False, **packed).logits

    out, _, _ = both(model, run)
    with torch.no_grad():
        alone = torch.cat([model(x, use_cache=False).logits for x in ids.split([15, 25], 1)], 1)
        torch.testing.assert_close(out, alone, atol=1e-5, rtol=1e-5)
        for options in ({"use_cache": False}, {"position_ids": positions, "use_cache": True}):
            with pytest.raises(
                ArgumentError, match=r"cu_seq_lens_q: got 2 sequences.*position_ids"
            ):
                model(ids, **options, **packed)
    encoder, x = torch.nn.Identity(), torch.randn(1, 2, 4, 8)
    every = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, 4, 4)
    with pytest.raises(ArgumentError, match="cu_seq_lens_q"):
        attend(encoder, x, x, x, every, cu_seq_lens_q=lengths)


@pytest.mark.parametrize("mask", [None, "ones", "padding"])
def test_encoders_that_do_not_say_whether_they_are_causal(mask):
    """None would mean causal to them."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ClapTextConfig(**sizes, intermediate_size=64, max_position_embeddings=64)
    model = transformers.ClapTextModel(config).eval()
    ids = torch.randint(2, 97, (2, 20))
    given = None if mask is None else torch.ones_like(ids)
    if mask == "padding":
        given[1, 13:] = 0
    found = {}
    for name in ("eager", "numflash"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found[name] = model(ids, attention_mask=given).last_hidden_state
    seen = torch.ones_like(ids).bool() if given is None else given.bool()
    torch.testing.assert_close(found["numflash"][seen], found["eager"][seen], atol=1e-4, rtol=1e-4)


def test_a_decoder_that_says_it_is_not_causal():
    sizes = {"vocab_size": 97, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4}
    config = transformers.BigBirdPegasusConfig(
        **sizes, decoder_ffn_dim=64, max_position_embeddings=64, is_encoder_decoder=False
    )
    model = transformers.BigBirdPegasusForCausalLM(config).eval()
    found = {}
    for name in ("eager", "numflash"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found[name] = model(torch.arange(2, 22)[None]).logits
    torch.testing.assert_close(found["numflash"], found["eager"], atol=1e-4, rtol=1e-4)


def test_models_with_an_attention_of_their_own_are_refused():
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=4)
    with pytest.raises(ArgumentError, match="BloomForCausalLM, which has an attention of its own"):
        transformers.BloomForCausalLM._from_config(config, attn_implementation="numflash")


def test_a_language_model_inside_of_a_model_with_an_attention_of_its_own():
    """Refused as a whole, where the error names the call that reaches the language model."""
    text = transformers.Qwen2Config(**GROUPED).to_dict()
    image = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 32}
    image |= {"image_size": 64, "global_attn_indexes": [], "window_size": 2, "output_channels": 32}
    config = transformers.GotOcr2Config(text_config=text, vision_config=image, image_token_id=96)
    kind = transformers.GotOcr2ForConditionalGeneration
    with pytest.raises(ArgumentError, match=r"of its own.*set_attn_implementation\('numflash'\)"):
        kind._from_config(config, attn_implementation="numflash")
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager").eval()
    out, want, calls = both(model, lambda: model(TOKENS % 96, attention_mask=padded("left")).logits)
    assert len(calls) == 2
    seen = padded("left").bool()
    torch.testing.assert_close(out[seen], want[seen], atol=1e-4, rtol=1e-4)
