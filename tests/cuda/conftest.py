"""Tests that need a CUDA GPU: `make test-cuda`. Without one they are collected and skipped."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
REASON = "there is no CUDA GPU here"


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip(items)


def skip(items):
    """Marks those of this folder; the hook is given the items of the whole session."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def gpu():
    return torch.device("cuda")
