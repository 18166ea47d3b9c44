"""The model of a step on many engines and ranks, against numbers that a hand can derive; and its two commands."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import simulate_cluster
from cluster_model import Group, Layout, StageCosts, apart, lane_costs, parts, sampled, served, simulate, speed
from simulate_cluster import positive_fit

SCRIPTS = Path(__file__).parents[1] / "scripts"
COSTS = StageCosts(
    unit=1.0,
    position=0.5,
    token=0.25,
    score=0.125,
    credit=0.0,
    update=2.0,
    update_token=0.0,
    send=0.0,
    exchange=0.5,
    exchange_byte=0.25,
    publish=0.5,
    load=3.0,
    rest=0.0,
    adapter_bytes=100,
    gradient_bytes=2,
    completion_bytes=10.0,
)
GROUPS: list[Group] = [(4, (2, 6)), (4, (2, 2)), (4, (4, 4)), (4, (2, 4))]
"""Of one call each with 2 completions at once: 1 + 0.5 * longest + 0.25 * tokens = 6, 3, 5, 4.5 s."""


def test_waiting_work_goes_to_whoever_is_free_first() -> None:
    # Two servers: 6 | 3, then 5 begins at 3 and ends at 8, 4.5 begins at 6.
    assert served([6, 3, 5, 4.5], 2, ()) == [6, 3, 8, 10.5]
    assert served([6, 3], 5, ()) == [6, 3]


def test_servers_that_share_a_machine_slow_each_other_down() -> None:
    # Side by side each runs at 0.6: 3 s of work take 5 s; then 3 of the 6 s are left, alone.
    assert served([6, 3], 2, (1.0, 0.6)) == [pytest.approx(8.0), pytest.approx(5.0)]
    # Three on a machine that was measured with two: 2 * 0.6 / 3 each.
    assert served([4, 4, 4], 3, (1.0, 0.6)) == [pytest.approx(10.0)] * 3
    assert [speed((1.0, 0.6), n) for n in (1, 2, 4)] == [1.0, 0.6, pytest.approx(0.3)]


def test_a_call_costs_by_its_longest_completion_and_its_tokens() -> None:
    assert [len(part) for part in parts(GROUPS, 4)] == [2, 2]
    assert sampled(GROUPS, COSTS, Layout(at_once=2))[0] == [(6.0, 2), (9.0, 2), (14.0, 2), (18.5, 2)]
    # Two groups in a call: 1 + 3 + 3 and 1 + 2 + 3.5 s.
    assert sampled(GROUPS, COSTS, Layout(at_once=4))[0] == [(7.0, 4), (13.5, 4)]
    # 18.5 s of work for two engines in 10.5 s.
    assert sampled(GROUPS, COSTS, Layout(engines=2, at_once=2))[1] == pytest.approx(18.5 / 21)


def test_scoring_begins_as_calls_are_answered() -> None:
    # The last two completions come at 18.5 s; those before are scored by then.
    assert simulate(GROUPS, COSTS, Layout(at_once=2)).score == pytest.approx(0.25)
    # At 10 s a completion the first two come at 6 s, and eight take 80 s: 86 s.
    assert simulate(GROUPS, replace(COSTS, score=10.0), Layout(at_once=2)).score == pytest.approx(86 - 18.5)


def test_ranks_go_through_their_lanes_and_exchange_each_of_them() -> None:
    costs, lanes = replace(COSTS, update_token=0.01), lane_costs(GROUPS, 4)
    alone = simulate(GROUPS, costs, Layout(lanes=4, at_once=2))
    assert alone.update == pytest.approx(2.0 + 0.01 * sum(lanes))
    # Four lanes of 0.5 + 2 bytes * 0.25 s, once between two ranks and over two hops of a tree between four.
    two = simulate(GROUPS, costs, Layout(ranks=2, lanes=4, at_once=2))
    assert two.update == pytest.approx(2.0 + 0.01 * max(lanes[0] + lanes[1], lanes[2] + lanes[3]) + 4)
    four = simulate(GROUPS, costs, Layout(ranks=4, lanes=4, at_once=2))
    assert four.update == pytest.approx(2.0 + 0.01 * max(lanes) + 8)
    assert four.balance == pytest.approx(sum(lanes) / 4 / max(lanes))


def test_what_one_machine_sends_and_receives_is_limited_by_its_network() -> None:
    costs = apart(COSTS, 50.0)
    # 16 engines on two machines get 100 bytes each machine: 4 s beside 0.5 + 3 s.
    step = simulate(GROUPS, costs, Layout(engines=16, at_once=2))
    assert step.publish == pytest.approx(0.5 + 3.0 + 4.0)
    assert step.driver["rollouts in"] == pytest.approx(8 * 10 / 50)
    # Nine ranks are on two machines, of which one has the batch already.
    more = simulate(GROUPS, costs, Layout(ranks=9, lanes=9, at_once=2))
    assert more.driver["batch out"] == pytest.approx(8 * 10 / 50)
    assert step.overlapped == pytest.approx(
        max(step.sample + step.score, step.credit + step.update, sum(step.driver.values())) + step.publish
    )


def test_costs_are_fitted_and_never_negative() -> None:
    rows = [(1, 10), (1, 20), (2, 40)]
    assert positive_fit(rows, [3 + 0.5 * 10, 3 + 0.5 * 20, 2 * 3 + 0.5 * 40]) == pytest.approx([3, 0.5])
    # y = 2 x - 1: the constant would be -1 and becomes 0.
    found = positive_fit([(1, 1), (1, 2), (1, 4)], [1, 3, 7])
    assert found[0] == 0
    assert 1.0 < found[1] < 2.0


def test_a_table_and_a_picture_of_large_clusters_come_from_measured_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate_cluster", "predict", "--prompts", "64", "--out", str(tmp_path)])
    with pytest.raises(
        SystemExit, match=r"costs\.json is missing; make it by: python scripts/simulate_cluster\.py measure"
    ):
        simulate_cluster.main()
    (tmp_path / "costs.json").write_text(json.dumps(asdict(COSTS)))
    simulate_cluster.main()
    lines = (tmp_path / "cluster.md").read_text().splitlines()
    assert [line.split(" | ")[1:3] for line in lines[2:8]] == [
        ["1", "1"], ["4", "1"], ["16", "4"], ["64", "16"], ["256", "64"], ["1,024", "256"],
    ]  # fmt: skip
    assert (tmp_path / "cluster.png").stat().st_size > 10_000
