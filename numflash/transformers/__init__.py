"""numflash as an attention implementation of Hugging Face transformers.

>>> import torch, transformers, numflash.transformers
>>> numflash.transformers.register()
>>> config = transformers.LlamaConfig(vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
...                                   num_attention_heads=4, num_key_value_heads=2)
>>> model = transformers.LlamaForCausalLM(config).eval()
>>> tokens = torch.arange(20)[None]
>>> with torch.no_grad():
...     model.set_attn_implementation("eager")
...     eager = model(tokens).logits
...     model.set_attn_implementation("numflash")
...     torch.allclose(model(tokens).logits, eager, atol=1e-5)
True

Or from the start: `AutoModel.from_pretrained(name, attn_implementation="numflash")`.
"numflash_int8" computes the attention in integers and is for inference, "numflash_int8_pv_int16" with
weights of 15 bits (`pv` of `numflash.attention`). All serve every model that
uses transformers' attention interface: causal and bidirectional, grouped heads, padding on either
side, caches, sliding windows, soft caps (Gemma 2), sinks (gpt-oss), and position biases.

What they cannot serve raises `ArgumentError`: dropout, attention weights as an output, the paged
cache of continuous batching.
"""

from .release import check_release

check_release()

from .attention import register  # noqa: E402
from .by_name import CACHE_ARGUMENT  # noqa: E402
from .resident import ResidentCache  # noqa: E402

__all__ = ["CACHE_ARGUMENT", "ResidentCache", "register"]
