"""Decoding in CUDA graphs on the pretended card: the bits of the steps that they record, a launch a token, no waits."""

from __future__ import annotations

import card_decoding
import card_graphs
import pytest
from slow_cases import slow, slow_but


@pytest.mark.parametrize("name", slow_but("qwen2", ("qwen2", "no biases", "norms over heads", "few adapters")))
def test_a_replay_gives_the_bits_of_the_step_in_one_launch_a_token_and_one_wait_for_several(on_card, name: str) -> None:
    """For chunks of 12, 8 and 20 rows, versions of the adapter, and ways of sampling; rows end at different times."""
    found = on_card.found("card_graphs:case", name)
    assert len(found["same"]) == len(card_graphs.WAYS) + 2
    for way, (is_same, lengths, replays, problem) in found["same"].items():
        assert is_same, way
        assert problem is None, way
        assert replays > 8, way
        assert len(lengths) > 4 or "greedy" in way, way
    launches, waits, uploads = found["counted"]["graphs"]
    assert launches["graph"] == card_decoding.TOKENS
    assert sum(launches.values()) <= card_decoding.TOKENS + 2, launches
    assert list(waits.values()) == [1]
    assert not uploads
    one_by_one, *others = found["counted"]["without"]
    assert sum(one_by_one.values()) > 40 * card_decoding.TOKENS
    assert others == [waits, {}], "nothing is read in between there either"


QUICK, FAULTS = card_graphs.QUICK_FAULTS, card_graphs.FAULTS


@pytest.mark.parametrize(
    "names", [QUICK, slow([name for name in FAULTS if name not in QUICK])], ids=["quick", "others"]
)
def test_what_would_make_replays_wrong_is_seen(on_card, names: list[str]) -> None:
    """A fault gives other results, unless the engine notices it and computes the steps without graphs."""
    found = on_card.found("card_graphs:faults", *names)
    seen = {name: [same, said and said.partition(" @ ")[0], *more] for name, (same, said, *more) in found.items()}
    expected = {name: FAULTS[name] for name in names}
    assert seen == {name: [fault.same, fault.said, fault.races, fault.left] for name, fault in expected.items()}


def test_memory_of_graphs_is_lost_with_the_next_replay_of_another_one_and_with_the_graph(on_card) -> None:
    assert on_card.found("card_graphs:stand_in") == [[9, 9], [2, 9], [9, 3], [2, 9], [9, 9]]


DECODINGS = {"quick": ["all", "longer prompts later"], "all": [*card_graphs.DECODINGS]}


@pytest.mark.parametrize("which", slow_but("quick", DECODINGS))
def test_the_plan_has_the_memory_that_graphs_hold(on_card, which: str) -> None:
    for name, (planned, counted) in on_card.found("card_graphs:memory", *DECODINGS[which]).items():
        assert set(planned) == {"keys and values for graphs", "CUDA graphs"}
        assert 0.9 < sum(planned.values()) / counted < 1.15, (name, planned, counted)


KINDS = {"quick": card_graphs.QUICK_KINDS, "all": [*card_graphs.KINDS]}


@pytest.mark.parametrize("which", slow_but("quick", KINDS))
def test_each_kind_of_model_has_graphs_or_says_why_not(on_card, which: str) -> None:
    for name, (row, same, replays, problem, uncovered) in on_card.found("card_graphs:kinds", *KINDS[which]).items():
        value, why = card_graphs.KINDS[name][1]
        assert (row, same, problem, uncovered) == ([value, why], True, None, 0), name
        assert (replays > 8) == (value != "no"), name
