import pytest


@pytest.fixture(autouse=True)
def one_thread():
    """Problems this small are done before a second thread has woken up."""
    torch = pytest.importorskip(
        "torch", reason="needs the torch extra: pip install 'numflash[torch]'"
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
