"""An emulated AArch64 Python that calls functions for this one.

What compares (the integer model, the oracle, the quantiser) runs 15 times slower in an emulator and
is not what is tested there, so a test runs here and has only its kernels run there:

    guest = Guest("a64fx")
    out, lse = guest.call(launch.run, problem, "sve")

Functions go over by name and must be importable on both sides; arguments and results are pickled.
"""

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
# of tools/aarch64/setup.sh; make test-aarch64 sets it
ENVIRONMENT = os.environ.get("AARCH64_ENV")


class Guest:
    """A process of the emulated Python as one CPU; calls of several threads wait for each other."""

    def __init__(self, cpu):
        path = (ROOT, ROOT / "tests", ROOT / "tests/cpu", ROOT / "tools/aarch64")
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [f"{ENVIRONMENT}/guest-python", "-m", "aarch64.guest"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "GUEST_CPU": cpu, "PYTHONPATH": ":".join(map(str, path))},
        )

    def call(self, function, *args):
        """function(*args) over there; what it raises is raised here."""
        with self._lock:
            pickle.dump((function, args), self._process.stdin)
            self._process.stdin.flush()
            result, error = pickle.load(self._process.stdout)
        if error is not None:
            raise error
        return result

    def close(self):
        self._process.communicate()


def serve():
    """The emulated side: calls until its input ends."""
    import compile_outside  # noqa: F401  (which has LLVM run outside)

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what functions print is no answer
    while True:
        try:
            function, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = function(*args), None
        except Exception as error:
            answer = None, error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
