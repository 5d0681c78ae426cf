"""Tests that need a CUDA device. Each is marked `gpu` and skipped, with the reason, where there is none."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# What cuBLAS needs to be deterministic; torch looks at it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks and skips; warnings of a machine nobody has seen yet fail nothing."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    """Every test starts with no memory held, and leaves torch's switches as they were."""
    if not torch.cuda.is_available():
        yield
        return
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
