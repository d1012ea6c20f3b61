"""`python -m numflash.cuda.compile`: kernels and the emulator's results into a folder.

What the folder is to hold is known to `validate`, which is above this folder: imported by name.
"""

import importlib
import sys

if __name__ == "__main__":  # processes that compile import this module too
    sys.exit(importlib.import_module("numflash.cuda.validate.build").main())
