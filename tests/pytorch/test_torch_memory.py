"""Tensors are read and written where they lie; threads are PyTorch's."""

import subprocess
import sys

import numpy as np
import pytest
from oracles import naive

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

from torch_cases import KEEP, K, Q, V

import numflash.torch as nt
from numflash.cpu import launch, launch_backward
from numflash.dispatch import plan_store
from numflash.jit import threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_read_the_tensors_themselves(monkeypatch, dtype):
    """Also expanded and transposed ones, and masks."""
    seen = []
    run = launch.run
    monkeypatch.setattr(
        launch, "run", lambda problem, **options: seen.append(problem) or run(problem, **options)
    )
    q, k, v = (x.to(dtype) for x in (Q.transpose(1, 2).contiguous().transpose(1, 2), K[:1], V[:1]))
    nt.scaled_dot_product_attention(q, k, v, KEEP)
    for taken, given in (
        (seen[0].query, q),
        (seen[0].key, k),
        (seen[0].value, v),
        (seen[0].mask, KEEP),
    ):
        assert taken.ctypes.data == given.data_ptr() and taken.itemsize == given.element_size()
    assert (
        seen[0].query.strides == tuple(n * q.element_size() for n in q.stride())
        and seen[0].key.strides[0] == 0
    )


@pytest.mark.parametrize("precision", [None, "int8"])
def test_results_are_tensors_of_pytorch_that_the_kernel_wrote(monkeypatch, precision):
    """No array of NumPy's in between: the memory is PyTorch's, and the kernel's own result."""
    written = []
    run = launch.run
    monkeypatch.setattr(
        plan_store.runners, "get", lambda call: None
    )  # prepared calls go past `run`
    monkeypatch.setattr(
        launch,
        "run",
        lambda problem, **options: written.append(run(problem, **options)) or written[0],
    )
    out, lse = nt.attention(Q, K, V, precision=precision, return_lse=True)
    assert (
        written[0][0].ctypes.data == out.data_ptr() and out.untyped_storage().resizable()
    )  # NumPy's memory is not
    assert lse.untyped_storage().resizable()
    assert precision or written[0][1].ctypes.data == lse.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_and_converted_results_are_tensors_of_pytorch(monkeypatch, dtype):
    written = []
    plan_store.gradients.plans.clear()  # equal calls go past `run`
    run = launch_backward.run
    monkeypatch.setattr(
        launch_backward,
        "run",
        lambda *args, **options: written.append(run(*args, **options)) or written[0],
    )
    arrays = [x.to(dtype, copy=True).requires_grad_() for x in (Q, K, V)]
    out = nt.scaled_dot_product_attention(*arrays)
    assert out.untyped_storage().resizable() and out.is_contiguous()
    found = torch.autograd.grad(out, arrays, torch.ones_like(out))
    for x, array in zip(found, written[0], strict=True):
        assert x.dtype == dtype and x.untyped_storage().resizable()
        assert dtype != torch.float32 or x.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("impl", ["reference", "portable", "cpu"])
def test_every_implementation_gives_its_result_there(impl):
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0])
    for options in ({}, {"sinks": sinks}, {"key_lengths": torch.tensor([0, 7])}):
        out, lse = nt.attention(Q, K, V, impl=impl, return_lse=True, **options)
        want, want_lse = naive(Q, K, V, **{n: x.numpy() for n, x in options.items()})
        np.testing.assert_allclose(out, want, atol=1e-6)
        np.testing.assert_allclose(lse, want_lse, atol=1e-6)


def test_threads_follow_pytorch(monkeypatch):
    import numba

    seen = []
    run = launch.run
    outer = numba.get_num_threads()
    monkeypatch.setattr(
        launch,
        "run",
        lambda problem, **options: seen.append(numba.get_num_threads()) or run(problem, **options),
    )
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        plan_store.runners.plans.clear()  # each call in full
        nt.scaled_dot_product_attention(Q, K, V)
    most = threads.most()
    assert seen == [min(n, most) for n in (1, 2, 3)] and numba.get_num_threads() == outer


@pytest.mark.parametrize(
    "call",
    [
        "numflash.torch.scaled_dot_product_attention(q, q, q)",
        "numflash.attention(q, q, q)",
        "numflash.quantize(q.numpy())",
        "numflash.set_num_threads(1)",
    ],
)
def test_threads_of_pytorch_stay_as_they_are(call):
    """Numba's threading layer would reset them when it starts, whatever starts it."""
    code = (
        "import torch, numflash.torch; torch.set_num_threads(1); q = torch.randn(1, 1, 8, 16)\n"
        "torch.get_num_threads()\n"  # the first one of a thread sets the number again
        f"{call}; assert torch.get_num_threads() == 1, torch.get_num_threads()\n"
        "torch.set_num_threads(2); numflash.attention(q, q, q); assert torch.get_num_threads() == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_numflash_leaves_torch_alone():
    code = "import sys, numflash; numflash.attention; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_to_compute():
    for q, k, v in ((Q[:0], K[:0], V[:0]), (Q[:, :, :0], K, V), (Q, K[:, :, :0], V[:, :, :0])):
        out, lse = nt.attention(q, k, v, return_lse=True)
        assert out.shape == (*q.shape[:3], 8) and not out.any() and (lse == -torch.inf).all()
