"""How many threads a kernel takes for PyTorch."""

from __future__ import annotations

import torch

from ..jit import threads


class pytorch_threads:
    """As many threads for a kernel as PyTorch would take."""

    def __enter__(self) -> None:
        self.before = threads.count()
        self.now = min(torch.get_num_threads(), threads.most())
        if self.now != self.before:
            threads.set_num_threads(self.now)

    def __exit__(self, *error: object) -> None:
        if self.now != self.before:
            threads.set_num_threads(self.before)
