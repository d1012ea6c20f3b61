# %% [markdown]
# # 23

# %% [markdown] tags=["map"]
# > **The idea:** Read what the emulator reports, then mend the kernel.
# >
# > **Where you are:** GPU path, stop 6 of 6: [13](13_threads_warps_memory.ipynb) → [14](14_fragments.ipynb) → [15](15_bank_conflicts.ipynb) → [16](16_flash_attention_2.ipynb) → [17](17_hopper.ipynb) → **23**
# >
# > **Time:** 10 minutes to read, 60 for the exercises. **Before it:** [13](13_threads_warps_memory.ipynb), [16](16_flash_attention_2.ipynb).
# >
# > **Terms:** [race](../docs/glossary.md#race), [barrier](../docs/glossary.md#barrier), [bank conflict](../docs/glossary.md#bank-conflict), [parity](../docs/glossary.md#parity), [online softmax](../docs/glossary.md#online-softmax).

# %% tags=["machine"]
from numflash.course import machine

machine()

# %%
