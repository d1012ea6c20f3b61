# %% [markdown]
# # 23

# %% [markdown] tags=["map"]
# > **The idea:** Change a tile of the shipped kernel: other time, the same bits.
# >
# > **Where you are:** CPU path, stop 7 of 7: [00](00_memory.ipynb) → [01](01_online_softmax.ipynb) → [02](02_tiling.ipynb) → [06](06_register_tile.ipynb) → [07](07_fused.ipynb) → [09](09_threads_causal_gqa.ipynb) → **24**
# >
# > **Time:** 15 minutes to read, 30 for the exercises. **Before it:** [02](02_tiling.ipynb), [07](07_fused.ipynb).
# >
# > **Terms:** [tile](../docs/glossary.md#tile), [working set](../docs/glossary.md#working-set), [equal bits](../docs/glossary.md#equal-bits), [register tile](../docs/glossary.md#register-tile).

# %% tags=["machine"]
from numflash.course import machine

machine()

# %%
