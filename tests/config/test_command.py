"""The commands that have a config: each has a file, and defaults that build."""

import pytest
import yaml
from in_one_test import each

from rlft.config import catalog, command as commands
from rlft.config.compose import compose
from rlft.config.resolved import build
from rlft.types import UserError

PAIRS = ["preferences.path=some.jsonl"]
NEEDS = {"sft": ["demonstrations.path=some.jsonl"], "rm": PAIRS, "dpo": PAIRS}


def test_every_command_has_a_file_that_names_it_and_no_other_file_does():
    named = {file.stem: yaml.safe_load(file.read_text())["command"] for file in catalog.config_folder().glob("*.yaml")}
    assert named == {command: command for command in commands.OWN}
    assert [commands.named(command).name for command in commands.OWN] == list(commands.OWN)


@each("command", commands.OWN)
def test_every_commands_defaults_build(command):
    plain, root = compose(NEEDS.get(command, []), command=command), commands.named(command).root
    assert isinstance(build(plain, root, command), root)
    with pytest.raises(UserError, match=rf"^command: this is rlft {command}, got another; leave it as it is$"):
        build({**plain, "command": "another"}, root, command)
