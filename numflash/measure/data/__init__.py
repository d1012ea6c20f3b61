"""Real activations, for the demo and the tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def minilm() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """query, key, value of layer 2 of all-MiniLM-L6-v2, (12 heads, 512 tokens, 32) float16 each.

    See README.md beside this file.
    """
    with np.load(Path(__file__).parent / "minilm_l6_layer2.npz") as stored:
        return stored["query"], stored["key"], stored["value"]
