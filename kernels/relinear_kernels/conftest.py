import pytest
import torch

from relinear_kernels import testing


@pytest.fixture
def triton_path(monkeypatch, request):
    """Run the Triton kernels, into memory full of NaN, on numbers that the test's name decides."""
    monkeypatch.setenv("RELINEAR_KERNELS", "triton")
    testing.fill_empty_with_nan(monkeypatch)
    torch.manual_seed(sum(map(ord, request.node.nodeid)))
