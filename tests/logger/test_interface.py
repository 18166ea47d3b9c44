"""Every logger that configs/logger names has the methods of a logger and a field for each of its keys."""

import dataclasses
import inspect
from pathlib import Path

import yaml
from hydra.utils import get_class
from in_one_test import each

from rlft.logger.console import Console
from rlft.logger.interface import Logger
from rlft.logger.loggers import Jsonl, Loggers, Rollouts

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "logger").glob("*.yaml"))
SECTIONS = [section for path in CONFIGS for section in yaml.safe_load(path.read_text()).values()]
METHODS = [name for name, _ in inspect.getmembers(Logger, inspect.isfunction) if not name.startswith("_")]


@each("section", SECTIONS, ids=lambda section: section["_target_"])
def test_every_key_is_a_field_and_every_field_has_its_key(section):
    fields = {field.name for field in dataclasses.fields(get_class(section["_target_"]))}
    assert section.keys() - {"_target_"} == fields


@each("cls", [Console, Jsonl, Loggers, Rollouts, *(get_class(section["_target_"]) for section in SECTIONS)])
def test_every_logger_has_the_methods_of_one(cls):
    assert METHODS == ["evaluation", "finish", "note", "stage", "start", "step"]
    for name in METHODS:
        assert len(inspect.signature(getattr(cls, name)).parameters) == 2, "itself, and what it is told"
