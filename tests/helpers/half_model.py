"""Fixtures in the place of conftest's, for modules to which two layers are as good as four: they take half of the time.

model_config, backbone = half_model.model_config, half_model.backbone
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_folders
import pytest

from rlft.config.model import ModelConfig
from rlft.model.backbone import Backbone, load_backbone


@pytest.fixture(scope="session")
def model_config(half_folder: Path) -> Callable[..., ModelConfig]:
    """Builds the config of that model in float32 on the CPU, with some keys changed."""
    settings = model_folders.settings(half_folder)
    return lambda **keys: dataclasses.replace(settings, **keys)


@pytest.fixture(scope="session")
def backbone(model_config: Callable[..., Any]) -> Backbone:
    """That model, loaded once. Tests leave it as they found it."""
    return load_backbone(model_config())
