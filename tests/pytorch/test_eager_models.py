"""Models that transformers refuses "sdpa", which keep to nothing but what "eager" gives them."""

import os
import pickle

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")
transformers = pytest.importorskip(
    "transformers", reason="needs the transformers extra: pip install 'numflash[transformers]'"
)

import numflash.transformers as nt
from numflash.cpu import launch
from numflash.dispatch import plan_store
from numflash.transformers import eager_models

nt.register()
IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 7:] = 0
SIZES = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48,
}  # fmt: skip
VISION = {"hidden_size": 32, "image_size": 32, "patch_size": 8, "num_hidden_layers": 2}
BOTH = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
}  # fmt: skip
TEXTS = {"vocab_size": 100, **BOTH}
SERIES = {
    "past_values": torch.randn(2, 14), "past_time_features": torch.randn(2, 14, 1),
    "past_observed_mask": torch.ones(2, 14), "future_values": torch.randn(2, 8),
    "future_time_features": torch.randn(2, 8, 1),
}  # fmt: skip
PADDED = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :5]}


def git():
    vision = {**VISION, "intermediate_size": 48, "num_attention_heads": 2}
    return transformers.GitConfig(**SIZES, vision_config=vision)


def bridgetower():
    sizes = {**SIZES, "hidden_size": 64}  # the image tower's heads have 64 channels
    text, vision = ({**x, "num_hidden_layers": 3, "hidden_size": 64} for x in (SIZES, VISION))
    return transformers.BridgeTowerConfig(**sizes, text_config=text, vision_config=vision)


def informer(distil):
    return transformers.InformerConfig(
        **BOTH, prediction_length=8, context_length=12, lags_sequence=[1, 2], num_time_features=1,
        distil=distil,
    )  # fmt: skip


# name -> class, configuration, inputs, calls of numflash's kernels; the reason why None or a bool mask is wrong
MODELS = {
    # text layers of a class of its own, which adds the mask
    "git": ("GitForCausalLM", git, {"input_ids": IDS, "attention_mask": MASK}, 0),
    # the decoder says is_causal=False
    "nllb_moe": (
        "NllbMoeModel",
        lambda: transformers.NllbMoeConfig(**TEXTS, encoder_sparse_step=0, decoder_sparse_step=0),
        PADDED,
        6,
    ),
    "pegasus_x": (
        "PegasusXModel",
        lambda: transformers.PegasusXConfig(**TEXTS, block_size=4, num_global_tokens=2),
        PADDED,
        4,
    ),
    "informer": ("InformerModel", lambda: informer(False), SERIES, 2),
    # and its encoder halves the sequence between layers, and the mask not
    "informer, distil": ("InformerModel", lambda: informer(True), SERIES, 2),
    # the encoder's class adds the mask
    "bigbird_pegasus": (
        "BigBirdPegasusModel",
        lambda: transformers.BigBirdPegasusConfig(**TEXTS, attention_type="original_full"),
        PADDED,
        4,
    ),
    # layers across text and image say is_causal=True, and give None for all keys
    "bridgetower": (
        "BridgeTowerModel",
        bridgetower,
        {"input_ids": IDS, "attention_mask": MASK, "pixel_values": torch.randn(2, 3, 32, 32)},
        11,
    ),
    # a class that asks for the mask's least number
    "gemma4_audio": (
        "Gemma4AudioModel",
        lambda: transformers.Gemma4AudioConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=16
        ),
        {
            "input_features": torch.randn(2, 64, 128),
            "attention_mask": torch.arange(64) < torch.tensor([[64], [40]]),
        },
        0,
    ),
}


def output(model, inputs):
    with torch.no_grad():
        found = model(**inputs)
    for name in ("logits", "last_hidden_state", "image_features"):
        if getattr(found, name, None) is not None:
            yield name, found[name]


def made(name, implementation="eager"):
    kind, config, inputs, calls = MODELS[name]
    torch.manual_seed(0)
    if kind == "Gemma4AudioModel":
        kind = pytest.importorskip("transformers.models.gemma4.modeling_gemma4").Gemma4AudioModel
    else:
        kind = getattr(transformers, kind)
    model = kind._from_config(config(), attn_implementation=implementation).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model, inputs, calls


@pytest.mark.parametrize("name", MODELS)
def test_as_eager(name, monkeypatch):
    model, inputs, wanted_calls = made(name)
    wanted = dict(output(model, inputs))
    problems = []
    monkeypatch.setattr(plan_store.runners, "get", lambda call: None)
    monkeypatch.setattr(
        launch, "run", lambda p, f=launch.run, **options: problems.append(p) or f(p, **options)
    )
    model.set_attn_implementation("numflash")
    found = dict(output(model, inputs))
    assert wanted and len(problems) == wanted_calls
    for which, x in wanted.items():
        torch.testing.assert_close(found[which], x, atol=1e-4, rtol=1e-4, msg=which)


def test_built_with_the_name_and_from_a_pickle(monkeypatch):
    """GIT knows no class for our name; a model from a pickle has never been asked to take it."""
    inputs = MODELS["git"][2]
    models = [made("git", name)[0] for name in ("eager", "numflash")]
    assert models[1].config._attn_implementation == "numflash"
    monkeypatch.setattr(eager_models, "_known", {})
    models.append(pickle.loads(pickle.dumps(models[1])))
    wanted, *others = (dict(output(model, inputs))["logits"] for model in models)
    for found in others:
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_padding_is_still_key_lengths(monkeypatch):
    """A float mask of one row for all queries; another float row is a bias, and stays one."""
    problems = []
    monkeypatch.setattr(plan_store.runners, "get", lambda call: None)
    monkeypatch.setattr(
        launch, "run", lambda p, f=launch.run, **options: problems.append(p) or f(p, **options)
    )
    model, inputs, _ = made("nllb_moe", "numflash")
    dict(output(model, inputs))
    lengths = [p.key_lengths.tolist() for p in problems if p.key.shape[2] == 12 and p.mask is None]
    assert lengths == [[12, 7]] * 4  # the encoder's layers, and the decoder's over its output
    row = torch.tensor([0.0, -1.0, torch.finfo(torch.float32).min]).expand(1, 1, 4, 3)
    assert eager_models.as_padding(row) is row


def test_long_prompts(monkeypatch):
    """From 512 rows on masks of other models are functions, which nothing can be added to."""
    model, _, _ = made("git")
    model.config.max_position_embeddings = 600
    ids = IDS.repeat(1, 43)
    mask = torch.ones_like(ids)
    mask[1, :100] = 0
    assert eager_models.eager_only(model.config)
    found = nt.attention.mask(
        2, 516, 516, attention_mask=mask.bool(), config=model.config, dtype=torch.float32
    )
    assert isinstance(found, torch.Tensor) and found.is_floating_point()
    assert not eager_models.eager_only(transformers.LlamaConfig())
