"""`python -m numflash.cuda.study`: climb the ladder in the emulator, time it where there is a card, and print its table."""

from ...errors import UnsupportedError
from . import climb, clock, table

if __name__ == "__main__":
    seconds = None
    try:
        seconds, where = clock(), "times of 4096 x 4096 on this machine's card"
    except UnsupportedError:
        where = "no card here, so no times"
    print(f"256 x 256, D = 64, one head, counted by the emulator; {where}\n")
    print(table(climb(), seconds))
