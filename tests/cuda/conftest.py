"""Tests that need a CUDA GPU: `make test-cuda`. Without one they are collected and skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
REASON = "there is no CUDA GPU here"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip(items)


def skip(items: list[pytest.Item]) -> None:
    """Marks those of this folder; the hook is given the items of the whole session."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda")
