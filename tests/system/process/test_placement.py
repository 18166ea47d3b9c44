"""Which GPUs engines and ranks have, and why; a cluster that is joined must have room for what is started there."""

import pytest
import torch

from rlft.config.trainer import ClusterConfig
from rlft.system.process.placement import (
    GpuMemory,
    Resources,
    all_gpus,
    check_room,
    cores_of_a_worker,
    place,
    visible_gpus,
)
from rlft.types import UserError

FITS = GpuMemory(needed=60, gpu=80, text="60 of 80 GiB")
TOO_LARGE = GpuMemory(needed=100, gpu=80, text="100 of 80 GiB")


def cluster(**keys):
    return ClusterConfig(**{"engines": 4, "ranks": 4, **keys})


@pytest.mark.parametrize(
    ("keys", "more", "kind", "gpus", "reason"),
    [
        ({}, {"available": 8}, "divided", 8, "the 8 GPUs are enough for one each"),
        ({}, {"available": 7}, "pairs", 4, "an engine sleeps while its rank trains"),
        ({}, {"available": 4, "pair": FITS}, "pairs", 4, "together they take 60 of 80 GiB"),
        ({}, {"pair": TOO_LARGE}, "divided", 8, "do not fit on one GPU: 100 of 80 GiB"),
        ({}, {"lag": 1}, "divided", 8, "overlap.lag=1"),
        ({}, {"lag": 1, "alone": FITS}, "divided", 8, "an engine takes 60 of 80 GiB"),
        ({"placement": "pairs"}, {"available": 8}, "pairs", 4, "as cluster.placement says"),
        ({"placement": "divided"}, {"pair": FITS}, "divided", 8, "as cluster.placement says"),
        ({"gpus_per_engine": 2}, {"available": 12}, "divided", 12, "enough"),
        ({"gpus_per_engine": 2}, {"available": 8}, "pairs", 8, "sleeps"),
        ({"engines": 0}, {"available": 4}, "divided", 4, "a GPU for each rank"),
        ({"kind": "ray", "address": "auto"}, {}, "divided", 8, "given out whole"),
        ({"kind": "ray"}, {"available": 4}, "pairs", 4, "sleeps"),
    ],
)
def test_gpus_are_shared_where_they_are_too_few(keys, more, kind, gpus, reason):
    placed = place(cluster(**keys), on_gpus=True, **more)
    assert (placed.kind, placed.gpus) == (kind, gpus)
    assert reason in placed.reason


def test_no_gpu_is_in_two_engines_and_the_run_itself_has_the_first():
    divided = place(cluster(engines=2, ranks=3, gpus_per_engine=2), on_gpus=True, available=7)
    assert divided.ranks == (0, 1, 2)
    assert divided.engines == ((3, 4), (5, 6))
    pairs = place(cluster(engines=3, ranks=2), on_gpus=True, available=3)
    assert pairs.ranks == (0, 1)
    assert pairs.engines == ((0,), (1,), (2,))


@pytest.mark.parametrize(
    ("keys", "more", "key", "problem"),
    [
        ({}, {"available": 3}, "cluster.engines", "need 4 GPUs, and the cluster has 3"),
        ({"engines": 2}, {"available": 3, "pair": TOO_LARGE}, "cluster.engines", "100 of 80 GiB) need 6 GPUs"),
        ({"engines": 0}, {"available": 2}, "cluster.ranks", "need 4 GPUs, and the cluster has 2"),
        ({"placement": "divided"}, {"available": 6}, "cluster.engines", "need 8 GPUs"),
        ({"placement": "pairs"}, {"pair": TOO_LARGE}, "cluster.placement", "100 of 80 GiB"),
        ({"placement": "divided"}, {"alone": TOO_LARGE}, "cluster.engines", "an engine does not fit: 100 of 80 GiB"),
        ({"placement": "pairs", "kind": "ray", "address": "auto"}, {}, "cluster.placement", "given out whole"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(keys, more, key, problem):
    with pytest.raises(UserError) as caught:
        place(cluster(**keys), on_gpus=True, **more)
    assert caught.value.key == key
    assert problem in caught.value.problem


def test_too_many_engines_are_told_how_many_would_fit():
    with pytest.raises(UserError, match=r"^cluster\.engines: .*use at most 2 engines"):
        place(cluster(ranks=1, placement="divided"), on_gpus=True, available=3)


def test_a_cpu_has_no_gpus_to_give_out_and_a_worker_on_a_gpu_needs_one_core():
    assert (cores_of_a_worker(8, on_gpus=True), cores_of_a_worker(8, on_gpus=False)) == (1, 8)
    assert place(cluster(), on_gpus=False).kind == "processes"
    with pytest.raises(UserError, match=r"^cluster\.gpus_per_engine: the model is on a CPU, got 2"):
        place(cluster(gpus_per_engine=2), on_gpus=False)


def test_the_variable_names_the_gpus_and_without_it_all_are_visible(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for names, first, second in (("3, GPU-8a,1", "3", "GPU-8a"), (None, "0", "1")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if names:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        third = "1" if names else "2"
        assert all_gpus(torch.device("cuda")) == [first, second, third]
        assert all_gpus(torch.device("cuda:1")) == [second, first, third]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def joined(**keys):
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
def test_what_has_room_is_started(keys, has, more):
    check_room(joined(**keys), has, **{"threads": 1, "on_gpus": False, **more})


@pytest.mark.parametrize(
    ("keys", "has", "more", "text"),
    [
        ({}, Resources(cpus=7, gpus=()), {"threads": 2},
         "cluster.engines: 4 processes of 2 threads need as many cores, and the cluster has 7, got 3; use at most 3"),
        ({"engines": 0, "ranks": 4}, Resources(cpus=2, gpus=()), {},
         "cluster.ranks: 3 processes of 1 thread need as many cores, and the cluster has 2, got 4; use at most 2"),
        ({}, Resources(cpus=9, gpus=(4,)), {"on_gpus": True},
         "cluster.engines: 3 engines of 1 GPU and 2 ranks, divided (the GPUs of a cluster that is joined are "
         "given out whole) need 5 GPUs, and the cluster has 4, got 3; use at most 2"),
        ({"engines": 1, "gpus_per_engine": 2, "ranks": 1}, Resources(cpus=9, gpus=(1, 1, 1)), {"on_gpus": True},
         "cluster.gpus_per_engine: an engine's GPUs are on one machine; machines with 1, 1, 1 GPUs have room for 0"),
        ({"engines": 0, "ranks": 1, "jobs": 4}, Resources(cpus=9, gpus=(2, 1)), {"on_gpus": True},
         "cluster.jobs: each job that runs at a time has a GPU of its own, and the cluster has 3, got 4; use"),
        ({"engines": 0, "ranks": 1, "jobs": 4}, Resources(cpus=3, gpus=()), {},
         "cluster.jobs: 4 processes of 1 thread need as many cores, and the cluster has 3, got 4; use at most 3"),
        ({}, Resources(cpus=6, gpus=(8,)), {"on_gpus": True, "scorers": 3},
         "cluster.engines: 4 processes of 1 thread and 3 reward workers need as many cores, and the"),
        ({}, Resources(cpus=3, gpus=(8,)), {"on_gpus": True},
         "cluster.engines: 4 processes of 1 thread need as many cores, and the cluster has 3"),
    ],
)  # fmt: skip
def test_what_has_no_room_is_refused_with_numbers(keys, has, more, text):
    with pytest.raises(UserError) as caught:
        check_room(joined(**keys), has, **{"threads": 1, "on_gpus": False, **more})
    assert str(caught.value).startswith(text)
