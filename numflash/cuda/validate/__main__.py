"""`python -m numflash.cuda.validate`: compare a card with the emulator, then time it."""

import sys

from .attention import main

sys.exit(main())
