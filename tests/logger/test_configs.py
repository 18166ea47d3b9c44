"""Every key of configs/logger is a field of its class, and every field has its key."""

import dataclasses
from pathlib import Path

import yaml
from hydra.utils import get_class
from in_one_test import each

LOGGERS = Path(__file__).parents[2] / "configs" / "logger"


@each("path", sorted(LOGGERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_is_a_field_and_every_field_has_its_key(path):
    [section] = yaml.safe_load(path.read_text()).values()
    fields = {field.name for field in dataclasses.fields(get_class(section.pop("_target_")))}
    assert section.keys() == fields
