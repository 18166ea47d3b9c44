"""A server that scores, and rewards of this project that ask it."""

import pytest
import yaml
from scripted_server import ScriptedServer

from rlft.config.catalog import config_folder

PATHS = {"http": "score", "judge": "v1/chat/completions"}


@pytest.fixture
def server():
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def asking(server):
    """Makes the `reward` section of http or judge: the shipped keys, with this server and quick retries."""

    def make(name, **keys):
        shipped = yaml.safe_load((config_folder() / "reward" / f"{name}.yaml").read_text())[name]
        quick = {"group_timeout": 4.0, "timeout": 1.0, "retries": 1, "backoff": 0.01}
        return {name: shipped | {"url": f"{server.address}/{PATHS[name]}"} | quick | keys}

    return make
