"""Lanes of a run: what `auto` gives, and what a resumed run keeps."""

from typing import Any

from in_one_test import each

from rlft.config.trainer import ClusterConfig, kept_lanes

AUTO: dict[str, Any] = {"lanes": "auto"}


@each(("now", "before", "lanes"), [
    (AUTO, None, "auto"),  # one process does all: nothing to keep
    (AUTO | {"ranks": 4}, None, 4),
    (AUTO | {"ranks": 4, "sequence_ranks": 2}, None, 2),
    (AUTO | {"ranks": 2, "sequence_ranks": 4}, None, 1),
    (AUTO | {"ranks": 4, "lanes": 3}, None, 3),
    (AUTO | {"ranks": 8}, AUTO | {"ranks": 2}, 2),  # resumed on more ranks: as it began
    (AUTO | {"ranks": 8}, {"ranks": 2, "lanes": 6}, 6),
    (AUTO | {"ranks": 8}, {}, 1),  # recorded before there were ranks
    (AUTO, AUTO | {"ranks": 2}, 2),
    (AUTO | {"ranks": "two"}, None, "auto"),  # which the types refuse later
    ({"ranks": 2}, None, 2),
])  # fmt: skip
def test_a_run_has_the_lanes_with_which_it_began(now, before, lanes):
    given = dict(now)
    kept = kept_lanes(now, before)
    assert kept == ({**now, "lanes": lanes} if lanes != "auto" else now)
    assert now == given


@each(("keys", "lanes", "parts"), [
    ({}, 1, 1),
    ({"ranks": 6, "sequence_ranks": 2}, 3, 6),
    ({"lanes": 5, "ranks": 2}, 5, 5),
    ({"sequence_ranks": 2}, 1, 2),
])  # fmt: skip
def test_lanes_and_parts_are_counted(keys, lanes, parts):
    cluster = ClusterConfig(**keys)
    assert (cluster.num_lanes, cluster.num_parts) == (lanes, parts)


@each(("keys", "variable", "address"), [
    ({"kind": "ray"}, "", None),
    ({"kind": "ray"}, "10.0.0.1:6379", "10.0.0.1:6379"),
    ({"kind": "ray", "address": "auto"}, "10.0.0.1:6379", "auto"),
    ({"kind": "local"}, "10.0.0.1:6379", None),
])  # fmt: skip
def test_a_ray_cluster_is_joined_by_its_key_or_rays_variable(monkeypatch, keys, variable, address):
    monkeypatch.setenv("RAY_ADDRESS", variable)
    cluster = ClusterConfig(**keys)
    assert (cluster.joined_address, cluster.is_joined) == (address, address is not None)
