"""What an emulated run did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Report:
    """Counters of one emulated launch (all blocks). Bytes are what the threads asked for.

    Sectors are 32-byte pieces of memory.

    Attributes
    ----------
    instructions : warp-instructions by class: "tensor", "float", "integer", "special", "memory",
        "asynchronous", "control", "move"
    global_loaded, global_stored : bytes;  global_load_sectors, global_store_sectors : 32-byte
        sectors moved
    shared_loaded, shared_stored : bytes;  shared_wavefronts : passes over the banks;
        shared_conflicts : passes beyond the least
    async_copied, tma_copied : bytes written to shared memory, by a multicast copy in several blocks;
        tensor_operations : warp-level products;  tensor_flops : multiplications and additions
    barriers : arrivals of warps at block barriers
    """

    blocks: int = 0
    threads: int = 0
    seconds: float = 0.0
    instructions: dict[str, int] = field(default_factory=dict)
    opcodes: dict[str, int] = field(default_factory=dict)
    global_loaded: int = 0
    global_stored: int = 0
    global_load_sectors: int = 0
    global_store_sectors: int = 0
    shared_loaded: int = 0
    shared_stored: int = 0
    shared_wavefronts: int = 0
    shared_conflicts: int = 0
    async_copied: int = 0
    tma_copied: int = 0
    tensor_operations: int = 0
    tensor_flops: int = 0
    barriers: int = 0

    def __str__(self) -> str:
        lines = [f"emulator: {self.blocks} blocks of {self.threads} threads"]
        total = sum(self.instructions.values())
        mix = ", ".join(
            f"{k} {v}" for k, v in sorted(self.instructions.items(), key=lambda x: -x[1])
        )
        lines.append(f"  warp-instructions  {total}: {mix}")
        lines.append(
            f"  global memory      {self.global_loaded} B in {self.global_load_sectors} sectors read, "
            f"{self.global_stored} B in {self.global_store_sectors} sectors written"
        )
        written = self.shared_stored + self.async_copied + self.tma_copied
        lines.append(
            f"  shared memory      {self.shared_loaded} B read, {written} B written, "
            f"{self.shared_wavefronts} wavefronts of which {self.shared_conflicts} by bank conflicts"
        )
        lines.append(
            f"  tensor cores       {self.tensor_operations} operations, {self.tensor_flops} flop"
        )
        return "\n".join(lines)


_CLASSES = {
    "tensor": ("mma", "wgmma"),
    "memory": ("ld", "st", "atom", "red", "ldmatrix", "ldu"),
    "asynchronous": ("cp", "mbarrier", "fence", "membar"),
    "special": ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh", "div", "rem"),
    "control": (
        "bra",
        "ret",
        "exit",
        "bar",
        "barrier",
        "setmaxnreg",
        "vote",
        "activemask",
        "elect",
    ),
    "move": ("mov", "cvta"),
    "shuffle": ("shfl", "redux", "prmt"),
    "conversion": ("cvt",),
}
_CLASS_OF = {op: name for name, ops in _CLASSES.items() for op in ops}


def classify(op: str, type_name: str) -> str:
    """The class of an opcode; arithmetic is "float" or "integer" by its type."""
    return _CLASS_OF.get(op) or ("float" if type_name.startswith(("f", "bf")) else "integer")
