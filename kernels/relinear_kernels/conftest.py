import pytest
import torch

from relinear_kernels import testing


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "aot: ahead-of-time compilation of every shipped configuration (minutes); run with -m aot"
    )


def pytest_collection_modifyitems(config, items):
    if "aot" not in config.getoption("-m"):
        for item in items:
            if "aot" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="minutes of compilation: run with -m aot"))


@pytest.fixture
def triton_path(monkeypatch, request):
    """Run the Triton kernels, into memory full of NaN, on numbers that the test's name decides."""
    monkeypatch.setenv("RELINEAR_KERNELS", "triton")
    testing.fill_empty_with_nan(monkeypatch)
    if testing.DEVICE == "cpu":
        testing.spare_the_interpreter(monkeypatch)
    torch.manual_seed(sum(map(ord, request.node.nodeid)))
