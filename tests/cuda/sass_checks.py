"""Machine code of a kernel, with what holds for all of them.

It fits, no fragment is in memory, nothing is spilled.
"""

import pytest

from numflash.cuda.compile import ARCHITECTURES, compiled, sass
from numflash.errors import UnsupportedError


def resources(factory, arch, doubles=0, **constants):
    """What ptxas made of a kernel, which has no stack, no generic accesses and no arithmetic in
    float64 but at most `doubles` additions; nothing is spilled.
    """
    try:
        sass.tool("cuobjdump"), sass.tool("nvdisasm")
    except UnsupportedError as error:
        pytest.skip(str(error))
    item = compiled(factory, arch, "cubin", **constants)
    assert item.shared_bytes <= ARCHITECTURES[arch][1]
    assert item.remarks == (), "ptxas waits for products of wgmma, or runs them one by one"
    found = sass.resources(item.code)
    assert found.local == found.count("LD") == found.count("ST") == 0
    assert found.stack == found.count("LDL") == found.count("STL") == 0
    assert found.count("DADD") <= doubles and found.count("DMUL") == found.count("DFMA") == 0
    return found
