"""`python -m numflash.cuda.study`: climb the ladder in the emulator and print its table."""
from . import climb, table

if __name__ == "__main__":
    print("256 x 256, D = 64, one head, counted by the emulator (not a GPU)\n")
    print(table(climb()))
