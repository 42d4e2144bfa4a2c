"""Tests for a GPU: `pytest -m gpu` runs them there, and everywhere else their bodies run on stand-ins."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic kernels; read when CUDA starts

import pytest
import torch
from far.device import far

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)


def pytest_collection_modifyitems(config, items):
    """Run what needs a GPU by `-m gpu` alone: in one process with the far device, torch would not see the GPU."""
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if "gpu" not in config.option.markexpr:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]
    elif needing and ACCELERATOR is None:
        raise pytest.UsageError("pytest -m gpu needs an accelerator, and torch finds none on this machine")


@pytest.fixture(params=["far", "cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """The accelerator, or a stand-in: the far device, whose tensors never meet those of the CPU, or the CPU itself."""
    if request.param == "far":
        with far() as stand_in:
            yield stand_in
    elif request.param == "cpu":
        yield torch.device("cpu")
    else:
        yield torch.device(ACCELERATOR.type, 0)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def compiling_device(request):
    """The accelerator, or the CPU, for code that only those compile."""
    return torch.device(ACCELERATOR.type, 0) if request.param == "gpu" else torch.device("cpu")


@pytest.fixture
def deterministic():
    """Kernels that add up in the same order each time, as far as torch has them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
