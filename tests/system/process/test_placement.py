"""Which GPUs engines and ranks have, and why."""

from __future__ import annotations

from typing import Any

import pytest

from rlft.config.cluster import ClusterConfig
from rlft.system.process.placement import GpuMemory, environment_of, place
from rlft.types import UserError

FITS = GpuMemory(needed=60, gpu=80, text="60 of 80 GiB")
TOO_LARGE = GpuMemory(needed=100, gpu=80, text="100 of 80 GiB")


def cluster(**keys: Any) -> ClusterConfig:
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
def test_gpus_are_shared_where_they_are_too_few(
    keys: dict[str, Any], more: dict[str, Any], kind: str, gpus: int, reason: str
) -> None:
    placed = place(cluster(**keys), on_gpus=True, **more)
    assert (placed.kind, placed.gpus) == (kind, gpus)
    assert reason in placed.reason


def test_no_gpu_is_in_two_engines_and_the_run_itself_has_the_first() -> None:
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
def test_what_does_not_fit_is_refused_with_numbers(
    keys: dict[str, Any], more: dict[str, Any], key: str, problem: str
) -> None:
    with pytest.raises(UserError) as caught:
        place(cluster(**keys), on_gpus=True, **more)
    assert caught.value.key == key
    assert problem in caught.value.problem


def test_too_many_engines_are_told_how_many_would_fit() -> None:
    with pytest.raises(UserError, match="use at most 2 engines"):
        place(cluster(engines=4, ranks=1, placement="divided"), on_gpus=True, available=3)


def test_a_cpu_has_no_gpus_to_give_out() -> None:
    assert place(cluster(), on_gpus=False).kind == "processes"
    with pytest.raises(UserError, match=r"^cluster\.gpus_per_engine: the model is on a CPU, got 2"):
        place(cluster(gpus_per_engine=2), on_gpus=False)


def test_members_see_their_own_gpus_alone() -> None:
    assert environment_of((2, 3), ["1", "0", "4", "5"]) == {"CUDA_VISIBLE_DEVICES": "4,5"}
