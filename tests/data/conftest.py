from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlft.config import config_folder, instantiate

Make = Callable[..., Any]


@pytest.fixture
def make_data() -> Make:
    """Makes the component of configs/data/<name>.yaml with some keys overridden."""

    def make(name: str, **overrides: Any) -> Any:
        keys = yaml.safe_load((config_folder() / "data" / f"{name}.yaml").read_text())
        return instantiate({**keys, **overrides}, "data")

    return make


@pytest.fixture
def gsm8k_mini() -> Path:
    """Problems in GSM8K's format, written for this project."""
    return Path(__file__).parent / "gsm8k_mini"
