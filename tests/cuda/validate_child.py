"""A child of `numflash.cuda.validate` on the stub driver, which computes nothing.

No kernel is compiled, what a comparison says of zeros is replaced, the lists are short, and the
families that STUB_PLANT names ("family=fault;family=fault") meet a fault of the stub.
"""

import json
import os
import sys

import fake_torch

fake_torch.install()

from numflash.cuda.compile import compiler  # noqa: E402
from numflash.cuda.device import device, resident  # noqa: E402
from numflash.cuda.validate import (  # noqa: E402
    attention,
    cases,
    child,
    compare,
    decode,
    decode_cases,
    expected,
    families,
    frameworks,
    rates,
    variants,
)


def uncompiled(factory, arch, kind, **constants):
    source = factory(**constants)
    return compiler.Compiled(
        factory.__name__,
        arch,
        repr((factory.__name__, constants)).encode(),
        compiler.flat_parameters(source.signature),
        source.threads,
        source.shared_bytes,
    )


device.compiled = resident.compiled = rates.compiled = child.compiled = uncompiled
families.CASES = cases.CASES[:1] + cases.CASES[10:11]
families.LONG_CASES = families.LONG_GRADIENTS = ()
families.GRADIENTS = cases.GRADIENTS[:1]
attention.ROWS, attention.CHANNELS = 64, 128
variants.CHECKED = variants.TIMED = (1, 16, 16, 64, 64, 128)
decode_cases.CASES = decode_cases.CASES[:1]
decode.LONG = {
    "batch": 1, "heads": 4, "kv_heads": 2, "length": 512, "d": 64, "chunk": 256,
}  # fmt: skip
expected.get = lambda *arguments: []
frameworks.checks = lambda arch: iter(())
for module, name in (
    (compare, "forward"),
    (compare, "on_the_card"),
    (compare, "gradients"),
    (decode, "compared"),
):
    setattr(module, name, lambda *arguments: {"passed": True})
compare.sample = lambda *arguments: 0.0
decode.wrong = lambda *arguments: {}
plants = dict(x.split("=") for x in os.environ.get("STUB_PLANT", "").split(";") if x)
os.environ["STUB_FAULT"] = plants.get(json.loads(sys.argv[1]).get("family"), "")
sys.exit(child.main())
