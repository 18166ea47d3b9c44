from __future__ import annotations

from dataclasses import replace

import pytest

from rlft.engine import Engines
from rlft.generation.scripted import ScriptedGenerator
from rlft.generation.transformers import TransformersGenerator
from rlft.types import UserError


class Outside:
    """An engine from outside the tree."""

    def __init__(self, *, config, roles, backbone):
        self.given = (config, roles, backbone)


class Closing:
    """Stands for a vLLM engine: expensive to start, and to be closed."""

    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


@pytest.fixture
def config(run_config):
    return run_config("generation.scripted.answers={*: [aye]}", "generation.transformers.batch_size=12")


@pytest.fixture
def started(monkeypatch):
    """Every vLLM engine that `Engines` starts."""
    made = []

    def start(self, config, rank, backbone):
        made.append(Closing())
        return made[-1]

    monkeypatch.setattr(Engines, "_start_vllm", start)
    return made


def test_an_engines_name_gives_its_generator(config, make_roles, backbone):
    roles = make_roles()
    with Engines() as engines:
        sampler = engines.open("transformers", config, 4, roles, backbone)
        assert isinstance(sampler, TransformersGenerator)
        assert (sampler.slot, sampler.batch_size, sampler.version) == (roles, 12, None)
        canned = engines.open("scripted", config, 4, roles, backbone)
        assert isinstance(canned, ScriptedGenerator)
        assert list(canned.answers["*"]) == ["aye"]


def test_an_engine_from_outside_the_tree_gets_config_roles_and_backbone(config, make_roles, backbone, monkeypatch):
    monkeypatch.setattr("builtins.Outside", Outside, raising=False)
    roles = make_roles()
    with Engines() as engines:
        assert engines.open("builtins.Outside", config, 4, roles, backbone).given == (config, roles, backbone)


def test_an_engine_that_cannot_be_imported_is_refused(config, make_roles, backbone):
    with Engines() as engines, pytest.raises(UserError, match=r"^generation\.engine"):
        engines.open("no_such_module.Engine", config, 4, make_roles(), backbone)


def test_jobs_of_a_sweep_share_one_vllm_engine_until_they_need_another(config, make_roles, backbone, started):
    roles = make_roles()
    longer = replace(config, generation=replace(config.generation, max_tokens=config.generation.max_tokens + 1))
    with Engines() as engines:
        first = engines.open("vllm", config, 4, roles, backbone)
        assert engines.open("vllm", replace(config, seed=9, steps=3), 4, roles, backbone) is first
        assert started[0].closed == 0
        assert engines.open("vllm", config, 8, roles, backbone) is not first  # adapters of another rank
        assert engines.open("vllm", longer, 8, roles, backbone) is not first
        assert [engine.closed for engine in started] == [1, 1, 0]
    assert [engine.closed for engine in started] == [1, 1, 1]


def test_engines_are_closed_when_a_job_fails(config, make_roles, backbone, started):
    roles = make_roles()
    with pytest.raises(UserError), Engines() as engines:
        engines.open(engines.open("vllm", config, 4, roles, backbone) and "no_such.Engine", config, 4, roles, backbone)
    assert started[0].closed == 1
