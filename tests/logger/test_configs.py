"""configs/logger: names compose into one section each, and every key is a field of its class."""

import dataclasses
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, instantiate
from in_one_test import each
from omegaconf import OmegaConf

LOGGERS = Path(__file__).parents[2] / "configs" / "logger"


@pytest.fixture
def composed(tmp_path):
    """A primary config whose defaults list names two loggers, as configs/train.yaml does."""
    (tmp_path / "logger").symlink_to(LOGGERS, target_is_directory=True)
    (tmp_path / "train.yaml").write_text("defaults:\n  - logger: [console, jsonl]\n  - _self_\n")

    def load(*overrides):
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return compose("train", list(overrides)).logger

    return load


def test_the_defaults_list_gives_one_section_a_logger(composed):
    assert list(composed()) == ["console", "jsonl"]


def test_loggers_are_chosen_and_overridden_on_the_command_line(composed):
    chosen = composed("logger=[console,jsonl,wandb]", "logger.console.plain_seconds=2.5")
    assert list(chosen) == ["console", "jsonl", "wandb"]
    assert chosen.console.plain_seconds == 2.5


@each("name", sorted(path.stem for path in LOGGERS.glob("*.yaml")))
def test_every_key_is_a_field_and_every_field_has_its_key(name, composed):
    section = composed(f"logger=[{name}]")[name]
    fields = {field.name for field in dataclasses.fields(get_class(section._target_))}
    assert set(OmegaConf.to_container(section)) - {"_target_"} == fields
    assert instantiate(section) is not None


@each("path", sorted(LOGGERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_first_line_says_what_it_is(path):
    assert path.read_text().startswith("# ")
