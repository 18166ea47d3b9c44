"""Scoring that begins before it is asked for gives the same scores and the same errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from reward_groups import make_group
from run_processes import happens

from rlft.reward.workers.scorer import AheadScorer, RewardError, Scorer, specs
from rlft.types import Group, Scores

Order = dict[str, dict[str, object]]
LENGTHS: Order = {name: {"_target_": f"naughty.{name}", "weight": 0.5} for name in ("length", "naughty")}
GROUPS = [make_group(["a" * (3 * i + j) for j in range(3)], id=f"p{i}") for i in range(6)]


@pytest.fixture
def open_scorers() -> Iterator[Callable[..., tuple[Scorer, AheadScorer]]]:
    opened: list[Scorer | AheadScorer] = []

    def both(rewards: Order, on_error: object = "stop", timeout_s: float = 20.0) -> tuple[Scorer, AheadScorer]:
        alone = Scorer(specs(rewards), 1, timeout_s, on_error)  # type: ignore[arg-type]
        ahead = AheadScorer(specs(rewards), 1, timeout_s, on_error)  # type: ignore[arg-type]
        opened.extend([alone, ahead])
        return alone, ahead

    yield both
    for scorer in opened:
        scorer.close()


def plain(scores: Scores) -> object:
    return scores.total.tolist(), {name: values.tolist() for name, values in scores.by_reward.items()}


def naughty(name: str) -> Order:
    return {"bad": {"_target_": f"naughty.{name}", "weight": 1.0}}


def test_scores_do_not_depend_on_when_scoring_began(open_scorers: Callable[..., tuple[Scorer, AheadScorer]]) -> None:
    alone, ahead = open_scorers(LENGTHS)
    expected = plain(alone(GROUPS))
    later = GROUPS[4:]
    ahead.begin(GROUPS[2:4])
    ahead.begin(GROUPS[:1])
    ahead.begin(later)
    assert plain(ahead(GROUPS[:4])) == plain(alone(GROUPS[:4]))  # one of them was not begun
    assert plain(ahead(later)) == plain(alone(later))
    ahead.begin(GROUPS[3:])
    assert plain(ahead(GROUPS)) == expected


def test_a_group_that_was_begun_is_not_scored_again(
    open_scorers: Callable[..., tuple[Scorer, AheadScorer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ahead = open_scorers(LENGTHS)
    asked: list[str] = []
    run = ahead.run

    def counted(tasks: Sequence[object], stop_when: object) -> object:
        asked.extend(task.group.prompt.id for task in tasks)  # type: ignore[attr-defined]
        return run(tasks, stop_when)  # type: ignore[arg-type]

    monkeypatch.setattr(ahead, "run", counted)
    ahead.begin(GROUPS[:2])
    assert happens(lambda: asked == ["p0", "p1"], within_s=60)  # before anybody asks for scores
    ahead(GROUPS[:3])
    assert asked == ["p0", "p1", "p2"]


def test_a_reward_that_fails_stops_the_run_or_gets_its_fixed_score(
    open_scorers: Callable[..., tuple[Scorer, AheadScorer]],
) -> None:
    groups: list[Group] = [make_group(["fine"], id="p0"), make_group(["raise", "fine"], id="p1")]
    alone, ahead = open_scorers(naughty("naughty"))
    ahead.begin(groups)
    with pytest.raises(RewardError) as expected:
        alone(groups)
    with pytest.raises(RewardError) as caught:
        ahead(groups)
    assert str(caught.value) == str(expected.value)
    equal = [make_group(["raise", "fine"], id="p1"), make_group(["fine", "fine"], id="p2")]
    alone, ahead = open_scorers(naughty("naughty"), on_error=-2.0)
    ahead.begin(equal)
    assert plain(ahead(equal)) == plain(alone(equal))
    assert (ahead.num_failures, ahead.last_failure) == (alone.num_failures, alone.last_failure)
    assert ahead.num_failures == 1


def test_closing_does_not_wait_for_a_reward(open_scorers: Callable[..., tuple[Scorer, AheadScorer]]) -> None:
    _, ahead = open_scorers(naughty("naughty"), timeout_s=60.0)
    ahead(GROUPS[:1])  # the worker is up
    ahead.begin([make_group(["hang"])])
    time.sleep(0.3)
    begun = time.monotonic()
    ahead.close()
    assert time.monotonic() - begun < 50
