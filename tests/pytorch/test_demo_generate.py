"""`numflash demo generate` on a small model with random weights: what it prints and returns."""

import pytest

pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")
pytest.importorskip(
    "transformers", reason="needs the transformers extra: pip install 'numflash[transformers]'"
)

from numflash.commands import demo_generate

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
def test_tokens_rates_share_and_memory(dtype, monkeypatch, capsys):
    monkeypatch.setattr(demo_generate, "SHAPE", SMALL)
    monkeypatch.setattr(demo_generate, "weights", lambda: None)
    found = demo_generate.run(None, dtype, tokens=5, prompt=40)
    sdpa, *resident = found["rows"]
    assert [row["cache"] for row in resident] == list(dict.fromkeys([dtype, "float32"]))
    assert resident[-1]["tokens"] == sdpa["tokens"] and len(sdpa["tokens"]) == 5
    for row in resident:
        slots, scale = 256, 4  # what is allocated at first; a float32 beside each token's numbers
        size = {"float32": 4, "float16": 2}[row["cache"]]
        assert row["cache_bytes"] == 2 * 2 * slots * (2 * 16 * size + scale)
        assert row["tokens_per_second"] > 0 and 0 < row["attention_share"] < 1
    printed = capsys.readouterr().out
    assert "a random model" in printed
    assert "times, and no text" in printed and "-- numflash" not in printed
