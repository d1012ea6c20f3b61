"""The oldest release of transformers that the package goes with."""

from __future__ import annotations

from ..errors import UnsupportedError

try:
    import torch  # noqa: F401
    import transformers
    from packaging.version import Version
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"numflash.transformers: {missing}; pip install 'numflash[transformers]'", name=missing.name
    ) from missing

OLDEST = "5.20"  # before it a cache could not ask for the options of each layer


def check_release() -> None:
    """Refuse an older one, before something of it is missed."""
    if Version(transformers.__version__) < Version(OLDEST):
        raise UnsupportedError(
            f"transformers: got release {transformers.__version__}; allowed: {OLDEST} and later "
            "(pip install 'numflash[transformers]')"
        )
