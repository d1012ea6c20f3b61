"""`python -m numflash.cuda.validate`: compare a card with the emulator, then time it."""

import sys

from .run import main

if __name__ == "__main__":  # processes that compile import this module too
    sys.exit(main())
