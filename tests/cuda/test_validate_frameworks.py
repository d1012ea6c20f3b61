"""The checks through PyTorch and CuPy, with stand-ins that compute on the host."""

import contextlib
import types

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

import numflash
from numflash.cuda.validate import frameworks, peers

NAMES = [f"torch {row[0]}" for row in frameworks.FORWARD] + ["torch backward", "cupy forward"]


class Tensor(np.ndarray):
    """An array with the methods that are called."""

    cpu = lambda self: self  # noqa: E731
    numpy = lambda self: np.asarray(self)  # noqa: E731
    to = lambda self, dtype: self.astype(dtype)  # noqa: E731

    def zero_(self):
        self[...] = 0

    def copy_(self, other):
        self[...] = other


class Stream:
    """Where work is done at once."""

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


def tensor(x, device="cuda"):
    return np.array(x).view(Tensor)


class Torch:
    """PyTorch with a card: a graph runs what was called within it again."""

    def __init__(self):
        self.recording = None
        self.cuda = types.SimpleNamespace(
            Stream=Stream, current_stream=Stream, stream=contextlib.nullcontext,
            synchronize=lambda: None, CUDAGraph=lambda: Graph(), graph=self.graph,
        )  # fmt: skip
        self.as_tensor = self.asarray = tensor
        self.asnumpy = np.asarray

    def zeros(self, n, device):
        return np.zeros(4, np.float32).view(Tensor)

    @contextlib.contextmanager
    def graph(self, graph):
        self.recording = graph.calls
        yield
        self.recording = None


class Graph:
    def __init__(self):
        self.calls = []

    def replay(self):
        for call in self.calls:
            call()


@pytest.fixture
def checked(monkeypatch):
    """checked(spoil): {name of a check: whether it passed}; `spoil` changes what calls return."""

    def run(spoil=lambda name, found: None):
        torch = Torch()

        def compute(function, arrays, options):
            given = [np.asarray(x) if isinstance(x, Tensor) else x for x in arrays]
            more = {k: np.asarray(x) if isinstance(x, Tensor) else x for k, x in options.items()}
            found = getattr(numflash, function)(*given, impl="reference", **more)
            spoil(function, found)
            return found

        def call(function):
            def called(*arrays, **options):
                found = [tensor(x) for x in compute(function, arrays, options)]
                if torch.recording is not None:

                    def again():
                        for x, new in zip(found, compute(function, arrays, options), strict=True):
                            x[...] = new

                    torch.recording.append(again)
                return found

            return called

        functions = ("attention", "attention_backward", "flex_attention")
        package = types.SimpleNamespace(**{name: call(name) for name in functions})
        monkeypatch.setattr(frameworks, "_numflash", lambda: package)
        monkeypatch.setattr(peers, "pytorch", lambda: torch)
        monkeypatch.setattr(frameworks, "cupy", lambda: torch)
        rows = {step.name: next(iter(step.run(None))) for step in frameworks.checks("sm_80")}
        return {name: row["passed"] for name, row in rows.items()}

    return run


def test_right_results_pass(checked):
    assert checked() == dict.fromkeys(NAMES, True)


def test_wrong_results_fail(checked):
    def spoil(name, found):
        found[-1][-1, -1, -1] += 0.5  # LSE, or dv

    assert checked(spoil) == dict.fromkeys(NAMES, False)


def test_a_graph_that_keeps_its_first_results_fails(checked, monkeypatch):
    monkeypatch.setattr(Graph, "replay", lambda graph: None)
    failed = {name for name, passed in checked().items() if not passed}
    assert failed == {"torch in a graph", "torch INT8 in a graph"}


def test_what_is_not_installed_is_skipped(monkeypatch):
    def missing():
        raise peers.Missing("no such package")

    monkeypatch.setattr(peers, "pytorch", missing)
    monkeypatch.setattr(frameworks, "cupy", missing)
    for step in frameworks.checks("sm_90a"):
        assert list(step.run(None)) == [{"skipped": "no such package", "passed": True}]
        assert step.kernels()
