"""A cluster that is joined must have room for what a run or a sweep starts there."""

from __future__ import annotations

from typing import Any

import pytest

from rlft.config.cluster import ClusterConfig
from rlft.system.process.room import Resources, check_room, cores_of_a_member
from rlft.types import UserError


def cluster(**keys: Any) -> ClusterConfig:
    return ClusterConfig(**{"kind": "ray", "address": "auto", "engines": 3, "ranks": 2, **keys})


@pytest.mark.parametrize(
    ("keys", "has", "more"),
    [
        ({}, Resources(cpus=8, gpus=(0, 0)), {"threads": 2}),
        ({}, Resources(cpus=4, gpus=(4, 1)), {"threads": 9, "on_gpus": True}),
        ({}, Resources(cpus=4, gpus=(4,)), {"on_gpus": True, "counts_own": False}),
        ({"engines": 2, "gpus_per_engine": 2, "ranks": 1}, Resources(cpus=9, gpus=(3, 2)), {"on_gpus": True}),
        ({"engines": 0, "ranks": 1, "jobs": 4}, Resources(cpus=4, gpus=(2, 2)), {"on_gpus": True}),
    ],
)
def test_what_has_room_is_started(keys: dict[str, Any], has: Resources, more: dict[str, Any]) -> None:
    check_room(cluster(**keys), has, **{"threads": 1, "on_gpus": False, **more})


@pytest.mark.parametrize(
    ("keys", "has", "more", "text"),
    [
        ({}, Resources(cpus=7, gpus=()), {"threads": 2},
         "cluster.engines: 4 processes of 2 thread(s) need as many cores, and the cluster has 7, got 3; use at most 3"),
        ({"engines": 0, "ranks": 4}, Resources(cpus=2, gpus=()), {},
         "cluster.ranks: 3 processes of 1 thread(s) need as many cores, and the cluster has 2, got 4; use at most 2"),
        ({}, Resources(cpus=9, gpus=(4,)), {"on_gpus": True},
         "cluster.engines: 3 engine(s) of 1 GPU(s) and 2 rank(s), divided (the GPUs of a cluster that is joined are "
         "given out whole) need 5 GPUs, and the cluster has 4, got 3; use at most 2"),
        ({"engines": 1, "gpus_per_engine": 2, "ranks": 1}, Resources(cpus=9, gpus=(1, 1, 1)), {"on_gpus": True},
         "cluster.gpus_per_engine: an engine's GPUs are on one machine; machines with 1, 1, 1 GPUs have room for 0"),
        ({"engines": 0, "ranks": 1, "jobs": 4}, Resources(cpus=9, gpus=(2, 1)), {"on_gpus": True},
         "cluster.jobs: each job that runs at a time has a GPU of its own, and the cluster has 3, got 4; use"),
        ({"engines": 0, "ranks": 1, "jobs": 4}, Resources(cpus=3, gpus=()), {},
         "cluster.jobs: 4 processes of 1 thread(s) need as many cores, and the cluster has 3, got 4; use at most 3"),
        ({}, Resources(cpus=6, gpus=(8,)), {"on_gpus": True, "scorers": 3},
         "cluster.engines: 4 processes of 1 thread(s) beside 3 reward worker(s) need as many cores, and the"),
        ({}, Resources(cpus=3, gpus=(8,)), {"on_gpus": True},
         "cluster.engines: 4 processes of 1 thread(s) need as many cores, and the cluster has 3"),
    ],
)  # fmt: skip
def test_what_has_no_room_is_refused_with_numbers(
    keys: dict[str, Any], has: Resources, more: dict[str, Any], text: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_room(cluster(**keys), has, **{"threads": 1, "on_gpus": False, **more})
    assert str(caught.value).startswith(text)


def test_a_member_on_a_gpu_needs_one_core() -> None:
    assert cores_of_a_member(8, on_gpus=True) == 1
    assert cores_of_a_member(8, on_gpus=False) == 8
