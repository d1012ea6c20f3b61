"""Write numflash/measure/data/modelled_cycles.json: needs llvm-mca (Debian: apt-get install llvm)."""

import json
from pathlib import Path

from numflash.machinecode.estimate_kernels import CPUS, cycles_per_score
from numflash.machinecode.model import Model

FILE = Path(__file__).parents[1] / "numflash/measure/data/modelled_cycles.json"

if __name__ == "__main__":
    found = {cpu: cycles_per_score(cpu) for cpu in CPUS}
    FILE.write_text(
        json.dumps({"llvm_mca": Model(CPUS[0]).version, **found}, indent=1) + "\n", encoding="utf-8"
    )
    print(FILE.read_text(encoding="utf-8"))
