"""Which GPUs the workers of a run have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool_engines import CountingEngine, ThreadLauncher

from rlft.config.schema import RunConfig
from rlft.loop import cluster
from rlft.loop.cluster import engine_specs, rank_specs
from rlft.system.process.placement import Placement, place
from rlft.system.process.worker import WorkerSpec

KEYS = ("model.device=cuda:1", "generation=transformers", "cluster.engines=2", "cluster.ranks=3")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five GPUs, of which the run's own process has the second."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,2,0")
    monkeypatch.setattr(cluster, "resolve_device", torch.device)


def specs(config: RunConfig, placement: Placement) -> dict[str, tuple[float, dict[str, str]]]:
    """{name: (GPUs that the launcher is asked for, its variables)} of all workers."""
    plan: Any = SimpleNamespace(config=config, placement=placement, annotated={"needs_old": False})
    all_specs = [*engine_specs(config, "transformers", placement), *rank_specs(plan)]
    assert {spec.arguments.get("config", spec.arguments.get("settings")).model.device for spec in all_specs} == {"cuda"}
    return {spec.name: (spec.gpus, dict(spec.environment)) for spec in all_specs}


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_workers_here_see_the_gpus_of_the_placement(
    kind: str, gpus: None, run_config: Callable[..., RunConfig]
) -> None:
    config = run_config(*KEYS, f"cluster={kind}")
    divided = specs(config, place(config.cluster, on_gpus=True, available=5))
    named = {name: (0, {"CUDA_VISIBLE_DEVICES": gpu}) for name, gpu in
             {"engine-0": "2", "engine-1": "0", "rank-1": "7", "rank-2": "3"}.items()}  # fmt: skip
    assert divided == named
    pairs = specs(config, place(config.cluster, on_gpus=True, available=3))
    assert {name: variables["CUDA_VISIBLE_DEVICES"] for name, (_, variables) in pairs.items()} == {
        "engine-0": "5", "engine-1": "7", "rank-1": "7", "rank-2": "3"}  # fmt: skip


def test_a_cluster_that_is_joined_is_asked_for_gpus(gpus: None, run_config: Callable[..., RunConfig]) -> None:
    config = run_config(*KEYS, "cluster=ray", "cluster.address=auto")
    two_each = replace(config, cluster=replace(config.cluster, gpus_per_engine=2))
    placement = place(two_each.cluster, on_gpus=True)
    asked = specs(two_each, placement)
    assert asked == {"engine-0": (2, {}), "engine-1": (2, {}), "rank-1": (1, {}), "rank-2": (1, {})}


def test_the_launcher_is_told_the_runs_own_gpu(
    gpus: None, run_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(cluster, "open_launcher", lambda *args, **kwargs: told.append(kwargs))
    for device in ("cuda:1", "cpu"):
        plan: Any = SimpleNamespace(config=run_config(*KEYS, f"model.device={device}"))
        cluster.opened_launcher(plan, tmp_path)
    assert [(kwargs["on_gpus"], kwargs["own_gpu"]) for kwargs in told] == [(True, "5"), (False, None)]


@pytest.mark.parametrize(
    ("kind", "order"), [("pairs", ["engine", "engine", "ranks", "base"]), ("divided", ["ranks", "base"])]
)
def test_ranks_load_their_bases_once_an_engine_on_the_same_gpu_has_measured_its_memory(
    kind: Any, order: list[str], run_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events: list[str] = []
    may_start = threading.Event()

    def start_slowly(self: CountingEngine) -> None:
        may_start.wait(5.0)
        events.append("engine")

    monkeypatch.setattr(CountingEngine, "started", start_slowly)
    faultless = {"faults": {}, "stale": (), "corrupt": False, "delay_s": 0.0}
    slow = [WorkerSpec(name=f"engine-{i}", factory="-", arguments=faultless) for i in range(2)]
    monkeypatch.setattr(cluster, "engine_specs", lambda *_: slow)
    monkeypatch.setattr(cluster, "opened_launcher", lambda *_: closing(ThreadLauncher(tmp_path)))
    monkeypatch.setattr(cluster, "rank_specs", lambda *_: events.append("ranks") or [])
    config = run_config("generation=transformers", "cluster.engines=2", "cluster.ranks=2")
    placement = Placement(kind=kind, reason="", gpus=2)
    plan: Any = SimpleNamespace(config=config, engine="transformers", placement=placement, environment=None, images=2)
    if kind == "pairs":
        threading.Timer(0.05, may_start.set).start()
    with cluster.open_workers(plan, tmp_path, print, has_ranks=True) as opened:
        events.append("base")
        assert events == order
        may_start.set()
        assert opened.pool is not None
        opened.pool.wait_until_started()
    assert sorted(events) == ["base", "engine", "engine", "ranks"]
