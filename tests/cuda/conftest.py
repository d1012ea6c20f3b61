"""Tests marked `gpu` run on a card, and are skipped with the driver's reason where there is none."""

import pytest


@pytest.fixture(autouse=True)
def _card(request):
    if request.node.get_closest_marker("gpu"):
        from numflash.cuda.device import current_device
        from numflash.errors import UnsupportedError

        try:
            current_device()
        except UnsupportedError as error:
            pytest.skip(str(error))
