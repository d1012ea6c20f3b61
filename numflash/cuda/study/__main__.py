"""`python -m numflash.cuda.study`.

Climb the ladder in the emulator, time it where there is a card, and print its table.
"""

import argparse

from ...errors import UnsupportedError
from ...interop.arguments import EMULATED
from . import climb, clock, table

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m numflash.cuda.study")
    parser.add_argument(
        "--arch",
        choices=EMULATED,
        help="build the rungs for it, as far as it has their instructions",
    )
    arch = parser.parse_args().arch
    seconds = None
    try:
        seconds, where = clock(), "times of 4096 x 4096 on this machine's card"
    except UnsupportedError:
        where = "no card here, so no times"
    print(f"256 x 256, D = 64, one head, counted by the emulator; {where}\n")
    print(table(climb(arch=arch), seconds))
