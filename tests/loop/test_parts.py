"""When a training run recomputes activations: as it is told, or by the memory that is free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlft.config.model import LoraSettings
from rlft.loop import parts
from rlft.loop.parts import load_for_training
from rlft.model.activations import activation_bytes, set_checkpointing
from rlft.system import device


def is_checkpointing(model) -> bool:
    """Whether any layer recomputes its activations."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@pytest.fixture
def model(backbone):
    yield backbone.model
    set_checkpointing(backbone.model, False)


@pytest.mark.parametrize(("setting", "expected"), [(True, True), (False, False), ("auto", False)])
def test_it_is_on_when_asked_for_and_off_where_there_is_room(setting, expected, model_config):
    loaded = load_for_training(model_config(gradient_checkpointing=setting), None, 4096).model
    assert is_checkpointing(loaded) is expected


def test_auto_recomputes_what_would_take_more_than_half_of_the_free_memory(model, backbone, model_config, monkeypatch):
    monkeypatch.setattr(parts, "read_backbone", lambda config, adopt: replace(backbone, model=model))
    needed = activation_bytes(model.config, 1000, 4)
    for free, expected in ((2 * needed - 1, True), (2 * needed, False)):
        monkeypatch.setattr(device, "free_memory", lambda free=free: free)
        load_for_training(model_config(gradient_checkpointing="auto"), None, 1000)
        assert is_checkpointing(model) is expected


def test_auto_counts_what_the_adapter_keeps(model, backbone, model_config, monkeypatch):
    monkeypatch.setattr(parts, "load_backbone", lambda config: replace(backbone, model=model))
    monkeypatch.setattr(device, "free_memory", lambda: 3 * activation_bytes(model.config, 1000, 4))
    plain = {"rank": 4, "alpha": 8.0, "target_modules": "all-linear", "path": None}
    for kind, expected in (({}, False), ({"use_dora": True}, True), ({"dropout": 0.1}, True)):
        lora = LoraSettings(**plain | {"dropout": 0.0} | kind)
        load_for_training(model_config(gradient_checkpointing="auto"), lora, 1000)
        assert is_checkpointing(model) is expected, kind
