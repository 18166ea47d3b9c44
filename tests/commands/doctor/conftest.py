"""A trial of the embedded model."""

import pytest

from rlft.commands.doctor import command as doctor
from rlft.commands.doctor.command import Settings
from rlft.commands.doctor.trial import MachineTrial
from rlft.config.compose import compose
from rlft.config.keys import with_values


@pytest.fixture
def tiny_trial(tmp_path):
    """Builds a trial of the embedded model with four prompts of eight letters."""

    def make(**keys):
        sizes = {"prompts_per_step": 2, "group_size": 2, "prompts.max_tokens": 8, "generation.max_tokens": 8}
        values = {**sizes, "model.device": "cpu", "generation.engine": "transformers", "lora.rank": 4, **keys}
        plain = with_values(compose(doctor.OWN), values)
        typed = frozenset({*sizes, "model.path"})
        return MachineTrial(Settings(plain=plain, typed=typed, rewards={}, runs=tmp_path), tmp_path, ())

    return make
