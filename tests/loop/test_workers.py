"""Engines in members of a cluster sample what the engine in the run's own process samples, to the last bit."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from real_engines import check_pool_against, opened_here, signal_to

from rlft.config.schema import RunConfig
from rlft.loop import workers
from rlft.loop.members import engine_specs
from rlft.loop.workers import EngineWorker
from rlft.model.backbone import Backbone
from rlft.system.process.launcher import LocalProcesses
from rlft.system.process.placement import Placement
from rlft.types import Prompt, UserError

KEYS = (
    "model.dtype=float32", "model.device=cpu", "lora.rank=4", "lora.alpha=8", "group_size=4",
    "generation.max_tokens=24", "generation.transformers.batch_size=8", "generation.transformers.weights=apart",
    "cluster.engines=2",
)  # fmt: skip
ON_THE_CPU = Placement(kind="processes", reason="a test's")


@pytest.fixture(scope="module")
def config(run_config: Callable[..., RunConfig]) -> RunConfig:
    return run_config(*KEYS)


@pytest.fixture(scope="module")
def prompts(make_prompt: Callable[..., Prompt]) -> list[Prompt]:
    return [make_prompt(f"{7 * i} + {13 * i + 5} = ?", str(20 * i + 5)) for i in range(12)]


@pytest.mark.slow
def test_killed_and_stopped_engines_change_no_completion(
    config: RunConfig, prompts: list[Prompt], make_roles: Any, backbone: Backbone, tmp_path: Path
) -> None:
    config = replace(config, cluster=replace(config.cluster, timeout=3.0))
    roles, notes, launcher = make_roles(noise=0.02), [], LocalProcesses(tmp_path)
    here = opened_here(config, "transformers", roles, backbone)
    killed = signal_to(0, signal.SIGKILL, 0.1, lambda member: member.pid)
    stopped = signal_to(1, signal.SIGSTOP, 0.1, lambda member: member.pid)
    try:
        check_pool_against(here, launcher, config, "transformers", roles, prompts, notes, killed, stopped)
    finally:
        launcher.close()
    assert notes[0].startswith("engine-0 is replaced: engine-0 was killed by SIGKILL")
    assert notes[1].startswith("engine-1 is replaced: engine-1 has not answered for 3 s (sample; cluster.timeout)")


def test_a_member_answers_with_the_version_and_the_hash_of_what_has_come(config: RunConfig, make_roles: Any) -> None:
    from safetensors.torch import save

    adapter, settings = make_roles(noise=0.02).publish(5), engine_specs(config, "transformers", ON_THE_CPU)[0].arguments
    weights = save({name: tensor.contiguous() for name, tensor in adapter.weights.items()})
    digest = hashlib.sha256(weights).hexdigest()
    worker = EngineWorker(**settings)
    try:
        before = worker.score([[3, 4, 5]])
        damaged = weights[:-1] + bytes([weights[-1] ^ 1])
        assert worker.load(5, adapter.config, digest, damaged) == (5, hashlib.sha256(damaged).hexdigest())
        assert worker.score([[3, 4, 5]]) == before  # it was not loaded
        assert worker.load(5, adapter.config, digest, weights) == (5, digest)
        assert worker.score([[3, 4, 5]]) != before
    finally:
        worker.close()


def test_a_member_that_is_closed_leaves_its_base_without_adapters(
    config: RunConfig, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlft.loop.workers.load_backbone", lambda model: backbone)
    worker = EngineWorker(**engine_specs(config, "transformers", ON_THE_CPU)[0].arguments)
    assert hasattr(backbone.model, "peft_config")
    worker.close()
    assert not hasattr(backbone.model, "peft_config")


def test_members_have_as_many_threads_as_this_process_and_no_gpu_of_a_cpu(config: RunConfig) -> None:
    specs = engine_specs(config, "transformers", ON_THE_CPU)
    assert [spec.name for spec in specs] == ["engine-0", "engine-1"]
    assert {(spec.threads, spec.gpus) for spec in specs} == {(torch.get_num_threads(), 0)}


def test_several_gpus_are_tensor_parallelism_of_vllm(config: RunConfig) -> None:
    engine = config.generation.named("vllm")
    assert engine.with_gpus(1) is engine
    options = engine.with_gpus(4).options  # type: ignore[attr-defined]
    assert options["tensor_parallel_size"] == 4
    assert options["distributed_executor_backend"] == "mp"
    for name in ("transformers", "scripted"):
        with pytest.raises(UserError, match=r"^cluster\.gpus_per_engine: .* computes on one GPU, got 4"):
            config.generation.named(name).with_gpus(4)


def test_a_process_whose_engine_is_dead_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class EngineDeadError(Exception):
        pass

    class Ended(BaseException):
        pass

    class Dead:
        def sample(self, *args: Any) -> None:
            raise EngineDeadError("engine core has died")

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(workers.os, "_exit", end)
    worker = EngineWorker.__new__(EngineWorker)
    worker._generator = cast(Any, Dead())
    with pytest.raises(Ended, match=r"^1$"):
        worker.sample([], 1, [], None)
    assert "engine core has died" in capsys.readouterr().err
