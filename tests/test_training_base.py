"""When a training run recomputes activations: as it is told, or by the memory that is free."""

from __future__ import annotations

import pytest

from rlft import training_base
from rlft.model.activations import activation_bytes, is_checkpointing, set_checkpointing
from rlft.training_base import load_for_training


@pytest.fixture
def model(backbone):
    yield backbone.model
    set_checkpointing(backbone.model, False)


@pytest.mark.parametrize(("setting", "expected"), [(True, True), (False, False), ("auto", False)])
def test_it_is_on_when_asked_for_and_off_where_there_is_room(setting, expected, model_config):
    loaded = load_for_training(model_config(gradient_checkpointing=setting), 4096, own=True).model
    assert is_checkpointing(loaded) is expected


def test_auto_recomputes_what_would_take_more_than_half_of_the_free_memory(model, model_config, monkeypatch):
    monkeypatch.setattr(
        training_base, "load_backbone", lambda config: type("Loaded", (), {"model": model, "device": model.device})
    )
    needed = activation_bytes(model.config, 1000, 4)
    for free, expected in ((2 * needed - 1, True), (2 * needed, False)):
        monkeypatch.setattr(training_base, "free_memory", lambda free=free: free)
        load_for_training(model_config(gradient_checkpointing="auto"), 1000)
        assert is_checkpointing(model) is expected
